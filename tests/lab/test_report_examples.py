"""Example images on the page of ``visionattn report``: which they are, and what weights say."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import jaccard_score

from tests.helpers.report_folders import Page, write_run
from tests.helpers.small_runs import lines_of, small_config
from tests.training.test_segmentation import CLASSES, TINY, write_folder
from visionattn.data.digits_and_canvas import digit_splits
from visionattn.lab.report.report_examples import galleries
from visionattn.lab.report.report_page import report
from visionattn.lab.report.run_reading import read_run
from visionattn.models.weights import DataSpec


def page_of(*paths, output, images=12):
    report([*map(str, paths), "--output", str(output), "--images", str(images)])
    return Page(output.read_text())


def test_examples_are_test_images_with_the_classes_and_probabilities_of_the_best_weights(tmp_path):
    runs = [write_run(tmp_path / f"{always}", always=always) for always in (7, 2)]
    page = page_of(*runs, output=tmp_path / "page.html", images=35)
    labels = digit_splits(0.1, 0)["test"].labels
    (gallery,), skipped = galleries([read_run(run, run.name) for run in runs], 35)
    assert (skipped, gallery.runs, gallery.split) == ({}, ["7", "2"], "test")
    assert gallery.total == len(labels) == 359
    shown = [int(example.label) for example in gallery.examples]
    assert len(shown) == len({example.source for example in gallery.examples}) == 35
    assert 0 < shown.count(7) < 35 and gallery.wrong("7") == 35 - shown.count(7)
    for example, label in zip(gallery.examples, shown, strict=True):
        said = [(each.run, each.text, each.right) for each in example.said]
        assert said == [(name, name, label == int(name)) for name in ("7", "2")]
        shares = [each.share for each in example.said]
        assert shares == pytest.approx([np.exp(3) / (np.exp(3) + 9)] * 2)
    assert "35 of the 359 test images, drawn at random, 32 px" in page.text
    assert f"7: {gallery.wrong('7')} wrong" in page.text and page.text.count("(69.1 %)") == 70
    assert page.text.count("✗") == gallery.wrong("7") + gallery.wrong("2")


def test_images_that_are_not_there_are_left_out_with_the_reason(tmp_path):
    data = {"data": {"name": "folder", "root": str(tmp_path / "nowhere")}}
    spec = DataSpec(1, 4, ("n", "e", "s", "w"), (0.3,), (0.2,), None, 32)
    away = write_run(tmp_path / "away", config=data, always=1)
    other = write_run(tmp_path / "other", always=1, spec=spec)
    young = write_run(tmp_path / "young")
    page = page_of(away, other, young, output=tmp_path / "page.html")
    assert re.search(r"away : no images \(.*nowhere does not exist", page.text)
    assert "other : no images (the checkpoint does not fit the data" in page.text
    assert "young : no images (there is no best.safetensors" in page.text
    assert "img" not in page.tags


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A run that gives classes of pixels."""
    folder = tmp_path_factory.mktemp("masked_report")
    write_folder(folder / "data")
    data = dict(name="folder", task="segmentation", root=str(folder / "data"), fit="crop")
    data |= dict(masks={"classes": list(CLASSES)})
    model, optim = TINY | {"head_stride": 2}, {"lr": 1e-2}
    lines_of(small_config(folder, data=data, model=model, epochs=3, batch_size=4, optim=optim))
    return folder / "small"


def picture(address):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))))


def test_masks_are_the_known_ones_and_what_the_weights_give(masked, tmp_path):
    run = read_run(masked, "small")
    [gallery], skipped = galleries([run], 8)
    assert (skipped, gallery.split, gallery.total) == ({}, "test", 4)
    files = sorted((masked.parent / "data/test/masks").iterdir())
    pairs = []
    for shown, path in zip(gallery.examples, files, strict=True):
        known, [said] = np.asarray(Image.open(path)), shown.said
        assert np.array_equal(picture(shown.mask), known)
        found, counted = picture(said.mask), known != 255
        pairs.append((known[counted], found[counted]))
        wanted = jaccard_score(*pairs[-1], average=None, labels=np.unique(pairs[-1][0]))
        assert said.share == pytest.approx(wanted.mean())
        assert picture(shown.source).shape == (16, 16, 3)
    every = map(np.concatenate, zip(*pairs, strict=True))
    assert jaccard_score(*every, average=None) == pytest.approx(run.result["test_ious"])
    page = page_of(masked, output=tmp_path / "page.html")
    legend = [name for _, name in gallery.legend]
    assert legend == [*CLASSES, "does not count"] and set(legend) <= set(page.texts)
    assert page.tags.count("img") == 12 and "predicted, " in page.text
    for name, iou in zip(CLASSES, run.result["test_ious"], strict=True):
        assert [name, f"{100 * iou:.2f} %"] in page.rows
    assert "Validation mean IoU" in page.text and "test accuracy" not in page.text
