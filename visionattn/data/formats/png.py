"""What the chunks of a PNG say that Pillow does not: bits of 16-bit files, where EXIF stands."""

import struct
from typing import BinaryIO, NamedTuple

import numpy as np

_PNG = b"\x89PNG\r\n\x1a\n"


def exif_follows_pixels(file: BinaryIO) -> bool:
    """Tell whether a PNG has its EXIF behind its pixels, as few have; Pillow reads that before
    them.
    """
    file.seek(len(_PNG))
    behind = False
    while len(start := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", start)
        behind = behind or kind == b"IDAT"
        if behind and kind == b"eXIf":
            return True
        if behind and kind in (b"tEXt", b"zTXt", b"iTXt"):
            text = file.read(min(length, 24))
            if text.startswith((b"Raw profile type exif", b"XML:com.adobe.xmp")):
                return True
            length -= len(text)
        file.seek(length + 4, 1)
    return False


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


def wide_png(file: BinaryIO) -> WidePng | None:
    """Read the header of a PNG up to its pixels; None where it has no 16 bits."""
    file.seek(0)
    head = file.read(33)
    if len(head) < 33 or head[:8] != _PNG or head[24] != 16:
        return None
    bands = {0: 1, 2: 3, 4: 2, 6: 4}.get(head[25], 1)
    while len(start := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", start)
        if kind == b"IDAT":
            break
        content = file.read(length + 4)
        if kind == b"sBIT" and length and max(content[:length]) < 16:
            return WidePng(bands, max(content[:length]))
    return WidePng(bands, None)
