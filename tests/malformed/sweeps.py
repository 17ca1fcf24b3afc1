"""Folders of sweeps that are not as they were written."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.malformed.mutations import (
    BYTES,
    GARBLED_JSON,
    broken_trees,
    change_file,
    few,
    graft,
    replace_by_folder,
    rewrite,
    write,
)
from tests.malformed.runner import Case
from tests.malformed.valid import SWEEP

CELL = {
    "cell": {"network": {"attention": "taylorshift", "heads": 2}, "seed": 0},
    "ending": {
        "status": "finished",
        "reason": None,
        "exit_code": 0,
        "seconds": 3.5,
        "attempts": 1,
        "result": {"best_epoch": 1, "validation_accuracy": 0.5, "test_accuracy": None},
        "provenance": {"commit": "c0ffee"},
    },
}
ENTRY = {"status": "ok", "reason": None, "peak_bytes": 1, "backends": ["x"], "seconds": [0.5]}
MEASURED = {
    "network": {"attention": "taylorshift"},
    "conditions": {"device": "cpu", "batch": 2, "rounds": 2},
    "timed": "2026-01-02 03:04:05 UTC",
    "provenance": {"processor": "one", "load": 0.5, "commit": None, "date": "2026-01-02"},
    "inference": ENTRY,
    "training": ENTRY,
}
SWEPT = {
    "base": {
        "model": {"name": "x", "args": {"depth": 1}},
        "data": {"name": "folder"},
        "optim": {"lr": 0.1},
        "epochs": 1,
    },
    "calls": [{"command": "x", "date": "2026", "commit": None, "jobs": 1, "seconds": 1.5}],
}
CELL_FILE = "sweep/cells/taylorshift_h2_direct_16px_seed0.json"
MEASURED_FILE = "sweep/measurements/taylorshift_h2_direct_16px.json"
SWEEP_FILES = {
    "cell": (CELL_FILE, CELL, ("cell",)),
    "measurement": (MEASURED_FILE, MEASURED, ("network", "conditions.", "provenance")),
    "sweep": ("sweep/sweep.json", SWEPT, ("base.", "calls.0.command", "calls.0.date")),
}
"""Of each file its path, values that are tried, and what is only shown or compared."""


def cases() -> Iterator[Case]:
    """Return cases of a sweep's files."""
    for what, (path, shape, unused) in SWEEP_FILES.items():
        for name, tree in few(broken_trees(shape), 4):
            place, _, kind = name.partition("=")
            if place.startswith(unused) or (what, name) in FINE_IN_SWEEPS:
                continue
            if kind in ("nan", "inf", "huge", "negative") and not place.endswith(("seconds", "0")):
                continue
            yield Case(f"sweep {what}.{name}", SWEEP, change_file(path, graft(place, tree)))
        for kind, change in BYTES.items():
            if kind != "less one byte":
                yield Case(f"sweep {what} bytes {kind}", SWEEP, rewrite(path, change))
        for text in GARBLED_JSON:
            shown = text if len(text) < 20 else f"{text[:5]}...({len(text)})"
            yield Case(f"sweep {what} {shown!r}", SWEEP, write(path, text))
        yield Case(f"sweep {what} is a folder", SWEEP, replace_by_folder(path))
    for name, text in TABLES.items():
        yield Case(f"sweep cells.csv {name}", SWEEP, write("sweep/cells.csv", text))
    yield Case("sweep without sweep.json", SWEEP, lambda f: (f / "sweep/sweep.json").unlink())
    yield Case("sweep runs is a file", SWEEP, sweep_part("runs"))
    yield Case("sweep cells is a file", SWEEP, sweep_part("cells"))
    yield Case("sweep measurements is a file", SWEEP, sweep_part("measurements"))
    yield Case("sweep lock is a folder", SWEEP, replace_by_folder("sweep/lock"))


def sweep_part(name: str) -> Callable[[Path], None]:
    """Return what puts a file in place of a folder of a sweep."""

    def apply(folder: Path) -> None:

        shutil.rmtree(folder / "sweep" / name)
        (folder / "sweep" / name).write_text("no folder")

    return apply


FINE_IN_SWEEPS = {
    ("cell", "ending.reason=text"),
    ("cell", "ending.provenance=empty"),
    ("measurement", "inference.peak_bytes=null"),
    ("measurement", "training.peak_bytes=null"),
    ("measurement", "timed=null"),
    ("measurement", "inference.seconds missing"),
    ("measurement", "training.seconds missing"),
    ("sweep", "calls.0.commit missing"),
    ("sweep", "calls.0.jobs missing"),
    ("cell", "ending.provenance.commit missing"),
    ("cell", "ending.provenance.commit=text"),
    ("cell", "ending.result.best_epoch missing"),
    ("measurement", "inference.reason=text"),
    ("measurement", "training.reason=text"),
    ("sweep", "calls.0.commit=text"),
    ("sweep", "calls=list"),
}
COLUMNS = "attention,heads,form,img_size,seed,status\n"
TABLES = {
    "of text": COLUMNS + "x,many,direct,16,0,finished\n",
    "of huge numbers": COLUMNS + f"x,{'9' * 5000},direct,16,0,finished\n",
    "of other networks": COLUMNS + "taylorshift,8,direct,16,0,finished\n",
    "of other columns": "a,b\n1,2\n",
    "of half a row": COLUMNS + "taylorshift,2\n",
    "of more than a row": COLUMNS + "taylorshift,2,direct,16,0,finished,x,y,z\n",
    "of NUL": COLUMNS + "a\0b,2,direct,16,0,finished\n",
    "of no UTF-8": COLUMNS.encode() + b"\xff\xfe,2,direct,16,0,finished\n",
    "of a field of 200,000": COLUMNS + "x" * 200_000 + ",2,direct,16,0,finished\n",
    "of a quote": COLUMNS + '"taylorshift,2,direct,16,0,finished\n',
}
