"""Images per second of the data pipeline alone: reading, decoding, augmentation and collation, by
number of workers.

This module owns what is counted and how. It knows no model and no device: what arrives are the
uint8 batches that training would take.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import numpy as np
from torch.utils.data import Dataset

from visionattn.cli.parsing import field_types, parse
from visionattn.data.data_checks import resolved
from visionattn.data.data_config import DataConfig
from visionattn.data.geometry import Geometry
from visionattn.data.images import ImageDataset
from visionattn.data.splits import SampleKey, Splits, build_splits, train_batches
from visionattn.data.streams import Shards
from visionattn.lab.compare import Quartiles, ratio_of, spread
from visionattn.training.config import TrainConfig, check

PATCH_PX = 16
"""Side of the patches that images are a whole number of, where they come at sizes of their own."""
COLUMNS = (
    "data",
    "size",
    "augment",
    "read",
    "batch",
    "workers",
    "images/s",
    "quartiles",
    "MB/s",
    "ratio",
    "rounds",
)
COUNTED = (
    "Reading, decoding, augmentation and collation of training images; no model, no copy to "
    "a device. The start of the workers "
    "and the first batch of each are not counted. MB/s: the uint8 pixels delivered. Ratio: "
    "to the first row of the same data and "
    "size."
)
OWN_FLAGS = {
    "workers": "--workers",
    "img_size": "--img-size",
    "img_size_choices": "--img-size",
    "name": "the word before +",
}


@dataclass(frozen=True, eq=False)
class Source:
    """Images to load, as training would."""

    label: str
    """As it was typed."""
    config: TrainConfig
    splits: Splits

    @property
    def order(self) -> np.ndarray:
        """The numbers of the training images, shuffled, the same in each call."""
        return np.random.default_rng(self.config.seed).permutation(len(self.splits.train))


@dataclass(frozen=True)
class LoaderCase:
    """A way to load them."""

    source: Source
    workers: int
    batch: int
    img_size: int | None
    """Height and width in pixels; None: as the configuration says, which may be several sizes."""
    read_all: bool = False
    """Whether all of each image is decoded, where the format would give the part that is seen."""

    @property
    def data(self) -> DataConfig:
        """The configuration with the size and the workers of this case."""
        data = replace(self.source.config.data, workers=self.workers)
        return (
            data
            if self.img_size is None
            else replace(data, img_size=self.img_size, img_size_choices=None)
        )

    @property
    def splits(self) -> Splits:
        """The images, to be seen at the size of this case."""
        splits, data = self.source.splits, resolved(self.data)
        if self.read_all:
            train = copy(cast(ImageDataset, splits.train))
            train.options = replace(train.options, whole=True)
            splits = replace(splits, train=train)
        spec = replace(splits.spec, img_size=data.img_size, fit=data.fit)
        return replace(splits, spec=replace(spec, max_patches=data.max_patches))

    @property
    def size(self) -> str:
        """The sizes in pixels."""
        data = resolved(self.data)
        sizes = data.img_size_choices or [data.img_size]
        limit = f"{data.max_patches} patches" if data.max_patches else "own"
        return "/".join(limit if size is None else str(size) for size in sizes)


@dataclass(frozen=True)
class Reading:
    """What a round of one case gave."""

    images: int
    megabytes: float
    """10^6 bytes of pixels."""
    seconds: float


@dataclass(frozen=True)
class LoaderRow:
    """The result of a case."""

    case: LoaderCase
    readings: Sequence[Reading]
    ratio: Quartiles
    """The ratio of its images/s to those of ``baseline``, round by round."""
    baseline: int
    """Workers of the case that it is related to."""

    def record(self) -> dict[str, Any]:
        """Return the row as plain values, units in the names."""
        case, record = self.case, {}
        record |= {"data": case.source.label, "img_size": case.size, "augment": case.data.augment}
        record |= {"read": "all" if case.read_all else "what is seen"}
        record |= {"batch": case.batch, "workers": case.workers}
        for unit in ("images", "megabytes"):
            rates = [getattr(reading, unit) / reading.seconds for reading in self.readings]
            record |= spread(f"{unit}_per_second", Quartiles.of(rates))
        record |= spread("ratio", self.ratio)
        images = sum(reading.images for reading in self.readings)
        return record | {
            "baseline_workers": self.baseline,
            "rounds": len(self.readings),
            "images": images,
        }

    def cells(self) -> list[Any]:
        """Return the row for people, under ``COLUMNS``."""
        record = self.record()
        names = ("data", "img_size", "augment", "read", "batch", "workers")
        values = [record[name] for name in names]
        values += [f"{record['images_per_second_median']:.4g}"]
        values += ["{images_per_second_low:.4g} - {images_per_second_high:.4g}".format(**record)]
        values += [f"{record['megabytes_per_second_median']:.4g}"]
        return [
            *values,
            str(self.ratio),
            record["rounds"],
        ]


def open_source(text: str, sizes: Sequence[int] | None) -> Source:
    """Find the training images of ``configs/canvas.yaml+augment=none`` or ``folder+root=/data``.

    Args:
        text: the YAML file of a training, or the name of a data set; then options of the data, each
            behind a plus sign.
        sizes: in pixels, to be checked; None: those of the configuration.

    Raises:
        ValueError, FileNotFoundError: no such file, data or option, or something is wrong with the
            data; one line.
    """
    base, *options = re.split(r"\+(?=[\w.]+(?:=|\+|$))", text)
    known = [name for name in field_types(DataConfig) if name not in OWN_FLAGS]
    named = base in get_args(get_type_hints(DataConfig)["name"])
    configured = base.endswith((".yaml", ".yml")) or (not named and Path(base).is_file())
    argv = ["--config", base] if configured else ["--data.name", base]
    for option in options:
        name, _, value = option.partition("=")
        if name in OWN_FLAGS:
            raise ValueError(f"{text}: {name} is given by {OWN_FLAGS[name]}")
        if not value or (name not in known and not name.startswith("args.")):
            raise ValueError(
                f"{text}: wanted options like augment=none, of {', '.join(known)}; got {option}"
            )
        argv += [f"--data.{name}={value}"]
    config = parse(TrainConfig, argv)
    check(config)
    sized = (
        replace(config.data, img_size=sizes[0], img_size_choices=list(sizes))
        if sizes
        else config.data
    )
    splits = build_splits(sized, config.seed)
    if len(splits.train) == 0:
        raise ValueError(f"{text}: there are no training images")
    return Source(text, config, splits)


def open_sources(
    texts: Sequence[str],
    sizes: Sequence[int] | None,
    workers: Sequence[int],
    *,
    read_all: bool = False,
) -> tuple[Source, ...]:
    """Return the images that are named, see ``open_source``; a name that is given twice counts
    once.

    Raises:
        ValueError, FileNotFoundError: something about them is wrong, there are more workers than
            shards, or ``read_all`` and they are no images in files.
    """
    sources = tuple(open_source(text, sizes) for text in dict.fromkeys(texts))
    for source in sources:
        train = source.splits.train
        if read_all and not isinstance(train, ImageDataset):
            raise ValueError(f"{source.label} has no images in files that --read-all would decode")
        if isinstance(train, Shards) and max(workers) > len(train.shard_lengths):
            raise ValueError(
                f"{source.label} has {len(train.shard_lengths)} shards, too few for "
                f"{max(workers)} workers"
            )
    return sources


def measure_loaders(
    cases: Sequence[LoaderCase],
    *,
    rounds: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[LoaderRow]:
    """Measure a row for each case, from one interleaved run: each round reads with every case once,
    in rotating order.

    The workers of a case are started for its turn and end with it, so that none works during the
    turn of another. Each turn takes other images, as long as there are some, since a file read a
    second time comes from memory.

    Args:
        cases: of any data.
        rounds: of the run.
        seconds: that are counted for each case, in all rounds together, at least; and two batches
            per worker and round.
        clock: seconds.

    Raises:
        ValueError: an image cannot be read and ``on_error`` is ``fail``, or too few images can be
            read.
    """
    turns = {case.source.label: 0 for case in cases}

    def read(case: LoaderCase, counted: int) -> Reading:
        start = turns[case.source.label]
        turns[case.source.label] += (counted + 1) * max(1, case.workers) * case.batch
        return read_batches(case, counted, start, clock)

    counts = [
        enough_batches(lambda counted, case=case: read(case, counted).seconds, seconds / rounds)
        for case in cases
    ]
    readings: list[list[Reading]] = [[] for _ in cases]
    for turn in range(rounds):
        for place in range(len(cases)):
            index = (turn + place) % len(cases)
            readings[index].append(read(cases[index], counts[index]))
    return [row_of(case, own, cases, readings) for case, own in zip(cases, readings, strict=True)]


def enough_batches(seconds_of: Callable[[int], float], wanted: float) -> int:
    """Return how many batches per worker take ``wanted`` seconds, at least two.

    A few batches may all be there when they are asked for, so a trial counts only if it takes a
    quarter of that time.
    """
    counted = 2
    while (seconds := seconds_of(counted)) < wanted / 4:
        counted *= 2
    return max(2, ceil(counted * wanted / seconds))


def row_of(
    case: LoaderCase,
    own: Sequence[Reading],
    cases: Sequence[LoaderCase],
    readings: Sequence[Sequence[Reading]],
):
    """Return the row of a case, related to the first case of the same data and size."""
    first = next(
        i for i, other in enumerate(cases) if (other.source, other.size) == (case.source, case.size)
    )
    rates = [
        [reading.images / reading.seconds for reading in some] for some in (own, readings[first])
    ]
    return LoaderRow(case, own, ratio_of(*rates), cases[first].workers)


def read_batches(
    case: LoaderCase, counted: int, start: int, clock: Callable[[], float] = time.perf_counter
) -> Reading:
    """Read a batch per worker, and then ``counted`` more per worker, which count; no worker is left
    running.

    Args:
        case: what to read, and how.
        counted: batches per worker that count, at least 1.
        start: number of the first image in the order of the source; past the end, it begins again.
        clock: seconds.

    Raises:
        ValueError: an image cannot be read and ``on_error`` is ``fail``, or too few images can be
            read.
    """
    streams = open_batches(case, counted, start)
    processes = max(1, case.workers)
    images = size = 0
    began = ended = None
    try:
        for number, batch in enumerate(islice(streams, (counted + 1) * processes), start=1):
            ended = clock()
            if number > processes:
                images, size = images + len(batch.labels), size + batch.images.nbytes
            elif number == processes:
                began = ended
    finally:
        streams.close()  # type: ignore[attr-defined]
    if not images or began is None:
        raise ValueError(
            f"{case.source.label} has too few readable images for {processes} workers with "
            f"batches of {case.batch}; "
            "name fewer --workers or a smaller --batch"
        )
    return Reading(images, size / 1e6, max(ended - began, 1e-9))


def open_batches(case: LoaderCase, counted: int, start: int) -> Iterator:
    """Yield the batches of a turn, by the loaders that training uses; close it to end
    the workers.
    """
    splits, wanted = case.splits, (counted + 1) * max(1, case.workers) * case.batch
    if not isinstance(splits.train, Shards):
        chosen = case.source.order[(start + np.arange(wanted)) % len(splits.train)]
        splits = replace(splits, train=Chosen(splits.train, chosen))
    seed = case.source.config.seed
    batches = train_batches(
        splits, case.data, batch_size=case.batch, seed=seed, patch_px=(PATCH_PX, PATCH_PX)
    )
    return batches.epoch(start // wanted)


class Chosen(Dataset):
    """Some images of a data set, in the order given; repeated where they are named twice."""

    def __init__(self, dataset: Dataset, indices: np.ndarray):
        self.dataset, self.indices = dataset, indices

    def __len__(self):
        return len(self.indices)

    def canvases(self, geometry: Geometry) -> np.ndarray:
        """Return the size of the model's input for each image, ``[n, 2]``."""
        return self.dataset.canvases(geometry)[self.indices]  # type: ignore[attr-defined]

    def __getitem__(self, key: SampleKey):
        return self.dataset[key._replace(index=int(self.indices[key.index]))]
