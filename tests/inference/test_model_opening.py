"""Models of any origin at any size."""

import pytest
import timm
import torch
from safetensors.torch import save_file

from tests.helpers.inference_files import (
    ARGS,
    COLOUR,
    MODEL,
    write_weights,
)
from visionattn.data.geometry import Geometry
from visionattn.inference.inference_options import InferenceOptions, check
from visionattn.inference.model_opening import Opened, open_model

SOFTMAX = "vit_tiny_patch16_224"
SOFTMAX_ARGS = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}


def opened(**options) -> Opened:
    options = InferenceOptions(**{"threads": None, "device": "cpu"} | options)
    check(options)
    return open_model(options, classifies=False)


def test_weights_of_ours_bring_model_classes_and_size(tmp_path):
    path = str(write_weights(tmp_path / "best.safetensors"))
    found = opened(checkpoint=path)
    assert (found.name, found.spec) == (MODEL, COLOUR)
    assert found.args.items() >= ARGS.items()
    assert found.geometry == Geometry("crop", (16, 16), None, (8, 8))
    seen = "preprocessing: center crop to 16 x 16 px"
    assert found.notes == (f"{MODEL} of {path}; {seen}",) and not found.model.training
    assert opened(checkpoint=path, img_size="native").geometry.fit == "native"


def test_a_name_without_a_checkpoint_gives_random_weights_of_the_seed_and_says_so():
    state = torch.get_rng_state()
    first, again, other = (opened(model=MODEL, args=ARGS, seed=seed) for seed in (7, 7, 8))
    said = (
        f"{MODEL} with random weights (seed 7), because there is no --checkpoint; preprocessing: "
    )
    assert first.notes[0].startswith(f"{said}center crop to 224 x 224 px")
    assert first.identity() == again.identity() != other.identity()
    assert first.identity() != opened(model=MODEL, args=ARGS, seed=7, img_size=32).identity()
    assert torch.equal(torch.get_rng_state(), state)
    assert (first.spec.in_chans, first.spec.mean) == (3, (0.485, 0.456, 0.406))
    assert first.geometry == Geometry("crop", (224, 224), None, (8, 8))


def test_a_seed_is_for_weights_that_a_file_does_not_give(tmp_path):
    state = timm.create_model(SOFTMAX, **SOFTMAX_ARGS).state_dict()
    torch.save(state, tmp_path / "whole.pt")
    body = {name: value for name, value in state.items() if not name.startswith("head")}
    torch.save(body, tmp_path / "part.pt")
    of_timm = {"model": SOFTMAX, "args": SOFTMAX_ARGS}
    with pytest.raises(
        ValueError, match="seed 3 has no effect, because .* has all weights; remove it"
    ):
        opened(seed=3, checkpoint=str(tmp_path / "whole.pt"), **of_timm)
    part = of_timm | {"checkpoint": str(tmp_path / "part.pt")}
    heads = [opened(seed=seed, **part).model.head.weight for seed in (3, 4)]
    assert not torch.equal(*heads)


def test_a_state_dict_of_timm_decides_classes_and_channels(tmp_path):
    weights = timm.create_model(SOFTMAX, num_classes=7, in_chans=1, img_size=48, **SOFTMAX_ARGS)
    torch.save(weights.state_dict(), tmp_path / "old.pt")
    found = opened(
        model=SOFTMAX, checkpoint=str(tmp_path / "old.pt"), args=SOFTMAX_ARGS, img_size=48
    )
    assert (found.spec.num_classes, found.spec.in_chans, found.spec.class_names) == (7, 1, ())
    x = torch.randn(2, 1, 48, 48)
    with torch.no_grad():
        assert torch.equal(found.model(x), weights.eval()(x))


def test_a_model_built_for_one_size_takes_others(tmp_path):
    path = tmp_path / "best.safetensors"
    write_weights(path, name=SOFTMAX, args=SOFTMAX_ARGS | {"img_size": 16})
    reference = timm.create_model(
        SOFTMAX, num_classes=4, img_size=16, dynamic_img_size=True, **SOFTMAX_ARGS
    ).eval()
    native, larger = (opened(checkpoint=str(path), img_size=size) for size in ("native", 32))
    reference.load_state_dict(native.model.state_dict())
    for shape, found in (((16, 16), native), ((24, 40), native), ((32, 32), larger)):
        x = torch.randn(1, 3, *shape)
        with torch.no_grad():
            assert torch.allclose(found.model(x), reference(x), atol=1e-5), shape
    windows = {"depths": [1, 1], "num_heads": [1, 2], "embed_dim": 24}
    found = opened(model="swin_tiny_patch4_window7_224", args=windows, img_size="native")
    assert found.model(torch.zeros(1, 3, 32, 48)).shape == (1, 1000)


OURS = {"checkpoint": "best.safetensors"}
BAD = [
    ({}, "--checkpoint (the best.safetensors of a run) or"),
    ({"model": "scaleformer_vit_q"}, "did you mean"),
    ({"model": MODEL, "args": {"num_hats": 2}}, "num_hats"),
    ({"model": MODEL, "pretrained": True}, "no pretrained weights"),
    ({"model": MODEL, "pretrained": True, "checkpoint": "x"}, "pass either pretrained"),
    ({"checkpoint": "nowhere.safetensors"}, "no checkpoint at nowhere.safetensors"),
    ({"checkpoint": "cut.safetensors"}, "truncated"),
    ({"checkpoint": "plain.safetensors"}, "pass --model"),
    ({"checkpoint": "plain.safetensors", "model": MODEL}, "no tensor of plain.safetensors fits"),
    ({"checkpoint": "garbled.pt", "model": MODEL}, "garbled.pt"),
    (OURS | {"model": MODEL}, f"states its model, {MODEL}; remove --model"),
    (OURS | {"args": {"depth": 1}}, "args need --model"),
    (OURS | {"workers": 10**6}, "workers must be at most "),
    (OURS | {"device": "cuda:99"}, "is not available"),
    (
        {"model": "cait_xxs24_224", "args": {"depth": 1}, "img_size": "native"},
        "accepts only images of 224 x 224 pixels",
    ),
]


@pytest.mark.parametrize(("options", "part"), BAD, ids=lambda value: str(value)[:60])
def test_what_cannot_be_opened_is_refused_in_one_line(tmp_path, monkeypatch, options, part):
    monkeypatch.chdir(tmp_path)
    whole = write_weights(tmp_path / "best.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:2000])
    (tmp_path / "garbled.pt").write_bytes(b"\x80nothing")
    save_file({"conv.weight": torch.zeros(3, 3)}, tmp_path / "plain.safetensors")
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        opened(**options)
    assert part in str(caught.value) and "\n" not in str(caught.value)
