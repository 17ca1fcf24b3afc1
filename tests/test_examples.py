"""The scripts in ``docs/examples`` run as a user starts them, without and with a folder."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import timm

import visionattn
from tests.helpers.documented_inputs import write_classes, write_masks

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
    for path in EXAMPLES:
        folder = "masks" if path.stem == "segment_a_geotiff" else "classes"
        assert re.search("accuracy|mean IoU on", start(path.stem, folder))


def test_scripts_are_short_and_named_in_their_docstrings():
    assert len(EXAMPLES) == 4
    for path in EXAMPLES:
        text = path.read_text()
        assert len(text.splitlines()) < 60
        assert f"\n    python docs/examples/{path.name} path/to/" in text
