"""Frozen parts keep their weights, and nothing is stored for them."""

from dataclasses import replace

import pytest
import timm
import torch

from tests.helpers.small_runs import MODEL, SPEC, lines_of, quadrants, small_config
from visionattn.model_config import ModelConfig
from visionattn.models.building import build_model
from visionattn.models.segmentation import Segmenter
from visionattn.models.weights import load_model, save_model
from visionattn.training.config import OptimConfig
from visionattn.training.distributed import Processes
from visionattn.training.freezing import begin_training, freeze
from visionattn.training.optimize import make_optimizer
from visionattn.training.training_cost import TrainingMemory

TIMM = dict(img_size=16, patch_size=4, embed_dim=16, depth=3, num_heads=2, in_chans=1)
DROPS = dict(pos_drop_rate=0.1, proj_drop_rate=0.1, drop_path_rate=0.1, drop_rate=0.1)


@pytest.mark.parametrize("frozen", ["backbone", 1])
def test_a_run_changes_only_what_is_not_frozen(small, tmp_path, frozen):
    options = dict(epochs=1, model={"drop_path_rate": 0.2, "reg_tokens": 1}, freeze=frozen)
    config, start = small_config(tmp_path, **options), str(tmp_path / "start.safetensors")
    model, args = build_model(config.model, SPEC)
    save_model(start, model, config.model.name, args, SPEC)
    for decay in (0.5, 0.0):
        config = small_config(
            tmp_path, init_from=start, run=f"d{decay}", optim={"weight_decay": decay}, **options
        )
        assert any(" frozen)" in line for line in lines_of(config))
        folder = tmp_path / f"d{decay}"
        before = load_model(start).state_dict()
        after = load_model(folder / "best.safetensors").state_dict()
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        names = {name for name, _ in model.named_parameters()}
        if frozen == "backbone":
            learnt = {"head.weight", "head.bias"}
        else:
            assert {"head.weight", "norm.weight", "blocks.1.mlp.fc1.weight"} <= changed
            stem = ("cls_token", "reg_token", "patch_embed.", "blocks.0.")
            learnt = {name for name in names if not name.startswith(stem)}
        assert changed and changed <= learnt
        state = torch.load(folder / "last.pt", weights_only=True)["optimizer"]["state"]
        assert len(state) == len(learnt)


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
    groups = make_optimizer(network, OptimConfig()).param_groups
    assert [len(group["params"]) for group in groups] == [1, 1]


def test_the_head_of_a_segmentation_model_is_what_follows_its_body():
    body = timm.create_model("vit_tiny_patch16_224", num_classes=0, **TIMM)
    model = Segmenter(body, 3)
    freeze(model, "backbone")
    learnt = [name for name, each in model.named_parameters() if each.requires_grad]
    assert learnt == ["head.weight", "head.bias"]


def test_the_estimate_of_memory_counts_no_optimiser_state_of_frozen_parameters(tmp_path):
    def kept(frozen):
        config = small_config(tmp_path, freeze=frozen)
        model, _ = build_model(config.model, SPEC)
        if frozen is not None:
            freeze(model, frozen)
        memory = TrainingMemory(config, model, quadrants(), torch.device("cpu"), Processes())
        return memory.kept_bytes(), memory.step_bytes((8, 16, 16))

    whole, probe = kept(None), kept("backbone")
    assert probe[0] < whole[0] / 5 and probe[1] < whole[1]


def test_what_has_no_head_or_too_few_blocks_is_one_line():
    spec = replace(SPEC, task="generate", num_classes=0, class_names=())
    args = {"embed_dim": 16, "depth": 2, "num_heads": 2}
    decoder, _ = build_model(ModelConfig("pixel_decoder", args), spec)
    with pytest.raises(ValueError, match="^freeze backbone needs a head, and PixelDecoder has"):
        freeze(decoder, "backbone")
    model, _ = build_model(ModelConfig("scaleformer_vit_t", MODEL), SPEC)
    with pytest.raises(ValueError, match="^expected freeze at most 2, the blocks of .*, got 3"):
        freeze(model, 3)
    with pytest.raises(
        ValueError, match="^freeze 0 needs blocks, and ResNet has none; pass backbone"
    ):
        freeze(timm.create_model("resnet10t", num_classes=4), 0)
