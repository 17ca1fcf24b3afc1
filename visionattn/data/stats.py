"""Means and standard deviations of the user's training images: ``visionattn stats``.

They are summed over all pixels at full size, integers exactly and fractions in float64, image by
image in dataset order, independent of the number of threads.
"""

import math
import shlex
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import cast

import cv2
import numpy as np

from visionattn.cli.commands import typed
from visionattn.cli.files import check_free, write_text
from visionattn.cli.parsing import parse
from visionattn.cli.progress import Progress
from visionattn.cli.tables import heading, line
from visionattn.cli.untrusted import refuse
from visionattn.data.batches import Unreadable
from visionattn.data.data_config import DataConfig
from visionattn.data.formats import (
    DAMAGED_IMAGE,
    ReadOptions,
    extremes,
    open_image,
    read_blocks,
)
from visionattn.data.images import ImageDataset, unreadable
from visionattn.data.splits import build_splits, check_root

COLUMNS = ("band", "mean", "std", "smallest", "largest", "images", "pixels")
EXAMPLE = "--data.root images --output stats.yaml --overwrite"


@dataclass
class StatsConfig:
    """The images to measure."""

    data: DataConfig = field(default_factory=lambda: DataConfig(name="folder"))
    """The images, as for training; the training split is measured."""
    seed: int = 0
    """Seed of the split into training and validation images, if the data has no splits."""
    output: str | None = None
    """YAML file for the result; pass it to ``visionattn train`` as another ``--config``."""
    overwrite: bool = False
    """Replace an existing file."""


@dataclass(frozen=True)
class Moments:
    """Statistics of the values of each channel, ``[C]`` each; they add."""

    count: np.ndarray
    """Number of pixels with data."""
    mean: np.ndarray
    """Mean of values in [0, 1], float64."""
    squares: np.ndarray
    """Sums of the squared distances from the mean, float64."""
    low: np.ndarray
    """The smallest values, in the units of the files."""
    high: np.ndarray

    def __add__(self, other: "Moments") -> "Moments":
        """Combine both as if measured together (Chan et al. 1979)."""
        count = self.count + other.count
        step = other.mean - self.mean
        share = other.count / np.maximum(count, 1)
        squares = self.squares + other.squares + step**2 * (self.count * share)
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        return Moments(count, self.mean + step * share, squares, low, high)

    @property
    def std(self) -> np.ndarray:
        """The standard deviation of all pixels."""
        return np.sqrt(self.squares / np.maximum(self.count, 1))


def moments_of(stored: np.ndarray, channels: np.ndarray) -> Moments:
    """Measure a part of an image; masked pixels do not count.

    Args:
        stored: ``[h, w, bands]``, values of the file.
        channels: ``[h, w, C]``, uint8 or float32 in [0, 1]: the model's channels.
    """
    if stored.shape[2] != channels.shape[2]:  # gray that became color, or the reverse
        stored = channels
    rows = []
    for band in range(channels.shape[2]):
        values = np.ma.MaskedArray(channels[..., band]).compressed()
        if not values.size:
            rows.append((0, 0.0, 0.0, math.inf, -math.inf))
            continue
        of = _of_bytes if values.dtype == np.uint8 else _of_fractions
        rows.append((values.size, *of(values), *extremes(stored[..., band])))
    return Moments(*np.array(rows).T)


def _of_bytes(values: np.ndarray) -> tuple[float, float]:
    """Return mean and sum of squared distances of bytes / 255, exact until the last division."""
    # OpenCV counts in float32, which is exact for the number of pixels in a part.
    counts = cv2.calcHist([values], [0], None, [256], [0, 256]).ravel().astype(np.int64)
    count = values.size
    levels = np.arange(256)
    total, of_squares = int(counts @ levels), int(counts @ levels**2)
    return total / (255 * count), (count * of_squares - total**2) / (255**2 * count)


def _of_fractions(values: np.ndarray) -> tuple[float, float]:
    wide = values.astype(np.float64)
    mean = wide.mean()
    wide -= mean
    return mean, float(np.square(wide, out=wide).sum())


def parse_stats(argv: Sequence[str]) -> StatsConfig:
    """Read the flags of ``visionattn stats``.

    Raises:
        ValueError, FileNotFoundError: a flag is wrong, or the file exists; one line.
    """
    config = parse(
        StatsConfig,
        argv,
        command="stats",
        description="Measure mean and standard deviation of your training images.",
        example=EXAMPLE,
    )
    data = config.data
    refuse(
        (
            data.name != "folder" or (data.root or "").startswith("wds/"),
            "stats measures images in folders, tars and tables, got "
            f"{data.root or data.name}; pass --data.root FOLDER",
        ),
        (
            config.output is None,
            "expected --output: a YAML file for the result, such as stats.yaml",
        ),
    )
    check_root(data)
    check_free(Path(str(config.output)), config.overwrite)
    return config


def measure(
    dataset: ImageDataset, options: ReadOptions, *, threads: int = 1, skip: bool = False
) -> tuple[Moments, int]:
    """Measure all pixels of all images of a dataset.

    Args:
        dataset: the images; their geometry is ignored.
        options: which bands, and which values are black and white.
        threads: number of reading threads; the result does not depend on it.
        skip: skip unreadable images, with a warning.

    Returns:
        The statistics, and the number of images.

    Raises:
        ValueError: an image cannot be read and ``skip`` is off, or none can; one line.
    """
    total, images = None, 0
    indices = [int(index) for index in dataset.indices]
    work = partial(_measure_one, dataset.source, options)
    with ThreadPoolExecutor(max(1, threads)) as pool, Progress(len(indices)) as progress:
        for found in pool.map(work, indices):  # cancels the rest if one raises
            progress.advance(1, isinstance(found, Unreadable))
            if isinstance(found, Moments):
                total, images = found if total is None else total + found, images + 1
            elif skip:
                text = f"skipped unreadable image {found.path}: {found.reason}"
                warnings.warn(text, stacklevel=2)
            else:
                raise ValueError(str(found))
    if total is None:
        raise ValueError("no image can be read; check the files")
    return total, images


def _measure_one(source, options: ReadOptions, index: int) -> Moments | Unreadable:
    """Measure one image; return the reason if it cannot be read or has no data."""
    try:
        with open_image(source.open(index), options) as reader:
            found = reduce(add, (moments_of(*part) for part in read_blocks(reader, options)))
            if not found.count.any():
                return Unreadable(source.name(index), "it has only nodata pixels")
            return found
    except DAMAGED_IMAGE as error:
        return unreadable(source.name(index), error)


def stats(argv: Sequence[str], say: Callable[[str], None]) -> None:
    """Measure, print a table and write the file."""
    config = parse_stats(argv)
    data = config.data
    train = cast(
        ImageDataset,
        build_splits(replace(data, augment="none", mean=None, std=None), config.seed).train,
    )
    options = train.options
    found, images = measure(
        train,
        options,
        threads=config.data.workers,
        skip=config.data.on_error == "skip",
    )
    names = options.bands or (("red", "green", "blue") if options.channels == 3 else ("grey",))
    say(heading(COLUMNS))
    for place, name in enumerate(names):
        row = [name, f"{found.mean[place]:.6f}", f"{found.std[place]:.6f}"]
        row += [f"{found.low[place]:,.6g}", f"{found.high[place]:,.6g}"]
        say(line([*row, images, f"{found.count[place]:,.0f}"]))
    even = [str(name) for place, name in enumerate(names) if found.std[place] == 0]
    if even:
        raise ValueError(
            f"band {', '.join(even)} is constant or empty; exclude it with --data.bands"
        )
    write_text(config.output, as_yaml(found, options, argv, images))


def as_yaml(found: Moments, options: ReadOptions, argv: Sequence[str], images: int) -> str:
    """Return the file content: settings for ``visionattn train``, and their origin."""
    import yaml

    data = {"mean": _numbers(found.mean), "std": _numbers(found.std)}
    for name in ("bands", "value_range", "page"):
        value = getattr(options, name)
        # A range that was found is found again in the training images.
        if value is not None and not (name == "value_range" and options.found):
            data[name] = list(value) if isinstance(value, tuple) else value
    said = f"# {typed('stats')} {shlex.join(argv)}\n"
    said += f"# {images:,} images, {found.count.max():,.0f} pixels\n"
    return said + yaml.safe_dump({"data": data}, sort_keys=False, default_flow_style=None)


def _numbers(values: np.ndarray) -> list[float]:
    return [float(f"{value:.9g}") for value in values]
