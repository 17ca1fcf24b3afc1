"""Images that do not fit into memory in one pass: which ones they are, and their outputs, computed
in bands of rows (``models/large``); and the map of one image in one file.

A work folder next to the output stores the progress of such images, so that the same command
resumes after a kill. Readers of bands are imported only where needed.
"""

import json
import math
import os
import shutil
import sys
from bisect import bisect_left
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from visionattn.cli.exit_codes import is_out_of_memory
from visionattn.cli.files import Continued, check_folder, write_text
from visionattn.cli.memory import room_of, taken_bytes
from visionattn.cli.tables import sized
from visionattn.data.formats import DAMAGED_IMAGE, NotAsAsked
from visionattn.data.geometry import pixels
from visionattn.inference.image_batches import Outcome, finished
from visionattn.inference.image_listing import find_images
from visionattn.inference.image_reading import ReadImages, Sample, reason_of
from visionattn.inference.inference_estimate import memory_of, sizes_read
from visionattn.inference.inference_options import InferenceOptions
from visionattn.inference.model_opening import Opened, open_model
from visionattn.inference.result_files import difference, write_array
from visionattn.models.cost import FEW_PIXELS, Compute, ForwardMemory
from visionattn.models.devices import autocast
from visionattn.models.patches import call, last_map, pooled
from visionattn.models.segmentation import IGNORED, Segmenter

if TYPE_CHECKING:
    from visionattn.data.large.image_parts import ImageSource
    from visionattn.data.large.map_writing import MapSink

STATE = "work.json"
WANTS = {
    call: "logits",
    pooled: "pooled",
    last_map: "dense",
    Segmenter.masks: "masks",
    Segmenter.probabilities: "probabilities",
}
"""The ``want`` of ``forward_tiled`` for each computation over batches."""
MAPS = ("dense", "masks", "probabilities")


class NoResult(ValueError):
    """An image cannot be read, or not with these options, or its outputs are not a valid map; the
    message says which rows, or why.
    """


class WorkFolder:
    """The work of one command, in a hidden folder next to its output; a context manager for using
    it.

    If the context ends without an error, the folder is deleted. After an error it stays if it holds
    anything.

    Args:
        output: the output of the command.
        identity: returns JSON types that distinguish this work from other commands; called only if
            there is work.
        overwrite: delete work of another command instead of refusing it.
        bound_gib: the requested memory limit, which may change between runs.
    """

    def __init__(
        self,
        output: Path,
        identity: Callable[[], dict[str, Any]],
        *,
        overwrite: bool,
        bound_gib: float | None = None,
    ):
        self.output, self.overwrite, self.bound_gib = output, overwrite, bound_gib
        whole = Path(os.path.abspath(output)) if output.name in ("", "..") else output
        self._path, self._asked = whole.with_name(f"{whole.name}.work"), identity
        self.folder = Continued.beside(self._path, folder=True)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return json.loads(json.dumps(self._asked(), default=str))

    def state(self) -> dict[str, Any]:
        """Return the recorded state of this work; empty if there is none.

        Raises:
            ValueError: it is the work of another command, and overwriting is not allowed; one line.
        """
        try:
            found = json.loads((self.folder / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        other = difference(found["of"], self._identity)
        if other is not None and not self.overwrite:
            raise ValueError(
                f"{self.folder} has unfinished work of another call for {self.output}: {other}; "
                "delete it, pass another --output, or restart with --overwrite"
            )
        return {} if other else found

    def is_finished(self) -> bool:
        """Return whether an earlier run was killed after its output got its name, so that only the
        clean-up is left.
        """
        return os.path.lexists(self.output) and "finishing" in self.state()

    def check_writable(self) -> None:
        """Raise ValueError if the folder cannot be created; one line."""
        check_folder(
            self._path, f"it stores unfinished work for {self.output}; pass another --output"
        )

    def __enter__(self) -> Self:
        known = self.state()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._held = Continued(self._path, folder=True, overwrite=True)
        if not known:
            self._held.empty()
        for place in self.folder.glob("*/tmp*"):  # mapped files of a killed pass
            shutil.rmtree(place, ignore_errors=True)
        return self

    def note(self, **state: Any) -> dict[str, Any]:
        """Record the identity of the work, and ``state``, which ``state()`` returns later."""
        known = self.state() | {"of": self._identity} | state
        write_text(self.folder / STATE, json.dumps(known))
        return known

    def options(self, index: int, memory: int | None) -> dict[str, Any]:
        """Return options of ``forward_tiled`` for an image: its folder, and the memory limit.

        The limit stays the one of the first pass, because equal bands give equal bytes, unless
        another one is requested.
        """
        known = self.state()
        if known.get("bound_gib", -1) != self.bound_gib:
            known = self.note(memory=memory, bound_gib=self.bound_gib)
        return {"work": self.folder / f"{index:06d}", "memory": known["memory"]}

    def result(self, index: int) -> Path:
        """Return the file that stores the output of an image until the command is done."""
        return self.folder / f"{index:06d}.npy"

    def drop(self, index: int) -> None:
        """Delete all files of an image."""
        shutil.rmtree(self.folder / f"{index:06d}", ignore_errors=True)
        for place in (self.result(index), Continued.beside(self.result(index))):
            place.unlink(missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        others = [each for each in self.folder.iterdir() if each.name != STATE]
        if kind is None or not any(each.is_file() or any(each.iterdir()) for each in others):
            self._held.forget()
        else:
            self._held.close()


class Banding:
    """The images of a run that are computed band by band.

    Args:
        opened: the model.
        images: all images; sets ``most_px``, the size above which they are not read whole.
        compute: computes the wanted outputs.
        options: precision, number of loading processes, and the memory limit; None: defaults.
        work: stores the progress of passes; None: nothing is stored.
        numbers: indices of the images of the run; None: all.
        held_bytes: bytes in memory that wait to be written.
        always: compute all images that the model sees at their own size this way.

    Attributes:
        lines: messages about these images; empty without any.
        reason: why there are none although images do not fit; else None.
        share: their share of the inspected images.
        say: receives a line about the cost of each pass; default: standard error.
        before: called before each pass, which shows its own progress.

    Raises:
        ValueError: ``work`` belongs to another command; one line.
    """

    def __init__(
        self,
        opened: Opened,
        images: ReadImages,
        compute: Compute,
        options: InferenceOptions | None = None,
        work: WorkFolder | None = None,
        *,
        numbers: range | None = None,
        held_bytes: int = 0,
        always: bool = False,
    ):
        self.opened, self.images, self.work = opened, images, work
        self.options = options or InferenceOptions(workers=0)
        self.want = WANTS.get(compute)
        self._compute, self._held_bytes = compute, held_bytes
        self.lines: tuple[str, ...] = ()
        self.reason: str | None = None
        self.share = 0.0
        self.say: Callable[[str], object] = partial(print, file=sys.stderr, flush=True)
        self.before: Callable[[], object] = lambda: None
        if always:
            images.most_px = 0
        elif opened.geometry.canvas is None:
            self._divide(range(len(images)) if numbers is None else numbers)
        if work is not None:
            work.state()
            if images.most_px is not None:
                work.check_writable()

    @cached_property
    def memory(self) -> ForwardMemory:
        """Return the memory estimate of passes over whole images."""
        return memory_of(self.opened, self._compute, self.options, self._held_bytes)

    def _divide(self, numbers: range) -> None:
        """Find the number of pixels above which images do not fit, and set the messages."""
        found = sizes_read(self.images, numbers)
        seen = {size: self.images.own_canvas(*size) for size in found}
        least = FEW_PIXELS if self.options.memory_bytes is None else 0
        large = {canvas for canvas in seen.values() if canvas and math.prod(canvas) > least}
        canvases = sorted(large, key=math.prod)
        if self.want is None or not canvases or not self.memory.too_much(canvases[-1]):
            return
        from visionattn.models.large.forward_bands import CUT, check_tiled

        try:
            check_tiled(self.opened.model, self.want)
        except ValueError as error:
            why = str(error).removesuffix(CUT)
            self.reason = f"they cannot run band by band: {why}; pass --tiles SIDE"
            return
        fitting = bisect_left(canvases, True, hi=len(canvases) - 1, key=self.memory.too_much)
        self.images.most_px = math.prod(canvases[fitting - 1]) if fitting else least
        banded = [size for size in found if self.images.is_banded(*size)]
        self.share = len(banded) / len(found)
        count = len(banded) if len(found) == len(numbers) else f"about {self.share:.0%}"
        assert self.memory.there_bytes is not None
        room = room_of(self.memory.there_bytes, bounded=self.memory.bounded)
        needed = self.memory.bytes_of((1, *canvases[-1]))
        much = f" (up to {sized(needed)})" if needed is not None and needed < math.inf else ""
        self.lines = (
            f"{count} of {len(numbers)} images, of up to {pixels(max(banded, key=math.prod))}, "
            f"do not fit in one pass{much}, as {room}: they run band by band, with the same "
            "results up to rounding",
        )

    def memory_bytes(self) -> int | None:
        """Return the memory that a pass may take in addition to the model; None if unknown."""
        from visionattn.models.large.band_plan import SHARE

        if self.memory.bounded or self.memory.there_bytes is None:
            return self.options.memory_bytes
        return int(SHARE * (self.memory.there_bytes - taken_bytes(self.opened.device)))

    def outcome(self, index: int, sample: Sample, dtype: torch.dtype) -> Outcome:
        """Compute the output of an image band by band.

        Raises:
            ValueError: ``work`` holds the work of another image.
            Stopped: Ctrl-C, with ``work``.
        """
        from visionattn.models.large.band_plan import BelowOneBand

        self.before()
        path = self.images.listing.name(index)
        assert sample.height is not None and sample.width is not None
        canvas = self.images.geometry.view(sample.height, sample.width).canvas
        failed = Outcome(path, "oom", None, sample.height, sample.width, *canvas)
        try:
            value = self._value(index, path)
        except NoResult as error:
            if self.work is not None:
                self.work.drop(index)
            return Outcome(path, "unreadable", str(error), sample.height, sample.width)
        except BelowOneBand as error:
            return replace(failed, reason=str(error))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = f"out of memory with one image of {canvas[0]} x {canvas[1]} pixels in bands"
            return replace(failed, reason=reason)
        return finished(replace(failed, status="ok", value=value.to(dtype)), dtype)

    def _value(self, index: int, path: str) -> Tensor:
        """Compute an output, or read it from the work folder, where maps stay on the disk until
        they are used.
        """
        from visionattn.data.large import open_sink

        options: dict[str, Any] = {"memory": self.memory_bytes()}
        done, written = None, False
        if self.work is not None:
            done, written = self.work.result(index), self.want in MAPS
            options = self.work.options(index, self.memory_bytes())
        if done is None or not done.exists():
            with (
                self.opened_image(index) as source,
                open_sink(done, overwrite=True) if written else nullcontext() as sink,
            ):
                found = self.compute(
                    source, sink, say=lambda line: self.say(f"{path}: {line}"), **options
                )
            if found is not None:
                if done is not None:
                    write_array(done, found[0].numpy())
                return found[0]
        kept = torch.from_numpy(np.load(done, mmap_mode="c"))
        return kept[0] if self.want == "masks" else kept

    def opened_image(self, index: int) -> "ImageSource":
        """Open an image with the options of the run, for reading bands of it.

        Raises:
            NoResult: it cannot be opened.
        """
        from visionattn.data.large import open_source

        listing = self.images.listing
        try:
            held = getattr(listing, "array", lambda index: None)(index)  # a picture in memory
            given = listing.open(index) if held is None else held
            return open_source(given, options=self.images.options, name=listing.name(index))
        except DAMAGED_IMAGE as error:
            raise NoResult(reason_of(error)) from error

    def compute(self, source: "ImageSource", sink: Any = None, **options: Any) -> Any:
        """Call ``forward_tiled`` for an image, prepared as the model expects.

        Args:
            source: the image.
            sink: receives a map; None: the map is returned.
            options: further options of ``forward_tiled``.

        Raises:
            NoResult: a band cannot be read, or its values have no known range.
        """
        from visionattn.data.large.image_parts import UnreadablePart
        from visionattn.models.large.forward_bands import forward_tiled

        options = {"want": self.want} | options
        identity = {"image": source.identity(), "amp": self.options.amp}
        try:
            prepare = source.prepare(self.opened.spec)
        except DAMAGED_IMAGE as error:
            raise NoResult(reason_of(error)) from error
        try:
            with autocast(self.opened.device, self.options.amp):
                return forward_tiled(
                    self.opened.model, source, sink, identity=identity, prepare=prepare, **options
                )
        except (UnreadablePart, NotAsAsked) as error:
            raise NoResult(reason_of(error)) from error


def folder_of(
    opened: Opened, images: ReadImages, options: InferenceOptions, output: Path
) -> WorkFolder:
    """Return the work folder of a command, for images computed band by band."""

    def identity() -> dict[str, Any]:
        keys = ("amp", "level", "dense", "dtype")
        known = opened.identity() | {key: getattr(options, key, None) for key in keys}
        saved = getattr(options, "save", None) or ()
        known["save"] = "probabilities" if "probabilities" in saved else None
        return known | {"images": len(images), "list_of_images": images.listing.digest()}

    overwrite, bound = options.overwrite, options.memory_gib
    return WorkFolder(output, identity, overwrite=overwrite, bound_gib=bound)


UNUSED = ("batch_size", "workers", "shard_images", "shard_mib", "shard", "engine", "probe", "data")
UNUSED += ("tiles", "overlap", "combine", "top_k", "labels")
"""Options without effect for the map of one image."""


def is_map(output: str | None, *, features: bool = False) -> bool:
    """Return whether the suffix of an output stands for the map of one image, of ``features`` (or
    probabilities) or of pixel classes.

    For pixel classes ``.npy`` is an exception: ``segment.py`` writes it as an array ``[H, W]``.
    """
    from visionattn.data.large.map_writing import SINKS

    suffix = Path(output or "").suffix.lower()
    return suffix in SINKS and (features or suffix != ".npy")


class MapOfImage:
    """The map of one image of any size, written band by band to a zarr, an ``.npy`` or a GeoTIFF.

    It holds model, image and output after all checks; nothing is written before ``run``.

    Args:
        options: options of features or of masks, checked.

    Raises:
        ValueError, FileNotFoundError: an option is wrong, or a file is in the way; one line.
    """

    def __init__(self, options: Any):
        from visionattn.data.large import open_sink
        from visionattn.models.large.forward_bands import check_tiled

        self.options, self.output = options, Path(options.output or "")
        compute: Any = Segmenter.masks
        if hasattr(options, "dense"):
            compute = last_map
        elif options.save == ["probabilities"]:
            compute = Segmenter.probabilities
        if compute is last_map and not options.dense:
            raise ValueError(
                f"--output {self.output} needs a feature map; add --dense, or pass a folder for "
                "feature vectors"
            )
        for key in UNUSED:
            if getattr(options, key, None) != getattr(type(options)(), key, None):
                raise ValueError(
                    f"{key} has no effect on the map of one image, {self.output}; remove it"
                )
        listing = find_images(options.images or [])
        self.path = listing.name(0)
        if len(listing) > 1:
            raise ValueError(
                f"expected one image for --output {self.output}, got {len(listing)}; pass a folder"
            )
        of_image, of_map = Path(os.path.realpath(self.path)), Path(os.path.realpath(self.output))
        if of_image in (of_map, *of_map.parents):
            raise ValueError(
                f"{self.output} would overwrite the image {self.path}; pass another --output"
            )
        self.opened = open_model(options, classifies=compute is not last_map)
        try:
            check_tiled(self.opened.model, WANTS[compute])
        except ValueError as error:
            raise ValueError(f"{self.output} cannot be written band by band: {error}") from error
        reading = (options.max_pixels, options.level)
        images = ReadImages(listing, self.opened.spec, self.opened.geometry, *reading)
        self.work = folder_of(self.opened, images, options, self.output)
        self.finished = self.work.is_finished()
        if not self.finished:
            open_sink(self.output, overwrite=options.overwrite)  # raises if a file is in the way
        self.banding = Banding(self.opened, images, compute, options, self.work, always=True)
        for size in sizes_read(images, range(1)):
            if not images.is_banded(*size) and min(size) >= max(images.geometry.patch_px):
                raise ValueError(
                    f"{self.path} of {pixels(size)} would be preprocessed "
                    f"({images.geometry.describe()}), but {self.output} needs an image at its "
                    "own size; pass --img-size native"
                )
        if (reason := images[0].reason) is not None:
            raise ValueError(f"{self.path}: {reason}")

    def run(self, say: Callable[[str], None]) -> None:
        """Write the map and report the result.

        Raises:
            ValueError: the image cannot be read completely or gives non-finite outputs; nothing is
                left behind. Or the disk has no space, or the memory limit is below one band;
                nothing was begun.
            Stopped: Ctrl-C, after a band; the same command resumes.
        """
        for note in self.opened.notes:
            say(note)
        with self.work:
            if self.finished:
                self._drop()
                say(f"{self.output} is complete")
                return
            try:
                sink = self._write(say)
            except NoResult as error:
                self._drop()
                text = str(error)
                raise ValueError(text if self.path in text else f"{self.path}: {text}") from error
        say(f"{self.output}: {' x '.join(map(str, sink.shape))} {sink.sink.dtype}")

    def _write(self, say: Callable[[str], None]) -> "_Checked":
        from visionattn.data.large import open_sink

        dense = self.banding.want == "dense"
        how: dict[str, Any] = {"scale": self.opened.geometry.patch_px if dense else (1, 1)}
        how["dtype"] = np.dtype(self.options.dtype) if dense else None
        with self.banding.opened_image(0) as source:
            size = pixels((source.height, source.width))
            say(f"{self.path} of {size} runs band by band")
            overwrite = self.options.overwrite
            with open_sink(self.output, source=source, overwrite=overwrite, **how) as sink:
                checked = _Checked(sink, self.work)
                given = self.work.options(0, self.banding.memory_bytes())
                self.banding.compute(source, checked, say=say, **given)
        return checked

    def _drop(self) -> None:
        """Delete the unfinished output."""
        self.work.drop(0)
        folder = self.output.suffix.lower() == ".zarr"
        begun = Continued.beside(self.output, folder=folder)
        shutil.rmtree(begun, ignore_errors=True) if folder else begun.unlink(missing_ok=True)


class _Checked:
    """A sink that accepts only finite numbers and classes."""

    def __init__(self, sink: "MapSink", work: WorkFolder):
        self.sink, self.work = sink, work
        self.close = sink.close

    def begin(self, shape: tuple[int, int, int], dtype: np.dtype) -> None:
        self.shape = shape
        self.sink.begin(shape, dtype)

    def write(self, first_row: int, band: np.ndarray) -> None:
        bad = ~np.isfinite(band) if band.dtype.kind == "f" else band == IGNORED
        if bad.any():
            rows = f"rows {first_row:,} to {first_row + band.shape[1]:,}"
            raise NoResult(f"outputs are not finite in {rows}")
        try:
            self.sink.write(first_row, band)
        except ValueError as error:  # float16 cannot hold them
            raise NoResult(str(error)) from error

    def finish(self) -> None:
        self.work.note(finishing=True)
        self.sink.finish()
