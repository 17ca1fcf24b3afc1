"""Bands of files and of maps through whole passes: a file of 16,384 px, reading ahead, and what
becomes of a file that ends in the middle.
"""

import threading
import time
import zlib

import numpy as np
import pytest
import timm
import torch

import visionattn  # noqa: F401  registers the models
from tests.helpers.image_formats import tiff
from visionattn.data.geometry import Geometry
from visionattn.data.large import open_sink, open_source
from visionattn.data.large.source import UnreadablePart
from visionattn.inference.image_listing import ListedFiles
from visionattn.inference.image_reading import ReadImages
from visionattn.models.tiled import ahead as reading_ahead
from visionattn.models.tiled import forward_tiled
from visionattn.models.tiled.ahead import Ahead
from visionattn.models.weights import DataSpec

SIDE, TILE = 16_384, 512
CPU = torch.device("cpu")


def level(rows, columns):
    """The values of a large image, which nobody holds as a whole."""
    return ((rows // TILE * 37 + columns // TILE * 11) % 251).astype(np.uint8)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A BigTIFF of 16,384 px in tiles, all of one value each but for a corner."""
    tifffile = pytest.importorskip("tifffile")
    path = tmp_path_factory.mktemp("large") / "large.tif"
    encoded = {}

    def tiles():
        for top in range(0, SIDE, TILE):
            for left in range(0, SIDE, TILE):
                value = int(level(np.int64(top), np.int64(left)))
                if value not in encoded:
                    tile = np.full((TILE, TILE), value, np.uint8)
                    tile[0, 0] = 255
                    encoded[value] = zlib.compress(tile.tobytes())
                yield encoded[value]

    with tifffile.TiffWriter(path, bigtiff=True) as file:
        file.write(
            tiles(),
            shape=(SIDE, SIDE),
            dtype=np.uint8,
            tile=(TILE, TILE),
            compression="zlib",
            photometric="minisblack",
        )
    return path


def expected(rows, columns):
    down, across = np.ogrid[rows, columns]
    values = level(down, across)
    values[(down % TILE == 0) & (across % TILE == 0)] = 255
    return values[..., None]


def test_bands_of_a_bigtiff_of_16384_px_are_read_without_the_rest(large, monkeypatch):
    tifffile = pytest.importorskip("tifffile")
    assert large.stat().st_size < 2e6 and large.read_bytes()[:4] == b"II+\0"
    with open_source(large) as source:
        assert (source.height, source.width, source.channels) == (SIDE, SIDE, 1)
        assert source.held_bytes == TILE * SIDE
        counts, read = [], tifffile.FileHandle.read_segments

        def count(file, offsets, *given, **options):
            counts.append(len(offsets))
            return read(file, offsets, *given, **options)

        monkeypatch.setattr(tifffile.FileHandle, "read_segments", count)
        for rows in (slice(0, 300), slice(300, 700), slice(16_000, SIDE)):
            got = source.read(rows, slice(0, SIDE))
            np.testing.assert_array_equal(got, expected(rows, slice(0, SIDE)))
        across = SIDE // TILE
        assert counts == [across, across, across]
        part = (slice(1020, 1030), slice(5000, 5200))
        np.testing.assert_array_equal(source.read(*part), expected(*part))


class Slow:
    """An image of which each band takes its time, and that knows who reads it and when."""

    def __init__(self, seconds=0.0, fails=None):
        self.height, self.width, self.channels, self.dtype = 60, 7, 1, np.dtype(np.uint8)
        self.seconds, self.fails = seconds, fails
        self.began, self.threads = [], set()

    def read(self, rows, columns):
        self.began.append(rows.start)
        self.threads.add(threading.get_ident())
        time.sleep(self.seconds)
        if rows.start == self.fails:
            raise UnreadablePart(f"rows {rows.start} to {rows.stop} of a file cannot be read")
        return np.full((rows.stop - rows.start, 7, 1), rows.start, np.uint8)


def in_tens(source, **options):
    rows = [slice(top, top + 10) for top in range(0, source.height, 10)]
    return Ahead(source, rows, torch.from_numpy, CPU, **options)


def settled(condition):
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    assert condition()


def test_one_band_is_read_ahead_in_another_thread_and_none_beyond_it():
    source = Slow()
    with in_tens(source) as ahead:
        for number, band in enumerate(ahead):
            assert band.unique().tolist() == [10 * number]
            wanted = list(range(0, min(10 * number + 20, 60), 10))
            settled(lambda wanted=wanted: source.began == wanted)
            time.sleep(0.01)
            assert source.began == wanted
    assert len(source.threads) == 1 and threading.get_ident() not in source.threads


class Clocked(Slow):
    """An image whose bands take 50 ms each of a clock of its own. The caller looks at the clock as
    it begins to wait, and again after it has waited; each look lets one band be read.
    """

    def __init__(self):
        super().__init__()
        self.now, self.caller = 0.0, threading.get_ident()
        self.may_read, self.have_read = threading.Semaphore(0), threading.Semaphore(0)

    def clock(self):
        now = self.now
        if threading.get_ident() == self.caller:
            self.may_read.release()
        return now

    def read(self, rows, columns):
        assert self.may_read.acquire(timeout=60)
        self.now += 0.05
        self.have_read.release()
        return super().read(rows, columns)


def test_what_is_waited_and_read_is_counted(monkeypatch):
    """Six bands of 50 ms, while the caller computes for longer: the first is waited for, and the
    others were read before.
    """
    source = Clocked()
    monkeypatch.setattr(reading_ahead, "perf_counter", source.clock)
    with in_tens(source) as ahead:
        for number, _ in enumerate(ahead):
            assert source.have_read.acquire(timeout=60)
            if number < 5:  # until the next one is read
                assert source.have_read.acquire(timeout=60)
                source.have_read.release()
    assert ahead.read_s == pytest.approx(6 * 0.05)
    assert ahead.waited_s == pytest.approx(0.05)


def test_what_a_band_raises_comes_up_in_its_turn():
    source = Slow(fails=20)
    seen = []
    with in_tens(source) as ahead, pytest.raises(UnreadablePart, match="rows 20 to 30 of a file"):
        for band in ahead:
            seen.append(int(band[0, 0, 0]))
    assert seen == [0, 10]


def test_an_exception_of_the_caller_ends_the_thread():
    source, before = Slow(0.01), threading.active_count()
    with pytest.raises(KeyError), in_tens(source) as ahead:
        for _ in ahead:
            raise KeyError
    assert threading.active_count() == before and len(source.began) <= 2


def spec_of():
    mean, std = (0.3, 0.4, 0.5), (0.2, 0.3, 0.25)
    return DataSpec(3, 5, (), mean, std, None, None)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    options = dict(embed_dim=24, depth=2, num_heads=3, num_classes=5, patch_size=8)
    return timm.create_model("scaleformer_vit_t", **options).eval()


def pixels_of(height=85, width=51):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("suffix", [".npy", ".zarr", ".tif"])
def test_features_of_a_file_by_bands_are_those_of_the_usual_reading(tmp_path, model, suffix):
    for package in {".zarr": ["zarr"], ".tif": ["rasterio", "tifffile"]}.get(suffix, []):
        pytest.importorskip(package)
    path = tmp_path / "image.tif"
    path.write_bytes(tiff(pixels_of(), photometric="rgb", tile=(16, 16)).getvalue())
    images = ReadImages(ListedFiles([str(path)]), spec_of(), Geometry("native", None, None, (8, 8)))
    with torch.inference_mode():
        inputs = spec_of().prepare(images[0].pixels[None])
        usual = model.forward_intermediates(inputs, indices=1, norm=True, intermediates_only=True)
    with open_source(path) as source, open_sink(tmp_path / f"map{suffix}") as sink:
        forward_tiled(model, source, sink, want="dense", prepare=source.prepare(spec_of()))
    with open_source(tmp_path / f"map{suffix}") as found:
        rows = found.read(slice(0, found.height), slice(0, found.width))
    if suffix != ".npy":  # whose axes have no names
        rows = rows.transpose(2, 0, 1)
    np.testing.assert_allclose(rows, usual[-1][0].numpy(), atol=1e-5)


def test_a_pass_over_a_file_that_ends_in_the_middle_names_its_rows(tmp_path, model):
    path = tmp_path / "image.tif"
    content = tiff(pixels_of(120), photometric="rgb", rowsperstrip=8).getvalue()
    path.write_bytes(content[: len(content) * 3 // 4])
    said = rf"^rows [\d,]+ to [\d,]+ of {path} cannot be read: [^\n]+$"
    with (
        open_source(path) as source,
        open_sink(tmp_path / "map.npy") as sink,
        pytest.raises(UnreadablePart, match=said),
    ):
        forward_tiled(model, source, sink, want="dense", prepare=source.prepare(spec_of()))
    assert not (tmp_path / "map.npy").exists()


def test_passes_open_what_can_be_opened(tmp_path, model):
    pixels = pixels_of(48, 40)
    (tmp_path / "image.tif").write_bytes(tiff(pixels, photometric="rgb", tile=(16, 16)).getvalue())
    np.save(tmp_path / "image.npy", pixels)
    planes = torch.from_numpy(pixels).permute(2, 0, 1)
    with open_source(pixels) as source:
        whole = visionattn.forward_tiled(model, source)
        tiled = visionattn.forward_tiles(model, source, tile=32)
    for image in (pixels, planes, planes[None] / 255, tmp_path / "image.npy"):
        assert torch.equal(visionattn.forward_tiled(model, image), whole)
    image = str(tmp_path / "image.tif")
    assert torch.equal(visionattn.forward_tiled(model, source=image), whole)
    assert torch.equal(visionattn.forward_tiles(model, image, tile=32), tiled)
    with pytest.raises(ValueError, match="wanted a path, an array or a tensor, got int"):
        visionattn.forward_tiled(model, 3)


def test_a_sink_without_room_ends_a_pass_before_it_reads_a_row(tmp_path, model, monkeypatch):
    from types import SimpleNamespace

    from visionattn.cli import files

    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    source = open_source(pixels_of())
    monkeypatch.setattr(source, "read", lambda *given: pytest.fail("a row is read"))
    with open_sink(tmp_path / "map.npy") as sink, pytest.raises(ValueError, match="needs up to"):
        forward_tiled(model, source, sink, want="dense", prepare=source.prepare(spec_of()))
    assert list(tmp_path.iterdir()) == []
