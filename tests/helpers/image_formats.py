"""Images in any format in memory, and what a model sees of them."""

import io

import numpy as np
import pytest
from PIL import Image

from visionattn.data.formats import ReadOptions, open_image, read_image
from visionattn.data.geometry import Box, Geometry

HEIGHT, WIDTH = 37, 53


def pattern(bands=3, dtype=np.uint8, high=None, seed=0):
    """Values ``[37, 53, bands]`` from 0 to ``high``; None: all that the type holds."""
    high = np.iinfo(dtype).max if high is None else high
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, high, (HEIGHT, WIDTH, bands), dtype, endpoint=True)
    pixels[0, 0] = 0
    pixels[-1, -1] = high
    return pixels


def saved(image, image_format, **options):
    """A stream with what Pillow writes of an image or of pixels."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    stream = io.BytesIO()
    image.save(stream, image_format, **options)
    stream.seek(0)
    return stream


def whole(reader):
    return reader.read(Box(0, 0, reader.height, reader.width), reader.height, reader.width)


def seen(source, size=None, **options):
    """What a model sees of the whole image: at its own size, or at another."""
    options = ReadOptions(**options)
    with open_image(source, options) as reader:
        fit = Geometry("native", None) if size is None else Geometry("stretch", size)
        return read_image(reader, fit.view(reader.height, reader.width), options)


def tiff(pixels, **options):
    """A stream with what tifffile writes of pixels ``[H, W, bands]``."""
    tifffile = pytest.importorskip("tifffile")
    stream = io.BytesIO()
    if options.get("planarconfig") == "separate":
        pixels = pixels.transpose(2, 0, 1)
    elif pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    else:
        options["planarconfig"] = "contig"
    writer = {name: options.pop(name) for name in ("bigtiff", "byteorder") if name in options}
    with tifffile.TiffWriter(stream, **writer) as file:
        file.write(pixels, **{"photometric": "minisblack"} | options)
    stream.seek(0)
    return stream
