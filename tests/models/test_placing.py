"""``timm.create_model(name, checkpoint_path=FILE)``: files of plain ViTs and of ours."""

import pytest
import torch
from safetensors.torch import save_file
from timm.models import create_model

from visionattn.models.registration import create
from visionattn.models.weights import DataSpec, save_model

SMALL = dict(embed_dim=24, depth=2, num_heads=3, num_classes=5)
FILES = ("vit.safetensors", "vit.pth")
FRESH = {
    "scaleformer_vit_t": "relative.table, value_conv.weight, output_gate.weight",
    "taylorshift_vit_t": "temperature, relative.table, value_conv.weight, output_gate.weight",
    "taylorshift_abs_vit_t": "temperature",
}


@pytest.fixture
def vit(tmp_path):
    """A plain ViT, and its weights in both formats."""
    torch.manual_seed(0)
    model = create_model("vit_tiny_patch16_224", **SMALL)
    save_file(model.state_dict(), tmp_path / "vit.safetensors")
    torch.save({"state_dict": model.state_dict()}, tmp_path / "vit.pth")
    return model


@pytest.mark.parametrize("name, file", list(zip(FRESH, FILES * 2, strict=False)))
def test_a_file_of_a_plain_vit_is_loaded_and_what_it_lacks_is_named(vit, tmp_path, name, file):
    with pytest.warns(UserWarning) as said:
        model = create_model(name, checkpoint_path=str(tmp_path / file), **SMALL)
    listed = ", ".join(f"blocks.{{0-1}}.attn.{part}" for part in FRESH[name].split(", "))
    (line,) = (str(each.message) for each in said)
    assert line == f"not in the weights, kept at their initial values: {listed}"
    own, given = model.state_dict(), vit.state_dict()
    if "abs" not in name:  # no absolute position, and the last norm after pooling
        del given["pos_embed"]
        given |= {f"fc_norm.{part}": given.pop(f"norm.{part}") for part in ("weight", "bias")}
    assert all(torch.equal(own[key], given[key]) for key in given)


def test_the_body_of_a_segmentation_is_loaded_and_a_head_is_new(tmp_path):
    """Blocks above those that the head of pixels reads are not in the file."""
    args = dict(embed_dim=24, depth=4, num_heads=3, head_stride=4)
    args |= dict(head_blocks=[-4, 1], softmax_blocks=[-3, -1])
    masks = create("taylorshift_vit_t", "segmentation", 3, 3, args)
    spec = DataSpec(3, 3, (), (0.5,) * 3, (0.5,) * 3, None, 32, task="segmentation")
    path = str(tmp_path / "best.safetensors")
    save_model(path, masks, "taylorshift_vit_t", args, spec)
    with pytest.warns(UserWarning, match="kept at their initial values: .*head.weight"):
        model = create_model("taylorshift_vit_t", checkpoint_path=path, **SMALL)
    for name, value in masks.backbone.blocks.state_dict().items():
        assert torch.equal(model.blocks.state_dict()[name], value)
    with pytest.warns(UserWarning, match="kept at their initial values: pyramid.levels"):
        wrapper = create_model(
            "taylorshift_vit_t_pyramid", checkpoint_path=path, features_only=True, **SMALL
        )
    weight = masks.backbone.blocks[1].mlp.fc1.weight
    assert torch.equal(wrapper.model.blocks[1].mlp.fc1.weight, weight)


def test_what_is_missing_of_a_file_of_ours_is_still_an_error():
    model = create_model("taylorshift_vit_t", **SMALL)
    state = model.state_dict()
    for part in ("blocks.1.attn.relative.table", "mlp.fc1.weight", "fc_norm.weight", "attn.relat"):
        less = {name: value for name, value in state.items() if part not in name}
        with pytest.raises(RuntimeError, match=part):
            model.load_state_dict(less)


def test_a_plain_vit_that_lacks_a_part_is_still_an_error(vit):
    model = create_model("scaleformer_vit_t", **SMALL)
    state = vit.state_dict()
    del state["blocks.1.attn.proj.weight"]
    with (
        pytest.warns(UserWarning, match="kept at their initial values"),
        pytest.raises(RuntimeError, match="blocks.1.attn.proj.weight"),
    ):
        model.load_state_dict(state)


def test_without_strict_the_caller_sees_what_is_missing(vit):
    model = create_model("scaleformer_vit_t", **SMALL)
    found = model.load_state_dict(vit.state_dict(), strict=False)
    assert found.unexpected_keys == ["pos_embed", "norm.weight", "norm.bias"]
    assert len(found.missing_keys) == 2 * 3 + 2
