"""Images as a caller has them, paths or pictures in memory, as a listing that is read like files.

This module owns which shapes and types of pictures are taken.
"""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from einops import rearrange
from PIL import Image, ImageOps
from torch import Tensor

from visionattn.inference.listing import ListedFiles, digest_of, find_images

Picture = Image.Image | np.ndarray | Tensor
Images = str | Path | Picture | Sequence[str | Path] | Sequence[Picture]
WANTED = (
    "numbers, [H, W], [H, W, C] or [B, H, W, C] as an array, [C, H, W] or [B, C, H, W] as a tensor"
)


class HeldImages:
    """Pictures in memory; their names are their numbers, ``image 0``."""

    def __init__(self, pictures: Sequence[Picture]):
        """Take pictures; raise ValueError for the first that is none."""
        self.pictures = [as_held(picture, i) for i, picture in enumerate(pictures)]

    def __len__(self) -> int:
        return len(self.pictures)

    def open(self, index: int) -> BinaryIO:
        """Return the picture as an uncompressed file in memory, so that it is read as files are."""
        stream, picture = io.BytesIO(), self.pictures[index]
        if isinstance(picture, np.ndarray):
            np.save(stream, picture)
        else:
            picture.save(stream, "tiff", compression="raw")
        stream.seek(0)
        return stream

    def array(self, index: int) -> np.ndarray | None:
        """Return the picture as the array that it is read as; None where its file says more."""
        picture = self.pictures[index]
        if isinstance(picture, np.ndarray):
            return picture
        return np.asarray(picture) if picture.mode in ("L", "RGB") else None

    def name(self, index: int) -> str:
        """Return the picture's number as a name, ``image 0``."""
        return f"image {index}"

    def digest(self) -> str:
        """Return a digest of modes, sizes and pixels."""
        kinds = (getattr(each, "mode", None) or str(each.dtype) for each in self.pictures)
        shapes = (getattr(each, "size", None) or each.shape for each in self.pictures)
        pixels = (each.tobytes() for each in self.pictures)
        return digest_of(part for each in zip(kinds, shapes, pixels, strict=True) for part in each)


def as_held(picture: Picture, index: int = 0) -> Image.Image | np.ndarray:
    """Return a picture of Pillow as it is to be seen, an array or a tensor of grey levels or
    colours as one, and one of other bands or values as the array ``[H, W, C]``.

    Raises:
        ValueError: it is neither, holds no numbers, or its shape is not that of a picture.
    """
    if isinstance(picture, Image.Image):
        return ImageOps.exif_transpose(picture)
    if not isinstance(picture, (np.ndarray, Tensor)):
        raise ValueError(
            f"image {index}: wanted a path, a picture of Pillow, an array or a tensor, got "
            f"{type(picture).__name__}"
        )
    array, what = picture, f"{picture.dtype} {list(picture.shape)}"
    if isinstance(array, Tensor):
        array = array.detach().cpu()
        array = (rearrange(array, "c h w -> h w c") if array.ndim == 3 else array).numpy()
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype.kind not in "buif" or array.ndim not in (2, 3) or not array.size:
        raise ValueError(
            f"image {index}: wanted {WANTED}, got {what}; what is normalised already goes to the "
            f"model itself"
        )
    array = np.ascontiguousarray(array)
    if array.dtype == np.uint8 and (array.ndim == 2 or array.shape[2] in (3, 4)):
        return Image.fromarray(array)
    return array


def listing_of(images: Images) -> ListedFiles | HeldImages:
    """Return the images that a caller means, as a listing.

    Args:
        images: a path, or several, as ``find_images`` takes them; a picture, a batch or several
            pictures.

    Raises:
        ValueError, FileNotFoundError: there are none, they are of both kinds, or one is no picture.
    """
    if isinstance(images, (str, os.PathLike)):
        return find_images([os.fspath(images)])
    if isinstance(images, Image.Image):
        return HeldImages([images])
    if isinstance(images, (np.ndarray, Tensor)):
        return HeldImages(list(images) if images.ndim == 4 else [images])
    given = list(images)
    if not given:
        raise ValueError("there are no images: the list is empty")
    paths = [image for image in given if isinstance(image, (str, os.PathLike))]
    if not paths:
        return HeldImages(given)
    if len(paths) < len(given):
        raise ValueError("images are either paths or pictures in memory, got both in one list")
    return find_images([os.fspath(path) for path in paths])
