"""``tools/benchmark.py loader``: what counts as loading, and how it is asked for."""

import csv
import json
import multiprocessing
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import Dataset

from tests.helpers.image_files import encoded, write_classes
from tests.helpers.tools import assert_one_error, load_tool, words
from visionattn.data.batches import Item
from visionattn.data.data_config import DataConfig
from visionattn.data.splits import Splits
from visionattn.lab.loader import (
    LoaderCase,
    Source,
    enough_batches,
    measure_loaders,
    open_source,
    read_batches,
)
from visionattn.models.weights import DataSpec
from visionattn.training.config import TrainConfig

ROOT = Path(__file__).parents[2]
SPEC = DataSpec(1, 2, ("a", "b"), (0.3,), (0.2,), None, 6)
QUICK = ["--rounds", "2", "--seconds", "0.02"]


class Slow(Dataset):
    """``length`` images that take ``seconds`` each of its own clock, and the first one ``first``
    more.

    It keeps what it was asked for. With a barrier, each image waits until all workers are at one.
    """

    def __init__(self, length, seconds=0.0, first=0.0, barrier=None):
        self.length, self.seconds, self.first, self.asked = length, seconds, first, []
        self.now, self.barrier = 0.0, barrier

    def __len__(self):
        return self.length

    def __getitem__(self, key):
        if self.barrier is not None:
            self.barrier.wait(300)
        self.now += self.seconds + (0 if self.asked else self.first)
        self.asked.append(key.index)
        size = key.geometry.img_size
        return Item(np.zeros((*size, 1), np.uint8), 0, size)


def source_of(dataset):
    return Source(
        "slow", TrainConfig(data=DataConfig(img_size=6)), Splits(dataset, dataset, None, SPEC)
    )


@pytest.fixture(scope="module")
def main():
    return load_tool("benchmark")


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_load_at_the_same_time_and_none_stays(workers):
    """Each image waits for one of every other worker: with fewer at work than were asked for, none
    would come.
    """
    barrier, ticks = multiprocessing.get_context("fork").Barrier(workers), count()
    case = LoaderCase(source_of(Slow(997, barrier=barrier)), workers, 4, None)
    reading = read_batches(case, 2, 0, clock=lambda: next(ticks))
    assert (reading.images, reading.seconds) == (
        2 * workers * 4,
        2 * workers,
    )  # a tick for each batch that counts
    assert multiprocessing.active_children() == []


def test_speed_is_images_over_the_seconds_of_the_batches_that_count():
    """A clock of a tick for each batch, so that a second gives as many images as a batch has,
    whatever the workers.
    """
    ticks = count()
    cases = [
        LoaderCase(source_of(Slow(997)), workers, batch, None)
        for workers, batch in ((0, 4), (2, 4), (0, 12))
    ]
    cases = [replace(case, source=cases[0].source) for case in cases]
    rows = measure_loaders(cases, rounds=3, seconds=6.0, clock=lambda: next(ticks))
    assert [len(row.readings) for row in rows] == [3, 3, 3]
    record = rows[1].record()
    assert record["images_per_second_median"] == 4 and record["ratio_median"] == 1
    assert record["megabytes_per_second_median"] == pytest.approx(4 * 36e-6)
    assert rows[2].record()["ratio_median"] == 3
    assert [row.baseline for row in rows] == [0, 0, 0] and multiprocessing.active_children() == []


def test_the_first_batch_does_not_count_and_each_turn_takes_other_images():
    dataset = Slow(61, seconds=0.001, first=2.0)
    case = LoaderCase(source_of(dataset), 0, 7, None)
    reading = read_batches(case, 3, 0, clock=lambda: dataset.now)
    assert reading.images == 3 * 7 and reading.seconds == pytest.approx(3 * 7 * 0.001)
    assert reading.megabytes == 3 * 7 * 36 / 1e6
    first = list(dataset.asked)
    read_batches(case, 3, 28)
    assert len(first) == 28 and len(set(dataset.asked)) == 56
    read_batches(case, 3, 56)  # past the end: the first ones again
    assert set(dataset.asked) == set(range(61)) and len(dataset.asked) == 84


def test_a_trial_that_was_over_at_once_says_nothing_of_the_time():
    times = {2: 1e-6, 4: 0.001, 8: 0.2}
    assert enough_batches(times.get, 0.3) == 12
    assert enough_batches({2: 5.0}.get, 0.3) == 2


def test_a_configuration_may_have_any_name_and_a_data_set_is_meant_by_its_own(
    tmp_path, monkeypatch
):
    (tmp_path / "mine.conf").write_text("data: {name: canvas, args: {train_images: 7}}")
    (tmp_path / "digits").write_text("data: {name: canvas}")
    monkeypatch.chdir(tmp_path)
    assert open_source("mine.conf", [48]).config.data.args == {"train_images": 7}
    assert open_source("digits", None).config.data.name == "digits"


def test_sizes_are_those_of_the_training_unless_they_are_named():
    source = open_source("canvas+augment=light+args.train_images=70", [48])
    assert source.config.data.augment == "light" and len(source.splits.train) == 70
    assert (LoaderCase(source, 0, 3, None).size, LoaderCase(source, 0, 3, 48).size) == ("128", "48")
    mixed = open_source(str(ROOT / "configs" / "canvas.yaml"), None)
    assert LoaderCase(mixed, 1, 3, None).size == "48/64/80"
    assert LoaderCase(mixed, 1, 3, 96).data.img_size_choices is None


def test_the_printed_rows_are_written_with_what_they_depend_on(main, tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("rows.csv", "rows.json")]
    flags = words(
        "loader digits+augment=light {} --img-size 48 --workers 0 1", ROOT / "configs/canvas.yaml"
    )
    assert main([*flags, "--batch", "9", *QUICK, "--csv", files[0], "--json", files[1]]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert printed.err == "" and "first batch of each are not counted" in lines[2]
    assert lines[4].startswith("| data | size |")
    rows = list(csv.DictReader(Path(files[0]).read_text().splitlines()))
    content = json.loads(Path(files[1]).read_text())
    assert [
        (row["data"], row["img_size"], row["augment"], row["batch"], row["workers"]) for row in rows
    ] == [(data, "48", "light", "9", workers) for data in flags[1:3] for workers in "01"]
    assert all(
        float(row["images_per_second_low"]) <= float(row["images_per_second_median"])
        for row in rows
    )
    assert [line.split(" | ")[0] for line in lines[6:]] == [
        f"| {row['data']}" for row in content["rows"]
    ]
    assert content["provenance"]["command"].startswith(
        "visionattn benchmark loader digits+augment=light"
    )
    assert rows[0]["ratio_median"] == "1.0" and content["rows"][3]["baseline_workers"] == 0


def test_an_unreadable_image_ends_with_its_path_or_is_left_out(main, tmp_path, capsys):
    write_classes(tmp_path / "train", {"bird": 6, "cat": 6})
    write_classes(tmp_path / "val", {"bird": 1, "cat": 1})
    (tmp_path / "train" / "cat" / "3.png").write_bytes(encoded(120)[:40])
    flags = [*words("folder+root={} --img-size 16 --workers 0 --batch 3", tmp_path), *QUICK]
    assert main(["loader", *flags]) == 2
    assert "cannot read image" in (printed := capsys.readouterr().err) and "3.png" in printed
    assert printed.count("\n") == 1
    with pytest.warns(UserWarning, match="left out unreadable image"):
        assert main(["loader", f"{flags[0]}+on_error=skip", *flags[1:]]) == 0


BAD_FLAGS = {
    "loader digitz": "data.name must be one of digits, digits_pixel, canvas",
    "loader nowhere.yaml": "no configuration file at nowhere.yaml",
    "loader folder+root=nowhere": "nowhere",
    "loader digits+augment=three": "augment three is not made for digits",
    "loader digits+workers=3": "digits+workers=3: workers is given by --workers",
    "loader digits+light": "wanted options like augment=none, of task, root, fit",
    "loader canvas --img-size 64 40": "canvas of 40 pixels is too small",
    "loader digits --workers -1": "wanted a whole number from 0, got '-1'",
    "loader digits --device cuda": "--device does nothing with loader",
    "loader digits --plot a.png": "--plot does nothing with loader",
    "loader digits --no-memory": "--no-memory does nothing with loader",
    "loader digits --threads 2": "--threads does nothing with loader",
    "loader digits --models vit": "unrecognized arguments: --models vit",
    "operations sdpa --workers 1": "--workers does nothing with operations; it belongs to loader",
}


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_bad_input_ends_with_one_line_and_code_2(main, tmp_path, capsys, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    assert main(flags.split()) == 2
    assert_one_error(capsys, BAD_FLAGS[flags])
    assert list(tmp_path.iterdir()) == []


def test_read_all_adds_a_row_that_decodes_all_of_the_same_images(main, tmp_path, capsys):
    """A ramp of 640 x 960 pixels, seen at 40 x 60: libjpeg gives it at an eighth of its size."""
    ramp = np.linspace(0, 250, 960)[None, :, None].repeat(640, 0).repeat(3, 2).astype(np.uint8)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for index in range(3):
            Image.fromarray(ramp).save(tmp_path / name / f"{index}.jpg", quality=95)
    data = f"folder+root={tmp_path}+fit=stretch"
    flags = ["loader", data, "--img-size", "64", "--workers", "0", "--batch", "2", *QUICK]
    assert main([*flags, "--read-all", "--csv", str(tmp_path / "a.csv")]) == 0
    with open(tmp_path / "a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["read"] for row in rows] == ["what is seen", "all"]
    assert float(rows[1]["ratio_median"]) < 1
    source = open_source(data, [64])
    part, everything = (
        LoaderCase(source, 0, 2, 64, read_all).splits.train.options.whole
        for read_all in (False, True)
    )
    assert (part, everything, source.splits.train.options.whole) == (False, True, False)
    capsys.readouterr()
    assert main(["loader", "digits", "--workers", "0", "--read-all"]) == 2
    assert_one_error(capsys, "digits has no images in files that --read-all would decode")
