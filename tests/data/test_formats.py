"""Files in every format give the pixels that the test wrote, at the size, in the bands and in the
range that are asked for.
"""

import io

import numpy as np
import pytest
from PIL import Image

from visionattn.data.formats import ReadOptions, open_image, read_image, read_size
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


STORED = {
    1: lambda picture: picture,
    2: np.fliplr,
    3: lambda picture: np.rot90(picture, 2),
    4: np.flipud,
    5: lambda picture: picture.swapaxes(0, 1),
    6: lambda picture: np.rot90(picture, 1),
    7: lambda picture: np.rot90(picture, 2).swapaxes(0, 1),
    8: lambda picture: np.rot90(picture, -1),
}
"""How a camera stores a picture under each orientation of EXIF: 6 is shown turned clockwise."""


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("image_format", ["png", "webp", "tiff"])
def test_the_turns_of_exif_are_done_for_sizes_pixels_and_parts(image_format, orientation):
    picture, exif = pattern(), Image.Exif()
    exif[274] = orientation
    stored = np.ascontiguousarray(STORED[orientation](picture))
    content = saved(stored, image_format, exif=exif, lossless=True).getvalue()
    assert read_size(io.BytesIO(content)) == (HEIGHT, WIDTH)
    with open_image(io.BytesIO(content)) as reader:
        np.testing.assert_array_equal(whole(reader), picture)
        part = reader.read(Box(3, 11, 17, 5), 17, 5)
        np.testing.assert_array_equal(part, picture[3:20, 11:16])


def test_a_jpeg_is_decoded_at_the_smallest_size_that_is_large_enough():
    """A smooth ramp keeps its values at any size."""
    ramp = np.linspace(0, 250, 960)[None, :, None].repeat(640, 0).repeat(3, 2).astype(np.uint8)
    content = saved(ramp, "jpeg", quality=95).getvalue()
    for least, height in ((80, 80), (81, 160), (160, 160), (250, 320), (321, 640), (640, 640)):
        with open_image(io.BytesIO(content)) as reader:
            got = reader.read(Box(0, 0, 640, 960), least, least * 3 // 2)
            assert got.shape == (height, height * 3 // 2, 3)
            expected = ramp[: got.shape[0]].astype(float)
            expected = expected.reshape(len(expected), got.shape[1], -1, 3).mean(2)
            assert np.abs(got - expected).max() <= 4
    with open_image(io.BytesIO(content)) as reader:
        part = reader.read(Box(160, 480, 320, 240), 80, 60)
        assert part.shape == (80, 60, 3)
        assert np.abs(part - ramp[0, 480:720].reshape(60, 4, 3).mean(1)).max() <= 4
        # the same reader gives a larger part afterwards
        again = reader.read(Box(160, 480, 320, 240), 320, 240)
        assert np.abs(again.astype(int) - ramp[0, 480:720]).max() <= 3


MODES = {
    "1": lambda grey: Image.fromarray(grey[..., 0] >= 128),
    "L": lambda grey: Image.fromarray(grey[..., 0]),
    "LA": lambda grey: Image.fromarray(np.concatenate([grey, 255 - grey], 2)),
    "P": lambda grey: Image.fromarray(grey[..., 0]).convert("P"),
    "RGB": lambda grey: Image.fromarray(grey.repeat(3, 2)),
    "RGBA": lambda grey: Image.fromarray(np.concatenate([grey.repeat(3, 2), 255 - grey], 2)),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_grey_palettes_and_transparency_become_the_channels_that_are_wanted(mode, channels):
    grey = pattern(1)
    got = seen(saved(MODES[mode](grey), "png"), channels=channels)
    expected = np.where(grey >= 128, 255, 0) if mode == "1" else grey
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, expected.repeat(channels, 2))


def test_cmyk_and_palettes_with_transparency_become_rgb():
    ink = pattern(3)
    image = Image.fromarray(np.concatenate([ink, np.zeros_like(ink[..., :1])], 2), mode=None)
    cmyk = Image.frombytes("CMYK", image.size, image.tobytes())
    np.testing.assert_array_equal(seen(saved(cmyk, "tiff")), 255 - ink)
    palette = Image.new("P", (4, 2), 1)
    palette.putpalette([10, 20, 30, 200, 100, 50])
    np.testing.assert_array_equal(
        seen(saved(palette, "png", transparency=0)), np.full((2, 4, 3), [200, 100, 50])
    )


def test_colours_become_grey_as_pillow_makes_them():
    picture = pattern()
    expected = np.asarray(Image.fromarray(picture).convert("L"))
    np.testing.assert_array_equal(seen(saved(picture, "png"), channels=1)[..., 0], expected)


def test_images_shrink_by_areas():
    picture = pattern()[:36, :52]
    expected = picture.reshape(9, 4, 13, 4, 3).astype(float).mean((1, 3))
    assert np.abs(seen(saved(picture, "png"), (9, 13)) - expected).max() <= 0.51
