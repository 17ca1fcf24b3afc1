"""Rasters and TIFF files give the values, colors and holes that GDAL or a formula says."""

import io
import warnings
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from tests.helpers.image_formats import HEIGHT, WIDTH, pattern, seen, tiff, whole
from visionattn.data.formats import (
    NotAsAsked,
    ReadOptions,
    open_image,
    read_blocks,
    read_image,
    settle,
)
from visionattn.data.geometry import Box, Geometry
from visionattn.data.large import open_source
from visionattn.data.mask_files import MaskClasses, MaskFiles
from visionattn.data.sources import Files
from visionattn.data.stats import moments_of
from visionattn.models.weights import DataSpec

rasterio = pytest.importorskip("rasterio")
tifffile, zarr = map(pytest.importorskip, ("tifffile", "zarr"))
GEO = [(33550, "d", 3, (1.0, 1.0, 0.0), True), (33922, "d", 6, (0.0,) * 6, True)]
GEO += [(34735, "H", 8, (1, 1, 0, 1, 1024, 0, 1, 1), True)]
HOLE = np.s_[3:9, 5:20]


def write(path, pixels, mask=None, colours=None, scales=None, offsets=None, **profile):
    """Write ``[H, W, bands]`` with rasterio, as ground unless told otherwise."""
    place = {"transform": rasterio.Affine(10, 0, 100, 0, -10, 500), "crs": "EPSG:3857"}
    profile = place | {"count": pixels.shape[2], "dtype": pixels.dtype} | profile
    with rasterio.open(path, "w", height=HEIGHT, width=WIDTH, **profile) as file:
        file.write(pixels.transpose(2, 0, 1))
        if mask is not None:
            file.write_mask(mask)
        if colours is not None:
            file.write_colormap(1, colours)
        if scales is not None:
            file.scales, file.offsets = scales, offsets
    return path


def vrt(path, *bands):
    """Write a VRT of bands: type, file, and what else the element of the band holds."""
    elements = [
        f'<VRTRasterBand dataType="{kind}" band="{number}">{more}<SimpleSource>'
        f"<SourceFilename>{source}</SourceFilename><SourceBand>1</SourceBand></SimpleSource>"
        "</VRTRasterBand>"
        for number, (kind, source, more) in enumerate(bands, 1)
    ]
    size = f'rasterXSize="{WIDTH}" rasterYSize="{HEIGHT}"'
    ground = "<GeoTransform>100, 10, 0, 500, 0, -10</GeoTransform>"
    path.write_text(f"<VRTDataset {size}>{ground}{''.join(elements)}</VRTDataset>")
    return path


def nodata(folder, dtype, value, bands, **profile):
    """Bands; one has the value outside of the hole too."""
    pixels = pattern(bands, np.uint16, 200).clip(1).astype(dtype)
    pixels[HOLE] = value if dtype.startswith("f") else 255
    pixels[20, 20, 0] = pixels[4, 5, 0]
    if bands == 4:
        pixels[25, 25, :3] = 255
    path = folder / "a.tif"
    if value == -9999:  # which rasterio does not write
        tags = [*GEO, (42113, "s", 0, "-9999", True)]
        path.write_bytes(tiff(pixels, photometric="rgb", extratags=tags).getvalue())
    else:
        write(path, pixels, nodata=value, **profile)
    with rasterio.open(path) as file:
        empty = file.dataset_mask() == 0
    assert empty.sum() == (value != -9999) * 90
    empty = empty[..., None] | np.isnan(pixels)  # which GDAL counts where another band has a value
    return path, {"value_range": (0, 255)}, pixels / 255, empty


def masked(folder, kind):
    pixels = pattern(4 if kind == "alpha" else 3)
    mask = np.full((HEIGHT, WIDTH), 255, np.uint8)
    mask[HOLE] = 0
    if kind == "alpha":
        pixels[..., 3] = mask
    options = {"photometric": "RGB"} if kind == "alpha" else {}
    options |= {"nodata": 7} if kind == "beside nodata" else {}
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=kind != "file"):
        given = None if kind == "alpha" else mask
        path = write(folder / "a.tif", pixels, given, tiled=True, blockxsize=16, blockysize=16,
                     **options)  # fmt: skip
    assert (folder / "a.tif.msk").exists() == (kind == "file")
    with rasterio.open(path) as file:
        empty = file.dataset_mask() == 0
    return path, {}, pixels[..., :3] / 255, empty


def bands_of_vrt(folder, kinds, values):
    """A VRT of bands of several types, each with nodata of its own."""
    names = {"int16": "Int16", "uint16": "UInt16", "float32": "Float32", "uint8": "Byte"}
    pixels, entries = pattern(len(kinds), np.uint16, 200), []
    for band, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        stored = pixels[..., band : band + 1].astype(kind)
        if value is not None:
            stored[10 * band : 10 * band + 5] = value
        more = "" if value is None else f"<NoDataValue>{value}</NoDataValue>"
        source = write(folder / f"{band}.tif", stored, nodata=value)
        entries.append((names[kind], source, more))
    path = vrt(folder / "a.vrt", *entries)
    with rasterio.open(path) as file:
        empty = np.stack([file.read_masks(band) for band in file.indexes], 2) == 0
    return path, {"value_range": (0, 255)}, pixels / 255, empty


def white_zeros(folder, dtype, wrap, **options):
    pixels = pattern(1, np.uint16, 200).astype(dtype)
    path = folder / "a.tif"
    path.write_bytes(tiff(pixels, photometric="miniswhite", **options).getvalue())
    if wrap:
        path = vrt(folder / "b.vrt", ("Byte", vrt(folder / "a.vrt", ("Byte", path, "")), ""))
    empty = np.zeros((HEIGHT, WIDTH), bool)
    return path, {"value_range": (0, 255), "bands": (1,)}, 1 - pixels / 255, empty


def palette(folder, driver, transparent=255, **profile):
    most = 2 ** profile.get("nbits", 8)
    index = pattern(1, np.uint8, most - 1)
    table = {n: (n, 255 - n, 77, transparent if n < 20 else 255) for n in range(most)}
    path = write(folder / f"a.{'img' if driver == 'HFA' else 'tif'}", index, driver=driver,
                 colours=table, **profile)  # fmt: skip
    values = index[..., 0]
    empty = values == profile.get("nodata", -1)
    if driver == "HFA":  # a palette of TIFF has no transparency
        empty |= (values < 20) & (transparent == 0)
    colours = np.array([table[n][:3] for n in range(most)])[values]
    return path, {}, colours / 255, empty


def scaled(folder, scales, offsets, **profile):
    pixels = pattern(len(scales), np.uint16, 8000).astype(profile.pop("dtype", "uint16"))
    path = write(folder / "a.tif", pixels, scales=scales, offsets=offsets, **profile)
    values = (pixels * np.array(scales) + np.array(offsets) + 1) / 2
    empty = (pixels == profile.get("nodata", -1)).all(2)
    return path, {"value_range": (-1, 1)}, values.clip(0, 1), empty


def inks(folder):
    pixels = pattern(4, np.uint16)
    path = folder / "a.tif"
    path.write_bytes(tiff(pixels, photometric="separated").getvalue())
    light = 1 - pixels / 65535
    return path, {}, light[..., :3] * light[..., 3:], np.zeros((HEIGHT, WIDTH), bool)


def twelve_bits(folder):
    pixels = pattern(5, np.uint16, 4095)
    path = write(folder / "a.tif", pixels, nbits=12)
    return path, {"bands": (5, 2)}, pixels[..., [4, 1]] / 4095, np.zeros((HEIGHT, WIDTH), bool)


def wide_palette(folder):
    index = pattern(1, np.uint16, 999)
    table = np.random.default_rng(1).integers(0, 256, (3, 2**16)) * 257
    path = folder / "a.tif"
    options = {"photometric": "palette", "colormap": table.astype(np.uint16)}
    path.write_bytes(tiff(index, **options).getvalue())
    return path, {}, table.T[index[..., 0]] / 65535, np.zeros((HEIGHT, WIDTH), bool)


def jpeg_2000_of_12_bits(folder):
    pixels = pattern(3, np.uint16, 4095)
    path = folder / "a.jp2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        write(path, pixels, driver="JP2OpenJPEG", quality=100, reversible="YES", nbits=12,
              transform=None, crs=None)  # fmt: skip
    return path, {}, pixels / 4095, np.zeros((HEIGHT, WIDTH), bool)


def stored(folder, pixels, asked=None, **options):
    """A TIFF in any layout, whose integers are of 8 bits unless a range is asked for."""
    path = folder / "a.tif"
    path.write_bytes(tiff(pixels, **options).getvalue())
    asked = {"value_range": (0, 255)} | (asked or {})
    low, high = asked["value_range"]
    wanted = (pixels.astype(float) - low) / (high - low)
    if "bands" in asked:
        wanted = wanted[..., [band - 1 for band in asked["bands"]]]
    return path, asked, wanted.clip(0, 1), np.zeros((HEIGHT, WIDTH), bool)


def laid_out(folder, dtype, **options):
    pixels = pattern(5, np.uint16, 200).astype(dtype)
    return stored(folder, pixels, {"bands": (5, 2)}, **options)


def array(folder, kind, pixels):
    """An array of numpy or zarr."""
    path = folder / f"a.{kind}"
    if kind == "npy":
        np.save(path, pixels)
    else:
        zarr.create_array(str(path), data=pixels, chunks=(16, 16, 1)[: pixels.ndim])
    wanted = pixels.astype(float).reshape(HEIGHT, WIDTH, -1)
    wanted /= 1 if pixels.dtype == bool else 255
    asked = {"value_range": (0, 255), "bands": tuple(range(1, wanted.shape[2] + 1))}
    return path, asked, wanted, np.zeros((HEIGHT, WIDTH), bool)


def channels(folder, kind, shape, **options):
    """Channels that are pages: a file of OME or ImageJ; of depths or times page 2 is read."""
    axes = options.get("axes", "CYX")
    stored = np.random.default_rng(0).integers(0, 256, (*shape, HEIGHT, WIDTH), np.uint8)
    path = folder / f"a.{kind}.tif"
    written = {"imagej": True} if kind == "imagej" else {"ome": True}
    layout = {} if kind == "imagej" else {"tile": (16, 16)}
    tifffile.imwrite(path, stored, **written, **layout, metadata=options, photometric="minisblack")
    if options.get("one_page"):
        tifffile.imwrite(path, stored, imagej=True, metadata={"axes": axes}, contiguous=True)
        shorten(path)
    picture = np.moveaxis(stored, axes.index("C"), -1)
    pages = picture.reshape(-1, HEIGHT, WIDTH, picture.shape[-1])
    page = 1 if len(pages) > 1 else 0
    asked = {"page": page + 1} if page else {}
    if picture.shape[-1] != 3:
        asked["bands"] = tuple(range(1, picture.shape[-1] + 1))
    return path, asked, pages[page] / 255, np.zeros((HEIGHT, WIDTH), bool)


def shorten(path):
    """Leave only the first page of a stack, from which ImageJ finds the others."""
    content = bytearray(path.read_bytes())
    with tifffile.TiffFile(path) as file:
        place = file.pages[0].offset
    entries = int.from_bytes(content[place : place + 2], "little")
    content[place + 2 + 12 * entries : place + 6 + 12 * entries] = bytes(4)
    path.write_bytes(content)


PLANES = {"planarconfig": "separate", "tile": (16, 16)}
CASES = {
    "strips": lambda f: laid_out(f, "uint8", rowsperstrip=7),
    "tiles": lambda f: laid_out(f, "int16", tile=(16, 32)),
    "planes": lambda f: laid_out(f, "uint16", **PLANES),
    "planes of strips": lambda f: laid_out(f, "uint8", planarconfig="separate", rowsperstrip=5),
    "zlib": lambda f: laid_out(f, "uint16", tile=(16, 16), compression="zlib", predictor=True),
    "LZW": lambda f: laid_out(f, "float32", rowsperstrip=11, compression="lzw"),
    "BigTIFF": lambda f: laid_out(f, "int16", bigtiff=True, rowsperstrip=8),
    "big-endian": lambda f: laid_out(f, "float32", byteorder=">", tile=(16, 16)),
    "signed": lambda f: stored(f, pattern(3, np.int16, 900), {"value_range": (50, 800)}),
    "four colors": lambda f: stored(f, pattern(4), photometric="rgb", extrasamples=[0]),
    "npy": lambda f: array(f, "npy", pattern(7)),
    "npy of bits": lambda f: array(f, "npy", pattern(1)[..., 0] > 99),
    "zarr": lambda f: array(f, "zarr", pattern(2, np.uint16, 200)),
    "nodata in three bands": lambda f: nodata(f, "uint8", 255, 3),
    "nodata beyond the type": lambda f: nodata(f, "uint8", -9999, 3),
    "nodata that is NaN": lambda f: nodata(f, "float32", np.nan, 2, interleave="band"),
    "nodata in three of four bands": lambda f: nodata(f, "uint8", 255, 4, photometric="MINISBLACK"),
    "internal mask": lambda f: masked(f, "internal"),
    "mask and nodata": lambda f: masked(f, "beside nodata"),
    "mask file": lambda f: masked(f, "file"),
    "alpha": lambda f: masked(f, "alpha"),
    "VRT, nodata of its own": lambda f: bands_of_vrt(f, ["uint16"] * 3, (65535, 60000, 50000)),
    "VRT, types": lambda f: bands_of_vrt(f, ["int16", "uint16", "float32"], (-1, None, np.nan)),
    "white zeros, 16 bits": lambda f: white_zeros(f, "uint16", False, extratags=GEO),
    "white zeros, float": lambda f: white_zeros(f, "float32", False, bigtiff=True),
    "white zeros, VRT": lambda f: white_zeros(f, "uint8", True),
    "palette, nodata": lambda f: palette(f, "GTiff", nodata=3),
    "palette of 4 bits": lambda f: palette(f, "GTiff", nbits=4, nodata=3, photometric="palette"),
    "palette, .img, transparent": lambda f: palette(f, "HFA", 0),
    "scale": lambda f: scaled(f, [1e-4, 2e-4, 1e-4], [-0.1, 0.2, 0.0]),
    "scale, nodata": lambda f: scaled(f, [1e-4], [0.5], dtype="int16", nodata=0),
    "12 bits": twelve_bits,
    "inks": inks,
    "palette of 16 bits": wide_palette,
    "JPEG 2000, 12 bits": jpeg_2000_of_12_bits,
    "OME": lambda f: channels(f, "ome", (3,), axes="CYX"),
    "OME, times and 5 channels": lambda f: channels(f, "ome", (2, 5), axes="TCYX"),
    "ImageJ, depths and 2 channels": lambda f: channels(f, "imagej", (3, 2), axes="ZCYX"),
    "ImageJ, one page": lambda f: channels(f, "imagej", (3,), axes="CYX", one_page=True),
}


def taken(path, asked, wanted, empty):
    """The options that read the bands that are wanted, and these, with 0 in holes."""
    if "bands" not in asked:
        count = {1: 1, 2: 2}.get(wanted.shape[2], 3)
        asked = asked | ({"bands": (1, 2)} if count == 2 else {"channels": count})
        wanted = wanted[..., :count]
    if empty.ndim == 2:
        empty = empty[..., None]
    empty = np.broadcast_to(empty[..., : wanted.shape[2]], wanted.shape)
    return ReadOptions(**asked), np.where(empty, 0, wanted), ~empty


@pytest.mark.parametrize("case", CASES)
def test_whole_images_parts_bands_and_statistics_equal_the_file(tmp_path, case):
    path, *rest = CASES[case](tmp_path)
    options, wanted, valid = taken(path, *rest)
    sources = [str(path)]
    if path.suffix in (".tif", ".jp2", ".npy") and not (tmp_path / "a.tif.msk").exists():
        sources.append(io.BytesIO(path.read_bytes()))
    view = Geometry("native", None).view(HEIGHT, WIDTH)
    for source in sources:
        with open_image(source, options) as reader:
            got = read_image(reader, view, options)
            found = reduce(add, (moments_of(*part) for part in read_blocks(reader, options)))
        got = got / 255 if got.dtype == np.uint8 else got
        np.testing.assert_allclose(got, wanted, atol=2e-5)
        assert found.count.tolist() == valid.sum((0, 1)).tolist()
        np.testing.assert_allclose(found.mean, wanted.mean((0, 1)) / valid.mean((0, 1)), rtol=1e-4)

    count = wanted.shape[2]
    spec = DataSpec(count, 2, (), (0.0,) * count, (1.0,) * count, None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pages, and of files of one part
        with open_source(str(path), options=options) as source:
            prepare = source.prepare(spec)
            rows = [slice(top, min(top + 5, HEIGHT)) for top in range(0, HEIGHT, 5)]
            parts = [prepare(source.read(each, slice(7, WIDTH))) for each in rows]
    got = torch.cat(parts, 2)[0].permute(1, 2, 0)
    np.testing.assert_allclose(got, wanted[:, 7:], atol=2e-5)


def test_a_range_that_is_found_counts_no_holes(tmp_path):
    path, *_ = CASES["VRT, nodata of its own"](tmp_path)
    options, lines = settle(Files([str(path)]), [0], ReadOptions())
    assert options.value_range == (0, 255) and "hold values up to 200" in lines[0]


def test_smaller_copies_are_read_by_windows_and_have_holes_too(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (64, 96, 3), np.uint8)
    mask, path = np.full((64, 96), 255, np.uint8), tmp_path / "a.tif"
    mask[:32, :48] = 0
    profile = {"driver": "GTiff", "height": 64, "width": 96, "count": 3, "dtype": "uint8"}
    profile |= {"transform": rasterio.Affine(10, 0, 100, 0, -10, 500), "crs": "EPSG:3857"}
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True):
        with rasterio.open(path, "w", tiled=True, blockxsize=16, blockysize=16, **profile) as file:
            file.write(pixels.transpose(2, 0, 1))
            file.write_mask(mask)
        with rasterio.open(path, "r+") as file:
            file.build_overviews([2], rasterio.enums.Resampling.average)
    means = pixels.reshape(32, 2, 48, 2, 3).mean((1, 3))
    for source in (str(path), io.BytesIO(path.read_bytes())):
        with open_image(source) as reader:
            part = reader.read(Box(8, 16, 56, 80), 28, 40)
            assert part.mask[:12, :16].all() and part.mask.sum() == 12 * 16 * 3
            assert np.abs(part - means[4:, 8:]).max() <= 1
    with open_source(str(path), level=1) as source:
        assert source.read(slice(0, 32), slice(0, 48)).mask.sum() == 16 * 24 * 3


def test_white_may_be_zero_in_one_bit_too():
    pixels = pattern(1) > 99
    got = seen(tiff(pixels, photometric="miniswhite"), channels=1)
    np.testing.assert_array_equal(got, np.where(pixels, 0, 255))


def test_lab_is_the_rgb_that_colour_management_makes_of_it():
    picture = np.asarray(Image.effect_noise((WIDTH, HEIGHT), 60).resize((WIDTH, HEIGHT)))
    picture = np.stack([picture, np.roll(picture, 1, 0), np.roll(picture, 2, 1)], 2) // 2 + 60
    srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    converted = ImageCms.profileToProfile(Image.fromarray(picture), srgb, lab, outputMode="LAB")
    levels = np.frombuffer(converted.tobytes(), np.uint8).reshape(picture.shape)
    wide = levels * np.array([257, 256, 256], np.uint16)
    for stored, white in ((levels, 1), (wide, 255)):
        off = np.abs(seen(tiff(stored, photometric="cielab")) * float(white) - picture)
        assert off.max() < 6 and off.mean() < 1


@pytest.mark.parametrize(("code", "suffix"), [(33003, "svs"), (33005, "tif")])
def test_jpeg_2000_of_aperio_is_rgb(tmp_path, code, suffix):
    picture = np.kron(pattern(3)[:4, :6], np.ones((64, 64, 1), np.uint8))
    stored = picture
    if code == 33003:
        stored = np.asarray(Image.fromarray(picture).convert("YCbCr"))
    path = tmp_path / f"a.{suffix}"
    said = "Aperio Image Library v11\r\n384x256 [0,0 384x256] (128x128) J2K/YUV16"
    written = {"photometric": "rgb", "tile": (128, 128), "description": said, "metadata": None}
    tifffile.imwrite(path, stored, compression=code, **written)
    with open_image(str(path)) as reader:
        assert np.abs(whole(reader).astype(int) - picture).max() <= 3
    with open_source(str(path)) as source:
        part = source.read(slice(60, 200), slice(30, 300))
        assert np.abs(part.astype(int) - picture[60:200, 30:300]).max() <= 3


def test_physical_units_need_a_range_and_mix_with_no_other_values(tmp_path):
    path, *_ = scaled(tmp_path, [1e-4], [-0.1])
    said = "a.tif: unknown value range of values in physical units from -0.1 to 0.7"
    with pytest.raises(ValueError, match=said):
        settle(Files([str(path)]), [0], ReadOptions(1))
    _, lines = settle(Files([str(path)]), [0], ReadOptions(1, value_range=(0, 1)))
    assert len(lines) == 1 and "data.value_range is in physical units, because" in lines[0]
    with pytest.raises(NotAsAsked, match="^unknown value range of values in physical units from"):
        seen(str(path), channels=1, value_range=(0, 255), found=True)


def test_masks_of_64_bits_and_of_wide_palettes_are_numbers_of_classes(tmp_path):
    classes, path = np.random.default_rng(0).integers(0, 3, (5, 7, 1)), tmp_path / "a.tif"
    options = {"photometric": "palette", "colormap": np.zeros((3, 2**16), np.uint16)}
    for stream in (tiff(classes), tiff(classes.astype(np.uint16), **options)):
        path.write_bytes(stream.getvalue())
        masks = MaskFiles(Files([str(path)]), MaskClasses(("a", "b", "c")))
        np.testing.assert_array_equal(masks.read(0), classes[..., 0])


def test_a_kind_that_no_library_reads_is_named_in_one_line(tmp_path):
    pixels = pattern(4, np.uint16).astype(np.complex64)
    for stream, said in (
        (tiff(pixels), "photometric interpretation MINISBLACK, compression NONE and 64 bits"),
        (tiff(pattern(5, np.uint16), photometric="separated"), "interpretation SEPARATED, "),
    ):
        with pytest.raises(NotAsAsked, match=said):
            seen(stream)
    path, *_ = CASES["OME"](tmp_path)
    with pytest.raises(NotAsAsked, match="has 1; its 3 channels are bands, as in --data.bands 2$"):
        seen(str(path), page=2)
    pixels = pattern(1, np.uint16).astype(np.complex64)
    with pytest.raises(NotAsAsked, match="expected integers or floats, got complex64"):
        open_image(str(write(tmp_path / "a.img", pixels, driver="HFA")))
