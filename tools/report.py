"""A page about runs, sweeps and memory profiles: ``python tools/report.py checkpoints/digits
checkpoints/sweeps/try``.

One file of HTML that needs no network: results, curves, images with predictions, settings that
differ, head counts, memory. It is ``report.html`` in the first folder unless ``--output`` says
otherwise. Exit codes: 0; 2 for bad input.
"""

import sys
from collections.abc import Sequence

from visionattn.cli.ends import run_tool
from visionattn.lab.report.page import report


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page that the flags ask for; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return run_tool(lambda: print(report(argv), flush=True))


if __name__ == "__main__":
    sys.exit(main())
