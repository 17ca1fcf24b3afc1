"""Whole images against tiles: ``python -m visionattn.lab.large`` measures the tables of
``docs/large.md``.

Models that come with weights classify test images of their data sets that are far larger than those
of their training, whole, and in overlapping tiles whose outputs are put together in several ways.
Accuracy is that of the same images for all; seconds are those of one forward, taken in turns; peak
memory is that of the largest of the images, above weights and image, each in a fresh process.
"""

import json
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
from visionattn.cli.files import add_line, check_free, write_text
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


def see(
    model: nn.Module, inputs: Tensor, label: int, cuts: Sequence[Cut], turn: int
) -> list[Record]:
    """Return for an image ``[1, C, H, W]``, whole and in each kind of tiles, how many tiles there
    are, which ways name its class, and the seconds.

    Args:
        turn: the number of the kind that comes first.
    """
    kinds: list[Cut | None] = [None, *cuts]
    turn %= len(kinds)
    found = []
    for kind in (*kinds[turn:], *kinds[:turn]):
        begun = time.process_time()
        if kind is None:
            logits, values = model(inputs), {}
        else:
            logits, features = of_tiles(model, inputs, kind)
            head = model.get_classifier()
            values = {way: put(logits, features, head) for way, put in WAYS.items()}
        seconds = time.process_time() - begun
        values = values or {WHOLE: logits[0]}
        right = {way: int(value.argmax()) == label for way, value in values.items()}
        row = {"cut": kind, "tiles": len(logits), "right": right, "seconds": seconds}
        found.append(row | {"pixels": inputs[0, 0].numel()})
    return found


def see_all(
    name: str, px: int, cuts: Sequence[Cut], count: int, kept: Path | None
) -> list[list[Record]]:
    """Return what ``see`` returns of each of so many images; those in the file ``kept`` are not
    computed again, and others are added to it.
    """
    model = timm.create_model(name, pretrained=True).eval()
    known = _read(kept, name, px, cuts)
    warm = False
    found = []
    with torch.inference_mode():
        for index, (inputs, label) in enumerate(_inputs(model, name, px, count)):
            if index not in known:
                if not warm:  # libraries start in the first pass
                    see(model, inputs, label, cuts, index)
                    warm = True
                known[index] = see(model, inputs, label, cuts, index)
                if kept is not None:
                    said = {"model": name, "px": px, "index": index, "rows": known[index]}
                    add_line(kept, said)
            found.append(known[index])
    return found


def _read(kept: Path | None, name: str, px: int, cuts: Sequence[Cut]) -> dict[int, list[Record]]:
    """Return the rows of images that a file has, by their numbers; of the same tiles alone."""
    found: dict[int, list[Record]] = {}
    if kept is None or not kept.exists():
        return found
    kinds = {None, *cuts}
    for text in kept.read_text(encoding="utf-8").splitlines():
        try:
            said = json.loads(text)
        except ValueError:  # the line in which an earlier run was killed
            continue
        rows = [row | {"cut": row["cut"] and Cut(*row["cut"])} for row in said["rows"]]
        if (said["model"], said["px"], {row["cut"] for row in rows}) == (name, px, kinds):
            found[said["index"]] = rows
    return found


def measure(
    name: str, px: int, cuts: Sequence[Cut], count: int, kept: Path | None = None
) -> list[Record]:
    """Return a row of plain values for the whole image, and for each way of each kind of tiles.

    Args:
        name: a model that comes with weights, named after its data.
        px: longest side of the images.
        cuts: kinds of tiles.
        count: how many images.
        kept: a file of what is known of images; None: all are computed.
    """
    found = see_all(name, px, cuts, count, kept)
    largest = max(range(count), key=lambda index: found[index][0]["pixels"])
    of_kind = {
        kind: [row for rows in found for row in rows if row["cut"] == kind]
        for kind in (None, *cuts)
    }
    whole = of_kind[None]
    records = []
    for kind, rows in of_kind.items():
        seconds = [row["seconds"] for row in rows]
        shared = {"tiles_mean": float(np.mean([row["tiles"] for row in rows]))}
        shared |= spread("seconds", Quartiles.of(seconds))
        shared |= spread("ratio", ratio_of(seconds, [row["seconds"] for row in whole]))
        shared |= {"peak_bytes": _peak(name, px, largest, kind)}
        cut = dict(zip(Cut._fields, kind or (None, None, None), strict=True))
        for way in rows[0]["right"]:
            right = [row["right"][way] for row in rows]
            pairs = accuracies(right, [row["right"][WHOLE] for row in whole])
            about = {"model": name, "px": px, "images": count, "method": way}
            records.append(about | cut | pairs | shared)
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
    kept = "file to which each image is added when it is done, and from which the next call goes on"
    parser.add_argument("--kept", help=kept)
    flags = parser.parse_args(argv)

    def work() -> None:
        names = flags.names or [*CASES]
        if unknown := [name for name in names if name not in CASES]:
            raise ValueError(f"{unknown[0]} is none of those measured here: {', '.join(CASES)}")
        kept = Path(flags.kept) if flags.kept else None
        for path in (flags.csv, flags.kept):
            if path:
                check_free(Path(path), overwrite=True)
        words = ["python", "-m", "visionattn.lab.large", *(argv or sys.argv[1:])]
        provenance = provenance_of("cpu", [], threads=flags.threads)
        provenance["command"] = shlex.join(words)
        print(summary(provenance), flush=True)
        before, records = torch.get_num_threads(), []
        torch.set_num_threads(flags.threads)
        try:
            for name in names:
                found = measure(name, PX, CASES[name], flags.images, kept)
                print(f"\n{name}\n\n{table(found)}", flush=True)
                records += found
                if flags.csv:  # as soon as a model is done
                    write_text(flags.csv, csv_text(records, provenance))
        finally:
            torch.set_num_threads(before)

    return run_tool(work)


if __name__ == "__main__":
    raise SystemExit(main())
