"""Patches of images of any whole number of patches, and what to say of other images."""

import math

from timm.layers import PatchEmbed
from timm.models import register_notrace_module
from torch import Tensor, nn


@register_notrace_module
class DynamicPatchEmbed(PatchEmbed):
    """timm's PatchEmbed for images of any whole number of patches, ``[B, C, H_px, W_px]`` to
    ``[B, H, W, D]``.

    Sizes are formatted into messages only after a check has failed: formatting them on the good
    path, as timm does, makes a compiler build one graph per size.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Embed; raises ValueError for an image that is not a whole number of patches, or (strict)
        of another size.
        """
        height, width = x.shape[-2:]
        if self.strict_img_size and (height != self.img_size[0] or width != self.img_size[1]):
            raise ValueError(
                f"image of {height} x {width} pixels, but dynamic_img_size=False fixes "
                f"{self.img_size}"
            )
        if self.dynamic_img_pad:
            x = nn.functional.pad(
                x, (0, -width % self.patch_size[1], 0, -height % self.patch_size[0])
            )
        elif height % self.patch_size[0] or width % self.patch_size[1]:
            raise ValueError(wrong_size(height, width, self.patch_size))
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


def wrong_size(
    height: int, width: int, patch_size: tuple[int, int], *, square: bool = False
) -> str:
    """Say that an image is not a whole number of patches, and name the nearest sizes that fit.

    Args:
        height, width: size of the image in pixels.
        patch_size: height and width of a patch in pixels.
        square: the image is a square; name only squares.
    """

    def nearest(pixels: int, patch: int) -> str:
        below, above = pixels // patch * patch, -(-pixels // patch) * patch
        return str(pixels) if below == above else f"{below} or {above}" if below else str(above)

    rows, columns = patch_size
    patch = rows if rows == columns else f"{rows} x {columns}"
    way_out = (
        f"the nearest that fit: {nearest(height, math.lcm(rows, columns))}"
        if square
        else f"crop or pad it to {nearest(height, rows)} x {nearest(width, columns)}"
    )
    return (
        f"image of {height} x {width} pixels is not a whole number of {patch}-pixel patches; "
        f"{way_out}"
    )
