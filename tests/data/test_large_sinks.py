"""Maps that are written by bands of rows: whole or not at all, and gone on with after a kill."""

from types import SimpleNamespace

import numpy as np
import pytest

from visionattn.cli import files
from visionattn.cli.tables import sized
from visionattn.data.large import open_sink, open_source
from visionattn.data.large.map_writing import shards_of

rasterio, tifffile, zarr = map(pytest.importorskip, ("rasterio", "tifffile", "zarr"))
SHAPE = (5, 83, 59)
every_format = pytest.mark.parametrize("suffix", [".zarr", ".npy", ".tif"])


def map_of(dtype=np.float32, shape=SHAPE):
    return (np.random.default_rng(0).normal(size=shape) * 20).astype(dtype)


def written(path, values, **options):
    """Write a whole map; its path."""
    with open_sink(path, **options) as sink:
        sink.begin(values.shape, values.dtype)
        write_bands(sink, values)
        sink.finish()
    return path


def write_bands(sink, values, rows=16, first=0):
    for top in range(first, values.shape[1], rows):
        sink.write(top, values[:, top : top + rows])


def read(path):
    """What another library reads of a map."""
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".zarr":
        return zarr.open_array(path, mode="r")[:]
    return tifffile.imread(path).reshape(-1, *SHAPE[1:])


def content(path):
    """All bytes of a file, or of a folder by the names of its files."""
    if path.is_file():
        return path.read_bytes()
    return {
        str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()
    }


def test_floats_are_written_as_float16_where_that_is_asked_and_holds_them(tmp_path):
    path, values = tmp_path / "map.zarr", map_of()
    with open_sink(path, dtype="float16") as sink:
        sink.begin(SHAPE, values.dtype)
        write_bands(sink, values)
        said = "expected values up to 65,504 for float16, got 70,000 in rows 0 to 16; use"
        with pytest.raises(ValueError, match=f"^{path}: {said}"):
            sink.write(0, np.full((5, 16, 59), -70_000, np.float32))
        sink.finish()
    assert read(path).dtype == np.float16
    np.testing.assert_array_equal(read(path), values.astype(np.float16))


@every_format
def test_an_unfinished_map_goes_on_and_ends_with_the_same_bytes(tmp_path, suffix):
    values, path = map_of(), tmp_path / f"map{suffix}"
    with open_sink(path) as sink:
        sink.begin(SHAPE, values.dtype)
        write_bands(sink, values[:, :48])
        sink.write(32, np.zeros_like(values[:, :9]))  # as of a kill in the middle of a band
    (left,) = tmp_path.iterdir()
    if suffix == ".zarr":  # what zarr leaves of a shard when it is killed as it writes it
        next(left.rglob("c/*/*")).joinpath(".0123.partial").write_bytes(b"a part")
    with open_sink(path) as sink:
        sink.begin(SHAPE, values.dtype)
        write_bands(sink, values, first=32)
        assert not path.exists()
        sink.finish()
    assert list(tmp_path.iterdir()) == [path]
    np.testing.assert_array_equal(read(path), values)
    assert content(path) == content(written(tmp_path / f"whole{suffix}", values))


def test_only_whole_shards_are_written_by_bands_and_there_are_a_few_hundred_files():
    for shape, itemsize in (((768, 1171, 939), 4), ((1, 100_000, 90_000), 1), ((4096, 3, 5), 4)):
        (depth, rows, columns), chunks = shards_of(shape, itemsize)
        assert (depth, rows) == (shape[0], chunks[1]) and columns >= shape[2]
        assert -(-shape[1] // rows) <= 256
        assert rows == 1 or rows * depth * shape[2] * itemsize <= 2**26


def test_a_zarr_has_its_shards_and_the_names_of_its_axes(tmp_path):
    values = map_of(np.float32, (48, 256, 256))
    path = written(tmp_path / "a.zarr", values)
    array = zarr.open_array(path, mode="r")
    assert array.metadata.zarr_format == 3 and array.metadata.dimension_names == ("c", "y", "x")
    assert (array.shards, array.chunks) == shards_of(values.shape, 4)
    assert len(content(path)) == 256 // array.shards[1] + 1
    with open_source(path) as source:
        assert (source.height, source.width, source.channels) == (256, 256, 48)
        part = source.read(slice(100, 200), slice(7, 30))
    np.testing.assert_array_equal(part, values[:, 100:200, 7:30].transpose(1, 2, 0))


def test_a_geotiff_lies_where_its_image_does_with_the_size_of_a_patch(tmp_path):
    transform = rasterio.Affine(0.5, 0.1, 4e5, -0.1, -0.5, 5e6)
    places = (0, 0, 1, 2), (400, 280, 8, 5), (100, 0, 1, 5)
    points = [rasterio.control.GroundControlPoint(*place) for place in places]
    profile = dict(driver="GTiff", height=830, width=590, count=1, dtype="uint8")
    for name, place in (
        ("ground", {"transform": transform, "crs": "EPSG:32632"}),
        ("points", {"gcps": points, "crs": 4326}),
    ):
        with rasterio.open(tmp_path / f"{name}.tif", "w", **profile, **place) as file:
            file.write(np.zeros((830, 590), np.uint8), 1)
        with open_source(tmp_path / f"{name}.tif") as source:
            written(tmp_path / f"{name}.map.tif", map_of(), source=source, scale=(10, 14))
    with rasterio.open(tmp_path / "ground.map.tif") as file:
        assert file.crs.to_epsg() == 32632
        assert file.profile["tiled"] and file.profile["compress"] == "deflate"
        # cell (7, 3) and pixel (70, 42) have one corner
        np.testing.assert_allclose(file.transform @ (3, 7), transform @ (42, 70), rtol=1e-12)
    with rasterio.open(tmp_path / "points.map.tif") as file:
        found, crs = file.gcps
        assert crs.to_epsg() == 4326
        assert [(p.row * 10, p.col * 14, p.x, p.y) for p in found] == list(places)


@every_format
def test_an_existing_map_is_refused_and_stays_unless_overwritten(tmp_path, suffix):
    path, values = tmp_path / f"map{suffix}", map_of()
    old = content(written(path, values.astype(np.uint8)))
    with open_sink(path, overwrite=True) as sink:
        sink.begin(SHAPE, np.float32)
        write_bands(sink, values)
        assert content(path) == old
        sink.finish()
    np.testing.assert_array_equal(read(path), values)
    new = content(path)
    with pytest.raises(ValueError, match=f"^[^\n]*map{suffix} exists[^\n]*$"):
        open_sink(path)
    assert content(path) == new


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=2**30)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage)
    for suffix, needed in ((".zarr", 3 * 2**29), (".npy", 3 * 2**29), (".tif", 3 * 2**30)):
        said = f" needs up to {sized(needed)} of disk space, got {sized(2**30)} "
        path = tmp_path / f"map{suffix}"
        with open_sink(path) as sink, pytest.raises(ValueError, match=said):
            sink.begin((384, 1024, 1024), np.float32)
    assert not [*tmp_path.iterdir()]
    # Bytes that are written already need no room again.
    for free in (2**30, 0):
        usage.free = free
        with open_sink(tmp_path / "map.npy") as sink:
            sink.begin(SHAPE, np.float32)


def test_two_processes_do_not_write_one_map(tmp_path):
    path = tmp_path / "map.zarr"
    with open_sink(path) as sink, open_sink(path) as second:
        sink.begin(SHAPE, np.float32)
        with pytest.raises(ValueError, match=f"^{path} is being written by another process$"):
            second.begin(SHAPE, np.float32)
    with open_sink(path) as third:
        third.begin(SHAPE, np.float32)


def test_names_shapes_and_types_that_no_map_has_are_one_line(tmp_path):
    for folder in ("there.zarr", "there.npy"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine").write_text("kept")
    for name, options, said in (
        ("map.png", {}, "expected a path that ends in .zarr, .npy, .tif, .tiff, got .*map.png"),
        ("gone/map.npy", {}, "no folder"),
        ("map.npy", {"dtype": "uint8"}, "map.npy: expected a type of floats, got uint8"),
        ("there.zarr", {"overwrite": True}, "there.zarr exists; pass a new folder"),
        ("there.npy", {"overwrite": True}, "expected a file to write, got the folder"),
    ):
        with pytest.raises(ValueError, match=f"^[^\\n]*{said}[^\\n]*$"):
            open_sink(tmp_path / name, **options)
    said = "expected a map of numbers"
    with open_sink(tmp_path / "map.npy") as sink, pytest.raises(ValueError, match=said):
        sink.begin(SHAPE, np.complex64)
