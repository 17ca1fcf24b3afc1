"""Measure the throughput of the data pipeline for each number of workers.

The pipeline reads, decodes, augments and collates the uint8 batches of a training. There is no
model and no device.
"""

import re
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count, product
from pathlib import Path
from typing import get_args, get_type_hints

from visionattn.cli.parsing import field_types, parse
from visionattn.cli.tables import Record
from visionattn.data.data_checks import resolved
from visionattn.data.data_config import DataConfig
from visionattn.data.splits import Splits, build_splits, train_batches
from visionattn.data.streams import Shards
from visionattn.lab.case_comparison import ratios_of, spread
from visionattn.training.config import TrainConfig, check

PATCH_PX = 16
"""Patch size in pixels; native image sizes are multiples of it."""
COLUMNS = {name: name for name in ("data", "img_size", "augment", "batch", "workers")}
COLUMNS |= {
    "images/s": "images_per_second_median",
    "from": "images_per_second_low",
    "to": "images_per_second_high",
    "MB/s": "megabytes_per_second_median",
    "ratio": "ratio_median",
    "rounds": "rounds",
}
COUNTED = (
    "Reading, decoding, augmentation and collation of training images, without a model and a copy "
    "to a device. The start of the workers and the first batch of each do not count. MB/s: uint8 "
    "pixels. Ratio: images/s relative to the first row of the same data and size."
)
OWN_FLAGS = {
    "workers": "--workers",
    "img_size": "--img-size",
    "img_size_choices": "--img-size",
    "name": "the word before +",
}


@dataclass(frozen=True, eq=False)
class LoaderSource:
    """A dataset to load as in training."""

    label: str
    """The name as typed."""
    config: TrainConfig
    splits: Splits


@dataclass(frozen=True)
class LoaderCase:
    """A dataset with the settings of its loader."""

    source: LoaderSource
    workers: int
    batch: int
    img_size: int | None
    """Height and width in pixels; None: the size or sizes in the configuration."""

    @property
    def data(self) -> DataConfig:
        """The configuration with the size and the workers of this case."""
        data = replace(self.source.config.data, workers=self.workers)
        if self.img_size is None:
            return data
        return replace(data, img_size=self.img_size, img_size_choices=None)

    @property
    def splits(self) -> Splits:
        """The images, at the size of this case."""
        splits, data = self.source.splits, resolved(self.data)
        spec = replace(splits.spec, img_size=data.img_size, fit=data.fit)
        return replace(splits, spec=replace(spec, max_patches=data.max_patches))

    @property
    def size(self) -> str:
        """The image sizes in pixels, as text."""
        data = resolved(self.data)
        sizes = data.img_size_choices or [data.img_size]
        limit = f"{data.max_patches} patches" if data.max_patches else "own"
        return "/".join(limit if size is None else str(size) for size in sizes)


@dataclass(frozen=True)
class Reading:
    """The result of one round of a case."""

    images: int
    megabytes: float
    """uint8 pixels, in 10^6 bytes."""
    seconds: float


def open_source(text: str, sizes: Sequence[int] | None) -> LoaderSource:
    """Find the training images of ``configs/canvas.yaml+augment=none`` or ``folder+root=/data``.

    Args:
        text: the YAML file of a training, or the name of a dataset. Options of the data follow,
            each after a plus sign.
        sizes: image sizes in pixels to check; None: the sizes in the configuration.

    Raises:
        ValueError, FileNotFoundError: no such file, dataset or option, or invalid data; one line.
    """
    base, *options = re.split(r"\+(?=[\w.]+(?:=|\+|$))", text)
    known = [name for name in field_types(DataConfig) if name not in OWN_FLAGS]
    named = base in get_args(get_type_hints(DataConfig)["name"])
    configured = base.endswith((".yaml", ".yml")) or (not named and Path(base).is_file())
    argv = ["--config", base] if configured else ["--data.name", base]
    for option in options:
        name, _, value = option.partition("=")
        if name in OWN_FLAGS:
            raise ValueError(f"{text}: {name} is set by {OWN_FLAGS[name]}; remove it")
        if not value or (name not in known and not name.startswith("args.")):
            raise ValueError(
                f"{text}: expected an option such as augment=none, one of {', '.join(known)}; got "
                f"{option}"
            )
        argv += [f"--data.{name}={value}"]
    config = parse(TrainConfig, argv)
    check(config)
    data = config.data
    if sizes:
        data = replace(data, img_size=sizes[0], img_size_choices=list(sizes))
    splits = build_splits(data, config.seed)
    if len(splits.train) == 0:
        raise ValueError(f"expected training images, got none ({text})")
    return LoaderSource(text, config, splits)


def loader_cases(
    names: Sequence[str],
    sizes: Sequence[int] | None,
    workers: Sequence[int],
    batch: int | None,
) -> list[LoaderCase]:
    """Open the named datasets with ``open_source``, and return the cases of one run.

    Raises:
        ValueError, FileNotFoundError: invalid data, or more workers than shards.
    """
    cases = []
    for text in names:
        source = open_source(text, sizes)
        train, most = source.splits.train, max(workers)
        if isinstance(train, Shards) and most > len(train.shard_lengths):
            shards = f"{len(train.shard_lengths)} shards"
            raise ValueError(f"{text} has {shards}, too few for {most} workers")
        images = batch or source.config.batch_size
        ways = product(workers, [images], sizes or [None])
        cases += [LoaderCase(source, *way) for way in ways]
    return cases


def measure_loaders(
    cases: Sequence[LoaderCase],
    *,
    rounds: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Record]:
    """Measure cases in one interleaved run, and return a record for each.

    Each round measures every case once, and the order rotates by one from round to round. Workers
    run only while their case is measured. Each measurement reads another epoch, because files read
    twice in a row come from the cache of the system.

    Args:
        cases: the cases.
        rounds: number of rounds.
        seconds: minimum time measured for each case over all rounds; each round has at least two
            batches per worker.
        clock: returns seconds.

    Raises:
        ValueError: an image cannot be read and ``on_error`` is ``fail``, or no image can be read.
    """
    readings: list[list[Reading]] = [[] for _ in cases]
    for turn in range(rounds):
        for position in range(len(cases)):
            index = (turn + position) % len(cases)
            epoch = turn * len(cases) + position
            readings[index].append(read_batches(cases[index], seconds / rounds, epoch, clock))
    groups = [(case.source, case.size) for case in cases]
    firsts = [groups.index(group) for group in groups]
    return [
        record_of(case, own, cases[first], readings[first])
        for case, own, first in zip(cases, readings, firsts, strict=True)
    ]


def read_batches(
    case: LoaderCase,
    seconds: float,
    epoch: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Reading:
    """Read one batch per worker as a warm-up, then measure for ``seconds``, and for at least two
    batches per worker. End the workers.

    Args:
        case: the dataset and the settings of its loader.
        seconds: minimum measured time.
        epoch: the first epoch to read.
        clock: returns seconds.

    Raises:
        ValueError: an image cannot be read and ``on_error`` is ``fail``, or no image can be read.
    """
    processes, images, size, began, now = max(1, case.workers), 0, 0, 0.0, 0.0
    with closing(open_batches(case, epoch)) as batches:
        for number, batch in enumerate(batches, start=1):
            now = clock()
            if number == processes:
                began = now
            if number > processes:
                images, size = images + len(batch.labels), size + batch.images.nbytes
            if number >= 3 * processes and now - began >= seconds:
                break
    if not images:
        raise ValueError(f"no image of {case.source.label} can be read")
    return Reading(images, size / 1e6, max(now - began, 1e-9))


def open_batches(case: LoaderCase, epoch: int) -> Generator:
    """Yield the batches of consecutive epochs from the loaders of training, until an epoch is
    empty. Close the generator to end the workers.
    """
    batches = train_batches(
        case.splits,
        case.data,
        batch_size=case.batch,
        seed=case.source.config.seed,
        patch_px=(PATCH_PX, PATCH_PX),
    )
    for number in count(epoch):
        images = 0
        for batch in batches.epoch(number):
            images += len(batch.labels)
            yield batch
        if not images:
            return


def record_of(
    case: LoaderCase, own: Sequence[Reading], base: LoaderCase, others: Sequence[Reading]
) -> Record:
    """Return the result of a case as plain values, with units in the names.

    Args:
        case, own: the case and its results.
        base, others: the case of the ratio and its results.
    """
    rates = [reading.images / reading.seconds for reading in own]
    record: Record = {"data": case.source.label, "img_size": case.size}
    record |= {"augment": case.data.augment}
    record |= {"batch": case.batch, "workers": case.workers} | spread("images_per_second", rates)
    volumes = [reading.megabytes / reading.seconds for reading in own]
    record |= spread("megabytes_per_second", volumes)
    record |= spread("ratio", ratios_of(rates, [each.images / each.seconds for each in others]))
    record |= {"baseline_workers": base.workers, "rounds": len(own)}
    return record | {"images": sum(reading.images for reading in own)}
