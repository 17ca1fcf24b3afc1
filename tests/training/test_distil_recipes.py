"""The recipes for real teachers, with random weights of the real bodies, two blocks deep; the names
are timm's, with weights.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import timm
import torch

from visionattn.cli.parsing import parse
from visionattn.data.splits import build_splits
from visionattn.models.building import patch_size
from visionattn.models.conversion import student_of
from visionattn.training.config import TrainConfig
from visionattn.training.distil.distil_config import parse_distil, stage_data
from visionattn.training.distil.imitation import Imitation, learn, teacher_features
from visionattn.training.distil.student import check_student, open_taught

ROOT = Path(__file__).parents[2]
RECIPES = {
    "distil_dinov2_s": ((14, 14), 384, "token", (0, 257, 1370)),
    "distil_deit3_s": ((16, 16), 384, "token", (1000, 197, 785)),
    "distil_siglip2_b": ((16, 16), 768, "map", (0, 196, 784)),
}
"""Patch, width, pooling; classes, tokens at 224 px and in stage c."""


def shallow(name):
    config = parse_distil(["--config", str(ROOT / "configs" / f"{name}.yaml")])
    return replace(
        config, pretrained=False, args=config.args | {"depth": 2}, softmax_blocks=[1], seed=0
    )


@pytest.mark.parametrize(("name", "body"), RECIPES.items(), ids=RECIPES)
def test_the_body_of_a_real_teacher_teaches(name, body):
    config = shallow(name)
    patch, width, pooling, (classes, tokens, larger) = body
    assert config.teacher in timm.list_models(pretrained=True)
    taught = open_taught(config)
    check_student(config, taught)
    converted = student_of(config, taught.vit)
    student = converted.model
    assert (patch_size(student), student.embed_dim) == (patch, width)
    assert (student.global_pool, student.num_classes) == (pooling, classes)
    assert [block.attn.attention for block in student.blocks] == ["kernelized", "softmax"]
    for letter, count in (("a", tokens), ("b", tokens), ("c", larger)):
        data = stage_data(config, letter, taught.spec)
        images = torch.randn(1, 3, data.img_size, data.img_size)
        learn(student, letter, converted.new)
        size = getattr(config, letter).teacher_size
        features = partial(teacher_features, taught.model, teacher_size=size)
        with torch.no_grad():
            loss = Imitation(student, taught.model, letter, features)(images)
            assert student.forward_features(images).shape == (1, count, width)
        # LayerScale starts at 1e-5: random blocks hardly change the features.
        assert loss.isfinite().all() and loss.item() > (1e-4 if letter == "a" else 0)


@pytest.mark.parametrize(("name", "args"), [("canvas", {}), ("documents", {"train_images": 48000})])
def test_demonstrations_are_of_the_images_of_their_teachers(name, args):
    teacher = parse(TrainConfig, ["--config", str(ROOT / "configs" / f"{name}_teacher.yaml")])
    config = parse_distil(["--config", str(ROOT / "configs" / f"distil_{name}.yaml")])
    assert replace(config.data, args=config.data.args | args) == teacher.data
    assert config.teacher == f"checkpoints/{name}_teacher/best.safetensors"
    if name == "canvas":
        spec = build_splits(teacher.data, 0).spec
        assert [stage_data(config, letter, spec).img_size for letter in "abc"] == [64, 64, 128]
