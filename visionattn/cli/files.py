"""Files that are there whole or not at all, and whether one may write somewhere.

This module writes, locks and refuses files, and puts an error into one line. It knows no format.
Every writer calls ``target_of``, which refuses anything but regular files. An unfinished file has a
random name in the folder of its target; ``is_unfinished`` recognises the name, and the next write
to the target deletes files left by killed processes.
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
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from filelock import FileLock, Timeout, lock_descriptor

from visionattn.cli.interruption import undone_at_end
from visionattn.cli.tables import sized

UNFINISHED = ".visionattn.tmp"
"""Suffix of unfinished files and folders."""
CONTINUED = ".visionattn.part"
"""Suffix of unfinished files and folders that several runs write."""
POSIX = hasattr(os, "O_DIRECTORY")
"""Folders can be opened and open files renamed. Windows does neither, so files left by killed
processes stay there.
"""


def target_of(path: str | Path) -> Path:
    """Return the file that is written where ``path`` is asked for: links are followed, also where
    they lead to no file yet.

    Raises:
        OSError: there is a folder, a device, a pipe or a socket; none of them may be replaced.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "is a device, a pipe or a socket; name a file", str(path))
    return Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)


def write_whole(
    path: str | Path,
    write: Callable[[Path], object],
    *,
    check: Callable[[Path], object] | None = None,
    previous: Path | None = None,
) -> None:
    """Write a file so that it is there whole or not at all: under another name, flushed to the disk
    and renamed. A file that is there keeps its permissions.

    Args:
        path: the file, as ``target_of`` takes it; its folder exists.
        write: writes the content to the path that it is given, where there is an empty file.
        check: reads the path that it is given back, and raises if the content is wrong.
        previous: where the file that has the name until then goes; None: it is replaced.

    Raises:
        OSError: it cannot be written; ``filename`` is ``path``, also where the system names no file
            (a full disk). ``path`` and ``previous`` are as they were.
    """
    target = target_of(path)
    with named(path), _beside(target) as temporary:
        mode = os.stat(target if target.exists() else temporary).st_mode
        write(temporary)
        flush_to_disk(temporary)
        if check is not None:
            check(temporary)
        os.chmod(temporary, stat.S_IMODE(mode))  # some writers make files of their own
        if previous is not None and target.exists():
            os.replace(target, previous)
        os.replace(temporary, target)


@contextmanager
def whole_folder(path: str | Path, *, replaces: str | None = None) -> Iterator[Path]:
    """Give an empty folder to write files into; at the end it is there as ``path``, whole, or not
    at all: under another name, flushed to the disk and renamed.

    Args:
        path: the folder; its parent exists.
        replaces: the name of a file by which a folder that is there is known as one that goes when
            the new one is whole; None: none does.

    Raises:
        ValueError: there is something of that name that is not to be replaced.
        OSError: it cannot be written; ``filename`` is ``path`` where the system names no file or
            the unfinished folder.
    """
    target = Path(path)
    check_new(target, replaces=replaces)
    with named(path), _beside(target, folder=True) as place:
        yield place
        for file in place.iterdir():
            flush_to_disk(file)
            # Some writers make files that nobody else may read.
            os.chmod(file, stat.S_IMODE(place.stat().st_mode) & 0o666)
        flush_folder(place)
        check_new(target, replaces=replaces)  # a rename would replace an empty folder
        _rename_folder(place, target)


def _rename_folder(place: Path, target: Path) -> None:
    """Rename a finished folder to its target, and then delete the former target."""
    former = _unfinished_name(target)
    with ExitStack() as undo:
        if target.exists():
            os.rename(target, former)
            undo.callback(os.rename, former, target)
        os.rename(place, target)
        undo.pop_all()
    shutil.rmtree(former, ignore_errors=True)


def check_new(path: Path, *, replaces: str | None = None) -> None:
    """Raise ValueError where a folder cannot be made as something new: there is something of that
    name, there is no folder for it, or that may not be written to. A folder with a file of the name
    ``replaces`` is not in the way.
    """
    known = replaces is not None and path.is_dir() and not path.is_symlink()
    if os.path.lexists(path) and not (known and (path / str(replaces)).is_file()):
        raise ValueError(f"{path} exists; name a folder that does not")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"no folder {parent} for {path.name}")
    if not os.access(parent, os.W_OK):
        raise ValueError(f"no permission to write to {parent}")


def _unfinished_name(target: Path) -> Path:
    """Return a random name in the same folder, for the unfinished file or folder."""
    return target.with_name(f".{target.name[:48]}.{secrets.token_hex(8)}{UNFINISHED}")


@contextmanager
def _beside(target: Path, *, folder: bool = False) -> Iterator[Path]:
    """Make an empty file or folder of a random name in the folder of ``target``; delete it at the
    end unless it was renamed. Its lock tells ``forget_unfinished`` that its writer lives.
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
    """Lock a file until its descriptor is closed; return whether no other process has locked it.
    On a file system without locks it counts as free.
    """
    with suppress(OSError):
        return lock_descriptor(descriptor, blocking=False)
    return True


class Continued:
    """A file or folder that several runs write. Until it is finished it has a fixed name in the
    same folder, under which the next run finds it. One process at a time holds it.

    Attributes:
        place: the unfinished file or folder; a new one is empty.
    """

    def __init__(self, path: str | Path, *, folder: bool = False, overwrite: bool = False):
        """Take the file or folder that it will be.

        Args:
            path: where it will be; a file as ``target_of`` takes it.
            folder: it is a folder.
            overwrite: replace an existing file once the new one is whole, and an existing folder
                if ``finish`` allows it.

        Raises:
            ValueError: it cannot be written, is in the way, or another process writes it.
        """
        self._path, self._folder = Path(path), folder
        self._overwrite = overwrite
        if not folder:
            check_free(self._path, overwrite)
        elif not overwrite:
            check_new(self._path)
        self.target = self._path if folder else target_of(self._path)
        self.place = self.beside(path, folder=folder)
        self._held = ExitStack()
        with named(path):
            guard = self.place.with_name(f"{self.place.name}.lock")
            self._held.enter_context(locked(guard, f"{path} is being written by another process"))
            self.place.mkdir(exist_ok=True) if folder else self.place.touch()

    @staticmethod
    def beside(path: str | Path, *, folder: bool = False) -> Path:
        """Return the unfinished file or folder of a path, whether or not there is one."""
        target = Path(path) if folder else target_of(path)
        number = hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]
        return target.with_name(f".{target.name[:48]}.{number}{CONTINUED}")

    def open(self) -> io.FileIO:
        """Open the unfinished file at its start, to read and write without a buffer."""
        return io.FileIO(self.place, "rb+")

    def empty(self) -> None:
        """Delete the content of an earlier run."""
        if self._folder:
            for each in self.place.iterdir():
                _delete(each)
        else:
            os.truncate(self.place, 0)

    def finish(self, *, replaces: str | None = None) -> None:
        """Give it its name, once all of it is on the disk.

        Args:
            replaces: the name of a file by which a folder that is there is known as one that goes.
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
        """Let other processes have it, unfinished as it may be."""
        self._held.close()


def check_room(path: Path, wanted: int) -> None:
    """Raise ValueError if the disk of a path, whose folder exists, has fewer free bytes than
    ``wanted``.
    """
    free = shutil.disk_usage(path.absolute().parent).free
    if wanted > free:
        raise ValueError(
            f"{path} needs up to {sized(wanted)} on its disk, and {sized(free)} are free"
        )


def reserve_bytes(descriptor: int, size: int) -> None:
    """Make a file so large that writing within it cannot fill the disk, where the system can."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def is_unfinished(path: str | Path) -> bool:
    """Tell by its name whether a file is being written, or was left by a killed process."""
    name = os.path.basename(path)
    return name.startswith(".") and name.endswith(UNFINISHED)


def forget_unfinished(target: Path) -> None:
    """Delete unfinished versions of a file or folder that killed processes left. Those of living
    processes are locked.
    """
    for path in target.parent.glob(f".*{UNFINISHED}") if POSIX else ():
        if path.name[1:].startswith(target.name[:48] + "."):
            with suppress(OSError), ExitStack() as held:  # of others, or somebody else was faster
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                held.callback(os.close, descriptor)
                if lock_descriptor(descriptor, blocking=False):
                    _delete(path)


def unfinished(folder: Path) -> list[Path]:
    """List the files in a folder that are being written or were left by killed processes."""
    return [path for path in folder.glob(f".*{UNFINISHED}") if path.is_file()]


def added_to(path: str | Path) -> BinaryIO:
    """Open a file, as ``target_of`` takes it, to write at its end."""
    return open(target_of(path), "ab")


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
    with named(path), added_to(path) as file:
        file.write((json.dumps(record) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Return the whole lines that ``add_line`` wrote; none where there is no file."""
    records = []
    for line in Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else ():
        with suppress(ValueError):  # the end of a process that was killed as it wrote
            records.append(json.loads(line))
    return records


@contextmanager
def named(path: str | Path) -> Iterator[None]:
    """Give errors of the system the name of the target where they name no file, as on a full disk,
    or an unfinished one. Unwrap exceptions of libraries to the original ``OSError``.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # of a library, which knows no file
            raise OSError(f"{path} cannot be written: {error}") from error
        beside = any(mark in str(error.filename) for mark in (UNFINISHED, CONTINUED))
        if error.filename is None or beside:
            error.filename = str(path)
        raise
    except Exception as error:
        # torch raises the system's error anew, and libraries in Rust write its number down.
        said = re.search(r"\(os error (\d+)\)", str(error))
        context = error.__context__ if isinstance(error, RuntimeError) else None
        number = int(said[1]) if said else getattr(context, "errno", None)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def flush_to_disk(path: str | Path) -> None:
    """Flush a file to the disk, so that renaming it later never leaves an empty one."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Flush the names in a folder to the disk, where the system can."""
    if POSIX:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_free(path: Path, overwrite: bool) -> None:
    """Raise ValueError where a file cannot be written, or exists and ``overwrite`` is off; OSError
    for what ``target_of`` refuses.
    """
    if path.is_dir():
        raise ValueError(f"{path} cannot be written: it is a folder; name a file")
    target = target_of(path)
    folder = target.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"no folder {folder} for {path.name}")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{path} cannot be written: no permission to write to {folder}")
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


def lock(path: Path, taken: str) -> TextIO:
    """Open a file and keep others from locking it until it is closed here and in all processes that
    were started with its descriptor.

    Args:
        path: the file; it is made where it is missing.
        taken: the error where somebody has locked it.

    Raises:
        ValueError: somebody has locked it.
        OSError: the file cannot be opened.
    """
    file = open(target_of(path), "a")  # noqa: SIM115  the caller closes it
    if not _is_free(file.fileno()):
        file.close()
        raise ValueError(taken)
    return file


@contextmanager
def locked(path: Path, taken: str) -> Iterator[None]:
    """Keep other processes out, with a file that is there meanwhile. Only this process holds it:
    those that it forks may outlive it by seconds.

    Raises:
        ValueError: somebody has locked it; the text is ``taken``.
    """
    # Tried again for a moment: whoever had it may just be deleting it.
    guard = FileLock(target_of(path), timeout=0.1, thread_local=False)
    try:
        guard.acquire()
    except Timeout as error:
        raise ValueError(taken) from error
    with undone_at_end(path.unlink):
        try:
            yield
        finally:
            with suppress(OSError):  # of a folder that is gone or read-only by now
                path.unlink()
            guard.release()


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
