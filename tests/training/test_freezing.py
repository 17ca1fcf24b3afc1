"""Frozen parts keep their weights, and nothing is stored for them."""

from dataclasses import replace

import pytest
import timm
import torch

from tests.helpers.resumed_runs import state_of
from tests.helpers.small_runs import MODEL, SPEC, lines_of, quadrants, small_config
from visionattn.model_config import ModelConfig
from visionattn.models.building import build_model
from visionattn.models.segmentation import Segmenter
from visionattn.models.weights import load_model, save_model
from visionattn.training.distributed import Processes
from visionattn.training.freezing import begin_training, freeze
from visionattn.training.training_cost import TrainingMemory

TIMM = dict(img_size=16, patch_size=4, embed_dim=16, depth=3, num_heads=2, in_chans=1)
DECODER = {"embed_dim": 16, "depth": 2, "num_heads": 2}
DROPS = dict(pos_drop_rate=0.1, proj_drop_rate=0.1, drop_path_rate=0.1, drop_rate=0.1)


@pytest.mark.parametrize("frozen", ["backbone", 1])
def test_a_run_changes_only_what_is_not_frozen(small, tmp_path, frozen):
    start = str(tmp_path / "start.safetensors")
    options = dict(epochs=1, model={"drop_path_rate": 0.2, "reg_tokens": 1}, freeze=frozen)
    config = small_config(tmp_path, init_from=start, **options)
    model, args = build_model(config.model, SPEC)
    save_model(start, model, config.model.name, args, SPEC)
    before = model.state_dict()
    learnt = {"head.weight", "head.bias"}
    if frozen == 1:
        stem = ("cls_token", "reg_token", "patch_embed.", "blocks.0.")
        learnt = {name for name, _ in model.named_parameters() if not name.startswith(stem)}
    for decay in (0.5, 0.0):
        optim = replace(config.optim, weight_decay=decay)
        said = lines_of(replace(config, run=f"d{decay}", optim=optim))
        assert any(" frozen)" in line for line in said)
        after = load_model(tmp_path / f"d{decay}" / "best.safetensors").state_dict()
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        assert "head.weight" in changed and changed <= learnt
        assert len(state_of(tmp_path / f"d{decay}")["optimizer"]["state"]) == len(learnt)


def test_frozen_parts_are_in_eval_mode_and_the_rest_is_not():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=4, **TIMM, **DROPS)
    freeze(model, 2)
    begin_training(model, 2)
    modes = {name: module.training for name, module in model.named_modules()}
    for name in ("patch_embed", "pos_drop", "blocks.0.attn.proj_drop", "blocks.1.drop_path2"):
        assert not modes[name], name
    for name in ("", "blocks.2.attn.proj_drop", "blocks.2.drop_path2", "norm", "head_drop", "head"):
        assert modes[name], name
    begin_training(model, None)
    assert all(module.training for module in model.modules())
    network = timm.create_model("resnet10t", num_classes=4)
    freeze(network, "backbone")
    begin_training(network, "backbone")
    assert not network.bn1.training and network.fc.training


def test_the_head_of_a_segmentation_model_is_what_follows_its_body():
    model = Segmenter(timm.create_model("vit_tiny_patch16_224", num_classes=0, **TIMM), 3)
    freeze(model, "backbone")
    learnt = [name for name, each in model.named_parameters() if each.requires_grad]
    assert learnt == ["head.weight", "head.bias"]


def test_the_estimate_of_memory_counts_no_optimiser_state_of_frozen_parameters(tmp_path):
    config = small_config(tmp_path)
    model, _ = build_model(config.model, SPEC)
    memory = TrainingMemory(config, model, quadrants(), torch.device("cpu"), Processes())
    whole, step = memory.kept_bytes(), memory.step_bytes((8, 16, 16))
    freeze(model, "backbone")
    config = replace(config, freeze="backbone")
    memory = TrainingMemory(config, model, quadrants(), torch.device("cpu"), Processes())
    assert memory.kept_bytes() < whole / 5 and memory.step_bytes((8, 16, 16)) < step


@pytest.mark.parametrize(
    ("name", "args", "frozen", "line"),
    [
        (
            "pixel_decoder",
            DECODER,
            "backbone",
            "freeze backbone needs a head, and PixelDec",
        ),
        ("scaleformer_vit_t", MODEL, 3, "expected freeze at most 2, the blocks of .*, got 3"),
        ("resnet10t", {}, 0, "freeze 0 needs blocks, and ResNet has none; pass backbone"),
    ],
)
def test_what_has_no_head_or_too_few_blocks_is_one_line(name, args, frozen, line):
    spec = replace(SPEC, task="generate", num_classes=0) if name == "pixel_decoder" else SPEC
    model, _ = build_model(ModelConfig(name, args), replace(spec, class_names=()))
    with pytest.raises(ValueError, match=f"^{line}"):
        freeze(model, frozen)
