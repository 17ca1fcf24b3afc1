"""Probes on features: what they are fitted on, and that they are scikit-learn's."""

import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import cosine_similarity

from tests.helpers import inference_files
from tests.helpers.inference_files import feature_of, read_index, write_weights
from tests.helpers.tools import assert_one_error, load_tool
from visionattn.inference.drawn import Division
from visionattn.inference.probes import divide_folder, fit_probes

extract = load_tool("extract_features")
CLASSES = {"fern": (60, 180, 70), "moss": (90, 120, 60), "sand": (190, 170, 90)}
LINE = re.compile(
    r"linear probe (\d+\.\d\d) %, kNN \(k = (\d+)\) (\d+\.\d\d) % of (\d+) (\w+) images, "
    r"fitted on (\d+) images of (\d+) classes"
)


def write_classes(folder, count: int, *, seed: int) -> None:
    """``count`` images of each class: its colour, in noise that hides it from single pixels."""
    rng = np.random.default_rng(seed)
    for name, colour in CLASSES.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.clip(rng.normal(colour, 60, (16, 16, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


def flags(*more: str) -> list[str]:
    return inference_files.flags("--batch_size", "40", "--probe", *more)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    return tmp_path


def figures(line: str) -> tuple[float, int, float, int, str, int, int]:
    kinds = float, int, float, int, str, int, int
    found = LINE.fullmatch(line).groups()
    return tuple(kind(each) for kind, each in zip(kinds, found, strict=True))


def last_line(capsys) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_both_accuracies_are_those_of_scikit_learn_and_of_neighbours_by_hand(folder, capsys):
    write_classes(folder / "images" / "train", 30, seed=1)
    write_classes(folder / "images" / "val", 17, seed=2)
    assert extract(flags("--neighbours", "7")) == 0
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
    found = figures(last_line(capsys))
    assert found == (round(by_linear, 2), 7, round(by_neighbours, 2), 51, "validation", 90, 3)
    assert by_linear > 80 and 60 < by_neighbours < 100


def test_class_folders_alone_hold_a_share_out_and_a_test_split_comes_before_the_validation_split(
    folder, capsys
):
    write_classes(folder / "images", 10, seed=1)
    assert extract(flags("--val_fraction", "0.3")) == 0
    assert figures(last_line(capsys))[3:] == (9, "validation", 21, 3)
    assert extract(flags("--val_fraction", "0.3", "--seed", "1")) == 0  # which divides them anew
    first, other = (divide_folder("images", val_fraction=0.3, seed=seed) for seed in (0, 1))
    assert first.judged != other.judged and not set(first.judged) & set(first.fitted)
    assert first.judged | first.fitted == other.judged | other.fitted
    assert len(first.judged | first.fitted) == 30
    for split, seed in (("train", 1), ("val", 2), ("test", 3)):
        write_classes(folder / "three" / split, 6, seed=seed)
    assert extract(flags("--images", "three/", "--output", "three_out")) == 0
    assert figures(last_line(capsys))[3:] == (18, "test", 18, 3)


def test_features_that_are_there_are_not_computed_again_for_a_probe(folder, capsys):
    write_classes(folder / "images", 10, seed=1)
    (folder / "images" / "stray.png").write_bytes(
        (folder / "images" / "fern" / "0.png").read_bytes()
    )
    (folder / "images" / "moss" / "3.png").write_bytes(b"no image")
    command = flags("--val_fraction", "0.3")
    assert extract([flag for flag in flags() if flag != "--probe"]) == 0
    capsys.readouterr()
    with pytest.warns(UserWarning, match="left out of images: images in no class or split fol"):
        assert extract(command) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "31 of 31 images are done" in printed[1]
    assert printed[-1] == "labelled images without features, which count nowhere: 1"
    found = figures(printed[-2])
    assert found[3] + found[5] == 29


def test_what_cannot_be_probed_is_refused_in_one_line(folder, capsys):
    write_classes(folder / "images", 2, seed=1)
    shutil.copytree(folder / "images" / "fern", folder / "alone" / "fern")
    for more, part in (
        (["--neighbours", "9"], "neighbours 9 of 3 images to fit on; name fewer"),
        (["--images", "alone"], "probe needs two classes or more; alone has fern alone"),
    ):
        assert extract(flags(*more)) == 2
        assert_one_error(capsys, part)
    features = [(f"{i}", torch.full((3,), float(i))) for i in range(9)]
    one_class = Division({str(i): 0 for i in range(6)}, {"7": 0}, "test", ("a",))
    with pytest.raises(ValueError, match="a probe wants at least 2 images"):
        fit_probes(features, one_class, 2)
