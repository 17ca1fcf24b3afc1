"""Images in every format, and folders and lists of images, that cannot be read."""

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.malformed.mutations import BYTES, write
from tests.malformed.runner import Case


def array(values: Any) -> bytes:
    """Return a file of numpy."""
    stream = io.BytesIO()
    np.save(stream, values, allow_pickle=True)
    return stream.getvalue()


PIXELS = np.random.default_rng(3).integers(0, 256, (40, 48, 3), np.uint8)
KINDS = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP", "bmp": "BMP", "gif": "GIF", "tif": "TIFF"}
KINDS |= {"jp2": "JPEG2000", "ppm": "PPM"}


def encoded(suffix: str) -> bytes:
    """Return an image of 40 x 48 pixels in a format."""
    if suffix == "npy":
        return array(PIXELS)
    stream = io.BytesIO()
    Image.fromarray(PIXELS).save(stream, KINDS[suffix])
    return stream.getvalue()


LOOK = ("predict", "--checkpoint", "run/best.safetensors", "--workers", "0", "--threads", "1")
LOOK += ("--images",)
TRAIN_ON = ("train", "--config", "train.yaml", "--run", "run2", "--data.root")
READERS = (
    (*TRAIN_ON, "images"),
    ("stats", "--data.root", "images", "--data.workers", "0", "--output", "o.yaml"),
)
WRONG_BYTES = [kind for kind in BYTES if kind not in ("less one byte", "middle off")]


def cases() -> Iterator[Case]:
    """Return cases of single images in every format."""
    for number, suffix in enumerate((*KINDS, "npy")):
        content = encoded(suffix)
        for turn, kind in enumerate(WRONG_BYTES):
            name = f"images/train/cat/odd.{suffix}"
            words = ((*LOOK, name), *READERS)[(number + turn) % 3]
            # A training that meets the image after its first step keeps its state.
            change = write(name, BYTES[kind](content))
            yield Case(f"image {words[0]} {suffix} {kind}", words, change, writes=("run2",))
    for suffix in ("svs", "ndpi", "vrt", "hgt", "zarr", "btf", "avif"):
        for kind in ("empty", "text"):
            change = write(f"odd.{suffix}", BYTES[kind](b"x" * 500))
            yield Case(f"image {suffix} {kind}", (*LOOK, f"odd.{suffix}"), change)
    for name, content in PICTURES.items():
        yield Case(f"image {name}", (*LOOK, name), write(name, content))
    for name, change in PLACES.items():
        yield Case(f"images {name}", (*LOOK, name), change)


PICTURES = {
    "objects.npy": array(np.array([{"a": 1}], dtype=object)),
    "text.npy": array(np.array(["a", "b"])),
    "flat.npy": array(np.zeros(5)),
    "four.npy": array(np.zeros((2, 2, 2, 2))),
    "none.npy": array(np.zeros((0, 5))),
    "complex.npy": array(np.zeros((5, 5), complex)),
    "dates.npy": array(np.zeros((5, 5), "datetime64[s]")),
    "fields.npy": array(np.zeros((5, 5), [("a", "u1")])),
    "list.txt": "nowhere/a.png\nnowhere/b.png\n",
    "empty.txt": "",
    "bytes.txt": b"\xff\xfe\n",
    "nul.txt": "a\0b.png\n",
    "itself.txt": "itself.txt\n",
    "folder.txt": "images\n",
    "bomb.svg": "<svg/>",
}
"""Images that hold what no image does."""


def link_to(target: str, name: str) -> Callable[[Path], None]:
    """Return what makes a link."""
    return lambda folder: (folder / name).symlink_to(target)


def pipe(name: str) -> Callable[[Path], None]:
    """Return what makes a pipe that nobody writes to."""
    return lambda folder: os.mkfifo(folder / name)


PLACES = {
    "nowhere.png": None,
    "empty": lambda folder: (folder / "empty").mkdir(),
    "link.png": link_to("nowhere.png", "link.png"),
    "loop.png": link_to("loop.png", "loop.png"),
    "pipe.png": pipe("pipe.png"),
    "folder.png": lambda folder: (folder / "folder.png").mkdir(),
    "pipe.txt": pipe("pipe.txt"),
    "a.zarr": write("a.zarr/zarr.json", "[1]"),
    "b.zarr": write("b.zarr/.zarray", "{}"),
    "c.zarr": write("c.zarr/.zarray", "[" * 5000),
    "d.zarr": write(
        "d.zarr/zarr.json",
        '{"zarr_format": 3, "node_type": "group", "attributes": {"multiscales": 7}}',
    ),
    "e.zarr": write("e.zarr/zarr.json", '{"zarr_format": 99, "node_type": "array"}'),
    "a.tar": write("a.tar", b"\xff" * 2000),
    "b.tar": write("b.tar", bytes(10_240)),
    "": None,
    "a\0b": None,
    "x" * 5000: None,
}
"""Places that hold no image."""
