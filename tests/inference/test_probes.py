"""Probes on features of images and of patches: the figures by hand and by scikit-learn, and the
command from images to its last line.
"""

import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import cosine_similarity

from tests.helpers import inference_files
from tests.helpers.geometry import square
from tests.helpers.inference_files import GREY, feature_of, read_index, write_weights
from tests.helpers.tools import assert_one_error, written
from visionattn.cli.parsing import yaml_text
from visionattn.command import run
from visionattn.data.batches import SampleKey
from visionattn.data.data_config import DataConfig
from visionattn.data.digits_and_canvas import CanvasDataset, digit_splits
from visionattn.data.geometry import Geometry
from visionattn.data.synthetic_images import patch_labels
from visionattn.inference.probes import (
    DenseResult,
    divide_folder,
    fit_and_judge,
    patches_of,
)
from visionattn.inference.synthetic_sources import Drawn

CLASSES = {"fern": (60, 180, 70), "moss": (90, 120, 60), "sand": (190, 170, 90)}
FIGURES = re.compile(
    r"linear probe (\d+\.\d\d) %, kNN \(k = (\d+)\) (\d+\.\d\d) % of (\d+) (\w+) images, "
    r"fitted on (\d+) images of (\d+) classes"
)
SHARE = r"(\d+\.\d\d) %"
DENSE = re.compile(
    rf"(pixels|dense probe)(?: \(.*\))?: mean IoU {SHARE} \(background {SHARE}, "
    rf"(?:distractors {SHARE}, )?(\d+) classes {SHARE}\), accuracy {SHARE}"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    write_weights(tmp_path / "grey.safetensors", GREY)
    return tmp_path


def write_classes(folder, count: int, *, seed: int) -> None:
    """``count`` images of each class: its color, in noise that hides it from single pixels."""
    rng = np.random.default_rng(seed)
    for name, colour in CLASSES.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.clip(rng.normal(colour, 60, (16, 16, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


def probe(*more: str) -> int:
    return run("features", inference_files.flags("--batch_size", "40", "--probe", *more))


def figures(line: str) -> tuple[str, ...]:
    return FIGURES.fullmatch(line).groups()


def last_line(capsys) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_both_accuracies_equal_scikit_learn_and_neighbours_by_hand(folder, capsys):
    write_classes(folder / "images" / "train", 30, seed=1)
    write_classes(folder / "images" / "val", 17, seed=2)
    assert probe("--neighbours", "99") == 2
    assert_one_error(capsys, "expected neighbours at most 90, the images to fit on, got 99")
    assert probe("--neighbours", "7") == 0
    x, y = {"train": [], "val": []}, {"train": [], "val": []}
    for row in read_index(folder / "out"):
        _, split, name, _ = row["path"].split("/")
        x[split].append(feature_of(folder / "out", row))
        y[split].append(sorted(CLASSES).index(name))
    mean, std = np.mean(x["train"], 0), np.std(x["train"], 0)
    linear = LogisticRegression(max_iter=1000).fit((x["train"] - mean) / std, y["train"])
    by_linear = 100 * linear.score((x["val"] - mean) / std, y["val"])
    nearest = np.argsort(-cosine_similarity(x["val"], x["train"]), axis=1)[:, :7]
    votes = [np.bincount(np.array(y["train"])[row], minlength=3).argmax() for row in nearest]
    by_neighbours = 100 * np.mean(np.array(votes) == y["val"])
    wanted = (f"{by_linear:.2f}", "7", f"{by_neighbours:.2f}", "51", "validation", "90", "3")
    assert figures(last_line(capsys)) == wanted
    assert by_linear > 80 and 60 < by_neighbours < 100


def test_class_folders_hold_a_share_out_and_a_test_split_precedes_the_validation_split(
    folder, capsys
):
    write_classes(folder / "images", 10, seed=1)
    assert probe("--val_fraction", "0.3") == 0
    assert figures(last_line(capsys))[3:] == ("9", "validation", "21", "3")
    first, other = (divide_folder("images", val_fraction=0.3, seed=seed) for seed in (0, 1))
    assert first.judged != other.judged and not set(first.judged) & set(first.fitted)
    assert first.judged | first.fitted == other.judged | other.fitted
    for split, seed in (("train", 1), ("val", 2), ("test", 3)):
        write_classes(folder / "three" / split, 6, seed=seed)
    assert probe("--images", "three/", "--output", "three_out") == 0
    assert figures(last_line(capsys))[3:] == ("18", "test", "18", "3")


def test_features_that_are_there_are_not_computed_again_for_a_probe(folder, capsys):
    write_classes(folder / "images", 10, seed=1)
    shutil.copy(folder / "images" / "fern" / "0.png", folder / "images" / "stray.png")
    (folder / "images" / "moss" / "3.png").write_bytes(b"no image")
    assert run("features", inference_files.flags("--batch_size", "40")) == 0
    capsys.readouterr()
    with pytest.warns(UserWarning, match="ignored in images: images in no class or split fol"):
        assert probe("--val_fraction", "0.3") == 0
    printed = capsys.readouterr().out.splitlines()
    assert "31 of 31 images are done" in printed[1]
    assert printed[-1] == "skipped labeled images without features: 1"
    found = figures(printed[-2])
    assert int(found[3]) + int(found[5]) == 29


def images_of(features, labels, per_image: int = 40):
    """Patches divided into images."""
    starts = range(0, len(labels), per_image)
    return [(features[i : i + per_image], labels[i : i + per_image]) for i in starts]


def test_features_that_name_the_values_give_one_and_noise_gives_only_background(monkeypatch):
    rng = np.random.default_rng(0)
    labels = rng.choice(6, 2000, p=[0.7, 0.1, 0.05, 0.05, 0.05, 0.05])
    one_hot = np.eye(6, dtype=np.float32)[labels]
    result = fit_and_judge(images_of(one_hot, labels), images_of(one_hot, labels), 8, 0)
    assert (result.confusion == np.diag(np.bincount(labels, minlength=8))).all()
    assert result.note == ""
    noise = images_of(rng.normal(size=(2000, 3)).astype(np.float32), labels)
    judged = images_of(rng.normal(size=(2000, 3)).astype(np.float32), labels)
    result = fit_and_judge(noise, judged, 6, 0)
    assert (result.confusion.sum(0) == [2000, 0, 0, 0, 0, 0]).all()
    monkeypatch.setattr("visionattn.inference.probes.STEPS", 1)
    assert "not converged after 1 steps" in fit_and_judge(noise, judged, 6, 0).note


def test_intersections_over_unions_equal_the_table_by_hand():
    confusion = np.zeros((5, 5), np.int64)
    confusion[0] = [90, 4, 0, 6, 0]  # background: 90 of 100 + 2 + 1
    confusion[1] = [2, 6, 1, 0, 1]
    confusion[3] = [1, 0, 0, 4, 0]
    # 90 / 103, 6 / 14 and 4 / 11, their mean, and 100 / 115.
    assert DenseResult(confusion, 77, "").line("pixels") == (
        "pixels: mean IoU 55.53 % (background 87.38 %, distractors 42.86 %, 1 classes "
        "36.36 %), accuracy 86.96 %"
    )


def test_patches_that_an_image_does_not_fill_are_left_out():
    config = DataConfig(name="documents", args={"eval_images": 3})
    drawn = Drawn(config, 0, Geometry("pad", (160, 96), None, (16, 16)))
    for index, px in ((0, 16), (1, 16), (2, 32), (4, 16)):  # 32: of a model with coarser maps
        mask, (height, width) = drawn.mask(index)
        assert mask.shape == (160, 96)
        grid = (160 // px, 96 // px)
        rows, columns = -(-height // px), -(-width // px)
        numbered = torch.arange(grid[0] * grid[1]).reshape(1, *grid)
        [(found, known)] = patches_of(iter([(index, numbered)]), drawn)
        assert found.tolist() == numbered[0, :rows, :columns].reshape(-1, 1).tolist()
        assert (known == patch_labels(mask, grid, 6)[:rows, :columns].ravel()).all()
        assert px == 32 or (rows, columns) != grid


def probe_canvases(*more: str, output: str = "out") -> int:
    given = "--checkpoint grey.safetensors --data canvas --img_size 48 --data_args.eval_images 30"
    return run("features", [*given.split(), "--workers", "0", "--output", output, *more])


def test_the_command_probes_the_maps_that_it_wrote_and_pixels(folder, capsys):
    assert probe_canvases("--dense", "--probe") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == (
        "canvas: 30 validation and 30 test images; distractors null, "
        "digit_px (16, 40), whole_digits 1, val_fraction 0.1, seed 0"
    )
    # By hand: the maps of the files, the masks and pixels of the dataset.
    maps, pixels = [], []
    for split in ("validation", "test"):
        data = CanvasDataset(digit_splits(0.1, 0)[split], split, 30, 0)
        rows = [row for row in read_index(folder / "out") if f"/{split}/" in row["path"]]
        assert [row["path"] for row in rows] == [f"canvas/{split}/{i}" for i in range(30)]
        found = [feature_of(folder / "out", row).reshape(24, 36).T for row in rows]
        drawn = [data.draw(SampleKey(i, 0, square(48)), masked=True) for i in range(30)]
        labels = [patch_labels(each.mask, (6, 6), 12).ravel() for each in drawn]
        squares = [each.image.reshape(6, 8, 6, 8).swapaxes(1, 2).reshape(36, 64) for each in drawn]
        maps.append(list(zip(found, labels, strict=True)))
        pixels.append(list(zip(np.array(squares, np.float32), labels, strict=True)))
    wanted = fit_and_judge(*maps, 12, 0)
    assert lines[-1] == wanted.line("dense probe") and " 1,080 of 30 test images" in lines[-3]
    assert f"on {wanted.fitted:,} patches of 30" in lines[-3]
    by_pixels = DENSE.fullmatch(fit_and_judge(*pixels, 12, 0).line("pixels")).groups()
    assert DENSE.fullmatch(lines[-2]).groups() == by_pixels
    # The same command computes nothing anew, and says the same.
    before = written(folder / "out")
    assert probe_canvases("--dense", "--probe") == 0
    again = capsys.readouterr().out.splitlines()
    assert "60 of 60 images are done" in again[2] and again[-1] == lines[-1]
    assert written(folder / "out") == before


def test_canvases_follow_the_configuration_of_the_weights_unless_flags_say_otherwise(
    folder, capsys
):
    args = {"distractors": 2, "digit_px": [12, 20]}
    config = {"data": {"name": "canvas", "args": args, "val_fraction": 0.3}, "seed": 4}
    (folder / "config.yaml").write_text(yaml_text(config))
    assert probe_canvases("--dense", "--data_args.whole_digits", "2") == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[1]
        .endswith("distractors 2, digit_px (12, 20), whole_digits 2, val_fraction 0.3, seed 4")
    )
    assert probe_canvases("--dense", "--data_args.distractors", "null") == 2
    assert "out holds features of another call: list_of_images" in capsys.readouterr().err


def test_pooled_features_of_canvases_are_probed_for_their_classes(folder, capsys):
    assert probe_canvases("--probe", "--neighbours", "3") == 0
    assert last_line(capsys).endswith("of 30 test images, fitted on 30 images of 10 classes")
    config = DataConfig(name="canvas", args={"eval_images": 30})
    division = Drawn(config, 0, Geometry("crop", (48, 48), None, (8, 8))).divide()
    labels = digit_splits(0.1, 0)["test"].labels[:30].tolist()
    assert division.judged == {f"canvas/test/{i}": label for i, label in enumerate(labels)}
