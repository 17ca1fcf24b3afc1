"""Images from a stream of shards (webdataset), through timm's reader.

A stream has no indices: the batch of an image, and its augmentation, depend on the number of
workers, and timm's reader skips unreadable images. Everything else is as in ``batches.py``.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from timm.data.readers import create_reader
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from visionattn.cli.untrusted import refuse
from visionattn.data.batches import (
    ORDER_STREAM,
    Batch,
    SampleKey,
    batch_geometry,
    collate,
    start_worker,
)
from visionattn.data.folder_walk import LeftOut, by_split, listed
from visionattn.data.formats.reader import require
from visionattn.data.geometry import Geometry
from visionattn.data.images import see_array

if TYPE_CHECKING:
    from visionattn.data.augment import Augment


@dataclass(frozen=True)
class Shards:
    """One split of a folder of shards, as described by its ``_info.json``; ``len()`` images."""

    root: str
    split: str
    shard_lengths: tuple[int, ...]
    training: bool
    num_classes: int
    seed: int
    augment: "Augment | None"

    def __len__(self):
        return sum(self.shard_lengths)

    def order_seed(self, epoch: int) -> int:
        """Return the shuffling seed for timm's reader."""
        return int(np.random.SeedSequence((self.seed, ORDER_STREAM, epoch)).generate_state(1)[0])

    def reader(self, batch_size: int, epoch: int):
        """Return timm's reader; in training it shuffles, and repeats images to fill the last batch
        of each worker.
        """
        return create_reader(
            "wds/",
            root=self.root,
            split=self.split,
            is_training=self.training,
            batch_size=batch_size,
            seed=self.order_seed(epoch),
        )


def open_shards(
    root: str,
    *,
    num_classes: int | None,
    on_error: str,
    seed: int,
    augment: "Augment | None",
    judged: bool = False,
) -> dict[str, Shards]:
    """Open ``wds/<folder or address>``: shards of ``<key>.jpg|png|webp`` and ``<key>.cls``, listed
    in ``_info.json``.

    Args:
        root: the folder holds ``_info.json`` with, per split, name, num_samples, filenames and
            shard_lengths.
        num_classes: number of classes, which a stream does not state.
        on_error: must be ``skip``, the behavior of timm's reader.
        seed: seed of the order and of ``augment``.
        augment: augmentation of the training images; None: none.
        judged: whether weights are evaluated on the images, so that splits may be missing.

    Raises:
        ValueError, FileNotFoundError: one line with the reason.
    """
    require("readers", "webdataset", what=f"data root {root}")
    refuse(
        (
            num_classes is None,
            f"the number of classes of data root {root} is unknown; pass --data.args.num_classes",
        ),
        (
            on_error != "skip",
            f"timm's reader of {root} skips unreadable images; pass --data.on_error skip",
        ),
    )
    # A folder is checked here, for a plain error; addresses and pipes are left to timm's reader.
    place = root.removeprefix("wds/")
    if (
        "://" not in place
        and not place.startswith("pipe:")
        and not (Path(place) / "_info.json").is_file()
    ):
        raise FileNotFoundError(
            f"no _info.json in {place}; expected timm's list of the shards of each split"
        )
    # timm has no public way to list the splits.
    from timm.data.readers.reader_wds import _load_info

    available = list(_load_info(place).get("splits", {}))
    splits = by_split(available, root)
    LeftOut([name for name in available if name not in splits.values()]).warn(root)
    for split in () if judged else ("train", "validation"):
        if split not in splits:
            raise ValueError(
                f"expected a {split} split in _info.json of {place}, got "
                f"{listed(available) or 'none'}"
            )
    return {
        split: Shards(
            place,
            name,
            create_reader("wds/", root=place, split=name).split_info.shard_lengths,
            split == "train",
            num_classes,
            seed,
            augment if split == "train" else None,
        )
        for split, name in splits.items()
    }


class _ShardBatches(IterableDataset):
    """Yield the batches of one epoch; each worker makes them from its own shards."""

    def __init__(self, shards: Shards, batch_size: int, choices: tuple[Geometry, ...], epoch: int):
        self.shards, self.batch_size = shards, batch_size
        self.choices, self.epoch = choices, epoch

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        shards = self.shards
        reader = shards.reader(self.batch_size, self.epoch)
        reader.set_loader_cfg(num_workers=step)
        number, batch = first, []
        for count, (image, label) in enumerate(reader):
            geometry = batch_geometry(self.choices, shards.seed, self.epoch, number)
            key = SampleKey(count * step + first, self.epoch, geometry)
            batch.append(see_array(np.asarray(image), label, key, shards.seed, shards.augment))
            if len(batch) == self.batch_size:
                yield collate(batch)
                number, batch = number + step, []
        if batch:
            yield collate(batch)


class _StreamBatches:
    """Common part of training and evaluation; there are at most as many workers as shards."""

    def __init__(
        self, shards: Shards, workers: int, *, batch_size: int, choices: tuple[Geometry, ...]
    ):
        if choices[0].canvas is None:
            raise ValueError(
                f"fit native needs image sizes, which the stream {shards.root} does not state; "
                "use fit pad, stretch or crop with img_size"
            )
        self.shards, self.batch_size = shards, batch_size
        self.choices = choices
        self.workers = min(workers, len(shards.shard_lengths))
        self.left_out = 0
        self.unreadable: set[str] = set()
        """Stays empty: timm's reader does not name the images that it skips."""

    def divide(self, rank: int, size: int, *, pairs: bool = False) -> None:
        """Raise ValueError for several processes, because the batch of an image depends on which
        process reads the shards.
        """
        if size > 1:
            raise ValueError(
                f"a stream of shards supports only one training process ({self.shards.root}); "
                "unpack it to a folder to train on several"
            )

    def shapes(self) -> np.ndarray:
        """Return number of images, height and width of each batch, ``[batches, 3]``, with equally
        many batches per size; the last batches count as full.
        """
        sizes = [choice.canvas for choice in self.choices]
        numbers = range(len(self))
        return np.array([(self.batch_size, *sizes[n % len(sizes)]) for n in numbers], np.int64)

    def _iterate(self, epoch: int) -> Iterator[Batch]:
        loader = DataLoader(
            _ShardBatches(self.shards, self.batch_size, self.choices, epoch),
            batch_size=None,
            num_workers=self.workers,
            worker_init_fn=start_worker,
            generator=torch.Generator().manual_seed(self.shards.order_seed(epoch)),
        )
        for batch, _ in loader:
            labels = batch.labels
            if labels.max() >= self.shards.num_classes or labels.min() < 0:
                raise ValueError(
                    f"expected labels 0 to {self.shards.num_classes - 1} (num_classes "
                    f"{self.shards.num_classes}), got {labels.max().item()} in {self.shards.root}"
                )
            yield batch


class StreamTrainBatches(_StreamBatches):
    """Batches of a stream, as ``batches.TrainBatches`` for indexed images."""

    def __len__(self):
        """Return the number of batches per epoch; images are repeated to fill each."""
        workers = max(1, self.workers)
        return workers * math.ceil(math.ceil(len(self.shards) / workers) / self.batch_size)

    def epoch(self, number: int, *, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of epoch ``number``.

        To reach batch ``start``, the earlier batches are read and dropped.
        """
        return islice(self._iterate(number), start, None)


class StreamEvalBatches(_StreamBatches):
    """Batches with every image once, as ``batches.EvalBatches``; the order depends on the number of
    workers.
    """

    numbers: None = None
    """A stream has no indices."""

    def __len__(self):
        """Return the number of batches, assuming no image is unreadable."""
        lengths, workers = self.shards.shard_lengths, max(1, self.workers)
        return sum(
            math.ceil(sum(lengths[worker::workers]) / self.batch_size) for worker in range(workers)
        )

    def __iter__(self) -> Iterator[Batch]:
        seen = 0
        for batch in self._iterate(0):
            seen += len(batch.labels)
            yield batch
        self.left_out = len(self.shards) - seen
        if self.left_out:
            warnings.warn(
                f"skipped {self.left_out} unreadable images of {self.shards.root}", stacklevel=2
            )
