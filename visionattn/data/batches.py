"""Loaders whose randomness depends on neither workers nor order, and what an unreadable image does.

This module owns the order and the sizes of batches. It knows data sets only as
``dataset[SampleKey]`` and the streams of ``streams.py``. Images leave as uint8 ``[B, C, H, W]``;
``DataSpec.prepare`` makes the model's input of them on the device.
"""

import math
import os
import random
import signal
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import cv2
import numpy as np
import torch
from einops import rearrange
from torch.utils.data import DataLoader, Dataset

from visionattn.data.config import DataConfig

Item = TypeVar("Item")

# Each use of randomness has a stream of its own, (seed, stream, epoch, number); the canvases own 0,
# 1 and 2.
ORDER_STREAM, SIZE_STREAM = 10, 11
AUGMENT_STREAM, STEP_STREAM = 12, 13


class SampleKey(NamedTuple):
    """What a batch sampler yields and a data set's ``__getitem__`` takes. With the seed it decides
    the sample.
    """

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
    """Return the size in pixels of the images of one batch: one of ``sizes``, drawn by seed, epoch
    and batch number.
    """
    if len(sizes) == 1:
        return sizes[0]
    return sizes[np.random.default_rng((seed, SIZE_STREAM, epoch, number)).integers(len(sizes))]


def seed_batch(seed: int, epoch: int, number: int, rank: int = 0) -> None:
    """Seed torch's, numpy's and Python's generators for one batch of one process of the training.

    Dropout, drop path and mixing then draw the same after a kill and a resumption, whatever was
    drawn before. Mixing draws from numpy's generator, which is the same on all processes; dropout
    draws from torch's, which is not.
    """
    states, own = (
        np.random.SeedSequence((seed, STEP_STREAM, epoch, number, each)).generate_state(8)
        for each in (0, rank)
    )
    torch.manual_seed(int(own[0]) << 32 | int(own[1]))
    np.random.seed(states[2:6])
    random.seed(int(states[6]) << 32 | int(states[7]))


def share(keys: Sequence[Item], rank: int, size: int, *, pairs: bool) -> list[Item]:
    """Return the part of a batch that one of several processes takes; the parts are disjoint and
    together are the batch.

    Args:
        keys: those of the batch, in its order.
        rank: the number of the process.
        size: how many processes there are; where there are more of them than keys, some parts are
            empty.
        pairs: keep each key with the one opposite in the batch, so that both are opposite in the
            part too. The one in the middle of a batch of odd length comes last in its part.
    """
    if not pairs:
        return list(keys[rank * len(keys) // size : (rank + 1) * len(keys) // size])
    half = len(keys) // 2
    low, high = rank * half // size, (rank + 1) * half // size
    part = [*keys[low:high], *keys[2 * half - high : 2 * half - low]]
    return [*part, *keys[2 * half :]] if rank == 0 else part


def collate(samples: list) -> tuple[torch.Tensor, torch.Tensor, list[Unreadable]]:
    """Stack the readable samples into uint8 ``[B, C, H, W]`` and int64 ``[B]``, and list the
    others; B may be 0.
    """
    unreadable = [sample for sample in samples if isinstance(sample, Unreadable)]
    readable = [sample for sample in samples if not isinstance(sample, Unreadable)]
    if not readable:
        return torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.int64), unreadable
    images = rearrange([image for image, _ in readable], "b h w c -> b c h w")
    labels = torch.tensor([label for _, label in readable], dtype=torch.int64)
    return torch.from_numpy(np.ascontiguousarray(images)), labels, unreadable


def start_worker(_: int) -> None:
    """Give a worker one thread, leave Ctrl-C to the main process, and let SIGTERM end the worker
    silently.
    """
    cv2.setNumThreads(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


class _BatchKeys:
    """Yield the keys of the batches of an epoch, once ``epoch`` and ``start`` are set. Without a
    seed they come in the data set's order.
    """

    def __init__(self, length: int, batch_size: int, sizes: tuple[int, ...], seed: int | None):
        self.length, self.batch_size = length, batch_size
        self.sizes, self.seed = sizes, seed
        self.epoch = self.start = 0
        self.part: Callable[[list[int]], list[int]] = list

    def __len__(self):
        return math.ceil(self.length / self.batch_size)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        order = np.arange(self.length)
        if self.seed is not None:
            order = np.random.default_rng((self.seed, ORDER_STREAM, self.epoch)).permutation(
                self.length
            )
        for number in range(self.start, len(self)):
            size = batch_size_px(self.sizes, self.seed, self.epoch, number)
            batch = order[number * self.batch_size : (number + 1) * self.batch_size]
            yield [SampleKey(index, self.epoch, size) for index in self.part(batch.tolist())]


class _Batches:
    """Hold what training and evaluation share: the loader, and the paths of the images left out,
    ``unreadable``.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: DataConfig,
        *,
        batch_size: int,
        sizes: tuple[int, ...],
        seed: int | None = None,
    ):
        self._keys = _BatchKeys(len(dataset), batch_size, sizes, seed)
        self._on_error = config.on_error
        self.unreadable: set[str] = set()
        loader = DataLoader(
            dataset,
            batch_sampler=self._keys,
            num_workers=config.workers,
            collate_fn=collate,
            worker_init_fn=start_worker,
            persistent_workers=config.workers > 0,
            # leaves torch's own generator alone, with workers as without
            generator=torch.Generator(),
        )
        # Workers end at once when their loader is freed, but only after 10 s when that falls to the
        # garbage collector: it takes their queues down first. Held from outside, the loader is
        # never part of a garbage cycle.
        self._loader = [loader]
        weakref.finalize(self, self._loader.clear)

    def __len__(self):
        """Count the batches, the last incomplete one included."""
        return len(self._keys)

    def divide(self, rank: int, size: int, *, pairs: bool = False) -> None:
        """Give only the part of each batch that one of ``size`` processes takes, as ``share``
        divides it.
        """
        self._keys.part = partial(share, rank=rank, size=size, pairs=pairs)

    @property
    def left_out(self) -> int:
        """Count the unreadable images that have been left out so far."""
        return len(self.unreadable)

    def _iterate(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, labels, unreadable in self._loaded():
            for image in unreadable:
                self._leave_out(image)
            yield images, labels

    def _loaded(self) -> Iterator[tuple]:
        """Yield the loader's batches; a worker that dies while it hands one over raises the error
        that torch raises for other deaths.
        """
        try:
            yield from self._loader[0]
        except (ConnectionError, EOFError) as error:
            if isinstance(error, EOFError) and str(error):
                raise  # of a file: that of a broken connection has no words
            raise RuntimeError("DataLoader worker ended amid a batch") from error

    def _leave_out(self, image: Unreadable) -> None:
        if self._on_error == "fail":
            raise ValueError(
                f"cannot read image {image.path}: {image.reason}; repair or delete it, or use "
                "on_error skip to leave it out"
            )
        if image.path not in self.unreadable:
            self.unreadable.add(image.path)
            warnings.warn(f"left out unreadable image {image.path}: {image.reason}", stacklevel=4)


class TrainBatches(_Batches):
    """Give batches of training images in an order that is drawn anew for each epoch; ``len()``
    counts the batches of one epoch.
    """

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches of epoch ``number``: images uint8 ``[B, C, H, W]``, all of one size per
        batch, and labels int64 ``[B]``.

        Args:
            number: the epoch, from 0.
            start: the batch to begin with; no image of those before it is read.

        Raises:
            ValueError: an image cannot be read and ``on_error`` is ``fail``; one line with its
                path. With ``skip`` the batch is smaller, B may be 0, and a warning names the image,
                once.
        """
        self._keys.epoch, self._keys.start = number, start
        return self._iterate()


class EvalBatches(_Batches):
    """Give every image once, in the data set's order, with the errors and warnings of
    ``TrainBatches.epoch``.
    """

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (batch for batch in self._iterate() if len(batch[1]))
