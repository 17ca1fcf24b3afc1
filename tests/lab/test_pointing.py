"""How often the attribution lies on what decides the class: boxes, methods, tables."""

import csv
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from visionattn.data.geometry import Box
from visionattn.lab import pointing
from visionattn.lab.pointing import (
    METHODS,
    SIZES,
    examples,
    main,
    named_by,
    of_pixel,
    table,
    within,
)
from visionattn.layout import Grid
from visionattn.models.shipped import FILES

DOCS = Path(__file__).parents[2] / "docs"


def test_a_patch_is_in_a_box_where_its_centre_is():
    box, grid = Box(5, 8, 8, 9), Grid(3, 5)  # rows 5 to 12, columns 8 to 16; patches of 4 x 6 px
    found = within(box, grid, (4, 6), grow=0)
    wanted = [[5 <= 4 * y + 2 < 13 and 8 <= 6 * x + 3 < 17 for x in range(5)] for y in range(3)]
    assert found.tolist() == wanted and 0 < int(found.sum()) < 15
    near = within(box, grid, (4, 6), grow=1)
    wanted = [[1 <= 4 * y + 2 < 17 and 2 <= 6 * x + 3 < 23 for x in range(5)] for y in range(3)]
    assert near.tolist() == wanted


def test_a_pixel_is_in_a_box_and_chance_is_its_share_of_the_image():
    values = torch.zeros(12, 30)
    values[4, 9] = 1
    found = of_pixel(values, Box(4, 9, 2, 3), (4, 6))  # a patch more: rows 0 to 9, columns 3 to 17
    assert found[:2] == (True, True)
    assert found[2:] == pytest.approx((6 / 360, 10 * 15 / 360))
    assert of_pixel(values, Box(5, 9, 2, 3), (4, 6))[:2] == (False, True)
    assert of_pixel(values, Box(9, 9, 2, 3), (4, 6))[:2] == (False, False)


@pytest.mark.parametrize("task, size", [("documents", 160), ("canvas", 96)])
def test_what_decides_the_class_is_in_its_box(task, size):
    """A page without its mark, or a canvas without its digit, differs within the box alone."""
    for image, label, box in examples(task, size, 3, (16, 16)):
        assert image.dtype == np.uint8 and image.shape[2] == 1
        assert image.shape[0] % 16 == image.shape[1] % 16 == 0 and max(image.shape) <= size
        assert box.top + box.height <= image.shape[0] and box.left + box.width <= image.shape[1]
        assert 0 <= label < 10
        inside = image[box.top : box.top + box.height, box.left : box.left + box.width]
        assert inside.max() - inside.min() > 60


def test_test_images_are_those_of_the_split_and_differ():
    first = [image.tobytes() for image, _, _ in examples("documents", 128, 4, (16, 16))]
    assert len(set(first)) == 4
    assert first == [image.tobytes() for image, _, _ in examples("documents", 128, 4, (16, 16))]


def test_each_method_names_what_it_says():
    model = timm.create_model("taylorshift_vit_canvas", pretrained=True).eval()
    (image, _, box), *_ = examples("canvas", 96, 1, (8, 8))
    inputs = model.data_spec.prepare(torch.from_numpy(image.transpose(2, 0, 1)[None].copy()))
    target, found = named_by(model, inputs, box)
    assert list(found) == list(METHODS)
    with torch.no_grad():
        assert target == int(model(inputs).argmax())
    own = inputs.clone().requires_grad_()
    logits = model(own)[0]
    (grad,) = torch.autograd.grad(logits[target] - logits.mean(), own)
    values = (grad * inputs)[0, 0].double()
    tops = {}
    for name, of in (("gradient, sum", values), ("gradient, absolute", values.abs())):
        sums = [
            [of[8 * y : 8 * y + 8, 8 * x : 8 * x + 8].sum() for x in range(12)] for y in range(12)
        ]
        tops[name] = divmod(int(torch.tensor(sums).argmax()), 12)
    tops["gradient, pixel"] = divmod(int(values.abs().argmax()), 96)
    for name, (y, x) in tops.items():
        y, x = (y, x) if "pixel" in name else (8 * y + 4, 8 * x + 4)
        inside = box.top <= y < box.top + box.height and box.left <= x < box.left + box.width
        assert found[name].hit == inside, name


def test_rows_and_tables_have_what_was_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SIZES, "taylorshift_vit_canvas", (64, 96))
    threads = torch.get_num_threads()
    assert main(["taylorshift_vit_canvas", "--images", "2", "--csv", str(tmp_path / "a.csv")]) == 0
    assert torch.get_num_threads() == threads
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert len(rows) == 2 * len(METHODS)
    assert {row["method"] for row in rows} == set(METHODS)
    assert {(row["model"], row["size"], row["images"]) for row in rows} == {
        ("taylorshift_vit_canvas", size, "2") for size in ("64", "96")
    }
    printed = capsys.readouterr().out
    cell = f"{100 * float(rows[0]['hit']):.1f} %"
    assert f"| winning patch | {cell} |" in printed and "| chance, a pixel | " in printed
    assert all(float(row["near"]) >= float(row["hit"]) for row in rows)
    assert all(0 < float(row["chance"]) < float(row["near_chance"]) < 1 for row in rows)


def test_bad_input_is_one_line(capsys, tmp_path):
    assert main(["scaleformer_vit_digits"]) == 2
    assert "is none of those with a box to find" in capsys.readouterr().err
    assert main(["--csv", str(tmp_path / "no" / "a.csv")]) == 2
    assert capsys.readouterr().err.startswith("error: no folder")
    with pytest.raises(SystemExit) as end:
        main(["--images", "0"])
    assert end.value.code == 2


def test_the_models_that_are_measured_come_with_weights():
    assert set(SIZES) <= set(FILES) and pointing.GRID_ROWS == 64


def test_the_page_has_what_was_measured():
    path = DOCS / "figures" / "pointing.csv"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = {}
    for row in csv.DictReader(text.splitlines()):
        known = {key: float(row[key]) for key in ("hit", "near", "chance", "near_chance")}
        known |= {"size": int(row["size"]), "method": row["method"]}
        found.setdefault(row["model"], []).append(known)
    page = (DOCS / "attribution.md").read_text(encoding="utf-8")
    assert set(found) in (set(SIZES), set())  # none before they are measured
    assert page.count("| winning patch |") == len(found)
    for rows in found.values():
        assert table(rows) in page
