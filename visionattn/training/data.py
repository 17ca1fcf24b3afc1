"""Images in batches: which data set a name means, how it is split, and loaders whose randomness does not depend on workers.

Owns the splits, the order and the sizes of batches, and what an unreadable image does. A sample is a function of
(seed, epoch, index); the size of a training batch is a function of (seed, epoch, batch number). Images leave as uint8
``[B, C, H, W]``: the model's input is made of them on the device, by ``DataSpec.prepare``.
"""

import math
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from visionattn.models.weights import DataSpec
from visionattn.training.canvas import CanvasDataset, DigitsDataset, SampleKey, digit_splits
from visionattn.training.config import DataConfig

__all__ = ["EvalBatches", "SampleKey", "Splits", "TrainBatches", "build_splits", "eval_batches", "train_batches"]


@dataclass(frozen=True)
class Splits:
    """Disjoint sets of images; indexed by ``SampleKey``, they give ``(uint8 [H, W, C], label)``."""

    train: Dataset
    validation: Dataset
    test: Dataset | None
    spec: DataSpec


def build_splits(config: DataConfig, seed: int) -> Splits:
    """Find the images of ``config.name`` and divide them.

    Args:
        config: which images, at which size, with which augmentation.
        seed: divides train from validation where the data does not say how, and seeds augmentation.

    Raises:
        ValueError, FileNotFoundError: one line that says what is wrong with the data and what to do about it.
    """
    if not 0 < config.val_fraction < 1:
        raise ValueError(f"val_fraction of {config.val_fraction}; wanted a share between 0 and 1")
    return _BUILDERS[config.name](config, seed)


def _digit_spec(config: DataConfig, mean: float, std: float) -> DataSpec:
    names = tuple(str(digit) for digit in range(10))
    return DataSpec(1, 10, names, (mean,), (std,), None, config.img_size)


def _build_digits(config: DataConfig, seed: int) -> Splits:
    _allow_augment(config, "none", "light")
    augment = None
    parts = digit_splits(config.val_fraction, seed)
    return Splits(
        DigitsDataset(parts["train"], seed, augment),
        DigitsDataset(parts["validation"], seed),
        DigitsDataset(parts["test"], seed),
        _digit_spec(config, 0.305, 0.376),
    )


def _build_canvas(config: DataConfig, seed: int) -> Splits:
    _allow_augment(config, "none", "light")
    parts = digit_splits(config.val_fraction, seed)
    return Splits(
        CanvasDataset(parts["train"], "train", config.train_images, seed, vary=config.augment == "light"),
        CanvasDataset(parts["validation"], "validation", config.eval_images, seed),
        CanvasDataset(parts["test"], "test", config.eval_images, seed),
        _digit_spec(config, 0.25, 0.10),
    )


def _allow_augment(config: DataConfig, *allowed: str) -> None:
    if config.augment not in allowed:
        raise ValueError(f"augment {config.augment!r} is not for {config.name}; use {' or '.join(map(repr, allowed))}")


_BUILDERS = {"digits": _build_digits, "canvas": _build_canvas}


class _BatchKeys:
    """The keys of every batch of an epoch, in order; set ``epoch`` before iterating."""

    def __init__(self, length: int, batch_size: int, sizes: tuple[int, ...], seed: int | None):
        self.length, self.batch_size, self.sizes, self.seed, self.epoch = length, batch_size, sizes, seed, 0

    def __len__(self):
        return math.ceil(self.length / self.batch_size)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        order = np.arange(self.length)
        if self.seed is not None:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(self.length)
        for number in range(len(self)):
            size = self.sizes[0]
            if len(self.sizes) > 1:
                size = self.sizes[np.random.default_rng((self.seed, self.epoch, number)).integers(len(self.sizes))]
            batch = order[number * self.batch_size : (number + 1) * self.batch_size]
            yield [SampleKey(index, self.epoch, size) for index in batch.tolist()]


@dataclass(frozen=True)
class Unreadable:
    """What a data set gives instead of an image that cannot be read."""

    path: str
    reason: str


def _collate(samples: list) -> tuple[torch.Tensor, torch.Tensor, list[Unreadable]]:
    """Stack readable samples into uint8 ``[B, C, H, W]`` and int64 ``[B]``; B may be 0."""
    unreadable = [sample for sample in samples if isinstance(sample, Unreadable)]
    readable = [sample for sample in samples if not isinstance(sample, Unreadable)]
    if not readable:
        return torch.empty(0), torch.empty(0, dtype=torch.int64), unreadable
    images = np.stack([image for image, _ in readable])
    labels = torch.tensor([label for _, label in readable], dtype=torch.int64)
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))), labels, unreadable


def _start_worker(_: int) -> None:
    """One thread per worker; Ctrl-C is for the main process to handle."""
    cv2.setNumThreads(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Batches:
    def __init__(self, dataset: Dataset, config: DataConfig, keys: _BatchKeys):
        self.left_out: set[str] = set()
        self._keys, self._on_error = keys, config.on_error
        self._loader = DataLoader(
            dataset,
            batch_sampler=keys,
            num_workers=config.workers,
            collate_fn=_collate,
            worker_init_fn=_start_worker,
            persistent_workers=config.workers > 0,
        )

    def __len__(self):
        """Batches, the last incomplete one included."""
        return len(self._keys)

    def _iterate(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, labels, unreadable in self._loader:
            for image in unreadable:
                self._leave_out(image)
            if len(labels):
                yield images, labels

    def _leave_out(self, image: Unreadable) -> None:
        if self._on_error == "fail":
            raise ValueError(
                f"cannot read image {image.path}: {image.reason}; repair or delete it, or leave it out with on_error skip"
            )
        if image.path not in self.left_out:
            self.left_out.add(image.path)
            warnings.warn(f"left out unreadable image {image.path}: {image.reason}", stacklevel=4)


class TrainBatches(_Batches):
    """Batches of training images in an order that is drawn anew for each epoch; ``len()`` batches per epoch."""

    def epoch(self, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Images uint8 ``[B, C, H, W]``, all of one size per batch, and labels int64 ``[B]``, of epoch ``number``."""
        self._keys.epoch = number
        return self._iterate()


class EvalBatches(_Batches):
    """Every image once, in the data set's order; ``left_out`` holds the paths of the unreadable ones seen so far."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self._iterate()


def train_batches(splits: Splits, config: DataConfig, *, batch_size: int, seed: int) -> TrainBatches:
    """Load ``splits.train``: shuffled, augmented, the last incomplete batch included.

    Each batch has images of one size: ``config.img_size``, or one of ``config.img_size_choices`` drawn by (seed,
    epoch, batch number). With ``config.workers`` processes, kept from epoch to epoch, or in the main process.
    """
    sizes = tuple(config.img_size_choices or (config.img_size,))
    return TrainBatches(splits.train, config, _BatchKeys(len(splits.train), batch_size, sizes, seed))


def eval_batches(dataset: Dataset, config: DataConfig, *, batch_size: int, img_size: int) -> EvalBatches:
    """Load ``dataset`` (a validation or test split) at ``img_size`` pixels: no augmentation, fixed order."""
    return EvalBatches(dataset, config, _BatchKeys(len(dataset), batch_size, (img_size,), None))
