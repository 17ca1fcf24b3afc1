"""Bands of files and of maps through whole passes, and of a file of 16,384 px."""

import zlib

import numpy as np
import pytest
import timm
import torch

import visionattn  # noqa: F401  registers the models
from tests.helpers.image_formats import tiff
from visionattn.data.geometry import Geometry
from visionattn.data.large import open_sink, open_source
from visionattn.inference.image_listing import ListedFiles
from visionattn.inference.image_reading import ReadImages
from visionattn.models.large.forward_bands import forward_tiled
from visionattn.models.weights import DataSpec

tifffile = pytest.importorskip("tifffile")
SIDE, TILE = 16_384, 512


def level(rows, columns):
    """The values of a large image, which nobody holds as a whole."""
    return ((rows // TILE * 37 + columns // TILE * 11) % 251).astype(np.uint8)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A BigTIFF of 16,384 px in tiles, all of one value each but for a corner."""
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

    options = dict(tile=(TILE, TILE), compression="zlib", photometric="minisblack")
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        file.write(tiles(), shape=(SIDE, SIDE), dtype=np.uint8, **options)
    return path


def expected(rows, columns):
    down, across = np.ogrid[rows, columns]
    values = level(down, across)
    values[(down % TILE == 0) & (across % TILE == 0)] = 255
    return values[..., None]


def test_bands_of_a_bigtiff_of_16384_px_are_read_without_the_rest(large, monkeypatch):
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
