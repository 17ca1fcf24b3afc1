"""Open a teacher and build its student, on the images of both.

This module turns the options into a teacher, a student, and the preprocessing taken from the
teacher. It writes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from timm.utils import random_seed
from torch import nn

from visionattn.data.data_checks import check_data, resolved
from visionattn.data.data_config import DataConfig
from visionattn.data.geometry import geometry_of, sides
from visionattn.data.splits import Splits, build_splits, geometry_choices
from visionattn.models import VisionAttnTransformer
from visionattn.models.building import check_geometries, patch_size
from visionattn.models.conversion import from_softmax, student_of, teacher_of
from visionattn.models.weights import DataSpec, describe_misfit, existing, load_model
from visionattn.training.config import TrainConfig
from visionattn.training.distil.distil_config import DistilConfig, stage_data
from visionattn.training.distil.imitation import (
    Imitating,
    check_teacher_size,
    imitating_blocks,
    learn,
)
from visionattn.training.engine import Prepared


@dataclass(frozen=True)
class Taught:
    """A teacher, with the specification of its images."""

    vit: nn.Module
    """timm's model."""
    model: VisionAttnTransformer
    """The same teacher as a model of this package, all softmax, for images of any size."""
    spec: DataSpec
    lines: list[str]
    """Lines about the source of its weights."""


def open_taught(config: DistilConfig) -> Taught:
    """Open the teacher of a distillation.

    Raises:
        ValueError, FileNotFoundError: unknown teacher, or a body that cannot be converted; one
            line.
    """
    random_seed(config.seed % 2**32)
    vit, lines = teacher_of(config)
    exact, names = range(len(getattr(vit, "blocks", ()))), ("pos_antialias",)
    shared = {name: config.options[name] for name in names if name in config.options}
    same = from_softmax(vit, softmax_blocks=exact, **shared)
    return Taught(vit, same.model, same.spec, lines)


def check_student(config: DistilConfig, taught: Taught) -> None:
    """Check that the student can be built, and that both models accept the images of every stage.

    Raises:
        FileNotFoundError: there are no weights to start from.
        ValueError: wrong student or images; one line.
    """
    converted = student_of(config, taught.vit)
    depth = len(converted.model.blocks)
    if (config.search_softmax_blocks or 0) >= depth:
        raise ValueError(
            f"expected search_softmax_blocks below the teacher's {depth} blocks, got "
            f"{config.search_softmax_blocks}"
        )
    if config.init_from is not None:
        carry(load_model(existing(config.init_from)), converted.model)
    for letter in config.stages:
        if letter == "a":
            learn(converted.model, "a", converted.new)
        try:
            data = resolved(stage_data(config, letter, taught.spec))
            check_data(data)
            size = sides(data.img_size)
            spec = replace(taught.spec, fit=data.fit, img_size=size, max_patches=data.max_patches)
            patch_px = patch_size(converted.model)
            geometries = [geometry_of(spec, patch_px), *geometry_choices(spec, data, patch_px)]
            check_geometries(converted.model, geometries)
            for geometry in geometries:
                if getattr(config, letter).teacher_size == "tiled":
                    check_teacher_size(taught.model, geometry.canvas, geometry.fit)
        except ValueError as error:
            raise ValueError(f"stage {letter}: {error}") from error


def images_of(data: DataConfig, seed: int, teachers: DataSpec) -> tuple[Splits, bool]:
    """Return the images of a stage with the teacher's normalization, and whether their classes are
    the teacher's outputs.

    Raises:
        ValueError, FileNotFoundError: wrong data, or another number of channels than the teacher's;
            one line.
    """
    splits = build_splits(data, seed, labelled=False)
    own = splits.spec
    if (own.in_chans, own.encoding) != (teachers.in_chans, teachers.encoding):
        raise ValueError(
            f"expected images with {teachers.in_chans} channels, as the teacher's, got "
            f"{own.in_chans} ({data.name})"
        )
    labelled = 0 < own.num_classes == teachers.num_classes and (
        not (own.class_names and teachers.class_names) or own.class_names == teachers.class_names
    )
    spec = replace(
        own,
        num_classes=teachers.num_classes,
        class_names=teachers.class_names,
        mean=teachers.mean,
        std=teachers.std,
    )
    return replace(splits, spec=spec), labelled


def prepare_student(
    distil: DistilConfig,
    taught: Taught,
    softmax_blocks: Sequence[int],
    former: Path | None,
    config: TrainConfig,
    device: torch.device,
    *,
    resumed: bool,
    first: bool,
) -> Prepared:
    """Build the student of a stage, and open its images, for ``engine.train``.

    Args:
        distil: the distillation.
        taught: the teacher.
        softmax_blocks: the softmax blocks of the student.
        former: weights of the previous stage; None: only the teacher's.
        config, device, resumed, first: as for ``engine.prepare_classes``.
    """
    letter = str(config.run)
    splits, labelled = images_of(config.data, config.seed, taught.spec)
    converted = student_of(distil, taught.vit, softmax_blocks)
    lines = []
    if first and not resumed:
        lines = converted.lines()
        if former is not None:
            carry(load_model(former), converted.model)
            lines = [f"starts from {former}"]
    if config.model.grad_checkpointing:
        converted.model.set_grad_checkpointing(True)
    learn(converted.model, letter, converted.new)
    size = getattr(distil, letter).teacher_size
    objective = Imitating(
        taught.model.to(device), letter, size, labelled=labelled, kept=distil.teacher_cache
    )
    return Prepared(splits, converted.model, config.model, converted.args, lines, objective)


@torch.no_grad()
def carry(former: nn.Module, student: VisionAttnTransformer) -> None:
    """Copy the weights of an earlier student. Blocks that are softmax only now keep the teacher's
    attention.

    Raises:
        ValueError: the earlier student lacks weights or has other shapes; one line.
    """
    linear = imitating_blocks(former) if isinstance(former, VisionAttnTransformer) else []
    anew = set(linear).difference(imitating_blocks(student))
    fixed = tuple(f"blocks.{i}.attn." for i in anew)
    learnt, own = (
        {name: value for name, value in model.state_dict().items() if not name.startswith(fixed)}
        for model in (former, student)
    )
    if misfit := describe_misfit(learnt, own):
        raise ValueError(f"the weights of the earlier student do not fit: {misfit}")
    for name, value in own.items():
        value.copy_(learnt[name])
