"""What the chunks of a PNG say that Pillow does not: bits of 16-bit files, where EXIF stands, and
whether all rows are there.
"""

import struct
import zlib
from collections.abc import Iterator
from math import ceil
from typing import BinaryIO, NamedTuple

import numpy as np

_PNG = b"\x89PNG\r\n\x1a\n"
_BANDS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Values of a pixel by the colour type of the header."""
_ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2))
_ADAM7 += ((1, 0, 2, 1),)
"""First row and column, and steps of rows and columns, of each pass of an interlaced file."""
_PIECE_BYTES = 2**20


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


def check_rows(file: BinaryIO) -> None:
    """Raise ValueError where a PNG holds fewer rows than its header says.

    The pixels are decompressed and counted, not kept.
    """
    file.seek(0)
    head = file.read(33)
    width, height, bits, colour, _, _, interlaced = struct.unpack(">IIBBBBB", head[16:29])
    wanted = _stored_bytes(height, width, bits * _BANDS.get(colour, 1), bool(interlaced))
    found = sum(_decompressed(file))
    if found < wanted:
        raise ValueError(
            f"PNG that says it has {height:,} x {width:,} pixels and holds {found:,} of their "
            f"{wanted:,} bytes"
        )


def _stored_bytes(height: int, width: int, bits: int, interlaced: bool) -> int:
    """Return how many bytes pixels of so many bits have before they are compressed, with the byte
    that stands before each row.
    """
    total = 0
    for top, left, down, across in _ADAM7 if interlaced else ((0, 0, 1, 1),):
        rows, columns = ceil((height - top) / down), ceil((width - left) / across)
        if rows > 0 and columns > 0:
            total += rows * (1 + ceil(columns * bits / 8))
    return total


def _decompressed(file: BinaryIO) -> Iterator[int]:
    """Yield the lengths of pieces of the pixels of a PNG, whose next chunk begins here."""
    stream = zlib.decompressobj()
    while len(start := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", start)
        if kind != b"IDAT":
            file.seek(length + 4, 1)
            continue
        while length > 0 and (content := file.read(min(length, _PIECE_BYTES))):
            length -= len(content)
            while content and not stream.eof:
                yield len(stream.decompress(content, _PIECE_BYTES))
                content = stream.unconsumed_tail
        file.seek(4, 1)
