"""Images that Pillow decodes: JPEG, PNG, WebP, GIF, BMP, JPEG 2000 and plain TIFF.

This module maps Pillow's modes to bands and values, and reads at reduced sizes where JPEG and JPEG
2000 allow it. Pillow supports no colors of more than 8 bits: imagecodecs decodes 16-bit PNG, and
other readers decode such TIFF and JPEG 2000.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import ExifTags, Image

from visionattn.data.formats.reader import (
    BROKEN,
    DAMAGED_IMAGE,
    TURNS,
    Reader,
    check_page,
    damage,
    pick,
    require,
    smaller_part,
)
from visionattn.data.formats.value_meaning import Meaning
from visionattn.data.geometry import Box

CONVERTED = {"1": "L", "LA": "LA", "La": "LA", "PA": "RGBA", "RGBA": "RGBA", "RGBa": "RGBA"}
"""Target mode of each image mode; other 8-bit modes become RGB."""
BANDS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}
_J2K_START = b"\xff\x4f\xff\x51"
WIDE = {"I;16B": 1, "LA;16B": 2, "RGB;16B": 3, "RGBA;16B": 4}
"""Number of bands by Pillow's pixel type of a 16-bit PNG."""
_limit = threading.Lock()
_allowed: list[int | None] = []
"""Pillow's own limit, once per image being read."""


@contextmanager
def large_images_allowed() -> Iterator[None]:
    """Lift Pillow's limit of 179 million pixels while an image is read, because slides and
    satellite images exceed it.

    Readers have their own limit. Safe for several threads.
    """
    with _limit:
        _allowed.append(_allowed[0] if _allowed else Image.MAX_IMAGE_PIXELS)
        Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        with _limit:
            before = _allowed.pop()
            if not _allowed:
                Image.MAX_IMAGE_PIXELS = before


class PillowImage(Reader):
    """An image that Pillow opens."""

    def __init__(self, file: BinaryIO, page: int | None):
        self._file, self._page = file, page
        self._pixels: np.ndarray | None = None
        self._scale = 1
        self._image = self._open()
        pixels = getattr(self._image, "tile", [])[:1] if self._image.format == "PNG" else []
        self._wide = next((WIDE.get(str(each.args)) for each in pixels), None)
        """Number of bands of a 16-bit PNG; None for other images."""
        self.codestream = _codestream(file) if self._image.format == "JPEG2000" else None
        self.stored = self._image.size[::-1]
        if self._image.format != "TIFF":  # Pillow rotates TIFF itself
            self.turn = TURNS.get(_orientation(self._image), TURNS[1])
        self._describe()

    def _open(self) -> Image.Image:
        self._file.seek(0)
        with large_images_allowed():
            image = Image.open(self._file)
            if self._page is not None and self._page > 1:
                image.seek(check_page(self._page, getattr(image, "n_frames", 1)))
        return image

    @property
    def pages(self) -> int:
        """The number of frames."""
        # The second picture in a phone's JPEG is a preview, a gain map or the other eye of a stereo
        # pair.
        if self._image.format == "MPO" and self._page is None:
            return 1
        return getattr(self._image, "n_frames", 1)

    def _describe(self) -> None:
        """Set the bands and values that ``read`` returns."""
        mode = self._image.mode
        if self._wide is not None:
            self.bands, self.alpha = self._wide, self._wide in (2, 4)
            self.dtype = np.dtype(np.uint16)
            return
        if mode == "F" or mode.startswith("I"):
            self.mode, self.bands = mode, 1
            # Pillow scales PGM and PPM to 16 bits, by the maximum in the header.
            whole = "uint16" if self._image.format == "PPM" else "int32"
            self.dtype = np.dtype({"F": "float32", "I": whole}.get(mode, "uint16"))
            self.bits = self._bits()
            return
        self.mode = CONVERTED.get(mode, "L" if mode == "L" else "RGB")
        if mode == "P" and "transparency" in self._image.info:
            self.mode = "RGBA"
        self.bands, self.alpha = BANDS[self.mode], self.mode.endswith("A")
        self.dtype, self.bits = np.dtype(np.uint8), 8
        # Transparency is usually dropped; in TIFF it marks pixels without data, as in GDAL.
        self.meaning = Meaning(alpha=self.alpha and self._image.format == "TIFF")

    def _bits(self) -> int | None:
        """Return the number of bits that integers fill, if the file states it."""
        if self.codestream is not None:
            return self.codestream.bits if self.codestream.bits < 16 else None
        return 16 if self._image.format == "PPM" else None

    def _read(self, box: Box, height: int, width: int, bands: Sequence[int] | None) -> np.ndarray:
        scale = self._largest_scale(min(box.height // height, box.width // width))
        if self._pixels is None or self._scale > scale:
            decode, self._scale = partial(self._decode, scale), scale
            self._pixels = decode() if self.keep is None else self.keep(f"scale {scale}", decode)
        rows, columns = smaller_part(box, (self._scale, self._scale), self._pixels.shape)
        return pick(self._pixels[rows, columns], bands)

    def _largest_scale(self, wanted: int) -> int:
        """Return the decoder's largest reduction factor up to the wanted one."""
        most = 8 if self._image.format in ("JPEG", "MPO") else 1
        if self.codestream is not None:
            most = 2**self.codestream.levels
        return min(most, 1 << (max(1, wanted).bit_length() - 1))

    def _decode(self, scale: int) -> np.ndarray:
        """Decode the whole image, reduced by ``scale``: ``[H, W, bands]``."""
        self.check_decoded(self.stored[0] // scale, self.stored[1] // scale)
        if self._wide is not None:
            return self._decode_wide_png()
        if not getattr(self._image, "tile", True):  # already decoded at another size
            self._image = self._open()
        image = self._image
        if self.codestream is not None:
            image.reduce = scale.bit_length() - 1
        elif scale > 1:
            image.draft(None, tuple(px // scale for px in image.size))
        with large_images_allowed():
            if self.dtype == np.uint8 and image.mode != self.mode:
                image = image.convert(self.mode)
            pixels = np.asarray(image).astype(self.dtype, copy=False)
        if self.codestream is not None and self.bits is not None and self.dtype == np.uint16:
            pixels = pixels >> (16 - self.bits)  # Pillow scales these to 16 bits
        return pixels.reshape(*pixels.shape[:2], -1)

    def _decode_wide_png(self) -> np.ndarray:
        import imagecodecs

        self._file.seek(0)
        with damage("PNG of 16 bits", imagecodecs.PngError):
            pixels = imagecodecs.png_decode(self._file.read())
        # A single transparent color becomes a band of transparency, which is not read.
        return pixels.reshape(*pixels.shape[:2], -1)[..., : self.bands]

    def close(self) -> None:
        """Close the file."""
        self._image.close()
        self._file.close()


def _orientation(image: Image.Image) -> object:
    """Return the EXIF orientation; 1 if EXIF is malformed, or follows the pixels of a PNG."""
    try:
        exif = Image.Image.getexif(image)  # Pillow's PNG version would decode all pixels
        return exif.get(ExifTags.Base.Orientation, 1)
    except (*DAMAGED_IMAGE, *BROKEN):
        return 1


class _Codestream(NamedTuple):
    """Header fields of a JPEG 2000."""

    bits: int
    levels: int
    """How many times decoding can halve the image."""


def _codestream(file: BinaryIO) -> _Codestream:
    """Return the bits per sample and the levels from the first 64 KiB of a JPEG 2000."""
    file.seek(0)
    head = file.read(2**16)
    start = head.find(_J2K_START)
    if start < 0:
        return _Codestream(8, 0)
    bands = int.from_bytes(head[start + 40 : start + 42], "big")
    sizes = head[start + 42 : start + 42 + 3 * bands : 3]
    coding = head.find(b"\xff\x52", start)
    levels = head[coding + 9] if 0 <= coding < len(head) - 9 else 0
    return _Codestream(max((size & 127) + 1 for size in sizes) if sizes else 8, levels)


def open_reader(file: BinaryIO, page: int | None) -> Reader:
    """Open an image with Pillow, or with rasterio if Pillow would lose bits."""
    with damage("image"):
        image = PillowImage(file, page)
    # With several 12-bit bands in 16 bits, Pillow keeps the upper 8 bits: nearly black.
    if image.codestream is None or image.codestream.bits <= 8 or image.dtype != np.uint8:
        return image
    what = f"JPEG 2000 of {image.codestream.bits} bits and several bands"
    require("raster", "rasterio", what=what)
    from visionattn.data.formats.gdal_raster import Raster

    return Raster(file, page)
