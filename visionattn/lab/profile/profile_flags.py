"""Define and check the flags of ``visionattn profile``, and list the cases that they select."""

from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

from visionattn.cli.files import check_folder, check_free
from visionattn.data.option_ranges import check_least, check_signs
from visionattn.lab.cases import PASSES, PRECISIONS, Case
from visionattn.lab.compared_models import has_forms
from visionattn.ops.attentions import FormChoice

PassName = Literal[PASSES]  # type: ignore[valid-type]  # as the parser reads it
Precision = Literal[tuple(PRECISIONS)]  # type: ignore[valid-type]

DEFAULT_SIZES_PX = (1024, 1280, 1536, 1792)
FILES = ("memory.csv", "memory.png", "memory.md")
"""The files in ``output``."""


@dataclass
class ProfileConfig:
    """A grid of models x image sizes x passes x precisions x forms x gradient checkpointing."""

    models: list[str] = field(
        default_factory=lambda: [
            "scaleformer_vit_s",
            "taylorshift_vit_s",
            "vit_small_patch16_224",
            "vit_small_patch16_224+eager",
        ]
    )
    """Vision transformers by timm name. Options follow plus signs: ``vit_small_patch16_224+eager``
    (attention matrix in memory, not fused), ``taylorshift_vit_s+heads=12``,
    ``scaleformer_vit_s+identity`` (no attention).
    """
    img_size: list[int] | None = None
    """Image sizes (height and width) in pixels; None: 1024 1280 1536 1792."""
    passes: list[PassName] = field(default_factory=lambda: ["inference"])
    """Any of inference, forward+backward, training_step (with AdamW, its state allocated before).
    """
    precision: list[Precision] = field(  # type: ignore[valid-type]
        default_factory=lambda: ["float32"]
    )
    """Any of float32, bfloat16 (weights, optimizer state and image in bfloat16), amp_bf16, amp_fp16
    (mixed precision with weights in float32, as in training).
    """
    form: list[FormChoice] = field(default_factory=lambda: ["auto"])
    """Any of auto, direct (quadratic), efficient (linear), for visionattn's models; baselines have
    no forms and get one row.
    """
    checkpointing: Literal["without", "with", "both"] = "without"
    """Gradient checkpointing, for passes with a backward."""
    batch: int = 1
    """Batch size."""
    depth: int | None = None
    """Keep only the first blocks of each model, to save time; None: all blocks."""
    device: str = "auto"
    """``auto``: the GPU if there is one, else the CPU."""
    threads: int | None = None
    """CPU threads; None: chosen by torch."""
    budget_gib: float | None = None
    """Memory budget in GiB: a cell with a higher peak counts as out of memory. The peak is the
    memory that PyTorch reserves on a GPU, or the memory of the process on a CPU. None: all memory
    of the GPU, or 80 % of the available memory on a CPU.
    """
    largest: bool = False
    """Search for the largest square image that fits into the budget, for each model, pass,
    precision and form. The search is a bisection over whole patches; each tried size is a row.
    """
    fit_from: int = 1024
    """Smallest image size in pixels for fitting the growth exponent, which needs two sizes."""
    snapshot: str | None = None
    """GPU only: file for the allocations of one cell, for the viewer
    https://pytorch.org/memory_viz.
    """
    output: str | None = None
    """Folder for memory.csv, memory.png and memory.md; created if missing."""
    overwrite: bool = False
    """Replace existing files."""

    @property
    def sizes_px(self) -> list[int]:
        """The image sizes in increasing order; empty for a search."""
        return [] if self.largest else sorted(set(self.img_size or DEFAULT_SIZES_PX))

    @property
    def settings(self) -> str:
        """The settings that all cases share, as one line."""
        names = ("depth", "batch", "passes", "precision", "form", "checkpointing", "fit_from")
        values = {name: getattr(self, name) or "all" for name in names}
        texts = {n: " ".join(v) if isinstance(v, list) else v for n, v in values.items()}
        return ", ".join(f"{name} {text}" for name, text in texts.items())

    def series(self) -> list[Case]:
        """Return a case of size 0 for each line of the plot."""
        found = []
        for model, work, precision in product(self.models, self.passes, self.precision):
            dtype, amp = PRECISIONS[precision]
            how = dict(dtype=dtype, amp=amp, batch=self.batch, depth=self.depth)
            how |= dict(backward=work != "inference", update=work == "training_step")
            choices = {"without": [False], "with": [True], "both": [False, True]}
            checkpointings = choices[self.checkpointing if how["backward"] else "without"]
            forms = self.form if has_forms(model) else ["auto"]
            for form, checkpointing in product(forms, checkpointings):
                found.append(Case("model", model, 0, form=form, checkpointing=checkpointing, **how))
        return list(dict.fromkeys(found))


def check_options(config: ProfileConfig) -> None:
    """Check the options without building a model.

    Raises:
        ValueError: a value is not allowed, options contradict each other or have no effect, or a
            file exists.
    """
    for name in ("models", "passes", "precision", "form"):
        if not getattr(config, name):
            raise ValueError(f"{name} is empty")
    check_least(1, img_size=config.img_size, batch=config.batch, depth=config.depth)
    check_least(1, threads=config.threads, fit_from=config.fit_from)
    check_signs({"budget_gib": config.budget_gib}, {})
    if config.form != ["auto"] and not any(map(has_forms, config.models)):
        raise ValueError(
            f"form needs models of visionattn, got {', '.join(config.models)}; remove it"
        )
    if config.checkpointing != "without" and config.passes == ["inference"]:
        raise ValueError("checkpointing has no effect in inference; pass --passes forward+backward")
    if config.largest and config.img_size:
        raise ValueError("largest searches for the image size; remove img_size")
    if config.snapshot:
        count = len(config.series()) * len(config.sizes_px)
        if count != 1:
            raise ValueError(
                f"expected one cell for snapshot, got {count or 'many'}; pass one model, size, "
                "pass, precision and form"
            )
        check_free(Path(config.snapshot), config.overwrite)
    if config.output:
        folder = Path(config.output)
        check_folder(folder, "choose another --output")
        for name in FILES if folder.is_dir() else ():
            check_free(folder / name, config.overwrite)
