"""``Case``: what is run, as plain values that a fresh process can be told. Benchmarks, profiles,
targets and the table of a GPU all name their work by it.

This module owns the names of cases, passes and precisions. It knows nothing of how they are
measured. A sweep varies a training instead, which its configuration names (``sweep/grid.py``).
"""

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from visionattn.ops.attentions import FORM_CHOICES

DTYPES = ("float32", "bfloat16", "float16", "float64")
PASSES = ("inference", "forward+backward", "training_step")
PRECISIONS = {
    "float32": ("float32", "none"),
    "bfloat16": ("bfloat16", "none"),
    "amp_bf16": ("float32", "bf16"),
    "amp_fp16": ("float32", "fp16"),
}
"""Dtype of weights and image, and the mixed precision, of the models of a profile."""


@dataclass(frozen=True)
class Case:
    """One operation or model at one size, and how it is run."""

    kind: str
    """"operation" or "model"."""
    name: str
    """What is computed, and options behind plus signs: ``kernelized+joint``,
    ``scaleformer_vit_s+identity``.
    """
    size: int
    """Tokens of an operation; height and width in pixels of a model's image."""
    width: int | None = None
    """Width d of a head of an operation; None for a model, which has its own."""
    form: str = "auto"
    """"auto", "direct" or "efficient"; baselines have only "auto"."""
    dtype: str = "float32"
    backward: bool = False
    """Forward and backward, or the forward alone."""
    batch: int = 1
    heads: int = 6
    """Heads of an operation; a model has its own, or those of its option ``heads=12``."""
    horizon: int = 3
    """R of the relative position of an operation."""
    image_width: int | None = None
    """Width in pixels of a model's image; None: as wide as high."""
    amp: str = "none"
    """Mixed precision of a model whose weights are in ``dtype``: "none", "bf16" or "fp16"."""
    update: bool = False
    """Whether the optimiser updates a model's weights after the backward: a step of training."""
    checkpointing: bool = False
    """Gradient checkpointing of a model's blocks."""
    depth: int | None = None
    """Blocks of a model that are kept, from the first; None: all."""

    def __post_init__(self) -> None:
        if self.update and not self.backward:
            raise ValueError(f"{self.name}: a step of training has a backward pass; ask for both")
        of_models = dict(amp="none", update=False, checkpointing=False, depth=None)
        idle = [name for name, usual in of_models.items() if getattr(self, name) != usual]
        if self.kind == "operation" and idle:
            raise ValueError(f"{self.name}: {idle[0]} is of models, and this is an operation")

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels of a model's image."""
        return self.size, self.image_width or self.size

    @property
    def base(self) -> str:
        """The name without options."""
        return self.name.split("+")[0]

    @property
    def options(self) -> tuple[str, ...]:
        """What follows the plus signs."""
        return tuple(self.name.split("+")[1:])

    @property
    def label(self) -> str:
        """Name and form, where a form was asked for."""
        return self.name if self.form == "auto" else f"{self.name} {self.form}"

    @property
    def place(self) -> tuple:
        """What two cases share that may be compared."""
        sizes = (
            self.size,
            self.image_width,
            self.width,
            self.batch,
            self.kind == "model" or self.heads,
        )
        how = (self.dtype, self.amp, self.backward, self.update, self.checkpointing, self.depth)
        return (self.kind, *sizes, *how)

    @property
    def series(self) -> "Case":
        """The same at no size: what the cases of one line of a plot share."""
        return replace(self, size=0)

    @property
    def work(self) -> str:
        """One of ``PASSES``."""
        return PASSES[self.backward + self.update]

    @property
    def precision(self) -> str:
        """The dtype, or the mixed precision that is used instead."""
        return self.dtype if self.amp == "none" else f"amp_{self.amp}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as PyTorch's object."""
        return getattr(torch, self.dtype)

    def as_dict(self) -> dict:
        """Return the fields, for JSON; ``Case(**fields)`` is the case again."""
        return asdict(self)


def forms_to_check(case: Case, has_forms: bool) -> tuple[str, ...]:
    """Return the form of the case. Where that is "auto" and there are several, each: the size of
    the check may take another one.
    """
    return FORM_CHOICES if case.form == "auto" and has_forms else (case.form,)


def check_sizes(case: Case) -> None:
    """Check that a case is within reach of a machine, before anything of its size is made or
    followed. What may be too much is measured nevertheless: its row says so.

    Raises:
        ValueError: the inputs alone take several times the memory that there is, or a pass over all
            pairs of tokens would take days; one line.
    """
    values = case.batch * 3 * math.prod(case.image_size)
    pairs = 0
    if case.kind == "operation":
        classes = 2 * case.horizon + 1
        classes = classes**2 if {"joint"} & set(case.options) else classes
        values = case.heads * case.width * (3 * case.batch * case.size + classes)
        if case.base in ("sdpa", "eager", "softmax") or case.form == "direct":
            pairs = case.batch * case.heads * case.size**2 * case.width
    inputs, memory = values * case.torch_dtype.itemsize, memory_bytes()
    what = f"{case.label} at {case.size:,}"
    if inputs > FAR_BEYOND * memory:
        raise ValueError(
            f"{what}: its inputs alone take {inputs / 2**30:,.4g} GiB, and this machine has "
            f"{memory / 2**30:,.4g} GiB; name smaller sizes"
        )
    if pairs > MOST_PAIRS:
        raise ValueError(
            f"{what}: all pairs of tokens are {4 * pairs:.2g} operations in each run, which takes "
            "days; name smaller sizes"
        )


FAR_BEYOND = 4
"""How many times the memory of a machine inputs may take to be tried all the same."""
MOST_PAIRS = 10**16
"""Pairs of tokens times widths of heads in one run: 4e16 operations, 11 hours at 1e12 a second."""


def memory_bytes() -> int:
    """Return the memory of this machine; where the system does not tell it, a TiB."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2**40


@dataclass(frozen=True)
class Work:
    """What a case runs; a call runs it once."""

    function: Callable[..., Tensor]
    """What is run; it takes the tensors by name."""
    tensors: dict[str, Tensor]
    leaves: tuple[Tensor, ...]
    """Tensors whose gradients a backward pass takes."""
    backward: bool

    def forward(self) -> Tensor:
        """Return the result, with a graph where gradients are enabled."""
        return self.function(**self.tensors)

    def __call__(self) -> object:
        if not self.backward:
            with torch.inference_mode():
                return self.forward()
        out = self.forward()
        return torch.autograd.grad(out, self.leaves, torch.ones_like(out), allow_unused=True)
