"""Images that do not fit into memory in one pass: which of a run they are, and their outputs, which
are computed band by band of rows (``bands.py``).

This module owns that choice and what is said of it. It knows nothing of what becomes of outputs.
"""

import math
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from visionattn.cli.ends import is_out_of_memory
from visionattn.cli.memory import room_of, taken_bytes
from visionattn.cli.tables import sized
from visionattn.data.geometry import Size, pixels
from visionattn.inference.forecast import FEW_PIXELS, memory_of, sizes_read
from visionattn.inference.opening import Opened
from visionattn.inference.options import InferenceOptions
from visionattn.inference.reading import ReadImages, Sample
from visionattn.inference.running import Compute, Outcome, finished, masks
from visionattn.inference.work import WorkFolder, write_array
from visionattn.layout import Grid
from visionattn.models.patches import call, last_map, pooled
from visionattn.models.segmentation import Segmenter

if TYPE_CHECKING:
    from visionattn.models.attribution import Attribution

WANTS = {call: "logits", pooled: "pooled", last_map: "dense", masks: "masks"}
"""What of ``forward_tiled`` stands for what of a pass over batches."""


class Banding:
    """The images of a run that are computed band by band.

    Args:
        opened: the model.
        images: all images; ``most_px`` of it is set, from which on they are not read whole.
        compute: which outputs of the model are wanted.
        options: precision, processes that read, and the bound of memory; None: none of them.
        work: where passes keep how far they have come; None: nowhere.
        held_bytes: what waits in memory to be written.
        always: all images that the model sees at their own size are computed so.

    Attributes:
        memory: what tells the memory of passes over whole images.
        lines: what is to be said of these images; empty where there are none.
        reason: why there are none though images do not fit; None where that is not so.
        share: their share of the images that were looked at.
        say: is told what each pass takes; standard error unless another is given.
        before: is called before each pass, which shows its own progress.

    Raises:
        ValueError: the bound is below one band, or ``work`` is of another command; one line.
    """

    def __init__(
        self,
        opened: Opened,
        images: ReadImages,
        compute: Compute,
        options: InferenceOptions | None = None,
        work: WorkFolder | None = None,
        *,
        held_bytes: int = 0,
        always: bool = False,
    ):
        if work is not None:
            work.check()
        options = options or InferenceOptions(workers=0)
        self.opened, self.images, self.amp, self.work = opened, images, options.amp, work
        self.want = WANTS.get(compute)
        self.bound_bytes = options.memory_bytes
        self.memory = memory_of(
            opened,
            compute,
            amp=options.amp,
            workers=options.workers,
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
        if work is not None and (always or self.lines):
            work.check_writable()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Hold the folder with the work, where there is one or will be."""
        needed = self.work is not None and (self.lines or self.work.folder.exists())
        with self.work if needed and self.work is not None else nullcontext():
            yield

    def _divide(self, always: bool) -> None:
        """Find from which number of pixels on images do not fit, and say so."""
        found = sizes_read(self.images, 0, time.perf_counter)
        seen = {size: self.images.own_canvas(*size) for size in found}
        canvases = {size: canvas for size, canvas in seen.items() if canvas is not None}
        if always:
            self.images.most_px = 0
            self._check_bound(canvases.values())
            return
        least = 0 if self.memory.bounded else FEW_PIXELS
        shapes = sorted({s for s in canvases.values() if math.prod(s) > least}, key=math.prod)
        if not shapes or not self.memory.too_much(shapes[-1]):
            return
        self.reason = self._reason()
        if self.want is None or self.reason is not None:
            return
        fitting = bisect_left(shapes, True, hi=len(shapes) - 1, key=self.memory.too_much)
        self.images.most_px = math.prod(shapes[fitting - 1]) if fitting else least
        banded = [size for size in found if self.images.is_banded(*size)]
        self.share = len(banded) / len(found)
        self._check_bound(dict.fromkeys(canvases[size] for size in banded))
        self.lines = (self._said(banded, len(found), shapes[-1]),)

    def _reason(self) -> str | None:
        """Return why the model cannot be computed in bands; None where it can be."""
        if self.want is None:
            return None
        from visionattn.models.large.forward_bands import CUT, check_tiled

        try:
            check_tiled(self.opened.model, self.want)
        except ValueError as error:
            reason = str(error).removesuffix(CUT)
            return f"it is not computed band by band: {reason}; --tiles SIDE cuts images into tiles"
        return None

    def _check_bound(self, canvases: Iterable[Size]) -> None:
        from visionattn.models.large.band_plan import BelowOneBand, plan

        model = self.opened.model
        body = model.backbone if isinstance(model, Segmenter) else model
        down, across = self.opened.geometry.patch_px
        for canvas in canvases:
            grid = Grid(canvas[0] // down, canvas[1] // across)
            try:
                plan(body, grid, self.memory_bytes(), self.want, model)
            except BelowOneBand as error:
                if len(self.images) == 1:
                    raise
                raise ValueError(f"{error} of an image of {pixels(canvas)}") from error

    def memory_bytes(self) -> int | None:
        """Return what a pass may take beside the model, as far as that is known."""
        from visionattn.models.large.band_plan import SHARE

        if self.bound_bytes is not None or self.memory.there_bytes is None:
            return self.bound_bytes
        return int(SHARE * (self.memory.there_bytes - taken_bytes(self.opened.device)))

    def _said(self, banded: list[Size], known: int, shape: Size) -> str:
        needed, there = self.memory.about(shape), self.memory.there_bytes
        assert there is not None
        is_known = needed is not None and needed < 1 << 60
        room = room_of(there, bounded=self.memory.bounded)
        one = known == len(self.images) and len(banded) == 1
        count = "" if known < len(self.images) else f"{len(banded)} "
        images = f"{count}image{'' if one else 's'} of {'' if one else 'up to '}"
        much = f"take {'' if one else 'up to '}{sized(needed)}" if is_known else "not fit"
        return (
            f"{images}{pixels(max(banded, key=math.prod))} would {much} in one pass, and {room}: "
            f"{'it is' if one else 'they are'} computed band by band, with the same "
            f"result{'' if one else 's'} up to rounding"
        )

    def outcome(self, index: int, sample: Sample, dtype: torch.dtype) -> Outcome:
        """Compute the output of an image band by band.

        Raises:
            ValueError: ``work`` keeps the work of another image.
            Stopped: Ctrl-C, where there is ``work``.
        """
        from visionattn.inference.bands import UnreadableImage
        from visionattn.models.large.band_plan import BelowOneBand

        self.before()
        path = self.images.listing.name(index)
        assert sample.height is not None and sample.width is not None
        canvas = self.images.geometry.view(sample.height, sample.width).canvas
        failed = Outcome(path, "unreadable", None, sample.height, sample.width, *canvas, None)
        try:
            value = self._value(index, path)
        except UnreadableImage as error:
            if self.work is not None:
                self.work.drop(index)
            return replace(failed, reason=str(error), input_height=None, input_width=None)
        except BelowOneBand as error:
            return replace(failed, status="oom", reason=str(error))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = f"out of memory with one image of {canvas[0]} x {canvas[1]} pixels in bands"
            return replace(failed, status="oom", reason=reason)
        return finished(replace(failed, status="ok", value=value.to(dtype)), dtype)

    def _value(self, index: int, path: str) -> Tensor:
        """Compute an output, or take it from the folder of the work, where maps stay on the disk
        until they are used.
        """
        if self.work is None:
            return self._computed(index, path, None)[0]
        done = self.work.result(index)
        if not done.exists():
            found = self._computed(index, path, done)
            if found is not None:
                write_array(done, found[0].numpy())
                return found[0]
        kept = torch.from_numpy(np.load(done, mmap_mode="c"))
        return kept[0] if self.want == "masks" else kept

    def _computed(self, index: int, path: str, done: Path | None) -> Any:
        from visionattn.data.large import open_sink
        from visionattn.inference.bands import compute_bands, open_image_source

        options: dict[str, Any] = {"memory": self.memory_bytes()}
        if self.work is not None:
            options = self.work.options(index, self.memory_bytes())
        written = done is not None and self.want in ("dense", "masks")  # row by row
        with (
            open_image_source(self.images, index) as source,
            open_sink(done, overwrite=True) if written else nullcontext() as sink,
        ):
            return compute_bands(
                self.opened,
                source,
                sink,
                want=self.want,
                amp=self.amp,
                say=lambda line: self.say(f"{path}: {line}"),
                **options,
            )

    def evidence(self, index: int, target: int | None) -> "Attribution":
        """Find what speaks for a class in an image, without the gradient.

        Raises:
            UnreadableImage: it cannot be read.
            ValueError: outputs are not finite, or the bound is below one band.
        """
        from visionattn.inference.bands import compute_bands, open_image_source

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

    output, bound = output or Path(options.output or ""), options.memory_gib
    return WorkFolder(output, identity, overwrite=options.overwrite, bound_gib=bound)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
