"""The map of one image of any size in one file, by bands of rows: the work of ``visionattn features
--dense`` and of ``visionattn predict`` with a segmentation, where the output is a zarr, an ``.npy``
or a GeoTIFF.

This module owns which options such a map takes, and what is said of it. Maps are written by
``data/large``, and computed by ``models/large``.
"""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from visionattn.cli.files import Continued
from visionattn.data.geometry import pixels
from visionattn.data.large import open_sink
from visionattn.data.large.sink import SINKS, MapSink
from visionattn.inference.banded import Banding, folder_of
from visionattn.inference.bands import UnreadableImage, compute_bands, open_image_source
from visionattn.inference.feature_options import ExtractOptions, check
from visionattn.inference.forecast import sizes_read
from visionattn.inference.listing import find_images
from visionattn.inference.opening import Opened, open_model
from visionattn.inference.options import InferenceOptions
from visionattn.inference.predict import PredictOptions
from visionattn.inference.reading import ReadImages
from visionattn.inference.running import masks
from visionattn.inference.work import in_the_way
from visionattn.models.large.forward_bands import check_tiled
from visionattn.models.patches import last_map
from visionattn.models.segmentation import IGNORED

UNUSED = ("batch_size", "workers", "shard_images", "shard_mib", "shard", "engine", "probe", "data")
UNUSED += ("tiles", "overlap", "combine", "top_k")
"""Options that do nothing for the map of one image."""


def is_map(output: str | None, *, features: bool = False) -> bool:
    """Tell by the end of its name whether an output is the map of one image, of ``features`` or of
    classes of pixels: those in an ``.npy`` are an array ``[H, W]`` that ``inference/segment.py``
    writes.
    """
    suffix = Path(output or "").suffix.lower()
    return suffix in SINKS and (features or suffix != ".npy")


class MapOfImage:
    """Model, image and output, after all checks; nothing is written before ``run``.

    Args:
        options: of features or of masks, as ``parse_options`` returned them.

    Raises:
        ValueError, FileNotFoundError: something is wrong or in the way; one line.
    """

    def __init__(self, options: ExtractOptions | PredictOptions):
        dense = isinstance(options, ExtractOptions)
        if isinstance(options, ExtractOptions):
            check(options)
            if not options.dense:
                raise ValueError(
                    f"--output {options.output} is for the map of an image: add --dense, or name a "
                    "folder for features of images"
                )
        self._check_unused(options)
        assert options.output is not None
        self.options, self.output = options, Path(options.output)
        self.listing = find_images(options.images or [])
        if len(self.listing) > 1:
            raise ValueError(
                f"{self.output} holds the map of one image, and there are {len(self.listing)}; "
                "name a folder"
            )
        self.path = self.listing.name(0)
        check_apart(self.path, self.output)
        blocked = in_the_way(
            lambda: open_sink(self.output, overwrite=options.overwrite), self.output
        )
        self.opened: Opened = open_model(options, classifies=not dense)
        compute = last_map if dense else masks
        self.want = "dense" if dense else "masks"
        try:
            check_tiled(self.opened.model, self.want)
        except ValueError as error:
            raise ValueError(f"{self.output} is written band by band: {error}") from error
        self.images = ReadImages(
            self.listing,
            self.opened.spec,
            self.opened.geometry,
            options.max_pixels,
            level=options.level,
        )
        self.work = folder_of(self.opened, self.images, options)
        self.finished = self.work.is_finished(blocked)
        self.banding = Banding(self.opened, self.images, compute, options, self.work, always=True)
        self._check_size()

    def _check_unused(self, options: InferenceOptions) -> None:
        usual = type(options)()
        for key in UNUSED:
            if hasattr(options, key) and getattr(options, key) != getattr(usual, key):
                raise ValueError(
                    f"{key} does nothing for the map of one image, {options.output}; leave it out"
                )

    def _check_size(self) -> None:
        """Raise ValueError where the image is not seen at its own size, or cannot be read."""
        for size in sizes_read(self.images, 0, time.perf_counter):
            if not self.images.is_banded(*size) and min(size) >= max(self.images.geometry.patch_px):
                raise ValueError(
                    f"{self.path} of {pixels(size)} is seen {self.opened.geometry.describe()}, and "
                    f"{self.output} is for an image at its own size: --img-size native"
                )
        self.images.check_asked()
        if (reason := self.images[0].reason) is not None:
            raise ValueError(f"{self.path}: {reason}")

    def run(self, say: Callable[[str], None]) -> None:
        """Write the map, and say what came of it.

        Raises:
            ValueError: the image cannot be read to its end or gives numbers that are not finite;
                nothing is left behind. The disk has no room, or the memory is below one band;
                nothing was begun.
            Stopped: Ctrl-C, at a band; the same command goes on.
        """
        for note in self.opened.notes:
            say(note)
        if self.finished:
            with self.work:
                self._drop()
            say(f"{self.output} is whole")
            return
        with self.work:
            try:
                sink = self._write(say)
            except (UnreadableImage, NoMap) as error:
                self._drop()
                text = str(error)
                raise ValueError(text if self.path in text else f"{self.path}: {text}") from error
        say(f"{self.output}: {' x '.join(map(str, sink.shape))} {sink.sink.dtype}")

    def _write(self, say: Callable[[str], None]) -> "_Checked":
        options = self.options
        dtype = np.dtype(options.dtype) if isinstance(options, ExtractOptions) else None
        scale = self.opened.geometry.patch_px if self.want == "dense" else (1, 1)
        with open_image_source(self.images, 0) as source:
            size = pixels((source.height, source.width))
            say(f"{self.path} of {size} is computed band by band")
            given = dict(source=source, scale=scale, overwrite=options.overwrite, dtype=dtype)
            with open_sink(self.output, **given) as sink:
                checked = _Checked(sink, self.work.finish)
                compute_bands(
                    self.opened,
                    source,
                    checked,
                    want=self.want,
                    amp=options.amp,
                    say=say,
                    **self.work.options(0, self.banding.memory_bytes()),
                )
        return checked

    def _drop(self) -> None:
        """Delete what was begun."""
        self.work.drop(0)
        folder = self.output.suffix.lower() == ".zarr"
        begun = Continued.beside(self.output, folder=folder)
        shutil.rmtree(begun, ignore_errors=True) if folder else begun.unlink(missing_ok=True)


def check_apart(image: str, output: Path) -> None:
    """Raise ValueError where a map would replace the image that it is made of, or lie within it."""
    of_image, of_map = Path(os.path.realpath(image)), Path(os.path.realpath(output))
    if of_map == of_image or of_image in of_map.parents:
        raise ValueError(f"{output} would replace the image {image}; choose another output")


class NoMap(ValueError):
    """What came of an image is no map; the text says why."""


class _Checked:
    """A sink that takes finite numbers and classes alone."""

    def __init__(self, sink: MapSink, finishing: Callable[[], object]):
        """Take the sink, and what is called before the map has its name."""
        self.sink, self.finishing = sink, finishing
        self.shape: tuple[int, ...] = ()

    def begin(self, shape: tuple[int, int, int], dtype: np.dtype) -> None:
        self.shape = shape
        self.sink.begin(shape, dtype)

    def write(self, first_row: int, band: np.ndarray) -> None:
        bad = ~np.isfinite(band) if band.dtype.kind == "f" else band == IGNORED
        if bad.any():
            rows = f"rows {first_row:,} to {first_row + band.shape[1]:,}"
            raise NoMap(f"outputs are not finite in {rows}")
        try:
            self.sink.write(first_row, band)
        except ValueError as error:  # float16 does not hold them
            raise NoMap(str(error)) from error

    def finish(self) -> None:
        self.finishing()
        self.sink.finish()

    def close(self) -> None:
        self.sink.close()
