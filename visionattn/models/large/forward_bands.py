"""``forward_tiled``: the forward pass block by block over bands of rows, for images of any size.

Attention here needs only sums of constant size and a few nearby rows of all other tokens
(``ops/strips.py``). The tokens of the image are stored twice, before and after one block, and a
block processes them band by band. While the tokens of a band leave a block, the next block
accumulates its sums:

    read pixels, embed     tokens of band 0, 1, ...   -> sums of block 0
    block 0 maps           tokens of band 0, 1, ...   -> sums of block 1
    ...
    the last block maps    tokens of band 0, 1, ...   -> output

A step reads tokens from one store and writes them to the other. Tokens in files are all that a
killed pass needs to resume: finished bands are read again for the sums. All results equal
``forward``, up to the rounding of sums.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from visionattn.cli.exit_codes import Stopped
from visionattn.cli.interruption import Interruption
from visionattn.cli.progress import Progress
from visionattn.cli.tables import lasting
from visionattn.layers import Block
from visionattn.layers.hook_detection import changed
from visionattn.layout import TokenLayout
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.large.attention_of_strips import (
    Around,
    FarSums,
    StripAttention,
    StripSums,
    softmax_of,
    softmax_part,
)
from visionattn.models.large.band_outputs import Dense, Evidenced, Masked, Output, Pooled
from visionattn.models.large.band_plan import Bands, bands_of, plan
from visionattn.models.large.patched_image import PatchedImage
from visionattn.models.large.source_sink import PartSource, Prepare, Sink
from visionattn.models.large.token_store import PassFolder, PassProgress, TokenStore
from visionattn.models.patches import in_eval
from visionattn.models.rowwise_support import check_rowwise, weight_like
from visionattn.models.segmentation import Segmenter
from visionattn.ops.attention_sums import accumulation_dtype
from visionattn.ops.position.relative_position import Flat
from visionattn.ops.strips import Strip, seen_span

Want = Literal["logits", "pooled", "dense", "masks", "probabilities", "evidence"]
OF_PIXELS = ("masks", "probabilities")
"""Outputs of a ``Segmenter``."""
CUT = "; cut the image into tiles instead"
"""End of the error for a model that cannot be computed in bands."""
PIECE_TOKENS = 8192
"""Number of tokens per MLP call: its hidden layer is four times as wide."""


def forward_tiled(
    model: nn.Module,
    source: PartSource,
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
    """Compute the output of a model for an image of any size, in bands of rows.

    The result equals ``forward`` at the image's own size, up to the rounding of sums, with the last
    row and column of pixels repeated up to whole patches. There are no gradients.

    Args:
        model: a ``VisionAttnTransformer`` or a ``Segmenter`` of one, in any mode; it runs in eval
            mode, on its device and in its dtype.
        source: the image, read once from top to bottom: a ``PartSource``, or for
            ``visionattn.forward_tiled`` anything that ``open_source`` opens: a path, an array, a
            tensor.
        sink: receives a map; None: the map is returned.
        want: "logits" ``[1, num_classes]``; "pooled", the features before the classifier
            ``[1, D]``; "dense", the last feature map after the final norm ``[1, D, H, W]``;
            "masks", for a ``Segmenter``, the class of each pixel, uint8 ``[1, H_px, W_px]``, and
            "probabilities", float16 ``[num_classes, H_px, W_px]``; "evidence", the attribution of
            a class (``models/attribution.py``), without the gradient.
        target: for "evidence", the index of the class; None: the most probable.
        memory: memory limit in bytes, in addition to the model and about 24 MiB that operations
            always need (``band_plan.WORKING_BYTES``); tokens that do not fit go to files in the
            system's temporary folder. None: 80 % of the available memory.
        work: a folder, created if needed, for the pass's tokens and, after each band, its progress:
            the same call resumes from there. None: a stopped pass starts over.
        identity: JSON values that distinguish this pass from others in the same folder, in addition
            to the weights and ``want``.
        prepare: turns pixels ``[h, w, channels]`` of the source into the model's input, float
            ``[1, C, h, w]``. None: floating point values are unchanged, others are scaled to [0,
            1].
        say: receives lines about the cost of the pass, and about the time spent reading the file.

    Returns:
        The output, on the CPU; None if it went to the sink.

    Raises:
        ValueError: a model whose blocks need all tokens at once, an image smaller than a patch, a
            memory limit below one band, or a folder with the work of another call.
        Stopped: Ctrl-C or SIGTERM, at the end of a band, if there is a ``work`` folder.
        Exceptions of the source, the sink and ``prepare``.
    """
    if want not in get_args(Want):
        raise ValueError(f"want {want!r}: expected one of {', '.join(get_args(Want))}")
    body = check_tiled(model, want)
    with ExitStack() as stack:
        stack.enter_context(in_eval(model))
        stack.enter_context(torch.inference_mode())
        image = PatchedImage(body, source, prepare)
        own = {"want": want, "target": target, "grid": list(image.grid)}
        folder = None if work is None else PassFolder(Path(work), model, (identity or {}) | own)
        run = _Pass(model, body, image, folder, stack, memory, sink, want, target)
        return run.go(say or (lambda line: None))


def check_tiled(model: nn.Module, want: Want = "logits") -> VisionAttnTransformer:
    """Return the body of a model that can be computed in bands.

    Raises:
        ValueError: it cannot; one line.
    """
    body = model.backbone if isinstance(model, Segmenter) else model
    if not isinstance(body, VisionAttnTransformer):
        raise ValueError(
            "expected a VisionAttnTransformer or a Segmenter of one, got "
            f"{type(body).__name__}{CUT}"
        )
    if isinstance(model, Segmenter) != (want in OF_PIXELS) and want != "dense":
        given = "classes of pixels" if isinstance(model, Segmenter) else "no classes of pixels"
        raise ValueError(f"want {want!r} does not fit the model, which has {given}")
    try:
        check_rowwise(model)
    except ValueError as error:
        raise ValueError(f"{error}{CUT}") from error
    if want in OF_PIXELS and model.neck is not None:
        raise ValueError(f"expected a linear head, got one with a hidden layer{CUT}")
    if want in OF_PIXELS and len(model.taken) > 1 and (why := changed(model.head, nn.Conv2d)):
        raise ValueError(
            f"head {why}, which bands would bypass: with {len(model.taken)} head_blocks, its "
            f"weights are applied block by block{CUT}"
        )
    return body


class _Pass:
    """One forward pass."""

    def __init__(
        self,
        model: nn.Module,
        body: VisionAttnTransformer,
        image: PatchedImage,
        folder: PassFolder | None,
        stack: ExitStack,
        memory: int | None,
        sink: Sink | None,
        want: Want,
        target: int | None,
    ):
        self.body, self.image, self.folder = body, image, folder
        self.layout = TokenLayout(body.num_prefix_tokens, image.grid)
        files: Path | None = folder and folder.folder
        paths: list[Path] = []
        if folder is not None:
            stack.callback(folder.close, paths)
        # A resumed pass keeps its bands, whatever memory is available now.
        known = dict(rows=folder.rows if folder else None, in_files=folder is not None)
        self.plan = plan(body, image.grid, memory, want, model, **known)
        if self.plan.mapped and files is None:
            files = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def stores(name: str, layout: TokenLayout, width: int) -> list[TokenStore]:
            own: list[Path | None] = [files and files / f"{name}.{i}" for i in (0, 1)]
            paths.extend(path for path in own if path)
            return [TokenStore(layout, width, weight_like(body), path) for path in own]

        self.tokens = stores("tokens", self.layout, body.embed_dim)
        self.output: Output
        if isinstance(model, Segmenter) and want in OF_PIXELS:
            cells = None
            if len(model.taken) > 1:
                cells = stores("cells", TokenLayout(0, image.grid), model.cell_logits)
            size = image.source.height, image.source.width
            probable = want == "probabilities"
            self.output = Masked(model, image.grid, size, sink, cells, probable=probable)
        elif want == "dense":
            self.output = Dense(body, image.grid, sink)
        elif want == "evidence":
            self.output = Evidenced(body, image.grid, target)
        else:
            self.output = Pooled(body, image.grid, logits=want == "logits")
        height, rows = image.grid.height, self.plan.rows
        self.bands = [bands_of(height, rows)]
        self.bands += [bands_of(height, rows, block.attn) for block in body.blocks]
        self.begun = PassProgress(0, 0) if folder is None or folder.place is None else folder.place

    def go(self, say: Callable[[str], object]) -> Any:
        """Run the pass, resuming an earlier one if there is any, and return the result."""
        step, number = self.begun
        of = "the reading" if step == 0 else f"block {step - 1}"
        goes_on = self.folder is not None and self.folder.place is not None
        say(f"resuming at band {number + 1} of {of}" if goes_on else self.plan.line)
        done = sum(len(bands) for bands in self.bands[:step]) + number
        begun = time.perf_counter()
        with ExitStack() as stack:
            total, interruption = sum(map(len, self.bands)), Interruption()
            progress = stack.enter_context(Progress(total, done, unit="bands"))
            if self.folder is not None:
                stack.enter_context(interruption)
            for place in stack.enter_context(closing(self._steps())):
                progress.advance(1)
                if self.folder is not None:
                    self.folder.record(place, self.plan.rows)
                    if interruption.requested and progress.done < total:
                        kept = f"{self.folder.folder} keeps the finished bands"
                        raise Stopped(f"stopped; {kept}; run the same command to resume")
        seconds, waited = time.perf_counter() - begun, self.image.waited_s
        if waited:
            share = f"{waited:.1f} s ({100 * waited / seconds:.1f} %)"
            say(f"{lasting(seconds)}, including {share} waiting for the file")
        result = self.output.result(lambda: self._every(self.tokens[1 - len(self.bands) % 2]))
        if self.folder is not None:
            self.folder.finish()
        return result.cpu() if isinstance(result, Tensor) else result

    def _steps(self) -> Iterator[PassProgress]:
        """Process the bands of each step; yield the progress after each band."""
        block: BandBlock | None = None
        # A block needs sums over all tokens before it, which the previous step has written.
        for step in range(max(0, self.begun.step - 1), len(self.bands)):
            following = None
            if step < len(self.body.blocks):
                bands = self.bands[step + 1]
                following = BandBlock(self.body.blocks[step], self.layout, bands)
            yield from self._step(step, block, following)
            block = following

    def _step(
        self, step: int, block: "BandBlock | None", following: "BandBlock | None"
    ) -> Iterator[PassProgress]:
        read, written = self.tokens[1 - step % 2], self.tokens[step % 2]
        bands, done = self.bands[step], 0
        if step <= self.begun.step:
            done = self.begun.bands if step == self.begun.step else len(bands)
        taps = step >= self.begun.step and step - 1 in self.output.taps

        def hand_on(first: int | None, x: Tensor) -> None:
            if taps:
                self.output.take(step - 1, first, x)
            if following is not None:
                following.take(first, x)

        if self.layout.num_prefix:
            if step == 0:
                written.prefix = self.image.prefix()
            elif block is not None:
                written.prefix = block.prefix(read.prefix)
            hand_on(None, written.prefix)
        for first, last in bands[:done]:
            for row, x in self._pieces(first, written.read(first, last)):
                hand_on(row, x)
            if taps:
                self.output.end_band()
        with closing(self.image.bands([] if step else bands[done:])) as embedded:
            for number, (first, last) in enumerate(bands[done:], done + 1):
                if block is None:
                    pieces = self._pieces(first, next(embedded))
                else:
                    pieces = block.band(first, last, read)
                for row, x in pieces:
                    written.write(row, x)
                    hand_on(row, x.to(written.tokens.dtype))
                if taps:
                    self.output.end_band()
                written.flush()
                # The next step overwrites the tokens that this step has read.
                ends = number == len(bands) and step + 1 < len(self.bands)
                yield PassProgress(step + 1, 0) if ends else PassProgress(step, number)
        if following is not None and following.attn.centre_keys:
            following.centre()
            following.take(None, written.prefix)
            for row, x in self._every(written):
                following.take(row, x)

    @property
    def _piece_rows(self) -> int:
        return max(1, PIECE_TOKENS // self.layout.grid.width)

    def _pieces(self, first: int, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield first row and tokens of each piece of ``[1, n, D]`` from row ``first`` on."""
        width = self.layout.grid.width
        for begin, end in bands_of(x.shape[1] // width, self._piece_rows):
            yield first + begin, x[:, begin * width : end * width]

    def _every(self, tokens: TokenStore) -> Iterator[tuple[int, Tensor]]:
        """Yield all rows of a store, piece by piece."""
        for first, last in bands_of(self.layout.grid.height, self._piece_rows):
            yield first, tokens.read(first, last)


class BandBlock:
    """A block over bands of rows: it accumulates sums from incoming tokens, and then maps band
    after band.

    Args:
        block: a block of a model that ``check_rowwise`` accepts.
        layout: layout of the tokens.
        bands: rows of the bands, which do not split windows.
    """

    def __init__(self, block: Block, layout: TokenLayout, bands: Bands):
        self.block, self.attn, self.grid = block, block.attn, layout.grid
        self.strips = StripAttention(block.attn, layout)
        self.sums: StripSums = {}
        self.of_prefix: list[Tensor] = []
        self.key_mean: Tensor | None = None
        self.far: FarSums | None = None
        if self.strips.has_far:
            relative = self.strips.relative
            spans = [seen_span(relative, Strip(self.grid, *band)) for band in bands]
            flat = isinstance(relative, Flat)
            self.far = FarSums(spans, self.grid.num_patches if flat else self.grid.height)

    def take(self, first: int | None, x: Tensor) -> None:
        """Add tokens ``[1, n, D]`` of rows from ``first`` on to the sums; None: the prefix tokens,
        which come first.
        """
        attn, normed = self.attn, self.block.norm1(x)
        if first is None:
            self.of_prefix = attn.heads(normed)
        if self.strips.windows and not self.of_prefix:
            return
        k, v = attn.heads(normed, "kv")
        if attn.centre_keys:
            if self.key_mean is None:
                self._add({"keys": k.sum(2, keepdim=True, dtype=accumulation_dtype(k))})
                return
            k = k - self.key_mean.to(k.dtype)
        if self.strips.windows:
            parts = [softmax_part(self.of_prefix[0], k, v)]
            parts += [self.sums["softmax"]] if "softmax" in self.sums else []
            self.sums["softmax"] = softmax_of(parts)
            return
        rows = None if first is None else v.unflatten(2, (-1, self.grid.width))
        self._add(self.strips.sums(k, v, rows, first or 0))
        if self.far is not None and first is not None:
            flat = isinstance(self.strips.relative, Flat)
            self.far.add(first * self.grid.width if flat else first, v if flat else rows)

    def _add(self, more: StripSums) -> None:
        for name, x in more.items():
            self.sums[name] = self.sums[name] + x if name in self.sums else x

    def centre(self) -> None:
        """Compute the mean key after all keys have come; they come once more, for their sums
        without the mean.
        """
        self.key_mean = self.sums.pop("keys") / self.strips.layout.num_tokens

    def prefix(self, x: Tensor) -> Tensor:
        """Map the prefix tokens ``[1, P, D]``."""
        normed = self.block.norm1(x)
        out = self.strips.of_prefix(self.attn.heads(normed, "q")[0], self.sums).to(normed.dtype)
        return self.block.added(x, self.attn.project(out.transpose(1, 2).flatten(2), normed))

    def band(self, first: int, last: int, tokens: TokenStore) -> Iterator[tuple[int, Tensor]]:
        """Map the tokens of a band; yield first row and new tokens ``[1, n, D]`` of each piece."""
        strip, width, strips = Strip(self.grid, first, last), self.grid.width, self.strips
        whole = strips.rows_around(strip) if strips.sees_rows else strip
        x = tokens.read(whole.first, whole.last)
        normed, begin = self.block.norm1(x), (first - whole.first) * width
        x, own = (each[:, begin : begin + strip.rows * width] for each in (x, normed))
        q = self.attn.heads(own, "q")[0]
        around = self._around(strip, whole, normed) if strips.sees_rows else None
        out = strips.of_patches(q, strip, self.sums, around, self.of_prefix or [q[:, :, :0]] * 3)
        if strips.reach:
            assert around is not None
            out = out + strips.convolved(strip, around, out.dtype)
        for begin, end in bands_of(strip.rows, max(1, PIECE_TOKENS // width)):
            piece = slice(begin * width, end * width)
            attended = self.attn.project(out[:, :, piece].transpose(1, 2).flatten(2), own[:, piece])
            yield first + begin, self.block.added(x[:, piece], attended)

    def _around(self, strip: Strip, whole: Strip, normed: Tensor) -> Around:
        heads = self.attn.heads(normed, "kv" if self.strips.windows else "v")
        *keys, values = (x.unflatten(2, (whole.rows, self.grid.width)) for x in heads)
        if self.far is None:
            return Around(whole, values, keys[0] if keys else None)
        return Around(whole, values, None, *self.far.around(seen_span(self.strips.relative, strip)))
