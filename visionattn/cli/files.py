"""Write files atomically, lock them, and check in advance whether a path can be written.

This module knows no file format. Every writer calls ``target_of``, which refuses anything but
regular files. An unfinished file has a random name in the folder of its target; ``is_unfinished``
recognizes the name. The next write to the target deletes files left by killed processes.
"""

import errno
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from filelock import FileLock, Timeout, lock_descriptor
from safetensors import SafetensorError

from visionattn.cli.interruption import undone_at_end
from visionattn.cli.tables import sized
from visionattn.cli.untrusted import refuse

UNFINISHED = ".visionattn.tmp"
"""Suffix of unfinished files and folders."""
CONTINUED = ".visionattn.part"
"""Suffix of unfinished files and folders that a later run continues."""
POSIX = hasattr(os, "O_DIRECTORY")
"""Whether the system can open folders and rename open files. Windows cannot, so files left by
killed processes stay there.
"""


def target_of(path: str | Path) -> Path:
    """Return the file to write for ``path``: the target of a link, whether or not it exists.

    Raises:
        OSError: ``path`` is a folder, a device, a pipe or a socket.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(
            errno.EINVAL, "is a device, a pipe or a socket; pass a regular file", str(path)
        )
    return Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)


def write_whole(
    path: str | Path,
    write: Callable[[Path], object],
    *,
    check: Callable[[Path], object] | None = None,
    previous: Path | None = None,
) -> None:
    """Write a file atomically: write a temporary file, flush it to the disk and rename it.

    An existing file keeps its permissions.

    Args:
        path: the file, as for ``target_of``; its folder exists.
        write: writes the content to the given path, an empty file.
        check: reads the given path back and raises if the content is wrong.
        previous: new path of the existing file; None: replace it.

    Raises:
        OSError: the file cannot be written; ``path`` and ``previous`` are unchanged. ``filename``
            is ``path``, even if the system names no file (a full disk).
    """
    target = target_of(path)
    with named(path), _temporary(target) as temporary:
        mode = os.stat(target if target.exists() else temporary).st_mode
        write(temporary)
        flush_to_disk(temporary)
        if check is not None:
            check(temporary)
        os.chmod(temporary, stat.S_IMODE(mode))  # some writers create a new file
        if previous is not None and target.exists():
            os.replace(target, previous)
        os.replace(temporary, target)


@contextmanager
def whole_folder(path: str | Path, *, replaces: str | None = None) -> Iterator[Path]:
    """Yield an empty folder to fill; at the end, flush it to the disk and rename it to ``path``.

    Args:
        path: the folder; its parent exists.
        replaces: replace an existing folder if it has a file of this name; None: replace none.

    Raises:
        ValueError: ``path`` exists and may not be replaced.
        OSError: the folder cannot be written; ``filename`` is ``path`` if the system names no file
            or the unfinished folder.
    """
    target = Path(path)
    _settle(target)
    check_new(target, replaces=replaces)
    with named(path), _temporary(target, folder=True) as place:
        yield place
        for file in place.iterdir():
            flush_to_disk(file)
            # Some writers create files that only their owner may read.
            os.chmod(file, stat.S_IMODE(place.stat().st_mode) & 0o666)
        flush_folder(place)
        check_new(target, replaces=replaces)  # a rename would replace an empty folder
        _rename_folder(place, target)


def _former(target: Path) -> Path:
    """Return the name of a replaced folder until it is deleted. ``forget_unfinished`` does not
    delete folders of this name.
    """
    return Continued.beside(target, folder=True).with_suffix(".former")


def _settle(target: Path) -> None:
    """Finish a ``_rename_folder`` that a kill interrupted. Delete the replaced folder if the new
    one is in its place, else rename the replaced folder back.
    """
    former = _former(target)
    with suppress(OSError):  # usually there is none, or another process was faster
        if os.path.lexists(target):
            shutil.rmtree(former)
        else:
            os.rename(former, target)


def _rename_folder(place: Path, target: Path) -> None:
    """Rename a finished folder to its target, then delete the former target."""
    former = _former(target)
    with ExitStack() as undo:
        if target.exists():
            os.rename(target, former)
            undo.callback(os.rename, former, target)
        os.rename(place, target)
        undo.pop_all()
    shutil.rmtree(former, ignore_errors=True)


def check_new(path: Path, *, replaces: str | None = None) -> None:
    """Raise ValueError if a folder cannot be created: its name is taken, or its parent is missing
    or not writable. An existing folder with a file named ``replaces`` is allowed.
    """
    known = replaces is not None and path.is_dir() and not path.is_symlink()
    parent = path.absolute().parent
    refuse(
        (
            os.path.lexists(path) and not (known and (path / str(replaces)).is_file()),
            f"{path} exists; pass a new folder",
        ),
        (not parent.is_dir(), f"no folder {parent} for {path.name}"),
        (not os.access(parent, os.W_OK), f"no permission to write to {parent}"),
    )


def _unfinished_name(target: Path) -> Path:
    """Return a random name in the same folder, for the unfinished file or folder."""
    return target.with_name(f".{target.name[:48]}.{secrets.token_hex(8)}{UNFINISHED}")


@contextmanager
def _temporary(target: Path, *, folder: bool = False) -> Iterator[Path]:
    """Create an empty file or folder with a random name in the folder of ``target``; delete it at
    the end unless it was renamed. Its lock tells ``forget_unfinished`` that its writer is alive.
    """
    forget_unfinished(target)
    place = _unfinished_name(target)
    place.mkdir() if folder else place.touch(exist_ok=False)
    with ExitStack() as held:
        held.callback(_delete, place)
        held.enter_context(undone_at_end(partial(_delete, place)))
        if POSIX:
            held.callback(os.close, descriptor := os.open(place, os.O_RDONLY))
            _is_free(descriptor)
        yield place


def _delete(path: Path) -> None:
    """Delete a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_free(descriptor: int) -> bool:
    """Lock a file until its descriptor is closed; return False if another process has locked it.
    On a file system without locks, return True.
    """
    with suppress(OSError):
        return lock_descriptor(descriptor, blocking=False)
    return True


class Continued:
    """A file or folder that several runs write, one at a time.

    Until it is finished it has a fixed name in the same folder, where the next run finds it.

    Attributes:
        place: the unfinished file or folder; a new one is empty.
    """

    def __init__(self, path: str | Path, *, folder: bool = False, overwrite: bool = False):
        """Create or reopen the unfinished file or folder, and lock it.

        Args:
            path: the finished file, as for ``target_of``, or the finished folder.
            folder: whether ``path`` is a folder.
            overwrite: replace an existing file once the new one is complete, and an existing folder
                if ``finish`` allows it.

        Raises:
            ValueError: ``path`` cannot be written, exists, or is being written by another process.
        """
        self._path, self._folder = Path(path), folder
        self._overwrite = overwrite
        if folder:
            _settle(self._path)
            if not overwrite:
                check_new(self._path)
        else:
            check_free(self._path, overwrite)
        self.target = self._path if folder else target_of(self._path)
        self.place = self.beside(path, folder=folder)
        self._held = ExitStack()
        with named(path):
            guard = self.place.with_name(f"{self.place.name}.lock")
            self._held.enter_context(locked(guard, f"{path} is being written by another process"))
            self.place.mkdir(exist_ok=True) if folder else self.place.touch()

    @staticmethod
    def beside(path: str | Path, *, folder: bool = False) -> Path:
        """Return the path of the unfinished file or folder, whether or not it exists."""
        target = Path(path) if folder else target_of(path)
        number = hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]
        return target.with_name(f".{target.name[:48]}.{number}{CONTINUED}")

    def open(self) -> io.FileIO:
        """Open the unfinished file at its start, unbuffered, for reading and writing."""
        return io.FileIO(self.place, "rb+")

    def empty(self) -> None:
        """Delete the content of an earlier run."""
        if self._folder:
            for each in self.place.iterdir():
                _delete(each)
        else:
            os.truncate(self.place, 0)

    def finish(self, *, replaces: str | None = None) -> None:
        """Flush everything to the disk and rename it to its final name.

        Args:
            replaces: with ``overwrite``, replace an existing folder that has a file of this name.
        """
        with named(self._path):
            if self._folder:
                for folder, _, names in os.walk(self.place, topdown=False):
                    for name in names:
                        flush_to_disk(Path(folder, name))
                    flush_folder(Path(folder))
                check_new(self.target, replaces=replaces if self._overwrite else None)
                _rename_folder(self.place, self.target)
            else:
                check_free(self._path, self._overwrite)
                flush_to_disk(self.place)
                if self.target.exists():
                    shutil.copymode(self.target, self.place)
                os.replace(self.place, self.target)
            flush_folder(self.target.absolute().parent)
        self.close()

    def forget(self) -> None:
        """Delete the unfinished file or folder."""
        _delete(self.place)
        self.close()

    def close(self) -> None:
        """Release the lock; an unfinished file or folder stays for the next run."""
        self._held.close()


def check_room(path: Path, wanted: int) -> None:
    """Raise ValueError if the disk of a path has fewer free bytes than ``wanted``. The folder of
    the path exists.
    """
    free = shutil.disk_usage(path.absolute().parent).free
    if wanted > free:
        raise ValueError(
            f"{path} needs up to {sized(wanted)} of disk space, got {sized(free)} free; free "
            "some, or pass another path"
        )


def reserve_bytes(descriptor: int, size: int) -> None:
    """Allocate ``size`` bytes for a file; without ``posix_fallocate``, only set its length."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def is_unfinished(path: str | Path) -> bool:
    """Tell by its name whether a file is unfinished: being written, or left by a killed process."""
    name = os.path.basename(path)
    return name.startswith(".") and name.endswith(UNFINISHED)


def forget_unfinished(target: Path) -> None:
    """Delete the unfinished versions of a file or folder that killed processes left. Living
    processes hold a lock on theirs.
    """
    for path in target.parent.glob(f".*{UNFINISHED}") if POSIX else ():
        if path.name[1:].startswith(target.name[:48] + "."):
            with suppress(OSError), ExitStack() as held:  # no permission, or already deleted
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                held.callback(os.close, descriptor)
                if lock_descriptor(descriptor, blocking=False):
                    _delete(path)


def unfinished(folder: Path) -> list[Path]:
    """List the files in a folder that are being written or were left by killed processes."""
    return [path for path in folder.glob(f".*{UNFINISHED}") if path.is_file()]


def added_to(path: str | Path) -> BinaryIO:
    """Open a file for appending; ``path`` is as for ``target_of``."""
    return open(target_of(path), "ab")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically as UTF-8. Line ends stay as in ``text``; file-name bytes that
    are not UTF-8 become question marks.
    """
    content = printable(text).encode()
    write_whole(path, lambda temporary: temporary.write_bytes(content))


def write_json(path: str | Path, found: Any) -> None:
    """Write a dataclass to a JSON file in one line.

    Raises:
        OSError: the file cannot be written.
    """
    write_text(path, json.dumps(asdict(found)) + "\n")


def add_line(path: str | Path, record: dict[str, Any]) -> None:
    """Append one line of JSON in a single write and flush it to the disk. Several processes may
    append to the same file.
    """
    line = (json.dumps(record) + "\n").encode()
    with named(path), open(target_of(path), "a+b") as file:
        file.seek(max(file.tell() - 1, 0))
        torn = file.read(1) not in (b"", b"\n")  # by a kill or a full disk
        file.write(b"\n" * torn + line)
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Return the complete lines that ``add_line`` wrote; an empty list if there is no file."""
    records = []
    for line in Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else ():
        with suppress(ValueError):  # a line cut short when its process was killed
            records.append(json.loads(line))
    return records


@contextmanager
def named(path: str | Path) -> Iterator[None]:
    """Name the target in an ``OSError`` that names no file (a full disk) or the unfinished file.
    Unwrap library exceptions to the original ``OSError``.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # raised by a library that does not know the file
            raise OSError(f"{path} cannot be written: {error}") from error
        unfinished = any(mark in str(error.filename) for mark in (UNFINISHED, CONTINUED))
        if error.filename is None or unfinished:
            error.filename = str(path)
        raise
    except (RuntimeError, SafetensorError) as error:
        # torch wraps the system's error; safetensors writes its number into the text.
        said = re.search(r"\(os error (\d+)\)", str(error))
        number = int(said[1]) if said else getattr(error.__context__, "errno", None)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def flush_to_disk(path: str | Path) -> None:
    """Flush a file to the disk, so that a later rename never leaves an empty file."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Flush the entries of a folder to the disk, if the system supports it."""
    if POSIX:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_free(path: Path, overwrite: bool) -> None:
    """Raise ValueError if a file cannot be written, or exists without ``overwrite``; OSError if
    ``target_of`` refuses it.
    """
    if path.is_dir():
        raise ValueError(f"expected a file to write, got the folder {path}")
    target = target_of(path)
    folder = target.absolute().parent
    refuse(
        (not folder.is_dir(), f"no folder {folder} for {path.name}"),
        (
            not os.access(folder, os.W_OK),
            f"{path} cannot be written: no permission to write to {folder}",
        ),
        (path.exists() and not overwrite, f"{path} exists; pass --overwrite to replace it"),
    )


def check_folder(folder: Path, way_out: str) -> None:
    """Raise ValueError if a folder cannot be created or written to; the error ends with
    ``way_out``.
    """
    absolute = folder.absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.is_dir())
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"{place} is a file, so {folder} cannot be a folder; {way_out}")
    if not os.access(existing, os.W_OK):
        raise ValueError(f"no permission to write to {existing}; {way_out}")


def lock(path: Path, taken: str) -> TextIO:
    """Open and lock a file. The lock lasts until the file is closed here and in all processes that
    inherited its descriptor.

    Args:
        path: the file; created if missing.
        taken: text of the error if the file is locked.

    Raises:
        ValueError: another process has locked the file.
        OSError: the file cannot be opened.
    """
    file = open(target_of(path), "a")  # noqa: SIM115  the caller closes it
    if not _is_free(file.fileno()):
        file.close()
        raise ValueError(taken)
    return file


@contextmanager
def locked(path: Path, taken: str) -> Iterator[None]:
    """Hold a lock file in this context, to keep other processes out. Forked processes do not
    inherit the lock, because they may outlive this process by seconds.

    Raises:
        ValueError: another process holds the lock; the text is ``taken``.
    """
    # Retry for a moment: the previous holder may be deleting the file.
    guard = FileLock(target_of(path), timeout=0.1, thread_local=False)
    try:
        guard.acquire()
    except Timeout as error:
        raise ValueError(taken) from error
    with undone_at_end(path.unlink):
        try:
            yield
        finally:
            with suppress(OSError):  # the folder may be gone or read-only by now
                path.unlink()
            guard.release()


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error's text, at most 120 characters. A ``KeyError`` and an error
    without text get the name of their type.
    """
    lines, kind = str(error).splitlines(), type(error).__name__
    if not lines:
        return kind
    return f"{kind}: {lines[0][:120]}" if isinstance(error, KeyError) else lines[0][:120]


def printable(text: str) -> str:
    """Replace the bytes of file names that are not UTF-8 with question marks."""
    return text.encode("utf-8", "replace").decode()
