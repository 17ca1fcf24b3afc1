"""Runs with classes of pixels in the page: their figures, their masks, and damaged ones."""

import base64
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import jaccard_score

from tests.helpers.small_runs import lines_of, small_config
from tests.helpers.tools import load_tool
from tests.training.test_segmentation import CLASSES, TINY, write_folder
from visionattn.lab.report.masks import class_table, mask_galleries
from visionattn.lab.report.runs import Run, read_run, result_of
from visionattn.lab.report.tables import results

report = load_tool("report")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked_report")
    write_folder(folder / "data")
    data = dict(name="folder", task="segmentation", root=str(folder / "data"), fit="crop")
    data |= dict(mask_classes=list(CLASSES))
    config = small_config(
        folder,
        data=data,
        model=TINY | {"head_stride": 2},
        epochs=3,
        batch_size=4,
        optim={"lr": 1e-2},
    )
    lines_of(config)
    return folder / "small"


def picture(address: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))))


def test_the_page_shows_masks_and_the_figure_of_each_class(run, tmp_path, capsys):
    assert report([str(run), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    result = json.loads((run / "status.json").read_text())["result"]
    assert f"{100 * result['test_mean_iou']:.2f} %" in page
    assert "test accuracy" not in page and "test mean IoU" in page
    assert "Validation mean IoU" in page and "Intersection over union of each class" in page
    for name in CLASSES:
        assert f"</span>{name}</li>" in page
    assert "</span>does not count</li>" in page and "<figcaption>given, " in page
    assert page.count('alt="its mask"') == 4 and "no images, since" not in page
    assert "Which class is taken for which" not in page
    capsys.readouterr()


def test_beside_a_run_that_classifies_images_each_has_its_own_figures(run):
    images = Run(
        run.parent, "images", result=dict(test_accuracy=0.75, test_images=8), status="finished"
    )
    table = results([read_run(run, "small", now=0), images])
    masked, classified = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    for row, empty, given in (
        (masked, "accuracy", "mean IoU"),
        (classified, "mean IoU", "accuracy"),
    ):
        assert (row[f"test {empty}"].text, row[f"test {empty}"].note) == ("", "")
        assert row[f"test {given}"].text.endswith(" %") and row[f"test {given}"].note


def test_shown_masks_are_the_known_ones_and_those_of_the_weights(run):
    [gallery], skipped = mask_galleries([read_run(run, "small", now=0)], 8)
    assert not skipped and gallery.split == "test" and gallery.total == 4
    files = sorted((run.parent / "data/test/masks").iterdir())
    for shown, path in zip(gallery.masked, files, strict=True):
        known, [given] = np.asarray(Image.open(path)), shown.given
        assert np.array_equal(picture(shown.known), known)
        found, counted = picture(given.source), known != 255
        wanted = jaccard_score(
            known[counted],
            found[counted],
            average=None,
            labels=np.unique(known[counted]),
        )
        assert given.mean_iou == pytest.approx(wanted.mean())
        assert picture(shown.image).shape == (16, 16, 3)


def test_the_table_has_a_row_for_each_class_and_the_worst_of_many(run):
    one = read_run(run, "small", now=0)
    table = class_table([one])
    assert [row[0].text for row in table.rows] == list(CLASSES)
    for row, iou in zip(table.rows, one.result["ious"], strict=True):
        assert row[1].text == f"{100 * iou:.2f} %"
    [best] = [line for line in one.epochs if line["epoch"] == one.result["best_epoch"]]
    untested = result_of(one.epochs, [], None)
    assert untested["ious"] == best["val_ious"]
    [head] = class_table([replace(one, result=untested)]).columns[1:]
    assert head == "small (validation)" and table.columns[1] == "small"
    one.result["ious"] = [0.9 - 0.01 * (i % 50) for i in range(50)]
    rows = class_table([one]).rows
    assert len(rows) == 40 and rows[0][0].text == "49" and rows[0][1].text == "41.00 %"
    one.result["ious"] = [None, "much", 1e300]
    assert [row[1].text for row in class_table([one]).rows] == ["", "", ""]
    one.result["ious"] = "none"
    assert class_table([one]) is None


@pytest.mark.parametrize("what", ["weights", "masks"])
def test_what_is_missing_is_said_and_the_rest_is_shown(run, tmp_path, capsys, what):
    copy = tmp_path / "small"
    copy.mkdir()
    for path in run.iterdir():
        if path.is_file() and not (what == "weights" and path.name == "best.safetensors"):
            (copy / path.name).write_bytes(path.read_bytes())
    if what == "masks":
        config = (copy / "config.yaml").read_text()
        (copy / "config.yaml").write_text(config.replace(str(run.parent / "data"), "nowhere"))
    assert report([str(copy), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    words = {"weights": "there is no best.safetensors", "masks": "data root nowhere does not exist"}
    assert re.search(f"no images, since .*{words[what]}", page)
    assert "Intersection over union of each class" in page
    capsys.readouterr()
