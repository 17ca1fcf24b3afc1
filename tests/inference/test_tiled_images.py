"""``--tiles`` of predict and features: classes, features, maps and masks of tiles."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.inference_files import (
    COLOUR,
    direct,
    feature_of,
    flags,
    read_index,
    write_folder,
    write_segmenter,
    write_weights,
)
from tests.helpers.tools import read_csv
from tests.models.test_tiles import blended
from visionattn.command import run
from visionattn.models.weights import load_model

SHAPES = [(40, 72), (56, 24), (16, 24)]
TILES = ["--tiles", "24", "--overlap", "8"]


@pytest.fixture
def case(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    return tmp_path / "best.safetensors", write_folder(tmp_path / "images", SHAPES)


def parts(image):
    """The tiles of 24 pixels that overlap by 8, of an image whose sides these fill."""
    height, width = image.shape[:2]
    tops, lefts = (range(0, max(1, side - 8), 16) for side in (height, width))
    return [image[top : top + 24, left : left + 24] for top in tops for left in lefts]


@pytest.mark.parametrize(("combine", "put"), [("mean", np.mean), ("max", np.max)])
def test_classes_follow_the_mean_or_the_maximum_of_logits(case, combine, put):
    weights, images = case
    more = ["--top-k", "4", "--combine", combine] if combine == "max" else ["--top-k", "4"]
    assert run("predict", flags(*TILES, *more, output="out.csv")) == 0
    for row, image in zip(read_csv("out.csv"), images, strict=True):
        logits = put([direct(weights, part)[2] for part in parts(image)], axis=0)
        shares = np.exp(logits) / np.exp(logits).sum()
        found = {row[f"class_{i}"]: float(row[f"probability_{i}"]) for i in (1, 2, 3, 4)}
        assert found == pytest.approx(dict(zip(COLOUR.class_names, shares, strict=True)), abs=2e-6)
        assert (int(row["input_height"]), int(row["input_width"])) == image.shape[:2]


def test_features_of_tiles_are_averaged_and_maps_blended(case):
    weights, images = case
    folder = weights.parent

    def last(part):
        return torch.from_numpy(direct(weights, part[0].permute(1, 2, 0).numpy())[1])

    assert run("features", flags(*TILES, "--batch_size", "3", output="vectors")) == 0
    for row, image in zip(read_index(folder / "vectors"), images, strict=True):
        wanted = np.mean([direct(weights, part)[0] for part in parts(image)], axis=0)
        assert feature_of(folder / "vectors", row) == pytest.approx(wanted, abs=1e-5)
    assert run("features", flags(*TILES, "--dense", output="maps")) == 0
    for row, image in zip(read_index(folder / "maps"), images, strict=True):
        pixels = torch.from_numpy(image.transpose(2, 0, 1)[None].copy())
        wanted, found = blended(last, pixels, 24, 8, 8), feature_of(folder / "maps", row)
        assert found.shape == wanted.shape and np.abs(found - wanted).max() < 1e-4


def test_masks_of_tiles_follow_blended_logits(case):
    model = load_model(write_segmenter(case[0]))
    assert run("predict", flags(*TILES, "--batch_size", "2", output="out")) == 0

    def logits(part):
        with torch.no_grad():
            return model((part - 0.5) / 0.25)[0]

    more = ("--save", "masks", "probabilities")
    assert run("predict", flags(*TILES, *more, output="maps")) == 0
    for number, image in enumerate(case[1]):
        pixels = torch.from_numpy(image.transpose(2, 0, 1)[None].copy()).float() / 255
        found = np.asarray(Image.open(f"out/{number}.png"))
        wanted = blended(logits, pixels, 24, 8, 1)
        assert (found == wanted.argmax(0)).mean() > 0.995
        assert np.array_equal(found, np.asarray(Image.open(f"maps/{number}.png")))
        maps = np.load(f"maps/{number}.npy")
        assert np.abs(maps - torch.tensor(wanted).softmax(0).numpy()).max() < 2**-9


def test_models_of_one_size_take_tiles_of_images_of_any(case):
    given = ["--model", "vit_tiny_patch16_224", "--images", "images", "--workers", "0"]
    given += ["--args", "{embed_dim: 24, depth: 1, num_heads: 3, img_size: 32}", "--output", "out"]
    given += ["--tiles", "32", "--overlap", "16"]
    assert run("features", given) == 0
    rows = read_index(case[0].parent / "out")
    assert [(row["status"], row["input_height"]) for row in rows] == [
        ("ok", "48"),
        ("ok", "64"),
        ("ok", "16"),
    ]
