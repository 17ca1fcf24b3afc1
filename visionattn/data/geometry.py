"""Preprocessing geometry: how an image of any size is fitted to the model's input size.

This module computes sizes: which part of an image is read, at how many pixels, and how much of the
model's input it fills. It is pure arithmetic, for training and for every command; ``images.py``
reads the pixels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from visionattn.cli.untrusted import refuse
from visionattn.model_config import Fit
from visionattn.models.weights import DataSpec

Size = tuple[int, int]
"""Height and width in pixels."""


LARGEST_SIDE_PX = 2**20
"""Maximum side of an image; resizing libraries support no larger one."""


class TooSmall(ValueError):
    """An image is smaller than a patch."""


class Box(NamedTuple):
    """A rectangle of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


class View(NamedTuple):
    """The part of an image that a model sees, and its size there."""

    box: Box
    """The visible part of the image."""
    content: Size
    """The size that this part is resized to."""
    canvas: Size
    """The size of the model's input, whose top left holds the content."""
    present: Size
    """The part of the model's input that counts: beyond the content, up to whole patches, it
    repeats the last row and column; the rest is absent.
    """


@dataclass(frozen=True)
class Geometry:
    """The fit of images of any size to whole patches.

    Args:
        fit: ``native`` keeps an image's size, and shrinks it to ``img_size`` or ``max_patches``.
            ``pad`` scales it to fit into ``img_size`` and leaves the rest empty. ``stretch``
            changes its aspect ratio to ``img_size``. ``crop`` covers ``img_size`` and cuts off the
            rest around the center.
        img_size: height and width in pixels for ``pad``, ``stretch`` and ``crop``; the maximum for
            ``native`` (None: no limit).
        max_patches: maximum number of patches of an image; only for ``native``.
        patch_px: height and width of a patch in pixels.
        crop: height and width in pixels of the training crops, windows of the view; None: whole
            images.
        crop_around: share of the crops that contain a pixel of a foreground class.
    """

    fit: Fit
    img_size: Size | None
    max_patches: int | None = None
    patch_px: Size = (1, 1)
    crop: Size | None = None
    crop_around: float = 0.0

    def view(self, height: int, width: int) -> View:
        """Return a model's view of a whole image of ``height`` x ``width`` pixels.

        Raises:
            TooSmall: the image is smaller than a patch.
        """
        if self.fit == "native":
            if height < self.patch_px[0] or width < self.patch_px[1]:
                rows, columns = self.patch_px
                raise TooSmall(
                    f"image of {height} x {width} pixels is smaller than a patch of {rows} x "
                    f"{columns}; fit pad, stretch and crop enlarge it"
                )
            content = self._native(height, width)
            canvas = self._whole(content)
            return View(Box(0, 0, height, width), content, canvas, canvas)
        whole = Box(0, 0, height, width)
        if self.fit == "pad":
            content = self._within(height, width, self.img_size)
            return View(whole, content, self.img_size, content)
        if self.fit == "crop":
            whole = centre_box(height, width, self.img_size)
        return View(whole, self.img_size, self.img_size, self.img_size)

    def window(self, content: Size) -> Size:
        """Return height and width of a crop from a view with this content."""
        return min(self.crop[0], content[0]), min(self.crop[1], content[1])

    def cropped(self, view: View, top: int, left: int) -> View:
        """Return the crop of a view whose first pixel is ``top``, ``left`` of its content. The
        content that a small image lacks is absent.
        """
        content = self.window(view.content)
        scales = view.box.height / view.content[0], view.box.width / view.content[1]
        # The pixels of the image whose centers are in the crop.
        first, end = (
            [math.ceil(px * scale - 0.5) for px, scale in zip(corner, scales, strict=True)]
            for corner in ((top, left), (top + content[0], left + content[1]))
        )
        size = max(1, end[0] - first[0]), max(1, end[1] - first[1])
        box = Box(view.box.top + first[0], view.box.left + first[1], *size)
        return View(box, content, self.crop, self._whole(content))

    @property
    def canvas(self) -> Size | None:
        """Return the size of the model's input; None if each image has its own."""
        if self.crop is not None:
            return self.crop
        return None if self.fit == "native" else self.img_size

    def describe(self) -> str:
        """Return the preprocessing in words."""
        if self.crop is not None:
            around = f", {self.crop_around:.0%} of them around objects" if self.crop_around else ""
            whole = replace(self, crop=None).describe()
            return f"{whole}; training on crops of {pixels(self.crop)}{around}"
        if self.fit == "native":
            limit = f", at most {self.max_patches} patches" if self.max_patches else ""
            if self.img_size:
                limit = f", at most {pixels(self.img_size)}"
            return f"native size{limit}"
        what = {
            "pad": "letterbox to",
            "stretch": "stretch to",
            "crop": "center crop to",
        }
        return f"{what[self.fit]} {pixels(self.img_size)}"

    def _whole(self, size: Size) -> Size:
        """Return the size of the fewest whole patches that hold ``size``."""
        rows, columns = (
            -(-px // patch) * patch for px, patch in zip(size, self.patch_px, strict=True)
        )
        return rows, columns

    def _native(self, height: int, width: int) -> Size:
        """Return an image's own size, or a smaller one of whole patches within the limits."""
        if self.max_patches is not None:
            rows, columns = self._whole((height, width))
            if rows // self.patch_px[0] * (columns // self.patch_px[1]) <= self.max_patches:
                return height, width
            return self._within_budget(height, width)
        if self.img_size is None or (height <= self.img_size[0] and width <= self.img_size[1]):
            return height, width
        return self._within(height, width, self.img_size)

    def _within(self, height: int, width: int, size: Size) -> Size:
        """Return the size in whole patches nearest to the image scaled to fit ``size``."""
        scale = min(size[0] / height, size[1] / width)
        rows, columns = (
            min(limit // patch, max(1, round(px * scale / patch))) * patch
            for px, limit, patch in zip((height, width), size, self.patch_px, strict=True)
        )
        return rows, columns

    def _within_budget(self, height: int, width: int) -> Size:
        """Return the largest size in whole patches within the budget, with the aspect ratio as
        close as whole patches allow.
        """
        rows, columns = height / self.patch_px[0], width / self.patch_px[1]
        scale = math.sqrt(self.max_patches / (rows * columns))
        down = (math.floor(rows * scale), math.ceil(rows * scale))
        across = (math.floor(columns * scale), math.ceil(columns * scale))
        grids = [(number, round(columns * number / rows)) for number in {*down}]
        grids += [(round(rows * number / columns), number) for number in {*across}]

        def fitting(grid: Size) -> Size:
            # At least one row and one column; the longer side is reduced to the budget.
            down, across = max(1, grid[0]), max(1, grid[1])
            if down > across:
                return max(1, min(down, self.max_patches // across)), across
            return down, max(1, min(across, self.max_patches // down))

        def worth(grid: Size) -> tuple[float, float]:
            # Patches count less the more the aspect ratio changes; among equals, the smallest
            # change wins.
            change = grid[0] * columns / (grid[1] * rows)
            kept = min(change, 1 / change)
            return round(grid[0] * grid[1] * kept, 6), kept

        within = [grid for grid in map(fitting, grids) if grid[0] * grid[1] <= self.max_patches]
        best = max(within or [(1, 1)], key=worth)
        return best[0] * self.patch_px[0], best[1] * self.patch_px[1]


def pixels(size: Size) -> str:
    """Format a size for people: ``512 x 384 px``."""
    return f"{size[0]} x {size[1]} px"


def sides(img_size: int | Sequence[int] | None) -> Size | None:
    """Return height and width from a size that may be one number for both."""
    if img_size is None:
        return None
    return (img_size, img_size) if isinstance(img_size, int) else (img_size[0], img_size[1])


def geometry_of(spec: DataSpec, patch_px: Size) -> Geometry:
    """Return the geometry for training a model, or of a trained model.

    Args:
        spec: specification of the model's images.
        patch_px: height and width of its patches in pixels.
    """
    return Geometry(spec.fit, sides(spec.img_size), spec.max_patches, patch_px)


def check_geometry(
    fit: Fit, img_size: int | Sequence[int] | None, max_patches: int | None, *, prefix: str = ""
) -> None:
    """Check that the options of a geometry are in range and consistent.

    Args:
        fit, img_size, max_patches: as for ``Geometry``; ``img_size`` may be one number.
        prefix: prefix of option names in messages, such as ``data.``.

    Raises:
        ValueError: one line with the option and a way out.
    """
    if img_size is not None:
        check_sides(img_size, f"{prefix}img_size")
    limited = max_patches is not None
    refuse(
        (limited and max_patches < 1, f"{prefix}max_patches must be above 0, got {max_patches}"),
        (
            limited and fit != "native",
            f"{prefix}max_patches needs fit native, got {fit}; use {prefix}img_size",
        ),
        (
            limited and img_size is not None,
            f"{prefix}img_size and {prefix}max_patches both limit the image size; set one of them "
            "to null",
        ),
        (img_size is None and fit != "native", f"{prefix}fit {fit} needs {prefix}img_size"),
    )


def check_sides(size: int | Sequence[int], key: str) -> None:
    """Raise ValueError for a size that is not one number of pixels in range, or two."""
    if not isinstance(size, int) and len(size) != 2:
        raise ValueError(
            f"{key}: expected one number of pixels, or height and width, got {list(size)}"
        )
    low, high = sorted(sides(size))
    refuse(
        (high > LARGEST_SIDE_PX, f"{key} must be at most {LARGEST_SIDE_PX:,}, got {high:,}"),
        (low < 1, f"{key} must be above 0, got {low}"),
    )


def centre_box(height: int, width: int, size: Size) -> Box:
    """Return the largest centered part of an image that has the aspect ratio of ``size``."""
    scale = min(height / size[0], width / size[1])
    part = min(height, max(1, round(size[0] * scale))), min(width, max(1, round(size[1] * scale)))
    return Box((height - part[0]) // 2, (width - part[1]) // 2, *part)
