"""Extract features in a Ray Data pipeline: ``Decode`` reads images, ``Embed`` computes features.

Pass both classes to ``ray.data.Dataset.map_batches``. In each worker of a pool, Ray creates one
instance with one model, and calls it with batches of rows. An image that fails is a row with a
status and a reason. This module does not import Ray.
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
from visionattn.inference.image_reading import Sample
from visionattn.inference.image_run import read_as_asked
from visionattn.inference.inference_options import InferenceOptions, check, options_of_call
from visionattn.inference.model_opening import Opened, open_model, options_naming
from visionattn.models.patches import last_map, pooled

Rows = dict[str, np.ndarray]
"""A batch of Ray Data: columns by name."""
SAMPLE = "sample"
"""The column from ``Decode`` to ``Embed``: a pickled ``Sample``."""


class Stage:
    """Base of both stages: a model, its preprocessing options, and the column of images.

    Attributes:
        known: names of the options.
    """

    known = ("img_size", "fit", "max_patches", "bands", "value_range", "page", "level")

    def __init__(self, model: str | os.PathLike, column: str, how: dict[str, Any], **more: Any):
        which = options_naming(model)
        options = options_of_call(InferenceOptions, how, only=self.known, **which, **more)
        check(options)
        self.column, self.options = column, options
        self.opened: Opened = open_model(options, classifies=False)

    def read(self, rows: Rows) -> list[Sample]:
        """Read the images of rows, given as paths or as bytes of files."""
        if self.column not in rows:
            raise ValueError(f"expected the column {self.column}, got {', '.join(rows)}")
        given = list(rows[self.column])
        held = [isinstance(each, (bytes, bytearray, memoryview)) for each in given]
        listing = HeldImages([*map(bytes, given)]) if all(held) else ListedFiles(given)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # notes about one batch do not hold for others
            images = read_as_asked(self.options, self.opened, listing)
        if images.options.found and not self.opened.spec.range_found:
            # Do not guess the value range from one batch: other batches may differ. Such files fail
            images.options = replace(images.options, value_range=None, found=False)
        return [images[index] for index in range(len(images))]


class Decode(Stage):
    """Read and preprocess images for a model, on other CPUs than the model's.

    Args:
        model: a checkpoint of this package, or the name of a model with weights in timm. It decides
            the preprocessing; its weights are released.
        column: the column with paths that all nodes can open, or with the bytes of files.
        options: ``img_size``, ``fit``, ``max_patches``, ``bands``, ``value_range``, ``page`` and
            ``level``, as for ``visionattn.extract_features``.

    Raises:
        ValueError, FileNotFoundError: wrong model or options; one line.
        TypeError: there is no such option.
    """

    def __init__(self, model: str | os.PathLike, *, column: str = "path", **options: Any):
        super().__init__(model, column, options, device="cpu")
        self.opened = replace(self.opened, model=torch.nn.Identity())

    def __call__(self, rows: Rows) -> Rows:
        """Add ``sample`` (for ``Embed``), ``height``, ``width`` (0 if unknown), ``status`` ("ok" or
        "unreadable") and ``reason`` ("" if none) to rows; drop a column of bytes.
        """
        samples = self.read(rows)
        found = _without_bytes(rows, self.column) | _sizes(samples, "height", "width")
        found["status"] = np.array(["unreadable" if each.reason else "ok" for each in samples])
        found["reason"] = np.array([each.reason or "" for each in samples], object)
        return found | {SAMPLE: np.array([pickle.dumps(each) for each in samples], object)}


class Embed(Stage):
    """Compute the features of images that ``Decode`` has read; without ``Decode``, also read them.

    Args:
        model: as for ``Decode``, like all arguments that are not listed here.
        dense: return the last feature map ``[D, H, W]`` instead of one vector for each image.
        device: device of the model; ``auto``: the GPU that Ray assigns to the worker
            (``num_gpus=1``), if any.
        amp: mixed precision; ``auto``: bf16 if the device has bf16 units.
        threads: torch's threads; None: the number that Ray sets.

    Raises:
        ValueError, FileNotFoundError: wrong model or options; one line.
        TypeError: there is no such option.
    """

    known = (*Stage.known, "device", "amp")

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
        self.opened.check_features(dense=dense)

    def __call__(self, rows: Rows) -> Rows:
        """Add ``features``, ``height``, ``width``, ``input_height``, ``input_width`` (0 if
        unknown), ``status`` ("ok", "unreadable", "oom" or "nan") and ``reason`` to rows; drop
        ``sample`` and a column of bytes.

        Features are float32 ``[n, D]``, NaN for a failed image; with ``dense`` they are maps, of
        size 0 x 0 for a failed image. Consecutive images of one size form a batch.
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
        for index, value in enumerate(found):  # numpy would stack arrays of one shape
            maps[index] = value
        return maps


def _sizes(found: Sequence[Any], *names: str) -> Rows:
    """Return columns of sizes in pixels, 0 if unknown."""
    return {
        name: np.array([getattr(each, name) or 0 for each in found], np.int64) for name in names
    }


def _without_bytes(rows: Rows, column: str) -> Rows:
    """Return the columns without the image column if it holds the bytes of files."""
    first = next(iter(rows.get(column, ())), None)
    return {key: rows[key] for key in rows if key != column or not isinstance(first, bytes)}
