"""Masks in files, one per image or class: pairs, meanings of values, errors, and augmentation."""

import unicodedata
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import tifffile
from PIL import Image

from visionattn.data.augment import Augment
from visionattn.data.batches import Unreadable
from visionattn.data.data_config import DataConfig
from visionattn.data.geometry import Geometry
from visionattn.data.mask_files import check_mask_sizes, check_trained
from visionattn.data.splits import SampleKey, build_splits
from visionattn.models.segmentation import IGNORED

COLOURS = [[0, 0, 0], [200, 30, 30], [0, 90, 255]]
BINARY = ((0, 0, 0), (255, 255, 255))
NATIVE = Geometry("native", None)
SIZES = [(20, 30), (16, 16), (33, 17), (24, 40)]


def write(
    root, save, *, classes=3, splits=("train", "val"), layout="{split}/{kind}", suffix=".png"
):
    """Images whose red channel is 100 times the class of each pixel, with their masks."""
    rng = np.random.default_rng(0)
    for split in splits:
        for number, size in enumerate(SIZES):
            mask = rng.integers(0, classes, size, dtype=np.uint8)
            image = np.stack([mask * 100, mask * 0, mask * 0], -1)
            places = [root / layout.format(split=split, kind=kind) for kind in ("images", "masks")]
            for place in places:
                (place / "deep").mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(places[0] / "deep" / f"{number}.png")
            save(mask, places[1] / "deep" / f"{number}{suffix}")
    return root


def values(*levels, dtype=np.uint8, mode=None, **options):
    """A writer of masks whose classes have these values."""

    def save(mask, path):
        pixels = np.array(levels, dtype)[mask]
        if path.suffix.lower() == ".tif" and mode is None:
            tifffile.imwrite(path, pixels, **options)
        else:
            picture = Image.fromarray(pixels)
            (picture.convert(mode) if mode else picture).save(path)

    return save


NUMBERS = values(0, 1, 2)


def with_palette(mask, path):
    picture = Image.fromarray(mask)
    picture.putpalette([7, 7, 7, 9, 9, 9, 1, 2, 3])
    picture.save(path)


def coloured(mask, path):
    Image.fromarray(np.array(COLOURS, np.uint8)[mask]).save(path)


def now_and_then_in_one_bit(mask, path):
    Image.fromarray(mask * 255 if int(path.stem) % 2 else mask > 0).save(path)


def opened(root, **more):
    given = dict(name="folder", task="segmentation", root=str(root), fit="native", workers=0)
    return build_splits(DataConfig(**given | more), 0)


def item(splits, number, geometry=NATIVE, epoch=0):
    return splits.train[SampleKey(number, epoch, geometry)]


def items(dataset):
    return [dataset[SampleKey(number, 0, NATIVE)] for number in range(len(dataset))]


SAVED = [
    # A writer, its suffix, options, and the value of each class in what is read.
    (NUMBERS, ".TIF", {}, (0, 1, 2)),
    (with_palette, ".png", {}, (0, 1, 2)),
    (values(0, 1, 2, dtype=np.uint16, byteorder=">"), ".tif", {}, (0, 1, 2)),
    (values(0, 1, 2, photometric="miniswhite"), ".tif", {}, (0, 1, 2)),
    (values(0, 1, 2, mode="RGB"), ".bmp", {}, (0, 1, 2)),
    (coloured, ".png", {"colours": COLOURS}, (0, 1, 2)),
    (values(0, 1, 255), ".png", {}, (0, 1, IGNORED)),
    (values(0, 7, 1), ".png", {"classes": ["a", "b"], "ignored": 7}, (0, IGNORED, 1)),
    (coloured, ".png", {"colours": COLOURS[:2], "ignored": COLOURS[2]}, (0, 1, IGNORED)),
    (values(255, 0), ".png", {"colours": [[255] * 3, [0] * 3]}, (0, 1)),
]
WHITE = [
    (values(0, 255), ".png", {"classes": ["ground", "roof"]}, (0, 1)),
    (values(0, 255, mode="P"), ".png", {}, (0, 1)),
    (now_and_then_in_one_bit, ".png", {}, (0, 1)),
    (values(0, 65535, dtype=np.uint16), ".png", {}, (0, 1)),
    (values(0, 255, dtype=np.int32), ".tif", {}, (0, 1)),
    (values(1, 0, dtype=bool, photometric="miniswhite"), ".tif", {}, (0, 1)),
    (values(65535, 0, dtype=np.uint16, photometric="miniswhite"), ".tif", {}, (0, 1)),
    (values(0, 255, 128), ".png", {"ignored": 128}, (0, 1, IGNORED)),
]
"""Black and white masks, in which white is class 1."""


@pytest.mark.parametrize(("save", "suffix", "masks", "wanted"), SAVED + WHITE)
def test_each_pixel_has_the_class_that_its_mask_says(tmp_path, save, suffix, masks, wanted):
    write(tmp_path, save, classes=len(wanted), suffix=suffix)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        splits = opened(tmp_path, **({"masks": masks} if masks else {}))
    told = [str(each.message) for each in caught]
    white = (save, suffix, masks, wanted) in WHITE
    assert len(told) == white and all("white is class 1" in each for each in told)
    numbers = [str(number) for number in range(len(set(wanted) - {IGNORED}))]
    assert splits.spec.class_names == tuple(masks.get("classes", numbers))
    if len(wanted) == 2:
        assert splits.spec.colours == (BINARY if white else BINARY[::-1])
    for seen in (*items(splits.train), *items(splits.validation)):
        assert seen.label.dtype == np.uint8
        np.testing.assert_array_equal(seen.label, np.array(wanted)[seen.pixels[..., 0] // 100])
    check_trained(splits)


@pytest.mark.parametrize("layout", ["{split}/{kind}", "{kind}/{split}"])
def test_splits_of_masks_are_known_by_their_names_in_any_case(tmp_path, layout):
    write(tmp_path, NUMBERS, layout=layout, splits=("Training", "VALID"))
    (tmp_path / "sketches").mkdir()
    with pytest.warns(UserWarning, match=f"^ignored in {tmp_path}: sketches$"):
        splits = opened(tmp_path)
    assert (len(splits.train), len(splits.validation)) == (4, 4)
    write(tmp_path, NUMBERS, layout=layout)
    with pytest.raises(
        ValueError, match="expected one (.* split in .*|mask per image), got .* and "
    ):
        opened(tmp_path)


def test_a_mask_may_have_the_name_of_its_image_in_another_form_of_unicode(tmp_path):
    for kind, form in (("images", "NFC"), ("masks", "NFD")):
        (tmp_path / kind).mkdir()
        for number in range(2):
            name = unicodedata.normalize(form, f"é{number}.png")
            NUMBERS(np.eye(8, dtype=np.uint8), tmp_path / kind / name)
    assert len(opened(tmp_path, val_fraction=0.5).train) == 1


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry("pad", (64, 64)),
        Geometry("stretch", (40, 40)),
        Geometry("crop", (12, 12)),
        Geometry("native", None, None, (16, 16)),
    ],
)
def test_a_mask_goes_where_its_image_goes_and_the_rest_does_not_count(tmp_path, geometry):
    """Classes in large even areas, so that away from their edges the pixels tell the class."""
    height, width = 50, 90
    mask = np.zeros((height, width), np.uint8)
    mask[:25, 30:60], mask[25:, 60:] = 1, 2
    for kind, pixels in (("images", np.stack([mask * 100] * 3, -1)), ("masks", mask)):
        (tmp_path / kind).mkdir()
        for number in range(2):
            Image.fromarray(pixels).save(tmp_path / kind / f"{number}.png")
    seen = item(opened(tmp_path), 0, geometry)
    rows, columns = geometry.view(height, width).content
    counted = seen.label != IGNORED
    assert counted[:rows, :columns].all() and counted.sum() == rows * columns
    level = seen.pixels[..., 0].astype(int)
    sure = counted & np.isin(level, (0, 100, 200))
    assert sure.sum() > 0.8 * rows * columns and len(np.unique(seen.label[counted])) == 3
    assert np.array_equal(seen.label[sure] * 100, level[sure])


def test_beyond_a_black_border_nothing_counts():
    augment = Augment("light", bands=1, border="black")
    image = np.full((32, 32, 1), 200, np.uint8)
    found = [augment.both(image, np.ones((32, 32), np.uint8), (0, number)) for number in range(8)]
    assert any((pixels == 0).any() for pixels, _ in found)
    for pixels, mask in found:
        assert set(np.unique(mask)) <= {1, IGNORED}
        assert (mask[pixels[..., 0] == 0] == IGNORED).all()
        assert (pixels[..., 0][mask == IGNORED] < 101).all()  # half of a pixel is black at the edge


SPOILED = {
    "it has 33 x 18 pixels, its image 33 x 17": np.zeros((33, 18), np.uint8),
    "with 3 classes expected values 0 to 2 or 255, which is ignored, got 3": np.full(
        (33, 17), 3, np.uint8
    ),
    "the color of each class in data.masks.colours": np.full((33, 17, 3), [9, 0, 9], np.uint8),
    "got pixels of the kind float": np.full((33, 17), 0.5, np.float32),
    "cannot be read": None,
}


def test_a_wrong_mask_is_the_image_that_cannot_be_read(tmp_path):
    path = write(tmp_path, NUMBERS, suffix=".tif") / "train" / "masks" / "deep" / "2.tif"
    splits = opened(tmp_path, masks={"classes": ["a", "b", "c"]})
    for words, spoiled in SPOILED.items():
        path.write_bytes(b"no mask")
        if spoiled is not None:
            Image.fromarray(spoiled).save(path)
        found = item(splits, 2)
        assert isinstance(found, Unreadable) and words in str(found)
        assert "masks/deep/2." in found.reason and "\n" not in str(found)
    assert not isinstance(item(splits, 1), Unreadable)


def test_masks_of_another_size_are_found_by_their_headers(tmp_path):
    masks = write(tmp_path, NUMBERS, suffix=".tif") / "train" / "masks" / "deep"
    splits = opened(tmp_path, masks={"classes": ["a", "b", "c"]})
    check_mask_sizes(splits.train)
    for number, size in ((2, (33, 18)), (1, (7, 9))):
        Image.fromarray(np.zeros(size, np.uint8)).save(masks / f"{number}.tif")
    said = "^the mask .*: it has .* pixels, its image .*; 1 more like this; correct them, or pass"
    with pytest.raises(ValueError, match=said):
        check_mask_sizes(splits.train)


def test_a_folder_without_whole_pairs_is_refused(tmp_path):
    masks = write(tmp_path, NUMBERS) / "train" / "masks"
    with pytest.raises(ValueError, match="no folder images with images in data root"):
        opened(masks)
    NUMBERS(np.zeros(SIZES[1], np.uint8), masks / "deep" / "1.bmp")
    with pytest.raises(ValueError, match="expected one mask per image, got"):
        opened(tmp_path)
    masks.rename(tmp_path / "train" / "annotations")
    with pytest.raises(FileNotFoundError, match="^4 of 8 images of [^\n]*$"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("levels", "more", "words"),
    [
        (
            (0, 0),
            {"masks": {"classes": ["a", "b"]}},
            "only class a counts in the 4 training masks; ",
        ),
        (
            (0, 255),
            {"masks": {"ignored": 255}},
            "is ignored (if it is a class, remove data.masks.ig",
        ),
        ((255, 255, 255), {"masks": {"ignored": 255}}, "no pixel counts in the 4 training masks"),
        (
            (0, 2),
            {"masks": {"classes": list("abc")}},
            "the 4 training masks have no pixel of class b",
        ),
        (
            (0, 9),
            {"masks": {"colours": [[0] * 3, [9] * 3, [5] * 3]}},
            "masks have no pixel of class 2; add",
        ),
        (
            (0, 128, 255),
            {},
            "127 of 129 classes have no pixel; if values are colors, pass one color",
        ),
        (
            (0, 255),
            {"masks": {"ignored": 0}},
            "expected values 0 to 254 or 0, which is ignored, got 255",
        ),
    ],
)
def test_masks_that_teach_nothing_are_refused(tmp_path, levels, more, words):
    write(tmp_path, values(*levels), classes=len(levels))
    with warnings.catch_warnings(), pytest.raises(ValueError) as caught:
        warnings.simplefilter("ignore")
        check_trained(opened(tmp_path, **more))
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("train", "val", "note", "error"),
    [
        (
            (0, 1),
            (0, 255),
            "255 is ignored in .*, where all other pixels are class 0",
            "validation",
        ),
        ((0, 255), (0, 1), "255 is ignored in .*, where all other pixels are class 0", "training"),
        ((0, 1), (0, 0), "only class 0 counts in the 4 validation masks; their mean IoU", None),
        ((0, 1), (0, 2), "the 4 training masks have no pixel of class 2", None),
    ],
)
def test_splits_whose_masks_disagree_are_named(tmp_path, train, val, note, error):
    write(tmp_path, values(*train), classes=2, splits=["train"])
    write(tmp_path, values(*val), classes=2, splits=["val"])
    words = f"only class 0 counts in the 4 {error} masks, because the value 255 is ignored"
    with (
        pytest.raises(ValueError, match=words) if error else nullcontext(),
        pytest.warns(UserWarning, match=note),
    ):
        check_trained(opened(tmp_path))


def test_another_mask_is_another_image(tmp_path):
    before = opened(write(tmp_path, NUMBERS)).train.digests()
    NUMBERS(np.ones(SIZES[2], np.uint8), tmp_path / "train" / "masks" / "deep" / "2.png")
    assert (opened(tmp_path).train.digests() != before).tolist() == [False, False, True, False]


def test_a_file_next_to_the_masks_gives_their_meaning_unless_an_option_does(tmp_path):
    write(tmp_path, NUMBERS)
    (tmp_path / "classes.yaml").write_text("classes: [ground, roof, road]\nignored: 255\n")
    splits = opened(tmp_path)
    assert splits.spec.class_names == ("ground", "roof", "road")
    assert splits.train.masks.classes.named and splits.train.masks.classes.stated
    assert opened(tmp_path, masks={"classes": ["x", "y", "z"]}).spec.class_names == ("x", "y", "z")


LAYERS = {
    "red": "truth/{folder}/2. Red/{name}_R.tif",
    "dots": "truth/{folder}/1. Dots/{name}_D.tif",
}
MASKS = {"images": "1. Original Images", "layers": LAYERS}
SIZE = 7, 11


def write_layers(root):
    """Two splits of three images each; return the class of each pixel by path of the image."""
    rng = np.random.default_rng(0)
    known = {}
    for split, first in (("a. Training Set", 1), ("b. Testing Set", 4)):
        for number in range(first, first + 3):
            red, dots = rng.random((2, *SIZE)) < 0.4
            if number in (2, 5):  # no file instead of an empty mask
                dots[:] = False
            image = root / MASKS["images"] / split / f"X_{number:02d}.png"
            known[image.name] = np.where(dots, 2, red).astype(np.uint8)
            pixels = np.zeros((*SIZE, 3), np.uint8)
            pixels[..., 0] = known[image.name] * 100
            save(Image.fromarray(pixels), image)
            # One bit, and red with a palette, as in two distributions of the data.
            if dots.any():
                path = root / "truth" / split / "1. Dots" / f"X_{number:02d}_D.tif"
                save(Image.fromarray(dots), path)
            painted = Image.fromarray(red.astype(np.uint8))
            painted.putpalette([0, 0, 0, 255, 0, 0])
            save(painted, root / "truth" / split / "2. Red" / f"X_{number:02d}_R.tif")
    return known


def save(image, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


@pytest.mark.parametrize("cached", [False, True])
def test_a_pixel_has_the_last_class_whose_file_marks_it(tmp_path, cached):
    known = write_layers(tmp_path / "data")
    cache = str(tmp_path / "kept") if cached else None
    splits = opened(tmp_path / "data", masks=MASKS, cache=cache)
    assert splits.spec.class_names == ("background", "red", "dots")
    assert [len(splits.train), len(splits.validation), len(splits.test)] == [2, 1, 3]
    wanted = sum(np.bincount(known[f"X_0{number}.png"].ravel(), minlength=3) for number in "456")
    counts = splits.test.masks.pixel_counts(splits.test.indices, 3)
    assert counts.tolist() == wanted.tolist()
    for dataset in (splits.train, splits.validation, splits.test) * 2:
        for number in range(len(dataset)):
            item = dataset[SampleKey(number, 0, NATIVE)]
            assert np.array_equal(item.label, known[dataset.name(number)[-8:]])
            assert np.array_equal(item.label * 100, item.pixels[..., 0])


def test_another_file_of_any_class_is_another_image(tmp_path):
    write_layers(tmp_path)
    before = opened(tmp_path, masks=MASKS).test
    label = before[SampleKey(1, 0, NATIVE)].label
    save(Image.fromarray(np.ones(SIZE, bool)), tmp_path / "truth/b. Testing Set/1. Dots/X_05_D.tif")
    after = opened(tmp_path, masks=MASKS).test
    assert (before.digests() != after.digests()).tolist() == [False, True, False]
    assert (label < 2).all() and (after[SampleKey(1, 0, NATIVE)].label == 2).all()


def test_a_missing_mask_and_one_of_another_size_name_their_image_or_file(tmp_path):
    write_layers(tmp_path)
    small = tmp_path / "truth/b. Testing Set/1. Dots/X_04_D.tif"
    save(Image.fromarray(np.ones((3, 3), bool)), small)
    splits = opened(tmp_path, masks=MASKS)
    said = "X_04_D.tif: it has 3 x 3 pixels, its image 7 x 11"
    assert said in splits.test[SampleKey(0, 0, NATIVE)].reason
    with pytest.raises(ValueError, match=said):
        check_mask_sizes(splits.test)
    (tmp_path / "truth/b. Testing Set/2. Red/X_05_R.tif").unlink()
    with pytest.raises(FileNotFoundError, match="X_05.png has no mask of data.masks.layers; exp"):
        opened(tmp_path, masks=MASKS)


def test_a_missing_folder_of_images_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="images, which does not exist; check data.masks.images"
    ):
        opened(tmp_path, masks={"layers": LAYERS})
