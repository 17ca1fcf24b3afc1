"""How a run can end early, and the exit code of each end.

Here are the exceptions for a signal, a loss that is not finite, too little memory and a dead
process, and what a command prints and returns for each.
"""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

Item = TypeVar("Item")
PACKAGE = Path(__file__).parents[1]


class Stopped(Exception):
    """Ctrl-C or SIGTERM ended a run, whose state is saved; the text says where. The exit code is
    130 for both.
    """


class NonFinite(Exception):
    """The loss was not finite for several steps in a row; the text names the first module with such
    values.
    """


class OutOfMemory(Exception):
    """A run needs more memory than there is; the text says at which batch and image size, and what
    helps.
    """


class Failed(Exception):
    """Another process of the run, one that loads data or one that trains, ended; the text says
    which.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that an allocation failed, on a GPU or on a processor."""
    words = ("allocate memory", "not enough memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        word in str(error) for word in words
    )


EXIT_CODES = {NonFinite: 1, OutOfMemory: 3, Failed: 4}
"""What a tool returns where a run ends through no fault of its input."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM came; raised by ``Interruption.watch`` between two items."""


class Interruption:
    """While active, the first Ctrl-C is noted and a second one raises ``KeyboardInterrupt`` at
    once.

    SIGTERM, which clusters, ``timeout`` and ``torchrun`` send, some of them twice, is noted however
    often it comes.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._note)
                for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, signum: int, frame: object) -> None:
        if self.requested and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    def watch(self, items: Iterable[Item]) -> Iterator[Item]:
        """Pass items on, and raise ``Interrupted`` before the next one once a signal was noted.

        A signal reaches the loader's processes too: the loader's error about their end then counts
        as the interruption.
        """
        iterator = iter(items)
        while True:
            if self.requested:
                raise Interrupted
            try:
                item = next(iterator)
            except StopIteration:
                return
            except RuntimeError as error:
                if self.requested:
                    raise Interrupted from error
                raise
            yield item


def run_tool(work: Callable[[], None], *, several: bool = False) -> int:
    """Do a command's work and turn the ways in which it can end into an exit code and at most one
    line on standard error.

    Args:
        work: what the command does.
        several: the processes that ``torchrun`` has started do it together; other tools refuse to
            start in several.

    Returns:
        0; 1 for a loss that is not finite; 2 for bad input, and for files that cannot be read or
        written; 3 for too little memory; 4 where another process of the run ended; 130 for Ctrl-C.
    """
    if not several and os.environ.get("WORLD_SIZE", "1") != "1":
        if os.environ.get("RANK", "0") == "0":
            print(
                "error: this tool runs as one process; start it without torchrun", file=sys.stderr
            )
        return 2
    for stream in (sys.stdout, sys.stderr):  # names of files may be in any encoding
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        with warnings_in_one_line():
            work()
    except (ValueError, OSError, *EXIT_CODES) as error:
        print(f"error: {in_one_line(error)}", file=sys.stderr)
        return exit_code(error)
    except Stopped as error:
        print(in_one_line(error), file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Write the warnings that this package gives to people as a line each, without the place in its
    code.
    """
    usual = warnings.formatwarning

    def write(message, category, filename, *where) -> str:
        if category is not UserWarning or PACKAGE not in Path(filename).parents:
            return usual(message, category, filename, *where)
        return f"note: {' '.join(str(message).split())}\n"

    warnings.formatwarning = write
    try:
        yield
    finally:
        warnings.formatwarning = usual


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that an error ends; 1 for one that is not known here."""
    if isinstance(error, (Stopped, KeyboardInterrupt)):
        return 130
    return 2 if isinstance(error, (ValueError, OSError)) else EXIT_CODES.get(type(error), 1)


def in_one_line(error: BaseException) -> str:
    """Return an error as one line: a system's with its file, and its name where it has no text."""
    text = str(error).strip()
    if isinstance(error, OSError) and error.filename and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    if "Original Traceback" in text:  # of a loader's process: last comes what the data set said
        text = text.splitlines()[-1].partition(": ")[2]
    return " ".join(text.split()) or type(error).__name__
