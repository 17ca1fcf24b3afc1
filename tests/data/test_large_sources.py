"""Parts of large images are what the file holds, and become what the usual reading makes of it."""

import io
import warnings

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import visionattn
from tests.helpers.image_formats import tiff
from visionattn.data.formats import COLOURED, NotAsAsked, ReadOptions, options_of
from visionattn.data.geometry import Geometry
from visionattn.data.large import open_source
from visionattn.data.large.image_parts import UnreadablePart
from visionattn.inference.image_listing import HeldImages, ListedFiles
from visionattn.inference.image_reading import ReadImages
from visionattn.models.weights import DataSpec

rasterio, tifffile, zarr = map(pytest.importorskip, ("rasterio", "tifffile", "zarr"))
HEIGHT, WIDTH = 83, 59
PLACE = {"transform": rasterio.Affine(10, 0, 100, 0, -10, 500), "crs": "EPSG:3857"}


def pixels_of(bands=3, dtype=np.uint8, high=255, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, high, (HEIGHT, WIDTH, bands), endpoint=True).astype(dtype)


def spec_of(**options):
    channels = options.setdefault("in_chans", 3)
    mean = tuple(0.3 + 0.05 * i for i in range(channels))
    std = tuple(0.2 + 0.03 * i for i in range(channels))
    usual = dict(num_classes=2, class_names=(), mean=mean, std=std, encoding=None, img_size=None)
    return DataSpec(**usual | options)


def bands_of_rows(source, rows=16):
    everything = slice(0, source.width)
    starts = range(0, source.height, rows)
    return [source.read(slice(top, min(top + rows, source.height)), everything) for top in starts]


def usual(listing, spec):
    """What the model is given of an image that is read as a whole."""
    images = ReadImages(listing, spec, Geometry("native", None))
    sample = images[0]
    assert sample.reason is None, sample.reason
    return spec.prepare(sample.pixels[None])


def memory_map(pixels, path):
    np.save(path, pixels)
    return np.load(f"{path}.npy", "r")


def zarr_array(pixels, path):
    chunks = (16, 16, pixels.shape[2])
    return zarr.create_array(str(path), data=pixels, chunks=chunks, overwrite=True)


HELD = {
    "array": lambda pixels, path: pixels,
    "tensor": lambda pixels, path: torch.from_numpy(pixels).permute(2, 0, 1),
    "memory-map": memory_map,
    "zarr array": zarr_array,
}
LISTED = {
    "npy": lambda pixels, path: np.save(path, pixels),
    "zarr": zarr_array,
    "png": lambda pixels, path: Image.fromarray(pixels).save(path),
    "tiled.tif": lambda pixels, path: path.write_bytes(tiff(pixels, tile=(16, 32)).getvalue()),
    "strips.tif": lambda pixels, path: path.write_bytes(tiff(pixels, rowsperstrip=7).getvalue()),
}


def made(kind, pixels, folder):
    """An image of a kind, and what opens it the usual way."""
    path = folder / f"image.{kind}"
    if kind in HELD:
        return HELD[kind](pixels, path), HeldImages([pixels])
    LISTED[kind](pixels, path)
    return str(path), ListedFiles([str(path)])


@pytest.mark.parametrize("kind", [*HELD, *LISTED])
def test_bands_of_rows_are_what_an_image_holds_and_become_the_usual_input(tmp_path, kind):
    pixels, spec = pixels_of(), spec_of()
    image, listing = made(kind, pixels, tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        source = open_source(image)
    told = [str(each.message) for each in caught]
    assert len(told) == (kind == "png")
    assert all("it is decoded completely and kept, 14,691 bytes" in each for each in told)
    with source:
        assert (source.height, source.width, source.channels) == (HEIGHT, WIDTH, 3)
        assert source.dtype == np.uint8 and source.georeference is None
        bands = bands_of_rows(source)
        np.testing.assert_array_equal(np.concatenate(bands), pixels)
        part = source.read(slice(5, 40), slice(11, 30))
        np.testing.assert_array_equal(part, pixels[5:40, 11:30])
        prepare = source.prepare(spec)
        inputs = torch.cat([prepare(band) for band in bands], 2)
    assert inputs.dtype == torch.float32 and torch.equal(inputs, usual(listing, spec))


@pytest.mark.parametrize(
    ("pixels", "asked"),
    [
        (pixels_of(), dict(in_chans=1)),
        (pixels_of(1), {}),
        (
            pixels_of(1, np.uint16, 4095),
            dict(in_chans=256, encoding="grey_one_hot", mean=(), std=(), value_range=(0, 4095)),
        ),
    ],
)
def test_bands_become_grey_coloured_and_one_hot_to_the_bit(tmp_path, pixels, asked):
    spec, path = spec_of(**asked), str(tmp_path / "image.tif")
    (tmp_path / "image.tif").write_bytes(tiff(pixels, tile=(16, 32)).getvalue())
    with open_source(path, options=options_of(spec)) as source:
        prepare = source.prepare(spec)
        inputs = torch.cat([prepare(band) for band in bands_of_rows(source)], 2)
    assert torch.equal(inputs, usual(ListedFiles([path]), spec))


@pytest.mark.parametrize(
    ("orientation", "rows", "layout"),
    [
        (1, 16, {"rowsperstrip": 13}),
        (3, 23, {"tile": (32, 16)}),
        (4, 23, {"rowsperstrip": 13}),
        (6, 5, {"tile": (32, 16)}),
        (8, HEIGHT, {}),
    ],
)
def test_each_tile_and_strip_is_decoded_once_wherever_bands_end(
    rows, layout, orientation, monkeypatch
):
    pixels, counted = pixels_of(2), []
    stream = tiff(pixels, extratags=[(274, 3, 1, orientation, True)], **layout)
    with open_source(stream, options=ReadOptions(bands=(2, 1))) as source:
        page = source._reader.page
        decode = page.decode

        def count(content, index, **options):
            counted.append(index)
            return decode(content, index, **options)

        # tifffile makes the function once for each page
        monkeypatch.setattr(tifffile.TiffPage, "decode", property(lambda page: count))
        bands = bands_of_rows(source, rows)
        whole = np.concatenate(bands)
    turns = {1: 0, 3: 2, 6: 3, 8: 1}
    expected = pixels[::-1] if orientation == 4 else np.rot90(pixels, turns[orientation])
    np.testing.assert_array_equal(whole, expected[..., ::-1])
    assert len(counted) == len(set(counted)) == len(page.dataoffsets)


def pyramid(folder, kind, levels):
    """A file of an image in several sizes."""
    path = str(folder / "pyramid")
    if kind == "zarr":
        group = zarr.open_group(f"{path}.zarr", mode="w")
        for number, level in enumerate(levels):
            group.create_array(str(number), data=np.ascontiguousarray(level.transpose(2, 0, 1)))
        datasets = [{"path": str(number)} for number in range(len(levels))]
        group.attrs["multiscales"] = [{"axes": [*"cyx"], "datasets": datasets}]
        return f"{path}.zarr"
    if kind == "raster":
        height, width, bands = levels[0].shape
        profile = dict(driver="GTiff", height=height, width=width, count=bands, dtype="uint8")
        with rasterio.open(f"{path}.tif", "w", tiled=True, **profile, **PLACE) as file:
            file.write(levels[0].transpose(2, 0, 1))
        with rasterio.open(f"{path}.tif", "r+") as file:
            file.build_overviews([2, 4], rasterio.enums.Resampling.nearest)
        return f"{path}.tif"
    said = "Aperio Image Library v11\r\n277x419 [0,0 277x419] (64x64) JPEG/RGB"
    options = {"photometric": "rgb", "metadata": None, "description": said}
    with tifffile.TiffWriter(f"{path}.svs") as file:
        for number, level in enumerate(levels):
            file.write(level, tile=(64, 64), **options)
            if not number:
                file.write(levels[-1][:40, :40], **options)  # a thumbnail
    return f"{path}.svs"


@pytest.mark.parametrize("kind", ["slide", "zarr", "raster"])
def test_a_level_of_a_pyramid_is_the_image_at_the_size_that_the_file_has(tmp_path, kind):
    """Of odd sizes, so that height and width shrink by different factors."""
    levels = [np.random.default_rng(1).integers(0, 256, (419, 277, 3), np.uint8)]
    levels += [levels[0][::2, ::2], levels[0][::4, ::4]]
    path = pyramid(tmp_path, kind, levels)
    for number, level in enumerate(levels):
        with open_source(path, level=number) as source:
            assert (source.height, source.width) == level.shape[:2] and source.level == number
            got = np.concatenate(bands_of_rows(source, 50))
            part = source.read(slice(60, 90), slice(31, 70))
            np.testing.assert_array_equal(part, got[60:90, 31:70])
            if kind != "raster" or not number:  # whose overviews GDAL makes as it likes
                np.testing.assert_array_equal(got, level)
            if kind == "raster":
                place = source.georeference.transform
                assert tuple(place @ (source.width, source.height)) == (2870, -3690)
    with pytest.raises(NotAsAsked) as raised:
        open_source(path, level=3)
    assert str(raised.value) == (
        f"{path}: expected a level from 0 to 2, got 3; sizes: 419 x 277, 210 x 139, 105 x 70 pixels"
    )


def test_the_identity_tells_another_image_and_another_reading_and_nothing_else(tmp_path):
    pixels = pixels_of(4)
    changed = pixels.copy()
    changed[0, 3] += 1
    for kind in ("array", "npy", "zarr", "tiled.tif"):
        image, _ = made(kind, pixels, tmp_path)
        with open_source(image) as source, open_source(image) as again:
            identity = source.identity()
            assert identity == again.identity()
        with open_source(image, options=COLOURED) as other:
            assert other.identity() != identity
        with open_source(made(kind, changed, tmp_path)[0]) as other:
            assert other.identity() != identity
    # an array keeps its identity next to a file of the same name
    with open_source(pixels, name=str(tmp_path / "image.tiled.tif")) as source:
        assert source.identity()["bytes"] is None


def cut(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


@pytest.mark.parametrize(
    "options", [{"rowsperstrip": 8}, {"tile": (16, 32), "compression": "jpeg"}, PLACE]
)
def test_an_image_that_is_cut_off_names_the_rows_that_are_missing_and_the_file(tmp_path, options):
    path = tmp_path / "a.tif"
    if options is PLACE:
        profile = dict(driver="GTiff", height=HEIGHT, width=WIDTH, count=3, dtype="uint8")
        profile |= dict(tiled=True, blockysize=16, blockxsize=32, interleave="pixel")
        with rasterio.open(path, "w", **profile, **PLACE) as file:
            file.write(pixels_of().transpose(2, 0, 1))
    else:
        path.write_bytes(tiff(pixels_of(), photometric="rgb", **options).getvalue())
    cut(path, 0.6)
    said = f"^rows 64 to 80 of {path} cannot be read: [^\n]+$"
    with open_source(path) as source:
        assert source.read(slice(0, 16), slice(0, WIDTH)).shape == (16, WIDTH, 3)
        with pytest.raises(UnreadablePart, match=said):
            source.read(slice(64, 80), slice(0, WIDTH))


def test_chunks_that_a_zarr_has_not_are_background(tmp_path):
    path, pixels = tmp_path / "a.zarr", pixels_of()
    zarr.create_array(path, data=pixels, chunks=(16, 16, 3), fill_value=7)
    (path / "c" / "2" / "1" / "0").unlink()
    pixels[32:48, 16:32] = 7
    with open_source(path) as source:
        np.testing.assert_array_equal(np.concatenate(bands_of_rows(source)), pixels)
    (path / "c" / "1" / "1" / "0").write_bytes(b"garbled")
    said = r"rows 16 to 32 of .*a.zarr cannot be read: "
    with open_source(path) as source, pytest.raises(UnreadablePart, match=said):
        bands_of_rows(source)


def test_sources_that_a_model_does_not_take_are_one_line(tmp_path):
    (tmp_path / "a.tif").write_bytes(tiff(pixels_of(5), tile=(16, 16)).getvalue())
    path = str(tmp_path / "a.tif")
    (tmp_path / "short.tif").write_bytes(b"II*\0\x08\0\0\0")
    np.save(tmp_path / "short.npy", pixels_of())
    cut(tmp_path / "short.npy", 0.9)
    for image, options, said in (
        ([1, 2], None, "the image: expected a path, an array or a tensor, got list"),
        (np.zeros((2, 3, 4, 5)), None, "the array: expected an array of numbers"),
        (path, COLOURED, f"{path}: the image has 5 bands; choose bands"),
        (path, ReadOptions(bands=(6,)), f"{path}: expected band 6, the image has 5 bands"),
        (path, ReadOptions(page=2), f"{path}: expected page 2, the image has 1 page"),
        (io.BytesIO(b"nothing"), None, "unknown image format"),
        (tmp_path / "short.npy", None, "short.npy"),
        (tmp_path / "short.tif", None, "short.tif"),
        (tmp_path / "gone.tif", None, "gone.tif"),
    ):
        with pytest.raises((ValueError, OSError)) as raised:
            open_source(image, options=options)
        assert said in str(raised.value) and "\n" not in str(raised.value)
    two = ReadOptions(bands=(3, 2))
    for options, said in (
        (None, "has 5 bands; choose bands"),
        (two, "expected 3 channels, as the model's, got 2"),
    ):
        with open_source(path, options=options) as source, pytest.raises(NotAsAsked, match=said):
            source.prepare(spec_of())
    with open_source(pixels_of(3, np.float32)) as source:
        prepare = source.prepare(spec_of())
        said = "^the array: unknown value range of float32 values "
        with pytest.raises(NotAsAsked, match=said):
            prepare(source.read(slice(0, 4), slice(0, 4)))


def test_passes_open_what_can_be_opened(tmp_path):
    torch.manual_seed(0)
    options = dict(embed_dim=24, depth=2, num_heads=3, num_classes=5, patch_size=8)
    model = timm.create_model("scaleformer_vit_t", **options).eval()
    pixels = pixels_of()[:48, :40]
    (tmp_path / "image.tif").write_bytes(tiff(pixels, photometric="rgb", tile=(16, 16)).getvalue())
    np.save(tmp_path / "image.npy", pixels)
    image = str(tmp_path / "image.tif")
    with open_source(pixels) as source:
        whole = visionattn.forward_tiled(model, source)
        tiled = visionattn.forward_tiles(model, source, tile=32)
    planes = torch.from_numpy(pixels).permute(2, 0, 1)
    for given in (pixels, planes, planes[None] / 255, tmp_path / "image.npy"):
        assert torch.equal(visionattn.forward_tiled(model, given), whole)
    assert torch.equal(visionattn.forward_tiles(model, image, tile=32), tiled)
    with pytest.raises(ValueError, match="expected a path, an array or a tensor, got int"):
        visionattn.forward_tiled(model, 3)
