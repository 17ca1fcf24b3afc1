"""Features on disk: safetensors files of bounded size that know which images they hold, and the
index of all of them.

This module owns the format, and decides what of an earlier run can stay. Each shard appears whole
or not at all and carries its rows, so that a folder of shards needs no other record of how far a
run has come. The module knows nothing of models.
"""

import json
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from visionattn.cli.ends import OutOfMemory
from visionattn.cli.files import is_unfinished, printable, write_whole
from visionattn.cli.untrusted import brief, from_json
from visionattn.inference.running import Outcome, Status
from visionattn.inference.work import briefly, write_table

FORMAT = "visionattn.features"
FORMAT_VERSION = 1
NAMED_FAILURES = 5
"""How many images without features the report names; the index names all."""
INDEX, LOCK = "index.csv", "features.lock"
PARTS = "parts"
"""The folder of parts of a collection, within that of the features."""
SHARD = re.compile(r"features-(\d{5,})\.safetensors")
HEAD_BYTES = 2**24
"""The size of a shard's head, which holds its rows, at which the shard is full. safetensors reads
no head above 100 MB.
"""
KEY_BYTES = 120
"""The most that safetensors notes about a map, in bytes."""
POOLED = "features"
"""The one tensor of a shard of pooled features, ``[n, D]``."""
FROM_OUTCOME = ("path", "status", "reason", "height", "width", "input_height", "input_width")
PLACE = ("shard", "key", "row")
COLUMNS = (*FROM_OUTCOME, *PLACE)
"""The columns of the index. A pooled feature is row ``row`` of tensor ``key`` in file ``shard``; a
map is the tensor itself.
"""


@dataclass(frozen=True)
class Shard:
    """A whole file of features."""

    path: Path
    first: int
    """Number of its first image among all images."""
    rows: list[dict[str, Any]]
    """A row of the index per image."""


class Pending:
    """The images of a shard that is not written yet.

    Attributes:
        rows: rows of the index, one for each image.
        bytes: size of the features so far.
        head_bytes: size of the head for the rows and maps so far.
    """

    def __init__(self, folder: Path, number: int, first: int, identity: dict[str, Any]):
        """Take ``identity``, what the features are as JSON types, and ``first``, the number of the
        first image.
        """
        self.path, self.first = shard_path(folder, number), first
        self.bytes, self.head_bytes = 0, 0
        self._identity = identity
        self.rows: list[dict[str, Any]] = []
        self._vectors: list[Tensor] = []
        self._maps: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, outcomes: list[Outcome]) -> None:
        """Take the images that follow. Their features are copied: as parts of a batch they would
        hold all of it.
        """
        for outcome in outcomes:
            row = {name: getattr(outcome, name) for name in FROM_OUTCOME} | dict.fromkeys(PLACE)
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
            )  # text within text, as the file has it
            self.bytes += 0 if outcome.value is None else outcome.value.nbytes

    def is_full(self, images: int, most_bytes: int) -> bool:
        """Tell whether the shard holds so many images, or features of so many bytes, or all the
        rows that a head takes.
        """
        return len(self) >= images or self.bytes >= most_bytes or self.head_bytes >= HEAD_BYTES

    def write(self) -> None:
        """Write the file, whole or not at all; pooled features as one tensor, maps as one per
        image.
        """
        tensors = self._maps | ({POOLED: torch.stack(self._vectors)} if self._vectors else {})
        content = {"format": FORMAT, "version": FORMAT_VERSION, "identity": self._identity}
        # One entry: the order of several in the file is not defined.
        metadata = {FORMAT: json.dumps(content | {"first": self.first, "rows": self.rows})}
        write_whole(self.path, lambda place: save_file(tensors, place, metadata=metadata))


def shard_path(folder: Path, number: int) -> Path:
    """Return the path of a shard."""
    return folder / f"features-{number:05d}.safetensors"


def shard_paths(folder: Path) -> list[Path]:
    """List the files that are shards by their names, in order; in a folder of parts, those of each
    part.
    """
    found = [path for path in folder.glob("features-*") if SHARD.fullmatch(path.name)]
    found += [path for path in folder.glob(f"{PARTS}/*/features-*") if SHARD.fullmatch(path.name)]
    return sorted(found, key=lambda path: (path.parent, _number(path), path.name))


def _number(path: Path) -> int:
    return int(SHARD.fullmatch(path.name)[1])


def read_shard(path: Path) -> tuple[Shard, dict[str, Any]] | None:
    """Read the rows and the identity of a shard, without its tensors; None where it is missing or
    cut off.

    Raises:
        ValueError: a whole safetensors file, but not one of features.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(FORMAT)
            names = file.keys()  # the file is no mapping
            shapes = {name: _shape_of(file, name) for name in names}
    except SafetensorError:
        return None
    try:
        content = from_json(_Content, text or "{}", "its description")
        if content["version"] != FORMAT_VERSION:
            raise ValueError(f"it has version {brief(content['version'])}")
        check_rows(path, content, shapes)
    except ValueError as error:
        raise ValueError(
            f"{path} is no file of features of this visionattn ({error}); choose another --output"
        ) from error
    return Shard(path, content["first"], content["rows"]), content["identity"]


class _Row(TypedDict):
    """A row of the index, as a shard has it."""

    path: str
    status: Status
    reason: str | None
    height: int | None
    width: int | None
    input_height: int | None
    input_width: int | None
    shard: str | None
    key: str | None
    row: int | None


class _Content(TypedDict):
    """What a shard says of itself."""

    version: int
    identity: dict[str, Any]
    first: int
    rows: list[_Row]


def _shape_of(file: Any, name: str) -> tuple[int, ...] | None:
    """Return the shape of a tensor in a file; None for one that is not of fractions."""
    found = file.get_slice(name)
    return tuple(found.get_shape()) if found.get_dtype().startswith(("F", "BF")) else None


def check_rows(path: Path, content: _Content, shapes: dict[str, tuple[int, ...] | None]) -> None:
    """Raise ValueError unless each row of a shard points to features that the file has, and only
    images without features to none.
    """
    if content["first"] < 0:
        raise ValueError(f"its first image is {content['first']}")
    for row in content["rows"]:
        if unknown := row.keys() - set(COLUMNS):
            raise ValueError(f"a row has an unknown column {brief(min(unknown))}")
        key, number = row["key"], row["row"]
        shard = path.name if row["status"] == "ok" else None
        if row["status"] != "ok":
            fits = key is None and number is None
        elif key == POOLED:
            shape = shapes.get(POOLED) or ()
            fits = len(shape) == 2 and number is not None and 0 <= number < shape[0]
        else:
            fits = len(shapes.get(key) or ()) == 3 and number is None
        sizes = (row["height"], row["width"], row["input_height"], row["input_width"])
        fits = fits and all(size is None or size > 0 for size in sizes)
        if not fits or row["shard"] != shard:
            raise ValueError(f"the row of {brief(row['path'])} does not fit what the file holds")


def check_images(shards: Sequence[Shard], names: Callable[[int], str], images: range) -> None:
    """Raise ValueError unless the rows of shards are those of the images of these numbers, in
    order.
    """
    rows = [row for shard in shards for row in shard.rows]
    if len(rows) > len(images) or any(
        row["path"] != names(i) for i, row in zip(images, rows, strict=False)
    ):
        raise ValueError(
            f"{shards[0].path.parent} holds rows of other images; choose another --output, or "
            "replace them with --overwrite"
        )


def check_ours(folder: Path) -> None:
    """Check that a run would replace or delete only features in a folder, and that no other files
    lie there.

    Raises:
        ValueError: the folder has an index or shards that are not ours, or other files and no
            shard; one line.
    """
    shards, index = shard_paths(folder), folder / INDEX
    if index.exists() and not _is_index(index):
        raise ValueError(
            f"{index} is no index of features; choose another --output, or replace it with "
            "--overwrite"
        )
    if shards and not any(read_shard(path) for path in shards):
        raise ValueError(
            f"{shards[0]} is no whole file of features; choose another --output, or replace it "
            "with --overwrite"
        )
    ours = {INDEX, LOCK, PARTS}
    other = next(
        (
            path.name
            for path in folder.iterdir()
            if path.name not in ours and not is_unfinished(path)  # of a run that was killed
        ),
        None,
    )
    if other and not shards:
        raise ValueError(
            f"{folder} holds other things ({other}); choose another --output, or add to it with "
            "--overwrite"
        )


def _is_index(path: Path) -> bool:
    head = (",".join(COLUMNS) + "\n").encode()
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(head)) == head


def whole_shards(folder: Path, identity: dict[str, Any], first: int = 0) -> list[Shard]:
    """List the shards of an earlier run, from the image of number ``first`` on without a gap.

    Raises:
        ValueError: some are of other features; the line names the first difference.
    """
    found, following = [], True
    for path in shard_paths(folder):
        read = read_shard(path)
        if read is None:
            following = False
            continue
        shard, other = read
        for key in identity:
            if other.get(key) != identity[key]:
                there, here = briefly(other.get(key), identity[key])
                raise ValueError(
                    f"{folder} holds other features: {key} {there} there, {here} here; choose "
                    "another --output, or replace them with --overwrite"
                )
        following = following and shard.first == first + sum(len(s.rows) for s in found)
        if following:
            found.append(shard)
    return found


def delete_from(folder: Path, number: int) -> None:
    """Delete the shards from ``number`` on."""
    for path in folder.glob("features-*"):
        if SHARD.fullmatch(path.name) and _number(path) >= number:
            path.unlink()


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of all shards, in order, with one shard at a time in memory."""
    for path in shard_paths(folder):
        read = read_shard(path)
        if read is None:
            raise ValueError(f"{path} is cut off; call the same command again")
        for row in read[0].rows:
            place = row["shard"] and str(path.relative_to(folder))
            yield row | {"shard": place}


def has_features(folder: Path) -> bool:
    """Tell whether any image of a folder gave features, as far as its files can be read."""
    found = (read_shard(path) for path in shard_paths(folder))
    return any(row["status"] == "ok" for each in found if each for row in each[0].rows)


def write_index(folder: Path) -> Path:
    """Write the rows of all shards to one CSV file, under ``COLUMNS``, and return its path; names
    stand there as ``visionattn.cli.tables`` writes texts.
    """
    write_table(folder / INDEX, COLUMNS, rows_of(folder))
    return folder / INDEX


def read_features(
    folder: Path, wanted: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the path and the features of each image that has some, in order, with the pooled
    features of one shard, or one map, at a time in memory.

    Args:
        folder: where the shards are.
        wanted: the paths of the images that are read; None: all are.
    """
    for path in shard_paths(folder):
        read = read_shard(path)
        if read is None:
            raise ValueError(f"{path} is cut off; call the same command again")
        rows = [row for row in read[0].rows if row["status"] == "ok"]
        rows = [row for row in rows if wanted is None or row["path"] in wanted]
        if not rows:
            continue
        with safe_open(path, framework="pt") as file:
            pooled = file.get_tensor(POOLED) if rows[0]["key"] == POOLED else None
            for row in rows:
                value = file.get_tensor(row["key"]) if pooled is None else pooled[row["row"]]
                yield row["path"], value


def report_failures(folder: Path, say: Callable[[str], None], *, all_fail: bool = True) -> None:
    """Say which images in a folder have no features.

    Raises:
        ValueError, OutOfMemory: none has, where ``all_fail`` is on.
    """
    failed, total, first = 0, 0, []
    for row in rows_of(folder):
        total += 1
        if row["status"] != "ok":
            failed += 1
            if len(first) < NAMED_FAILURES:
                first.append(row)
    if failed == total and all_fail:
        raise error_of(first[0], f"none of the {failed} images gives features")
    if failed:
        say(f"{failed} without features:")
        for row in first:
            say(printable(f"  {row['path']}: {row['reason']}"))
        if failed > len(first):
            say(f"  and {failed - len(first)} more, in the index")


def error_of(row: dict[str, Any], text: str) -> Exception:
    """Make an error of the text and of what happened to an image: ``OutOfMemory`` where that was
    the reason.
    """
    error = OutOfMemory if row["status"] == "oom" else ValueError
    return error(f"{text}; the first: {row['path']}: {row['reason']}")
