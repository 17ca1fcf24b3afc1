"""Files whose heads say that they are larger than they are: one line each."""

import numpy as np
import pytest
import tifffile

from tests.helpers.image_formats import pattern
from visionattn.command import run
from visionattn.data.large import open_source

LAYOUTS = {
    "tiles": dict(tile=(16, 16)),
    "packed tiles": dict(tile=(16, 16), compression="zlib"),
    "strips": dict(rowsperstrip=8),
    "planes": dict(tile=(16, 16), planarconfig="separate"),
}


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


def test_the_command_ends_with_one_line_code_2_and_nothing_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_tiff("a.tif", ("ImageLength", 4_000_000), ("ImageWidth", 4_000_000), tile=(16, 16))
    np.save("a.npy", pattern())
    content = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(content[:-1])
    model = "--model scaleformer_vit_t --img-size native --dense --output map.npy --images"
    for name, said in (
        ("a.tif", "a.tif: TIFF that says it has 4,000,000 x 4,000,000 pixels, in "),
        ("a.npy", f"a.npy: array that is cut off: it has {len(content) - 1:,} bytes, and its head"),
    ):
        assert run("features", [*model.split(), name]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: {said}"), error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npy", "a.tif"]
