"""Whole images against tiles: ``python -m visionattn.lab.large`` measures the tables of
``docs/large.md``.

Models that come with weights classify test images of their data sets that are far larger than those
of their training, whole, and in overlapping tiles whose outputs are put together in several ways.
Accuracy is that of the same images for all; seconds are those of one forward, taken in turns; peak
memory is that of the largest of the images, above weights and image, each in a fresh process.
"""

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import timm
import torch
from einops import rearrange
from torch import Tensor, nn

from visionattn.cli.ends import run_tool
from visionattn.cli.files import check_free, write_text
from visionattn.cli.fresh_process import ask
from visionattn.cli.parsing import Parser, whole_from
from visionattn.cli.provenance import provenance_of, summary
from visionattn.cli.tables import Record, csv_text, duration, heading, line, mebibytes
from visionattn.lab.compare import Quartiles, ratio_of, spread
from visionattn.lab.measure import peak_bytes
from visionattn.lab.pointing import examples
from visionattn.models.tiles import forward_tiles, tiling

PX = 2048
"""The side of canvases, and the most that the longest side of a page may be."""


class Cut(NamedTuple):
    """Into which tiles an image is cut."""

    tile: int
    """In pixels."""
    overlap: int
    """No less than the largest mark or digit, so that each lies whole in a tile."""
    batch_size: int
    """Tiles at once; those of a batch have the pixels of one tile of 512 px."""


PAGES = (Cut(512, 64, 1), Cut(1024, 128, 1))
CASES: dict[str, tuple[Cut, ...]] = {
    "taylorshift_vit_documents": PAGES,
    "scaleformer_vit_documents": PAGES,
    "taylorshift_vit_canvas": (Cut(128, 40, 16), Cut(256, 40, 4), Cut(512, 64, 1)),
}
"""Models, and tiles from about the largest size of their training on."""
WAYS: dict[str, Callable[[Tensor, Tensor, nn.Module], Tensor]] = {
    "mean of logits": lambda logits, features, head: logits.mean(0),
    "mean of probabilities": lambda logits, features, head: logits.softmax(1).mean(0),
    "maximum of logits": lambda logits, features, head: logits.amax(0),
    "maximum of probabilities": lambda logits, features, head: logits.softmax(1).amax(0),
    "maximum of features": lambda logits, features, head: head(features.amax(0)),
}
"""How logits ``[tiles, classes]`` and features ``[tiles, D]`` become a number for each class."""
WHOLE = "whole image"
AGAINST = "maximum of logits"
"""The way of which the difference to the whole image is in the tables."""


def of_tiles(model: nn.Module, inputs: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """Return the logits and the pooled features of all tiles of ``[1, C, H, W]``."""
    patch_px = tuple(model.patch_embed.patch_size)
    height, width = inputs.shape[2:]
    places = list(tiling(height, width, cut.tile, cut.overlap, patch_px).places())
    found = []
    for first in range(0, len(places), cut.batch_size):
        some = places[first : first + cut.batch_size]
        batch = torch.cat([inputs[:, :, rows, columns] for rows, columns in some])
        found.append(model.forward_head(model.forward_features(batch), pre_logits=True))
    features = torch.cat(found)
    return model.get_classifier()(features), features


def measure(name: str, px: int, cuts: Sequence[Cut], count: int) -> list[Record]:
    """Return a row of plain values for the whole image, and for each way of each kind of tiles.

    Args:
        name: a model that comes with weights, named after its data.
        px: longest side of the images.
        cuts: kinds of tiles.
        count: how many images.
    """
    model = timm.create_model(name, pretrained=True).eval()
    head = model.get_classifier()
    kinds: list[Cut | None] = [None, *cuts]
    seconds: dict[Cut | None, list[float]] = {kind: [] for kind in kinds}
    right: dict[tuple[Cut | None, str], list[bool]] = {}
    numbers: dict[Cut | None, list[int]] = {kind: [] for kind in kinds}
    largest = (0, 0)
    with torch.inference_mode():
        for index, (inputs, label) in enumerate(_inputs(model, name, px, count)):
            largest = max(largest, (inputs.numel(), -index))
            if not index:  # libraries start in the first pass
                model(inputs)
            turn = index % len(kinds)
            for kind in (*kinds[turn:], *kinds[:turn]):
                begun = time.process_time()
                if kind is None:
                    logits, found = model(inputs), {WHOLE: None}
                else:
                    logits, features = of_tiles(model, inputs, kind)
                    found = {way: put(logits, features, head) for way, put in WAYS.items()}
                seconds[kind].append(time.process_time() - begun)
                numbers[kind].append(len(logits))
                for way, values in found.items():
                    chosen = int((logits[0] if values is None else values).argmax())
                    right.setdefault((kind, way), []).append(chosen == label)
    records = []
    peaks = {kind: _peak(name, px, -largest[1], kind) for kind in kinds}
    for kind in kinds:
        for way in [WHOLE] if kind is None else WAYS:
            cut = (None, None, None) if kind is None else kind
            record = {"model": name, "px": px, "images": count, "method": way}
            record |= dict(zip(Cut._fields, cut, strict=True))
            record["tiles_mean"] = float(np.mean(numbers[kind]))
            record |= accuracies(right[kind, way], right[None, WHOLE])
            record |= spread("seconds", Quartiles.of(seconds[kind]))
            record |= spread("ratio", ratio_of(seconds[kind], seconds[None]))
            records.append(record | {"peak_bytes": peaks[kind]})
    return records


def accuracies(right: Sequence[bool], whole: Sequence[bool]) -> Record:
    """Return the share that is right, its difference to that of whole images, and the standard
    errors of both; that of the difference is of pairs.
    """
    share, pairs = float(np.mean(right)), np.subtract(right, whole, dtype=float)
    return {
        "accuracy": share,
        "standard_error": (share * (1 - share) / len(right)) ** 0.5,
        "difference": float(pairs.mean()),
        "difference_error": float(pairs.std()) / len(pairs) ** 0.5,
    }


def _inputs(model: nn.Module, name: str, px: int, count: int) -> Iterator[tuple[Tensor, int]]:
    """Yield test images as the model takes them, ``[1, C, H, W]``, with their classes."""
    patch_px = tuple(model.patch_embed.patch_size)
    for image, label, _ in examples(name.rpartition("_")[2], px, count, patch_px):
        pixels = torch.from_numpy(rearrange(image, "h w c -> 1 c h w").copy())
        yield model.data_spec.prepare(pixels), label


def _peak(name: str, px: int, index: int, cut: Cut | None) -> int:
    # The module that is run has no name by which another process could find it.
    from visionattn.lab.large import peak_here

    given = {"name": name, "px": px, "index": index, "threads": torch.get_num_threads()}
    return ask(peak_here, given | {"cut": cut}, f"{name} at {px} px")


def peak_here(name: str, px: int, index: int, threads: int, cut: list[int] | None) -> int:
    """Return the bytes that a forward of a test image takes in this process, above weights and
    image.

    Args:
        name: the model.
        px: longest side of the images.
        index: of the image.
        threads: of torch.
        cut: a ``Cut``; None: the whole image.
    """
    torch.set_num_threads(threads)
    model = timm.create_model(name, pretrained=True).eval()
    *_, (inputs, _) = _inputs(model, name, px, index + 1)

    def work() -> object:
        if cut is None:
            return model(inputs)
        tile, overlap, batch_size = cut
        size = {"tile": tile, "overlap": overlap, "batch_size": batch_size}
        return forward_tiles(model, inputs, combine="max", **size)

    with torch.inference_mode():
        work()
        return peak_bytes(work)


def table(records: Sequence[Record]) -> str:
    """Return the table of a model, in Markdown: a row for whole images and each kind of tile."""
    differs = f"{AGAINST} against {WHOLE}"
    columns = ["", *WAYS, differs, "seconds", "times", "peak memory"]
    kinds = dict.fromkeys((r["tile"], r["overlap"], r["tiles_mean"]) for r in records)
    rows = []
    for kind in kinds:
        own = {
            record["method"]: record
            for record in records
            if (record["tile"], record["overlap"], record["tiles_mean"]) == kind
        }
        any_of = next(iter(own.values()))
        if WHOLE in own:
            first, shares = f"{WHOLE}: {percent(any_of)}", [None] * (len(WAYS) + 1)
        else:
            first = f"{kind[2]:.3g} tiles of {kind[0]} px, overlap {kind[1]}"
            low = own[AGAINST]
            apart = f"{100 * low['difference']:+.1f} ± {100 * low['difference_error']:.1f}"
            shares = [*(percent(own[way]) for way in WAYS), apart]
        rows.append(
            [first, *shares, duration(any_of["seconds_median"]), f"{any_of['ratio_median']:.2f}"]
            + [mebibytes(any_of["peak_bytes"])]
        )
    return "\n".join([heading(columns), *map(line, rows)])


def percent(record: Record) -> str:
    """Write an accuracy with its standard error, both in %."""
    return f"{100 * record['accuracy']:.1f} ± {100 * record['standard_error']:.1f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table for each model, and write the rows; return the exit code."""
    about = "Measure whole images against tiles: accuracy, seconds and memory."
    parser = Parser("python -m visionattn.lab.large", description=about)
    parser.add_argument("names", nargs="*", help="models; none: all")
    parser.add_argument("--images", type=whole_from(1), default=200, help="test images of each")
    parser.add_argument("--threads", type=whole_from(1, 1024), default=1, help="threads of torch")
    parser.add_argument("--csv", help="file for the rows, which is replaced")
    flags = parser.parse_args(argv)

    def work() -> None:
        names = flags.names or [*CASES]
        if unknown := [name for name in names if name not in CASES]:
            raise ValueError(f"{unknown[0]} is none of those measured here: {', '.join(CASES)}")
        if flags.csv:
            check_free(Path(flags.csv), overwrite=True)
        words = ["python", "-m", "visionattn.lab.large", *(argv or sys.argv[1:])]
        provenance = provenance_of("cpu", [], threads=flags.threads)
        provenance["command"] = shlex.join(words)
        print(summary(provenance), flush=True)
        before, records = torch.get_num_threads(), []
        torch.set_num_threads(flags.threads)
        try:
            for name in names:
                found = measure(name, PX, CASES[name], flags.images)
                print(f"\n{name}\n\n{table(found)}", flush=True)
                records += found
                if flags.csv:  # as soon as a model is done
                    write_text(flags.csv, csv_text(records, provenance))
        finally:
            torch.set_num_threads(before)

    return run_tool(work)


if __name__ == "__main__":
    raise SystemExit(main())
