"""Files whose heads say that they are larger than they are: one line, and no rows of nothing."""

import io
import struct
import zlib

import cv2
import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.helpers.image_formats import pattern, whole
from visionattn.command import run
from visionattn.data.formats import DAMAGED_IMAGE, open_image
from visionattn.data.large import open_source

LAYOUTS = {
    "tiles": dict(tile=(16, 16)),
    "packed tiles": dict(tile=(16, 16), compression="zlib"),
    "strips": dict(rowsperstrip=8),
    "planes": dict(tile=(16, 16), planarconfig="separate"),
}
ADAM7 = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2)]
ADAM7 += [(1, 0, 2, 1)]


def write_tiff(path, *tags, **layout):
    """A TIFF of 37 x 53 pixels, in which tags then have other values."""
    pixels = pattern()
    if layout.get("planarconfig"):
        pixels = pixels.transpose(2, 0, 1)
    tifffile.imwrite(path, pixels, photometric="rgb", **layout)
    with tifffile.TiffFile(path, mode="r+b") as file:
        for name, value in tags:
            file.pages[0].tags[name].overwrite(value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [65, 10_000, 2**31 - 1])
def test_a_tiff_with_too_few_tiles_or_strips_is_refused_as_it_is_opened(tmp_path, layout, rows):
    path = tmp_path / "a.tif"
    write_tiff(path, ("ImageLength", rows), **LAYOUTS[layout])
    with pytest.raises(ValueError) as raised:
        open_source(path)
    line = str(raised.value)
    assert line.startswith(f"{path}: TIFF that says it has {rows:,} x 53 pixels, in ")
    assert " tiles or strips, and lists " in line and "\n" not in line


def test_a_geotiff_with_too_few_tiles_is_refused_before_gdal_fills_them_up(tmp_path):
    rasterio = pytest.importorskip("rasterio")
    path = tmp_path / "a.tif"
    profile = dict(driver="GTiff", height=37, width=53, count=3, dtype="uint8", tiled=True)
    profile |= dict(blockxsize=16, blockysize=16, crs="EPSG:3857")
    with rasterio.open(path, "w", transform=rasterio.Affine(1, 0, 9, 0, -1, 9), **profile) as file:
        file.write(pattern().transpose(2, 0, 1))
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.pages[0].tags["ImageWidth"].overwrite(90)
    with pytest.raises(ValueError, match="says it has 37 x 90 pixels, in 18 tiles .* lists 12"):
        open_source(path)


def test_a_smaller_copy_that_lies_is_told_where_it_is_read(tmp_path):
    path = tmp_path / "a.tif"
    pixels = pattern()
    with tifffile.TiffWriter(path) as file:
        file.write(pixels, tile=(16, 16), photometric="rgb")
        file.write(pixels[::2, ::2], tile=(16, 16), photometric="rgb", subfiletype=1)
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.pages[1].tags["ImageWidth"].overwrite(50)
    said = "says it has 19 x 50 pixels, in 8 tiles or strips, and lists 4"
    with open_source(path, level=1) as source, pytest.raises(ValueError, match=said):
        source.read(slice(0, 19), slice(0, source.width))


def png_of(pixels: np.ndarray, kind: int, bits: int, rows: int, interlaced: bool = False) -> bytes:
    """A PNG of ``kind`` (the colour type) that says it has so many rows."""

    def chunk(name: bytes, content: bytes) -> bytes:
        body = name + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    height, width = pixels.shape[:2]
    stored = b""
    for top, left, down, across in ADAM7 if interlaced else [(0, 0, 1, 1)]:
        for row in pixels[top::down, left::across]:
            if row.size:
                packed = np.packbits(row) if bits == 1 else row.astype(f">u{bits // 8}")
                stored += b"\0" + packed.tobytes()
    head = struct.pack(">IIBBBBB", width, rows, bits, kind, 0, 0, interlaced)
    colours = bytes(255 - i // 3 for i in range(768))
    parts = [chunk(b"IHDR", head), chunk(b"PLTE", colours)] if kind == 3 else [chunk(b"IHDR", head)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [*parts, chunk(b"IDAT", zlib.compress(stored)), chunk(b"IEND", b"")]
    )


PNGS = {
    "grey": (0, 8, 1),
    "colours": (2, 8, 3),
    "palette": (3, 8, 1),
    "transparent": (6, 8, 4),
    "black and white": (0, 1, 1),
    "grey of 16 bits": (0, 16, 1),
    "colours of 16 bits": (2, 16, 3),
}


@pytest.mark.parametrize("height", [36, 37])
@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("name", PNGS)
def test_a_png_with_fewer_rows_than_it_says_is_no_image_and_one_with_black_rows_is(
    name, interlaced, height, capfd
):
    kind, bits, bands = PNGS[name]
    high = 2 if bits == 1 else 2**bits
    pixels = np.random.default_rng(0).integers(0, high, (height, 53, bands))
    pixels = pixels[..., 0] if bits == 1 else pixels
    pixels[-3:] = 0
    found = whole(open_image(io.BytesIO(png_of(pixels, kind, bits, height, interlaced))))
    plain = np.asarray(Image.open(io.BytesIO(png_of(pixels, kind, bits, height))).convert("RGB"))
    assert found.shape[:2] == (height, 53) and found[:-3].any()
    if bits == 8 and bands > 1:
        np.testing.assert_array_equal(found[..., :3], plain)
    # Interlaced rows lie elsewhere then, which Pillow may find itself.
    said = "." if interlaced else f"PNG that says it has {2 * height} x 53 pixels and holds"
    with pytest.raises(DAMAGED_IMAGE, match=said):
        whole(open_image(io.BytesIO(png_of(pixels, kind, bits, 2 * height, interlaced))))
    assert capfd.readouterr().err == ""


def test_pixels_that_end_in_something_are_not_counted(monkeypatch):
    def never(file):
        raise AssertionError

    monkeypatch.setattr("visionattn.data.formats.pillow.check_rows", never)
    content = cv2.imencode(".png", np.full((9, 7, 3), 5, np.uint8))[1].tobytes()
    assert whole(open_image(io.BytesIO(content))).min() == 5


def test_the_command_ends_with_one_line_code_2_and_nothing_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_tiff("a.tif", ("ImageLength", 4_000_000), ("ImageWidth", 4_000_000), tile=(16, 16))
    black = np.zeros((37, 53, 3), np.uint8)
    (tmp_path / "a.png").write_bytes(png_of(black, 2, 8, 74))
    np.save("a.npy", pattern())
    content = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(content[:-1])
    model = "--model scaleformer_vit_t --img-size native --dense --output map.npy --images"
    # That a PNG has no parts is a note, which a test takes for an error.
    monkeypatch.setattr("visionattn.data.large.source.warnings.warn", lambda *_, **__: None)
    for name, said in (
        ("a.tif", "a.tif: TIFF that says it has 4,000,000 x 4,000,000 pixels, in "),
        ("a.png", "rows 0 to 74 of a.png cannot be read: PNG that says it has 74 x 53 pixels"),
        ("a.npy", f"a.npy: array that is cut off: it has {len(content) - 1:,} bytes, and its head"),
    ):
        assert run("features", [*model.split(), name]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: {said}"), error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npy", "a.png", "a.tif"]
