"""The meaning of a file's stored values, for any reader: colors, physical units, and pixels
without data.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

_D50 = np.array([0.9642, 1.0, 0.8249])
_RED, _GREEN = [3.1338561, -1.6168667, -0.4906146], [-0.9787684, 1.9161415, 0.0334540]
_TO_SRGB = np.array([_RED, _GREEN, [0.0719453, -0.2289914, 1.4052427]])
"""Matrix from XYZ under D50 to linear sRGB, Bradford-adapted (http://www.brucelindbloom.com)."""


@dataclass(frozen=True)
class Meaning:
    """The conversion of a file's stored bands to values.

    Args:
        palette: colors of the first band's values, uint8 ``[n, 3 or 4]``, with transparency if 4;
            other values are black.
        colours: computes red, green and blue from all stored bands.
        scale: physical units per step of each band; None: values as stored.
        offset: physical value of 0 in each band.
        nodata: no-data value of each stored band, without an entry for a transparency band that has
            none; empty if there is none. If all bands share one value, a pixel has no data if all
            bands have it, as in GDAL; else each band counts separately.
        alpha: the last band is 0 for pixels without data, whatever the other bands hold.
    """

    palette: np.ndarray | None = None
    colours: Callable[[np.ndarray], np.ndarray] | None = None
    scale: Sequence[float] | None = None
    offset: Sequence[float] | None = None
    nodata: tuple[float | None, ...] = ()
    alpha: bool = False

    @property
    def coloured(self) -> bool:
        """Whether stored bands become red, green and blue."""
        return self.palette is not None or self.colours is not None

    def values(
        self,
        read: Callable[[Sequence[int] | None], np.ndarray],
        empty: np.ndarray | None,
        bands: Sequence[int] | None,
    ) -> np.ndarray:
        """Read bands of a part of an image as values.

        Args:
            read: returns stored bands ``[h, w, n]`` by their indices from 0; None: all.
            empty: bool ``[h, w]``, True where the file's mask marks no data; None: it has no mask.
            bands: indices from 0 of the wanted bands (of the colors, if there are); None: all.

        Returns:
            ``[h, w, bands]``, a masked array if some pixels have no data. NaN counts as no data.
        """
        stored_bands = None if self.coloured else bands
        with_alpha = self.alpha and empty is None and stored_bands is not None
        stored = read([*stored_bands, -1] if with_alpha else stored_bands)
        last = stored[..., -1:]
        stored = stored[..., :-1] if with_alpha else stored
        if empty is not None:
            empty = empty[..., None]
        else:
            empty = last == 0 if self.alpha else np.zeros(1, bool)
            if self.nodata:
                empty = empty | self._without_data(stored, read, stored_bands)
        if self.palette is not None:
            table = np.pad(self.palette, ((0, 1), (0, 0)))
            stored = table.take(stored[..., 0], axis=0, mode="clip")
            if stored.shape[2] == 4:
                empty = empty | (stored[..., 3:] == 0)
        if self.colours is not None:
            stored = self.colours(stored)
        if self.coloured:
            stored = stored[..., slice(3) if bands is None else list(bands)]
        elif self.scale is not None:
            chosen = slice(None) if bands is None else list(bands)
            scale, offset = np.array(self.scale)[chosen], np.array(self.offset)[chosen]
            stored = (stored * scale + offset).astype(np.float32)
        if stored.dtype.kind == "f" and (lost := np.isnan(stored)).any():
            empty = empty | lost
        if not empty.any():
            return stored
        return np.ma.MaskedArray(stored, np.broadcast_to(empty, stored.shape))

    def _without_data(
        self,
        stored: np.ndarray,
        read: Callable[[Sequence[int] | None], np.ndarray],
        bands: Sequence[int] | None,
    ) -> np.ndarray:
        """Return the no-data mask per band, ``[h, w, n]``, or for all bands, ``[h, w, 1]``."""
        stored = stored[..., : len(self.nodata)]
        if len(set(map(str, self.nodata))) > 1:
            own = self.nodata if bands is None else [self.nodata[band] for band in bands]
            return np.stack([_equal(stored[..., i], value) for i, value in enumerate(own)], 2)
        empty = np.asarray(_equal(stored, self.nodata[0]).all(2, keepdims=True))
        others = [] if bands is None else sorted({*range(len(self.nodata))} - {*bands})
        if others and empty.any():
            empty &= _equal(read(others), self.nodata[0]).all(2, keepdims=True)
        return empty


def _equal(values: np.ndarray, nodata: float | None) -> np.ndarray:
    if nodata is None:
        return np.zeros(values.shape, bool)
    return np.isnan(values) if math.isnan(nodata) else np.equal(values, nodata)


def scaling(scales: Sequence[float], offsets: Sequence[float]) -> dict[str, Sequence[float]]:
    """Return ``scale`` and ``offset`` for ``Meaning``; empty if they change no value."""
    same = all(scale == 1 for scale in scales) and not any(offsets)
    return {} if same else {"scale": scales, "offset": offsets}


def join(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join parts of an image vertically, masked or not."""
    if len(parts) == 1:
        return parts[0]
    masked = any(isinstance(part, np.ma.MaskedArray) for part in parts)
    return np.ma.concatenate(parts) if masked else np.concatenate(parts)


def of_inks(stored: np.ndarray) -> np.ndarray:
    """Return red, green and blue from cyan, magenta, yellow and black, as Pillow computes them."""
    most = float(np.iinfo(stored.dtype).max)
    paper = most - stored[..., :4].astype(np.float64)
    return np.rint(paper[..., :3] * paper[..., 3:] / most).astype(stored.dtype)


def of_ycbcr(stored: np.ndarray) -> np.ndarray:
    """Return red, green and blue from 8-bit luma and chroma, as in JPEG."""
    height, width = stored.shape[:2]
    image = Image.frombytes("YCbCr", (width, height), np.ascontiguousarray(stored).tobytes())
    return np.asarray(image.convert("RGB"))


def of_lab(stored: np.ndarray) -> np.ndarray:
    """Return sRGB from L*, a* and b* of TIFF (photometric 8: a* and b* are signed) under D50."""
    most = np.iinfo(stored.dtype).max
    step = 2 ** (8 * stored.dtype.itemsize - 8)
    signed = stored[..., 1:3].astype(stored.dtype.str.replace("u", "i")) / step
    y = (stored[..., 0] * (100 / most) + 16) / 116
    f = np.stack([y + signed[..., 0] / 500, y, y - signed[..., 1] / 200], 2)
    xyz = np.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29)) * _D50
    linear = np.clip(xyz @ _TO_SRGB.T, 0, 1)
    srgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.rint(srgb * most).astype(stored.dtype)
