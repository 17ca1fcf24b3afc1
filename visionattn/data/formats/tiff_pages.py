"""Structure of TIFF files: which parts form one image, and the meaning of values according to the
tags.

It covers channels stored as pages (OME, ImageJ), smaller copies, masks, palettes, inks and GDAL's
metadata.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from visionattn.data.formats.reader import NotAsAsked
from visionattn.data.formats.value_meaning import (
    Meaning,
    of_inks,
    of_lab,
    of_ycbcr,
)

PHOTOMETRIC, GEO_KEYS, GDAL_METADATA, GDAL_NODATA = 262, 34735, 42112, 42113
MIN_IS_WHITE, MIN_IS_BLACK, RGB, PALETTE, INKS, YCBCR, LAB = 0, 1, 2, 3, 5, 6, 8
"""Photometric interpretations."""
APERIO_YCBCR = 33003
"""Compression whose values are luma and chroma, whatever the photometric interpretation says."""
SLIDES = ("svs", "ndpi", "scn", "bif", "qpi")
"""Slide formats whose levels tifffile supports."""
REDUCED, MASK = 1, 4
"""Bits of the tag that distinguishes smaller copies and masks from pages."""


class Plane(NamedTuple):
    """A page of the file, or one of several images stored consecutively in it."""

    page: Any
    shift: int = 0
    """Offset in bytes from the page's own image."""


def page_size(page) -> tuple[int, int]:
    """Return height and width of a page."""
    return int(page.imagelength), int(page.imagewidth)


def page_places(tiff) -> list[int]:
    """Return the indices of the pages that are neither smaller copies nor masks."""
    return [n for n, page in enumerate(tiff.pages) if not page.subfiletype & (REDUCED | MASK)]


def page_levels(tiff, place: int) -> tuple[list[list[Plane]], bool]:
    """Return the planes of a page and of its smaller copies, the largest first, and whether a mask
    marks pixels without data.

    The planes of a page are its bands. Smaller copies are inside the page or follow it in the file.
    """
    page = tiff.pages[place]
    found = list(page.pages or [])
    for following in range(place + 1, len(tiff.pages)):
        if not tiff.pages[following].subfiletype & (REDUCED | MASK):
            break
        found.append(tiff.pages[following])
    kind = page.dtype, page.samplesperpixel
    copies = [
        copy
        for copy in sorted(found, key=page_size, reverse=True)
        if copy.subfiletype & (REDUCED | MASK) == REDUCED
        and (copy.dtype, copy.samplesperpixel) == kind
        and copy.imagelength < page.imagelength
    ]
    masked = any(each.subfiletype & MASK for each in found)
    return [[Plane(each)] for each in (page, *copies)], masked


def named_images(tiff) -> list[tuple[Any, np.ndarray]]:
    """Return the images of an OME or ImageJ file, whose axes are named, or of a slide; empty for
    other files.

    Each image, one per depth and time, is a series and the indices of its channels in it. Of a
    slide it is the largest picture, without labels and thumbnails.
    """
    images = []
    found = tiff.series if tiff.is_ome or tiff.is_imagej else []
    if any(getattr(tiff, f"is_{maker}") for maker in SLIDES):
        found = [max(tiff.series, key=lambda series: math.prod(series.shape))]
    for series in found:
        lengths = {
            axis: length
            for axis, length in zip(series.axes, series.shape, strict=True)
            if axis not in "SYX"
        }
        numbers = np.arange(math.prod(lengths.values())).reshape(*lengths.values(), 1)
        if "C" in lengths:
            numbers = np.moveaxis(numbers, list(lengths).index("C"), -1)
        images += [(series, each) for each in numbers.reshape(-1, lengths.get("C", 1))]
    return images


def named_levels(tiff, series, numbers: np.ndarray) -> list[list[Plane]]:
    """Return the planes of one of ``named_images``, and of its smaller copies."""
    return [_planes(tiff, level, numbers) for level in series.levels]


def _planes(tiff, series, numbers: np.ndarray) -> list[Plane]:
    if series.is_truncated:  # ImageJ lists only the first page of large stacks
        page = series.pages[0]
        return [Plane(page, int(number) * page.nbytes) for number in numbers]
    pages = [series.pages[int(number)] for number in numbers]
    if any(page is None or page.parent is not tiff for page in pages):
        raise NotAsAsked("channels of this OME-TIFF are in other files; write them into one")
    return [Plane(page.aspage()) for page in pages]


def colours_of(page, bands: int) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return a function that computes red, green and blue from ``bands`` values without
    transparency; None if the values already are gray levels, colors or bands.
    """
    if (page.compression, bands) == (APERIO_YCBCR, 3):
        return of_ycbcr
    if (page.photometric, bands) == (LAB, 3) and page.dtype in (np.uint8, np.uint16):
        return of_lab
    # 8-bit inks are left to Pillow: JPEG may hold them inverted.
    return of_inks if (page.photometric, bands, page.dtype) == (INKS, 4, np.uint16) else None


def palette_of(page, bands: int) -> np.ndarray | None:
    """Return the palette of a page with ``bands`` values, uint8 ``[n, 3]``; None without one."""
    # rasterio leaves zeros as black in the tag, but GDAL uses the palette anyway.
    indexed = page.photometric == PALETTE or (
        page.photometric == MIN_IS_BLACK and GEO_KEYS in page.tags
    )
    if not indexed or bands != 1 or page.colormap is None or page.dtype.kind != "u":
        return None
    # As in GDAL; old files have 8-bit colors.
    step = 256 if not (page.colormap % 256).any() else 257
    return (page.colormap.T // (step if page.colormap.max() > 255 else 1)).astype(np.uint8)


def meaning_of(page, bands: int, *, alpha: bool) -> Meaning:
    """Return the meaning of the ``bands`` stored values of a page; with ``alpha`` the last is
    transparency.
    """
    palette, colours = (make(page, bands - alpha) for make in (palette_of, colours_of))
    return Meaning(palette, colours, alpha=alpha)
