"""Loaders whose randomness does not depend on workers or order, and what an unreadable image does.

Owns the order and the sizes of batches. Knows data sets only as ``dataset[SampleKey]`` and the streams of
``streams.py``. Images leave as uint8 ``[B, C, H, W]``: the model's input is made of them on the device, by
``DataSpec.prepare``.
"""

import math
import signal
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from visionattn.training.config import DataConfig

# Each use of randomness has a stream of its own, (seed, stream, epoch, number); the canvases own 0, 1 and 2.
ORDER_STREAM, SIZE_STREAM, AUGMENT_STREAM = 10, 11, 12


class SampleKey(NamedTuple):
    """What a batch sampler yields and a data set's ``__getitem__`` takes; it and the seed decide the sample."""

    index: int
    epoch: int
    img_size: int
    """Height and width in pixels of the image to make."""


@dataclass(frozen=True)
class Unreadable:
    """What a data set gives instead of an image that cannot be read."""

    path: str
    reason: str


def batch_size_px(sizes: tuple[int, ...], seed: int, epoch: int, number: int) -> int:
    """The size in pixels of the images of one batch: one of ``sizes``, a function of (seed, epoch, batch number)."""
    if len(sizes) == 1:
        return sizes[0]
    return sizes[np.random.default_rng((seed, SIZE_STREAM, epoch, number)).integers(len(sizes))]


def collate(samples: list) -> tuple[torch.Tensor, torch.Tensor, list[Unreadable]]:
    """Stack the readable samples into uint8 ``[B, C, H, W]`` and int64 ``[B]``, and list the others; B may be 0."""
    unreadable = [sample for sample in samples if isinstance(sample, Unreadable)]
    readable = [sample for sample in samples if not isinstance(sample, Unreadable)]
    if not readable:
        return torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.int64), unreadable
    images = np.stack([image for image, _ in readable]).transpose(0, 3, 1, 2)
    labels = torch.tensor([label for _, label in readable], dtype=torch.int64)
    return torch.from_numpy(np.ascontiguousarray(images)), labels, unreadable


def start_worker(_: int) -> None:
    """One thread per worker; Ctrl-C is for the main process to handle."""
    cv2.setNumThreads(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _BatchKeys:
    """The keys of every batch of an epoch; set ``epoch`` before iterating. Without a seed: in the data set's order."""

    def __init__(self, length: int, batch_size: int, sizes: tuple[int, ...], seed: int | None):
        self.length, self.batch_size, self.sizes, self.seed, self.epoch = length, batch_size, sizes, seed, 0

    def __len__(self):
        return math.ceil(self.length / self.batch_size)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        order = np.arange(self.length)
        if self.seed is not None:
            order = np.random.default_rng((self.seed, ORDER_STREAM, self.epoch)).permutation(self.length)
        for number in range(len(self)):
            size = batch_size_px(self.sizes, self.seed, self.epoch, number)
            batch = order[number * self.batch_size : (number + 1) * self.batch_size]
            yield [SampleKey(index, self.epoch, size) for index in batch.tolist()]


class _Batches:
    """What training and evaluation share: the loader, and the images left out."""

    def __init__(
        self, dataset: Dataset, config: DataConfig, *, batch_size: int, sizes: tuple[int, ...], seed: int | None = None
    ):
        self._keys, self._on_error = _BatchKeys(len(dataset), batch_size, sizes, seed), config.on_error
        self._left_out: set[str] = set()
        loader = DataLoader(
            dataset,
            batch_sampler=self._keys,
            num_workers=config.workers,
            collate_fn=collate,
            worker_init_fn=start_worker,
            persistent_workers=config.workers > 0,
            generator=torch.Generator(),  # leaves torch's own generator alone, with workers as without
        )
        # Workers end at once when their loader is freed, but only after 10 s when that falls to the garbage collector:
        # it takes their queues down first. Held from outside, the loader is never part of a garbage cycle.
        self._loader = [loader]
        weakref.finalize(self, self._loader.clear)

    def __len__(self):
        """Batches, the last incomplete one included."""
        return len(self._keys)

    @property
    def left_out(self) -> int:
        """How many unreadable images have been left out so far."""
        return len(self._left_out)

    def _iterate(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, labels, unreadable in self._loader[0]:
            for image in unreadable:
                self._leave_out(image)
            if len(labels):
                yield images, labels

    def _leave_out(self, image: Unreadable) -> None:
        if self._on_error == "fail":
            raise ValueError(
                f"cannot read image {image.path}: {image.reason}; "
                "repair or delete it, or use on_error skip to leave it out"
            )
        if image.path not in self._left_out:
            self._left_out.add(image.path)
            warnings.warn(f"left out unreadable image {image.path}: {image.reason}", stacklevel=4)


class TrainBatches(_Batches):
    """Batches of training images in an order that is drawn anew for each epoch; ``len()`` batches per epoch."""

    def epoch(self, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Images uint8 ``[B, C, H, W]``, all of one size per batch, and labels int64 ``[B]``, of epoch ``number``.

        Raises:
            ValueError: an image cannot be read and ``on_error`` is ``fail``; one line with its path. With ``skip`` the
                batch is smaller and a warning names the image, once.
        """
        self._keys.epoch = number
        return self._iterate()


class EvalBatches(_Batches):
    """Every image once, in the data set's order; raises and warns as ``TrainBatches.epoch`` does."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self._iterate()
