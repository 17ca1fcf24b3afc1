"""Which TIFF goes to which reader: tifffile reads most, rasterio what is georeferenced where it is
installed, and Pillow inks of 8 bits, black-and-white and the like, whose colours it knows.
"""

import importlib.util
import os
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from visionattn.data.formats.pillow import PillowImage
from visionattn.data.formats.reader import (
    DAMAGED_IMAGE,
    MissingPackage,
    NotAsAsked,
    Reader,
    one_line,
)
from visionattn.data.formats.tiff_image import TiffImage, damage_of_tiff
from visionattn.data.formats.tiff_pages import (
    GDAL_METADATA,
    GDAL_NODATA,
    GEO_KEYS,
    MIN_IS_WHITE,
    PALETTE,
)
from visionattn.data.geometry import Box

DESCRIPTION, PHOTOMETRIC = 270, 262


def open_reader(file: BinaryIO, page: int | None) -> Reader:
    """Open a TIFF with what suits it: tifffile, rasterio or Pillow."""
    path = getattr(file, "name", None)
    path = path if isinstance(path, str) and os.path.isfile(path) else None
    with_rasterio = path is not None and importlib.util.find_spec("rasterio") is not None
    if importlib.util.find_spec("tifffile") is None:
        known = _open_without_tifffile(file, page)
        if with_rasterio and known.tag(GEO_KEYS) and known.pages == 1:
            return _with_rasterio(known, path)
        return _check_known_to_pillow(known)
    with damage_of_tiff():
        image = TiffImage(file, page)
        of_gdal = GEO_KEYS in image.page.tags or os.path.isfile(f"{path}.msk")
        of_gdal &= image.plain or image.page.photometric == PALETTE or image.holes
        if with_rasterio and of_gdal and image.pages == 1:
            return _with_rasterio(image, path)
        return image if image.plain else _of_other_kinds(image, file, page)


def open_mask(file: BinaryIO) -> Image.Image:
    """Open a mask whose values, also places in a palette, are numbers of classes: with Pillow, or
    with tifffile what Pillow does not know, such as 64 bits.
    """
    try:
        return Image.open(file)
    except UnidentifiedImageError:
        file.seek(0)
        if file.read(2) not in (b"II", b"MM") or importlib.util.find_spec("tifffile") is None:
            raise
    file.seek(0)
    with damage_of_tiff():
        image = TiffImage(file, None)
        if image.page.samplesperpixel > 1 or image.page.dtype.kind not in "ui":
            raise NotAsAsked(
                f"it has {image.page.samplesperpixel} values of {image.page.dtype} for each pixel; "
                "wanted the number of a class"
            )
        values = image.turn.apply(image._read(Box(0, 0, *image.stored), *image.stored, None))
    most = np.iinfo(np.int32)
    return Image.fromarray(values[..., 0].clip(most.min, most.max).astype(np.int32))


def _with_rasterio(image: Reader, path: str) -> Reader:
    from visionattn.data.formats.raster import open_reader

    image.close()
    return open_reader(path, None)


def _of_other_kinds(image: "TiffImage", file: BinaryIO, page: int | None) -> Reader:
    """Open with Pillow what tifffile gives no colours of."""
    try:
        return PillowImage(file, page)
    except (MissingPackage, UnidentifiedImageError) as error:
        said, kind = image.page, image.page.photometric
        raise NotAsAsked(
            f"TIFF of photometric interpretation {getattr(kind, 'name', kind)}, compression "
            f"{getattr(said.compression, 'name', said.compression)} and {said.bitspersample} bits, "
            "which cannot be read as colours; convert it to RGB or grey"
        ) from error


def _open_without_tifffile(file: BinaryIO, page: int | None) -> PillowImage:
    try:
        return PillowImage(file, page)
    except MissingPackage:
        raise
    except DAMAGED_IMAGE as error:
        reason = one_line(error).partition(" <")[0]  # Pillow names an open file as Python shows it
        raise MissingPackage(
            f"{reason}; TIFF of most kinds needs tifffile: pip install 'visionattn[tiff]'"
        ) from error


def _check_known_to_pillow(image: PillowImage) -> PillowImage:
    """Raise ``MissingPackage`` for a TIFF whose tags say what Pillow does not know."""
    said = str(image.tag(DESCRIPTION)).strip()
    if (
        "role=" in str(image.tag(GDAL_METADATA))
        or image.tag(GDAL_NODATA)
        or (said.startswith("ImageJ=") and "channels=" in said)
        or (said.endswith("OME>") and 'SizeC="1"' not in said)
        or (image.tag(PHOTOMETRIC) == MIN_IS_WHITE and image.dtype != np.uint8)
    ):
        raise MissingPackage(
            "TIFF with nodata, scale, named channels or white zeros needs tifffile: "
            "pip install 'visionattn[tiff]'"
        )
    return image
