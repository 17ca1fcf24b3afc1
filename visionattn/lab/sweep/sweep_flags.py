"""Define the flags of ``visionattn sweep``, and check them without data and model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from visionattn.cli.parsing import parse
from visionattn.data.option_ranges import check_least
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
}
"""Keys of the training that options of the sweep set."""
FIXED = ("run", "resume", "overwrite", "config")
"""Keys of the training that each cell sets itself."""
EXAMPLE = (
    "--base digits --heads 2 4 --train_form efficient"
    " --set epochs=1 optim.warmup_epochs=0.1 model.args.embed_dim=16 model.args.depth=1 "
    "data.workers=0 --output checkpoints/sweeps/try --overwrite"
)
"""A sweep of about a minute."""


@dataclass
class SweepConfig:
    """A grid of trainings, and the cost of their models."""

    base: str | None = None
    """YAML file of the training to vary, or the name of a configuration of the package, e.g.
    ``digits``.
    """
    set: list[str] = field(default_factory=list)
    """Changes to the training for all cells, e.g. ``epochs=2 optim.lr=1e-3``."""
    heads: list[int] | None = None
    """Head counts, e.g. ``4 8 16``; each must divide the width."""
    attention: list[AttentionName] | None = None  # type: ignore[valid-type]
    """Attentions; networks are otherwise equal. None: the attention of the training."""
    form: list[FormChoice] | None = None
    """Forms of the attentions that have forms; None: direct and efficient."""
    train_form: FormChoice | None = None
    """Train only this form. Its accuracy counts for all forms, because they compute the same
    function. None: train each form.
    """
    seeds: list[int] = field(default_factory=lambda: [0])
    """Seeds of the trainings."""
    img_size: list[int] | None = None
    """Image sizes (height and width) in pixels; None: the size in the training."""
    jobs: int = 1
    """Number of parallel trainings. Measurements run afterwards, one at a time."""
    output: str | None = None
    """Folder of the sweep; None: ``checkpoints/sweeps/`` and the name of the file of ``base``."""
    overwrite: bool = False
    """Delete the results of an earlier sweep in the folder."""
    retry: bool = False
    """Repeat cells with status nan, oom or failed instead of keeping them."""
    measure: bool = True
    """Measure time and memory of the networks."""
    measure_batch: int = 16
    """Batch size of the measurements."""
    measure_rounds: int = 5
    """Number of rounds of the interleaved timing."""
    dry_run: bool = False
    """List the remaining trainings with estimated memory and time, and train nothing."""


def check_options(config: SweepConfig) -> None:
    """Check ranges of options, and options that contradict each other.

    Raises:
        ValueError: a wrong option; one line.
    """
    if config.base is None:
        raise ValueError("expected --base: the YAML file of a training, or a name such as digits")
    if not config.heads:
        raise ValueError("expected --heads: head counts such as 4 8 16")
    check_least(1, heads=config.heads, img_size=config.img_size, jobs=config.jobs)
    check_least(0, seeds=config.seeds)
    check_least(1, measure_batch=config.measure_batch, measure_rounds=config.measure_rounds)
    usual = SweepConfig.measure_batch, SweepConfig.measure_rounds
    if not config.measure and (config.measure_batch, config.measure_rounds) != usual:
        raise ValueError("measure_batch and measure_rounds need measure true; remove them")
    if config.train_form and config.form and config.train_form not in config.form:
        raise ValueError(
            f"expected train_form among form {' '.join(config.form)}, got {config.train_form}; "
            "add it to form"
        )


def read_base(config: SweepConfig) -> TrainConfig:
    """Return the training to vary, with the changes of ``set``.

    Raises:
        ValueError, FileNotFoundError: wrong file or key, or an option of the sweep sets the key;
            one line.
    """
    for text in config.set:
        key, equals, _ = text.partition("=")
        if not equals:
            raise ValueError(f"set: expected KEY=VALUE such as optim.lr=1e-3, got {text!r}")
        if key in VARIED:
            raise ValueError(f"set: {key} cannot be set here; use --{VARIED[key]}")
        if key in FIXED:
            raise ValueError(f"set: {key} cannot be set; each training of the sweep has its own")
    base = parse(TrainConfig, ["--config", config.base, *(f"--{text}" for text in config.set)])
    check(base)
    if base.data.task != "classification":
        raise ValueError(
            f"a sweep needs data.task classification, got {base.data.task} ({config.base}); train "
            "with each --model.args instead"
        )
    return base


def folder_of(config: SweepConfig, base: TrainConfig) -> Path:
    """Return the folder of the sweep."""
    if config.output:
        return Path(config.output)
    return Path(base.output) / "sweeps" / Path(config.base).stem


def parse_sweep(argv: Sequence[str]) -> SweepConfig:
    """Read and check the flags.

    Raises:
        ValueError, FileNotFoundError: a flag is wrong; one line.
    """
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
