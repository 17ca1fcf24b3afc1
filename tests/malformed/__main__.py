"""``python -m tests.malformed``: all malformed inputs, and a summary of how the tools took them."""

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.malformed import (
    features,
    flags,
    images,
    reports,
    runs,
    states,
    valid,
    weights,
    yaml_texts,
)
from tests.malformed.runner import Case, Result, run

CONTROLS = {
    "resume": valid.RESUME,
    "predict": valid.PREDICT,
    "validate": valid.VALIDATE,
    "features": valid.EXTRACT,
    "probe": valid.PROBE,
    "report": valid.REPORT,
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
    for part in (flags, states, weights, features, runs, yaml_texts, images, reports):
        yield from part.cases()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases that are asked for, print each that does not hold, and count them."""
    parser = argparse.ArgumentParser(prog="python -m tests.malformed", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose names this regular expression fits")
    parser.add_argument("--every", type=int, default=1, help="each N-th case alone")
    parser.add_argument("--jobs", type=int, default=1, help="commands at a time")
    parser.add_argument("--seconds", type=float, default=60, help="after which a command hangs")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--verbose", action="store_true", help="print what every command said")
    asked = parser.parse_args(argv)
    cases = [case for case in all_cases() if re.search(asked.only, case.name)][:: asked.every]
    if asked.list:
        print("\n".join(case.name for case in cases))
        return 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="valid") as folder:
        valid.warm_up()
        valid.write(Path(folder))
        failed: list[tuple[Result, list[str]]] = []
        kinds: Counter[str] = Counter()
        for result in run(cases, Path(folder), jobs=asked.jobs, seconds=asked.seconds):
            faults = result.faults()
            if faults:
                failed.append((result, faults))
                kinds[faults[0].partition(":")[0]] += 1
                print(f"{result.case.name}\n  {'; '.join(faults)}")
                print(f"  visionattn {' '.join(result.case.argv)[:200]}", flush=True)
            elif asked.verbose:
                print(f"{result.case.name}: {(result.err or result.out)[:300].strip()}")
    print(
        f"\n{len(cases)} cases in {time.monotonic() - begin:.0f} s: {len(cases) - len(failed)}",
        end="",
    )
    print(f" held, {len(failed)} did not")
    for kind, count in kinds.most_common():
        print(f"  {count} {kind}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
