"""``visionattn benchmark loader``: what counts as loading, and how it is asked for."""

import multiprocessing
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import Dataset

from tests.helpers.image_files import write_classes
from tests.helpers.tools import load_tool, read_csv, words
from visionattn.data.batches import Item
from visionattn.data.data_config import DataConfig
from visionattn.data.splits import Splits
from visionattn.lab.loader_benchmark import (
    LoaderCase,
    LoaderSource,
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
        self.asked.append((key.epoch, key.index))
        size = key.geometry.img_size
        return Item(np.zeros((*size, 1), np.uint8), 0, size)


def source_of(dataset):
    config = TrainConfig(data=DataConfig(img_size=6))
    return LoaderSource("slow", config, Splits(dataset, dataset, None, SPEC))


main = load_tool("benchmark")


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_load_at_the_same_time_and_none_stays(workers):
    """Each image waits for one of every other worker: with fewer at work than were asked for, none
    would come.
    """
    barrier, ticks = multiprocessing.get_context("fork").Barrier(workers), count()
    case = LoaderCase(source_of(Slow(12 * workers, barrier=barrier)), workers, 4, None)
    reading = read_batches(case, 0, 0, clock=lambda: next(ticks))
    # A tick for each batch that counts.
    assert (reading.images, reading.seconds) == (2 * workers * 4, 2 * workers)
    assert multiprocessing.active_children() == []


def test_an_interruption_ends_the_workers():
    """The caller holds the exception, and with it the frame, as a traceback does."""

    def interrupted():
        raise KeyboardInterrupt

    case = LoaderCase(source_of(Slow(24)), 2, 4, None)
    with pytest.raises(KeyboardInterrupt) as raised:
        read_batches(case, 0, 0, clock=interrupted)
    assert multiprocessing.active_children() == [] and raised.tb


def test_speed_is_images_over_the_seconds_of_the_batches_that_count():
    """A clock of a tick for each batch, so that a second gives as many images as a batch has,
    whatever the workers.
    """
    ticks, source = count(), source_of(Slow(996))
    cases = [LoaderCase(source, *way, None) for way in ((0, 4), (2, 4), (0, 12))]
    rows = measure_loaders(cases, rounds=3, seconds=15.0, clock=lambda: next(ticks))
    assert [row["images_per_second_median"] for row in rows] == [4, 4, 12]
    assert [row["ratio_median"] for row in rows] == [1, 1, 3]
    assert rows[1]["megabytes_per_second_median"] == pytest.approx(4 * 36e-6)
    assert [(row["rounds"], row["images"]) for row in rows] == [(3, 60), (3, 60), (3, 180)]


def test_the_first_batch_does_not_count_and_epochs_follow_each_other():
    dataset = Slow(63, seconds=0.5, first=2.0)
    case = LoaderCase(source_of(dataset), 0, 7, None)
    reading = read_batches(case, 30.0, 5, clock=lambda: dataset.now)
    assert (reading.images, reading.seconds) == (9 * 7, 9 * 3.5)
    assert len({index for epoch, index in dataset.asked if epoch == 5}) == 63
    assert sum(epoch == 6 for epoch, _ in dataset.asked) == 7


def test_sources_are_named_as_trainings_name_them(tmp_path, monkeypatch):
    (tmp_path / "mine.conf").write_text("data: {name: canvas, args: {train_images: 7}}")
    (tmp_path / "digits").write_text("data: {name: canvas}")
    monkeypatch.chdir(tmp_path)
    assert open_source("mine.conf", [48]).config.data.args == {"train_images": 7}
    assert open_source("digits", None).config.data.name == "digits"
    source = open_source("canvas+augment=light+args.train_images=70", [48])
    assert source.config.data.augment == "light" and len(source.splits.train) == 70
    assert (LoaderCase(source, 0, 3, None).size, LoaderCase(source, 0, 3, 48).size) == ("128", "48")
    mixed = open_source(str(ROOT / "configs" / "canvas.yaml"), None)
    assert LoaderCase(mixed, 1, 3, None).size == "48/64/80"
    assert LoaderCase(mixed, 1, 3, 96).data.img_size_choices is None


def test_the_printed_rows_are_written(tmp_path, capsys):
    write_classes(tmp_path / "root", {"bird": 3, "cat": 3})
    data, file = f"folder+root={tmp_path / 'root'}+fit=stretch", tmp_path / "a.csv"
    flags = words("--img-size 64 --workers 0 --batch 2 --csv {}", file)
    assert main(["loader", data, *flags, *QUICK]) == 0
    lines, rows = capsys.readouterr().out.splitlines(), read_csv(file)
    assert "first batch of each do not count" in lines[2] and len(lines[6:]) == len(rows) == 1
    assert {(row["data"], row["img_size"], row["workers"]) for row in rows} == {(data, "64", "0")}
    assert float(rows[0]["ratio_median"]) > 0
    assert rows[0]["command"].startswith("visionattn benchmark loader folder+root")
