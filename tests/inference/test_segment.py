"""Masks of images in files: their sizes, values and table."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import visionattn
from tests.helpers.inference_files import MODEL, PAINTED, PAINTER, write_folder, write_segmenter
from tests.helpers.tools import assert_one_error, read_csv
from tests.helpers.trained_models import block_mask
from visionattn.command import run
from visionattn.inference.segment import mask_files
from visionattn.models.segmentation import IGNORED
from visionattn.models.weights import load_model, save_model

COLOURS = ((0, 0, 0), (250, 10, 10), (0, 120, 240))
NAMES = ("ground", "house", "road")
SIZES = [(16, 24), (21, 35), (40, 8), (16, 24)]
FLAGS = ["--checkpoint", "best.safetensors", "--images", "images", "--workers", "0"]


@pytest.fixture
def case(tmp_path, monkeypatch):
    """The current folder, with weights and images of several sizes, and the images' pixels."""
    monkeypatch.chdir(tmp_path)
    spec = replace(PAINTED, class_names=NAMES, colours=COLOURS)
    write_segmenter(tmp_path / "best.safetensors", spec)
    return tmp_path, write_folder(tmp_path / "images", SIZES)


def by_hand(path, image):
    """The largest logit of each pixel of an image, whose last row and column are repeated."""
    model = load_model(path)
    height, width = image.shape[:2]
    whole = np.pad(image, ((0, -height % 8), (0, -width % 8), (0, 0)), mode="edge")
    pixels = torch.from_numpy(whole).permute(2, 0, 1)[None].float() / 255
    with torch.no_grad():
        logits = model((pixels - 0.5) / 0.25)[0, :, :height, :width]
    return logits.argmax(0).numpy().astype(np.uint8)


def agree(found, wanted):
    return (np.asarray(found) == wanted).mean() > 0.995


def test_each_image_gets_a_png_of_its_size_in_the_colours_of_the_data(case, capsys):
    folder, arrays = case
    assert run("predict", [*FLAGS, "--output", "out"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "4 of 4 images have masks: out"
    for number, array in enumerate(arrays):
        picture = Image.open(folder / "out" / f"{number}.png")
        wanted = by_hand(folder / "best.safetensors", array)
        assert picture.mode == "P" and agree(picture, wanted)
        assert len(np.unique(wanted)) > 1
        painted = np.array(picture.convert("RGB"))
        assert np.array_equal(painted, np.array(COLOURS, np.uint8)[np.asarray(picture)])
    for row, array in zip(read_csv(folder / "out" / "masks.csv"), arrays, strict=True):
        assert row["status"] == "ok" and row["mask"].endswith(".png")
        shares = [float(row[f"share_{name}"]) for name in NAMES]
        wanted = by_hand(folder / "best.safetensors", array)
        assert shares == pytest.approx([(wanted == value).mean() for value in range(3)], abs=0.01)
        assert sum(shares) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("fit", ["pad", "stretch", "crop"])
def test_masks_come_back_to_the_size_of_the_file(case, fit):
    folder, arrays = case
    assert run("predict", [*FLAGS, "--fit", fit, "--img-size", "32", "--output", "out"]) == 0
    for number, (height, width) in enumerate(SIZES):
        mask = np.array(Image.open(folder / "out" / f"{number}.png"))
        wanted = np.ones((height, width), bool)
        if fit == "crop":  # the largest square in the middle
            side = min(height, width)
            top, left = (height - side) // 2, (width - side) // 2
            wanted[:] = False
            wanted[top : top + side, left : left + side] = True
        assert np.array_equal(mask != IGNORED, wanted)


def test_classes_without_names_or_colours_are_numbers_in_colours_of_their_own(case):
    folder, _ = case
    write_segmenter(folder / "best.safetensors", replace(PAINTED, num_classes=30))
    assert run("predict", [*FLAGS, "--output", "out"]) == 0
    picture = Image.open(folder / "out" / "0.png")
    palette = np.array(picture.getpalette()).reshape(-1, 3)
    # Those of PASCAL VOC: aeroplane, bicycle, bird and the last one, television.
    assert palette[:4].tolist() == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0]]
    assert palette[20].tolist() == [0, 64, 128] and len(np.unique(palette[:255], axis=0)) == 255
    assert "share_29" in read_csv(folder / "out" / "masks.csv")[0]


def test_files_of_masks_differ_whatever_images_are_called():
    names = ["a.jpg", "a.png", "a.jpg.png", "a.jpg.png.tif", "b.jpg"]
    wanted = ["a.jpg.png", "a.png.png", "a.jpg.png.png", "a.jpg.png.tif.png", "b.png"]
    found = mask_files(Path("m"), [f"i/{name}" for name in names])
    assert [str(path) for path in found] == [f"m/{name}" for name in wanted]


def test_logits_that_are_not_finite_give_no_mask(case, capsys):
    folder, _ = case
    model = load_model("best.safetensors")
    model.head.bias.data[:] = torch.inf
    save_model(folder / "best.safetensors", model, MODEL, PAINTER, PAINTED)
    assert run("predict", [*FLAGS, "--output", "out"]) == 2
    assert "outputs are not finite" in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_a_call_gives_what_the_command_writes(case):
    folder, arrays = case
    found = visionattn.segment("best.safetensors", arrays)
    assert [tuple(mask.shape) for mask in found] == SIZES
    for mask, array in zip(found, arrays, strict=True):
        assert mask.dtype == torch.uint8
        assert agree(mask, by_hand(folder / "best.safetensors", array))
    with pytest.raises(ValueError, match="use visionattn.segment"):
        visionattn.predict("best.safetensors", arrays)


def test_the_body_gives_feature_maps_and_no_vectors(case, capsys):
    folder, _ = case
    assert run("features", [*FLAGS, "--output", "f"]) == 2
    assert_one_error(capsys, "has feature maps and no vector of an image")
    maps = visionattn.extract_features("best.safetensors", "images", dense=True)
    assert [tuple(each.shape) for each in maps[:2]] == [(16, 2, 3), (16, 3, 5)]
    model = load_model("best.safetensors")
    of_module = visionattn.extract_features(model, "images", dense=True)
    assert all(torch.equal(*pair) for pair in zip(of_module, maps, strict=True))
    with pytest.raises(ValueError, match="no vector of an image"):
        visionattn.extract_features(model, "images")


def test_a_trained_segmenter_finds_the_materials(trained_segmenter):
    found = visionattn.segment(trained_segmenter.checkpoint, trained_segmenter.images)
    right = [(mask.numpy() == block_mask(100 + i)).mean() for i, mask in enumerate(found)]
    assert len(right) == 4 and np.mean(right) > 0.9
