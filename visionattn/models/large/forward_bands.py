"""``forward_tiled``: the forward pass block by block over bands of rows, for images of any size.

Attention here needs only sums of constant size and a few nearby rows of all other tokens
(``ops/strips.py``). The tokens of the image are stored twice, before and after one block. A block
first sums over all tokens, and then maps them band by band:

    read pixels, embed       bands of store 0
    block 0    store 0   ->  sums, then bands of store 1
    block 1    store 1   ->  sums, then bands of store 0
    ...
    output     the store of the last block, band by band

Tokens in files are all that a killed pass needs to resume. All results equal ``forward``, up to
the rounding of sums.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import reduce
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
        sink: receives a map, only for maps; None: the map is returned.
        want: "logits" ``[1, num_classes]``; "pooled", the features before the classifier
            ``[1, D]``; "dense", the last feature map after the final norm ``[1, D, H, W]``;
            "masks", for a ``Segmenter``, the class of each pixel, uint8 ``[1, H_px, W_px]``, and
            "probabilities", float16 ``[num_classes, H_px, W_px]``; "evidence", the attribution of
            a class (``models/attribution.py``), without the gradient.
        target: only for "evidence", the index of the class; None: the most probable.
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
            memory limit below one band, an option without effect, or a folder with the work of
            another call.
        Stopped: Ctrl-C or SIGTERM, after at most one more band, if there is a ``work`` folder.
        Exceptions of the source, the sink and ``prepare``.
    """
    if want not in get_args(Want):
        raise ValueError(f"want {want!r}: expected one of {', '.join(get_args(Want))}")
    if sink is not None and want not in ("dense", *OF_PIXELS):
        raise ValueError(f"a sink needs a map, got want {want!r}; remove it")
    if target is not None and want != "evidence":
        raise ValueError(f"target needs want 'evidence', got {want!r}; remove it")
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
    if want in OF_PIXELS and model.neck is not None:
        raise ValueError(f"expected a linear head, got one with a hidden layer{CUT}")
    try:
        check_rowwise(body if want == "dense" else model)
    except ValueError as error:
        raise ValueError(f"{error}{CUT}") from error
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
        if folder is not None:
            stack.callback(folder.close)
        # A resumed pass keeps its bands, whatever memory is available now.
        known = dict(rows=folder.rows if folder else None, in_files=folder is not None)
        self.plan = plan(body, image.grid, memory, want, model, **known)
        if self.plan.mapped and files is None:
            files = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def stores(name: str, layout: TokenLayout, width: int) -> list[TokenStore]:
            own = [files and files / f"{name}.{i}" for i in (0, 1)]
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
            self.output = Evidenced(body, target)
        else:
            self.output = Pooled(body, logits=want == "logits")
        height, rows = image.grid.height, self.plan.rows
        self.bands = [bands_of(height, rows)]
        self.bands += [bands_of(height, rows, block.attn) for block in body.blocks]
        self.begun = PassProgress(0, 0) if folder is None or folder.place is None else folder.place

    def go(self, say: Callable[[str], object]) -> Any:
        """Run the pass, resuming an earlier one if there is any, and return the result."""
        step, number = self.begun
        of = "the reading" if step == 0 else f"block {step - 1}"
        goes_on = self.folder is not None and self.folder.place is not None
        next_band = min(number + 1, len(self.bands[step]))  # all are done: the output is left
        say(f"resuming at band {next_band} of {of}" if goes_on else self.plan.line)
        # Tapped steps pass their bands twice: once to compute them, once for the output.
        counts = [
            len(bands) * (2 if after - 1 in self.output.taps else 1)
            for after, bands in enumerate(self.bands)
        ]
        begun, interruption = time.perf_counter(), Interruption()
        with ExitStack() as stack:
            progress = Progress(sum(counts), sum(counts[:step]) + number, unit="bands")
            stack.enter_context(progress)
            if self.folder is not None:
                stack.enter_context(interruption)
            for place in stack.enter_context(closing(self._steps())):
                progress.advance(0 if place is None else 1)
                if self.folder is not None:
                    if place is not None:
                        self.folder.record(place, self.plan.rows)
                    if interruption.requested and progress.done < progress.total:
                        kept = f"{self.folder.folder} keeps the finished bands"
                        raise Stopped(f"stopped; {kept}; run the same command to resume")
        seconds, waited = time.perf_counter() - begun, self.image.waited_s
        if waited:
            share = f"{waited:.1f} s ({100 * waited / seconds:.1f} %)"
            say(f"{lasting(seconds)}, including {share} waiting for the file")
        result = self.output.result(self.tokens[1 - len(self.bands) % 2], self.bands[-1])
        if self.folder is not None:
            self.folder.finish()
        return result.cpu() if isinstance(result, Tensor) else result

    def _steps(self) -> Iterator[PassProgress | None]:
        """Process the bands of each step; yield the progress after each band, and None where a stop
        changes no progress.
        """
        for step in range(self.begun.step, len(self.bands)):
            bands = self.bands[step]
            yield from self._compute(step, self.begun.bands if step == self.begun.step else 0)
            if step - 1 in self.output.taps:
                for first, last in bands:
                    self.output.take(step - 1, self.tokens[step % 2], first, last)
                    yield PassProgress(step, len(bands))

    def _compute(self, step: int, done: int) -> Iterator[PassProgress | None]:
        """Write the tokens of a step, band by band, except for bands that are done."""
        read, written = self.tokens[1 - step % 2], self.tokens[step % 2]
        bands = self.bands[step][done:]
        if step == 0:
            prefix = self.image.prefix()
            if prefix is not None:
                written.prefix = prefix
            with closing(self.image.bands(bands)) as embedded:
                for number, ((first, _), x) in enumerate(zip(bands, embedded, strict=True), 1):
                    written.write(first, x)
                    written.flush()
                    yield PassProgress(step, done + number)
        elif bands:  # else the next step may have written to the store that this one reads
            block = BandBlock(self.body.blocks[step - 1], self.layout, self.bands[step])
            for _ in block.sum_over(read, self.bands[step - 1]):
                yield None
            if self.layout.num_prefix:
                written.prefix = block.prefix(read.prefix)
            for number, (first, last) in enumerate(bands, 1):
                for row, x in block.band(first, last, read):
                    written.write(row, x)
                written.flush()
                yield PassProgress(step, done + number)


class BandBlock:
    """A block over bands of rows: it sums over all tokens, and then maps band after band.

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

    def sum_over(self, tokens: TokenStore, bands: Bands) -> Iterator[None]:
        """Compute the sums over all tokens, in pieces of bands; yield after each piece."""
        if self.attn.centre_keys:
            sums = []
            for _, x in tokens.pieces(bands):
                k = self.attn.heads(self.block.norm1(x), "kv")[0]
                sums.append(k.sum(2, keepdim=True, dtype=accumulation_dtype(k)))
                yield
            self.key_mean = reduce(torch.add, sums) / tokens.layout.num_tokens
        if tokens.layout.num_prefix or not self.strips.windows:
            for first, x in tokens.pieces(bands):
                self._add(first, x)
                yield

    def _add(self, first: int | None, x: Tensor) -> None:
        """Add the prefix tokens, which come first, or tokens ``[1, n, D]`` of rows."""
        normed = self.block.norm1(x)
        if first is None:
            self.of_prefix = self.attn.heads(normed)
        k, v = self.attn.heads(normed, "kv")
        if self.key_mean is not None:
            k = k - self.key_mean.to(k.dtype)
        if self.strips.windows:
            part = softmax_part(self.of_prefix[0], k, v)
            known = self.sums.get("softmax")
            self.sums["softmax"] = part if known is None else softmax_of([part, known])
            return
        rows = None if first is None else v.unflatten(2, (-1, self.grid.width))
        for name, more in self.strips.sums(k, v, rows, first or 0).items():
            self.sums[name] = self.sums[name] + more if name in self.sums else more
        if self.far is not None and first is not None:
            flat = isinstance(self.strips.relative, Flat)
            self.far.add(first * self.grid.width if flat else first, v if flat else rows)

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
        for begin, end in bands_of(strip.rows, tokens.piece_rows):
            piece = slice(begin * width, end * width)
            attended = self.attn.project(out[:, :, piece].transpose(1, 2).flatten(2), own[:, piece])
            yield first + begin, self.block.added(x[:, piece], attended)

    def _around(self, strip: Strip, whole: Strip, normed: Tensor) -> Around:
        heads = self.attn.heads(normed, "kv" if self.strips.windows else "v")
        *keys, values = (x.unflatten(2, (whole.rows, self.grid.width)) for x in heads)
        if self.far is None:
            return Around(whole, values, keys[0] if keys else None)
        return Around(whole, values, None, *self.far.around(seen_span(self.strips.relative, strip)))
