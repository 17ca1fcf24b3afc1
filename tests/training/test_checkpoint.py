"""Weights and states on the disk: what is read back, what is refused, and where weights from
elsewhere go.
"""

import io
import json
import os
import pickle

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import visionattn
from tests.helpers.small_runs import MODEL, SPEC, small_config, small_trainer
from visionattn.cli.exit_codes import run_tool
from visionattn.models.state_dicts import shorten
from visionattn.models.weight_placement import place_weights
from visionattn.models.weights import DataSpec, load_model, read_pickle, read_state_dict, save_model
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
    model = small_model()
    save_model(tmp_path / "a.safetensors", model, "scaleformer_vit_t", MODEL, SPEC)
    state = torch.get_rng_state()
    again = visionattn.load_model(tmp_path / "a.safetensors")
    assert torch.equal(torch.get_rng_state(), state)
    images = torch.rand(3, 1, 12, 20)
    assert torch.equal(again(images), model.eval()(images)) and not again.training
    assert again.data_spec == SPEC and isinstance(again.data_spec.mean, tuple)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        args = json.loads(file.metadata()["args"])
        assert args.items() >= MODEL.items() and args["attention"] == "kernelized"
        assert file.metadata()["model"] == "scaleformer_vit_t"


def test_the_previous_state_stays_until_the_new_one_reads_back(tmp_path, monkeypatch, capsys):
    """As on a disk that takes what is written and gives something else back."""
    last, previous, real = tmp_path / "last.pt", tmp_path / "previous.pt", torch.save
    for step in (1, 2):
        save_state(last, {"step": step, "weights": torch.arange(500.0)}, previous=previous)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def lossy(state, file):
        buffer = io.BytesIO()
        real(state, buffer)
        content = bytearray(buffer.getvalue())
        content[content.index(torch.arange(500.0).numpy().tobytes()) + 99] ^= 4
        file.write(content)

    monkeypatch.setattr(torch, "save", lossy)
    assert (
        run_tool(
            lambda: save_state(last, {"step": 3, "weights": torch.arange(500.0)}, previous=previous)
        )
        == 2
    )
    said = "the written file does not read back; check the disk"
    assert capsys.readouterr().err == f"error: {last}: {said}\n"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_specification_makes_the_input_of_the_model():
    images = torch.randint(
        0, 256, (2, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    spec = DataSpec(3, 4, (), (0.1, 0.2, 0.3), (0.5, 0.25, 2.0), None, 5)
    expected = torch.stack(
        [(images[:, i] / 255 - spec.mean[i]) / spec.std[i] for i in range(3)], dim=1
    )
    torch.testing.assert_close(spec.prepare(images), expected)
    # values of more than 8 bits come as fractions
    torch.testing.assert_close(spec.prepare(images / 255), expected)
    one_hot = DataSpec(256, 10, (), (), (), "grey_one_hot", 5).prepare(images[:, :1])
    assert one_hot.shape == (2, 256, 5, 7) and one_hot.dtype == torch.float32
    assert torch.equal(one_hot.argmax(1), images[:, 0].long())
    assert torch.equal(one_hot.sum(1), torch.ones(2, 5, 7))
    for wrong in (images[:, :1], images.double(), images[0]):
        with pytest.raises(ValueError, match=r"expected images of uint8, .*\[B, 3, H, W\], got "):
            spec.prepare(wrong)
    with pytest.raises(ValueError, match=r"expected uint8 images \[B, 1, H, W\], got "):
        DataSpec(256, 10, (), (), (), "grey_one_hot", 5).prepare(images[:, :1] / 255)


def test_files_that_are_no_models_are_one_line_each(tmp_path):
    path = tmp_path / "a.safetensors"
    model = small_model()

    def line() -> str:
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            load_model(path)
        assert "\n" not in str(error.value) and str(path) in str(error.value)
        return str(error.value)

    assert "no checkpoint at" in line()
    save_model(path, model, "scaleformer_vit_t", MODEL, SPEC)
    half = path.read_bytes()[: path.stat().st_size // 2]
    for content, reason in (
        (half, "is truncated or not a safetensors file"),
        (b"", "is truncated or not a safetensors file"),
        (pickle.dumps({"a": Harm(tmp_path / "harm")}), "expected a safetensors file, got a pickle"),
    ):
        path.write_bytes(content)
        assert reason in line() and not (tmp_path / "harm").exists()
    about = {"format": "visionattn", "version": "3", "model": "scaleformer_vit_t"}
    for metadata, reason in (
        (None, "does not state its model; pass weights of other projects as"),
        (about, "has a damaged description of its model"),
        (about | {"version": "4"}, "expected format 3, got 4 ("),
    ):
        save_file(model.state_dict(), path, metadata=metadata)
        assert reason in line()
    for name, args, reason in (
        ("resnet_of_mars", {}, "holds a model 'resnet_of_mars', which timm does not know"),
        ("scaleformer_vit_t", {"embed_dim": 24}, "of another shape"),
        ("scaleformer_vit_t", {"depth": 3}, "missing (first: blocks.2."),
        ("scaleformer_vit_t", {"checkpoint_path": "evil.pt"}, "refers to other weights"),
        ("scaleformer_vit_t", {"horizn": 3}, "that cannot be built with these args: patch_size=4"),
        ("scaleformer_vit_t", {"norm_layer": "foo"}, "(KeyError: 'foo')"),
    ):
        save_model(path, model, name, MODEL | args, SPEC)
        assert reason in line()


@pytest.mark.parametrize("protocol", ["torch", 2])
def test_a_checkpoint_that_would_run_code_is_refused_and_the_code_does_not_run(tmp_path, protocol):
    path, harm = tmp_path / "evil.pt", tmp_path / "harm"
    content = {"model": {"head.weight": torch.zeros(2)}, "extra": Harm(harm)}
    if protocol == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps({"extra": Harm(harm)}, protocol=protocol))
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
    source = plain_vit(num_classes=7, patch_size=8)
    torch.save({"state_dict": source.state_dict()}, tmp_path / "vit.pth")
    model = small_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    placement = place_weights(model, "scaleformer_vit_t", tmp_path / "vit.pth")
    after = model.state_dict()
    assert torch.equal(
        after["blocks.1.attn.qkv.weight"], source.state_dict()["blocks.1.attn.qkv.weight"]
    )
    assert placement.resampled == ["patch_embed.proj.weight 16x1x8x8 -> 16x1x4x4"]
    assert "head.weight" in placement.new and "head.weight" in placement.left_out
    assert "pos_embed" in placement.left_out
    own = [key for key in after if ".relative." in key or "temperature" in key]
    assert own and set(own) <= set(placement.new)
    for key in after:
        assert (key in placement.taken) != (key in placement.new), key
        if key in placement.new:
            assert torch.equal(after[key], before[key]), key
    text = "\n".join(placement.lines())
    assert (
        f"{len(placement.taken)} of {len(after)} tensors come from {tmp_path / 'vit.pth'}" in text
    )
    for part in ("resampled (1): patch_emb", "left out (3): ", "blocks.{0-1}.attn.relative"):
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
    text = "\n".join(placement.resampled)
    assert "patch_embed.proj.weight 16x1x4x4 -> 16x3x8x8" in text
    assert "blocks.0.attn.relative" in text


def test_weights_of_which_nothing_fits_are_refused(tmp_path):
    save_file(
        {"conv1.weight": torch.zeros(8, 3, 7, 7), "norm.weight": torch.ones(16)},
        tmp_path / "cnn.safetensors",
    )
    model = small_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match="no tensor of .*cnn.safetensors fits the model scaleformer_vit_t"
    ) as error:
        place_weights(model, "scaleformer_vit_t", tmp_path / "cnn.safetensors")
    assert "\n" not in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_names_that_differ_in_the_block_alone_are_written_once():
    names = ["head.weight", "blocks.0.a", "blocks.1.a", "blocks.2.a", "blocks.1.b.0.c"]
    assert shorten(names) == "head.weight, blocks.{0-2}.a, blocks.1.b.0.c"
    several = [f"blocks.{i}.a" for i in (10, 0, 1, 2, 4, 5, 12)]
    assert shorten(several) == "blocks.{0-2,4-5,10,12}.a"
    assert shorten([f"n{i}" for i in "abcde"], most=2) == "na, nb and 3 more"


def test_a_removed_argument_is_a_changed_option():
    old = {"epochs": 2, "options": {"relative": "none", "value_conv": 5}}
    new = {"epochs": 2, "options": {"value_conv": 5}}
    assert differences(old, new) == ["  options.relative is now None, was none"]
    assert differences(new, old) == ["  options.relative is now none, was None"]
