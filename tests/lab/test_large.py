"""Whole images against tiles: what is measured, and how it goes on."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from visionattn.lab import large
from visionattn.lab.large import (
    CASES,
    WAYS,
    WHOLE,
    Cut,
    accuracies,
    main,
    of_tiles,
    peak_here,
    table,
)
from visionattn.lab.pointing import examples
from visionattn.models.tiles import forward_tiles

NAME = "taylorshift_vit_canvas"
DOCS = Path(__file__).parents[2] / "docs"
CUTS = (Cut(48, 16, 2), Cut(64, 24, 1))


@pytest.fixture
def small(monkeypatch):
    """Canvases of 96 px, and no memory measured."""
    asked = []
    monkeypatch.setitem(CASES, NAME, CUTS)
    monkeypatch.setattr(large, "PX", 96)
    monkeypatch.setattr(large, "_peak", lambda *given: asked.append(given) or 3 * 2**20)
    return asked


def images(count):
    model = timm.create_model(NAME, pretrained=True).eval()
    for image, label, _ in examples("canvas", 96, count, (8, 8)):
        pixels = torch.from_numpy(image.transpose(2, 0, 1)[None].copy())
        yield model, model.data_spec.prepare(pixels), label


def test_ways_of_putting_tiles_together_are_those_of_forward_tiles():
    for model, inputs, _ in images(2):
        head = model.get_classifier()
        with torch.no_grad():
            logits, features = of_tiles(model, inputs, CUTS[0])
            found = {way: put(logits, features, head) for way, put in WAYS.items()}
        assert len(logits) == 9
        how = dict(tile=48, overlap=16, batch_size=2)
        mean, most = (forward_tiles(model, inputs, combine=c, **how)[0] for c in ("mean", "max"))
        features = forward_tiles(model, inputs, want="pooled", combine="max", **how)
        assert torch.allclose(found["mean of logits"], mean, atol=1e-5)
        assert torch.allclose(found["maximum of logits"], most, atol=1e-5)
        assert torch.allclose(found["maximum of features"], head(features)[0], atol=1e-5)
        with torch.no_grad():
            shares = torch.cat(
                [
                    model(inputs[:, :, top : top + 48, left : left + 48]).softmax(1)
                    for top in (0, 32, 48)
                    for left in (0, 32, 48)
                ]
            )
        assert torch.allclose(found["mean of probabilities"], shares.mean(0), atol=1e-5)
        assert torch.allclose(found["maximum of probabilities"], shares.amax(0), atol=1e-5)


def test_errors_are_those_of_shares_and_of_pairs():
    right, whole = [True, True, True, False, False], [True, False, False, False, True]
    found = accuracies(right, whole)
    assert (found["accuracy"], found["difference"]) == pytest.approx((0.6, 0.2))
    assert found["standard_error"] == pytest.approx((0.6 * 0.4 / 5) ** 0.5)
    pairs = np.array([0, 1, 1, 0, -1])
    assert found["difference_error"] == pytest.approx(pairs.std() / 5**0.5)
    assert accuracies(whole, whole)["difference_error"] == 0


def test_rows_are_of_the_same_images_and_a_call_goes_on_with_those_kept(small, tmp_path, capsys):
    kept, out = tmp_path / "kept", tmp_path / "rows.csv"
    threads = torch.get_num_threads()
    assert main([NAME, "--images", "2", "--kept", str(kept)]) == 0
    first = kept.read_text()
    with open(kept, "a") as file:
        file.write('{"model": "tay')  # killed in the middle of a line
        file.write("\n")
    assert main([NAME, "--images", "3", "--kept", str(kept), "--csv", str(out)]) == 0
    assert torch.get_num_threads() == threads
    lines = kept.read_text().splitlines()
    assert lines[:2] == first.splitlines() and len(lines) == 4
    said = [json.loads(text) for text in (*lines[:2], lines[3])]
    assert [each["index"] for each in said] == [0, 1, 2]
    right = []
    for model, inputs, label in images(3):
        with torch.no_grad():
            right.append(int(model(inputs).argmax()) == label)
    with open(out) as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1 + 2 * len(WAYS) and rows[0]["method"] == WHOLE
    assert float(rows[0]["accuracy"]) == pytest.approx(np.mean(right))
    for row in rows[1:]:
        tile = int(row["tile"])
        mine = [
            one["right"][row["method"]]
            for each in said
            for one in each["rows"]
            if one["cut"] and one["cut"][0] == tile
        ]
        assert float(row["accuracy"]) == pytest.approx(np.mean(mine)) and len(mine) == 3
        apart = np.subtract(mine, right, dtype=float)
        assert float(row["difference"]) == pytest.approx(apart.mean())
        assert float(row["difference_error"]) == pytest.approx(apart.std() / 3**0.5)
        assert row["tiles_mean"] == ("9.0" if tile == 48 else "4.0")
    assert {row["peak_bytes"] for row in rows} == {str(3 * 2**20)}
    printed = capsys.readouterr().out
    assert f"| {WHOLE}: {100 * np.mean(right):.1f} ± " in printed
    assert "| 4 tiles of 64 px, overlap 24 | " in printed
    # The largest image is the one whose memory is measured; canvases have one size.
    assert {given[2] for given in small} == {0}


def test_memory_is_that_of_the_image_and_the_tiles_that_are_named(monkeypatch):
    asked = []
    monkeypatch.setattr(large, "peak_bytes", lambda work: asked.append(work()) or 5)
    threads = torch.get_num_threads()
    given = {"name": NAME, "px": 96, "index": 1, "threads": threads}
    assert peak_here(cut=None, **given) == peak_here(cut=[48, 16, 2], **given) == 5
    *_, (model, inputs, _) = images(2)
    with torch.no_grad():
        assert torch.equal(asked[0], model(inputs))
    wanted = forward_tiles(model, inputs, tile=48, overlap=16, batch_size=2, combine="max")
    assert torch.equal(asked[1], wanted)


def test_bad_input_is_one_line(capsys, tmp_path):
    assert main(["scaleformer_vit_t"]) == 2
    assert "is none of those measured here: " in capsys.readouterr().err
    assert main([NAME, "--csv", str(tmp_path / "no" / "rows.csv")]) == 2
    assert capsys.readouterr().err.startswith("error: no folder")
    assert main([NAME, "--kept", str(tmp_path / "no" / "kept")]) == 2
    assert capsys.readouterr().err.startswith("error: no folder")
    with pytest.raises(SystemExit) as end:
        main(["--images", "0"])
    assert end.value.code == 2


def test_the_page_has_what_was_measured():
    path = DOCS / "figures" / "large.csv"
    page = (DOCS / "large.md").read_text(encoding="utf-8")
    with open(path, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = list(dict.fromkeys(row["model"] for row in rows))
    assert set(names) <= set(CASES) and names
    for name in names:
        own = []
        for row in rows:
            if row["model"] != name:
                continue
            known = {key: row[key] for key in ("model", "method")}
            for key in ("tile", "overlap", "peak_bytes", "images", "px"):
                known[key] = int(row[key]) if row[key] else None
            numbers = ("accuracy", "standard_error", "difference", "difference_error")
            for key in (*numbers, "tiles_mean", "seconds_median", "ratio_median"):
                known[key] = float(row[key])
            own.append(known)
        assert {(row["tile"], row["overlap"]) for row in own} == {
            (None, None),
            *((cut.tile, cut.overlap) for cut in CASES[name]),
        }
        assert table(own) in page and f"`{name}`, {own[0]['images']} images" in page
        assert {row["px"] for row in own} == {2048}
