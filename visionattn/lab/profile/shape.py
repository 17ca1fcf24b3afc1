"""What the shape of a model says of images and tokens, without running it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from timm.models import VisionTransformer

from visionattn.cli.files import first_line
from visionattn.lab.cases import Case
from visionattn.lab.networks import build_model
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.building import check_img_size
from visionattn.models.weights import UNBUILDABLE


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that decide its tokens."""

    patch_px: int
    """Images are a whole number of so many pixels high and wide."""
    patch_area_px: int
    prefix: int
    """Tokens besides the patches."""
    taylor_width: int | None
    """Width d of a head of TaylorShift; None for another attention."""

    @classmethod
    def of(cls, case: Case, sizes_px: Sequence[int] = ()) -> "Shape":
        """Follow shapes alone.

        Raises:
            ValueError: the model of the case cannot be built or is no vision transformer, or one of
                the sizes is not a whole number of its patches.
        """
        try:
            model = build_model(case, "meta")
        except UNBUILDABLE as error:
            raise ValueError(
                f"{case.name} cannot be built for any image size: {first_line(error)}"
            ) from error
        if not isinstance(model, VisionTransformer):
            raise ValueError(
                f"{case.name} is no vision transformer of timm's or of visionattn; memory over "
                f"tokens is of those"
            )
        check_img_size(model, sizes_px)
        rows, columns = model.patch_embed.patch_size
        ours = isinstance(model, VisionAttnTransformer) and "identity" not in case.options
        attention = model.blocks[0].attn
        width = attention.head_dim if ours and attention.attention == "taylorshift" else None
        return cls(math.lcm(rows, columns), rows * columns, model.num_prefix_tokens, width)

    def tokens(self, px: int) -> int:
        """Return tokens of a square image."""
        return px * px // self.patch_area_px + self.prefix

    def px(self, tokens: int) -> float:
        """Return the side in pixels of the square image that would have so many tokens; no whole
        number.
        """
        return (max(tokens - self.prefix, 0) * self.patch_area_px) ** 0.5
