"""Files that are there whole or not at all, and whether one may write somewhere.

This module writes, locks and refuses files, and puts an error into one line. It knows no format.
"""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO


def write_whole(
    path: str | Path,
    write: Callable[[Path], object],
    *,
    check: Callable[[Path], object] | None = None,
    previous: Path | None = None,
) -> None:
    """Write a file so that it is there whole or not at all: beside its place, flushed to the disk
    and renamed.

    Args:
        path: the file; its folder exists.
        write: writes the content to the path that it is given.
        check: raises where what is on the disk, at the path that it is given, is not right.
        previous: where the file that has the name until then goes; None: it is replaced.

    Raises:
        OSError: it cannot be written; ``filename`` is that of ``path``, also where the system
            leaves it open (a full disk). ``path`` and ``previous`` are as they were.
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with named(path):
            write(temporary)
            flush_to_disk(temporary)
            if check is not None:
                check(temporary)
            if previous is not None and path.exists():
                os.replace(path, previous)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole or not at all; lines end as they do in ``text``, and bytes of names
    that are no UTF-8 become question marks.
    """
    content = printable(text).encode()
    write_whole(path, lambda temporary: temporary.write_bytes(content))


def add_line(path: str | Path, record: dict[str, Any]) -> None:
    """Add one line of JSON, at once and whole, so that several processes may add to one file; it is
    on the disk before anything else is done.
    """
    place = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(place, (json.dumps(record) + "\n").encode())
        os.fsync(place)
    finally:
        os.close(place)


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Return the whole lines that ``add_line`` wrote; none where there is no file."""
    records = []
    for line in Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else ():
        with suppress(ValueError):  # the end of a process that was killed as it wrote
            records.append(json.loads(line))
    return records


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Give errors of the system the name of a file where they have none, as on a full disk, or have
    that of the file beside it that ``write_whole`` writes.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, f"{path}.tmp"):
            error.filename = str(path)
        raise


def flush_to_disk(path: str | Path) -> None:
    """Return once what was written is on the disk, so that renaming the file later never leaves an
    empty one.
    """
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Return once the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_free(path: Path, overwrite: bool) -> None:
    """Raise ValueError where a file cannot be written, or exists and ``overwrite`` is off."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"no folder {folder} for {path.name}")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{path} cannot be written")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists; --overwrite replaces it")


def check_folder(folder: Path, way_out: str) -> None:
    """Raise ValueError where a folder can neither be made nor written to; the line ends with
    ``way_out``.
    """
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"{place} is a file, so {folder} cannot be a folder; {way_out}")
    absolute = folder.absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.is_dir())
    if not os.access(existing, os.W_OK):
        raise ValueError(f"no permission to write to {existing}; {way_out}")


def lock(path: Path, taken: str, *, inherited: bool) -> TextIO:
    """Open a file and keep others from locking it until it is closed or the process ends.

    A file system that has no locks keeps nobody out.

    Args:
        path: the file; it is made where it is missing.
        taken: the error where somebody has locked it.
        inherited: processes that are started with the file's descriptor hold the lock too, and the
            last of them gives it up; otherwise it is that of this process alone.

    Raises:
        ValueError: somebody has locked it.
        OSError: the file cannot be opened.
    """
    import fcntl  # not on every system that models run on

    file = open(path, "a")  # noqa: SIM115  the caller closes it
    try:
        (fcntl.flock if inherited else fcntl.lockf)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            raise ValueError(taken) from error
    return file


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error's text, at most 120 characters of it, with the error's name
    where the text needs it.
    """
    lines, kind = str(error).splitlines(), type(error).__name__
    if not lines:
        return kind
    return f"{kind}: {lines[0][:120]}" if isinstance(error, KeyError) else lines[0][:120]


def printable(text: str) -> str:
    """Make a text with names of files printable in UTF-8: other bytes become question marks."""
    return text.encode("utf-8", "replace").decode()
