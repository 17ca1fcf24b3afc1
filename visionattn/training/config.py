"""Define the configuration of a run as dataclasses, filled by the YAML files in ``configs/`` and
the flags of ``visionattn train``.

This module has names, types, defaults, and the checks without data and model. The docstring under a
field is its help text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from visionattn.cli.parsing import config_files, parse
from visionattn.cli.untrusted import refuse
from visionattn.data.data_config import DataConfig
from visionattn.data.option_ranges import check_ranges, check_signs, fold_name
from visionattn.model_config import VECTOR_TASKS, Fit, ModelConfig

EXAMPLE = "--config digits --epochs 1 --optim.warmup_epochs 0.5 --run try --overwrite"


@dataclass
class OptimConfig:
    """Optimizer, schedule and regularization."""

    name: Literal["adamw", "lamb", "radam"] = "adamw"
    """Optimizer, from timm; ``radam`` is Adam with built-in warm-up (Liu et al. 2020)."""
    lr: float = 1e-3
    """Peak learning rate."""
    min_lr: float = 1e-5
    """Final learning rate, at the end of the cosine or after ``drop_epochs``."""
    drop_epochs: float | None = None
    """Epochs (warm-up included) after which the learning rate drops from ``lr`` to ``min_lr``;
    fractions are allowed. None: cosine schedule.
    """
    warmup_epochs: float = 1.0
    """Epochs of linear learning-rate warm-up from 1e-6; fractions are allowed."""
    weight_decay: float = 0.05
    """Decoupled weight decay; biases, norms, positions and temperatures are exempt."""
    layer_decay: float | None = None
    """Layer-wise learning-rate decay: factor from each layer to the next lower layer, in (0, 1].
    None: the same rate for all layers.
    """
    clip_grad: float | None = 1.0
    """Clip gradients to this global norm; None: no clipping."""
    accumulate: int = 1
    """Gradient accumulation: batches per optimizer step."""
    label_smoothing: float = 0.0
    """Label smoothing, in [0, 1)."""
    mixup: float = 0.0
    """Alpha of mixup; 0: off."""
    cutmix: float = 0.0
    """Alpha of cutmix; 0: off."""
    ema_decay: float | None = None
    """Decay per step of the exponential moving average (EMA) of the weights, which is then
    evaluated and saved. The decay rises to this value as ``1 - (1 + step) ** (-2/3)``, so that a
    short run forgets its initial weights. None: no EMA.
    """


@dataclass
class LossConfig:
    """Loss of all tasks except image generation."""

    name: Literal[
        "cross_entropy", "focal", "dice", "cross_entropy_dice", "l1", "smooth_l1", "mse"
    ] = "cross_entropy"
    """``cross_entropy`` is binary for ``multilabel``, and ``mse`` for ``regression``. ``focal``
    (gamma 2) lowers the weight of images and pixels that the model predicts well. ``dice``, only
    for segmentation, measures the overlap with each class in the mask, large or small;
    ``cross_entropy_dice`` is the sum of both. ``l1``, ``smooth_l1`` and ``mse`` are for regression.
    """
    class_weights: Literal["balanced"] | list[float] | None = None
    """Weights of the classes in cross-entropy and focal loss, a number per class. ``balanced``:
    inversely proportional to the number of training images, or pixels, of each class; recorded in
    the run's ``config.yaml``. For ``multilabel``, weights of positive images; ``balanced``:
    negative over positive training images. None: 1.
    """


@dataclass
class TrainConfig:
    """A training run."""

    MOST_USED = (
        *("data.name", "data.root", "data.task", "data.img_size", "model.name", "init_from"),
        *("epochs", "batch_size", "optim.lr"),
    )
    """Flags at the top of the help."""

    epochs: int = 10
    """Number of passes over the training images."""
    patience: int | None = None
    """Early stopping: end the run after this many epochs in a row without a better ``monitor``.
    The learning rate still follows ``epochs``. None: no early stopping.
    """
    monitor: Literal["loss", "accuracy", "f1", "mean_iou", "map", "r2", "mae", "rmse"] | None = None
    """Metric on the validation images that selects the best weights: ``loss``, ``accuracy`` (of
    images, or of pixels), ``f1`` (macro F1: mean over classes) or ``mean_iou``; ``map`` (mean
    average precision) for ``multilabel``; ``r2``, ``mae`` or ``rmse``, means over targets, for
    ``regression``. Among equal values the first epoch wins. None: accuracy, mean IoU, ``map`` or
    ``r2``, then the lower loss.
    """
    batch_size: int | Literal["auto"] = 64
    """Images per batch, over all processes; an optimizer step uses ``batch_size *
    optim.accumulate`` images. ``auto``: the largest that fits into memory, recorded in the run's
    ``config.yaml``.
    """
    run: str | None = None
    """Name of the run folder; None: the name of the first config file, or of data and model."""
    output: str = "checkpoints"
    """Parent of the run folder."""
    resume: bool = False
    """Resume the run from the last state in its folder."""
    overwrite: bool = False
    """Delete the files of an earlier run in the run folder."""
    init_from: str | None = None
    """Initial weights: a checkpoint of visionattn, or a timm name such as
    ``vit_small_patch16_224``. timm downloads missing weights, and its ViT is converted to the model
    ``converted_vit``. For a state dict, first make a checkpoint with ``visionattn convert``. A
    resumed run keeps its own weights.
    """
    freeze: Literal["backbone"] | int | None = None
    """Parts that keep their initial weights: ``backbone``, everything except the head (linear
    probing); or a number N, the patch embedding and the first N blocks. None: train everything.
    """
    log: list[Literal["mlflow", "wandb"]] | None = None
    """Experiment trackers for the metrics: ``mlflow`` (``pip install mlflow``), ``wandb`` (Weights
    & Biases, ``pip install wandb``), or both. Their environment variables set server and offline
    mode. TensorBoard events are always written.
    """
    show_batch: str | None = None
    """Draw the first training and validation batches, as the model sees them, to this PNG file, and
    do not train.
    """
    device: str = "auto"
    """``cpu``, ``cuda``, or ``auto``: the GPU if available."""
    amp: Literal["none", "bf16", "fp16", "auto"] = "none"
    """Automatic mixed precision (AMP). ``auto``: bf16 if the CPU or GPU has bf16 units."""
    compile: bool = False
    """Compile the model with ``torch.compile``."""
    seed: int = 0
    """Seed of initial weights, order of images, augmentation, and splits of built-in datasets."""
    threads: int | None = None
    """CPU threads; None: chosen by torch."""
    save_every: int | None = 500
    """Save a state to resume from every N optimizer steps. None: only after each epoch."""
    parallel: Literal["ddp", "fsdp", "sequence"] | int | None = None
    """With ``torchrun``: each process holds the whole model (``ddp``), a shard of it (``fsdp``), or
    the whole model and some rows of each image (``sequence``). A number means ``sequence`` with
    this many processes per image. None: ``ddp``.
    """
    dist_timeout: float = 600.0
    """With ``torchrun``: timeout in seconds for the other processes; after it the run ends. It must
    be longer than work that only one process does, such as saving or downloading.
    """
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    data: DataConfig = field(default_factory=DataConfig)
    """The data."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer, learning rate and regularization."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The loss and its class weights."""


@dataclass
class ValidateConfig:
    """An evaluation of a checkpoint at several image sizes."""

    MOST_USED = ("checkpoint", "img_size", "fit", "data.root", "split", "batch_size", "json")
    """Flags at the top of the help."""

    checkpoint: str | None = None
    """The ``best.safetensors`` of a run, or another file that ``visionattn.load_model`` reads."""
    img_size: list[int | list[int]] | None = None
    """Image sizes in pixels, e.g. ``224 448 672``: height and width, or with ``native`` the longest
    side. ``[[768, 512], [1536, 1024]]`` gives height and width of each. None: the training size.
    """
    fit: Fit | None = None
    """Resizing of images: ``native`` (own sizes), ``pad`` (letterbox), ``stretch`` or ``crop``
    (center crop); None: as in training.
    """
    max_patches: int | None = None
    """With ``native``, instead of ``img_size``: maximum number of patches per image."""
    data: DataConfig = field(default_factory=DataConfig)
    """The data; defaults come from ``config.yaml`` in the folder of the checkpoint."""
    split: Literal["train", "val", "test", "all"] | None = None
    """Split to evaluate; ``all`` needs an image folder. None: the validation images of the training
    folder, all images of another folder, or the test images of other data if available.
    """
    seed: int = 0
    """Seed of the splits of built-in datasets; the default comes from ``config.yaml`` in the folder
    of the checkpoint.
    """
    batch_size: int | Literal["auto"] = 64
    """Images per batch. ``auto``: the largest batch that fits into memory."""
    device: str = "auto"
    """``cpu``, ``cuda``, or ``auto``: the GPU if available."""
    amp: Literal["none", "bf16", "fp16", "auto"] = "none"
    """Automatic mixed precision (AMP). ``auto``: bf16 if the CPU or GPU has bf16 units."""
    threads: int | None = None
    """CPU threads; None: chosen by torch."""
    json: str | None = None
    """JSON file for the rows, with device, precision, versions and configuration."""


MONITORS = {
    "classification": ("accuracy", "f1", "loss"),
    "segmentation": ("mean_iou", "accuracy", "f1", "loss"),
    "multilabel": ("map", "f1", "loss"),
    "regression": ("r2", "mae", "rmse", "loss"),
    "generate": ("loss",),
}
"""Values of ``monitor`` by task."""
NUMBER_LOSSES = ("l1", "smooth_l1", "mse")
"""Losses of regression."""


def parse_train(argv: Sequence[str]) -> TrainConfig:
    """Read the flags of ``visionattn train``.

    Without ``run``, the run is named after its first configuration file, or after data and model.
    The name of a run on a fold ends in the fold.

    Raises:
        ValueError, FileNotFoundError: wrong flag or file; one line.
    """
    config = parse(
        TrainConfig, argv, command="train", description="Train a model.", example=EXAMPLE
    )
    files = config_files(argv)
    usual = Path(files[0]).stem if files else f"{config.data.name}_{config.model.name}"
    config.run, fold = config.run or usual, fold_name(config.data.fold)
    config.run += "" if fold in config.run else fold
    return config


def check(config: TrainConfig) -> None:
    """Check signs and ranges of values, and options that exclude each other.

    Raises:
        ValueError: a wrong value; one line with the key, the allowed values and the given value.
    """
    data, optim = config.data, config.optim
    # Values by range, each under the name of its flag.
    positive = {
        "epochs": config.epochs,
        "patience": config.patience,
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
        "freeze": config.freeze if isinstance(config.freeze, int) else None,
        "optim.min_lr": optim.min_lr,
        "optim.warmup_epochs": optim.warmup_epochs,
        "optim.weight_decay": optim.weight_decay,
        "optim.mixup": optim.mixup,
        "optim.cutmix": optim.cutmix,
    }
    weights = config.loss.class_weights
    given = enumerate(weights if isinstance(weights, list) else [])
    not_negative |= {f"loss.class_weights[{number}]": weight for number, weight in given}
    check_signs(positive, not_negative)
    check_ranges(data)
    refuse(
        (
            not 0 < (1 if optim.layer_decay is None else optim.layer_decay) <= 1,
            f"optim.layer_decay must be in (0, 1], got {optim.layer_decay}",
        ),
        (
            not 0 <= optim.label_smoothing < 1,
            f"optim.label_smoothing must be in [0, 1), got {optim.label_smoothing}",
        ),
        (
            optim.ema_decay is not None and not 0 < optim.ema_decay < 1,
            f"optim.ema_decay must be in (0, 1), got {optim.ema_decay}",
        ),
    )
    _check_together(config)


def _check_together(config: TrainConfig) -> None:
    """Raise ValueError for options that contradict each other."""
    data, optim, drop = config.data, config.optim, config.optim.drop_epochs
    if data.features is not None:
        _check_features(config)
    if optim.mixup or optim.cutmix:
        _check_mixing(config)
    if data.task == "generate":
        _check_writing(config)
    allowed, monitor = MONITORS[data.task], config.monitor
    tasks = " and ".join(task for task in MONITORS if monitor in MONITORS[task])
    refuse(
        (
            optim.min_lr > optim.lr,
            f"expected optim.min_lr at most the peak optim.lr {optim.lr}, got {optim.min_lr}",
        ),
        (
            optim.warmup_epochs >= config.epochs,
            f"expected optim.warmup_epochs below epochs {config.epochs}, got "
            f"{optim.warmup_epochs}; pass --optim.warmup_epochs "
            f"{config.epochs / 2:g}",
        ),
        (
            drop is not None and not optim.warmup_epochs < drop < config.epochs,
            f"optim.drop_epochs must be above optim.warmup_epochs {optim.warmup_epochs} and below "
            f"epochs {config.epochs}, got {drop}",
        ),
        (
            monitor is not None and monitor not in allowed,
            f"monitor {monitor} needs data.task {tasks}, got {data.task}; use one of "
            f"{', '.join(allowed)}",
        ),
        (
            config.freeze is not None and not (config.init_from or config.resume),
            f"freeze {config.freeze} would keep random weights; pass pretrained weights with "
            "--init-from, e.g. vit_small_patch16_224",
        ),
        (
            config.resume and config.overwrite,
            "resume continues a run and overwrite deletes it; pass only one",
        ),
    )
    _check_loss(config)
    for name in config.log or ():
        found = find_spec(name)
        if found is None or found.origin is None:  # a folder of offline runs is no package
            raise ValueError(f"log {name} needs the package {name}; pip install {name}")
    if config.parallel == "sequence" or isinstance(config.parallel, int):
        _check_sequence(config)


def _check_features(config: TrainConfig) -> None:
    """Raise ValueError for options that act on images or on the model of kept features."""
    data = config.data
    idle = {
        f"data.name {data.name}": data.name != "folder",
        f"data.task {data.task}": data.task == "generate",
        "init_from": config.init_from is not None,
        "freeze": config.freeze is not None,
        "show_batch": config.show_batch is not None,
        "model.grad_checkpointing": config.model.grad_checkpointing,
        "data.cache": data.cache is not None and data.task != "segmentation",
    }
    text = "data.features trains only a head on stored features of a folder of images; remove {}"
    refuse(*((given, text.format(key)) for key, given in idle.items()))


def _check_mixing(config: TrainConfig) -> None:
    """Raise ValueError for images and losses that mixup and cutmix do not mix."""
    data, loss = config.data, config.loss
    reasons = (
        (
            data.fit == "pad",
            "images without padding, got data.fit pad; use native, stretch or crop, or remove them",
        ),
        (
            data.crop is not None,
            "images without padding, and small images are padded to data.crop; remove them",
        ),
        (
            data.task == "segmentation" or data.task in VECTOR_TASKS,
            f"one class per image, got data.task {data.task}; remove them",
        ),
        (
            loss.name != "cross_entropy" or loss.class_weights is not None,
            "the unweighted cross_entropy; remove them, or loss.name and loss.class_weights",
        ),
    )
    refuse(*((holds, f"optim.mixup and optim.cutmix need {text}") for holds, text in reasons))


def _check_writing(config: TrainConfig) -> None:
    """Raise ValueError for options that have no effect in image generation or change images."""
    idle = {
        "optim.mixup": config.optim.mixup,
        "optim.cutmix": config.optim.cutmix,
        "optim.label_smoothing": config.optim.label_smoothing,
        "data.fit pad": config.data.fit == "pad",
        "loss.name": config.loss.name != "cross_entropy",
        "loss.class_weights": config.loss.class_weights,
    }
    text = "data.task generate learns the values of whole images; remove {0}"
    refuse(*((given, text.format(name)) for name, given in idle.items()))


def _check_loss(config: TrainConfig) -> None:
    """Raise ValueError for a loss that does not fit the task or the other options."""
    loss, task, smoothing = config.loss, config.data.task, config.optim.label_smoothing
    numbers, weighted = task == "regression", loss.class_weights is not None
    for_classes = "{} needs classes, got data.task regression; remove it"
    refuse(
        (
            numbers and loss.name not in ("cross_entropy", *NUMBER_LOSSES),
            for_classes.format(f"loss.name {loss.name}"),
        ),
        (numbers and weighted, for_classes.format("loss.class_weights")),
        (numbers and smoothing, for_classes.format("optim.label_smoothing")),
        (
            not numbers and loss.name in NUMBER_LOSSES,
            f"loss.name {loss.name} needs data.task regression, got {task}; remove it",
        ),
        (
            "dice" in loss.name and task != "segmentation",
            f"loss.name {loss.name} needs data.task segmentation, got {task}; use cross_entropy or "
            "focal",
        ),
        (
            loss.name == "dice" and weighted,
            "loss.name dice weights all classes equally; remove loss.class_weights, or use "
            "cross_entropy_dice",
        ),
        (
            loss.name in ("focal", "dice") and smoothing,
            f"optim.label_smoothing needs a cross-entropy loss, got loss.name {loss.name}; remove "
            "it",
        ),
    )


def _check_sequence(config: TrainConfig) -> None:
    """Raise ValueError for options that ``parallel sequence`` does not support."""
    idle = {
        "compile": config.compile,
        "data.fit pad": config.data.fit == "pad",
        "data.crop": config.data.crop is not None,
        f"data.task {config.data.task}": config.data.task != "classification",
    }
    text = (
        "parallel sequence needs data.task classification, images without padding and no "
        "compilation; remove {}"
    )
    refuse(*((given, text.format(name)) for name, given in idle.items()))
