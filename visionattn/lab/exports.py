"""Exported files of whole models: ``python -m visionattn.lab.exports`` writes each to ONNX, tries
it at three sizes, and prints the table of ``docs/deployment.md``. With ``--px`` it prints the other
table there: how long an image takes in each kind of file, beside the model.

The weights are random, but as large as trained ones: with those of a new model the attention is so
small a part of the output that no trial would see it go wrong.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
from torch import Tensor, nn

from visionattn.cli.ends import run_tool
from visionattn.cli.parsing import Parser
from visionattn.cli.provenance import provenance_of, summary
from visionattn.cli.tables import Record, heading, line, sized
from visionattn.lab.measure import interleaved_seconds, warm_up
from visionattn.models.export import SUFFIXES, export, runner

FAMILIES = ("scaleformer_vit", "taylorshift_vit", "taylorshift_abs_vit")
NAMES = tuple(f"{family}_{letter}" for letter in "tsbl" for family in FAMILIES)
COLUMNS = ("model", "format", "seconds", "size", "largest difference")
EAGER = "eager"


@torch.no_grad()
def liven(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw the weights of a model so that each part of it changes the output, and return it."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "relative" not in name:
            fan_in = parameter[0].numel()
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * max(fan_in, 16) ** -0.5)
    return model


def rows(names: Sequence[str], formats: Sequence[str]) -> Iterator[Record]:
    """Yield for each model and format the seconds of the export, the bytes of the file, and how far
    the outputs of its trials were from the model's at most.
    """
    for name, format in product(names, formats):
        model = liven(timm.create_model(name)).eval()
        with TemporaryDirectory() as folder:
            path, begun = Path(folder) / f"{name}{SUFFIXES[format]}", time.perf_counter()
            trials = export(model, path, format)
            seconds = time.perf_counter() - begun
            yield {
                "model": name,
                "format": format,
                "seconds": seconds,
                "bytes": path.stat().st_size,
                "largest difference": max(trial.difference for trial in trials),
            }


def speeds(
    name: str, formats: Sequence[str], sides_px: Sequence[int], **args: Any
) -> Iterator[Record]:
    """Yield for each side of square images the median seconds of one image through a model, and
    through its exported files; they take turns.

    Args:
        name: of a model of ours.
        formats: keys of ``SUFFIXES``.
        sides_px: whole patches.
        args: of the model.
    """
    model = liven(timm.create_model(name, **args)).eval()
    with TemporaryDirectory() as folder, torch.inference_mode():
        runs: dict[str, Callable[[Tensor], object]] = {EAGER: model}
        for format in formats:
            path = Path(folder) / f"model{SUFFIXES[format]}"
            export(model, path, format)
            runs[format] = runner(path, format)
        for side in sides_px:
            images = torch.randn(1, model.patch_embed.proj.in_channels, side, side)
            works = [partial(run, images) for run in runs.values()]
            samples = interleaved_seconds(works, [warm_up(work) for work in works])
            yield {"model": name, "px": side} | dict(zip(runs, map(median, samples), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table, and return an exit code."""
    return run_tool(lambda: _print_table(sys.argv[1:] if argv is None else argv))


def _print_table(argv: Sequence[str]) -> None:
    parser = Parser(prog="python -m visionattn.lab.exports", description=__doc__)
    parser.add_argument("--models", nargs="+", default=NAMES, help="timm names of ours")
    parser.add_argument("--formats", nargs="+", default=("onnx",), choices=tuple(SUFFIXES))
    parser.add_argument("--px", nargs="+", type=int, default=(), help="sides of images to time")
    options = parser.parse_args(argv)
    origin = provenance_of("cpu", ["lab.exports", *argv])
    columns = ("model", "image", EAGER, *options.formats) if options.px else COLUMNS
    print(summary(origin), heading(columns), sep="\n", flush=True)
    for name in options.models:
        if options.px:
            for row in speeds(name, options.formats, options.px):
                print(line(_timed(row, options.formats)), flush=True)
        else:
            for row in rows([name], options.formats):
                print(line(_written(row)), flush=True)


def _written(row: Record) -> Sequence[str]:
    known = (f"`{row['model']}`", row["format"], f"{row['seconds']:.0f}", sized(row["bytes"]))
    return *known, f"{row['largest difference']:.1e}"


def _timed(row: Record, formats: Sequence[str]) -> Sequence[str]:
    eager = row[EAGER]
    files = (f"{1e3 * row[name]:.4g}, {row[name] / eager:.3g}" for name in formats)
    return f"`{row['model']}`", f"{row['px']} px", f"{1e3 * eager:.4g}", *files


if __name__ == "__main__":
    sys.exit(main())
