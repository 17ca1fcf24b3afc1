"""``data.cache``: the same pixels as from the files, without decoding them again."""

import io
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.helpers.geometry import square
from tests.helpers.image_files import config_of, encoded, write_tar
from visionattn.data import pixel_cache
from visionattn.data.batches import Unreadable
from visionattn.data.formats.pillow import PillowImage
from visionattn.data.formats.tiff import TiffImage
from visionattn.data.geometry import geometry_of
from visionattn.data.images import ImageDataset
from visionattn.data.mask_files import MaskFiles
from visionattn.data.pixel_cache import PixelCache
from visionattn.data.sources import TableRows
from visionattn.data.splits import (
    SampleKey,
    build_splits,
    geometry_choices,
)

SIZES = [(300, 420), (310, 290), (420, 300), (296, 408)]


def smooth(number, size, bands=3):
    """A picture with structure at all scales, so that a decoder's reduced sizes differ."""
    rng = np.random.default_rng(number)
    coarse = rng.integers(0, 256, (size[0] // 8 + 1, size[1] // 8 + 1, bands), dtype=np.uint8)
    fine = rng.integers(0, 40, (*size, bands), dtype=np.uint8)
    return coarse.repeat(8, 0).repeat(8, 1)[: size[0], : size[1]] // 2 + fine


def write_jpeg(path, picture, number):
    image = Image.fromarray(picture)
    exif = image.getexif()
    exif[274] = 1 + number * 5 % 8
    image.save(path.with_suffix(".jpg"), exif=exif)


def write_png(path, picture, number):
    Image.fromarray(picture).save(path.with_suffix(".png"))


def write_bands(path, picture, number):
    bands = np.concatenate([picture, picture // 2], 2).astype(np.uint16) * 200
    how = dict(photometric="minisblack", planarconfig="contig")
    tifffile.imwrite(path.with_suffix(".tif"), bands, **how)


def write_root(root, write=write_png, *, masked=False):
    """Four pictures to train on and two to validate on, in two classes or with masks."""
    for split, count in (("train", 4), ("val", 2)):
        for number in range(count):
            kind = "images" if masked else f"class {number % 2}"
            folder = root / split / kind
            folder.mkdir(parents=True, exist_ok=True)
            picture = smooth(number + 7 * count, SIZES[number])
            write(folder / f"{number}", picture, 0 if masked else number)  # masks are not turned
            if masked:
                (root / split / "masks").mkdir(exist_ok=True)
                Image.fromarray(picture[..., 0] // 100).save(
                    root / split / "masks" / f"{number}.png"
                )
    return root


def items(config):
    """All samples of two epochs, with their masks or classes."""
    splits = build_splits(config, 3)
    whole = geometry_of(splits.spec, (8, 8))
    (geometry,) = geometry_choices(splits.spec, config, (8, 8))
    found = []
    for epoch in (0, 1):
        for part, how in ((splits.train, geometry), (splits.validation, whole)):
            found += [part[SampleKey(index, epoch, how)] for index in range(len(part))]
    return found


def assert_same(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.pixels.dtype == other.pixels.dtype and one.present == other.present
        np.testing.assert_array_equal(one.pixels, other.pixels)
        np.testing.assert_array_equal(one.label, other.label)


def entries(folder):
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


@pytest.fixture
def undecodable(monkeypatch):
    """Forbid decoding from now on."""

    def forbid():
        def fail(*_):
            raise AssertionError("decoded again")

        for owner, name in ((PillowImage, "_decode"), (TiffImage, "_read"), (MaskFiles, "read")):
            monkeypatch.setattr(owner, name, fail)

    return forbid


CASES = [
    # writer, options, labels or archive, entries after two epochs
    (write_jpeg, dict(fit="native", img_size=96), "classes", 6),
    (write_jpeg, dict(fit="native", img_size=None), "classes", 6),
    (write_jpeg, dict(fit="pad", img_size=64, augment="light"), "classes", 6),
    (
        write_bands,
        dict(fit="crop", img_size=[40, 72], bands=[6, 1, 2, 4, 5], value_range=[100, 50_000]),
        "classes",
        6,
    ),
    (write_png, dict(fit="stretch", img_size=96), "tar", 6),
    (write_jpeg, dict(fit="native", img_size=96), "masks", 12),
    # Random crops: whole pictures, JPEG also at the decoder's smaller sizes.
    (write_jpeg, dict(fit="crop", img_size=32, augment="three"), "classes", None),
    (write_png, dict(fit="native", img_size=96, augment="three"), "masks", 12),
    (write_jpeg, dict(fit="native", img_size=96, crop=40, crop_around=0.5), "masks", None),
]


@pytest.mark.parametrize(("write", "options", "kind", "count"), CASES)
def test_pixels_are_those_of_the_files_and_nothing_is_decoded_twice(
    tmp_path, undecodable, write, options, kind, count
):
    root = write_root(tmp_path / "root", write, masked=kind == "masks")
    if kind == "masks":
        options = options | dict(task="segmentation", masks={"classes": ["a", "b", "c"]})
    if kind == "tar":
        files = sorted(root.rglob("*.png"))
        root = tmp_path / "root.tar"
        write_tar(root, [(f"{'/'.join(path.parts[-3:])}", path.read_bytes()) for path in files])
    config = config_of(root, **options)
    plain = items(config)
    config.cache = str(tmp_path / "new" / "cache")
    assert_same(items(config), plain)
    kept = entries(config.cache)
    assert len(kept) == count if count else len(kept) > 6
    undecodable()
    assert_same(items(config), plain)
    assert entries(config.cache) == kept


class Rows(list):
    """A stand-in for timm's reader of a Hugging Face table."""

    def __getitem__(self, row):
        return io.BytesIO(super().__getitem__(row)), 0

    def filename(self, row):
        return "same name"


def test_rows_of_a_table_are_kept_by_their_content(tmp_path):
    cache = PixelCache(str(tmp_path / "cache"))
    for levels in ((40, 90), (90, 40), (40, 91)):
        source = TableRows({"train": Rows(map(encoded, levels))}, "hfds/x")
        dataset = ImageDataset(source, np.arange(2), np.zeros(2, int), 3, cache=cache)
        found = [dataset[SampleKey(i, 0, square(16))].pixels[0, 0, 0] for i in range(2)]
        assert tuple(found) == levels
    assert len(entries(tmp_path / "cache")) == 3


def change_middle(root, cache):
    """Other pixels in the middle of files of the same size, written later."""
    for path in root.rglob("*.bmp"):
        content = path.read_bytes()
        half = len(content) // 2
        path.write_bytes(content[:half] + bytes(3000) + content[half + 3000 :])
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def change_end(root, cache):
    """Other pixels in the first rows, with the time of the former files."""
    for path in root.rglob("*.bmp"):
        before, content = path.stat(), path.read_bytes()
        path.write_bytes(content[:-3000] + bytes(3000))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def damage(root, cache):
    first, second, third, *_ = entries(cache)
    for path, content in ((first, b""), (second, second.read_bytes()[:-5]), (third, b"no array")):
        path.write_bytes(content)


def delete(root, cache):
    shutil.rmtree(cache)


@pytest.mark.parametrize("change", [change_middle, change_end, damage, delete])
def test_changed_files_and_damaged_entries_are_decoded_anew(tmp_path, undecodable, change):
    def write(path, picture, number):
        Image.fromarray(picture).save(path.with_suffix(".bmp"))

    root = write_root(tmp_path / "root", write)
    config, kept = (config_of(root, cache=cache) for cache in (None, str(tmp_path / "cache")))
    items(kept)
    change(root, kept.cache)
    plain = items(config)
    assert_same(items(kept), plain)
    undecodable()
    assert_same(items(kept), plain)


def test_other_options_have_other_entries(tmp_path):
    root, cache = write_root(tmp_path / "root", masked=True), str(tmp_path / "cache")
    first = dict(fit="native", img_size=32, bands=[1, 2])
    first |= dict(task="segmentation", masks={"colours": [[0, 0, 0], [1, 1, 1]]})
    for change in (
        {},
        dict(bands=[2, 1]),
        dict(img_size=40),
        dict(masks={"colours": [[1, 1, 1], [0, 0, 0]]}),
    ):
        plain = items(config_of(root, **(first | change)))
        assert_same(items(config_of(root, cache=cache, **(first | change))), plain)


def test_without_room_one_line_says_so_and_images_are_decoded(tmp_path, monkeypatch):
    config = config_of(write_root(tmp_path / "root"), fit="native", img_size=64)
    plain = items(config)
    config.cache = str(tmp_path / "cache")
    monkeypatch.setattr(pixel_cache, "SPARE_BYTES", 2**62)
    with pytest.warns(UserWarning) as caught:
        assert_same(items(config), plain)
    [line] = (str(each.message) for each in caught)
    assert re.match(f"data.cache {config.cache} is full.*less than .* free on its disk", line)
    assert not entries(config.cache)


def test_unreadable_images_are_not_kept(tmp_path):
    root = write_root(tmp_path / "root")
    (root / "train" / "class 0" / "0.png").write_bytes(encoded(120, (200, 200))[:-60])
    config = config_of(root, fit="native", on_error="skip", cache=str(tmp_path / "cache"))
    assert [isinstance(each, Unreadable) for each in items(config)].count(True) == 2
    assert len(entries(config.cache)) == 5
