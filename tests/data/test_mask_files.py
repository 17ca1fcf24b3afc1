"""Masks beside images: which file is whose, what values mean, and that they move with the image."""

import struct
import unicodedata
import warnings
import zlib

import numpy as np
import pytest
import tifffile
from PIL import Image

from visionattn.data.batches import Unreadable
from visionattn.data.config import AugmentConfig, DataConfig
from visionattn.data.geometry import Geometry
from visionattn.data.splits import SampleKey, build_splits
from visionattn.models.segmentation import IGNORED

COLOURS = [[0, 0, 0], [200, 30, 30], [0, 90, 255]]
NATIVE = Geometry("native", None)
SIZES = [(20, 30), (16, 16), (33, 17), (24, 40)]


def config(root, **more) -> DataConfig:
    return DataConfig(
        name="folder", task="segmentation", root=str(root), fit="native", workers=0, **more
    )


def write_folder(root, *, layout="{split}/{kind}", save=None, classes=3, suffix=".png"):
    """Images whose red channel says the class of each pixel, with their masks."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for number, (height, width) in enumerate(SIZES):
            mask = rng.integers(0, classes, (height, width), dtype=np.uint8)
            image = np.stack([mask * 100, mask * 0, mask * 0], -1)
            for kind in ("images", "masks"):
                folder = root / layout.format(split=split, kind=kind) / "deep"
                folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(
                root / layout.format(split=split, kind="images") / "deep" / f"{number}.png"
            )
            path = root / layout.format(split=split, kind="masks") / "deep" / f"{number}{suffix}"
            (save or indexed)(mask, path)
    return root


def indexed(mask, path):
    Image.fromarray(mask).save(path)


def with_palette(mask, path):
    picture = Image.fromarray(mask)
    picture.putpalette([7, 7, 7, 9, 9, 9, 1, 2, 3])
    picture.save(path)


def coloured(mask, path):
    Image.fromarray(np.array(COLOURS, np.uint8)[mask]).save(path)


def with_transparency(mask, path):
    colours = np.array(COLOURS, np.uint8)[mask]
    Image.fromarray(np.concatenate([colours, colours[..., :1] * 0 + 255], -1)).save(path)


def in_16_bits(mask, path):
    Image.fromarray(mask.astype(np.uint16)).save(path)


def in_16_bits_with_the_high_byte_first(mask, path):
    tifffile.imwrite(path, mask.astype(np.uint16), byteorder=">")


def in_bits(bits):
    """A writer of grey PNGs of so many bits, which no library that we have writes."""

    def save(mask, path):
        height, width = mask.shape
        padded = np.zeros((height, -(-width * bits // 8) * 8 // bits), np.uint8)
        padded[:, :width] = mask
        places = np.unpackbits(padded[:, :, None], axis=2)[:, :, 8 - bits :]
        rows = np.packbits(places.reshape(height, -1), axis=1)
        lines = b"".join(b"\0" + row.tobytes() for row in rows)
        head = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
        chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
        path.write_bytes(
            b"\x89PNG\r\n\x1a\n"
            + b"".join(
                struct.pack(">I", len(data))
                + kind
                + data
                + struct.pack(">I", zlib.crc32(kind + data))
                for kind, data in chunks
            )
        )

    return save


def in_grey_colours(mask, path):
    Image.fromarray(np.stack([mask] * 3, -1)).save(path)


def item(splits, number, geometry=NATIVE, epoch=0):
    return splits.train[SampleKey(number, epoch, geometry)]


@pytest.mark.parametrize("layout", ["{split}/{kind}", "{kind}/{split}"])
@pytest.mark.parametrize(
    ("save", "suffix", "more"),
    [
        (indexed, ".png", {}),
        (indexed, ".TIF", {}),
        (with_palette, ".png", {}),
        (in_16_bits, ".tif", {}),
        (in_16_bits_with_the_high_byte_first, ".tif", {}),
        (in_bits(2), ".png", {}),
        (in_bits(4), ".png", {}),
        (in_grey_colours, ".bmp", {}),
        (coloured, ".png", {"mask_colours": COLOURS}),
        (with_transparency, ".png", {"mask_colours": COLOURS}),
    ],
)
def test_each_pixel_has_the_class_that_its_mask_says(tmp_path, layout, save, suffix, more):
    write_folder(tmp_path, layout=layout, save=save, suffix=suffix)
    splits = build_splits(config(tmp_path, **more), 0)
    assert splits.spec.task == "segmentation" and splits.spec.num_classes == 3
    assert splits.spec.class_names == ("0", "1", "2")
    for number, size in enumerate(SIZES):
        seen = item(splits, number)
        assert seen.label.dtype == np.uint8 and seen.label.shape == size
        assert np.array_equal(seen.label * 100, seen.pixels[..., 0])


@pytest.mark.parametrize("layout", ["{split}/{kind}", "{kind}/{split}"])
def test_splits_of_masks_are_known_by_their_names_in_any_case(tmp_path, layout):
    write_folder(tmp_path / "a", layout=layout)
    for folder in (tmp_path / "a", tmp_path / "a" / "images", tmp_path / "a" / "masks"):
        for split, name in (("train", "Training"), ("val", "VALID"), ("images", "Images")):
            if (folder / split).is_dir():
                (folder / split).rename(folder / name)
    (tmp_path / "a" / "sketches").mkdir()
    with pytest.warns(UserWarning, match=f"^left out of {tmp_path / 'a'}: sketches$"):
        splits = build_splits(config(tmp_path / "a"), 0)
    assert (len(splits.train), len(splits.validation)) == (4, 4)
    write_folder(tmp_path / "a", layout=layout)
    with (
        pytest.raises(ValueError, match="has two .* splits, .*; wanted one|are masks of one image"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        build_splits(config(tmp_path / "a"), 0)


def test_a_mask_may_have_the_name_of_its_image_in_another_form_of_unicode(tmp_path):
    for kind, form in (("images", "NFC"), ("masks", "NFD")):
        (tmp_path / kind).mkdir()
        for number in range(2):
            name = unicodedata.normalize(form, f"é{number}.png")
            indexed(np.eye(8, dtype=np.uint8), tmp_path / kind / name)
    assert len(build_splits(config(tmp_path, val_fraction=0.5), 0).train) == 1


def test_without_splits_some_images_are_held_out(tmp_path):
    write_folder(tmp_path, layout="{kind}/{split}")
    flat = tmp_path / "flat"
    flat.mkdir()
    (tmp_path / "images" / "train").rename(flat / "images")
    (tmp_path / "masks" / "train").rename(flat / "masks")
    splits = build_splits(config(flat, val_fraction=0.25), 0)
    assert (len(splits.train), len(splits.validation)) == (3, 1)
    assert np.array_equal(item(splits, 2).label * 100, item(splits, 2).pixels[..., 0])


@pytest.mark.parametrize("value", [255, 7])
def test_an_ignored_value_is_of_no_class(tmp_path, value):
    def save(mask, path):
        indexed(np.where(mask == 1, np.uint8(value), mask), path)

    write_folder(tmp_path, save=save)
    names = ["a", "b", "c"]
    given = {} if value == 255 else {"mask_ignored": [value]}
    splits = build_splits(config(tmp_path, mask_classes=names, **given), 0)
    seen = item(splits, 0)
    assert splits.spec.class_names == tuple(names)
    assert np.array_equal(seen.label == IGNORED, seen.pixels[..., 0] == 100)
    assert set(np.unique(seen.label)) == {0, 2, IGNORED}


@pytest.mark.parametrize(
    ("geometry", "px"),
    [
        (Geometry("pad", (64, 64)), None),
        (Geometry("stretch", (40, 40)), None),
        (Geometry("crop", (12, 12)), None),
        (Geometry("native", None, None, (16, 16)), None),
    ],
)
def test_a_mask_goes_where_its_image_goes_and_the_rest_does_not_count(tmp_path, geometry, px):
    """Classes in large even areas, so that away from their edges the pixels tell the class."""
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
    height, width = 50, 90
    mask = np.zeros((height, width), np.uint8)
    mask[:25, 30:60], mask[25:, 60:] = 1, 2
    for number in range(2):
        Image.fromarray(np.stack([mask * 100] * 3, -1)).save(tmp_path / "images" / f"{number}.png")
        indexed(mask, tmp_path / "masks" / f"{number}.png")
    splits = build_splits(config(tmp_path), 0)
    seen = item(splits, 0, geometry)
    view = geometry.view(height, width)
    rows, columns = view.content
    counted = seen.label != IGNORED
    assert counted[:rows, :columns].all() and counted.sum() == rows * columns
    level = seen.pixels[..., 0].astype(int)
    sure = counted & np.isin(level, (0, 100, 200))
    assert sure.sum() > 0.8 * rows * columns and len(np.unique(seen.label[counted])) == 3
    assert np.array_equal(seen.label[sure] * 100, level[sure])


@pytest.mark.parametrize("preset", ["light", "three", "rand", "documents", "aerial"])
def test_augmentation_moves_both_alike(tmp_path, preset):
    """The class of a pixel is whether it is light; what stays light or dark tells it again."""
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
    mask = np.zeros((64, 64), np.uint8)
    mask[8:40, 12:30], mask[50:60, 30:60] = 1, 1
    for number in range(2):
        image = np.where(mask, 250, 5).astype(np.uint8)
        Image.fromarray(np.stack([image] * 3, -1)).save(tmp_path / "images" / f"{number}.png")
        indexed(mask, tmp_path / "masks" / f"{number}.png")
    calm = dict(grey=0.0, solarise=0.0, blur=0.0, colour=0.0, shadow=0.0, noise=0.0, erase=0.0)
    aug = AugmentConfig(erase=0.0) if preset == "rand" else AugmentConfig(**calm)
    splits = build_splits(config(tmp_path, augment=preset, aug=aug), 0)
    square_64 = Geometry("stretch", (64, 64))
    agree, moved = [], 0
    for epoch in range(12):
        seen = item(splits, 0, square_64, epoch)
        light = seen.pixels[..., 0] > 127
        share = (light == (seen.label == 1)).mean()
        agree.append(max(share, 1 - share) if preset == "rand" else share)
        moved += not np.array_equal(seen.label, mask)
    assert (
        moved >= 6 and np.median(agree) > 0.95 and min(agree) > (0.5 if preset == "rand" else 0.9)
    )


def test_beyond_a_black_border_nothing_counts():
    from visionattn.data.augment import Augment

    augment = Augment("none", AugmentConfig(shift=0.5), bands=1, border="black")
    image = np.full((32, 32, 1), 200, np.uint8)
    found = [augment.both(image, np.ones((32, 32), np.uint8), (0, number)) for number in range(8)]
    assert any((pixels == 0).any() for pixels, _ in found)
    for pixels, mask in found:
        assert set(np.unique(mask)) <= {1, IGNORED}
        assert np.array_equal(mask == IGNORED, pixels[..., 0] == 0)


def spoil(root, what):
    """Do something wrong to one mask of the training images."""
    path = root / "train" / "masks" / "deep" / "2.png"
    height, width = SIZES[2]
    if what == "size":
        indexed(np.zeros((height, width + 1), np.uint8), path)
    elif what == "value":
        indexed(np.full((height, width), 3, np.uint8), path)
    elif what == "colours":
        coloured(np.ones((height, width), np.uint8), path)
    elif what == "floats":
        path.unlink()
        Image.fromarray(np.full((height, width), 0.5, np.float32)).save(path.with_suffix(".tif"))
    elif what == "garbled":
        path.write_bytes(b"no mask")
    elif what == "cut":
        path.write_bytes(path.read_bytes()[:40])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("size", "it has 33 x 18 pixels, its image 33 x 17"),
        ("value", "it has the value 3; with 3 classes wanted 0 to 2 or 255, which does not count"),
        ("colours", "name that of each class with data.mask_colours"),
        ("floats", "it has pixels of the kind float; wanted the number of a class"),
        ("garbled", "cannot be read"),
        ("cut", "cannot be read"),
    ],
)
def test_a_wrong_mask_is_the_image_that_cannot_be_read(tmp_path, what, words):
    spoil(write_folder(tmp_path), what)
    splits = build_splits(config(tmp_path, mask_classes=["a", "b", "c"]), 0)
    found = item(splits, 2)
    assert isinstance(found, Unreadable) and words in str(found) and "masks/deep/2." in found.reason
    assert "\n" not in str(found) and not isinstance(item(splits, 1), Unreadable)


def test_an_unknown_colour_is_named(tmp_path):
    write_folder(tmp_path, save=coloured)
    splits = build_splits(config(tmp_path, mask_colours=COLOURS[:2]), 0)
    assert "it has the colour 0 90 255, which is none of data.mask_colours" in str(item(splits, 0))


@pytest.mark.parametrize("what", ["missing", "two", "no folder", "no images", "too many"])
def test_a_folder_without_whole_pairs_is_refused(tmp_path, what):
    write_folder(tmp_path)
    masks, root = tmp_path / "train" / "masks" / "deep", tmp_path
    words = {
        "missing": "1 of 8 images of",
        "two": "are masks of one image; keep one of them",
        "no folder": "4 of 8 images of",
        "no images": "has no images in a folder images; wanted images/* and masks/*",
        "too many": "it has the value 255; wanted 0 to 254 or 9",
    }
    if what == "missing":
        (masks / "1.png").unlink()
    elif what == "two":
        indexed(np.zeros(SIZES[1], np.uint8), masks / "1.bmp")
    elif what == "no folder":
        (tmp_path / "train" / "masks").rename(tmp_path / "train" / "annotations")
    elif what == "no images":
        root = tmp_path / "train" / "masks"
    elif what == "too many":
        indexed(np.full(SIZES[1], 255, np.uint8), masks / "1.png")
    more = {"mask_ignored": [9]} if what == "too many" else {}
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        build_splits(config(root, **more), 0)
    assert words[what] in str(caught.value) and "\n" not in str(caught.value)


def test_another_mask_is_another_image(tmp_path):
    write_folder(tmp_path)
    before = build_splits(config(tmp_path), 0).train.digests()
    indexed(np.ones(SIZES[2], np.uint8), tmp_path / "train" / "masks" / "deep" / "2.png")
    changed = build_splits(config(tmp_path), 0).train.digests() != before
    assert changed.tolist() == [False, False, True, False]
