"""Data loaders whose randomness depends on neither workers nor order, and the handling of
unreadable images.

This module owns the order and the sizes of batches. It uses datasets only through
``dataset[SampleKey]`` and, if images differ in size, ``dataset.canvases(geometry)``. Batches hold
the integers of files, or shares of a value range; ``DataSpec.prepare`` turns them into the model's
input on the device.
"""

import os
import random
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import Queue
from typing import NamedTuple, TypeVar

import cv2
import numpy as np
import torch
from einops import rearrange
from torch.utils.data import DataLoader, Dataset

from visionattn.cli.files import first_line
from visionattn.data.buckets import Buckets
from visionattn.data.data_config import DataConfig
from visionattn.data.geometry import Geometry, Size

Key = TypeVar("Key")

# Each use of randomness has its own stream, (seed, stream, epoch, number); streams 0, 1 and 2
# belong to canvases.
ORDER_STREAM, SIZE_STREAM = 10, 11
AUGMENT_STREAM, STEP_STREAM = 12, 13
BATCH_STREAM = 14
LISTED = 10
"""Maximum number of unreadable images that an error names."""


class SampleKey(NamedTuple):
    """A key from a batch sampler for a dataset's ``__getitem__``. Together with the seed it
    determines the sample.
    """

    index: int
    epoch: int
    geometry: Geometry
    """Preprocessing that brings the image to the model's input size."""
    draw: int | None = None
    """Position in the epoch if images recur in it, so that their augmentation differs. None: each
    image occurs once.
    """


class Item(NamedTuple):
    """An image as a model sees it."""

    pixels: np.ndarray
    """uint8 ``[H, W, C]``, or float32 in [0, 1]."""
    label: int | np.ndarray
    """The class of the image, its labels, float32 ``[outputs]``, or the class of each pixel, uint8
    ``[H, W]``.
    """
    present: Size
    """Height and width of the filled part in pixels, from the top left; the rest is absent."""


class Batch(NamedTuple):
    """Images of one size; B may be 0."""

    images: torch.Tensor
    """uint8 ``[B, C, H, W]``, or float32 in [0, 1]."""
    labels: torch.Tensor
    """int64 ``[B]``, the classes of images; float32 ``[B, outputs]``, their labels; or uint8
    ``[B, H, W]``, the classes of their pixels.
    """
    sizes: torch.Tensor | None = None
    """int64 ``[B, 2]``: height and width of each image's filled part in pixels, from the top left.
    None: all are filled.
    """
    weights: torch.Tensor | None = None
    """Weights of the images in the training loss, float32 ``[B]``; None: 1."""


@dataclass(frozen=True)
class Unreadable:
    """A dataset's result for an image that cannot be read."""

    path: str
    reason: str
    refused: bool = False
    """Whether the file is intact and only needs other options or a package, named in the reason."""

    def __str__(self) -> str:
        way_out = (
            "--data.on_error skip ignores it"
            if self.refused
            else "repair or delete it, or pass --data.on_error skip"
        )
        return f"cannot read image {self.path}: {self.reason}; {way_out}"


def batch_geometry(
    choices: Sequence[Geometry], seed: int | None, epoch: int, number: int
) -> Geometry:
    """Return the geometry of one batch: one of ``choices``, drawn by seed, epoch and number."""
    if len(choices) == 1:
        return choices[0]
    draw = np.random.default_rng((seed, SIZE_STREAM, epoch, number))
    return choices[draw.integers(len(choices))]


def seed_batch(seed: int, epoch: int, number: int, rank: int = 0) -> None:
    """Seed torch's, numpy's and Python's generators for one batch of one training process.

    Dropout, drop path and mixing then draw the same after a kill and a resume, whatever was drawn
    before. Mixing draws from numpy's generator, which is equal on all processes; dropout draws from
    torch's, which is not.
    """
    states, own = (
        np.random.SeedSequence((seed, STEP_STREAM, epoch, number, each)).generate_state(8)
        for each in (0, rank)
    )
    torch.manual_seed(int(own[0]) << 32 | int(own[1]))
    np.random.seed(states[2:6])
    random.seed(int(states[6]) << 32 | int(states[7]))


def balanced_order(labels: np.ndarray, rng: np.random.Generator, crops: int = 1) -> np.ndarray:
    """Return ``crops`` times as many random indices of images as there are ``labels``, with each
    class equally often.

    The images of a class occur equally often, too. If a number does not divide, random classes or
    images occur once more.
    """
    _, sizes = np.unique(labels, return_counts=True)
    members = np.split(np.argsort(labels, kind="stable"), sizes.cumsum()[:-1])
    counts = np.full(len(sizes), crops * len(labels) // len(sizes))
    counts[rng.permutation(len(sizes))[: crops * len(labels) % len(sizes)]] += 1
    # np.resize repeats the shuffled images of a class, or cuts them.
    drawn = [np.resize(rng.permutation(own), n) for own, n in zip(members, counts, strict=True)]
    return rng.permutation(np.concatenate(drawn))


def share(keys: Sequence[Key], rank: int, size: int, *, pairs: bool) -> list[Key]:
    """Return the part of a batch for one of several processes; the parts are disjoint and together
    form the batch.

    Args:
        keys: keys of the batch, in order.
        rank: index of the process.
        size: number of processes; if there are more than keys, some parts are empty.
        pairs: keep each key with the key opposite in the batch, so that both are opposite in the
            part too. The middle key of a batch of odd length comes last in its part.
    """
    if not pairs:
        return list(keys[rank * len(keys) // size : (rank + 1) * len(keys) // size])
    half = len(keys) // 2
    low, high = rank * half // size, (rank + 1) * half // size
    part = [*keys[low:high], *keys[2 * half - high : 2 * half - low]]
    return [*part, *keys[2 * half :]] if rank == 0 else part


def collate(samples: Sequence[Item | Unreadable]) -> tuple[Batch, list[Unreadable]]:
    """Stack the readable samples into a batch, and list the others."""
    unreadable = [sample for sample in samples if isinstance(sample, Unreadable)]
    readable = [sample for sample in samples if not isinstance(sample, Unreadable)]
    if not readable:
        empty = Batch(torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
        return empty, unreadable
    stacked = rearrange(same_scale([item.pixels for item in readable]), "b h w c -> b c h w")
    labels = torch.from_numpy(np.stack([np.asarray(item.label) for item in readable]))
    sizes = None
    if any(item.present != item.pixels.shape[:2] for item in readable):
        sizes = torch.tensor([item.present for item in readable], dtype=torch.int64)
    images = torch.from_numpy(np.ascontiguousarray(stacked))
    return Batch(images, labels, sizes), unreadable


class BatchedDataset(Dataset):
    """A dataset that returns batches: by keys, the readable images, the others, and the indices of
    the readable ones.
    """

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __getitem__(self, keys: list[SampleKey]) -> tuple[Batch, list[Unreadable], list[int]]:
        samples = [self.dataset[key] for key in keys]
        pairs = zip(keys, samples, strict=True)
        numbers = [key.index for key, sample in pairs if not isinstance(sample, Unreadable)]
        return *collate(samples), numbers


def same_scale(images: list[np.ndarray]) -> list[np.ndarray]:
    """Return 8-bit images unchanged, or convert them if other images are shares of a range."""
    if len({image.dtype for image in images}) == 1:
        return images
    return [
        image.astype(np.float32) / 255 if image.dtype == np.uint8 else image for image in images
    ]


def start_worker(_: int) -> None:
    """Set up a loading process: one thread, Ctrl-C ignored, silent end on SIGTERM, and an end if it
    cannot pass on its data.
    """
    cv2.setNumThreads(0)
    # The queue would print a traceback and drop the batch, and the main process would wait forever.
    Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


def _end_worker(error: Exception, _: object) -> None:
    """End a loading process with a line that gives the reason; the main process then ends with its
    own line.
    """
    print(
        f"note: a data loader process cannot pass on its images: {first_line(error)}; provide "
        "more shared memory (/dev/shm), or load in the main process (workers 0)",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


class _BatchKeys:
    """Yield the keys of an epoch's batches, once ``epoch`` and ``start`` are set. Without a seed
    they follow the dataset's order.

    Args:
        length: number of images.
        batch_size: images per batch, if all have one size.
        choices: geometries; each batch has one.
        seed: seed of the order; None: the dataset's order.
        canvases: input size of each image under each geometry, ``[length, geometries, 2]``, if
            images differ in size; else None.
        batch_patches: maximum number of patches per batch, if images differ in size.
        labels: classes of the images, ``[length]``, to draw each class equally often; None: each
            image once. It needs a seed.
        crops: number of times that each image occurs per epoch.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        choices: tuple[Geometry, ...],
        seed: int | None,
        canvases: np.ndarray | None = None,
        batch_patches: int | None = None,
        labels: np.ndarray | None = None,
        crops: int = 1,
    ):
        self.length, self.crops, self.batch_size = length, crops, batch_size
        self.choices, self.seed = choices, seed
        self.epoch = self.start = 0
        self.part: Callable[[list[SampleKey]], list[SampleKey]] = list
        self.canvases, self.labels = canvases, labels
        self.buckets = (
            None if canvases is None else Buckets.of(canvases, choices, batch_size, batch_patches)
        )
        self.count = len(self.batches())  # with sampler and many sizes, of the first epoch

    def __len__(self):
        return self.count

    def batches(self) -> Sequence[np.ndarray]:
        """Return the indices of the images of each batch of the epoch."""
        order = np.arange(self.length * self.crops)
        if self.seed is not None:
            rng = np.random.default_rng((self.seed, ORDER_STREAM, self.epoch))
            if self.labels is None:
                order = rng.permutation(len(order)) % self.length
            else:
                order = balanced_order(self.labels, rng, self.crops)
        if self.buckets is None:
            size = self.batch_size
            return [order[first : first + size] for first in range(0, len(order), size)]
        filled = self.buckets.fill(order)
        if self.seed is None:
            return filled
        # The last batch of each grid is small; shuffle so that they do not all come at the end.
        shuffled = np.random.default_rng((self.seed, BATCH_STREAM, self.epoch))
        return [filled[number] for number in shuffled.permutation(len(filled))]

    def shapes(self) -> np.ndarray:
        """Return the number of images of each batch of the epoch, and their input height and width
        in pixels, int64 ``[batches, 3]``; 0 pixels if unknown.
        """
        found = []
        for number, batch in enumerate(self.batches()):
            geometry = batch_geometry(self.choices, self.seed, self.epoch, number)
            if self.canvases is None:
                size = geometry.canvas
            else:
                size = self.canvases[batch[0], self.choices.index(geometry)].tolist()
            found.append((len(batch), *size))
        return np.array(found, np.int64).reshape(-1, 3)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        place = 0
        for number, batch in enumerate(self.batches()):
            if number >= self.start:
                geometry = batch_geometry(self.choices, self.seed, self.epoch, number)
                keys = [SampleKey(index, self.epoch, geometry) for index in batch.tolist()]
                if self.labels is not None or self.crops > 1:
                    keys = [key._replace(draw=place + i) for i, key in enumerate(keys)]
                yield self.part(keys)
            place += len(batch)


class _Batches:
    """Common part of training and evaluation batches: the loader, and ``unreadable``, the paths of
    skipped images.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: DataConfig,
        *,
        batch_size: int,
        choices: tuple[Geometry, ...],
        seed: int | None = None,
        labels: np.ndarray | None = None,
        crops: int = 1,
    ):
        # Either the geometry fixes one size for all images, or images differ in size.
        canvases = None
        if choices[0].canvas is None:
            canvases = np.stack([dataset.canvases(each) for each in choices], 1)  # type: ignore[attr-defined]
        self._keys = _BatchKeys(
            len(dataset), batch_size, choices, seed, canvases, config.batch_patches, labels, crops
        )
        self._on_error, self.dataset = config.on_error, dataset
        self.unreadable: set[str] = set()
        if self._keys.buckets is not None:
            # Unreadable images are known here, before the others are used.
            unseen = self._keys.buckets.unseen.tolist()
            samples = [dataset[SampleKey(index, 0, choices[0])] for index in unseen]
            unreadable = [sample for sample in samples if isinstance(sample, Unreadable)]
            if self._on_error == "fail" and len(unreadable) > 1:
                others = ", ".join(image.path for image in unreadable[1:LISTED])
                more = ", ..." * (len(unreadable) > LISTED)
                raise ValueError(f"{unreadable[0]}; {len(unreadable) - 1} more: {others}{more}")
            for image in unreadable:
                self._leave_out(image)
        loader = DataLoader(
            BatchedDataset(dataset),
            batch_size=None,
            sampler=self._keys,
            num_workers=config.workers,
            worker_init_fn=start_worker,
            persistent_workers=config.workers > 0,
            # keeps torch's own generator unchanged, with or without workers
            generator=torch.Generator(),
        )
        # Loading processes end at once when their loader is freed. If the garbage collector frees
        # it, they end only after 10 s, because it deletes their queues first. This outside
        # reference keeps the loader out of garbage cycles.
        self._loader = [loader]
        weakref.finalize(self, self._loader.clear)

    def __len__(self):
        """Return the number of batches, including the last incomplete one."""
        return len(self._keys)

    def divide(self, rank: int, size: int, *, pairs: bool = False) -> None:
        """Restrict each batch to the part of one of ``size`` processes, as divided by ``share``."""
        self._keys.part = partial(share, rank=rank, size=size, pairs=pairs)

    def shapes(self) -> np.ndarray:
        """Return number of images, height and width of each batch, over all processes, as
        ``_BatchKeys.shapes``.
        """
        return self._keys.shapes()

    @property
    def left_out(self) -> int:
        """Return the number of unreadable images skipped so far."""
        return len(self.unreadable)

    def numbered(self) -> Iterator[tuple[Batch, list[int]]]:
        """Yield the batches with the indices of their images in the dataset."""
        for batch, unreadable, numbers in self._loaded():
            for image in unreadable:
                self._leave_out(image)
            yield batch, numbers

    def _loaded(self) -> Iterator[tuple]:
        """Yield the loader's batches; if a loading process dies while it sends one, raise the same
        error as for its other deaths.
        """
        try:
            yield from self._loader[0]
        except (ConnectionError, EOFError) as error:
            if isinstance(error, EOFError) and str(error):
                raise  # an error of a file; a broken connection has no message
            raise RuntimeError("DataLoader worker ended amid a batch") from error

    def _leave_out(self, image: Unreadable) -> None:
        if self._on_error == "fail":
            raise ValueError(str(image))
        if image.path not in self.unreadable:
            self.unreadable.add(image.path)
            warnings.warn(f"skipped unreadable image {image.path}: {image.reason}", stacklevel=4)


class TrainBatches(_Batches):
    """Batches of training images in a new random order per epoch; ``len()`` counts the batches of
    one epoch.
    """

    weights: torch.Tensor | None = None
    """Weight of each image of the dataset in the loss, float32 ``[n]``; None: 1."""

    def epoch(self, number: int, *, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of epoch ``number``.

        Args:
            number: the epoch, from 0.
            start: index of the first batch; images of earlier batches are not read.

        Raises:
            ValueError: an image cannot be read and ``on_error`` is ``fail``; one line with its
                path. With ``skip`` the batch is smaller, B may be 0, and a warning names the image
                once.
        """
        self._keys.epoch, self._keys.start = number, start
        if self.weights is None:
            return (batch for batch, _ in self.numbered())
        weights = self.weights
        return (batch._replace(weights=weights[numbers]) for batch, numbers in self.numbered())


class EvalBatches(_Batches):
    """Batches with every image once, with the errors and warnings of ``TrainBatches.epoch``.

    They follow the dataset's order, or the order in which batches fill if images differ in size.
    """

    numbers: list[int] | None = None
    """Dataset indices of the images yielded since the last start, in order."""

    def __iter__(self) -> Iterator[Batch]:
        self.numbers = given = []
        for batch, numbers in self.numbered():
            given += numbers
            if len(batch.labels):
                yield batch
