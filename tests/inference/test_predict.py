"""Predictions as files and as a table: their values, and what is refused."""

import json
import os

import numpy as np
import pytest
from PIL import Image

import visionattn
import visionattn.models.machine as machine
from tests.helpers import inference_files
from tests.helpers.inference_files import (
    COLOUR,
    GREY,
    direct,
    write_folder,
    write_image,
    write_weights,
)
from tests.helpers.tools import read_csv, written
from visionattn.command import run
from visionattn.inference.image_run import ImageRun

SEEN = "scaleformer_vit_t of best.safetensors; preprocessing: native size"
SHAPES = [(16, 24), (40, 8), (16, 24), (16, 16)]


@pytest.fixture
def case(tmp_path, monkeypatch):
    """The current folder, with weights and images of several sizes, and the images' pixels."""
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    return tmp_path, write_folder(tmp_path / "images", SHAPES)


def predict(*more: str, output: str | None = "out.csv") -> int:
    return run("predict", inference_files.flags("--img_size", "native", *more, output=output))


def by_hand(weights, image, spec=COLOUR) -> list[tuple[str, float]]:
    """Classes and probabilities, the most probable first."""
    logits = direct(weights, image, spec)[2].astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    names = spec.class_names or [str(i) for i in range(spec.num_classes)]
    return sorted(zip(names, probabilities, strict=True), key=lambda pair: -pair[1])


def test_csv_has_a_row_per_image_with_names_and_probabilities(case, capsys):
    folder, pixels = case
    assert predict("--top_k", "3") == 0
    rows = read_csv("out.csv")
    assert [row["path"] for row in rows] == [f"images/{i}.png" for i in range(4)]
    for row, image in zip(rows, pixels, strict=True):
        assert (row["status"], row["reason"]) == ("ok", "")
        assert int(row["height"]) == image.shape[0] == int(row["input_height"])
        wanted = by_hand(folder / "best.safetensors", image)[:3]
        assert [row[f"class_{i}"] for i in (1, 2, 3)] == [name for name, _ in wanted]
        assert [float(row[f"probability_{i}"]) for i in (1, 2, 3)] == pytest.approx(
            [p for _, p in wanted], abs=2e-6
        )
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [SEEN, "4 of 4 images have classes: out.csv"]
    assert printed.err == ""


def test_classes_without_names_are_numbers_and_grey_models_read_grey(case):
    weights = write_weights(case[0] / "best.safetensors", GREY)
    grey = write_image(case[0] / "a.png", 24, 24, 0)[..., :1]
    Image.fromarray(grey.repeat(3, axis=2)).save("a.png")
    wanted = by_hand(weights, grey, GREY)
    assert predict("--images", "a.png") == 0
    [row] = read_csv("out.csv")
    assert [row[f"class_{i}"] for i in (1, 2, 3)] == [name for name, _ in wanted]
    assert float(row["probability_1"]) == pytest.approx(wanted[0][1], abs=1e-5)
    assert "class_4" not in row


def test_json_has_the_same_rows_and_images_that_cannot_be_read_say_why(case, capsys):
    folder, _ = case
    (folder / "images" / "2.png").write_bytes(b"no image")
    os.rename(folder / "images" / "3.png", os.fsencode(folder / "images") + b"/3\xff.png")
    (folder / "list.txt").write_text("images/0.png\nimages/gone.png\n")
    for output in ("out.csv", "out.json"):
        assert predict("--images", "images", "list.txt", output=output) == 0
        assert "4 of 6 images have classes" in capsys.readouterr().out
    rows = read_csv("out.csv")
    assert [row["status"] for row in rows] == ["ok", "ok", "unreadable", "ok", "ok", "unreadable"]
    assert "cannot identify" in rows[2]["reason"] and "No such file" in rows[5]["reason"]
    assert rows[2]["class_1"] == rows[2]["probability_1"] == ""
    assert rows[3]["path"] == "images/3\udcff.png"
    content = json.loads((folder / "out.json").read_text())
    assert content["provenance"]["options"]["img_size"] == "native"
    for flat, nested in zip(rows, content["rows"], strict=True):
        assert nested["path"] == flat["path"] and (nested["reason"] or "") == flat["reason"]
        assert len(nested["classes"]) == (4 if flat["status"] == "ok" else 0)
        for i, pair in enumerate(nested["classes"], start=1):
            assert pair["class"] == flat[f"class_{i}"]
            assert abs(pair["probability"] - float(flat[f"probability_{i}"])) < 2e-6


def test_without_an_output_a_table_is_printed_and_nothing_written(case, capsys):
    folder, pixels = case
    (folder / "images" / "2.png").write_bytes(b"no image")
    before = written(folder)
    assert predict(output=None) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [SEEN, "| image | 1 | 2 | 3 |", "|---|---|---|---|"] and len(lines) == 7
    cells = [
        f"{name} {100 * p:.1f} %" for name, p in by_hand(folder / "best.safetensors", pixels[1])[:3]
    ]
    assert lines[4] == f"| images/1.png | {' | '.join(cells)} |"
    assert lines[5].startswith("| images/2.png | unreadable: cannot identify")
    assert written(folder) == before


def test_when_no_image_can_be_read_the_rows_stay_and_the_exit_code_says_so(case, capsys):
    for image in (case[0] / "images").iterdir():
        image.write_bytes(b"no image")
    assert predict() == 2
    said = "none of the 4 images has a result; the first: images/0.png: cannot identify"
    assert said in capsys.readouterr().err
    assert [row["status"] for row in read_csv("out.csv")] == ["unreadable"] * 4


def test_a_run_that_ends_early_leaves_what_was_there(case, capsys, monkeypatch):
    folder, _ = case
    (folder / "out.csv").write_text("mine")
    before = written(folder)
    real = ImageRun.batches

    def interrupted(*args, **options):
        yield next(real(*args, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(ImageRun, "batches", interrupted)
    assert predict("--overwrite") == 130
    assert capsys.readouterr().err == "interrupted\n" and written(folder) == before


def test_amp_auto_takes_what_the_processor_multiplies(case, monkeypatch):
    folder, _ = case
    # At 40 x 8 px the bfloat16 convolution of oneDNN reads memory that it has not written.
    (folder / "images" / "1.png").unlink()
    for precision in ("bf16", "none"):
        monkeypatch.setattr(machine, "has_bfloat16_products", lambda has=precision == "bf16": has)
        assert predict("--amp", precision, output=f"{precision}.csv") == 0
        assert predict("--amp", "auto", output=f"auto.{precision}.csv") == 0
        assert read_csv(f"auto.{precision}.csv") == read_csv(f"{precision}.csv")
    assert read_csv("bf16.csv") != read_csv("none.csv")


def test_a_trained_classifier_names_the_colours_of_quadrants(trained_classifier):
    found = visionattn.predict(trained_classifier.checkpoint, trained_classifier.images, top_k=1)
    right = [
        path.split("/")[-2] == names[0]
        for path, names in zip(found.paths, found.classes, strict=True)
    ]
    assert len(right) == 16 and np.mean(right) > 0.9
