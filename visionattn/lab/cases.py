"""``Case``: what is run, as plain values that a fresh process can be told. Benchmarks, profiles,
targets and the table of a GPU all name their work by it.

This module owns the names of cases, passes and precisions. It knows nothing of how they are
measured. A sweep varies a training instead (``sweep/head_grid.py``).
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from visionattn.cli.memory import MARGIN, memory_there_is

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
    def place(self) -> "Case":
        """The same without name and form: cases that may be compared share it."""
        return replace(self, name="", form="auto")

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


def check_sizes(case: Case) -> None:
    """Check that the inputs of a case fit into the memory there is, before they are made. What may
    be too much for another reason is measured nevertheless: its row says so.

    Raises:
        ValueError: they do not; one line.
    """
    values = case.batch * 3 * math.prod(case.image_size)
    if case.kind == "operation":
        classes = (2 * case.horizon + 1) ** (2 if "joint" in case.options else 1)
        values = case.heads * (case.width or 1) * (3 * case.batch * case.size + classes)
    inputs, memory = values * case.torch_dtype.itemsize, memory_there_is(torch.device("cpu"))
    if memory is not None and inputs > MARGIN * memory:
        raise ValueError(
            f"{case.label} at {case.size:,}: its inputs alone take {inputs / 2**30:,.4g} GiB, and "
            f"there are {memory / 2**30:,.4g}; name smaller sizes"
        )


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
