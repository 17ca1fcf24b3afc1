"""Classes as files and as a table, and masks of images in files: their values and sizes."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import visionattn
import visionattn.models.devices as machine
from tests.helpers import inference_files
from tests.helpers.inference_files import (
    COLOUR,
    GREY,
    PAINTED,
    direct,
    write_folder,
    write_image,
    write_segmenter,
    write_weights,
)
from tests.helpers.tools import assert_one_error, read_csv, written
from visionattn.command import run
from visionattn.inference.segment import mask_files
from visionattn.models.weights import load_model

SEEN = "scaleformer_vit_t of best.safetensors; preprocessing: native size"
SHAPES = [(16, 24), (40, 8), (16, 24), (16, 16)]
COLOURS = ((0, 0, 0), (250, 10, 10), (0, 120, 240))
NAMES = ("ground", "house", "road")
SIZES = [(16, 24), (21, 35), (40, 8), (16, 24)]
FLAGS = ["--checkpoint", "best.safetensors", "--images", "images", "--workers", "0"]


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
    (folder / "list.txt").write_text("images/0.png\nimages/gone.png\n")
    for output in ("out.csv", "out.json"):
        assert predict("--images", "images", "list.txt", output=output) == 0
        said = capsys.readouterr().out
        assert "4 of 6 images have classes" in said
        assert re.search(r"^  images/2.png: .*unknown image format", said, re.M)
        assert re.search(r"^  images/gone.png: .*No such file", said, re.M)
    rows = read_csv("out.csv")
    assert [row["status"] for row in rows] == ["ok", "ok", "unreadable", "ok", "ok", "unreadable"]
    assert "unknown image format" in rows[2]["reason"] and "No such file" in rows[5]["reason"]
    assert rows[2]["class_1"] == rows[2]["probability_1"] == ""
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
    assert lines[5].startswith("| images/2.png | unreadable: unknown image")
    assert written(folder) == before


def test_when_no_image_can_be_read_the_rows_stay_and_the_exit_code_says_so(case, capsys):
    for image in (case[0] / "images").iterdir():
        image.write_bytes(b"no image")
    assert predict() == 2
    said = "none of the 4 images has a result; first: images/0.png: unknown image"
    assert said in capsys.readouterr().err
    assert [row["status"] for row in read_csv("out.csv")] == ["unreadable"] * 4


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


@pytest.fixture
def masks(tmp_path, monkeypatch):
    """The current folder, with weights that give masks and images, and the images' pixels."""
    monkeypatch.chdir(tmp_path)
    spec = replace(PAINTED, class_names=NAMES, colours=COLOURS)
    write_segmenter(tmp_path / "best.safetensors", spec)
    return tmp_path, write_folder(tmp_path / "images", SIZES)


def mask_of(path, image):
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


def test_each_image_gets_a_png_of_its_size_in_the_colours_of_the_data(masks, capsys):
    folder, arrays = masks
    assert run("predict", [*FLAGS, "--output", "out"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "4 of 4 images have masks: out"
    for number, array in enumerate(arrays):
        picture = Image.open(folder / "out" / f"{number}.png")
        wanted = mask_of(folder / "best.safetensors", array)
        assert picture.mode == "P" and agree(picture, wanted)
        assert len(np.unique(wanted)) > 1
        painted = np.array(picture.convert("RGB"))
        assert np.array_equal(painted, np.array(COLOURS, np.uint8)[np.asarray(picture)])
    for row, array in zip(read_csv(folder / "out" / "masks.csv"), arrays, strict=True):
        assert row["status"] == "ok" and row["mask"].endswith(".png")
        shares = [float(row[f"share_{name}"]) for name in NAMES]
        wanted = mask_of(folder / "best.safetensors", array)
        assert shares == pytest.approx([(wanted == value).mean() for value in range(3)], abs=0.01)
        assert sum(shares) == pytest.approx(1, abs=1e-5)


def test_classes_without_names_or_colours_are_numbers_in_colours_of_their_own(masks):
    folder, _ = masks
    write_segmenter(folder / "best.safetensors", replace(PAINTED, num_classes=30))
    assert run("predict", [*FLAGS, "--output", "out"]) == 0
    picture = Image.open(folder / "out" / "0.png")
    palette = np.array(picture.getpalette()).reshape(-1, 3)
    # Colors of PASCAL VOC: aeroplane, bicycle, bird and the last one, television.
    assert palette[:4].tolist() == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0]]
    assert palette[20].tolist() == [0, 64, 128] and len(np.unique(palette[:255], axis=0)) == 255
    assert "share_29" in read_csv(folder / "out" / "masks.csv")[0]


def test_files_of_masks_differ_whatever_images_are_called():
    names = ["a.jpg", "a.png", "a.jpg.png", "a.jpg.png.tif", "b.jpg"]
    wanted = ["a.jpg.png", "a.png.png", "a.jpg.png.png", "a.jpg.png.tif.png", "b.png"]
    found = mask_files(Path("m"), [f"i/{name}" for name in names])
    assert [str(path) for path in found] == [f"m/{name}" for name in wanted]


def test_a_call_gives_what_the_command_writes(masks):
    folder, arrays = masks
    found = visionattn.segment("best.safetensors", arrays)
    assert [tuple(mask.shape) for mask in found] == SIZES
    for mask, array in zip(found, arrays, strict=True):
        assert mask.dtype == torch.uint8
        assert agree(mask, mask_of(folder / "best.safetensors", array))
    with pytest.raises(ValueError, match="use visionattn.segment"):
        visionattn.predict("best.safetensors", arrays)


def test_the_body_gives_feature_maps_and_no_vectors(masks, capsys):
    assert run("features", [*FLAGS, "--output", "f"]) == 2
    assert_one_error(capsys, "has a head on patches and no feature vector")
    maps = visionattn.extract_features("best.safetensors", "images", dense=True)
    assert [tuple(each.shape) for each in maps[:2]] == [(16, 2, 3), (16, 3, 5)]
