"""Images that do not fit into memory in one pass: which of a run they are, and their outputs, which
are computed band by band of rows (``models/tiled``) with the file as a source.

This module owns that choice and what is said of it. It knows nothing of what becomes of outputs.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visionattn.cli.ends import is_out_of_memory
from visionattn.cli.files import write_whole
from visionattn.cli.memory import room_of, taken_bytes
from visionattn.cli.tables import sized
from visionattn.data.formats import DAMAGED_IMAGE, NotAsAsked, as_flags
from visionattn.data.geometry import Size, pixels
from visionattn.data.large import ImageSource, open_sink, open_source
from visionattn.data.large.source import UnreadablePart
from visionattn.inference.forecast import FEW_PIXELS, memory_of, sizes_read
from visionattn.inference.held import HeldImages
from visionattn.inference.opening import Opened
from visionattn.inference.options import InferenceOptions
from visionattn.inference.reading import ReadImages, Sample
from visionattn.inference.running import Compute, Outcome, finished, masks
from visionattn.inference.work import WorkFolder
from visionattn.layout import Grid
from visionattn.models.attribution import Attribution
from visionattn.models.patches import call, last_map, pooled
from visionattn.models.segmentation import Segmenter
from visionattn.models.tiled.forward import CUT, Want, check_tiled, forward_tiled
from visionattn.models.tiled.plan import SHARE, BelowOneBand, plan
from visionattn.training.evaluate import autocast

WANTS: dict[Compute, Want] = {
    call: "logits",
    pooled: "pooled",
    last_map: "dense",
    masks: "masks",
}
"""What of ``forward_tiled`` stands for what of a pass over batches."""
MAPS = ("dense", "masks")
"""Outputs that are written row by row."""
GIB = 2**30


class Banding:
    """The images of a run that are computed band by band.

    Args:
        opened: the model.
        images: all images; ``most_px`` of it is set, from which on they are not read whole.
        compute: which outputs of the model are wanted.
        amp: precision.
        workers: processes that read.
        memory_gib: what a pass may take beside the model, in GiB; None: the memory there is.
        held_bytes: what waits in memory to be written.
        work: where passes keep how far they have come; None: nowhere.
        always: all images that the model sees at their own size are computed so.

    Attributes:
        memory: what tells the memory of passes over whole images.
        lines: what is to be said of these images; empty where there are none.
        reason: why there are none though images do not fit; None where that is not so.
        share: their share of the images that were looked at.
        say: is told what each pass takes; standard error unless another is given.
        before: is called before each pass, which shows its own progress.

    Raises:
        ValueError: the bound is below one band; one line.
    """

    def __init__(
        self,
        opened: Opened,
        images: ReadImages,
        compute: Compute,
        *,
        amp: str,
        workers: int,
        memory_gib: float | None,
        held_bytes: int = 0,
        work: WorkFolder | None = None,
        always: bool = False,
    ):
        self.opened, self.images, self.amp, self.work = opened, images, amp, work
        self.want = WANTS.get(compute)
        self.bound_bytes = None if memory_gib is None else int(memory_gib * GIB)
        self.memory = memory_of(
            opened,
            compute,
            amp=amp,
            workers=workers,
            held_bytes=held_bytes,
            bound_bytes=self.bound_bytes,
        )
        self.lines: tuple[str, ...] = ()
        self.reason: str | None = None
        self.share = 0.0
        self.say: Callable[[str], object] = _to_stderr
        self.before: Callable[[], object] = lambda: None
        if opened.geometry.canvas is None:
            self._divide(always)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Hold the folder with the work, where there is one or will be."""
        needed = self.work is not None and (self.lines or self.work.folder.exists())
        with self.work if needed and self.work is not None else nullcontext():
            yield

    def _divide(self, always: bool) -> None:
        """Find from which number of pixels on images do not fit, and say so."""
        found = sizes_read(self.images, 0, time.perf_counter)
        canvases: dict[Size, Size] = {}
        for size in found:
            if (seen := self.images.own_canvas(*size)) is not None:
                canvases[size] = seen
        if always:
            self.images.most_px = 0
            for canvas in canvases.values():
                self._check_bound(canvas)
            return
        shapes = sorted(set(canvases.values()), key=lambda shape: shape[0] * shape[1])
        least = 0 if self.memory.bounded else FEW_PIXELS
        shapes = [shape for shape in shapes if shape[0] * shape[1] > least]
        if not shapes or not self.memory.too_much(shapes[-1]):
            return
        self.reason = self._reason()
        if self.want is None or self.reason is not None:
            return
        low, high = -1, len(shapes) - 1  # the one fits, or is none; the other does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.memory.too_much(shapes[middle]) else (middle, high)
        self.images.most_px = least if low < 0 else shapes[low][0] * shapes[low][1]
        banded = [size for size in found if self.images.is_banded(*size)]
        self.share = len(banded) / len(found)
        largest = max(banded, key=lambda size: size[0] * size[1])
        for canvas in dict.fromkeys(canvases[size] for size in banded):
            self._check_bound(canvas)
        self.lines = (self._said(len(banded), len(found), largest, shapes[-1]),)

    def _reason(self) -> str | None:
        """Return why the model cannot be computed in bands; None where it can be."""
        if self.want is None:
            return None
        try:
            check_tiled(self.opened.model, self.want)
        except ValueError as error:
            reason = str(error).removesuffix(CUT)
            return f"it is not computed band by band: {reason}; --tiles SIDE cuts images into tiles"
        return None

    def _check_bound(self, canvas: Size) -> None:
        assert self.want is not None
        model = self.opened.model
        body = model.backbone if isinstance(model, Segmenter) else model
        down, across = self.opened.geometry.patch_px
        grid = Grid(canvas[0] // down, canvas[1] // across)
        try:
            plan(body, grid, self.memory_bytes(), self.want, model)
        except BelowOneBand as error:
            if len(self.images) == 1:
                raise
            raise ValueError(f"{error} of an image of {pixels(canvas)}") from error

    def memory_bytes(self) -> int | None:
        """Return what a pass may take beside the model, as far as that is known."""
        if self.bound_bytes is not None or self.memory.there_bytes is None:
            return self.bound_bytes
        return int(SHARE * (self.memory.there_bytes - taken_bytes(self.opened.device)))

    def _said(self, count: int, known: int, largest: Size, shape: Size) -> str:
        needed, there = self.memory.about(shape), self.memory.there_bytes
        assert there is not None
        much = f"take {sized(needed)}" if needed is not None and needed < 1 << 60 else "not fit"
        end = f"in one pass, and {room_of(there, bounded=self.memory.bounded)}"
        if known < len(self.images):
            images = f"images of up to {pixels(largest)}"
        elif count > 1:
            images = f"{count} images of up to {pixels(largest)}"
        else:
            return (
                f"1 image of {pixels(largest)} would {much} {end}: it is computed band by band, "
                "with the same result up to rounding"
            )
        return (
            f"{images} would {much.replace('take', 'take up to')} {end}: they are computed band by "
            "band, with the same results up to rounding"
        )

    def outcome(self, index: int, sample: Sample, dtype: torch.dtype) -> Outcome:
        """Compute the output of an image band by band.

        Raises:
            ValueError: ``work`` keeps the work of another image.
            Stopped: Ctrl-C, where there is ``work``.
        """
        self.before()
        path = self.images.listing.name(index)
        assert sample.height is not None and sample.width is not None
        canvas = self.images.geometry.view(sample.height, sample.width).canvas
        failed = Outcome(path, "unreadable", None, sample.height, sample.width, *canvas, None)
        try:
            value = self._value(index, path)
        except UnreadableImage as error:
            reason = str(error)
            if self.work is not None:
                self.work.drop(index)
            return replace(failed, reason=reason, input_height=None, input_width=None)
        except BelowOneBand as error:
            return replace(failed, status="oom", reason=str(error))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = f"out of memory with one image of {canvas[0]} x {canvas[1]} pixels in bands"
            return replace(failed, status="oom", reason=reason)
        return finished(replace(failed, status="ok", value=value.to(dtype)), dtype)

    def _value(self, index: int, path: str) -> Tensor:
        assert self.want is not None
        done = None if self.work is None else self.work.result(index)
        if done is not None and done.exists():
            return self._kept(done)
        options = {} if self.work is None else self.work.options(index, self.memory_bytes())
        with open_image_source(self.images, index) as source:
            sink = None
            if done is not None and self.want in MAPS:
                sink = open_sink(done, overwrite=True)
            with sink or nullcontext():
                found = compute_bands(
                    self.opened,
                    source,
                    sink,
                    want=self.want,
                    amp=self.amp,
                    say=lambda line: self.say(f"{path}: {line}"),
                    **({"memory": self.memory_bytes()} | options),
                )
        if found is None:
            assert done is not None
            return self._kept(done)
        value: Tensor = found[0]
        if done is not None:
            write_whole(done, lambda place: _write(place, value.numpy()))
        return value

    def evidence(self, index: int, target: int | None) -> Attribution:
        """Find what speaks for a class in an image, without the gradient.

        Raises:
            UnreadableImage: it cannot be read.
            ValueError: outputs are not finite, or the bound is below one band.
        """
        with open_image_source(self.images, index) as source:
            return compute_bands(
                self.opened,
                source,
                want="evidence",
                target=target,
                amp=self.amp,
                memory=self.memory_bytes(),
                say=self.say,
            )

    def _kept(self, done: Path) -> Tensor:
        """Return an output that is kept in a file, of which maps stay there until they are used."""
        found = torch.from_numpy(np.load(done, mmap_mode="c"))
        return found[0] if self.want == "masks" else found


def banding_of(
    opened: Opened,
    images: ReadImages,
    compute: Compute,
    options: InferenceOptions,
    work: WorkFolder | None = None,
    *,
    held_bytes: int = 0,
    always: bool = False,
) -> Banding:
    """Return the images of a command that are computed band by band; ``Banding`` says the rest.

    Raises:
        ValueError: the bound of memory is below one band, or ``work`` is of another command.
    """
    if work is not None:
        work.check()
    banding = Banding(
        opened,
        images,
        compute,
        amp=options.amp,
        workers=options.workers,
        memory_gib=options.memory_gib,
        held_bytes=held_bytes,
        work=work,
        always=always,
    )
    if work is not None and (always or banding.lines):
        work.check_writable()
    return banding


def folder_of(
    opened: Opened, images: ReadImages, options: InferenceOptions, output: Path | None = None
) -> WorkFolder:
    """Return the folder of a command for the work of images that are computed band by band, beside
    ``output`` or that of the options.
    """

    def identity() -> dict[str, Any]:
        keys = ("amp", "level", "dense", "dtype")
        known = opened.identity() | {key: getattr(options, key, None) for key in keys}
        return known | {"images": len(images), "list_of_images": images.listing.digest()}

    output = output or Path(options.output or "")
    bound = options.memory_gib
    return WorkFolder(output, identity, overwrite=options.overwrite, bound_gib=bound)


class UnreadableImage(ValueError):
    """An image cannot be read, or not as it is asked for; the text says which rows, or why."""


def open_image_source(images: ReadImages, index: int) -> ImageSource:
    """Open an image of a listing to read bands of it as its options say.

    Raises:
        UnreadableImage: it cannot be opened.
    """
    listing = images.listing
    try:
        held = listing.array(index) if isinstance(listing, HeldImages) else None
        given = listing.open(index) if held is None else held
        return open_source(given, options=images.options, name=listing.name(index))
    except DAMAGED_IMAGE as error:
        raise UnreadableImage(_line(error)) from error


def compute_bands(
    opened: Opened,
    source: ImageSource,
    sink: Any = None,
    *,
    amp: str,
    identity: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Call ``forward_tiled`` for an image with what a model expects of it.

    Args:
        opened: the model.
        source: the image.
        sink: where a map goes; None: it is returned.
        amp: precision.
        identity: what tells the work from others beside the image.
        options: further ones of ``forward_tiled``.

    Raises:
        UnreadableImage: a band cannot be read, or its values have no known range.
    """
    try:
        prepare = source.prepare(opened.spec)
    except DAMAGED_IMAGE as error:
        raise UnreadableImage(_line(error)) from error
    known = (identity or {}) | {"image": source.identity(), "amp": amp}
    try:
        with autocast(opened.device, amp):
            return forward_tiled(
                opened.model, source, sink, identity=known, prepare=prepare, **options
            )
    except (UnreadablePart, NotAsAsked) as error:
        raise UnreadableImage(_line(error)) from error


def _line(error: BaseException) -> str:
    return as_flags(" ".join(str(error).split())) or type(error).__name__


def _write(place: Path, values: np.ndarray) -> None:
    with open(place, "wb") as file:
        np.save(file, values)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
