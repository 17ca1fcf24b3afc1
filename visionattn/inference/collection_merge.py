"""Features of all parts of a collection, made into what one run writes: ``visionattn features
--merge``.

The files are divided as those of one run, from what the parts say of images and batches; no image
and no model is opened.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from visionattn.cli.ends import Stopped
from visionattn.cli.files import check_folder, locked, unfinished
from visionattn.cli.progress import Progress
from visionattn.inference.collection import PARTS, Part, parts_in
from visionattn.inference.features import AT_WORK, MIB, count_files, report_failures
from visionattn.inference.running import Outcome, batched
from visionattn.inference.shards import (
    FROM_OUTCOME,
    INDEX,
    LOCK,
    POOLED,
    Pending,
    Shard,
    briefly,
    delete_from,
    read_shard,
    shard_path,
    shard_paths,
    whole_shards,
    write_index,
)

OF_PART = ("part", "batch_size")
"""What a part's identity has besides that of the whole."""
DONE = f".{PARTS}.merged.visionattn.former"
"""The name of the parts while they are deleted."""


@dataclass(frozen=True)
class Whole:
    """Parts that make a whole."""

    identity: dict[str, Any]
    """That of the features of one run."""
    batch_size: int
    shards: list[Shard]
    """The files of all parts, in the order of the images."""


def merge(output: Path, say: Callable[[str], None]) -> None:
    """Make of the parts in a folder the features of one run, and delete the parts.

    Killed at any moment, the same call goes on; ``index.csv`` comes when all features are there.

    Raises:
        ValueError: a part is missing, unfinished, at work, or other than the first; the folder
            holds other features; or none of the images has features. One line.
        Stopped: Ctrl-C.
    """
    check_folder(output, "name the --output of the parts")
    if not output.is_dir():
        raise ValueError(f"no folder {output}; --shard 1/n writes the first part into it")
    with locked(output / LOCK, f"{AT_WORK} in {output}; wait for it or end it"):
        if not (output / PARTS).is_dir():
            _end(output)
            say(f"all parts are merged in {output}")
            return
        with ExitStack() as held:
            for part, folder in parts_in(output).items():
                taken = f"part {part} is at work in {output}; wait for it or end it"
                held.enter_context(locked(folder / LOCK, taken))
            whole = whole_of(output)
            for path in unfinished(output):  # of a merge that was killed as it wrote
                path.unlink()
            try:
                number = _write(output, whole)
                index = write_index(output)
            except KeyboardInterrupt as error:
                raise Stopped(f"stopped; the parts stay in {output}, --merge goes on") from error
        (output / PARTS).rename(output / DONE)
        shutil.rmtree(output / DONE)
    total = sum(len(shard.rows) for shard in whole.shards)
    say(f"{total} images: {count_files(number)} and {index}; the parts are deleted")
    report_failures(output, say)


def _end(output: Path) -> None:
    """Delete what a merge that was killed at its end has left of the parts.

    Raises:
        ValueError: there is nothing of a merge.
    """
    if (output / DONE).is_dir():
        shutil.rmtree(output / DONE)
        return
    if (output / INDEX).exists() or shard_paths(output):
        raise ValueError(f"{output} holds the features of a whole run, and no parts to merge")
    raise ValueError(f"{output} holds no parts; --shard 1/n writes the first one")


def whole_of(output: Path) -> Whole:
    """Read what the parts in a folder say of themselves, and check that they make a whole.

    Raises:
        ValueError: they do not; one line with the part.
    """
    parts = parts_in(output)
    if not parts:
        raise ValueError(f"{output} holds no parts; --shard 1/n writes the first one")
    first = next(iter(parts))
    if other := next((part for part in parts if part.of != first.of), None):
        raise ValueError(
            f"{output} holds parts of {first.of} ({first}) and of {other.of} ({other}); delete "
            f"those of one division from {output / PARTS}"
        )
    shards: list[Shard] = []
    identity: dict[str, Any] = {}
    total = 0
    for number in range(1, first.of + 1):
        part = Part(number, first.of)
        if part not in parts:
            raise ValueError(f"part {part} is missing in {output}; call --shard {part}")
        own, total = _identity_of(parts[part], part, output)
        identity = identity or own
        _check_same(identity, own, part, first)
        numbers = part.images(total, own["batch_size"])
        found = whole_shards(parts[part], own | {"part": str(part)}, numbers.start)
        there = sum(len(shard.rows) for shard in found)
        if there != len(numbers):
            raise ValueError(
                f"part {part} in {output} has {there} of {len(numbers)} images; call --shard "
                f"{part} again"
            )
        shards += found
    whole = {key: value for key, value in identity.items() if key not in OF_PART}
    return Whole(whole, identity["batch_size"], shards)


def _identity_of(folder: Path, part: Part, output: Path) -> tuple[dict[str, Any], int]:
    """Return what a part's features are, but for the part, and of how many images all parts are."""
    read = read_shard(shard_path(folder, 0))
    if read is None:
        raise ValueError(f"part {part} in {output} has no features yet; call --shard {part} again")
    identity = read[1]
    counts = [identity.get(key) for key in ("images", "batch_size", "shard_images", "shard_mib")]
    known = all(type(count) is int and count > 0 for count in counts)
    if not known or identity.get("part") != str(part):
        raise ValueError(f"{folder} does not hold part {part}; call --shard {part} again")
    return {key: value for key, value in identity.items() if key != "part"}, int(identity["images"])


def _check_same(wanted: dict[str, Any], own: dict[str, Any], part: Part, first: Part) -> None:
    """Raise ValueError where a part is of other features than the first one."""
    for key in {**wanted, **own}:
        if wanted.get(key) != own.get(key):
            here, there = briefly(own.get(key), wanted.get(key))
            raise ValueError(
                f"part {part} is of other features: {key} {here} there, {there} in part {first}; "
                f"call --shard {part} again with the other parts' options and --overwrite"
            )


def _write(output: Path, whole: Whole) -> int:
    """Write the files of one run, those that an earlier merge has not written; return how many
    there are.
    """
    kept = whole_shards(output, whole.identity)
    done, number = sum(len(shard.rows) for shard in kept), len(kept)
    delete_from(output, number)
    total = sum(len(shard.rows) for shard in whole.shards)
    most_bytes = whole.identity["shard_mib"] * MIB
    pending = Pending(output, number, done, whole.identity)
    # A batch begins where that of one run did, so that a file is full where its file was.
    with Progress(total, done, what="merging") as progress:
        for batch in batched(_outcomes(whole.shards, done), whole.batch_size, _size_seen):
            pending.add(batch)
            if pending.is_full(whole.identity["shard_images"], most_bytes):
                pending.write()
                number += 1
                pending = Pending(output, number, pending.first + len(pending), whole.identity)
            progress.advance(len(batch))
        if len(pending):
            pending.write()
            number += 1
    return number


def _size_seen(outcome: Outcome) -> tuple[int, int] | None:
    rows, columns = outcome.input_height, outcome.input_width
    return None if rows is None or columns is None else (rows, columns)


def _outcomes(shards: list[Shard], start: int) -> Iterator[Outcome]:
    """Yield what the parts found for the images from ``start`` on."""
    for shard in shards:
        rows = shard.rows[max(0, start - shard.first) :]
        if not rows:
            continue
        with safe_open(shard.path, framework="pt") as file:
            vectors = None
            if POOLED in file.keys():  # noqa: SIM118  no mapping
                vectors = file.get_tensor(POOLED)
            for row in rows:
                value: Tensor | None = None
                if row["status"] == "ok":
                    value = (
                        file.get_tensor(row["key"]) if row["key"] != POOLED else vectors[row["row"]]
                    )
                yield Outcome(**{name: row[name] for name in FROM_OUTCOME}, value=value)
