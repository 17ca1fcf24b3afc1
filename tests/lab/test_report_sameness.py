"""Which runs of a page were evaluated on the same images: only among these is one the best."""

import re

import pytest

from tests.helpers.report_folders import RESULT, Page, write_run
from visionattn.lab.report.page import report
from visionattn.lab.report.runs import read_run
from visionattn.lab.report.sameness import best_of, data_words, same_data


def runs_of(folder, *configs, results=None):
    folders = [
        write_run(folder / f"run{i}", config=config, result=RESULT | (results or {}).get(i, {}))
        for i, config in enumerate(configs)
    ]
    return [read_run(each, each.name, now=0.0) for each in folders]


OTHER = {
    "name": {"data": {"name": "canvas"}},
    "size": {"data": {"img_size": 48}},
    "seed": {"seed": 3},
    "held out": {"data": {"val_fraction": 0.2}},
    "fit": {"data": {"fit": "stretch"}},
    "kept": {"data": {"on_error": "skip"}},
    "of another version": {"data": {"task": "segmentation"}},
}
SAME = {
    "augmentation": {"data": {"augment": "light", "aug": {"turn": 3.0}}},
    "loading": {"data": {"workers": 4}},
    "defaults": {"data": {"fit": "crop", "on_error": "fail"}},
    "sizes of training": {"data": {"img_size_choices": [24, 32]}},
    "optimisation": {"optim": {"lr": 0.1}, "epochs": 9, "batch_size": 4},
    "model": {"model": {"name": "taylorshift_vit_t"}},
}


@pytest.mark.parametrize("other", OTHER)
def test_runs_of_other_images_are_not_compared(tmp_path, other):
    one, two = runs_of(tmp_path, {}, OTHER[other])
    assert same_data(one) != same_data(two) and all(data_words([one, two]))


@pytest.mark.parametrize("other", SAME)
def test_what_acts_on_training_alone_does_not_part_runs(tmp_path, other):
    one, two = runs_of(tmp_path, {}, SAME[other])
    assert same_data(one) == same_data(two) is not None
    assert data_words([one, two]) == ["", ""]


def test_a_path_is_the_same_however_it_is_spelled(tmp_path):
    one, two, three = runs_of(
        tmp_path, *({"data": {"name": "folder", "root": x}} for x in ("a/b", "./a/b/", "a/c"))
    )
    assert same_data(one) == same_data(two) != same_data(three)
    assert data_words([one, two, three]) == ["folder, root a/b"] * 2 + ["folder, root a/c"]


def test_test_images_of_another_number_are_others(tmp_path):
    one, two = runs_of(tmp_path, {}, {}, results={1: {"test_images": 360}})
    assert same_data(one, test=True) != same_data(two, test=True)
    assert same_data(one) == same_data(two)


def test_the_best_is_that_of_a_group_of_several():
    values, keys = [0.5, 0.7, None, 0.9, 0.8, 0.6, 0.7], ["a", "a", "a", "b", None, None, "a"]
    assert best_of(values, keys) == [False, True, False, False, False, False, True]


def test_a_page_marks_the_best_of_each_data_and_says_which_data_runs_have(tmp_path):
    accuracies = [0.5, 0.6, 0.9, 0.3, 0.4]
    results = {
        i: {"test_accuracy": x, "validation_accuracy": 1 - x} for i, x in enumerate(accuracies)
    }
    configs = [{}, {}, {"seed": 1}, {"data": {"img_size": 48}}, {"data": {"img_size": 48}}]
    runs = runs_of(tmp_path, *configs, results=results)
    (tmp_path / "run5").mkdir()
    (tmp_path / "run5" / "metrics.jsonl").write_text(
        '{"kind": "epoch", "epoch": 1, "step": 4, "val_loss": 1.0, "val_accuracy": 0.99}\n'
    )
    folders = [*(str(run.folder) for run in runs), str(tmp_path / "run5")]
    report([*folders, "--output", str(tmp_path / "page.html"), "--images", "0"])
    text = (tmp_path / "page.html").read_text()
    strong = re.findall(r'<td class="number strong">([\d.]+) %', text)
    assert strong == ["50.00", "60.00", "70.00", "40.00"]
    page = Page(text)
    said = [page.row(f"run{i}")[-1] for i in range(6)]
    assert said[0] == said[1] == "digits, img_size 32, seed 0"
    assert said[2:5] == ["digits, img_size 32, seed 1"] + ["digits, img_size 48, seed 0"] * 2
    assert said[5] == "unknown" and "Bold is the best" in page.text
