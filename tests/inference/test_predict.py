"""Predictions as files and as a table: their values, and what is refused."""

import io
import json
import os
import re

import numpy as np
import pytest

import visionattn.inference.predict as prediction
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
from tests.helpers.tools import assert_one_error, load_tool, read_csv, written
from visionattn.cli.files import unfinished
from visionattn.inference import image_run

predict = load_tool("predict")
SEEN = (
    "scaleformer_vit_t of best.safetensors; images are seen native: whole images at their own sizes"
)
SHAPES = [(16, 24), (40, 8), (16, 24), (16, 16)]


@pytest.fixture
def case(tmp_path, monkeypatch):
    """A folder with weights and images of several sizes, as the current folder, and the images'
    pixels.
    """
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    return tmp_path, write_folder(tmp_path / "images", SHAPES)


def flags(*more: str, output: str | None = "out.csv") -> list[str]:
    return inference_files.flags("--img_size", "native", *more, output=output)


def by_hand(weights, image, spec=COLOUR) -> list[tuple[str, float]]:
    """Classes and probabilities, the most probable first."""
    logits = direct(weights, image, spec)[2].astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    names = spec.class_names or [str(i) for i in range(spec.num_classes)]
    return sorted(zip(names, probabilities, strict=True), key=lambda pair: -pair[1])


def test_the_first_line_says_how_images_are_seen_and_the_next_what_they_cost(case, capsys):
    folder, _ = case
    write_image(folder / "images" / "large.png", 1100, 1100, 0)
    assert predict(flags()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == SEEN and re.match(r"5 images of .* expected, ", lines[1])


def test_csv_has_a_row_per_image_with_names_and_probabilities(case, capsys):
    folder, pixels = case
    assert predict(flags("--top_k", "3")) == 0
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
    assert list(rows[0])[7:] == [
        f"{what}_{i}" for i in (1, 2, 3) for what in ("class", "probability")
    ]
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        SEEN,
        "4 of 4 images have classes: out.csv",
    ]
    assert printed.err == ""


def test_json_has_the_same_rows_and_where_they_come_from(case):
    folder, pixels = case
    assert predict(flags("--batch_size", "3")) == 0 and predict(flags(output="out.json")) == 0
    content = json.loads((folder / "out.json").read_text())
    assert content["provenance"]["options"]["img_size"] == "native"
    assert "commit" in content["provenance"]
    for flat, nested, image in zip(read_csv("out.csv"), content["rows"], pixels, strict=True):
        assert [pair["class"] for pair in nested["classes"]] == [
            flat[f"class_{i + 1}"] for i in range(4)
        ]
        given = [pair["probability"] for pair in nested["classes"]]
        assert given == pytest.approx(
            [float(flat[f"probability_{i + 1}"]) for i in range(4)], abs=2e-6
        )
        assert nested["path"] == flat["path"] and nested["width"] == image.shape[1]
        assert nested["reason"] is None


def test_classes_without_names_are_numbers_and_grey_models_read_grey(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = write_weights(tmp_path / "best.safetensors", GREY)
    grey = np.repeat(write_image(tmp_path / "images" / "a.png", 24, 24, 0)[..., :1], 3, axis=2)
    prediction_of = by_hand(weights, grey[..., :1], GREY)
    from PIL import Image

    Image.fromarray(grey).save(tmp_path / "images" / "a.png")
    assert predict(flags("--img_size", "24")) == 0
    [row] = read_csv("out.csv")
    assert [row[f"class_{i}"] for i in (1, 2, 3)] == [name for name, _ in prediction_of]
    assert float(row["probability_1"]) == pytest.approx(prediction_of[0][1], abs=1e-5)
    assert "class_4" not in row


def test_images_that_cannot_be_read_are_rows_with_the_reason(case, capsys):
    folder, _ = case
    (folder / "images" / "2.png").write_bytes(b"no image")
    os.rename(folder / "images" / "3.png", os.fsencode(folder / "images") + b"/3\xff.png")
    (folder / "list.txt").write_text("images/0.png\nimages/gone.png\n")
    for output in ("out.csv", "out.json"):
        assert predict(flags("--images", "images", "list.txt", output=output)) == 0
        assert "4 of 6 images have classes" in capsys.readouterr().out
    rows = read_csv("out.csv")
    assert [row["status"] for row in rows] == ["ok", "ok", "unreadable", "ok", "ok", "unreadable"]
    assert "cannot identify" in rows[2]["reason"] and "No such file" in rows[5]["reason"]
    assert rows[2]["class_1"] == rows[2]["probability_1"] == ""
    assert rows[3]["path"] == "images/3\udcff.png"
    nested = json.loads((folder / "out.json").read_text())["rows"]
    assert [row["path"] for row in nested] == [row["path"] for row in rows]
    assert nested[2]["classes"] == []


def test_without_an_output_a_table_is_printed_and_nothing_written(case, capsys):
    folder, pixels = case
    (folder / "images" / "2.png").write_bytes(b"no image")
    before = written(folder)
    assert predict(flags(output=None)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [SEEN, "| image | 1 | 2 | 3 |", "|---|---|---|---|"] and len(lines) == 7
    cells = [
        f"{name} {100 * p:.1f} %" for name, p in by_hand(folder / "best.safetensors", pixels[1])[:3]
    ]
    assert lines[4] == f"| images/1.png | {' | '.join(cells)} |"
    assert lines[5].startswith("| images/2.png | unreadable: cannot identify")
    assert written(folder) == before


def test_the_table_shows_as_many_classes_as_are_asked_for(case, capsys):
    folder, pixels = case
    for top_k in (1, 4):
        assert predict(flags("--top_k", str(top_k), output=None)) == 0
        lines = capsys.readouterr().out.splitlines()
        cells = [
            f"{name} {100 * p:.1f} %"
            for name, p in by_hand(folder / "best.safetensors", pixels[0])[:top_k]
        ]
        assert lines[1] == f"| image | {' | '.join(str(i + 1) for i in range(top_k))} |"
        assert lines[3] == f"| images/0.png | {' | '.join(cells)} |"


def test_file_names_do_not_break_the_table(case, capsys):
    folder, _ = case
    (folder / "images" / "0.png").rename(folder / "images" / "a|b\nc\rd.png")
    assert predict(flags("--images", "images/a|b\nc\rd.png", output=None)) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 4 and "\r" not in out
    assert out.split("\n")[3].startswith(r"| images/a\|b\nc\rd.png | ")


def test_a_seed_that_does_nothing_is_refused(case, capsys):
    assert predict(flags("--seed", "3")) == 2
    assert (
        capsys.readouterr().err
        == "error: seed 3 does nothing: best.safetensors gives all weights; leave it out\n"
    )


def test_when_no_image_can_be_read_the_rows_stay_and_the_exit_code_says_so(case, capsys):
    folder, _ = case
    for image in (folder / "images").iterdir():
        image.write_bytes(b"no image")
    assert predict(flags()) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: none of the 4 images has a result; the first: images/0.png: cannot identify"
    )
    assert error.count("\n") == 1
    assert [row["status"] for row in read_csv("out.csv")] == ["unreadable"] * 4


def test_an_output_that_exists_is_kept_and_replaced_where_that_is_said(case, capsys):
    folder, _ = case
    (folder / "out.csv").write_text("mine")
    assert predict(flags()) == 2
    assert capsys.readouterr().err == "error: out.csv exists; --overwrite replaces it\n"
    assert (folder / "out.csv").read_text() == "mine"
    assert predict(flags("--overwrite")) == 0 and len(read_csv("out.csv")) == 4


def test_a_run_that_ends_early_leaves_what_was_there(case, capsys, monkeypatch):
    folder, _ = case
    (folder / "out.csv").write_text("mine")
    before = written(folder)
    real = image_run.run_images

    def interrupted(*args, **options):
        yield next(real(*args, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(image_run, "run_images", interrupted)
    assert predict(flags("--overwrite")) == 130
    assert capsys.readouterr().err == "interrupted\n" and written(folder) == before


def test_rows_are_written_as_they_come(case, monkeypatch):
    folder, _ = case
    real, seen = image_run.run_images, []

    def watched(*args, **options):
        for batch in real(*args, **options):
            yield batch
            seen.append(unfinished(folder)[0].stat().st_size)

    def unbuffered(path, mode, **options):
        return io.TextIOWrapper(io.FileIO(path, mode), write_through=True, **options)

    monkeypatch.setattr(prediction, "open", unbuffered, raising=False)
    monkeypatch.setattr(image_run, "run_images", watched)
    assert predict(flags(output="out.json")) == 0
    assert len(seen) == 4 and seen == sorted(set(seen))


BAD = {
    "--checkpoint nowhere": "no checkpoint at nowhere",
    "--checkpoint null": "name what to run: --checkpoint",
    "--checkpoint null --model scaleformer_vit_t": "predictions need weights",
    "--images nowhere": "no image, folder or list at nowhere",
    "--images empty": "no images in empty",
    "--top_k 0": "top_k must be above 0, got 0",
    "--top_k 5": "top_k 5 of a model of 4 classes",
    "--img_size 20": "is not a whole number of 8-pixel patches; the nearest that fit: 16 or 24",
    "--fit crop": "img_size native is each image at its own size, which fit crop contradicts",
    "--output out.txt": "must end in .csv or .json",
    "--output no/out.csv": "no folder",
    "--top-n 3": "unknown option --top-n",
}


@pytest.mark.parametrize("more", BAD)
def test_bad_input_ends_with_one_line_code_2_and_nothing_written(case, capsys, more):
    folder, _ = case
    (folder / "empty").mkdir()
    before = written(folder)
    assert predict(flags(*more.split())) == 2
    assert_one_error(capsys, BAD[more])
    assert written(folder) == before


def test_overwrite_without_an_output_is_refused_and_so_are_no_images(case, capsys):
    assert predict(flags("--overwrite", output=None)) == 2
    assert "overwrite replaces the file of --output, which is missing" in capsys.readouterr().err
    assert predict(["--checkpoint", "best.safetensors"]) == 2
    assert "--images is missing" in capsys.readouterr().err


def test_help_ends_with_a_command_and_explains_the_options(capsys):
    for name, tool in (("predict", predict), ("features", load_tool("extract_features"))):
        with pytest.raises(SystemExit) as end:
            tool(["--help"])
        printed = capsys.readouterr().out
        assert end.value.code == 0 and "Processes that load images" in " ".join(printed.split())
        assert f"visionattn {name} --" in printed.rstrip().splitlines()[-1]


@pytest.mark.parametrize("has, precision", [(True, "bf16"), (False, "none")])
def test_amp_auto_takes_what_the_processor_multiplies(case, monkeypatch, has, precision):
    folder, _ = case
    monkeypatch.setattr(machine, "has_bfloat16_products", lambda: has)
    assert predict(flags("--amp", precision, output="named.csv")) == 0
    assert predict(flags("--amp", "auto", output="auto.csv")) == 0
    assert (folder / "auto.csv").read_text() == (folder / "named.csv").read_text()
    assert predict(flags("--amp", "none" if has else "bf16", output="other.csv")) == 0
    assert (folder / "auto.csv").read_text() != (folder / "other.csv").read_text()
