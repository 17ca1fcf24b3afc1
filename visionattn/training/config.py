"""What a run is made of, as dataclasses: the YAML files in ``configs/`` and the flags of
``visionattn train`` fill them.

Here are names, types, defaults and the checks that need no data and no model. The docstring under a
field is its help text. ``options.py`` reads the flags.
"""

from dataclasses import dataclass, field
from typing import Literal

from visionattn.data.data_config import DataConfig
from visionattn.data.ranges import check_ranges, check_signs
from visionattn.model_config import Fit, ModelConfig


@dataclass
class OptimConfig:
    """Optimiser, schedule and regularisation."""

    name: Literal["adamw", "lamb", "radam"] = "adamw"
    """Any of the three, from timm; ``radam`` is Adam that warms up by itself (Liu et al. 2020)."""
    lr: float = 1e-3
    """Peak learning rate."""
    min_lr: float = 1e-5
    """Learning rate at the end of the cosine, or after ``drop_epochs``."""
    drop_epochs: float | None = None
    """Epochs, of the warm-up too, after which the learning rate falls from ``lr`` to ``min_lr`` at
    once; fractions are allowed. None: it falls by a cosine.
    """
    warmup_epochs: float = 1.0
    """Epochs of linear warm-up from 1e-6; fractions are allowed."""
    weight_decay: float = 0.05
    """Decoupled weight decay; biases, norms, positions and temperatures are exempt."""
    layer_decay: float | None = None
    """Learning rate factor from each layer to the one below it, in (0, 1]; None: one rate for all.
    """
    clip_grad: float | None = 1.0
    """Largest global norm of the gradient; None: no clipping."""
    accumulate: int = 1
    """Batches per optimiser step."""
    label_smoothing: float = 0.0
    """In [0, 1)."""
    mixup: float = 0.0
    """Alpha of mixup; 0 is off."""
    cutmix: float = 0.0
    """Alpha of cutmix; 0 is off."""
    ema_decay: float | None = None
    """Decay per step of the averaged weights, which are then evaluated and kept; it rises to this
    value as ``1 - (1 + step) ** (-2/3)``, so that a short run forgets its start. None: no average.
    """


@dataclass
class TrainConfig:
    """A whole run. The flags that are used most come first."""

    epochs: int = 10
    """Passes over the training images."""
    batch_size: int | Literal["auto"] = 64
    """Images per batch, of all processes together; an optimiser step sees
    ``batch_size * optim.accumulate``. ``auto``: the most that fit into memory, which the run's
    ``config.yaml`` then names.
    """
    run: str | None = None
    """Name of the run folder; None: that of the first config file."""
    output: str = "checkpoints"
    """Folder of run folders."""
    resume: bool = False
    """Go on from the last state of the run folder."""
    overwrite: bool = False
    """Delete what an earlier run left in the run folder."""
    init_from: str | None = None
    """Weights to start from: a checkpoint of ours, or a timm name such as
    ``vit_small_patch16_224``, whose weights timm may have to download. A ViT becomes one of our
    models, ``converted_vit``. A resumed run has its own. ``visionattn convert`` makes a checkpoint
    of a state dict.
    """
    show_batch: str | None = None
    """PNG file in which to draw the first batches of training and of validation as the model sees
    them; nothing is trained then.
    """
    device: str = "auto"
    """``auto`` takes a GPU where there is one."""
    amp: Literal["none", "bf16", "fp16"] = "none"
    """Automatic mixed precision."""
    compile: bool = False
    """Compile the model with ``torch.compile``."""
    seed: int = 0
    """Seed of weights, order, augmentation and the embedded data sets' splits."""
    threads: int | None = None
    """CPU threads of torch; None: torch's own choice."""
    save_every: int | None = 500
    """Optimiser steps between two states within an epoch, from which a killed run goes on; None:
    one after each epoch.
    """
    parallel: Literal["ddp", "fsdp", "sequence"] | int | None = None
    """Under ``torchrun`` alone: each process has the whole model (``ddp``), its share of it
    (``fsdp``), or the whole model and some rows of each image (``sequence``). A number is
    ``sequence`` with so many processes for each image. None: ``ddp``.
    """
    dist_timeout: float = 600.0
    """Under ``torchrun`` alone: seconds that a process waits for an answer of the others before the
    run ends. What one process does alone, such as saving or downloading, must take less.
    """
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    data: DataConfig = field(default_factory=DataConfig)
    """The data."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimisation."""


@dataclass
class ValidateConfig:
    """An evaluation of weights at several image sizes."""

    checkpoint: str | None = None
    """The ``best.safetensors`` of a run, or another file that ``visionattn.load_model`` reads."""
    img_size: list[int | list[int]] | None = None
    """Sizes in pixels, e.g. ``224 448 672``: height and width, or with ``native`` the longest side;
    ``[[768, 512], [1536, 1024]]`` names both sides of each. None: that of the training.
    """
    fit: Fit | None = None
    """How images of any size come to the model: ``native``, ``pad``, ``stretch`` or ``crop``; None:
    as in training.
    """
    max_patches: int | None = None
    """``native`` alone, instead of ``img_size``: the most patches of an image."""
    data: DataConfig = field(default_factory=DataConfig)
    """The data; its defaults are those of the ``config.yaml`` beside the checkpoint."""
    split: Literal["train", "val", "test", "all"] | None = None
    """Which images: ``all`` is for one's own. None: of the folder of the training its validation
    images, of another one all, of other data the test images where there are some.
    """
    seed: int = 0
    """Seed of the embedded data sets' splits; its default is that of the ``config.yaml`` beside the
    checkpoint.
    """
    batch_size: int | Literal["auto"] = 64
    """Images per batch. ``auto``: the most that fit into memory."""
    device: str = "auto"
    """``auto`` takes a GPU where there is one."""
    amp: Literal["none", "bf16", "fp16", "auto"] = "none"
    """Automatic mixed precision. ``auto``: bf16 where the processor or the GPU multiplies it."""
    threads: int | None = None
    """CPU threads of torch; None: torch's own choice."""
    json: str | None = None
    """File for the same rows, with device, precision, versions and configuration."""


def check(config: TrainConfig) -> None:
    """Check the values that types alone do not: signs, ranges, and options that exclude each other.

    Raises:
        ValueError: one line with the key, what it may be, and what it is.
    """
    data, optim = config.data, config.optim
    # Values by their range, each under the name that its flag has.
    positive = {
        "epochs": config.epochs,
        "batch_size": 1 if config.batch_size == "auto" else config.batch_size,
        "threads": config.threads,
        "save_every": config.save_every,
        "parallel": config.parallel if isinstance(config.parallel, int) else None,
        "dist_timeout": config.dist_timeout,
        "optim.accumulate": optim.accumulate,
        "optim.lr": optim.lr,
        "optim.clip_grad": optim.clip_grad,
        "optim.drop_epochs": optim.drop_epochs,
    }
    not_negative = {
        "seed": config.seed,
        "optim.min_lr": optim.min_lr,
        "optim.warmup_epochs": optim.warmup_epochs,
        "optim.weight_decay": optim.weight_decay,
        "optim.mixup": optim.mixup,
        "optim.cutmix": optim.cutmix,
    }
    check_signs(positive, not_negative)
    check_ranges(data)
    # Shares: the value, and whether 0 and 1 are allowed.
    shares = {
        "optim.layer_decay": (optim.layer_decay, False, True),
        "optim.label_smoothing": (optim.label_smoothing, True, False),
        "optim.ema_decay": (optim.ema_decay, False, False),
    }
    for key, (value, zero, one) in shares.items():
        if value is not None and not (
            0 < value < 1 or (zero and value == 0) or (one and value == 1)
        ):
            raise ValueError(
                f"{key} must be in {'[' if zero else '('}0, 1{']' if one else ')'}, got {value}"
            )
    if config.show_batch is not None and not config.show_batch.endswith(".png"):
        raise ValueError(f"show_batch must be a file that ends in .png, got {config.show_batch}")
    _check_together(config)


def _check_together(config: TrainConfig) -> None:
    """Raise ValueError for options that contradict each other."""
    data, optim = config.data, config.optim
    if config.show_batch is not None and config.resume:
        raise ValueError("show_batch draws the first batch of the first epoch; leave resume out")
    if optim.min_lr > optim.lr:
        raise ValueError(f"optim.min_lr {optim.min_lr} is above optim.lr {optim.lr}, the peak")
    if optim.warmup_epochs >= config.epochs:
        raise ValueError(
            f"optim.warmup_epochs {optim.warmup_epochs} leaves nothing of epochs {config.epochs} "
            "for the cosine"
        )
    if optim.drop_epochs is not None:
        _check_drop(config, optim.drop_epochs)
    if data.img_size_choices is not None and not data.img_size_choices:
        raise ValueError(
            "data.img_size_choices is empty; name the sizes, or leave it out to train at "
            "data.img_size"
        )
    if len(set(data.img_size_choices or [])) < len(data.img_size_choices or []):
        raise ValueError(
            f"data.img_size_choices {data.img_size_choices} names a size twice; name each once"
        )
    if data.fit == "pad" and (optim.mixup or optim.cutmix):
        raise ValueError(
            "optim.mixup and optim.cutmix blend images that fill the same size, which data.fit pad "
            "does not give; use native, stretch or crop, or leave them out"
        )
    if data.task == "segmentation" and (optim.mixup or optim.cutmix):
        raise ValueError(
            "optim.mixup and optim.cutmix mix the classes of images, and data.task segmentation "
            "has those of pixels; leave them out"
        )
    if data.task == "generate":
        _check_writing(config)
    if config.parallel == "sequence" or isinstance(config.parallel, int):
        _check_sequence(config)
    if config.resume and config.overwrite:
        raise ValueError("resume goes on with a run and overwrite deletes it: give one of them")


def _check_drop(config: TrainConfig, drop_epochs: float) -> None:
    """Raise ValueError where the learning rate would never be at its peak, or never fall."""
    optim = config.optim
    if not optim.warmup_epochs < drop_epochs < config.epochs:
        raise ValueError(
            f"optim.drop_epochs must be above optim.warmup_epochs {optim.warmup_epochs} and below "
            f"epochs {config.epochs}, got {drop_epochs}"
        )
    if optim.min_lr == optim.lr:
        raise ValueError(
            f"optim.drop_epochs would do nothing: optim.min_lr is optim.lr, {optim.lr}"
        )


def _check_writing(config: TrainConfig) -> None:
    """Raise ValueError for what would do nothing where images are written, or make them others."""
    idle = {
        "optim.mixup": config.optim.mixup,
        "optim.cutmix": config.optim.cutmix,
        "optim.label_smoothing": config.optim.label_smoothing,
        "data.fit pad": config.data.fit == "pad",
    }
    for name, given in idle.items():
        if given:
            raise ValueError(
                f"data.task generate learns the values of whole images, and {name} changes them; "
                "leave it out"
            )


def _check_sequence(config: TrainConfig) -> None:
    """Raise ValueError for what several processes that share an image do not do."""
    idle = {
        "compile": config.compile,
        "data.fit pad": config.data.fit == "pad",
        f"data.task {config.data.task}": config.data.task != "classification",
    }
    for name, given in idle.items():
        if given:
            raise ValueError(
                f"parallel sequence shares the rows of images that fill their canvas among "
                f"processes, for classes of images and without compiling; not with {name}"
            )
