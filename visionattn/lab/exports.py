"""Exported files of whole models: ``python -m visionattn.lab.exports`` writes each to ONNX, tries
it at three sizes, and prints the table of ``docs/deployment.md``.

The weights are random, but as large as trained ones: with those of a new model the attention is so
small a part of the output that no trial would see it go wrong.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import timm
import torch
from torch import nn

from visionattn.cli.ends import run_tool
from visionattn.cli.parsing import Parser
from visionattn.cli.provenance import provenance_of, summary
from visionattn.cli.tables import Record, heading, line, sized
from visionattn.models.export import SUFFIXES, export

FAMILIES = ("scaleformer_vit", "taylorshift_vit", "taylorshift_abs_vit")
NAMES = tuple(f"{family}_{letter}" for letter in "tsbl" for family in FAMILIES)
COLUMNS = ("model", "seconds", "size", "largest difference")


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


def rows(names: Sequence[str], format: str) -> Iterator[Record]:
    """Yield for each model the seconds of its export, the bytes of its file, and how far the
    outputs of its trials were from the model's at most.
    """
    for name in names:
        model = liven(timm.create_model(name)).eval()
        with TemporaryDirectory() as folder:
            path, begun = Path(folder) / f"{name}{SUFFIXES[format]}", time.perf_counter()
            trials = export(model, path, format)
            seconds = time.perf_counter() - begun
            yield {
                "model": name,
                "seconds": seconds,
                "bytes": path.stat().st_size,
                "largest difference": max(trial.difference for trial in trials),
            }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and return an exit code."""
    return run_tool(lambda: _print_table(sys.argv[1:] if argv is None else argv))


def _print_table(argv: Sequence[str]) -> None:
    parser = Parser(prog="python -m visionattn.lab.exports", description=__doc__)
    parser.add_argument("--models", nargs="+", default=NAMES, help="timm names of ours")
    parser.add_argument("--format", default="onnx", choices=tuple(SUFFIXES))
    options = parser.parse_args(argv)
    origin = provenance_of("cpu", ["lab.exports", *argv])
    print(summary(origin), heading(COLUMNS), sep="\n", flush=True)
    for row in rows(options.models, options.format):
        known = (f"`{row['model']}`", f"{row['seconds']:.0f}", sized(row["bytes"]))
        print(line((*known, f"{row['largest difference']:.1e}")), flush=True)


if __name__ == "__main__":
    sys.exit(main())
