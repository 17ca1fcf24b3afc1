"""Images in every format, and folders and lists of images, that cannot be read."""

import io
import pickle
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.malformed.mutations import BYTES, write
from tests.malformed.runner import Case
from tests.malformed.valid import VALIDATE


def encoded(suffix: str, **options: Any) -> bytes:
    """Return an image of 40 x 48 pixels in a format."""
    pixels = np.random.default_rng(3).integers(0, 256, (40, 48, 3), np.uint8)
    stream = io.BytesIO()
    if suffix == "npy":
        np.save(stream, pixels)
    elif suffix == "tif":
        import tifffile

        tifffile.imwrite(stream, pixels, photometric="rgb", **options)
    else:
        kind = {"jpg": "JPEG", "jp2": "JPEG2000"}.get(suffix, suffix.upper())
        image = Image.fromarray(pixels)
        image.save(stream, {"PGM": "PPM"}.get(kind, kind), **options)
    return stream.getvalue()


FORMATS = ("png", "jpg", "webp", "bmp", "gif", "tif", "jp2", "ppm", "npy")
LOOK = ("predict", "--checkpoint", "run/best.safetensors", "--workers", "0", "--threads", "1")
LOOK += ("--images",)
TRAIN_ON = ("train", "--config", "train.yaml", "--run", "out", "--data.root")
WRONG_BYTES = [kind for kind in BYTES if kind not in ("less one byte", "middle off")]


def cases() -> Iterator[Case]:
    """Return cases of single images in every format."""
    yield from folder_cases()
    for number, suffix in enumerate(FORMATS):
        content = encoded(suffix)
        for turn, kind in enumerate(WRONG_BYTES):
            name = f"odd.{suffix}"
            change = write(name, BYTES[kind](content))
            yield Case(f"image {suffix} {kind}", (*LOOK, name), change)
            if (number + turn) % 3 == 0:
                inside = write(f"images/train/cat/odd.{suffix}", BYTES[kind](content))
                words = (*TRAIN_ON, "images")
                # A run that meets it after its first step keeps its state.
                yield Case(f"image train {suffix} {kind}", words, inside, writes=("out",))
            if (number + turn) % 3 == 1:
                inside = write(f"images/train/cat/odd.{suffix}", BYTES[kind](content))
                words = ("stats", "--data.root", "images", "--data.workers", "0")
                yield Case(f"image stats {suffix} {kind}", (*words, "--output", "o.yaml"), inside)
    for suffix in ("svs", "ndpi", "vrt", "img", "hgt", "ntf", "zarr", "tiff", "btf", "avif", "pbm"):
        for kind in ("empty", "text", "html", "0xff"):
            content = BYTES[kind](b"x" * 500)
            yield Case(
                f"image {suffix} {kind}", (*LOOK, f"odd.{suffix}"), write(f"odd.{suffix}", content)
            )
    for name, content in PICTURES.items():
        yield Case(f"image {name}", (*LOOK, name), write(name, content))
        words = ("look", "run/best.safetensors", name, "--output", "out", "--threads", "1")
        yield Case(f"image look {name}", words, write(name, content))
    for name, change in PLACES.items():
        yield Case(f"images {name}", (*LOOK, name), change)


def npy(header: str, body: bytes = b"\0" * 64) -> bytes:
    """Return a file of numpy with a header that is written by hand."""
    text = header.encode()
    return b"\x93NUMPY\x01\0" + len(text).to_bytes(2, "little") + text + body


def array(values: Any) -> bytes:
    """Return a file of numpy."""
    stream = io.BytesIO()
    np.save(stream, values, allow_pickle=True)
    return stream.getvalue()


def png_of(width: int, height: int) -> bytes:
    """Return a PNG whose head says these sizes, and which holds little."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"\0" * 3000)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + body


def tiff_of(**tags: int) -> bytes:
    """Return a TIFF of one strip whose tags are written by hand."""
    import struct

    told = {"width": 8, "height": 8, "bits": 8, "compression": 1, "photometric": 1}
    told |= {"offset": 8, "samples": 1, "rows": 8, "count": 64} | tags
    numbers = (256, 257, 258, 259, 262, 273, 277, 278, 279)
    entries = b"".join(
        struct.pack("<HHII", number, 4, 1, value)
        for number, value in zip(numbers, told.values(), strict=True)
    )
    body = b"\0" * 64
    place = 8 + len(body)
    return (
        struct.pack("<2sHI", b"II", 42, place) + body + struct.pack("<H", 9) + entries + b"\0" * 4
    )


def vrt_of(source: str) -> str:
    """Return a raster that shows another one."""
    band = f"<SourceFilename relativeToVRT='1'>{source}</SourceFilename>"
    band = f"<VRTRasterBand dataType='Byte' band='1'><SimpleSource>{band}</SimpleSource>"
    return f"<VRTDataset rasterXSize='9' rasterYSize='9'>{band}</VRTRasterBand></VRTDataset>"


PICTURES = {
    "huge.png": png_of(2**31 - 1, 2**31 - 1),
    "wide.png": png_of(2**30, 1),
    "flat.png": png_of(0, 5),
    "large.png": png_of(100_000, 100_000),
    "objects.npy": array(np.array([{"a": 1}], dtype=object)),
    "text.npy": array(np.array(["a", "b"])),
    "flat.npy": array(np.zeros(5)),
    "four.npy": array(np.zeros((2, 2, 2, 2))),
    "none.npy": array(np.zeros((0, 5))),
    "complex.npy": array(np.zeros((5, 5), complex)),
    "dates.npy": array(np.zeros((5, 5), "datetime64[s]")),
    "fields.npy": array(np.zeros((5, 5), [("a", "u1")])),
    "large.npy": npy("{'descr': '|u1', 'fortran_order': False, 'shape': (9999999, 9999999), }\n"),
    "below.npy": npy("{'descr': '|u1', 'fortran_order': False, 'shape': (-5, 5), }\n"),
    "code.npy": npy("__import__('os').system('true')\n"),
    "null.npy": npy("None\n"),
    "deep.npy": npy("(" * 9000),
    "digits.npy": npy(f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({'9' * 4000},), }}\n"),
    "wide.tif": tiff_of(width=2**31 - 1, height=2**31 - 1),
    "beyond.tif": tiff_of(offset=2**31),
    "nothing.tif": tiff_of(width=0),
    "bits.tif": tiff_of(bits=77),
    "packed.tif": tiff_of(compression=9999),
    "samples.tif": tiff_of(samples=60_000),
    "loop.tif": b"II*\0\x08\0\0\0\0\0\x08\0\0\0",
    "far.tif": b"II*\0\xff\xff\xff\xff",
    "list.txt": "nowhere/a.png\nnowhere/b.png\n",
    "empty.txt": "",
    "bytes.txt": b"\xff\xfe\n",
    "nul.txt": "a\0b.png\n",
    "long.txt": "x" * 100_000 + "\n",
    "itself.txt": "itself.txt\n",
    "folder.txt": "images\n",
    "loop.vrt": vrt_of("loop.vrt"),
    "gone.vrt": vrt_of("no.tif"),
    "bomb.svg": "<svg/>",
}
"""Images that hold what no image does."""


def link_to(target: str, name: str) -> Callable[[Path], None]:
    """Return what makes a link."""
    return lambda folder: (folder / name).symlink_to(target)


def pipe(name: str) -> Callable[[Path], None]:
    """Return what makes a pipe that nobody writes to."""
    import os

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


def tar_of(*members: tuple[str, bytes]) -> bytes:
    """Return a tar of files."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in members:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return stream.getvalue()


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
    "is a tar of text": ("a.tar", write("a.tar", tar_of(("cat/a.png", b"x"), ("dog/a.png", b"y")))),
    "is a tar cut off": (
        "a.tar",
        write("a.tar", tar_of(("cat/a.png", encoded("png")), ("dog/b.png", encoded("png")))[:700]),
    ),
    "is a tar of no images": ("a.tar", write("a.tar", tar_of(("a.txt", b"x")))),
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
        kept = ("out",) if name == "has a link to nowhere" else ()  # a run keeps its state
        yield Case(f"root train {name}", (*TRAIN_ON, root), change, writes=kept)
        words = ("stats", "--data.root", root, "--data.workers", "0", "--output", "out.yaml")
        if name not in ("has a further class to validate on", "has one class"):
            yield Case(f"root stats {name}", words, change)
        words = (*VALIDATE, "--data.root", root)
        if name != "has a link to nowhere":  # among the images to train on
            yield Case(f"root validate {name}", words, change)
        if not root.startswith(("hfds", "wds")) and not name.startswith("has"):
            words = (*LOOK, root)
            if name not in ("is empty", "is a text"):
                yield Case(f"root predict {name}", words, change)
    for name, content in {"text": b"x", "list": [1], "null": None, "keys": {"data": None}}.items():
        words = ("train", "--data.name", "cifar10", "--data.root", "cifar", "--data.workers", "0")
        yield Case(f"cifar of {name}", (*words, "--output", "out"), cifar(content))
