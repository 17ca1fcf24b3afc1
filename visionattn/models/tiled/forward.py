"""``forward_tiled``: the forward pass layer by layer over bands of rows, for images of any size.

Attention here needs of all other tokens only a state of constant size, the sums of far rows and a
few near ones (``ops/strips.py``). So the tokens of the image are held once, beside the values of
one layer, and a layer goes over them band by band. While the tokens of a band leave a block, the
next block gathers what it needs of them:

    read pixels, embed     tokens of band 0, 1, ...   -> block 0 gathers
    block 0 maps band 0, 1, ... in place              -> block 1 gathers
    ...
    the last block maps band 0, 1, ...                -> output

This module owns the order of work, and how a pass that was stopped goes on. Everything is computed
as ``forward`` does it, up to the rounding of sums.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from visionattn.cli.ends import Stopped
from visionattn.cli.interruption import Interruption
from visionattn.cli.progress import Progress
from visionattn.cli.tables import lasting
from visionattn.layers.changed import changed
from visionattn.layout import TokenLayout
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.patches import in_eval
from visionattn.models.rowwise import check_rowwise, weight_like
from visionattn.models.segmentation import Segmenter
from visionattn.models.tiled.bands import Bands, even_bands
from visionattn.models.tiled.ends import Sink, Source
from visionattn.models.tiled.image import PatchedImage, Prepare
from visionattn.models.tiled.layers import PIECE_TOKENS, Layer, layer_of
from visionattn.models.tiled.outputs import Dense, Evidenced, Masked, Output, Pooled
from visionattn.models.tiled.plan import Plan, plan
from visionattn.models.tiled.snapshot import Snapshots
from visionattn.models.tiled.stores import Store

Want = Literal["logits", "pooled", "dense", "masks", "evidence"]
CUT = "; cut the image into tiles"
"""How the line of a model that cannot be computed in bands ends."""


def forward_tiled(
    model: nn.Module,
    source: Source,
    sink: Sink | None = None,
    *,
    want: Want = "logits",
    target: int | None = None,
    memory: int | None = None,
    work: str | Path | None = None,
    identity: dict[str, Any] | None = None,
    prepare: Prepare | None = None,
    say: Callable[[str], object] | None = None,
) -> Any:
    """Compute what a model gives for an image of any size, band by band of rows.

    The result is that of ``forward`` at the image's own size, up to the rounding of sums, with the
    last row and column of pixels repeated up to whole patches. Gradients are not computed.

    Args:
        model: a ``VisionAttnTransformer`` or a ``Segmenter`` of one, in any mode; it is run in eval
            mode, where it is and in its dtype.
        source: the image, which is read once, from top to bottom: a ``Source``, or for
            ``visionattn.forward_tiled`` whatever ``open_source`` opens: a path, an array, a tensor.
        sink: where a map goes; None: it is returned.
        want: "logits" ``[1, num_classes]``; "pooled", the features before the classifier
            ``[1, D]``; "dense", the last feature map after the final norm ``[1, D, H, W]``;
            "masks", of a ``Segmenter``, the class of each pixel, uint8 ``[1, H_px, W_px]``;
            "evidence", what speaks for a class (``models/attribution.py``), without the gradient.
        target: of "evidence", the number of the class; None: the most probable.
        memory: bytes that the pass may take, beside the model and some 24 MiB that operations take
            in any case (``plan.WORKING_BYTES``); where tokens do not fit into them,
            they are in files in ``work``, or in the system's folder for such files. None: 80 % of
            what there is.
        work: a folder, made where there is none, in which the pass keeps how far it has come, every
            few minutes and when it is stopped: the same call goes on from there. None: a pass that
            is stopped begins anew.
        identity: JSON types that tell this work from others in the same folder, besides the weights
            and what is wanted.
        prepare: turns pixels ``[h, w, channels]`` as the source gives them into the model's input,
            float ``[1, C, h, w]``. None: floating values as they are, and others scaled to [0, 1].
        say: is told in a line what the pass will take, and what the reading of the file took.

    Returns:
        What is wanted, on the CPU; None where it went to the sink.

    Raises:
        ValueError: a model whose blocks need all tokens at once, an image smaller than a patch, a
            bound of memory below one band, or a folder with the work of another call.
        Stopped: Ctrl-C or SIGTERM, at the end of a band, where there is a ``work`` folder.
        What the source, the sink and ``prepare`` raise.
    """
    if want not in get_args(Want):
        raise ValueError(f"want {want!r}: wanted one of {', '.join(get_args(Want))}")
    body = _body_of(model, want)
    with ExitStack() as stack:
        stack.enter_context(in_eval(model))
        stack.enter_context(torch.inference_mode())
        image = PatchedImage(body, source, prepare)
        options = dict(memory=memory, sink=sink, want=want, target=target)
        run = _Pass(model, body, image, work, identity or {}, stack, **options)
        return run.go(say or (lambda line: None))


def check_tiled(model: nn.Module, want: Want = "logits") -> None:
    """Raise ValueError, in one line, for a model that cannot be computed in bands."""
    _body_of(model, want)


def _body_of(model: nn.Module, want: Want) -> VisionAttnTransformer:
    body = model.backbone if isinstance(model, Segmenter) else model
    if not isinstance(body, VisionAttnTransformer):
        raise ValueError(
            f"wanted a VisionAttnTransformer, or a Segmenter of one, got {type(body).__name__}{CUT}"
        )
    if isinstance(model, Segmenter) != (want == "masks") and want != "dense":
        given = "classes of pixels" if isinstance(model, Segmenter) else "no classes of pixels"
        raise ValueError(f"want {want!r}: the model gives {given}")
    try:
        check_rowwise(model)
    except ValueError as error:
        raise ValueError(f"{error}{CUT}") from error
    if want == "masks" and len(model.taken) > 1 and (why := changed(model.head, nn.Conv2d)):
        raise ValueError(
            f"head {why}, which would not run: its weights are applied block by block, of "
            f"{len(model.taken)} head_blocks{CUT}"
        )
    return body


class Place(NamedTuple):
    """How far a pass has come: ``step`` 0 embeds, step s maps block s - 1; the next band."""

    step: int
    band: int


class _Pass:
    """One forward pass."""

    def __init__(
        self,
        model: nn.Module,
        body: VisionAttnTransformer,
        image: PatchedImage,
        work: str | Path | None,
        identity: dict[str, Any],
        stack: ExitStack,
        *,
        memory: int | None,
        sink: Sink | None,
        want: Want,
        target: int | None,
    ):
        self.model, self.body, self.image, self.sink = model, body, image, sink
        self.grid = grid = image.grid
        self.work = None if work is None else Path(work)
        self.snapshots = None
        # A pass goes on with the bands that it began with, whatever memory there is now.
        begun: dict[str, Any] = {}
        if self.work is not None:
            made = not self.work.exists()
            self.work.mkdir(parents=True, exist_ok=True)
            own = {"want": want, "target": target, "grid": list(grid)}
            self.snapshots = Snapshots(self.work, model, identity | own)
            begun = self.snapshots.place() or {"made": made}
            if begun["made"]:
                stack.callback(_delete_empty, self.work)
        self.made = begun.get("made", False)
        self.plan: Plan = plan(body, grid, memory, want, model, rows=begun.get("rows"))
        files: Path | None = None
        if self.plan.mapped:
            files = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self.work)))
        like, wide = weight_like(body), body.embed_dim

        def store(name: str, width: int) -> Store:
            return Store(grid, width, like.dtype, like.device, files and files / name)

        self.tokens = store("tokens", wide)
        layout = TokenLayout(body.num_prefix_tokens, grid)
        needed = any(_keeps_values(block.attn) for block in body.blocks)
        self.values = store("values", wide) if needed else None
        self.layers: list[Layer] = [
            layer_of(block, layout, self.plan.rows, self.values) for block in body.blocks
        ]
        self.cells: Store | None = None
        self.output = self._output(want, target, store)
        self.taps = self.output.taps()
        self.prefix: Tensor | None = None
        self.above: Tensor | None = None
        self.place = Place(0, 0)
        self.waited: float | None = None

    def _output(self, want: Want, target: int | None, store: Callable[..., Store]) -> Output:
        if want == "masks":
            assert isinstance(self.model, Segmenter)
            source = self.image.source
            cells = len(self.model.taken) > 1
            if cells:
                self.cells = store("cells", self.model.cell_logits)
            size = source.height, source.width
            return Masked(self.model, self.grid, size, self.sink, self.cells)
        if want == "dense":
            return Dense(self.body, self.grid, self.sink)
        if want == "evidence":
            return Evidenced(self.body, self.grid, target)
        return Pooled(self.body, self.grid, logits=want == "logits")

    def go(self, say: Callable[[str], object]) -> Any:
        """Compute, from where an earlier pass was stopped, and return the result."""
        total = sum(len(layer.bands) for layer in self.layers) + len(self._bands_of(0))
        if self.snapshots is not None and (found := self.snapshots.load()) is not None:
            self._restore(*found)
            say(f"going on {self._said()}")
        else:
            say(self.plan.line)
            self.prefix = self.image.prefix()
            self._take_prefix()
        done = sum(len(self._bands_of(step)) for step in range(self.place.step)) + self.place.band
        interruption = Interruption() if self.snapshots is not None else None
        with ExitStack() as stack:
            progress = stack.enter_context(Progress(total, done, unit="bands"))
            if interruption is not None:
                stack.enter_context(interruption)
            begun = time.perf_counter()
            for place in self._work():
                progress.advance(1)
                self.place = place
                if interruption is not None:
                    self._keep(interruption.requested)
            seconds = time.perf_counter() - begun
        if self.waited is not None:
            share = 100 * self.waited / seconds
            say(
                f"{lasting(seconds)}, of which {self.waited:.1f} s ({share:.1f} %) waited for the "
                "file"
            )
        result = self.output.result(self._again)
        if self.snapshots is not None:
            self.snapshots.delete()
        return _on_cpu(result)

    def _bands_of(self, step: int) -> Bands:
        if step:
            return self.layers[step - 1].bands
        return even_bands(self.grid.height, self.plan.rows)

    def _work(self) -> Iterator[Place]:
        """Do band after band; yield what comes next after each."""
        depth = len(self.layers)
        while self.place.step <= depth:
            step, start = self.place
            bands = self._bands_of(step)
            work = self._embed(bands, start) if step == 0 else self._map(step, bands, start)
            for number in work:
                if number + 1 == len(bands):
                    self._end_step(step)
                    yield Place(step + 1, 0)
                else:
                    yield Place(step, number + 1)

    def _embed(self, bands: Bands, start: int) -> Iterator[int]:
        with self.image.ahead(bands[start:]) as ahead:
            for number, pixels in enumerate(ahead, start):
                first = bands[number][0]
                self._hand_on(0, first, self.image.embed(first, pixels))
                self.waited = ahead.waited_s
                yield number

    def _map(self, step: int, bands: Bands, start: int) -> Iterator[int]:
        layer = self.layers[step - 1]
        if start == 0:
            self.above = self._no_rows()
        for number, (first, last) in enumerate(bands[start:], start):
            x = self.tokens.read(first, last).flatten(0, 1)[None]
            assert self.above is not None
            behind = layer.old_rows(first, last, self.above)
            for row, new in layer.band(first, last, x, self.above):
                self._hand_on(step, row, new)
            self.above = behind
            if step - 1 in self.taps:
                self.output.end_band(step - 1)
            yield number

    def _no_rows(self) -> Tensor:
        if self.values is None:
            return self.tokens.read(0, 0)
        return self.values.read(0, 0)

    def _hand_on(self, step: int, first: int, x: Tensor) -> None:
        """Keep new tokens ``[1, n, D]`` of rows, and give them to who waits for them."""
        for begin, end in even_bands(x.shape[1] // self.grid.width, self._piece_rows):
            piece = x[:, begin * self.grid.width : end * self.grid.width]
            if step - 1 in self.taps:
                self.output.take(step - 1, first + begin, piece)
            if step < len(self.layers):
                self.layers[step].take(first + begin, piece)
        self.tokens.write(first, x[0].unflatten(0, (-1, self.grid.width)))

    @property
    def _piece_rows(self) -> int:
        return max(1, PIECE_TOKENS // self.grid.width)

    def _end_step(self, step: int) -> None:
        """Do what is to be done between two layers: prefix tokens, and second passes."""
        if step:
            self.layers[step - 1].restore({})  # its sums have done their work
        if step < len(self.layers):
            layer = self.layers[step]
            if layer.passes == 2:
                layer.take_again(0, self.prefix)
                for row, x in self._again():
                    layer.take_again(row, x)
            if self.prefix is not None:
                self.prefix = layer.prefix(self.prefix)
                # The tokens behind the layer, before its patches: the next one takes them first.
                if step in self.taps:
                    self.output.take_prefix(step, self.prefix)
                self._take_prefix(step + 1)

    def _take_prefix(self, step: int = 0) -> None:
        if self.prefix is not None and step < len(self.layers):
            self.layers[step].take_prefix(self.prefix)

    def _again(self, rows: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield tokens as they are now, rows and ``[1, n, D]``: all, or those of the first rows."""
        height = self.grid.height if rows is None else rows
        for first, last in even_bands(height, self._piece_rows):
            yield first, self.tokens.read(first, last).flatten(0, 1)[None]

    def _said(self) -> str:
        step, band = self.place
        of = "the reading" if step == 0 else f"block {step - 1}"
        return f"with band {band + 1} of {of}"

    def _keep(self, stop: bool) -> None:
        """Write a snapshot where one is due, and end where that is asked for."""
        assert self.snapshots is not None
        ended = self.place.step > len(self.layers)
        if not ended and (stop or self.snapshots.due()):
            self.snapshots.write(*self._state(), needed=stop)
        if stop and not ended:
            raise Stopped(f"stopped; {self.work} keeps the work so far, the same command goes on")

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what the pass is to go on with."""
        tensors = {"tokens": self.tokens.rows}
        if self.values is not None:
            tensors["values"] = self.values.rows
        if self.cells is not None:
            tensors["cells"] = self.cells.rows
        step = self.place.step
        for name, sums in (
            ("now", self.layers[step - 1].sums() if step else {}),
            ("next", self.layers[step].sums() if step < len(self.layers) else {}),
            ("output", self.output.sums()),
        ):
            tensors |= {f"{name}.{key}": value for key, value in sums.items()}
        if self.prefix is not None:
            tensors["prefix"] = self.prefix
        if self.above is not None:
            tensors["above"] = self.above
        place = {"step": step, "band": self.place.band, "rows": self.plan.rows, "made": self.made}
        return place, tensors

    def _restore(self, place: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.place = Place(place["step"], place["band"])
        device = self.tokens.device
        for name, store in (
            ("tokens", self.tokens),
            ("values", self.values),
            ("cells", self.cells),
        ):
            if store is not None:
                store.rows.copy_(tensors.pop(name))

        def of(name: str) -> dict[str, Tensor]:
            begin = f"{name}."
            found = {k: x.to(device) for k, x in tensors.items() if k.startswith(begin)}
            return {k.removeprefix(begin): x for k, x in found.items()}

        step = self.place.step
        if step:
            self.layers[step - 1].restore(of("now"))
        if step < len(self.layers):
            self.layers[step].restore(of("next"))
        self.output.restore(of("output"))
        if step - 1 in self.taps:
            done = self._bands_of(step)[self.place.band][0]
            self.output.replay(step - 1, self._again(done))
        self.prefix = tensors["prefix"].to(device) if "prefix" in tensors else None
        self.above = tensors["above"].to(device) if "above" in tensors else None


def _keeps_values(attn: Any) -> bool:
    """Tell whether bands of a block need values besides their sums."""
    rowwise = attn.relative is not None and attn.relative.kind in ("joint", "flat")
    return attn.value_conv is not None or (rowwise and not attn.kind.windows)


def _delete_empty(folder: Path) -> None:
    """Delete the work folder of a pass that left nothing in it."""
    if not any(folder.iterdir()):
        folder.rmdir()


def _on_cpu(result: Any) -> Any:
    return result.cpu() if isinstance(result, Tensor) else result
