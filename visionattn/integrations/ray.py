"""Features as stages of a Ray Data pipeline: ``Decode`` reads images, ``Embed`` computes.

Both are classes for ``ray.data.Dataset.map_batches``: Ray makes one of them, with one model, in
each worker of a pool, gives it batches of rows, and starts it again elsewhere where a worker dies.
An image that fails is a row with a status and a reason. This module imports no Ray.
"""

import os
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from visionattn.inference.image_batches import batch_samples, run_batch
from visionattn.inference.image_listing import HeldImages, ListedFiles
from visionattn.inference.image_reading import ReadImages, Sample
from visionattn.inference.inference_options import InferenceOptions, check, options_of_call
from visionattn.inference.model_opening import Opened, open_model
from visionattn.models.patches import last_map, pooled

Rows = dict[str, np.ndarray]
"""A batch as Ray Data gives it: columns by name."""
SAMPLE = "sample"
"""The column from ``Decode`` to ``Embed``: a pickled ``Sample``."""


class _Reader:
    """What both stages are told: a model, how it sees images, and where they are."""

    def __init__(self, model: str | os.PathLike, column: str, how: dict[str, Any], **more: Any):
        path = os.fspath(model)
        which = (
            {"checkpoint": path} if os.path.isfile(path) else {"model": path, "pretrained": True}
        )
        options = options_of_call(InferenceOptions, how, **which, **more)
        check(options)
        self.column, self.options = column, options
        self.opened: Opened = open_model(options, classifies=False)

    def read(self, rows: Rows) -> list[Sample]:
        """Read the images of rows: files at paths, or the bytes of files."""
        if self.column not in rows:
            raise ValueError(f"rows have no column {self.column}; there are {', '.join(rows)}")
        given = list(rows[self.column])
        held = [isinstance(each, (bytes, bytearray, memoryview)) for each in given]
        listing = HeldImages([*map(bytes, given)]) if all(held) else ListedFiles(given)
        spec = self.opened.spec
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is found in a batch holds for no other
            images = ReadImages(listing, spec, self.opened.geometry)
        if images.options.found and not spec.range_found:
            # A range of values that this batch has, and another batch has not: such files fail.
            images.options = replace(images.options, value_range=None, found=False)
        return [images[index] for index in range(len(images))]


class Decode(_Reader):
    """Read images to the pixels that a model takes, on processors beside those that compute.

    Args:
        model: a checkpoint of ours, or the name of a model whose weights timm has: what decides how
            images are read. Its weights are let go.
        column: the column of paths, which all nodes can open, or of the bytes of files.
        options: ``img_size``, ``fit``, ``max_patches``, ``bands``, ``value_range`` and ``page``, as
            ``visionattn.extract_features`` takes them.

    Raises:
        ValueError, FileNotFoundError: model or options are wrong; one line.
    """

    def __init__(self, model: str | os.PathLike, *, column: str = "path", **options: Any):
        super().__init__(model, column, options | {"device": "cpu"})
        self.opened = replace(self.opened, model=torch.nn.Identity())

    def __call__(self, rows: Rows) -> Rows:
        """Add to rows ``sample`` (for ``Embed``), ``height``, ``width`` (0 where unknown),
        ``status`` ("ok" or "unreadable") and ``reason`` ("" where there is none); a column of bytes
        is dropped.
        """
        samples = self.read(rows)
        found = _without_bytes(rows, self.column) | _sizes(samples, "height", "width")
        found["status"] = np.array(["unreadable" if each.reason else "ok" for each in samples])
        found["reason"] = np.array([each.reason or "" for each in samples], object)
        return found | {SAMPLE: np.array([pickle.dumps(each) for each in samples], object)}


class Embed(_Reader):
    """Compute the features of images, which ``Decode`` has read or this stage reads itself.

    Args:
        model: as for ``Decode``, and likewise the arguments that are not named here.
        dense: the last feature map, ``[D, H, W]``, instead of one vector for each image.
        device: where it computes; ``auto`` takes the GPU that Ray gives the worker, where it gives
            one (``num_gpus=1``).
        amp: automatic mixed precision; ``auto``: bf16 where the device multiplies it.
        threads: of torch; None: as many as Ray says.

    Raises:
        ValueError, FileNotFoundError: model or options are wrong; one line.
    """

    def __init__(
        self,
        model: str | os.PathLike,
        *,
        column: str = "path",
        dense: bool = False,
        threads: int | None = None,
        **options: Any,
    ):
        super().__init__(model, column, options, threads=threads)
        self.dense = dense
        if not dense:
            self.opened.check_pooled()

    def __call__(self, rows: Rows) -> Rows:
        """Add to rows ``features``, ``height``, ``width``, ``input_height``, ``input_width`` (0
        where unknown), ``status`` ("ok", "unreadable", "oom" or "nan") and ``reason``; ``sample``
        and a column of bytes are dropped.

        Features are float32 ``[n, D]``, NaN where there are none, or maps, which have no places
        there. Images of one size that follow each other are computed as one batch.
        """
        decoded = SAMPLE in rows
        samples = list(map(pickle.loads, rows[SAMPLE])) if decoded else self.read(rows)
        names = [str(number) for number in range(len(samples))]
        compute, outcomes = last_map if self.dense else pooled, []
        for batch in batch_samples(iter(samples), max(1, len(samples))):
            own = names[len(outcomes) :][: len(batch)]
            outcomes += run_batch(self.opened, batch, own, compute, self.options.amp)
        found = {key: rows[key] for key in _without_bytes(rows, self.column) if key != SAMPLE}
        found |= _sizes(outcomes, "height", "width", "input_height", "input_width")
        found["status"] = np.array([each.status for each in outcomes])
        found["reason"] = np.array([each.reason or "" for each in outcomes], object)
        return found | {"features": self._features([each.value for each in outcomes])}

    def _features(self, values: list[torch.Tensor | None]) -> np.ndarray:
        model: Any = self.opened.model
        nothing = np.full(model.head_hidden_size, np.nan, np.float32)
        if self.dense:
            nothing = np.empty((model.num_features, 0, 0), np.float32)
        found = [nothing if value is None else value.numpy() for value in values]
        if not self.dense:
            return np.stack(found) if found else nothing[None][:0]
        maps = np.empty(len(found), object)
        for index, value in enumerate(found):  # arrays of one shape would become one array
            maps[index] = value
        return maps


def _sizes(found: Sequence[Any], *names: str) -> Rows:
    """Return columns of sizes in pixels, 0 where unknown."""
    return {
        name: np.array([getattr(each, name) or 0 for each in found], np.int64) for name in names
    }


def _without_bytes(rows: Rows, column: str) -> Rows:
    """Return the columns except a column of the bytes of files, which nobody needs any more."""
    first = next(iter(rows.get(column, ())), None)
    return {key: rows[key] for key in rows if key != column or not isinstance(first, bytes)}
