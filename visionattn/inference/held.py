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
    "uint8, [H, W], [H, W, C] or [B, H, W, C] as an array, [C, H, W] or [B, C, H, W] as a tensor"
)


class HeldImages:
    """Pictures in memory; their names are their numbers, ``image 0``."""

    def __init__(self, pictures: Sequence[Picture]):
        """Take pictures; raise ValueError for the first that is none."""
        self.pictures = [as_pillow(picture, i) for i, picture in enumerate(pictures)]

    def __len__(self) -> int:
        return len(self.pictures)

    def open(self, index: int) -> BinaryIO:
        """Return the picture as an uncompressed file in memory, so that it is read as files are."""
        stream = io.BytesIO()
        self.pictures[index].save(stream, "tiff", compression="raw")
        stream.seek(0)
        return stream

    def name(self, index: int) -> str:
        """Return the picture's number as a name, ``image 0``."""
        return f"image {index}"

    def digest(self) -> str:
        """Return a digest of modes, sizes and pixels."""
        return digest_of(
            part for image in self.pictures for part in (image.mode, image.size, image.tobytes())
        )


def as_pillow(picture: Picture, index: int = 0) -> Image.Image:
    """Return a picture of Pillow as it is to be seen, and an array or a tensor of grey levels or
    colours as one.

    Raises:
        ValueError: it is neither, not uint8, or its shape is not that of a picture.
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
    coloured = array.ndim == 3 and array.shape[2] in (3, 4)
    if array.dtype != np.uint8 or not (array.ndim == 2 or coloured) or not array.size:
        raise ValueError(
            f"image {index}: wanted {WANTED}, got {what}; what is normalised already goes to the "
            f"model itself"
        )
    return Image.fromarray(np.ascontiguousarray(array))


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
