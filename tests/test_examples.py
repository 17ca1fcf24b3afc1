"""The scripts in ``docs/examples`` run as a user starts them, without and with a folder."""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
from PIL import Image

import visionattn
from tests.helpers.documented_inputs import write_classes, write_masks
from visionattn.command import main

EXAMPLES = sorted((Path(__file__).parents[1] / "docs" / "examples").glob("*.py"))


@pytest.fixture
def start(tmp_path, monkeypatch, capsys):
    """Run a script in an empty folder, and return what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(name, *words):
        path = next(path for path in EXAMPLES if path.stem == name)
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, words)])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


def number_after(text, words):
    """The first number behind words in a text."""
    return float(re.search(re.escape(words) + r"[^\n:]*: ([\d.]+)", text)[1])


def test_features_to_scikit_learn(start):
    assert number_after(start("features_to_scikit_learn"), "accuracy") > 0.97


def test_pretrained_vit_small_head(start):
    assert number_after(start("pretrained_vit_small_head"), "accuracy on 20 test images") > 0.8


def test_masks_from_class_folders(start, tmp_path):
    """Noise with a red or a blue square: the class is the color."""
    squares = {}
    for number in range(24):
        draw = np.random.default_rng(number)
        image = draw.integers(90, 160, (64, 80, 3)).astype(np.uint8)
        top, left = draw.integers(0, 40), draw.integers(0, 56)
        label, split = ("blue", "red")[number % 2], ("train", "val", "test")[number // 8]
        image[top : top + 24, left : left + 24] = [[0, 0, 255], [255, 0, 0]][number % 2]
        folder = tmp_path / "images" / split / label
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
        squares[f"{label}_{number}.png"] = split, 1 + number % 2, top, left
    (tmp_path / "images/train/red/broken.png").write_bytes(b"no image")
    argv = ["--model", "vit_tiny_patch16_224", "--args.depth", "1", "--args.patch_size", "8"]
    argv += ["--dense", "--blocks", "0", "--args.dynamic_img_size", "true"]
    argv += ["--images", "images", "--fit", "native", "--img-size", "native"]
    assert main(["features", *argv, "--output", "features"]) == 0
    found = start("masks_from_class_folders", "features", "masks")
    assert "16 masks of 2 classes" in found  # the images in test are left out
    assert "classes: [background, blue, red]" in Path("masks/classes.yaml").read_text()
    for name, (split, value, top, left) in squares.items():
        path = Path("masks/masks", split, name)
        assert path.exists() == (split != "test")
        if path.exists():
            mask = np.array(Image.open(path))
            square = np.zeros((64, 80), bool)
            square[top : top + 24, left : left + 24] = True
            assert set(np.unique(mask)) <= {0, value, 255}
            assert (mask[~square] == value).mean() < 0.1 < (mask[square] == value).mean()
    data = dict(name="folder", root="masks", task="segmentation", features="features")
    optim = dict(lr=1e-2, warmup_epochs=0.5)
    trained = visionattn.train({"data": data, "epochs": 30, "batch_size": 2, "optim": optim})
    assert trained.validation > 0.4


@pytest.mark.slow
def test_train_on_a_folder(start):
    text = start("train_on_a_folder")
    assert number_after(text, "accuracy on the held-out images") > 0.7
    assert re.search(r"^flower/0\.png: (flower|temple) \(\d+%\)$", text, re.M)


@pytest.mark.slow
def test_segment_a_geotiff(start):
    rasterio = pytest.importorskip("rasterio")
    assert number_after(start("segment_a_geotiff"), "mean IoU on the held-out images") > 0.6
    with rasterio.open("mask.tif") as mask:
        assert (mask.height, mask.width, mask.crs.to_epsg()) == (208, 320, 32632)
        assert mask.transform[:6] == (10, 0, 500_000, 0, -10, 5_400_000)
        assert mask.read().max() == 1


@pytest.mark.slow
def test_each_takes_a_folder(start, tmp_path, monkeypatch):
    write_classes(tmp_path / "classes")
    write_masks(tmp_path / "masks")
    create, train = timm.create_model, visionattn.train

    def short(config, options):
        few = {"data.crop": 64, "data.crops": 1} if config == "finetune_segmentation" else {}
        return train(config, options | few | {"epochs": 1, "optim.warmup_epochs": 0.5})

    def small(name, pretrained=False, **args):
        """A small model with random weights, in place of the one that timm downloads."""
        if name.startswith("vit_small"):
            name, pretrained = "vit_tiny_patch16_224", False
        return create(name, pretrained=pretrained, **args)

    monkeypatch.setattr(timm, "create_model", small)
    monkeypatch.setattr(visionattn, "train", short)
    for path in (each for each in EXAMPLES if each.stem != "masks_from_class_folders"):
        folder = "masks" if path.stem == "segment_a_geotiff" else "classes"
        assert re.search("accuracy|mean IoU on", start(path.stem, folder))


def test_scripts_are_short_and_named_in_their_docstrings():
    assert len(EXAMPLES) == 5
    for path in EXAMPLES:
        text = path.read_text()
        assert len(text.splitlines()) <= 80
        assert f"\n    python docs/examples/{path.name} path/to/" in text
