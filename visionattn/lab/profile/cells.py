"""``Cell``: one model at one size, pass, precision and form, as plain values that a fresh process
can be told.

Owns the names of passes and precisions, and what a model's shape says without running it. It
measures nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from timm.models import VisionTransformer
from torch import nn

from visionattn.cli.files import first_line
from visionattn.lab.cases import Case
from visionattn.lab.networks import build_model, set_form
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.weights import UNBUILDABLE
from visionattn.training.build import check_img_size

PASSES = ("inference", "forward+backward", "training_step")
PRECISIONS = {
    "float32": ("float32", "none"),
    "bfloat16": ("bfloat16", "none"),
    "amp_bf16": ("float32", "bf16"),
    "amp_fp16": ("float32", "fp16"),
}
"""Dtype of weights and image, and the mixed precision of the training."""


@dataclass(frozen=True)
class Cell:
    """One model at one size."""

    model: str
    """A timm name, with options behind plus signs as in ``visionattn.lab``:
    ``vit_small_patch16_224+eager``.
    """
    px: int
    """Height and width of the images."""
    work: str = "inference"
    """One of ``PASSES``."""
    precision: str = "float32"
    """One of ``PRECISIONS``."""
    form: str = "auto"
    checkpointing: bool = False
    batch: int = 1
    depth: int | None = None
    """Blocks that are kept, from the first; None: all."""

    @property
    def case(self) -> Case:
        """The model and its image, in the words of the benchmark."""
        dtype = PRECISIONS[self.precision][0]
        options = dict(
            form=self.form, dtype=dtype, backward=self.work != "inference", batch=self.batch
        )
        return Case("model", self.model, self.px, **options)

    @property
    def series(self) -> tuple:
        """What the cells of one line of the plot share: everything but the size."""
        return tuple(value for name, value in self.as_dict().items() if name != "px")

    def as_dict(self) -> dict:
        """Return the fields, for JSON; ``Cell(**fields)`` is the cell again."""
        return asdict(self)

    def build(self, device: str = "cpu") -> nn.Module:
        """Return the model with seeded weights, cut to its depth, in its form, checkpointed where
        the cell says so.

        Raises:
            ValueError: an unknown name, an option or a form that the model has not, or a depth
                beyond its own.
        """
        try:
            model = build_model(self.case, device)
        except UNBUILDABLE as error:
            raise ValueError(
                f"{self.model} cannot be built for any image size: {first_line(error)}"
            ) from error
        if not isinstance(model, VisionTransformer):
            raise ValueError(
                f"{self.model} is no vision transformer of timm's or of visionattn; memory over "
                f"tokens is of those"
            )
        if self.depth is not None:
            if self.depth > len(model.blocks):
                raise ValueError(f"depth {self.depth}: {self.model} has {len(model.blocks)} blocks")
            model.blocks = model.blocks[: self.depth]
        set_form(model, self.form)
        model.set_grad_checkpointing(self.checkpointing)
        return model


@dataclass(frozen=True)
class Shape:
    """What counts tokens."""

    patch_px: int
    """Images are a whole number of so many pixels high and wide."""
    patch_area_px: int
    prefix: int
    """Tokens besides the patches."""
    taylor_width: int | None
    """Width d of a head of TaylorShift; None for another attention."""

    @classmethod
    def of(cls, cell: Cell, sizes_px: Sequence[int] = ()) -> "Shape":
        """Follow shapes alone.

        Raises:
            ValueError: the model of the cell cannot be built, or one of the sizes is not a whole
                number of its patches.
        """
        model = cell.build("meta")
        check_img_size(model, sizes_px)
        rows, columns = model.patch_embed.patch_size
        ours = isinstance(model, VisionAttnTransformer) and "identity" not in cell.case.options
        attention = model.blocks[0].attn
        width = attention.head_dim if ours and attention.attention == "taylorshift" else None
        return cls(math.lcm(rows, columns), rows * columns, model.num_prefix_tokens, width)

    def tokens(self, px: int) -> int:
        """Return tokens of a square image."""
        return px * px // self.patch_area_px + self.prefix

    def px(self, tokens: int) -> float:
        """Side of the square image that would have so many tokens; no whole number."""
        return (max(tokens - self.prefix, 0) * self.patch_area_px) ** 0.5
