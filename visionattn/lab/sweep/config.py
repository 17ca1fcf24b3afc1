"""The flags of ``visionattn sweep`` as a dataclass, and the checks that need neither data nor a
model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from visionattn.cli.parsing import field_types, parse, split_options
from visionattn.ops.attentions import ATTENTIONS, FormChoice
from visionattn.training.config import TrainConfig, check

AttentionName = Literal[tuple(ATTENTIONS)]  # type: ignore[valid-type]  # as the parser reads it
VARIED = {
    "model.args.num_heads": "heads",
    "model.args.attention": "attention",
    "model.args.form": "form",
    "seed": "seeds",
    "data.img_size": "img_size",
    "output": "output",
    "threads": "threads",
    "epochs": "epochs",
}
"""Keys of the training that have an option of the sweep."""
FIXED = ("run", "resume", "overwrite", "config")
"""Keys of the training that each cell has of its own."""


@dataclass
class SweepConfig:
    """A grid of trainings and what is measured of their models."""

    base: str | None = None
    """YAML file of the training that is varied, or one of the package by its name, e.g. ``digits``.
    """
    set: list[str] = field(default_factory=list)
    """Keys in which every training differs from that file, e.g.
    ``optim.lr=1e-3 model.args.depth=2``.
    """
    heads: list[int] | None = None
    """Head counts, e.g. ``4 8 16``; each must divide the width."""
    attention: list[AttentionName] | None = None  # type: ignore[valid-type]
    """Attentions, in an otherwise equal network; None: that of the training alone."""
    form: list[FormChoice] | None = None
    """Forms of the attentions that have forms; None: direct and efficient."""
    train_form: FormChoice | None = None
    """Train this form alone and count its accuracy for all forms, which compute the same function;
    None: each form is trained.
    """
    seeds: list[int] = field(default_factory=lambda: [0])
    """Seeds of the trainings."""
    img_size: list[int] | None = None
    """Heights and widths of the images in pixels; None: that of the training."""
    epochs: int | None = None
    """Epochs; None: those of the training."""
    jobs: int = 1
    """Trainings at a time. Measurements are made one at a time, after them."""
    threads: int | None = None
    """CPU threads of each training and of the measurements; None: those of the training."""
    output: str | None = None
    """Folder of the sweep; None: ``checkpoints/sweeps/`` and the name of the file of ``base``."""
    overwrite: bool = False
    """Delete what an earlier sweep left in the folder."""
    retry: bool = False
    """Repeat cells that ended with nan, oom or failed, which are otherwise kept."""
    remeasure: bool = False
    """Measure again what was measured."""
    train: bool = True
    """False: train nothing; trainings that have ended count."""
    measure: bool = True
    """False: measure neither time nor memory."""
    measure_batch: int = 16
    """Images per batch of the measurements."""
    measure_rounds: int = 5
    """Rounds of the interleaved timing."""
    dry_run: bool = False
    """List the trainings that are left with the minutes that they will take, from a trial of each
    network, and train and measure nothing.
    """


def check_options(config: SweepConfig) -> None:
    """Check signs, repetitions and options that exclude each other.

    Raises:
        ValueError: one line with the option and what is wrong with it.
    """
    if config.base is None:
        raise ValueError("--base is missing: the YAML file of a training, or a name such as digits")
    if not config.heads:
        raise ValueError("--heads is missing: head counts such as 4 8 16")
    for name in ("heads", "attention", "form", "seeds", "img_size"):
        values = getattr(config, name)
        if values is not None and not values:
            raise ValueError(f"{name} is empty; name values or leave it out")
        if values and len(set(values)) < len(values):
            raise ValueError(f"{name} names a value twice: {' '.join(map(str, values))}")
    positive = {"heads": config.heads, "img_size": config.img_size or [], "jobs": [config.jobs]}
    positive |= {"measure_batch": [config.measure_batch], "measure_rounds": [config.measure_rounds]}
    for name, values in positive.items():
        if min(values, default=1) < 1:
            raise ValueError(f"{name} must be above 0, got {min(values)}")
    if min(config.seeds, default=0) < 0:
        raise ValueError(f"seeds must be at least 0, got {min(config.seeds)}")
    # Options that would do nothing: they shape a part of the sweep that is switched off.
    usual = SweepConfig()
    pairs = {
        "train false and retry": not config.train and config.retry,
        "train false and jobs": not config.train and config.jobs != usual.jobs,
        "measure false and remeasure": not config.measure and config.remeasure,
        "measure false and measure_batch": not config.measure
        and config.measure_batch != usual.measure_batch,
        "measure false and measure_rounds": not config.measure
        and config.measure_rounds != usual.measure_rounds,
        "train false and measure false": not config.train and not config.measure,
        "train false and dry_run": not config.train and config.dry_run,
    }
    for names, both in pairs.items():
        if both:
            raise ValueError(f"{names} contradict each other: leave one of them out")
    if config.train_form and config.form and config.train_form not in config.form:
        raise ValueError(
            f"train_form {config.train_form} is not among form {' '.join(config.form)}; add it "
            f"there"
        )


def read_base(config: SweepConfig) -> TrainConfig:
    """Return the training that is varied, with what ``set``, ``epochs`` and ``threads`` change of
    its file.

    Raises:
        ValueError, FileNotFoundError: the file or a key is wrong, or a key has an option of the
            sweep; one line.
    """
    words = []
    for text in config.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"set: wanted KEY=VALUE such as optim.lr=1e-3, got {text!r}")
        if way_out := _elsewhere(key):
            raise ValueError(f"set: {key} cannot be set here; {way_out}")
        words.append(f"--{key}={value}")
    words += [
        f"--{key}={getattr(config, key)}"
        for key in ("epochs", "threads")
        if getattr(config, key) is not None
    ]
    base = parse(TrainConfig, ["--config", config.base, *words])
    check(base)
    if base.data.task != "classification":
        raise ValueError(
            f"{config.base} has data.task {base.data.task}, and a sweep compares accuracies of "
            "classified images; train with each --model.args instead"
        )
    return base


def _elsewhere(key: str) -> str | None:
    """Say where an option of the training is set that ``set`` does not take; None for others."""
    if key in VARIED:
        return f"use --{VARIED[key]}"
    return "each training of the sweep has its own" if key in FIXED else None


def folder_of(config: SweepConfig, base: TrainConfig) -> Path:
    """Return the folder of the sweep."""
    return (
        Path(config.output)
        if config.output
        else Path(base.output) / "sweeps" / Path(config.base).stem
    )


def parse_sweep(argv: Sequence[str]) -> SweepConfig:
    """Read and check the flags.

    Raises:
        ValueError, FileNotFoundError: a flag is wrong; one line.
    """
    training = tuple(field_types(TrainConfig).keys() - field_types(SweepConfig).keys())
    for flag, _ in split_options(argv):
        name = flag.replace("-", "_")
        if name in training or name.startswith("model.args."):
            way_out = _elsewhere(name) or f"--set {name}=VALUE changes it"
            raise ValueError(f"--{name} is an option of the training in --base; {way_out}")
    config = parse(
        SweepConfig,
        argv,
        command="sweep",
        description="Train and measure one configuration at several head counts, attentions, "
        "forms, seeds and image sizes.",
        example=EXAMPLE,
    )
    check_options(config)
    return config


EXAMPLE = (
    "--base digits --heads 2 4 --epochs 1"
    " --train_form efficient --set optim.warmup_epochs=0.1 model.args.embed_dim=16 "
    "model.args.depth=1 data.workers=0"
    " --output checkpoints/sweeps/try --overwrite"
)
"""A sweep of about a minute."""
