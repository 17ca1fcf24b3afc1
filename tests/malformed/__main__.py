"""``python -m tests.malformed``: all malformed inputs, and a summary of how the tools took them."""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tests.malformed import flags, images, runs, valid, weights, yaml_texts
from tests.malformed.runner import Case, run

CONTROLS = {
    "resume": valid.RESUME,
    "predict": valid.PREDICT,
    "validate": valid.VALIDATE,
    "features": valid.EXTRACT,
    "share": valid.SHARE,
    "export": valid.EXPORT,
    "train": valid.START,
    "train on masks": valid.START_MASKS,
    "predict masks": valid.PREDICT_MASKS,
    "convert": valid.CONVERT,
    "distil": valid.DISTIL,
    "distil goes on": valid.GO_ON,
    "generate": valid.GENERATE,
    "table": ("report", "profile/memory.csv", "--output", "page.html"),
}
"""What works on valid files: else a case could fail for another reason than its own."""


def all_cases() -> Iterator[Case]:
    """Return every case; their names differ."""
    for name, argv in CONTROLS.items():
        yield Case(f"valid {name}", argv, tolerated="", writes=("",))
    for part in (flags, weights, runs, yaml_texts, images):
        yield from part.cases()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases that are asked for, print each that does not hold, and count them."""
    parser = argparse.ArgumentParser(prog="python -m tests.malformed", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose names this regular expression fits")
    parser.add_argument("--every", type=int, default=1, help="each N-th case alone")
    parser.add_argument("--seconds", type=int, default=60, help="after which a command hangs")
    asked = parser.parse_args(argv)
    cases = [case for case in all_cases() if re.search(asked.only, case.name)][:: asked.every]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="valid") as folder:
        torch.set_num_threads(1)
        valid.write(Path(folder))
        for result in run(cases, Path(folder), seconds=asked.seconds):
            if faults := result.faults():
                failed += 1
                print(f"{result.case.name}\n  {'; '.join(faults)}")
                print(f"  visionattn {' '.join(result.case.argv)[:200]}", flush=True)
    print(f"\n{len(cases)} cases: {len(cases) - failed} held, {failed} did not")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
