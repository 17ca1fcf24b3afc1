"""Describe an operation or model to measure as a ``Case``. Benchmarks, profiles, targets and the
GPU table use it.

A case consists of plain values, so that it can be sent to a fresh process. This module owns the
names of passes and precisions. It measures nothing. A sweep varies a training configuration instead
(``sweep/head_grid.py``).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

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
"""The dtype of weights and image, and the mixed precision, by the name of the precision."""


@dataclass(frozen=True)
class Case:
    """One operation or model at one size, with its settings."""

    kind: str
    """"operation" or "model"."""
    name: str
    """The operation or model, with options after plus signs: ``kernelized+joint``,
    ``scaleformer_vit_s+identity``.
    """
    size: int
    """Number of tokens of an operation; height and width in pixels of a model's image."""
    width: int | None = None
    """Head dimension d of an operation; None for a model."""
    form: str = "auto"
    """"auto", "direct" or "efficient"; baselines have only "auto"."""
    dtype: str = "float32"
    backward: bool = False
    """Run forward and backward, not only the forward."""
    batch: int = 1
    heads: int = 6
    """Heads of an operation. For a model use the option ``heads=12`` in its name."""
    horizon: int = 3
    """Horizon R of the relative position of an operation."""
    image_width: int | None = None
    """Width in pixels of a model's image; None: ``size``."""
    amp: str = "none"
    """Mixed precision of a model: "none", "bf16" or "fp16"; its weights are in ``dtype``."""
    update: bool = False
    """Update a model's weights after the backward, as in a training step."""
    checkpointing: bool = False
    """Use gradient checkpointing in a model's blocks."""
    depth: int | None = None
    """Keep only the first ``depth`` blocks of a model; None: all."""

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
        """The options after the plus signs."""
        return tuple(self.name.split("+")[1:])

    @property
    def label(self) -> str:
        """The name, with the form unless it is "auto"."""
        return self.name if self.form == "auto" else f"{self.name} {self.form}"

    @property
    def place(self) -> "Case":
        """The case without name and form; equal for cases that may be compared."""
        return replace(self, name="", form="auto")

    @property
    def work(self) -> str:
        """One of ``PASSES``."""
        return PASSES[self.backward + self.update]

    @property
    def precision(self) -> str:
        """The name of the dtype or of the mixed precision."""
        return self.dtype if self.amp == "none" else f"amp_{self.amp}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as PyTorch's object."""
        return getattr(torch, self.dtype)


def check_sizes(case: Case) -> None:
    """Check that the inputs of a case fit into the available memory.

    A case that runs out of memory later gets a row that says so.

    Raises:
        ValueError: the inputs do not fit; one line.
    """
    values = case.batch * 3 * math.prod(case.image_size)
    if case.kind == "operation":
        classes = (2 * case.horizon + 1) ** (2 if "joint" in case.options else 1)
        values = case.heads * (case.width or 1) * (3 * case.batch * case.size + classes)
    inputs, memory = values * case.torch_dtype.itemsize, memory_there_is(torch.device("cpu"))
    if memory is not None and inputs > MARGIN * memory:
        raise ValueError(
            f"{case.label} at {case.size:,}: its inputs need {inputs / 2**30:,.4g} GiB of "
            f"{memory / 2**30:,.4g} GiB; pass smaller sizes"
        )


@dataclass(frozen=True)
class Work:
    """The function of a case with its tensors; call it to run the case once."""

    function: Callable[..., Tensor]
    """The operation or model; called with the tensors by name."""
    tensors: dict[str, Tensor]
    leaves: tuple[Tensor, ...]
    """Tensors whose gradients the backward pass computes."""
    backward: bool

    def forward(self) -> Tensor:
        """Return the result, with a graph if gradients are enabled."""
        return self.function(**self.tensors)

    def __call__(self) -> object:
        if not self.backward:
            with torch.inference_mode():
                return self.forward()
        out = self.forward()
        return torch.autograd.grad(out, self.leaves, torch.ones_like(out), allow_unused=True)
