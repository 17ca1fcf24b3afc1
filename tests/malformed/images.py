"""Images in every format, and folders and lists of images, that cannot be read."""

import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.helpers.image_files import write_tar
from tests.malformed.mutations import BYTES, both, rewrite, write
from tests.malformed.runner import Case
from tests.malformed.valid import VALIDATE


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
    yield from folder_cases()
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
    "": None,
    "a\0b": None,
    "x" * 5000: None,
}
"""Places that hold no image."""


def tar_of(*members: tuple[str, bytes]) -> Callable[[Path], None]:
    """Return what writes a tar of files."""
    return lambda folder: write_tar(folder / "a.tar", members)


def cifar(content: Any) -> Callable[[Path], None]:
    """Return what writes CIFAR-10's folder with another content."""

    def apply(folder: Path) -> None:
        place = folder / "cifar" / "cifar-10-batches-py"
        place.mkdir(parents=True)
        for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch", "batches.meta"]:
            text = content if isinstance(content, bytes) else pickle.dumps(content)
            (place / name).write_bytes(text)

    return apply


def drop(name: str) -> Callable[[Path], None]:
    """Return what deletes a folder."""
    return lambda folder: shutil.rmtree(folder / name)


ROOTS: dict[str, tuple[str, Callable[[Path], Any] | None]] = {
    "is not there": ("nowhere", None),
    "is empty": ("empty", lambda folder: (folder / "empty").mkdir()),
    "is a text": ("a.txt", write("a.txt", "x")),
    "is a garbled tar": ("a.tar", write("a.tar", b"\xff" * 2000)),
    "is an empty tar": ("a.tar", write("a.tar", b"")),
    "is a tar of zeros": ("a.tar", write("a.tar", bytes(10_240))),
    "is a tar of text": ("a.tar", tar_of(("cat/a.png", b"x"), ("dog/a.png", b"y"))),
    "is a tar cut off": (
        "a.tar",
        both(
            tar_of(("cat/a.png", encoded("png")), ("dog/b.png", encoded("png"))),
            rewrite("a.tar", lambda content: content[:700]),
        ),
    ),
    "is a tar of no images": ("a.tar", tar_of(("a.txt", b"x"))),
    "is a pipe": ("pipe", pipe("pipe")),
    "is a link to itself": ("loop", link_to("loop", "loop")),
    "has one class": ("images", drop("images/train/dog")),
    "has an empty class": ("images", lambda folder: (folder / "images/train/owl").mkdir()),
    "has a further class to validate on": ("images", write("images/val/owl/a.png", encoded("png"))),
    "has no training": ("images", drop("images/train")),
    "has a link to nowhere": ("images", link_to("nowhere", "images/train/cat/z.png")),
    "of hfds": ("hfds/nowhere/at/all", None),
    "of wds": ("wds/nowhere", None),
    "of nothing": ("", None),
    "with NUL": ("a\0b", None),
}
"""Roots of data that no training takes, and how they come to be."""


def folder_cases() -> Iterator[Case]:
    """Return cases of folders of images."""
    for name, (root, change) in ROOTS.items():
        kept = ("run2",) if name == "has a link to nowhere" else ()  # a run keeps its state
        yield Case(f"root train {name}", (*TRAIN_ON, root), change, writes=kept)
        words = ("stats", "--data.root", root, "--data.workers", "0", "--output", "out.yaml")
        if name not in ("has a further class to validate on", "has one class"):
            yield Case(f"root stats {name}", words, change)
        words = (*VALIDATE, "--data.root", root)
        # Validation looks at no images to train on, and takes fewer classes.
        if name not in ("has a link to nowhere", "has one class"):
            yield Case(f"root validate {name}", words, change)
        if not root.startswith(("hfds", "wds")) and not name.startswith("has"):
            words = (*LOOK, root)
            if name not in ("is empty", "is a text"):
                yield Case(f"root predict {name}", words, change)
    for name, content in {"text": b"x", "list": [1], "null": None, "keys": {"data": None}}.items():
        words = ("train", "--data.name", "cifar10", "--data.root", "cifar", "--data.workers", "0")
        yield Case(f"cifar of {name}", (*words, "--output", "out"), cifar(content))
