"""How a run can end early, and the exit code of each end.

Here are the exceptions for a signal, a loss that is not finite, too little memory and a dead
process, and what a command prints and returns for each.
"""

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from visionattn.cli.interruption import STOPPED, ends_in_time, is_alone

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


class DoesNotFit(OutOfMemory):
    """A run would need more memory than there is, and was refused before its first step; the text
    says how much, and what would fit.
    """


class Failed(Exception):
    """Another process of the run, one that loads data or one that trains, ended; the text says
    which.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that an allocation failed, on a GPU or on a processor."""
    import torch  # takes a second, which a mistyped option does not wait for

    words = ("allocate memory", "not enough memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        word in str(error) for word in words
    )


EXIT_CODES = {NonFinite: 1, OutOfMemory: 3, DoesNotFit: 3, Failed: 4}
"""Exit codes of runs that end through no fault of their input."""


def run_tool(work: Callable[[], None], *, several: bool = False) -> int:
    """Do a command's work and turn the ways in which it can end into an exit code and at most one
    line on standard error.

    Args:
        work: the work of the command.
        several: the processes that ``torchrun`` has started do it together; other tools refuse to
            start in several.

    Returns:
        0; 1 for a loss that is not finite; 2 for bad input, and for files that cannot be read or
        written; 3 for too little memory; 4 where another process of the run ended; 130 for Ctrl-C.
    """
    if not several and not is_alone():
        if os.environ.get("RANK", "0") == "0":
            print(
                "error: this tool runs as one process; start it without torchrun", file=sys.stderr
            )
        return 2
    for stream in (sys.stdout, sys.stderr):  # names of files may be in any encoding
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        with ends_in_time(alone=is_alone()), told_in_one_line():
            work()
    except (ValueError, OSError, Stopped, KeyboardInterrupt, *EXIT_CODES) as error:
        return tell(error)
    return 0


def tell(error: BaseException) -> int:
    """Print the line of an error that ends a command, and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        begin = "" if isinstance(error, Stopped) else "error: "
        print(begin + in_one_line(error), file=sys.stderr)
    return exit_code(error)


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Write the warnings of this package, and Pillow's of garbled files, as a line each, without
    the place in the code. Errors of TensorBoard's thread are told where it raises them again: in
    the main thread, at the next line that is written.
    """
    usual, usual_of_threads = warnings.formatwarning, threading.excepthook

    def write(message, category, filename, *where) -> str:
        ours = PACKAGE in Path(filename).parents or "PIL" in Path(filename).parts
        if category is not UserWarning or not ours:
            return usual(message, category, filename, *where)
        return f"note: {bounded(' '.join(str(message).split()))}\n"

    def tell_others(failed: threading.ExceptHookArgs) -> None:
        thread = type(failed.thread).__module__
        if not (isinstance(failed.exc_value, OSError) and thread.startswith("tensorboard.")):
            usual_of_threads(failed)

    warnings.formatwarning, threading.excepthook = write, tell_others
    try:
        yield
    finally:
        warnings.formatwarning, threading.excepthook = usual, usual_of_threads


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that an error ends; 1 for one that is not known here."""
    if isinstance(error, (Stopped, KeyboardInterrupt)):
        return STOPPED
    return 2 if isinstance(error, (ValueError, OSError)) else EXIT_CODES.get(type(error), 1)


def in_one_line(error: BaseException) -> str:
    """Return an error as one line: a system's with its file, and its name where it has no text."""
    text = str(error).strip()
    if isinstance(error, OSError) and error.filename and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    if "Original Traceback" in text:  # of a loader's process: last comes what the data set said
        text = text.splitlines()[-1].partition(": ")[2]
    return bounded(" ".join(text.split())) or type(error).__name__


LONGEST, LONGEST_WORD = 600, 200
"""Letters of a line, and of a word in a line that is too long: garbled values are longer."""


def bounded(line: str) -> str:
    """Return a line whole where it is short enough; else without the middles of its longest words,
    and where that is not enough, without its own.
    """
    if len(line) <= LONGEST:
        return line
    return _cut(" ".join(_cut(word, LONGEST_WORD) for word in line.split(" ")), LONGEST)


def _cut(text: str, most: int) -> str:
    """Return a text of at most ``most`` letters: of a longer one, its beginning and its end."""
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"
