"""Weights and states on the disk: what is read back, what is refused, and where weights from
elsewhere go.
"""

import io
import json
import os

import pytest
import timm
import torch
from safetensors.torch import save_file

import visionattn
from tests.helpers.small_runs import MODEL, SPEC, same, small_config, small_trainer
from tests.helpers.tools import written
from visionattn.models.registration import DEFAULTS, complete, is_ours
from visionattn.models.weight_placement import place_weights
from visionattn.models.weights import (
    DataSpec,
    load_model,
    read_metadata,
    read_pickle,
    read_state_dict,
    save_model,
)
from visionattn.training.checkpoint import differences, read_state, save_state

PLAIN = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}


def small_model(**args) -> torch.nn.Module:
    return timm.create_model(
        "scaleformer_vit_t", **({"num_classes": 4, "in_chans": 1} | MODEL | args)
    )


def plain_vit(**args) -> torch.nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", **({"num_classes": 4, "in_chans": 1} | PLAIN | args)
    )


class Harm:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_saved_model_comes_back_with_its_arguments_and_its_data(tmp_path):
    model, path = small_model(), tmp_path / "a.safetensors"
    save_model(path, model, "scaleformer_vit_t", MODEL, SPEC)
    state = torch.get_rng_state()
    again = visionattn.load_model(path)
    assert torch.equal(torch.get_rng_state(), state)
    images = torch.rand(3, 1, 12, 20)
    assert torch.equal(again(images), model.eval()(images)) and not again.training
    assert again.data_spec == SPEC and isinstance(again.data_spec.mean, tuple)
    metadata = read_metadata(path)
    args = json.loads(metadata["args"])
    assert args.items() >= MODEL.items() and args["attention"] == "kernelized"
    assert metadata["model"] == "scaleformer_vit_t"


@pytest.mark.parametrize("name", [name for name in timm.list_models("*vit*") if is_ours(name)])
def test_complete_arguments_build_the_same_model_whatever_the_defaults(name, monkeypatch):
    # What data, not names, say of the pixel models and of those that come with weights.
    size = {key: DEFAULTS[name][key] for key in ("img_size", "in_chans") if key in DEFAULTS[name]}
    with torch.device("meta"):
        expected, whole = timm.create_model(name), complete(name, {})
        monkeypatch.setitem(DEFAULTS, name, {})
        model = timm.create_model(name, num_classes=expected.num_classes, **size, **whole)
    shapes = ({n: x.shape for n, x in of.state_dict().items()} for of in (model, expected))
    assert next(shapes) == next(shapes)
    assert model.global_pool == expected.global_pool
    assert complete(name, whole) == whole


def test_the_previous_state_stays_until_the_new_one_reads_back(tmp_path, monkeypatch):
    """As on a disk that takes what is written and gives something else back."""
    last, previous, real = tmp_path / "last.pt", tmp_path / "previous.pt", torch.save
    weights = torch.arange(500.0)
    for step in (1, 2):
        save_state(last, {"step": step, "weights": weights}, previous=previous)
    before = written(tmp_path)

    def lossy(state, file):
        buffer = io.BytesIO()
        real(state, buffer)
        file.write(buffer.getvalue().replace(weights.numpy().tobytes(), bytes(4 * 500)))

    monkeypatch.setattr(torch, "save", lossy)
    with pytest.raises(OSError, match="the written file does not read back; check the disk"):
        save_state(last, {"step": 3, "weights": weights}, previous=previous)
    assert written(tmp_path) == before


def test_a_specification_makes_the_input_of_the_model():
    images = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8)
    spec = DataSpec(3, 4, (), (0.1, 0.2, 0.3), (0.5, 0.25, 2.0), None, 5)
    expected = [(images[:, i] / 255 - spec.mean[i]) / spec.std[i] for i in range(3)]
    # Values of more than 8 bits come as fractions.
    for given in (images, images / 255):
        torch.testing.assert_close(spec.prepare(given), torch.stack(expected, dim=1))
    one_hot = DataSpec(256, 10, (), (), (), "grey_one_hot", 5)
    wanted = torch.nn.functional.one_hot(images[:, 0].long(), 256).movedim(3, 1).float()
    torch.testing.assert_close(one_hot.prepare(images[:, :1]), wanted)
    for wrong in (images[:, :1], images.double(), images[0]):
        with pytest.raises(ValueError, match=r"expected images of uint8, .*\[B, 3, H, W\], got "):
            spec.prepare(wrong)
    with pytest.raises(ValueError, match=r"expected uint8 images \[B, 1, H, W\], got "):
        one_hot.prepare(images[:, :1] / 255)


def cut(path, model):
    save_model(path, model, NAME, MODEL, SPEC)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def about(**metadata):
    """Write tensors with these notes, as others do."""
    return lambda path, model: save_file(model.state_dict(), path, metadata=metadata or None)


def claims(name, **args):
    """Write a model that says to be another one."""
    return lambda path, model: save_model(path, model, name, MODEL | args, SPEC)


NAME = "scaleformer_vit_t"
OURS = {"format": "visionattn", "model": NAME}
NO_MODELS = [
    (lambda path, model: None, "no checkpoint at"),
    (cut, "is truncated or not a safetensors file"),
    (lambda path, model: path.touch(), "is truncated or not a safetensors file"),
    (lambda path, model: torch.save({}, path), "expected a safetensors file, got a pickle"),
    (about(), "does not state its model; pass weights of other projects as"),
    (about(**OURS, version="3"), "has a damaged description of its model"),
    (about(**OURS, version="4"), "expected format 3, got 4 ("),
    (claims("resnet_of_mars"), "holds a model 'resnet_of_mars', which timm does not know"),
    (claims(NAME, embed_dim=24), "of another shape"),
    (claims(NAME, depth=3), "missing (first: blocks.2."),
    (claims(NAME, checkpoint_path="evil.pt"), "refers to other weights"),
    (claims(NAME, horizn=3), "that cannot be built with these args: patch_size=4"),
    (claims(NAME, norm_layer="foo"), "(KeyError: 'foo')"),
]


@pytest.mark.parametrize(("write", "reason"), NO_MODELS)
def test_files_that_are_no_models_are_one_line_each(tmp_path, write, reason):
    path = tmp_path / "a.safetensors"
    write(path, small_model())
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load_model(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    assert reason in str(error.value)


@pytest.mark.parametrize("archive", [True, False])
def test_a_checkpoint_that_would_run_code_is_refused_and_the_code_does_not_run(tmp_path, archive):
    path, harm = tmp_path / "evil.pt", tmp_path / "harm"
    content = {"model": {"head.weight": torch.zeros(2)}, "extra": Harm(harm)}
    torch.save(content, path, _use_new_zipfile_serialization=archive)
    for read in (
        read_pickle,
        read_state_dict,
        read_state,
        lambda path: place_weights(small_model(), "scaleformer_vit_t", path),
    ):
        with pytest.raises(ValueError, match="evil.pt .*run code when unpickled") as error:
            read(path)
        assert "\n" not in str(error.value) and not harm.exists()


@pytest.mark.parametrize(
    "nest",
    [
        lambda tensors: tensors,
        lambda tensors: {"model": tensors, "epoch": 3},
        lambda tensors: {"state_dict": {f"module.{key}": value for key, value in tensors.items()}},
        lambda tensors: {"model": {f"_orig_mod.{key}": value for key, value in tensors.items()}},
        lambda tensors: {
            "model": {key: value * 0 for key, value in tensors.items()},
            "ema": tensors,
            "optimizer": {"a": 1},
        },
        lambda tensors: {"model": tensors, "ema": None},
    ],
)
def test_the_tensors_of_a_state_dict_are_found_however_it_is_nested(tmp_path, nest):
    tensors = {"a.weight": torch.arange(3.0), "b": torch.ones(2)}
    torch.save(nest(tensors), tmp_path / "a.pth")
    found = read_state_dict(tmp_path / "a.pth")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensors[key]) for key in tensors)


def test_weights_of_a_plain_vit_are_placed_and_the_rest_is_listed(tmp_path):
    source = plain_vit(num_classes=7, patch_size=8).state_dict()
    torch.save({"state_dict": source}, tmp_path / "vit.pth")
    model = small_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    placement = place_weights(model, "scaleformer_vit_t", tmp_path / "vit.pth")
    after = model.state_dict()
    assert torch.equal(after["blocks.1.attn.qkv.weight"], source["blocks.1.attn.qkv.weight"])
    assert placement.resampled == ["patch_embed.proj.weight 16x1x8x8 -> 16x1x4x4"]
    own = {key for key in after if ".relative." in key} | {"head.weight"}
    assert own <= set(placement.new) and {"head.weight", "pos_embed"} <= set(placement.left_out)
    assert {*placement.taken, *placement.new} == after.keys()
    assert not set(placement.taken) & set(placement.new)
    assert all(torch.equal(after[key], before[key]) for key in placement.new)
    text = "\n".join(placement.lines())
    for part in (
        f"{len(placement.taken)} of {len(after)} tensors come from {tmp_path / 'vit.pth'}",
        "resampled (1): patch_emb",
        "left out (3): ",
        "blocks.{0-1}.attn.relative",
    ):
        assert part in text


def test_our_own_weights_go_to_a_model_of_another_head_size_patch_and_horizon(tmp_path):
    trainer = small_trainer(small_config(tmp_path, optim={"ema_decay": 0.9}))
    with torch.no_grad():
        trainer.ema.module.norm.bias.fill_(0.25)
    save_state(tmp_path / "last.pt", trainer.state())
    model = small_model(num_classes=9, patch_size=8, horizon=2, in_chans=3)
    placement = place_weights(model, "scaleformer_vit_t", tmp_path / "last.pt")
    assert torch.equal(model.norm.bias, torch.full((16,), 0.25))
    assert placement.new == placement.left_out == ["head.weight", "head.bias"]
    assert "patch_embed.proj.weight 16x1x4x4 -> 16x3x8x8" in placement.resampled
    assert any("blocks.0.attn.relative" in line for line in placement.resampled)


def test_weights_of_which_nothing_fits_are_refused(tmp_path):
    cnn = {"conv1.weight": torch.zeros(8, 3, 7, 7), "norm.weight": torch.ones(16)}
    save_file(cnn, tmp_path / "cnn.safetensors")
    model = small_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="no tensor of .*cnn.safetensors fits the model scalef"):
        place_weights(model, "scaleformer_vit_t", tmp_path / "cnn.safetensors")
    same(model.state_dict(), before)


def test_a_removed_argument_is_a_changed_option():
    old = {"epochs": 2, "options": {"relative": "none", "value_conv": 5}}
    new = {"epochs": 2, "options": {"value_conv": 5}}
    assert differences(old, new) == ["  options.relative is now None, was none"]
    assert differences(new, old) == ["  options.relative is now none, was None"]
