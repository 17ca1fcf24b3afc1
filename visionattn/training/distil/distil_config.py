"""Define the configuration of a distillation, filled by the YAML files ``configs/distil_*.yaml``
and the flags of ``visionattn distil``.

Each stage is a separate run; this module turns the options into a ``TrainConfig`` for each.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from visionattn.cli.parsing import config_files, parse
from visionattn.cli.untrusted import refuse
from visionattn.data.data_config import DataConfig
from visionattn.data.geometry import check_sides
from visionattn.data.option_ranges import check_signs
from visionattn.model_config import ModelConfig
from visionattn.models.conversion import NAME, OF_ATTENTION, RATES, StudentOptions
from visionattn.models.weights import DataSpec
from visionattn.training.config import OptimConfig, TrainConfig, check

EXAMPLE = (
    "--teacher vit_tiny_patch16_224 --args '{img_size: 32, patch_size: 8, in_chans: 1, depth: 2}' "
)
EXAMPLE += "--data.name digits --b.epochs 1 --run try_distil --overwrite"
STAGES = ("a", "b", "c")
STUDENTS = (*OF_ATTENTION, *RATES, "drop_path_rate", "pos_antialias")
"""Options of ``from_softmax`` that do not change the tokens, so that they equal the teacher's."""


@dataclass
class StageConfig:
    """One stage: its length, learning rate, and image size if it differs from ``data``."""

    epochs: int = 1
    """Number of passes over the training images."""
    lr: float = 1e-3
    """Peak learning rate."""
    batch_size: int | Literal["auto"] | None = None
    """Images per batch; None: ``batch_size``."""
    img_size: int | list[int] | None = None
    """Image size of this stage in pixels, as ``data.img_size``; None: the size in ``data``."""
    teacher_size: Literal["same", "tiled"] = "same"
    """Image size of the teacher. ``same``: the student's size, with the teacher's absolute position
    resampled. ``tiled``: tiles of the teacher's own size, with prefix tokens from the whole image
    resized to it. Needs fit crop or stretch, and a size that is a multiple of the teacher's.
    """


@dataclass
class DistilOptimConfig:
    """Optimizer and schedule of each stage."""

    name: Literal["adamw", "lamb"] = "adamw"
    """Optimizer, from timm."""
    min_lr: float = 1e-5
    """Final learning rate, at the end of the cosine."""
    warmup_epochs: float = 0.2
    """Epochs of linear learning-rate warm-up; fractions are allowed."""
    weight_decay: float = 0.05
    """Decoupled weight decay of trained parameters; biases, norms, positions and temperatures are
    exempt.
    """
    clip_grad: float | None = 1.0
    """Clip gradients to this global norm; None: no clipping."""
    accumulate: int = 1
    """Gradient accumulation: batches per optimizer step."""
    ema_decay: float | None = None
    """Decay per step of the exponential moving average (EMA) of the weights, which is then saved.
    None: no EMA.
    """


def _stage(**options: Any) -> Any:
    return field(default_factory=lambda: StageConfig(**options))


@dataclass
class DistilConfig(StudentOptions):
    """A distillation with all its stages."""

    search_softmax_blocks: int | None = None
    """Number of blocks to keep softmax: the blocks with the largest validation loss after stage a.
    ``blocks.csv`` lists the loss of each block.
    """
    init_from: str | None = None
    """Initial weights of the first stage: the weights of an earlier student, e.g. the
    ``a/best.safetensors`` of a stage a shared by several students. A block that is now softmax gets
    the teacher's attention.
    """
    stages: list[Literal["a", "b", "c"]] = field(default_factory=lambda: ["a", "b"])
    """Stages to run, in this order. ``a``: each block imitates the teacher's attention on the
    teacher's inputs. ``b``: the whole network imitates the teacher's final features. ``c``: like b,
    at another image size.
    """
    a: StageConfig = _stage(lr=1e-3)
    """Stage a."""
    b: StageConfig = _stage(epochs=5, lr=5e-4)
    """Stage b."""
    c: StageConfig = _stage(lr=1e-4)
    """Stage c."""
    teacher_cache: str | None = None
    """Folder for the teacher's tokens of stages b and c, so that the teacher computes each image
    once at each size: in float16, 1 MiB for 1,370 tokens of width 384. Needs images that do not
    change: data.augment none, and no data.crop.
    """
    data: DataConfig = field(default_factory=DataConfig)
    """The images; classes are ignored, and a folder needs no class folders. Without fit, img_size
    and max_patches, preprocessing is the teacher's.
    """
    optim: DistilOptimConfig = field(default_factory=DistilOptimConfig)
    """Optimizer, learning rate and regularization."""
    batch_size: int | Literal["auto"] = 64
    """Images per batch, over all processes. ``auto``: the largest that fits into memory."""
    grad_checkpointing: bool = False
    """Gradient checkpointing of the student's blocks in stages b and c: less memory, more time."""
    seed: int = 0
    """Seed of initial weights, order of images, augmentation, and splits of built-in datasets."""
    device: str = "auto"
    """``cpu``, ``cuda``, or ``auto``: the GPU if available."""
    amp: Literal["none", "bf16", "fp16", "auto"] = "none"
    """Automatic mixed precision (AMP) of student and teacher. ``auto``: bf16 if the CPU or GPU has
    bf16 units.
    """
    threads: int | None = None
    """CPU threads; None: chosen by torch."""
    output: str = "checkpoints"
    """Parent of the distillation's folder."""
    run: str | None = None
    """Name of the folder, with a subfolder for each stage; None: the name of the first config file.
    """
    resume: bool = False
    """Resume the distillation in the folder."""
    overwrite: bool = False
    """Delete the files of an earlier distillation in the folder."""
    save_every: int | None = 500
    """Save a state to resume from every N optimizer steps. None: only after each epoch."""
    dist_timeout: float = 600.0
    """With ``torchrun``: timeout in seconds for the other processes."""


def parse_distil(argv: Sequence[str]) -> DistilConfig:
    """Read the flags of ``visionattn distil``.

    Raises:
        ValueError, FileNotFoundError: wrong flag or file; one line.
    """
    config = parse(
        DistilConfig,
        argv,
        command="distil",
        description="Distill a softmax ViT into a model with linear attention, without labels.",
        example=EXAMPLE,
    )
    files = config_files(argv)
    config.run = config.run or (Path(files[0]).stem if files else f"distil_{config.data.name}")
    check_distil(config)
    return config


def check_distil(config: DistilConfig) -> None:
    """Check signs and ranges of values, and options that exclude each other.

    Raises:
        ValueError: a wrong value; one line with the key, the allowed values and the given value.
    """
    stages, data = config.stages, config.data
    by_teacher = "data.{} is set by the teacher; remove it"
    refuse(
        (
            config.teacher is None,
            "expected a teacher; pass e.g. --teacher vit_small_patch16_224 --pretrained, or a file "
            "of weights",
        ),
        (not config.attention, "attention is empty; pass a name, or remove it"),
        (
            not stages or stages != sorted(set(stages)),
            "expected stages from a, b and c, each at most once and in this order, got "
            f"{' '.join(stages) or 'none'}",
        ),
        (
            data.task != "classification",
            f"distil needs data.task classification, got {data.task}; for other tasks use "
            "visionattn train",
        ),
        (
            config.teacher_cache is not None and (data.augment != "none" or data.crop is not None),
            "teacher_cache needs the same pixels in each epoch; use data.augment none and no "
            "data.crop, or remove teacher_cache",
        ),
        (
            config.teacher_cache is not None and stages == ["a"],
            "teacher_cache keeps tokens of stages b and c; add one to stages, or remove "
            "teacher_cache",
        ),
        (data.mean is not None, by_teacher.format("mean")),
        (data.std is not None, by_teacher.format("std")),
    )
    for name in config.options:
        if name not in STUDENTS:
            raise ValueError(
                f"options.{name} would change the tokens, which must equal the teacher's; allowed "
                f"options: {', '.join(STUDENTS)}"
            )
    if config.search_softmax_blocks is not None:
        _check_search(config, config.search_softmax_blocks)
    for letter in config.stages:
        try:
            check(stage_run(config, letter, config.data, {}))
        except ValueError as error:
            raise ValueError(f"stage {letter}: {error}") from error
    # Also of stages that do not run.
    for letter in STAGES:
        stage: StageConfig = getattr(config, letter)
        check_signs({f"{letter}.epochs": stage.epochs}, {})
        if stage.img_size is not None:
            check_sides(stage.img_size, f"{letter}.img_size")


def _check_search(config: DistilConfig, wanted: int) -> None:
    """Raise ValueError if ``search_softmax_blocks`` is not possible."""
    refuse(
        (wanted < 1, f"search_softmax_blocks must be at least 1, got {wanted}"),
        (
            "a" not in config.stages,
            "search_softmax_blocks needs the losses of stage a; add a to stages",
        ),
        (
            config.softmax_blocks or "softmax" in config.attention,
            "search_softmax_blocks chooses the softmax blocks; remove softmax_blocks, or "
            "softmax in attention",
        ),
        (
            "window" in config.attention,
            "search_softmax_blocks does not work with window attention, because the shift of a "
            "block's windows depends on the chosen blocks; pass softmax_blocks instead",
        ),
    )


def stage_run(
    config: DistilConfig, letter: str, data: DataConfig, args: dict[str, Any]
) -> TrainConfig:
    """Return the run configuration of a stage.

    Args:
        config: the distillation.
        letter: the stage.
        data: its images, from ``stage_data``.
        args: the arguments that build the student.
    """
    stage: StageConfig = getattr(config, letter)
    return TrainConfig(
        model=ModelConfig(NAME, args, config.grad_checkpointing),
        data=data,
        optim=OptimConfig(lr=stage.lr, **asdict(config.optim)),
        epochs=stage.epochs,
        batch_size=stage.batch_size or config.batch_size,
        seed=config.seed,
        device=config.device,
        amp=config.amp,
        threads=config.threads,
        output=str(Path(config.output) / str(config.run)),
        run=letter,
        resume=config.resume,
        overwrite=config.overwrite,
        save_every=config.save_every,
        dist_timeout=config.dist_timeout,
    )


def stage_data(config: DistilConfig, letter: str, seen: DataSpec) -> DataConfig:
    """Return the data configuration of a stage, with its image size.

    Args:
        config: the distillation.
        letter: the stage.
        seen: the teacher's data specification, which gives the default preprocessing.
    """
    data, stage = config.data, getattr(config, letter)
    if data.fit is None and data.img_size is None and data.max_patches is None:
        size = list(seen.img_size) if isinstance(seen.img_size, tuple) else seen.img_size
        data = replace(data, fit=seen.fit, img_size=size, max_patches=seen.max_patches)
    if stage.img_size is None:
        return data
    return replace(data, img_size=stage.img_size, img_size_choices=None, max_patches=None)
