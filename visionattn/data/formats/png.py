"""What a PNG says that Pillow does not: bits of 16-bit files, and EXIF behind the pixels."""

import os
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import ImageFile

TAIL_BYTES = 2**16
"""Bytes at the end of a file in which EXIF begins that stands behind the pixels."""
EXIF = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
WIDE = {"I;16B": 1, "LA;16B": 2, "RGB;16B": 3, "RGBA;16B": 4}
"""Bands by the kind of pixels that Pillow finds in a PNG of 16 bits."""


def exif_follows_pixels(file: BinaryIO) -> bool:
    """Tell whether a PNG may have its EXIF behind its pixels, as few have; Pillow reads that before
    them.
    """
    file.seek(-min(TAIL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
    tail = file.read()
    behind = tail[max(0, tail.find(b"IDAT")) :]
    return any(each in behind for each in EXIF)


class WidePng(NamedTuple):
    """What the header of a PNG of 16 bits says."""

    bands: int
    bits: int | None

    def unscaled(self, pixels: np.ndarray) -> np.ndarray:
        """Return values of ``bits`` bits. The standard asks that fewer bits are scaled to 16, by
        zeros or by the upper bits below them; files that hold them as they are exist too.
        """
        if self.bits is None:
            return pixels
        low = pixels & (2 ** (16 - self.bits) - 1)
        above = pixels >> (16 - self.bits)
        repeated = above >> max(0, 2 * self.bits - 16)
        scaled = not low.any() or np.array_equal(low, repeated)
        return above if scaled else pixels


def wide_png(image: ImageFile.ImageFile, file: BinaryIO) -> WidePng | None:
    """Return the bands of a PNG of 16 bits, and the bits of its chunk sBIT, which Pillow passes
    over; None for another PNG.
    """
    bands = WIDE.get(str(image.tile[0].args)) if image.tile else None
    if bands is None:
        return None
    file.seek(0)
    head = file.read(TAIL_BYTES).partition(b"IDAT")[0]
    found = head.find(b"sBIT")
    bits = max(head[found + 4 : found + 4 + bands]) if found > 0 else 16
    return WidePng(bands, bits if bits < 16 else None)
