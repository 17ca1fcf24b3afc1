"""The options of ``visionattn profile``, what they must be, and the cases that they name. It
measures nothing.
"""

import math
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

from visionattn.cli.files import check_folder, check_free
from visionattn.lab.cases import PASSES, PRECISIONS, Case
from visionattn.lab.networks import has_forms
from visionattn.ops.attentions import FORM_CHOICES

DEFAULT_SIZES_PX = (1024, 1280, 1536, 1792)
FILES = {"csv": "memory.csv", "plot": "memory.png", "table": "memory.md"}
"""What ``output`` holds."""


@dataclass
class ProfileConfig:
    """Models x image sizes x passes x precisions x forms x gradient checkpointing."""

    models: list[str] = field(
        default_factory=lambda: [
            "scaleformer_vit_s",
            "taylorshift_vit_s",
            "vit_small_patch16_224",
            "vit_small_patch16_224+eager",
        ]
    )
    """Vision transformers by their timm names; options behind plus signs:
    ``vit_small_patch16_224+eager`` (attention with its matrix, not fused),
    ``taylorshift_vit_s+heads=12``, ``scaleformer_vit_s+identity`` (no attention).
    """
    img_size: list[int] | None = None
    """Heights and widths in pixels; None: 1024 1280 1536 1792."""
    passes: list[str] = field(default_factory=lambda: ["inference"])
    """Any of inference, forward+backward, training_step (with AdamW, whose state is there before).
    """
    precision: list[str] = field(default_factory=lambda: ["float32"])
    """Any of float32, bfloat16 (weights, moments and image in it), amp_bf16, amp_fp16 (weights in
    float32, as in training).
    """
    form: list[str] = field(default_factory=lambda: ["auto"])
    """Any of auto, direct (quadratic), efficient (linear), of visionattn's models; baselines have
    none and get one row.
    """
    checkpointing: Literal["without", "with", "both"] = "without"
    """Gradient checkpointing, of the passes that have a backward."""
    batch: int = 1
    """Images at once."""
    depth: int | None = None
    """Blocks of each model that are kept, which saves time; None: all."""
    device: str = "auto"
    """``auto`` takes a GPU where there is one."""
    threads: int | None = None
    """CPU threads of torch; None: torch's own choice."""
    budget_gib: float | None = None
    """Peaks must stay below so many GiB, else the row says out of memory: on a GPU what PyTorch
    reserves, on a CPU the whole process. None: the card, or 80 % of the memory that is available.
    """
    largest: bool = False
    """Find the largest square image that fits into the budget, by bisection over whole patches, for
    each model, pass, precision and form.
    """
    fit_from: int = 1024
    """Image size in pixels from which the growth exponent is fitted, to two sizes or more."""
    snapshot: str | None = None
    """File for the allocations of one cell, for https://pytorch.org/memory_viz."""
    csv: str | None = None
    """File for the rows with what they depend on."""
    plot: str | None = None
    """PNG file of memory over tokens."""
    output: str | None = None
    """Folder for memory.csv, memory.png and memory.md, in place of csv and plot; it is made where
    it is missing.
    """
    overwrite: bool = False
    """Replace files that exist."""
    dry_run: bool = False
    """List the cells with the minutes that they will take, from a small trial of each series, and
    measure nothing.
    """

    @property
    def sizes_px(self) -> list[int]:
        """Image sizes, rising; none where they are searched for."""
        return [] if self.largest else sorted(set(self.img_size or DEFAULT_SIZES_PX))

    @property
    def settings(self) -> str:
        """What the cases have in common or take in turn, in one line."""
        several = {name: " ".join(getattr(self, name)) for name in ("passes", "precision", "form")}
        named = (
            {"depth": self.depth or "all", "batch": self.batch}
            | several
            | {"checkpointing": self.checkpointing}
        )
        named |= {} if self.largest else {"growth from": f"{self.fit_from} px"}
        return ", ".join(f"{name} {value}" for name, value in named.items())

    def cases(self) -> list[Case]:
        """Return the cases, those of one series together, sizes rising; with ``largest`` one for
        each series, whose size is open: 0.
        """
        sizes = self.sizes_px or [0]
        checkpointings = {"without": [False], "with": [True], "both": [False, True]}[
            self.checkpointing
        ]
        found = []
        for model, work, precision in product(self.models, self.passes, self.precision):
            forms, (dtype, amp) = self.form if has_forms(model) else ["auto"], PRECISIONS[precision]
            how = dict(dtype=dtype, amp=amp, batch=self.batch, depth=self.depth)
            how |= dict(backward=work != "inference", update=work == "training_step")
            for form, checkpointing, px in product(
                forms, checkpointings if work != "inference" else [False], sizes
            ):
                found.append(
                    Case("model", model, px, form=form, checkpointing=checkpointing, **how)
                )
        return list(dict.fromkeys(found))

    def files(self) -> dict[str, Path]:
        """Return what is written: "csv", "plot", "table", "snapshot"."""
        named = {"csv": self.csv, "plot": self.plot, "snapshot": self.snapshot}
        found = {kind: Path(path) for kind, path in named.items() if path}
        if self.output:
            found |= {kind: Path(self.output) / name for kind, name in FILES.items()}
        return found


def check(config: ProfileConfig) -> None:
    """Check what needs no model.

    Raises:
        ValueError: a value that is none of those it may be, options that contradict each other or
            do nothing, a file in the way.
    """
    allowed = {"passes": PASSES, "precision": tuple(PRECISIONS), "form": FORM_CHOICES}
    for name, wanted in allowed.items():
        for value in getattr(config, name):
            if value not in wanted:
                raise ValueError(f"{name}: wanted any of {', '.join(wanted)}, got {value!r}")
    for name in ("models", "img_size", *allowed):
        if getattr(config, name) == []:
            raise ValueError(f"{name} is empty: there is nothing to measure")
    sizes = {f"img_size[{i}]": px for i, px in enumerate(config.img_size or [])}
    numbers = {
        name: getattr(config, name)
        for name in ("batch", "depth", "threads", "budget_gib", "fit_from")
    } | sizes
    for name, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0, got {value}")
    check_acts(config)
    if config.output:
        if config.csv or config.plot:
            raise ValueError(
                "output names a folder for memory.csv and memory.png: leave out csv and plot, or "
                "output"
            )
        check_folder(Path(config.output), "choose another --output")
    files = config.files()
    if len(set(files.values())) < len(files):
        raise ValueError(
            f"one file for several things: "
            f"{', '.join(f'{kind} {path}' for kind, path in files.items())}"
        )
    # A folder of --output that is not there yet holds no file in the way.
    for path in files.values():
        if path.parent.is_dir() or config.output is None or path.parent != Path(config.output):
            check_free(path, config.overwrite)


def check_acts(config: ProfileConfig) -> None:
    """Raise ValueError for options that contradict each other, or that act on none of the cases."""
    if config.form != ["auto"] and not any(map(has_forms, config.models)):
        raise ValueError(
            f"form does nothing here: {', '.join(config.models)} have no forms; they are of "
            f"visionattn's models"
        )
    if config.checkpointing != "without" and config.passes == ["inference"]:
        raise ValueError(
            "checkpointing does nothing in inference; name a pass with a backward: --passes "
            "forward+backward"
        )
    if config.largest and config.img_size:
        raise ValueError("largest searches for the image size: leave out img_size")
    if config.largest and config.dry_run:
        raise ValueError("largest finds its cells as it goes, so that dry_run cannot list them")
    if config.largest and config.fit_from != ProfileConfig.fit_from:
        raise ValueError("fit_from does nothing with largest, which fits no exponent")
    fitted = sum(px >= config.fit_from for px in config.sizes_px)
    if config.fit_from != ProfileConfig.fit_from and fitted < 2:
        raise ValueError(
            f"fit_from {config.fit_from}: growth needs two sizes from there on, and img_size has "
            f"{fitted}"
        )
    if config.snapshot and config.largest:
        raise ValueError("snapshot holds one cell and largest measures many: leave out one of them")
    count = len(config.cases())
    if config.snapshot and count > 1:
        raise ValueError(
            f"snapshot holds one cell, and these are {count}: name one model, size, pass, "
            f"precision and form"
        )
