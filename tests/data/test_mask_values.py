"""What the values of all masks mean together: black and white ones, 255, classes without pixels."""

import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import tifffile
from PIL import Image

from visionattn.data.config import DataConfig
from visionattn.data.geometry import Geometry
from visionattn.data.mask_files import MaskFiles, check_trained
from visionattn.data.splits import SampleKey, build_splits
from visionattn.models.segmentation import IGNORED

NATIVE = Geometry("native", None)
BINARY = ((0, 0, 0), (255, 255, 255))


def grey(*values, dtype=np.uint8, mode=None):
    """A writer of masks whose classes have these values."""

    def save(mask, path, number):
        levels = np.array(values, dtype)[mask]
        if path.suffix == ".tif":
            tifffile.imwrite(path, levels)
        else:
            picture = Image.fromarray(levels)
            (picture.convert(mode) if mode else picture).save(path)

    return save


def reduced(mask, path, number):
    """A palette of two colours, in the order that Pillow finds."""
    Image.fromarray(mask * 255).convert("RGB").quantize(2).save(path)


def now_and_then_in_one_bit(mask, path, number):
    Image.fromarray(mask * 255 if number % 2 else mask > 0).save(path)


def one_white(mask, path, number):
    """Greys of GIF have palettes of what occurs: white alone is the first place."""
    Image.fromarray(mask * 255 if number else mask * 0 + 255).save(path)


def white_zeros(*values, dtype=np.uint8):
    """A writer of TIFF files in which 0 is shown white."""

    def save(mask, path, number):
        tifffile.imwrite(path, np.array(values, dtype)[mask], photometric="miniswhite")

    return save


def write(root, save, classes=2, splits=("",), suffix=".png"):
    """Four images of each split, whose red channel is 100 times the class of a pixel."""
    rng = np.random.default_rng(0)
    for split in splits:
        for kind in ("images", "masks"):
            (root / split / kind).mkdir(parents=True)
        for number in range(4):
            mask = rng.integers(0, classes, (9, 11), dtype=np.uint8)
            image = np.stack([mask * 100, mask * 0, mask * 0], -1)
            if save is one_white and not number:
                image[..., 0] = 100
            Image.fromarray(image).save(root / split / "images" / f"{number}.png")
            save(mask, root / split / "masks" / f"{number}{suffix}", number)
    return root


def opened(root, **more):
    config = DataConfig(
        name="folder", task="segmentation", root=str(root), fit="native", workers=0, **more
    )
    return build_splits(config, 0)


def check(root, **more):
    named = bool({"mask_classes", "mask_colours"} & set(more))
    check_trained(opened(root, **more), named=named)


def items(dataset):
    return [dataset[SampleKey(number, 0, NATIVE)] for number in range(len(dataset))]


@pytest.mark.parametrize("names", [None, ["ground", "roof"]])
@pytest.mark.parametrize(
    ("save", "suffix"),
    [
        (grey(0, 255), ".png"),
        (grey(0, 255, mode="LA"), ".png"),
        (grey(0, 255, mode="RGB"), ".bmp"),
        (grey(0, 255, mode="P"), ".png"),
        (reduced, ".png"),
        (one_white, ".gif"),
        (now_and_then_in_one_bit, ".png"),
        (grey(0, 65535, dtype=np.uint16), ".png"),
        (grey(0, 255, dtype=np.uint16), ".tif"),
        (grey(0, 255, dtype=np.int32), ".tif"),
        (white_zeros(1, 0, dtype=bool), ".tif"),
        (white_zeros(255, 0), ".tif"),
        (white_zeros(65535, 0, dtype=np.uint16), ".tif"),
    ],
)
def test_white_is_class_1_of_black_and_white_masks(tmp_path, save, suffix, names):
    write(tmp_path, save, suffix=suffix)
    with pytest.warns(UserWarning, match="are black and white .*: white is class 1") as said:
        splits = opened(tmp_path, mask_classes=names)
    assert len(said) == 1 and ("(roof)" in str(said[0].message)) == bool(names)
    assert splits.spec.colours == BINARY
    assert splits.spec.class_names == tuple(names or "01")
    for dataset in (splits.train, splits.validation):
        for seen in items(dataset):
            assert np.array_equal(seen.label * 100, seen.pixels[..., 0])


def test_a_level_between_black_and_white_may_be_ignored(tmp_path):
    write(tmp_path, grey(0, 255, 128), classes=3)
    with pytest.warns(UserWarning, match="white is class 1, 128 does not count"):
        splits = opened(tmp_path, mask_ignored=[128])
    for seen in items(splits.train):
        assert np.array_equal(seen.label == IGNORED, seen.pixels[..., 0] == 200)
        assert set(np.unique(seen.label)) == {0, 1, IGNORED}


def test_numbers_of_classes_stay_where_zero_is_white(tmp_path):
    write(tmp_path, white_zeros(0, 1, 2), classes=3, suffix=".tif")
    splits = opened(tmp_path)
    assert splits.spec.class_names == tuple("012")
    for seen in items(splits.train):
        assert np.array_equal(seen.label * 100, seen.pixels[..., 0])


@pytest.mark.parametrize(
    ("values", "more", "found"),
    [
        ((0, 1), {}, {0, 1}),
        ((0, 1, 255), {}, {0, 1, IGNORED}),
        ((0, 1, 255), {"mask_classes": ["a", "b"]}, {0, 1, IGNORED}),
        ((0, 255), {"mask_colours": [[255] * 3, [0] * 3]}, {0, 1}),
    ],
)
def test_other_masks_mean_what_they_say(tmp_path, values, more, found):
    write(tmp_path, grey(*values), classes=len(values))
    splits = opened(tmp_path, **more)
    assert splits.spec.colours == (BINARY[::-1] if "mask_colours" in more else None)
    assert set(np.unique([seen.label for seen in items(splits.train)])) == found
    check_trained(splits, named=True)


def test_masks_are_read_until_their_meaning_is_known(tmp_path, monkeypatch):
    write(tmp_path, grey(0, 1))
    read, pairs = [], MaskFiles.pairs
    monkeypatch.setattr("visionattn.data.mask_files.READ_AHEAD", 1)
    monkeypatch.setattr(MaskFiles, "pairs", lambda *given: read.append(given) or pairs(*given))
    opened(tmp_path, mask_classes=["a", "b", "c"])
    assert not read
    opened(tmp_path, mask_classes=["a", "b"])
    assert len(read) == 1
    opened(tmp_path)
    assert len(read) == 1 + 4


@pytest.mark.parametrize(
    ("values", "more", "words"),
    [
        ((0, 0), {"mask_classes": ["a", "b"]}, "class a alone counts in the 3 training masks; "),
        (
            (0, 255),
            {"mask_ignored": [255]},
            "255 does not count (if it is a class, leave data.mask",
        ),
        (
            (0, 255),
            {"mask_classes": list("abc")},
            "class a alone counts in the 3 training masks, as",
        ),
        ((255, 255, 255), {"mask_ignored": [255]}, "no pixel counts in the 3 training masks"),
        (
            (0, 2),
            {"mask_classes": ["a", "b", "c"]},
            "no pixel of the 3 training masks has the class b",
        ),
        ((0, 9), {"mask_colours": [[0] * 3, [9] * 3, [5] * 3]}, "masks has the class 2: add"),
        (
            (0, 128, 255),
            {},
            "127 of 129 classes have no pixel; where values are colours, name that",
        ),
        ((0, 255), {"mask_ignored": [0]}, "it has the value 255; wanted 0 to 254 or 0"),
    ],
)
def test_masks_that_teach_nothing_are_refused(tmp_path, values, more, words):
    write(tmp_path, grey(*values), classes=len(values))
    with warnings.catch_warnings(), pytest.raises(ValueError) as caught:
        warnings.simplefilter("ignore")
        check(tmp_path, **more)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("train", "val", "note", "error"),
    [
        ((0, 1), (0, 255), "255 does not count in .*, where all else is class 0", "validation"),
        ((0, 255), (0, 1), "255 does not count in .*, where all else is class 0", "training"),
        ((0, 1), (0, 0), "class 0 alone counts in the 4 validation masks; their mean IoU", None),
        ((0, 1), (0, 2), "no pixel of the 4 training masks has the class 2", None),
    ],
)
def test_splits_whose_masks_disagree_are_named(tmp_path, train, val, note, error):
    write(tmp_path, grey(*train), splits=["train"])
    write(tmp_path, grey(*val), splits=["val"])
    words = f"class 0 alone counts in the 4 {error} masks, as the value 255 does not count"
    with (
        pytest.raises(ValueError, match=words) if error else nullcontext(),
        pytest.warns(UserWarning, match=note),
    ):
        check(tmp_path)
