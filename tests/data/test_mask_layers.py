"""Masks with one file per class: the layout of IDRiD, overlaps, missing files and errors."""

import numpy as np
import pytest
from PIL import Image

from visionattn.data.data_config import DataConfig
from visionattn.data.geometry import Geometry
from visionattn.data.mask_files import check_mask_sizes
from visionattn.data.splits import SampleKey, build_splits

LAYERS = {
    "red": "truth/{folder}/2. Red/{name}_R.tif",
    "dots": "truth/{folder}/1. Dots/{name}_D.tif",
}
MASKS = {"images": "1. Original Images", "layers": LAYERS}
NATIVE = Geometry("native", None)
SIZE = 7, 11


def write(root):
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


def opened(root, masks=MASKS, **more):
    given = dict(name="folder", task="segmentation", root=str(root), fit="native", workers=0)
    return build_splits(DataConfig(**given | more, masks=masks), 0)


@pytest.mark.parametrize("cached", [False, True])
def test_a_pixel_has_the_last_class_whose_file_marks_it(tmp_path, cached):
    known = write(tmp_path / "data")
    cache = str(tmp_path / "kept") if cached else None
    splits = opened(tmp_path / "data", cache=cache)
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
    write(tmp_path)
    before = opened(tmp_path).test
    label = before[SampleKey(1, 0, NATIVE)].label
    save(Image.fromarray(np.ones(SIZE, bool)), tmp_path / "truth/b. Testing Set/1. Dots/X_05_D.tif")
    after = opened(tmp_path).test
    assert (before.digests() != after.digests()).tolist() == [False, True, False]
    assert (label < 2).all() and (after[SampleKey(1, 0, NATIVE)].label == 2).all()


def test_a_missing_mask_and_one_of_another_size_name_their_image_or_file(tmp_path):
    write(tmp_path)
    small = tmp_path / "truth/b. Testing Set/1. Dots/X_04_D.tif"
    save(Image.fromarray(np.ones((3, 3), bool)), small)
    splits = opened(tmp_path)
    said = "X_04_D.tif: it has 3 x 3 pixels, its image 7 x 11"
    assert said in splits.test[SampleKey(0, 0, NATIVE)].reason
    with pytest.raises(ValueError, match=said):
        check_mask_sizes(splits.test)
    (tmp_path / "truth/b. Testing Set/2. Red/X_05_R.tif").unlink()
    with pytest.raises(FileNotFoundError, match="X_05.png has no mask of data.masks.layers; exp"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ({"layers": LAYERS, "classes": ["a", "b"]}, "remove all other keys except images"),
        (
            {"layers": {"red": "truth/red.tif"}},
            "expected paths with {name} in data.masks.layers, got truth/red.tif",
        ),
        ({"layers": {}}, "expected 2 to 255 classes in data.masks.classes, got 1"),
        ({"images": "pictures"}, "data.masks.images needs data.masks.layers"),
    ],
)
def test_contradictions_are_refused(tmp_path, masks, words):
    write(tmp_path)
    with pytest.raises(ValueError, match=words):
        opened(tmp_path, masks=masks)


def test_a_missing_folder_of_images_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="images, which does not exist; check data.masks.images"
    ):
        opened(tmp_path, masks={"layers": LAYERS})
