"""What the page of ``tools/report.py`` says of classes: who is taken for whom, how often each is
right, and the worst mistakes.
"""

import json
import re

import numpy as np
import pytest

from tests.helpers.report_folders import Page, write_classes
from tests.helpers.report_folders import write_run as write_any_run
from visionattn.lab.report.classes import MOST_IN_MATRIX, MOST_PICTURES, classes_of
from visionattn.lab.report.page import report
from visionattn.lab.report.runs import read_run

COUNTS = [[5, 2, 0], [0, 3, 0], [1, 0, 1]]
NAMES = ["ape", "bear", "a cat of a long name"]


def write_run(folder, **options):
    """A run without curves, which take most of the time of a page."""
    return write_any_run(folder, epochs=0, **options)


def page_of(*paths, output, images=0):
    report([*map(str, paths), "--output", str(output), "--images", str(images), "--overwrite"])
    return Page(output.read_text())


def picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3)).astype(np.uint8)


def test_a_matrix_has_the_counts_of_each_pair_of_classes(tmp_path):
    run = write_run(tmp_path / "mine")
    write_classes(run, COUNTS, names=NAMES)
    page = page_of(run, output=tmp_path / "page.html")
    rows = [row for row in page.rows if len(row) == 5 and row[0] in NAMES and "%" not in row[2]]
    assert rows == [
        ["ape", "5", "2", "", "7"],
        ["bear", "", "3", "", "3"],
        ["a cat of a long name", "1", "", "1", "2"],
    ]
    assert "9 of 12 test images are right, with the weights of epoch 2" in page.text
    titles = [value for tag, key, value in page.attributes if (tag, key) == ("td", "title")]
    assert titles[1] == "ape, taken for bear: 2 of 7" and len(titles) == 9
    depths = re.findall(r'class="(hit|miss)" style="--depth:(\d+)%"', page_text(tmp_path))
    roots = [("hit", 5 / 7), ("miss", 2 / 7), ("hit", 1), ("miss", 1 / 2), ("hit", 1 / 2)]
    assert depths == [(kind, str(round(100 * share**0.5))) for kind, share in roots]


def page_text(folder):
    return (folder / "page.html").read_text()


def test_each_class_has_its_accuracy_its_precision_and_what_it_is_taken_for(tmp_path):
    run = write_run(tmp_path / "mine")
    write_classes(run, COUNTS, names=NAMES)
    page = page_of(run, output=tmp_path / "page.html")
    rows = [row[1:] for row in page.rows if row[0] in NAMES and "%" in row[2]]
    assert rows == [
        ["7", "71.4 %", "83.3 %", "bear (2\xa0of\xa07)"],
        ["3", "100.0 %", "60.0 %", ""],
        ["2", "50.0 %", "100.0 %", "ape (1\xa0of\xa02)"],
    ]
    assert "3 classes have images, 2 to 7 each; their mean accuracy is 73.8 %" in page.text


def test_runs_of_the_same_images_share_a_table_of_classes(tmp_path):
    runs = [write_run(tmp_path / name) for name in ("one", "two")]
    other = write_run(tmp_path / "other", config={"seed": 4})
    write_classes(runs[0], COUNTS, names=NAMES)
    write_classes(runs[1], [[6, 1, 0], [1, 2, 0], [1, 0, 1]], names=NAMES)
    write_classes(other, COUNTS, names=NAMES)
    page = page_of(*runs, other, output=tmp_path / "page.html")
    assert ["class", "images", "one", "two"] in page.rows
    rows = [row for row in page.rows if row[0] == "ape"]
    assert ["ape", "7", "71.4 %", "85.7 %"] in rows and len([r for r in rows if len(r) == 4]) == 1
    text = page_text(tmp_path)
    assert '<td class="number strong">85.7 %' in text
    assert '<td class="number strong">100.0 %' in text and 'strong">50.0 %' not in text
    assert "Accuracy of each class: one, two" in page.texts


def many(classes, seed=0):
    draw = np.random.default_rng(seed)
    counts = np.diag(draw.integers(40, 60, classes))
    for pair in draw.integers(0, classes, (6 * classes, 2)):
        counts[tuple(pair)] += 1
    return counts.tolist()


@pytest.mark.parametrize("classes", [2, MOST_IN_MATRIX, MOST_IN_MATRIX + 1, 200])
def test_many_classes_have_their_most_frequent_mistakes_in_place_of_a_matrix(tmp_path, classes):
    run = write_run(tmp_path / "mine")
    counts = many(classes)
    counts[0][1], counts[1] = 33, [0] * classes
    write_classes(run, counts)
    page = page_of(run, output=tmp_path / "page.html")
    matrix = classes <= MOST_IN_MATRIX
    assert ("colspan" in page_text(tmp_path)) == matrix
    assert (f"{classes} classes are too many for a matrix" in page.text) == (not matrix)
    if not matrix:
        pairs = page.rows[page.rows.index(["class", "taken for", "times", "of its images"]) :][1:21]
        made = [(counts[i][j], i, j) for i in range(classes) for j in range(classes) if i != j]
        assert [int(row[2]) for row in pairs] == sorted((c for c, *_ in made), reverse=True)[:20]
        assert pairs[0] == ["0", "1", "33", f"{3300 / sum(counts[0]):.1f} %"]
        assert "details" in page.tags and f"All {classes} classes" in page.text
        rows = [row for row in page.rows if len(row) == 5 and row[2].endswith("%")]
        share = [float(row[2].rstrip(" %")) for row in rows]
        assert len(rows) == 20 + classes - 1 and share[:20] == sorted(share[:20]) == share[20:40]
    assert f"{classes - 1} of {classes} classes have images" in page.text


def test_a_thousand_classes_are_a_page_of_a_megabyte_in_seconds(tmp_path):
    run = write_run(tmp_path / "mine")
    names = [f"a class of quite a long name, number {i}" for i in range(1000)]
    write_classes(run, many(1000), names=names)
    page = page_of(run, output=tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 1_500_000
    assert "1000 classes are too many" in page.text and "All 1,000 classes" in page.text


def test_the_worst_mistakes_are_shown_with_class_prediction_and_probabilities(tmp_path):
    run = write_run(tmp_path / "mine")
    wrong = [
        (0, 1, 0.0001, 0.9876, "val/ape/1.png", picture(400, 600)),
        (2, 0, 0.25, 0.5, None, None),
    ]
    write_classes(run, COUNTS, names=NAMES, mistakes=wrong)
    page = page_of(run, output=tmp_path / "page.html", images=12)
    text = page_text(tmp_path)
    shown = text[text.index('<section id="mistakes">') : text.index('<section id="batches">')]
    assert shown.count("<img") == 1 and "The image could not be kept" in shown
    assert "val/ape/1.png, 400 x 600 px" in page.text
    words = [part for part in page.text.split("The worst mistakes", 1)[1].split() if part]
    assert " ".join(words).count("✗") == 2
    for part in ("ape (below 0.1 %) ✗ bear (98.8 %)", "of a long name (25.0 %) ✗ ape (50.0 %)"):
        assert part in page.text
    page = page_of(run, output=tmp_path / "page.html")
    assert "<img" not in page_text(tmp_path) and "ape" in page.text


def test_a_page_has_a_bounded_number_of_pictures(tmp_path):
    wrong = [(0, 1, 0.1, 0.9, None, picture(8, 8, i)) for i in range(12)]
    runs = []
    for i in range(7):
        folder = write_run(tmp_path / f"run{i}")
        write_classes(folder, COUNTS, mistakes=wrong)
        runs.append(read_run(folder, folder.name, now=0.0))
    for count, each in ((1, 12), (2, 12), (3, 8), (7, 3)):
        found = classes_of(runs[:count], 12)
        assert [len(one.mistakes) for one in found.runs] == [each] * count
        assert count * each <= MOST_PICTURES
    assert [len(one.mistakes) for one in classes_of(runs * 10, 12).runs] == [1] * 70
    assert [len(one.mistakes) for one in classes_of(runs[:1], 5).runs] == [5]


def test_the_test_images_come_first_and_figures_of_other_weights_are_left_out(tmp_path):
    run = write_run(tmp_path / "mine")  # whose best epoch is 2
    write_classes(run, COUNTS, split="validation")
    assert read_run(run, "mine", now=0.0).by_class.split == "validation"
    write_classes(run, COUNTS, split="test", epoch=1)
    assert read_run(run, "mine", now=0.0).by_class.split == "validation"
    write_classes(run, COUNTS, split="test")
    assert read_run(run, "mine", now=0.0).by_class.split == "test"
    (run / "test.json").write_text("{")
    found = read_run(run, "mine", now=0.0)
    assert found.by_class.split == "validation" and len(found.problems) == 1
    write_classes(run, COUNTS, split="validation", epoch=3)
    assert read_run(run, "mine", now=0.0).by_class is None


def test_a_run_of_an_earlier_version_gives_a_page_that_says_so(tmp_path):
    old, new = write_run(tmp_path / "old"), write_run(tmp_path / "new")
    page = page_of(old, output=tmp_path / "page.html")
    assert "Which class is taken for which is not known: no validation.json or test" in page.text
    write_classes(new, COUNTS)
    page = page_of(old, new, output=tmp_path / "page.html")
    assert "Nothing is known of the classes of old: no validation.json" in page.text


def test_names_are_no_markup_and_damage_is_a_line(tmp_path):
    run = write_run(tmp_path / "mine")
    bad = '"><script>alert(1)</script>'
    wrong = [(0, 1, 0.1, 0.9, f"{bad}.png", picture(8, 8))]
    write_classes(run, COUNTS, names=[bad, "<b>", "'&"], mistakes=wrong)
    page = page_of(run, output=tmp_path / "page.html", images=1)
    assert "script" not in page.tags and "b" not in page.tags and bad in page.text
    found = json.loads((run / "test.json").read_text())
    found["mistakes"][0]["picture"] = "data:image/svg+xml;base64,PHN2Zz4="
    (run / "test.json").write_text(json.dumps(found))
    page = page_of(run, output=tmp_path / "page.html")
    assert "test.json cannot be read: is damaged: a picture is none" in page.text
    (run / "test.json").unlink()
    (run / "test.json").mkdir()
    page = page_of(run, output=tmp_path / "page.html")
    assert "test.json cannot be read" in page.text and page.row("mine")[0] == "finished"
