"""What a distillation is made of: the YAML files ``configs/distil_*.yaml`` and the flags of
``visionattn distil`` fill it.

Each stage is a run of its own; here is how the options become those of a ``TrainConfig``.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from visionattn.cli.parsing import config_files, parse
from visionattn.data.data_config import DataConfig
from visionattn.model_config import ModelConfig
from visionattn.models.conversion import NAME, OF_ATTENTION, RATES, StudentOptions
from visionattn.models.weights import DataSpec
from visionattn.training.config import OptimConfig, TrainConfig, check

EXAMPLE = (
    "--teacher vit_tiny_patch16_224 --args '{img_size: 32, patch_size: 8, in_chans: 1, depth: 2}' "
)
EXAMPLE += "--data.name digits --b.epochs 1 --run try_distil --overwrite"
STAGES = ("a", "b", "c")
STUDENTS = (*OF_ATTENTION, *RATES, "drop_path_rate")
"""What of ``from_softmax``'s options a student may have; its tokens are those of the teacher."""


@dataclass
class StageConfig:
    """One stage: how long, how fast, and which images where not those of ``data``."""

    epochs: int = 1
    """Passes over the training images."""
    lr: float = 1e-3
    """Peak learning rate."""
    batch_size: int | Literal["auto"] | None = None
    """Images per batch; None: ``batch_size``."""
    img_size: int | list[int] | None = None
    """Size in pixels of this stage, as ``data.img_size``; None: that of ``data``."""
    teacher_size: Literal["same", "tiled"] = "same"
    """How the teacher sees images. ``same``: as the student does, its absolute position resampled.
    ``tiled``: in tiles of its own size, prefix tokens from the whole image shrunk to it; for images
    of fit crop or stretch that are whole tiles.
    """


@dataclass
class DistilOptimConfig:
    """Optimiser and schedule of each stage."""

    name: Literal["adamw", "lamb"] = "adamw"
    """Any of the two, from timm."""
    min_lr: float = 1e-5
    """Learning rate at the end of the cosine."""
    warmup_epochs: float = 0.2
    """Epochs of linear warm-up; fractions are allowed."""
    weight_decay: float = 0.05
    """Decoupled weight decay of what learns; biases, norms, positions and temperatures are exempt.
    """
    clip_grad: float | None = 1.0
    """Largest global norm of the gradient; None: no clipping."""
    accumulate: int = 1
    """Batches per optimiser step."""
    ema_decay: float | None = None
    """Decay per step of the averaged weights, which are then kept. None: no average."""


def _stage(**options: Any) -> Any:
    return field(default_factory=lambda: StageConfig(**options))


@dataclass
class DistilConfig(StudentOptions):
    """A whole distillation."""

    search_softmax_blocks: int | None = None
    """How many blocks stay softmax: those whose attention was imitated worst in stage a, by the
    loss on the validation images; ``blocks.csv`` has all.
    """
    stages: list[Literal["a", "b", "c"]] = field(default_factory=lambda: ["a", "b"])
    """What is done, in this order. ``a``: each block imitates the teacher's attention on the
    teacher's inputs. ``b``: the whole net imitates its final features. ``c``: the same again, at
    another size.
    """
    a: StageConfig = _stage(lr=1e-3)
    """Stage a."""
    b: StageConfig = _stage(epochs=5, lr=5e-4)
    """Stage b."""
    c: StageConfig = _stage(lr=1e-4)
    """Stage c."""
    data: DataConfig = field(default_factory=DataConfig)
    """The images, whose classes do not matter; a folder needs no class folders. Where none of fit,
    img_size and max_patches is given they are seen as the teacher was trained to.
    """
    optim: DistilOptimConfig = field(default_factory=DistilOptimConfig)
    """The optimisation."""
    batch_size: int | Literal["auto"] = 64
    """Images per batch, of all processes together. ``auto``: the most that fit into memory."""
    grad_checkpointing: bool = False
    """Keep the inputs of the student's blocks alone for the backward pass of stages b and c: less
    memory, more time.
    """
    seed: int = 0
    """Seed of weights, order, augmentation and the embedded data sets' splits."""
    device: str = "auto"
    """``auto`` takes a GPU where there is one."""
    amp: Literal["none", "bf16", "fp16"] = "none"
    """Automatic mixed precision, of the teacher too."""
    threads: int | None = None
    """CPU threads of torch; None: torch's own choice."""
    output: str = "checkpoints"
    """Folder of run folders."""
    run: str | None = None
    """Name of the folder, with one for each stage in it; None: that of the first config file."""
    resume: bool = False
    """Go on where the distillation in the folder stopped."""
    overwrite: bool = False
    """Delete what an earlier one left in the folder."""
    save_every: int | None = 500
    """Optimiser steps between two states within an epoch, from which a killed one goes on; None:
    one after each epoch.
    """
    dist_timeout: float = 600.0
    """Under ``torchrun`` alone: seconds that a process waits for an answer of the others."""


def parse_distil(argv: Sequence[str]) -> DistilConfig:
    """Read the flags of ``visionattn distil``.

    Raises:
        ValueError, FileNotFoundError: a flag or a file is wrong; one line.
    """
    config = parse(
        DistilConfig,
        argv,
        command="distil",
        description="Let a model with linear attention imitate a softmax ViT, without labels.",
        example=EXAMPLE,
    )
    files = config_files(argv)
    config.run = config.run or (Path(files[0]).stem if files else f"distil_{config.data.name}")
    check_distil(config)
    return config


def check_distil(config: DistilConfig) -> None:
    """Check the values that types alone do not.

    Raises:
        ValueError: one line with the key, what it may be, and what it is.
    """
    if config.teacher is None:
        raise ValueError(
            "name a teacher, e.g. --teacher vit_small_patch16_224 --pretrained, or a file of "
            "weights"
        )
    if not config.attention:
        raise ValueError("attention is empty; give a name, or leave it out")
    if not config.stages or config.stages != sorted(set(config.stages)):
        raise ValueError(
            f"stages {' '.join(config.stages) or 'is empty'}: wanted some of a, b and c, each "
            "once, in this order"
        )
    for name in config.options:
        if name not in STUDENTS:
            raise ValueError(
                f"options.{name} is no option of a student, whose tokens are the teacher's; those "
                f"are {', '.join(STUDENTS)}"
            )
    if config.data.task != "classification":
        raise ValueError(
            f"data.task {config.data.task} is for train; a student learns no masks and writes "
            "nothing"
        )
    if config.resume and config.overwrite:
        raise ValueError("resume goes on and overwrite deletes: give one of them")
    for key in ("mean", "std"):
        if getattr(config.data, key) is not None:
            raise ValueError(
                f"data.{key} is that of the teacher, which sees the images too; leave it out"
            )
    _check_search(config)
    for letter in config.stages:
        try:
            check(stage_run(config, letter, config.data, {}))
        except ValueError as error:
            raise ValueError(f"stage {letter}: {error}") from error


def _check_search(config: DistilConfig) -> None:
    """Raise ValueError where blocks cannot be searched for."""
    wanted = config.search_softmax_blocks
    if wanted is None:
        return
    if wanted < 1:
        raise ValueError(f"search_softmax_blocks must be at least 1, got {wanted}")
    if "a" not in config.stages:
        raise ValueError("search_softmax_blocks goes by the losses of stage a: add it to stages")
    if config.softmax_blocks or "softmax" in config.attention:
        raise ValueError("search_softmax_blocks finds the softmax blocks: do not name any")
    if "window" in config.attention:
        raise ValueError(
            "search_softmax_blocks: every second block of windows is shifted, so that windows "
            "learnt in stage a would change with the blocks that stay softmax; name softmax_blocks"
        )


def stage_run(
    config: DistilConfig, letter: str, data: DataConfig, args: dict[str, Any]
) -> TrainConfig:
    """Return the run that a stage is.

    Args:
        config: the distillation.
        letter: the stage.
        data: its images, as ``stage_data`` gives them.
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
    """Return which images a stage takes, at which size.

    Args:
        config: the distillation.
        letter: the stage.
        seen: what the images of the teacher were, which holds where nothing else is said.
    """
    data, stage = config.data, getattr(config, letter)
    if data.fit is None and data.img_size is None and data.max_patches is None:
        size = list(seen.img_size) if isinstance(seen.img_size, tuple) else seen.img_size
        data = replace(data, fit=seen.fit, img_size=size, max_patches=seen.max_patches)
    if stage.img_size is None:
        return data
    return replace(data, img_size=stage.img_size, img_size_choices=None, max_patches=None)
