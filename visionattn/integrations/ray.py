"""Features as stages of a Ray Data pipeline: ``Decode`` reads images, ``Embed`` computes.

Both are classes for ``ray.data.Dataset.map_batches``: Ray makes one of them, with one model, in
each worker of a pool, gives it batches of rows, and starts it again elsewhere where a worker dies.
An image that fails is a row with a status and a reason. This module imports no Ray.
"""

import os
import warnings
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
DECODED = ("pixels", "pixels_shape", "pixels_type", "filled")
"""Columns from ``Decode`` to ``Embed``: bytes, their shape ``[C, H, W]`` and type, and how much of
the height and width the image fills.
"""


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
        """Add to rows the columns of ``DECODED``, ``height``, ``width`` (0 where unknown),
        ``status`` ("ok" or "unreadable") and ``reason`` ("" where there is none); a column of bytes
        goes.
        """
        samples = self.read(rows)
        kept = _without_bytes(rows, self.column)
        held = [
            np.empty((0, 0, 0), np.uint8) if sample.pixels is None else sample.pixels.numpy()
            for sample in samples
        ]
        pixels = np.empty(len(held), object)
        pixels[:] = [each.tobytes() for each in held]
        return kept | {
            "pixels": pixels,
            "pixels_shape": np.array([each.shape for each in held], np.int64),
            "pixels_type": np.array([each.dtype.name for each in held]),
            "filled": np.array([sample.present or (0, 0) for sample in samples], np.int64),
            "height": np.array([sample.height or 0 for sample in samples], np.int64),
            "width": np.array([sample.width or 0 for sample in samples], np.int64),
            "status": np.array(["unreadable" if each.reason else "ok" for each in samples]),
            "reason": np.array([sample.reason or "" for sample in samples], object),
        }


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
        where unknown), ``status`` ("ok", "unreadable", "oom" or "nan") and ``reason``; the columns
        of ``DECODED`` and a column of bytes go.

        Features are float32 ``[n, D]``, NaN where there are none, or maps, which have no places
        there. Images of one size that follow each other are computed as one batch.
        """
        samples = _decoded(rows) if DECODED[0] in rows else self.read(rows)
        names = [str(number) for number in range(len(samples))]
        compute, outcomes = last_map if self.dense else pooled, []
        for batch in batch_samples(iter(samples), max(1, len(samples))):
            outcomes += run_batch(
                self.opened, batch, names[len(outcomes) :][: len(batch)], compute, self.options.amp
            )
        sizes = ("height", "width", "input_height", "input_width")
        kept = _without_bytes(rows, self.column)
        found: Rows = {
            size: np.array([getattr(each, size) or 0 for each in outcomes], np.int64)
            for size in sizes
        }
        found["status"] = np.array([each.status for each in outcomes])
        found["reason"] = np.array([each.reason or "" for each in outcomes], object)
        found["features"] = self._features([each.value for each in outcomes])
        return {key: value for key, value in kept.items() if key not in DECODED} | found

    def _features(self, values: list[torch.Tensor | None]) -> np.ndarray:
        model: Any = self.opened.model
        if self.dense:
            maps = np.empty(len(values), object)
            nothing = np.empty((model.num_features, 0, 0), np.float32)
            for index, value in enumerate(values):
                maps[index] = nothing if value is None else value.numpy()
            return maps
        nothing = np.full(model.head_hidden_size, np.nan, np.float32)
        rows = [nothing if value is None else value.numpy() for value in values]
        return np.stack(rows) if rows else nothing[None][:0]


def _without_bytes(rows: Rows, column: str) -> Rows:
    """Return the columns but that of the bytes of files, which nobody needs any more."""
    first = next(iter(rows.get(column, ())), None)
    return {key: rows[key] for key in rows if key != column or not isinstance(first, bytes)}


def _decoded(rows: Rows) -> list[Sample]:
    """Return the samples that ``Decode`` put into rows."""
    samples = []
    for index, status in enumerate(rows["status"]):
        sample = Sample(int(rows["height"][index]) or None, int(rows["width"][index]) or None)
        samples.append(sample)
        if status != "ok":
            sample.reason = str(rows["reason"][index])
            continue
        kind = np.dtype(str(rows["pixels_type"][index]))
        shape = tuple(int(side) for side in rows["pixels_shape"][index])
        pixels = np.frombuffer(bytearray(rows["pixels"][index]), kind).reshape(shape)
        sample.pixels = torch.from_numpy(pixels)
        sample.present = tuple(int(side) for side in rows["filled"][index])
    return samples
