"""The head-count ablation: ``python tools/sweep_heads.py --base configs/digits.yaml --heads 2 4
8``.

Trains and measures one configuration over head counts, attentions, forms, seeds and image sizes.
The same command goes on where an earlier one ended. Exit codes: 0; 2 for bad input, and where every
cell failed; 4 where some did, after the tables; 130 for Ctrl-C.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from visionattn.cli.ends import run_tool
from visionattn.lab.sweep.run import sweep

TRAIN = (sys.executable, str(Path(__file__).resolve().parent / "train.py"))


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep as the flags say; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return run_tool(lambda: sweep(argv, lambda text: print(text, flush=True), train=TRAIN))


if __name__ == "__main__":
    sys.exit(main())
