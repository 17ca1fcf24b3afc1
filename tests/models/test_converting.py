"""``visionattn convert``: teachers from files and names, and what is refused."""

import math
import os
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file

from tests.helpers.tools import assert_one_error, load_tool, written
from visionattn.models import conversion
from visionattn.models.conversion import open_teacher
from visionattn.models.weights import (
    DataSpec,
    load_model,
    read_metadata,
    save_model,
)

convert = load_tool("convert")
TINY = dict(depth=2, embed_dim=24, num_heads=3, img_size=32, patch_size=8)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with weights of a timm ViT in several kinds of file, as the current folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=7, **TINY)
    save_file(vit.state_dict(), "vit.safetensors")
    torch.save({"state_dict_ema": vit.state_dict()}, "vit.pth")
    spec = DataSpec(3, 7, tuple("abcdefg"), (0.1,) * 3, (0.4,) * 3, None, 32, "native", 50)
    save_model("ours.safetensors", vit, "vit_tiny_patch16_224", TINY, spec)
    return vit


BODY = ["--model", "vit_tiny_patch16_224", "--args", "{depth: 2, embed_dim: 24, num_heads: 3}"]
STATE = ["vit.pth", *BODY]


@pytest.mark.parametrize("words", [["ours.safetensors"], ["vit.safetensors", *BODY], STATE])
def test_a_file_becomes_a_file_of_ours(folder, capsys, words):
    """The file of a training says what its images and classes are, others that timm's are so."""
    assert convert([*words, "--softmax-blocks", "-1", "--output", "out.safetensors"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert printed.err == "" and "32 of 34 tensors come from vit_tiny_patch16_224" in lines
    assert (
        "image size 32 x 32 px" in printed.out and "(1 of kernelized, 1 of softmax)" in printed.out
    )
    assert lines[-1].endswith("--data.name folder --data.root FOLDER")
    model, given = load_model("out.safetensors"), folder.state_dict()
    own, spec = model.state_dict(), model.data_spec
    assert all(torch.equal(own[name], value) for name, value in given.items())
    assert read_metadata("out.safetensors")["converted_from"] == "vit_tiny_patch16_224"
    if words[0] == "ours.safetensors":
        assert spec.class_names == tuple("abcdefg")
        assert (spec.fit, spec.max_patches) == ("native", 50)
        return
    cfg = timm.get_pretrained_cfg("vit_tiny_patch16_224")
    assert spec.mean == model.pretrained_cfg["mean"] == cfg.mean
    assert model.pretrained_cfg["interpolation"] == cfg.interpolation == "bicubic"
    assert model.pretrained_cfg["input_size"] == (3, 32, 32)


def test_the_options_of_from_softmax_reach_it(folder):
    Path("a.safetensors").write_text("mine")
    options = "{horizon: 2, num_classes: 3, img_size: [48, 24]}"
    words = ["--options", options, "--num-heads", "6", "--attention", "kernelized", "window"]
    assert convert([*STATE, *words, "--seed", "3", "--output", "a.safetensors", "--overwrite"]) == 0
    model = load_model("a.safetensors")
    first, second = (block.attn for block in model.blocks)
    assert (first.relative.horizon, first.num_heads, model.num_classes) == (2, 6, 3)
    assert model.patch_embed.grid_size == (6, 3) and second.attention == "window"


REFUSED = {
    "expected a teacher, e.g. vit_small_patch16_224 or a file": [],
    "; did you mean": ["vit_tinie"],
    "no checkpoint at nowhere.pth": ["nowhere.pth", *BODY],
    "vit.pth does not state the model of its weights; pass --model": ["vit.pth"],
    "vit.pth does not fit vit_tiny_patch16_224: ": ["vit.pth", "--model", "vit_tiny_patch16_224"],
    "attention 'linear': expected one of": [*STATE, "--attention", "linear"],
    "ours.safetensors states its own model": ["ours.safetensors", *BODY],
    "got the name vit_tiny_patch16_224": ["vit_tiny_patch16_224", "--model", "test_vit"],
    "timm cannot build vit_tiny_patch16_224 with depth='x': ": [
        *("vit_tiny_patch16_224", "--args.depth", "x")
    ],
    "pretrained needs a timm name, got the file vit.pth": [*STATE, "--pretrained"],
    "got NaN or infinity in blocks.1.mlp.fc1.weight": ["nan.pth", *BODY],
    "garbled.pth is a truncated or damaged checkpoint": [*("garbled.pth", *BODY)],
    "there.safetensors exists; pass --overwrite to replace it": [
        *(*STATE, "--output", "there.safetensors"),
    ],
}


def test_what_is_wrong_is_one_line_and_nothing_is_written(folder, capsys):
    Path("garbled.pth").write_bytes(b"no weights")
    Path("there.safetensors").write_text("mine")
    state = folder.state_dict()
    state["blocks.1.mlp.fc1.weight"][3, 2] = math.nan
    torch.save(state, "nan.pth")
    before = written(Path())
    for message, words in REFUSED.items():
        output = [] if "--output" in words else ["--output", "out.safetensors"]
        assert convert([*words, *output]) == 2, message
        assert_one_error(capsys, message)
        assert written(Path()) == before


def test_the_only_file_of_a_teacher_is_kept(folder, capsys):
    os.symlink("ours.safetensors", "link.safetensors")
    timm.models.save_for_hf(folder, "timm", safe_serialization=True)
    for teacher, output in {
        "ours.safetensors": "timm/../ours.safetensors",
        "link.safetensors": "ours.safetensors",
        "local-dir:timm": "timm/model.safetensors",
    }.items():
        before = Path(output).read_bytes()
        assert convert([teacher, "--output", output, "--overwrite"]) == 2
        message = f"{output} belongs to the teacher; pass another --output"
        assert_one_error(capsys, message)
        assert Path(output).read_bytes() == before


def test_weights_that_cannot_be_fetched_are_told_with_the_way_out(capsys, monkeypatch):
    """As without a network."""

    def fetch(repo_id, filename, **how):
        raise LocalEntryNotFoundError("An error happened while trying to locate the file")

    monkeypatch.setattr("timm.models._hub.hf_hub_download", fetch)
    name = "vit_small_patch14_dinov2.lvd142m"
    assert convert([name, "--pretrained", "--args", "{depth: 1}", "--output", "a"]) == 2
    assert_one_error(capsys, f"error: timm cannot build {name} with depth=1: An error happened")


def test_a_state_dict_shows_classes_channels_patch_and_size(tmp_path):
    made = dict(num_classes=0, in_chans=5, img_size=40, patch_size=10)
    vit = timm.create_model("test_vit", **made)
    save_file(vit.state_dict(), tmp_path / "vit.safetensors")
    read, lines = open_teacher(str(tmp_path / "vit.safetensors"), body="test_vit")
    assert not read.training and lines == [f"{tmp_path / 'vit.safetensors'}, weights of test_vit"]
    x = torch.randn(1, 5, 40, 40)
    with torch.no_grad():
        torch.testing.assert_close(read(x), vit.eval()(x))
    # Another size is timm's to resample, and is said.
    other, lines = open_teacher(
        str(tmp_path / "vit.safetensors"), body="test_vit", args=dict(img_size=60)
    )
    assert other.patch_embed.grid_size == (6, 6)
    assert lines[1] == "  resampled (1): pos_embed 1x17x64 -> 1x37x64"


def test_folders_of_timm_are_teachers(tmp_path):
    vit = timm.create_model("test_vit", num_classes=4)
    timm.models.save_for_hf(vit, tmp_path)
    read, lines = open_teacher(f"local-dir:{tmp_path}")
    assert lines == [f"local-dir:{tmp_path}, timm's weights"]
    assert torch.equal(read.head.weight, vit.head.weight)


def test_a_named_teacher_is_refused_before_its_weights_are_fetched(monkeypatch):
    fetched, made = [], conversion.created
    monkeypatch.setattr(
        conversion,
        "created",
        lambda name, pretrained, args: fetched.append(pretrained) or made(name, False, args),
    )
    with pytest.raises(ValueError, match="test_resnet cannot be converted"):
        open_teacher("test_resnet", pretrained=True)
    assert fetched == [False]
    vit, lines = open_teacher("test_vit", pretrained=True)
    assert fetched[1:] == [False, True] and lines == ["test_vit, timm's weights"]
    assert not vit.training
    assert "random weights" in open_teacher("test_vit")[1][0]
