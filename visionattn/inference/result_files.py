"""Arrays and tables written completely or not at all, and differences between two descriptions of
work.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from visionattn.cli.files import write_whole
from visionattn.cli.tables import write_rows
from visionattn.cli.untrusted import brief


def write_array(path: Path, array: np.ndarray) -> None:
    """Write an ``.npy``, completely or not at all."""

    def write(place: Path) -> None:
        with open(place, "wb") as file:
            np.save(file, array)

    write_whole(path, write)


def write_table(path: Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as CSV, completely or not at all; file names may have any encoding."""

    def write(place: Path) -> None:
        with open(place, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            write_rows(file, columns, rows)

    write_whole(path, write)


def write_records(path: Path, head: dict[str, Any], key: str, records: Iterable[str]) -> None:
    """Write a JSON object whose last member ``key`` is a list of JSON texts, one per line."""

    def write(target: Path) -> None:
        with open(target, "w", encoding="utf-8") as file:
            file.write(f'{json.dumps(head)[:-1]},\n"{key}": [')
            for number, record in enumerate(records):
                file.write(f",\n{record}" if number else f"\n{record}")
            file.write("\n]}\n")

    write_whole(path, write)


def difference(there: dict[str, Any], here: dict[str, Any]) -> str | None:
    """Return the first key of ``here`` whose value differs, with both values; None if there is
    none.
    """
    for key, value in here.items():
        if there.get(key) != value:
            return f"{key} {brief(there.get(key))} there, {brief(value)} here"
    return None
