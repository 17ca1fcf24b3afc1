"""Files in every format give the pixels that the test wrote: sizes, bands, and which are white."""

import importlib.util
import io
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.helpers.image_files import config_of, write_classes
from tests.helpers.image_formats import HEIGHT, WIDTH, pattern, saved, seen, tiff, whole
from visionattn.data.formats import (
    DAMAGED_IMAGE,
    MissingPackage,
    NotAsAsked,
    ReadOptions,
    open_image,
    read_image,
    read_size,
    settle,
)
from visionattn.data.geometry import Box, Geometry
from visionattn.data.sources import Files
from visionattn.data.splits import build_splits

NODATA = (42113, 2, 0, "7", False)
"""GDAL's tag of the value that stands for no data."""
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


@pytest.mark.parametrize("image_format", ["tiff", "png", "webp"])
def test_the_turns_of_exif_are_done_for_sizes_pixels_and_parts(image_format):
    picture, exif = pattern(), Image.Exif()
    for orientation, turn in STORED.items():
        exif[274] = orientation
        stored = np.ascontiguousarray(turn(picture))
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
        assert reader.read(Box(160, 480, 320, 240), 80, 60).shape == (80, 60, 3)


MODES = {
    "1": lambda grey: Image.fromarray(grey[..., 0] >= 128),
    "L": lambda grey: Image.fromarray(grey[..., 0]),
    "LA": lambda grey: Image.fromarray(np.concatenate([grey, 255 - grey], 2)),
    "P": lambda grey: Image.fromarray(grey[..., 0]).convert("P"),
    "RGB": lambda grey: Image.fromarray(grey.repeat(3, 2)),
    "RGBA": lambda grey: Image.fromarray(np.concatenate([grey.repeat(3, 2), 255 - grey], 2)),
}


def test_grey_palettes_and_transparency_become_the_channels_that_are_wanted():
    grey = pattern(1)
    for mode, make in MODES.items():
        expected = np.where(grey >= 128, 255, 0) if mode == "1" else grey
        for channels in (1, 3):
            got = seen(saved(make(grey), "png"), channels=channels)
            assert got.dtype == np.uint8
            np.testing.assert_array_equal(got, expected.repeat(channels, 2), err_msg=mode)


def test_colours_become_grey_as_pillow_makes_them_and_cmyk_and_palettes_become_rgb():
    picture = pattern()
    expected = np.asarray(Image.fromarray(picture).convert("L"))
    np.testing.assert_array_equal(seen(saved(picture, "png"), channels=1)[..., 0], expected)
    image = Image.fromarray(np.concatenate([picture, np.zeros_like(picture[..., :1])], 2))
    cmyk = Image.frombytes("CMYK", image.size, image.tobytes())
    np.testing.assert_array_equal(seen(saved(cmyk, "tiff")), 255 - picture)
    palette = Image.new("P", (4, 2), 1)
    palette.putpalette([10, 20, 30, 200, 100, 50])
    got = seen(saved(palette, "png", transparency=0))
    np.testing.assert_array_equal(got, np.full((2, 4, 3), [200, 100, 50]))


def test_the_second_picture_of_a_phone_is_no_page_unless_it_is_asked_for():
    pictures = [Image.new("RGB", (32, 16), (level,) * 3) for level in (50, 200)]
    content = saved(pictures[0], "mpo", save_all=True, append_images=pictures[1:]).getvalue()
    with open_image(io.BytesIO(content)) as reader:
        assert reader.pages == 1
        assert abs(int(whole(reader)[8, 8, 0]) - 50) <= 2
        assert reader.read(Box(0, 0, 16, 32), 4, 8).shape == (16, 32, 3)
    assert abs(int(seen(io.BytesIO(content), page=2)[8, 8, 0]) - 200) <= 2


def test_more_pixels_than_are_allowed_are_not_decoded_and_the_size_is_read_all_the_same():
    array = io.BytesIO()
    np.save(array, pattern())
    count, view = HEIGHT * WIDTH, Geometry("native", None).view(HEIGHT, WIDTH)
    for content, most in (
        (saved(pattern(), "jpeg").getvalue(), count),
        (cv2.imencode(".png", pattern().astype(np.uint16))[1].tobytes(), count),
        (tiff(pattern(), tile=(256, 256), compression="zlib").getvalue(), 256 * 256),
        (array.getvalue(), count),
    ):
        fits, small = (
            ReadOptions(value_range=(0, 255), max_pixels=allowed) for allowed in (most, most - 1)
        )
        with open_image(io.BytesIO(content), fits) as reader:
            assert read_image(reader, view, fits).shape == (HEIGHT, WIDTH, 3)
        assert read_size(io.BytesIO(content), small) == (HEIGHT, WIDTH)
        with (
            open_image(io.BytesIO(content), small) as reader,
            pytest.raises(ValueError, match=f"expected at most data.max_pixels {most - 1:,}, got"),
        ):
            read_image(reader, view, small)


def halved(pixels):
    height, width, bands = pixels.shape
    blocks = pixels.reshape(height // 2, 2, width // 2, 2, bands)
    return blocks.astype(float).mean((1, 3)).round().astype(pixels.dtype)


@pytest.mark.parametrize("within", [True, False])
def test_a_pyramid_gives_the_smallest_level_that_is_large_enough_and_its_levels_are_no_pages(
    within,
):
    tifffile = pytest.importorskip("tifffile")
    levels = [np.random.default_rng(1).integers(0, 256, (96, 160, 3), np.uint8)]
    levels += [halved(levels[0]), halved(halved(levels[0]))]
    stream = io.BytesIO()
    with tifffile.TiffWriter(stream) as file:
        file.write(levels[0], photometric="rgb", tile=(16, 16), subifds=2 if within else 0)
        for level in levels[1:]:
            file.write(level, photometric="rgb", tile=(16, 16), subfiletype=1)
    with open_image(stream) as reader:
        assert reader.pages == 1
        for least, level in ((16, 2), (17, 1), (32, 1), (33, 0)):
            part = reader.read(Box(32, 48, 64, 80), least, least)
            rows, columns = (slice(a >> level, b >> level) for a, b in ((32, 96), (48, 128)))
            np.testing.assert_array_equal(part, levels[level][rows, columns])


def test_pages_are_read_by_their_numbers_from_1():
    tifffile = pytest.importorskip("tifffile")
    pages = [pattern(), pattern(seed=1)[:20]]
    stream = io.BytesIO()
    with tifffile.TiffWriter(stream) as file:
        for page in pages:
            file.write(page, photometric="rgb")
    content = stream.getvalue()
    np.testing.assert_array_equal(seen(io.BytesIO(content)), pages[0])
    np.testing.assert_array_equal(seen(io.BytesIO(content), page=2), pages[1])
    assert read_size(io.BytesIO(content), ReadOptions(page=2)) == (20, WIDTH)
    with pytest.raises(ValueError, match="expected page 3, the image has 2 pages"):
        open_image(io.BytesIO(content), ReadOptions(page=3))


def test_a_missing_package_is_one_line_that_installs_it(tmp_path, monkeypatch):
    find, gone = importlib.util.find_spec, ("rasterio", "zarr", "pandas", "webdataset", "datasets")
    holes = tiff(pattern(), extratags=[NODATA]).getvalue()
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.vrt").write_bytes(holes)
    (tmp_path / "a.csv").write_text("path,label\n")
    write_classes(tmp_path / "classes", {"bird": 2, "cat": 2})
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in gone else find(name)
    )

    def built(options):
        build_splits(config_of(**{"root": tmp_path / "classes"} | options), 0)

    for extra, package, read, source in (
        ("raster", "rasterio", seen, io.BytesIO(holes)),
        ("raster", "rasterio", seen, str(tmp_path / "a.vrt")),
        ("arrays", "zarr", seen, str(tmp_path / "a.zarr")),
        ("tables", "pandas", built, {"labels": str(tmp_path / "a.csv")}),
        ("readers", "webdataset", built, {"root": f"wds/{tmp_path}"}),
        ("readers", "datasets", built, {"root": f"hfds/{tmp_path}"}),
    ):
        said = rf"^[^\n]* needs {package}: pip install 'visionattn\[{extra}\]'$"
        with pytest.raises(MissingPackage, match=said):
            read(source)


def test_pages_that_say_what_holds_nothing_are_refused():
    tifffile = pytest.importorskip("tifffile")
    stream = io.BytesIO()
    with tifffile.TiffWriter(stream) as file:
        for _ in range(2):
            file.write(pattern(), photometric="rgb", extratags=[NODATA])
    with pytest.raises(NotAsAsked, match="nodata, scale, offset or a mask and 2 pages; write each"):
        open_image(stream)


def test_colours_of_16_bits_in_a_png_keep_all_their_bits(capfd):
    """OpenCV writes them, blue first."""
    pixels = pattern(3, np.uint16)
    content = cv2.imencode(".png", np.ascontiguousarray(pixels[..., ::-1]))[1].tobytes()
    got = seen(io.BytesIO(content), value_range=(0, 65535))
    np.testing.assert_allclose(got, pixels / 65535, atol=1e-6)
    garbled = bytearray(content)
    garbled[len(garbled) // 2] ^= 255
    for damaged in (content[:-300], bytes(garbled)):
        with pytest.raises(DAMAGED_IMAGE):
            seen(io.BytesIO(damaged), value_range=(0, 65535))
    assert capfd.readouterr().err == ""  # of libpng


def test_values_become_fractions_of_the_range_and_are_clipped_to_it():
    pixels = np.array([[-5.0, 0.0, 2.0], [3.0, np.nan, np.inf]], np.float32)[..., None]
    got = seen(tiff(pixels), channels=1, value_range=(-1, 3))
    np.testing.assert_allclose(got[..., 0], [[0, 0.25, 0.75], [1, 0, 1]])
    # The header of a PGM states the largest value.
    pgm = b"P5\n2 1\n1000\n" + np.array([100, 500], ">u2").tobytes()
    np.testing.assert_allclose(seen(io.BytesIO(pgm), channels=1)[0, :, 0], [0.1, 0.5], atol=1e-4)
    for dtype in ("float32", "uint16"):
        said = f"^unknown value range of {dtype} values from 0 to 900; pass --data.value_range"
        with pytest.raises(NotAsAsked, match=said):
            seen(tiff(pattern(1, np.uint16, 900).astype(dtype)))


def test_bands_are_picked_in_the_order_given_or_are_one_line():
    pixels = pattern(5)
    got = seen(tiff(pixels), bands=(3, 3, 1))
    np.testing.assert_array_equal(got, pixels[..., [2, 2, 0]])
    for bands, wanted, line in (
        (1, (1, 2), "expected band 2, the image has 1 band"),
        (2, None, "the image has 2 bands; choose bands, e.g. --data.bands"),
    ):
        with pytest.raises(NotAsAsked, match=f"^{line}[^\n]*$"):
            seen(tiff(pattern(bands)), bands=wanted)
    # Of four bands the first three are the colors, the fourth is transparency or infrared.
    four = pattern(4)
    np.testing.assert_array_equal(seen(tiff(four)), four[..., :3])


VIEW = Geometry("native", None).view(HEIGHT, WIDTH)


def listed(folder, *streams):
    """Streams as files that are listed."""
    paths = [str(folder / f"{number}") for number in range(len(streams))]
    for path, stream in zip(paths, streams, strict=True):
        Path(path).write_bytes(stream.getvalue())
    return Files(paths)


def test_ranges_pages_and_transparency_are_found_beforehand_and_told_in_one_line(
    tmp_path,
):
    deep = {high: tiff(pattern(1, np.uint16, high)) for high in (5, 17, 900, 4095, 4096, 16384)}
    eight, flat = tiff(pattern(1, np.uint8, 200)), saved(pattern(), "png")
    grey = [Image.new("L", (9, 8), level) for level in range(3)]
    pages = saved(grey[0], "tiff", save_all=True, append_images=grey[1:])
    clear = saved(Image.new("RGBA", (9, 8)), "png")
    one, every = ReadOptions(1), ReadOptions(4, bands=(1, 2, 3, 4))
    advice = "read as 12 bits; override with --data.value_range LOW HIGH"
    for streams, asked, value_range, said in (
        ([deep[5], deep[4095], deep[5]], one, (0, 4095), f"hold values up to 4,095: {advice}"),
        (
            [deep[5], deep[4096]],
            one,
            (0, 16383),
            "hold values up to 4,096: read as 14 bits",
        ),
        (
            [deep[5], deep[16384]],
            one,
            (0, 65535),
            "values up to 16,384: read as 16 bits",
        ),
        ([deep[17], deep[5]], one, (0, 255), "16-bit images hold values up to 17: read as 8 bits"),
        ([*[eight] * 3, deep[900], *[eight] * 36], one, (0, 1023), "hold values up to 900"),
        ([eight] * 36, one, None, None),
        ([deep[900]], ReadOptions(value_range=(0, 9)), (0, 9), None),
        ([io.BytesIO(b"no image")], ReadOptions(), None, None),
        ([pages, *[saved(grey[1], "tiff")] * 39], one, None, "several pages (3 in"),
        ([pages], ReadOptions(1, page=1), None, None),
        ([flat, clear], ReadOptions(3), None, "alpha channel (transparency) is dropped"),
        ([flat], ReadOptions(3), None, None),
        ([clear], every, None, None),
    ):
        options, lines = settle(listed(tmp_path, *streams), range(len(streams)), asked)
        assert options.value_range == value_range, said
        assert len(lines) == (said is not None) and all(said in line for line in lines)


def test_values_outside_the_range_that_was_found_are_an_error(tmp_path):
    options = settle(listed(tmp_path, tiff(pattern(1, np.uint16, 4000))), [0], ReadOptions(1))[0]
    assert options.value_range == (0, 4095)
    for pixels, said in (
        (pattern(1, np.uint16, 5000), "values up to 5,000, while other images end"),
        (
            pattern(1, np.uint8, 3).astype(np.float32) / 4,
            "^unknown value range of float32 values from 0 to 0.75",
        ),
        (
            pattern(1, np.uint8, 90).astype(np.int16) - 7,
            "^values from -7, while other images",
        ),
    ):
        with open_image(tiff(pixels)) as reader, pytest.raises(NotAsAsked, match=said):
            read_image(reader, VIEW, options)
    # What a file states comes first.
    stated = pattern(1, np.uint16, 16383)
    with open_image(tiff(stated, extratags=[(281, 3, 1, 16383, True)])) as reader:
        np.testing.assert_allclose(read_image(reader, VIEW, options), stated / 16383, atol=1e-6)
