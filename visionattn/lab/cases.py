"""``Case``: one operation or model at one size, as plain values that a fresh process can be told.

Owns the names of cases. It knows nothing of how they are measured.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from visionattn.ops.attentions import FORM_CHOICES

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Case:
    """One operation or model at one size."""

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
        return (self.kind, *sizes, self.dtype, self.backward)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return getattr(torch, self.dtype)

    def as_dict(self) -> dict:
        """Return the fields, for JSON; ``Case(**fields)`` is the case again."""
        return asdict(self)


def forms_to_check(case: Case, has_forms: bool) -> tuple[str, ...]:
    """Return the form of the case. Where that is "auto" and there are several, each: the size of
    the check may take another one.
    """
    return FORM_CHOICES if case.form == "auto" and has_forms else (case.form,)


@dataclass(frozen=True)
class Work:
    """What a case runs: call it for one run."""

    function: Callable[..., Tensor]
    """Of the tensors by name."""
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
