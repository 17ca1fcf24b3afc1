"""Trainings that start from a timm ViT, which becomes one of our models: what is built and kept,
and how such a run goes on.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
import yaml
from safetensors.torch import save_file

from tests.helpers.small_runs import lines_of, same, small_config
from visionattn.model_config import ModelConfig
from visionattn.models.conversion import from_softmax
from visionattn.models.weights import DataSpec, load_model, read_metadata, save_model
from visionattn.training.checkpoint import started_model
from visionattn.training.config import TrainConfig

pytestmark = pytest.mark.usefixtures("small")
SPEC = DataSpec(1, 4, (), (0.25,), (0.5,), None, 16)
BODY = dict(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3)


@pytest.fixture
def teacher(tmp_path):
    """A file of a timm ViT as ``visionattn train`` writes it, and the model."""
    torch.manual_seed(3)
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=7, in_chans=3, **BODY).eval()
    spec = DataSpec(3, 7, (), (0.1, 0.2, 0.3), (0.5, 0.5, 0.5), None, 16)
    path = tmp_path / "teacher.safetensors"
    save_model(path, vit, "vit_tiny_patch16_224", BODY, spec)
    return str(path), vit


def started(source, name="converted_vit", **args):
    config = TrainConfig(init_from=source)
    return started_model(config, ModelConfig(name, args), SPEC)


def test_a_teacher_in_a_file_of_ours_gives_the_body_and_the_weights(teacher):
    path, vit = teacher
    model, built, args, lines = started(path, softmax_blocks=[-1], drop_path_rate=0.2)
    own, given = model.state_dict(), vit.state_dict()
    taken = [name for name in given if not name.startswith(("head.", "patch_embed.proj.w"))]
    assert all(torch.equal(own[name], given[name]) for name in taken)
    filters = given["patch_embed.proj.weight"].sum(1, keepdim=True)
    torch.testing.assert_close(own["patch_embed.proj.weight"], filters)
    assert own["head.weight"].shape == (4, 24) and model.in_chans == 1
    assert [block.attn.attention for block in model.blocks] == ["kernelized", "softmax"]
    assert built == ModelConfig("converted_vit", args) and args["drop_path_rate"] == 0.2
    assert lines[0] == path and lines[1].endswith("tensors come from vit_tiny_patch16_224")
    assert (
        lines[-1]
        == "  the teacher was trained with other mean and std: --data.mean 0.2 --data.std 0.5"
    )
    rebuilt = timm.create_model("converted_vit", num_classes=4, in_chans=1, **args)
    rebuilt.load_state_dict(own)


def test_a_name_of_ours_says_which_attention_and_which_size(teacher):
    path, _ = teacher
    model, built, args, _ = started(path, "taylorshift_abs_vit_t", embed_dim=24, depth=2)
    assert built.name == "converted_vit" and model.blocks[0].attn.attention == "taylorshift"
    assert model.blocks[0].attn.relative is None and args["temperature_init"] == 1.0
    line = r"^expected a model 24 wide, as the initial weights, got 192 \(scaleformer_vit_t\); "
    with pytest.raises(ValueError, match=line):
        started(path, "scaleformer_vit_t")
    with pytest.raises(ValueError, match="^expected a model 2 deep, as .*, got 12 "):
        started(path, "scaleformer_vit_t", embed_dim=24)


def test_a_body_beside_weights_of_another_is_refused_with_the_way_on(teacher, tmp_path):
    path, vit = teacher
    converted = tmp_path / "converted.safetensors"
    from_softmax(vit).save(converted)
    way_on = r"; remove it \(--model.args '{}' clears the arguments of a configuration\)"
    with pytest.raises(ValueError, match=r"24 wide, .*got 64 \(converted_vit\)" + way_on):
        started(path, embed_dim=64)
    with pytest.raises(ValueError, match="model.args depth 2 as in .*, got 4" + way_on):
        started(str(converted), depth=4)
    started(str(converted), depth=2, drop_path_rate=0.1)


def test_a_state_dict_without_its_body_names_the_command_that_converts_it(tmp_path):
    torch.save({"model": {"a": torch.zeros(1)}}, tmp_path / "vit.pth")
    said = "does not name the model of its weights; convert it first: `visionattn convert .*vit.pth"
    with pytest.raises(ValueError, match=said):
        started(str(tmp_path / "vit.pth"))


def test_names_of_timm_mean_the_weights_that_timm_has(tmp_path, monkeypatch):
    vit = timm.create_model("test_vit")
    save_file(vit.state_dict(), tmp_path / "model.safetensors")
    asked = []

    def create(name, pretrained=False, **args):
        asked.append(pretrained)
        if pretrained:
            args["pretrained_cfg_overlay"] = dict(file=str(tmp_path / "model.safetensors"))
        return timm.models.create_model(name, pretrained, **args)

    monkeypatch.setattr("visionattn.models.conversion.timm.create_model", create)
    model, _, _, lines = started("test_vit.r160_in1k")
    assert True in asked
    assert torch.equal(model.blocks[5].attn.qkv.weight, vit.blocks[5].attn.qkv.weight)
    assert lines[0] == "test_vit.r160_in1k, timm's weights"
    asked.clear()
    with pytest.raises(ValueError, match="resnet10t cannot be converted: its class is ResNet"):
        started("resnet10t.c3_in1k")
    assert True not in asked  # nothing is fetched for it


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (dict(source=None), "converted_vit needs a teacher; pass --init-from"),
        (dict(output_gate=True), "got output_gate; others are the teacher's"),
        (dict(num_classes=3), "model.args.num_classes is set by the data"),
        (dict(mlp_ratio=2), "got mlp_ratio; others are the teacher's, 4.0"),
        (dict(softmax_blocks=[2]), "softmax_blocks: expected blocks 0 to 1"),
        (dict(layers=2), "expected options among .*, got layers"),
        (dict(source="nowhere.pth"), "no checkpoint at nowhere.pth"),
    ],
)
def test_what_stands_against_a_start_is_one_line(teacher, options, line):
    with pytest.raises((ValueError, FileNotFoundError), match=line):
        started(**(dict(source=teacher[0]) | options))


@pytest.fixture
def finished(teacher, tmp_path):
    """A run of one epoch from a teacher, and its model as its configuration says it."""
    config = small_config(tmp_path, init_from=teacher[0], epochs=1)
    config = replace(config, model=ModelConfig("converted_vit", dict(softmax_blocks=[-1])))
    lines_of(config)
    kept = yaml.safe_load((tmp_path / "small" / "config.yaml").read_text())["model"]
    return config, tmp_path / "small" / "best.safetensors", ModelConfig(kept["name"], kept["args"])


def test_a_run_from_a_teacher_is_kept_with_its_body_and_goes_on(finished, teacher):
    config, best, kept = finished
    model = load_model(best)
    assert read_metadata(best)["model"] == kept.name == "converted_vit"
    assert model.embed_dim == kept.args["embed_dim"] == 24
    assert model.blocks[1].attn.attention == "softmax"
    # With the flags of before, without the teacher's file, and with the kept configuration.
    Path(teacher[0]).unlink()
    lines_of(replace(config, resume=True, epochs=2))
    lines_of(replace(config, resume=True, epochs=3, model=kept))
    for other in (dict(softmax_blocks=[0]), dict(softmax_blocks=[1], value_conv=5)):
        changed = replace(config, model=ModelConfig("converted_vit", other))
        with pytest.raises(ValueError, match="the run has model.args.*; resume with the same"):
            lines_of(replace(changed, resume=True, epochs=4))


def test_a_kept_configuration_makes_the_run_again_and_its_weights_start_another(finished, tmp_path):
    config, best, kept = finished
    lines_of(replace(config, model=kept, run="again"))
    own = load_model(best).state_dict()
    same(load_model(tmp_path / "again" / best.name).state_dict(), own)
    model, built, _, lines = started(str(best))
    assert built.args["softmax_blocks"] == [1] and lines[0].startswith("34 of 34 tensors come")
    same(model.state_dict(), own)
