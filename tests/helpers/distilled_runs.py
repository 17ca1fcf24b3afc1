"""Distillations of a second: a ViT of timm with random, lively weights, on images of quadrants."""

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from tests.helpers.small_runs import SPEC, quadrants
from visionattn.data.data_config import DataConfig
from visionattn.models import from_softmax
from visionattn.models.weights import save_model
from visionattn.training import engine
from visionattn.training.distil import student
from visionattn.training.distil.distil_config import DistilConfig, DistilOptimConfig, StageConfig
from visionattn.training.distil.distillation import distil

NAME = "vit_tiny_patch16_224"
BODY = dict(patch_size=4, embed_dim=16, depth=3, num_heads=2, img_size=16, dynamic_img_size=True)


def vit_of(**args: Any):
    """A ViT of 4 classes in eval mode, whose attention differs from place to place."""
    torch.manual_seed(5)
    vit = timm.create_model(NAME, **(BODY | dict(in_chans=1, num_classes=4) | args)).eval()
    with torch.no_grad():
        for name, value in vit.named_parameters():
            if "qkv.weight" in name:
                value.mul_(8)
            elif value.ndim > 1 or "bias" in name:
                value.add_(0.1 * torch.randn(value.shape))
    return vit


def same_softmax(vit):
    """The ViT as one of ours, all softmax."""
    return from_softmax(vit, softmax_blocks=range(len(vit.blocks))).model


def teacher_file(folder: Path, **args: Any) -> Path:
    """A file of a ViT as ``visionattn train`` writes it."""
    path = folder / "teacher.safetensors"
    save_model(path, vit_of(**args), NAME, BODY | args, SPEC)
    return path


def images(config: DataConfig, seed: int, *, labelled: bool = True):
    """Quadrants in place of ``build_splits``."""
    size, fit = config.img_size, config.fit or "crop"
    splits = quadrants(29, img_size=size)
    return replace(splits, spec=replace(splits.spec, fit=fit))


@contextlib.contextmanager
def on_quadrants():
    """Every distillation in the context is one of quadrants, without a trial of its steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(student, "build_splits", images)
        patch.setattr(engine, "forecast", lambda trainer, memory: None)
        patch.setattr(engine, "provenance", lambda device, threads: {"device": str(device)})
        yield patch


def config_of(output: Path, teacher: Path, **options: Any) -> DistilConfig:
    """Two epochs of each stage, with a state after every second step."""
    fixed = dict(
        teacher=str(teacher),
        a=StageConfig(epochs=2, lr=3e-3),
        b=StageConfig(epochs=2, lr=3e-3),
        c=StageConfig(epochs=1, lr=1e-3, img_size=32),
        data=DataConfig(workers=0),
        optim=DistilOptimConfig(warmup_epochs=0.5, accumulate=2, ema_decay=0.9),
        batch_size=8,
        output=str(output),
        run="small",
        save_every=2,
    )
    return DistilConfig(**(fixed | options))


def run(config: DistilConfig) -> list[str]:
    """Distil, and return the lines printed."""
    stream = io.StringIO()
    distil(config, stream=stream)
    return stream.getvalue().splitlines()
