"""Rows as JSON lines, each on the disk before the next is measured: a killed run keeps them."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def append(path: str | Path, record: Record) -> None:
    """Add one line, written at once and whole, so that several processes may add to one file."""
    place = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(place, (json.dumps(record) + "\n").encode())
        os.fsync(place)
    finally:
        os.close(place)


def read(path: str | Path) -> list[Record]:
    """The lines that are whole; none where there is no file."""
    return list(_records(Path(path))) if Path(path).exists() else []


def _records(path: Path) -> Iterator[Record]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # the end of a process that was killed as it wrote
            continue
