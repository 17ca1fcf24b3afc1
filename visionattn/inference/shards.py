"""Features on disk: safetensors files of bounded size that list their images, an index of all of
them, and the parts of a collection, which are feature folders too.

This module owns the format, and decides which files of an earlier run are kept. Each shard is
written completely or not at all and contains its rows, so a folder of shards needs no other record
of progress. The module is independent of models.
"""

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from visionattn.cli.files import check_folder, is_unfinished, write_whole
from visionattn.cli.tables import read_rows
from visionattn.cli.untrusted import brief, from_json
from visionattn.data.kept_features import BACKBONE, INDEX
from visionattn.inference.image_batches import FIELDS, Outcome, check_any, say_failed
from visionattn.inference.result_files import difference, write_table

FORMAT = "visionattn.features"
FORMAT_VERSION = 1
LOCK = "features.lock"
PARTS = "parts"
"""Folder of the parts of a collection, within the feature folder."""
MOST_PARTS = 99_999
SHARD = re.compile(r"features-(\d{5,})\.safetensors")
HEAD_BYTES = 2**24
"""Size of a shard's header, with its rows, at which the shard is full. safetensors reads no header
above 100 MB.
"""
KEY_BYTES = 120
"""Maximum size of a map's header entry in safetensors, in bytes."""
POOLED = "features"
"""Name of the only tensor of a shard of pooled features, ``[n, D]``."""
PLACE = ("shard", "key", "row")
"""Columns of the index after ``FIELDS``. A pooled feature is row ``row`` of tensor ``key`` in file
``shard``; a map is the tensor itself.
"""


@dataclass(frozen=True)
class Shard:
    """A complete file of features."""

    path: Path
    first: int
    """Index of its first image among all images."""
    rows: list[dict[str, Any]]
    """One row of the index per image."""
    identity: dict[str, Any]
    """Identity of the features, as JSON types."""


class Pending:
    """The images of a shard that has not been written yet.

    Attributes:
        rows: rows of the index, one per image.
        bytes: size of the features so far.
        head_bytes: size of the header for the rows and maps so far.
    """

    def __init__(self, folder: Path, number: int, first: int, identity: dict[str, Any]):
        """Begin a shard with ``identity``, the identity of the features as JSON types, and
        ``first``, the index of the first image.
        """
        self.folder, self.number, self.first = folder, number, first
        self.path = shard_path(folder, number)
        self.bytes, self.head_bytes = 0, 0
        self._identity = identity
        self.rows: list[dict[str, Any]] = []
        self._vectors: list[Tensor] = []
        self._maps: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, outcomes: list[Outcome]) -> None:
        """Add the next images. Their features are copied, because a view would keep the whole batch
        in memory.
        """
        for outcome in outcomes:
            row = outcome.row() | dict.fromkeys(PLACE)
            if outcome.value is not None and outcome.value.ndim == 1:
                row |= dict(zip(PLACE, (self.path.name, POOLED, len(self._vectors)), strict=True))
                self._vectors.append(outcome.value.clone())
            elif outcome.value is not None:
                key = f"{self.first + len(self):09d}"
                row |= dict(zip(PLACE, (self.path.name, key, None), strict=True))
                self._maps[key] = outcome.value.clone(memory_format=torch.contiguous_format)
            self.rows.append(row)
            self.head_bytes += (
                len(json.dumps(json.dumps(row))) + KEY_BYTES
            )  # text within text, as in the file
            self.bytes += 0 if outcome.value is None else outcome.value.nbytes

    def is_full(self, images: int, most_bytes: int) -> bool:
        """Return whether the shard has reached a number of images, a size of features, or the limit
        of its header.
        """
        return len(self) >= images or self.bytes >= most_bytes or self.head_bytes >= HEAD_BYTES

    def write(self) -> "Pending":
        """Write the file, completely or not at all; pooled features as one tensor, maps as one per
        image. Return the next shard.
        """
        tensors = self._maps | ({POOLED: torch.stack(self._vectors)} if self._vectors else {})
        content = {"format": FORMAT, "version": FORMAT_VERSION, "identity": self._identity}
        # One entry: the order of several entries in the file is undefined.
        metadata = {FORMAT: json.dumps(content | {"first": self.first, "rows": self.rows})}
        write_whole(self.path, lambda place: save_file(tensors, place, metadata=metadata))
        return Pending(self.folder, self.number + 1, self.first + len(self), self._identity)


def shard_path(folder: Path, number: int) -> Path:
    """Return the path of a shard."""
    return folder / f"features-{number:05d}.safetensors"


def shard_paths(folder: Path) -> list[Path]:
    """List the shards of a folder in order; in a folder of parts, the shards of each part."""
    found = [*folder.glob("features-*"), *folder.glob(f"{PARTS}/*/features-*")]
    named = [path for path in found if SHARD.fullmatch(path.name)]
    return sorted(named, key=lambda path: (path.parent, _number(path)))


def _number(path: Path) -> int:
    return int(SHARD.fullmatch(path.name)[1])


def read_shard(path: Path) -> Shard | None:
    """Read the rows of a shard, without its tensors; None if it is missing or truncated.

    Raises:
        ValueError: a complete safetensors file without features.
    """
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(FORMAT, "{}")
    except (FileNotFoundError, SafetensorError):
        return None
    try:
        content = from_json(dict[str, Any], text, "its description")
        if content.get("version") != FORMAT_VERSION:
            raise ValueError(f"it has version {brief(content.get('version'))}")
    except ValueError as error:
        raise ValueError(
            f"{path} is not a feature file of this version ({error}); pass another --output"
        ) from error
    return Shard(path, content["first"], content["rows"], content["identity"])


def whole_shards(folder: Path, identity: dict[str, Any], first: int = 0) -> list[Shard]:
    """List the shards of an earlier run, without a gap.

    Args:
        folder: folder of the shards.
        identity: identity of the wanted features, which tells their images too.
        first: index of the first image.

    Raises:
        ValueError: they hold other features; the line names the first difference.
    """
    found, done = list[Shard](), first
    for shard in map(read_shard, shard_paths(folder)):
        if shard is None or shard.first != done:
            break
        if (other := difference(shard.identity, identity)) is not None:
            raise ValueError(
                f"{folder} holds features of another call: {other}; pass another --output, or "
                "--overwrite"
            )
        found.append(shard)
        done += len(shard.rows)
    return found


def check_ours(folder: Path, *known: str) -> None:
    """Raise ValueError if a folder holds other files than features and these names."""
    names = [] if not folder.is_dir() else [path.name for path in folder.iterdir()]
    known = (LOCK, *known)
    strange = [name for name in names if name not in known and not is_unfinished(name)]
    if strange and not shard_paths(folder):
        raise ValueError(
            f"{folder} holds other files ({strange[0]}); pass another --output, or --overwrite"
        )


def delete_from(folder: Path, number: int) -> None:
    """Delete the shards from ``number`` on."""
    for path in shard_paths(folder):
        if path.parent == folder and _number(path) >= number:
            path.unlink()


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of all shards, in order, with one shard at a time in memory."""
    for path in shard_paths(folder):
        for row in _read_whole(path).rows:
            yield row | {"shard": row["shard"] and str(path.relative_to(folder))}


def _read_whole(path: Path) -> Shard:
    shard = read_shard(path)
    if shard is None:
        raise ValueError(f"{path} is truncated; run the same command again")
    return shard


def write_index(path: Path, rows: Iterable[dict[str, Any]]) -> tuple[list[Outcome], int]:
    """Write the index of a folder, a CSV file: one row per image with ``FIELDS``, ``PLACE`` and
    equal further columns; names are formatted as ``visionattn.cli.tables`` writes texts.

    Returns:
        The images without features, and the number of images.
    """
    failed, count, rows = list[Outcome](), 0, iter(rows)
    first = next(rows)

    def noted() -> Iterator[dict[str, Any]]:
        nonlocal count
        for row in chain([first], rows):
            count += 1
            if row["status"] != "ok":
                failed.append(Outcome(*(row[key] for key in FIELDS)))
            yield row

    write_table(path, list(first), noted())
    return failed, count


def report_failed(failed: list[Outcome], say: Callable[[str], None]) -> None:
    """Report the images without features."""
    if failed:
        say(f"{len(failed)} without features:")
    say_failed(failed, say)


def read_features(
    folder: Path, wanted: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield path and features of each image with features, in order.

    The pooled features of one shard, or one map, are in memory at a time.

    Args:
        folder: folder of the shards.
        wanted: paths of the images to read; None: all.
    """
    for path in shard_paths(folder):
        rows = [row for row in _read_whole(path).rows if row["status"] == "ok"]
        rows = [row for row in rows if wanted is None or row["path"] in wanted]
        if not rows:
            continue
        with safe_open(path, framework="pt") as file:
            pooled = file.get_tensor(POOLED) if rows[0]["key"] == POOLED else None
            for row in rows:
                value = file.get_tensor(row["key"]) if pooled is None else pooled[row["row"]]
                yield row["path"], value


@dataclass(frozen=True)
class CollectionPart:
    """Part ``number`` of ``of`` of a collection, from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @staticmethod
    def parse(text: str) -> "CollectionPart":
        """Parse ``2/4``.

        Raises:
            ValueError: it is not a part; one line.
        """
        found = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text, re.ASCII)
        number, of = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= number <= of:
            raise ValueError(
                f"expected shard i/n with i from 1 to n and n at most {MOST_PARTS:,}, got "
                f"{brief(text)}"
            )
        return CollectionPart(number, of)

    def folder(self, output: Path) -> Path:
        """Return the feature folder of the part."""
        return output / PARTS / f"{self.number:05d}-of-{self.of:05d}"

    def images(self, total: int) -> range:
        """Return the indices of its images among all.

        Raises:
            ValueError: there are more parts than images.
        """
        if self.of > total:
            raise ValueError(f"expected at most {total} parts for {total} images, got {self.of}")
        return range(total * (self.number - 1) // self.of, total * self.number // self.of)

    def check_division(self, output: Path) -> None:
        """Raise ValueError unless the part may be written to a folder: a new one, or one with parts
        of the same division.
        """
        check_folder(output, "pass another --output")
        there = parts_in(output)
        if there and there[0].of != self.of:
            raise ValueError(
                f"{output} holds {there[0]} of a division into {there[0].of}, got {self}; pass "
                f"another --output, or delete {output / PARTS}"
            )
        if not there and shard_paths(output):
            raise ValueError(f"{output} holds features of all images; pass another --output")
        check_ours(output, PARTS, BACKBONE)


def parts_in(output: Path) -> list[CollectionPart]:
    """List the parts in a folder, in order."""
    names = sorted(path.name for path in (output / PARTS).glob("*-of-*"))
    return [CollectionPart(*map(int, name.split("-of-"))) for name in names]


def merge(output: Path, say: Callable[[str], None], identity: dict[str, Any] | None = None) -> None:
    """Write one index over the features of all parts in a folder; the parts stay unchanged.

    Args:
        output: the folder.
        say: receives the report.
        identity: identity of the wanted features; None: as in the first part.

    Raises:
        ValueError: a part is missing, unfinished, or has other features; or no image has features.
            One line.
    """
    check_folder(output, "pass the folder of the parts as --output")
    there = parts_in(output)
    if not there:
        raise ValueError(f"{output} holds no parts; write the first one with --shard 1/n")
    parts = [CollectionPart(number, there[0].of) for number in range(1, there[0].of + 1)]
    for part in parts:
        folder = part.folder(output)
        if not (folder / INDEX).is_file():
            raise ValueError(
                f"part {part} is missing or unfinished in {output}; run --shard {part}"
            )
        own = _read_whole(shard_path(folder, 0)).identity
        identity = identity or own
        if (other := difference(own, identity)) is not None:
            raise ValueError(
                f"part {part} has other features: {other}; run --shard {part} again with the "
                "options of the other parts and --overwrite"
            )
    index = output / INDEX
    rows = (row for part in parts for row in _indexed(part.folder(output), output))
    failed, count = write_index(index, rows)
    say(f"{count} images in {len(parts)} part{'s' * (len(parts) > 1)}: {index}")
    check_any(failed, count, "features")
    report_failed(failed, say)


def _indexed(folder: Path, output: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a part's index with the paths of its files within ``output``."""
    with open(folder / INDEX, encoding="utf-8", errors="surrogateescape", newline="") as file:
        for row in read_rows(file):
            place = folder / row["shard"]  # the folder itself for an image without features
            if not place.exists():
                raise ValueError(f"{place} is missing; run --shard of this part again")
            yield row | {"shard": row["shard"] and str(place.relative_to(output))}
