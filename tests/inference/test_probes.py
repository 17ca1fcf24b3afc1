"""Probes of patches against masks: the figures by hand, and the command from images to its last
line.
"""

import re

import numpy as np
import pytest
import torch

import visionattn.inference.extraction as features
from tests.helpers.inference_files import GREY, feature_of, read_index, write_weights
from tests.helpers.tools import assert_one_error, load_tool, written
from visionattn.cli.parsing import yaml_text
from visionattn.data.data_config import DataConfig
from visionattn.data.drawn_images import patch_labels
from visionattn.data.embedded import CanvasDataset, digit_splits
from visionattn.data.geometry import Geometry
from visionattn.inference.drawn import Drawn
from visionattn.inference.probes import (
    DenseResult,
    fit_and_judge,
    patches_of,
    pixel_map,
)

extract = load_tool("extract_features")
SHARE = r"(\d+\.\d\d) %"
LINE = re.compile(
    rf"(pixels|dense probe)(?: \(.*\))?: mean IoU {SHARE} \(background {SHARE}, "
    rf"(?:distractors {SHARE}, )?(\d+) classes {SHARE}\), "
    rf"accuracy {SHARE}"
)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def images_of(features, labels, per_image: int = 40):
    """Patches divided into images."""
    return [
        (features[i : i + per_image], labels[i : i + per_image])
        for i in range(0, len(labels), per_image)
    ]


def test_features_that_name_the_values_give_one_and_noise_gives_the_background_alone():
    rng = generator()
    labels = rng.choice(6, 2000, p=[0.7, 0.1, 0.05, 0.05, 0.05, 0.05])
    one_hot = np.eye(6, dtype=np.float32)[labels]
    result = fit_and_judge(images_of(one_hot, labels), images_of(one_hot, labels), 8, 0)
    assert (result.confusion == np.diag(np.bincount(labels, minlength=8))).all()
    assert result.note == ""
    noise = rng.normal(size=(4000, 3)).astype(np.float32)
    labels = np.concatenate([labels, rng.permutation(labels)])
    judged = images_of(noise[2000:], labels[2000:])
    result = fit_and_judge(images_of(noise[:2000], labels[:2000]), judged, 6, 0)
    assert (result.confusion.sum(0) == [2000, 0, 0, 0, 0, 0]).all()


def test_intersections_over_unions_are_those_of_the_table_by_hand():
    confusion = np.zeros((5, 5), np.int64)
    confusion[0] = [90, 4, 0, 6, 0]  # background: 90 of 100 + 2 + 1
    confusion[1] = [2, 6, 1, 0, 1]
    confusion[3] = [1, 0, 0, 4, 0]
    result = DenseResult(confusion, 77, "")
    # 90 / 103, 6 / 14 and 4 / 11, their mean, and 100 / 115.
    assert result.line("pixels") == (
        "pixels: mean IoU 55.53 % (background 87.38 %, distractors 42.86 %, 1 classes "
        "36.36 %), accuracy 86.96 %"
    )


def test_a_fit_on_some_of_the_background_is_one_to_all_of_it(monkeypatch):
    """Two bells, 2 apart: with all weights equal the border would lie at 1 instead of 2.5."""
    rng = generator(3)
    labels = np.repeat([0, 2], [4000, 200])
    features = (rng.normal(size=(4200, 1)) + (labels[:, None] == 2) * 2).astype(np.float32)
    shuffled = rng.permutation(4200)
    images = images_of(features[shuffled], labels[shuffled], 525)
    line = np.linspace(-5, 5, 1001, dtype=np.float32)[:, None]

    def border(seed):
        found = fit_and_judge(images, [(line, np.zeros(1001, np.int64))], 3, seed)
        assert found.fitted == sum(
            min(50, (known == 0).sum()) + (known == 2).sum() for _, known in images
        )
        return 5 - found.confusion[0, 2] / 100

    assert border(0) == pytest.approx(1 + np.log(20) / 2, abs=0.3)
    assert border(0) != border(1)


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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors", GREY)
    return tmp_path


def flags(*more: str, output: str = "out") -> list[str]:
    given = ["--checkpoint", "best.safetensors", "--data", "canvas", "--img_size", "48"]
    return [*given, "--data_args.eval_images", "30", "--workers", "0", "--output", output, *more]


def figures(line: str) -> list[str]:
    return list(LINE.fullmatch(line).groups())


def test_the_command_probes_the_maps_that_it_wrote_and_pixels_beside_them(folder, capsys):
    assert extract(flags("--dense", "--probe")) == 0
    *lines, fitted, pixels, last = capsys.readouterr().out.splitlines()
    assert lines[1] == (
        "canvas: 30 validation and 30 test images; distractors null, "
        "digit_px (16, 40), whole_digits 1, val_fraction 0.1, seed 0"
    )
    found = [figures(line) for line in (pixels, last)]
    assert [each[0] for each in found] == ["pixels", "dense probe"]
    assert {each[4] for each in found} == {"9"} and " 1,080 of 30 test images" in fitted
    # By hand: the maps of the files, the masks of the data set.
    parts = []
    for split in ("validation", "test"):
        data = CanvasDataset(digit_splits(0.1, 0)[split], split, 30, 0)
        rows = [row for row in read_index(folder / "out") if f"/{split}/" in row["path"]]
        assert [row["path"] for row in rows] == [f"canvas/{split}/{i}" for i in range(30)]
        maps = [feature_of(folder / "out", row).reshape(24, 36).T for row in rows]
        masks = [data.canvas(i, 0, 48, 48, masked=True).mask for i in range(30)]
        labels = [patch_labels(mask, (6, 6), 12).ravel() for mask in masks]
        parts.append(list(zip(maps, labels, strict=True)))
    wanted = fit_and_judge(*parts, 12, 0)
    assert last == wanted.line("dense probe") and f"on {wanted.fitted:,} patches of 30" in fitted
    # The same command computes nothing anew, and says the same.
    before = written(folder / "out")
    assert extract(flags("--dense", "--probe")) == 0
    again = capsys.readouterr().out.splitlines()
    assert "60 of 60 images are done" in again[2] and again[-1] == last
    assert written(folder / "out") == before


def test_maps_that_are_the_pixels_give_the_figures_of_the_pixels(folder, capsys, monkeypatch):
    def same(model, inputs, sizes):
        rows, columns = inputs.shape[2] // 8, inputs.shape[3] // 8
        pixels = torch.round(255 * (inputs * GREY.std[0] + GREY.mean[0]))
        return torch.stack([pixel_map(image, rows, columns) for image in pixels])

    monkeypatch.setattr(features, "last_map", same)
    more = ["--data", "documents", "--fit", "native", "--img_size", "100", "--batch_size", "1"]
    assert extract(flags("--dense", "--probe", *more)) == 0
    pixels, last = (figures(line) for line in capsys.readouterr().out.splitlines()[-2:])
    assert pixels[1:] == last[1:]
    assert float(last[2]) > 80 and float(last[3]) > 5


def test_canvases_are_those_of_the_run_beside_the_weights_unless_flags_say_otherwise(
    folder, capsys
):
    args = {"distractors": 2, "digit_px": [12, 20]}
    config = {"data": {"name": "canvas", "args": args, "val_fraction": 0.3}, "seed": 4}
    (folder / "config.yaml").write_text(yaml_text(config))
    command = ["--dense", "--data_args.eval_images", "8"]
    for output, more, shown in (
        ("out", ["whole_digits", "2"], "distractors 2, digit_px (12, 20), whole_digits 2, val_"),
        # Nothing, too, is a value of a flag.
        ("two", ["distractors", "null"], "distractors null, digit_px (12, 20), whole_digits 1, "),
    ):
        assert extract(flags(*command, f"--data_args.{more[0]}", more[1], output=output)) == 0
        line = capsys.readouterr().out.splitlines()[1]
        assert shown in line and line.endswith("val_fraction 0.3, seed 4")
    assert extract(flags(*command, "--data_args.distractors", "3")) == 2
    assert "out holds other features: list_of_images" in capsys.readouterr().err


def test_pooled_features_of_canvases_are_probed_for_their_classes(folder, capsys):
    assert extract(flags("--probe", "--neighbours", "3")) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("of 30 test images, fitted on 30 images of 10 classes")
    config = DataConfig(name="canvas", args={"eval_images": 30})
    division = Drawn(config, 0, Geometry("crop", (48, 48), None, (8, 8))).divide()
    for split, named in (("validation", division.fitted), ("test", division.judged)):
        labels = digit_splits(0.1, 0)[split].labels[:30].tolist()
        assert named == {f"canvas/{split}/{i}": label for i, label in enumerate(labels)}


BAD = {
    "--data digits": "digits have no masks, which a probe of patches needs: leave --dense out, or",
    "--images .": "give either --images or --data digits, canvas or documents",
    "--data documents --data_args.distractors 3": "data_args has an unknown key",
    "--probe false --dense false --data digits --data_args.eval_images 3": "data_args is for",
    "--data_args.distractors -1": "data_args.distractors must be at least 0, got -1",
    "--img_size 40": "canvas of 40 pixels is too small for its digits; wanted 48 or more",
    "--img_size native": "canvas is drawn at a size in pixels; name it: --img-size",
}


@pytest.mark.parametrize("more", BAD)
def test_what_cannot_be_drawn_or_probed_is_refused_in_one_line(folder, capsys, more):
    given = [
        flag
        for flag in flags("--dense", "--probe")
        if flag not in ("--data_args.eval_images", "30")
    ]
    assert extract([*given, *more.split()]) == 2
    assert_one_error(capsys, BAD[more])
    assert not (folder / "out").exists()


def test_images_without_maps_are_counted_and_left_out(folder, capsys, monkeypatch):
    real = features.last_map

    def some(model, inputs, sizes):
        found = real(model, inputs, sizes)
        found[1] = torch.nan
        return found

    monkeypatch.setattr(features, "last_map", some)
    assert extract(flags("--dense", "--probe", "--batch_size", "20")) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-4] == "labelled images without features, which count nowhere: 3"
    # The second image of the last batch of three is a test image.
    assert printed[-3].endswith("validation images and judged on 1,044 of 30 test images")


def test_a_probe_that_does_not_converge_says_so(monkeypatch):
    monkeypatch.setattr("visionattn.inference.probes.STEPS", 1)
    rng = generator()
    patches = images_of(rng.normal(size=(200, 4)).astype(np.float32), rng.integers(0, 3, 200))
    assert "not converged after 1 steps" in fit_and_judge(patches, patches, 3, 0).note
