"""Turn the exceptions that end a run into an error line and an exit code.

This module defines the exceptions for a signal, a non-finite loss, too little memory and a dead
process.
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
    """Ctrl-C or SIGTERM ended a run; the text says where its state is saved. Exit code 130."""


class NonFinite(Exception):
    """The loss was not finite for several steps in a row; the text names the first module with
    non-finite values.
    """


class OutOfMemory(Exception):
    """A run ran out of memory; the text gives batch and image size, and a remedy."""


class DoesNotFit(OutOfMemory):
    """A run was refused before its first step because it would run out of memory; the text gives
    the estimate and a setting that fits.
    """


class Failed(Exception):
    """Another process of the run (a data loader or a training process) ended; the text names it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error reports a failed allocation, on a GPU or on the CPU."""
    import torch  # slow to import; errors about options must not wait for it

    words = ("allocate memory", "not enough memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        word in str(error) for word in words
    )


EXIT_CODES = {NonFinite: 1, OutOfMemory: 3, DoesNotFit: 3, Failed: 4}
"""Exit codes of runs that end for another reason than bad input."""


def run_tool(work: Callable[[], None], *, several: bool = False) -> int:
    """Run a command and return its exit code, with at most one line on standard error.

    Args:
        work: the work of the command.
        several: whether the command may run in several processes of ``torchrun``.

    Returns:
        0 for success; 1 for a non-finite loss; 2 for bad input and unreadable or unwritable files;
        3 for too little memory; 4 if another process of the run ended; 130 for Ctrl-C.
    """
    if not several and not is_alone():
        if os.environ.get("RANK", "0") == "0":
            print(
                "error: this command runs as one process; start it without torchrun",
                file=sys.stderr,
            )
        return 2
    for stream in (sys.stdout, sys.stderr):  # file names may be in any encoding
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        with ends_in_time(alone=is_alone()), told_in_one_line():
            work()
    except BrokenPipeError as error:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # the reader of standard output, such as head, has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return tell(error)  # another pipe, for example to a data loader process
    except (ValueError, OSError, Stopped, KeyboardInterrupt, *EXIT_CODES) as error:
        return tell(error)
    return 0


def tell(error: BaseException) -> int:
    """Print the line of an error that ends a command, and return its exit code."""
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        begin = "" if isinstance(error, Stopped) else "error: "
        print(begin + in_one_line(error), file=sys.stderr)
    return exit_code(error)


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Print each warning of this package, and Pillow's about damaged files, as one line without the
    location in the code.

    Do not print the ``OSError`` of TensorBoard's writer thread: the main thread raises it again at
    the next write.
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
    """Return the exit code of a command that an error ends; 1 for an unknown error."""
    if isinstance(error, (Stopped, KeyboardInterrupt)):
        return STOPPED
    return 2 if isinstance(error, (ValueError, OSError)) else EXIT_CODES.get(type(error), 1)


def in_one_line(error: BaseException) -> str:
    """Return an error as one line. An ``OSError`` names its file; without a text, the type is
    named.
    """
    text = str(error).strip()
    if isinstance(error, OSError) and error.filename and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    if "Original Traceback" in text:  # from a loader process; the last line is the original error
        text = text.splitlines()[-1].partition(": ")[2]
    return bounded(" ".join(text.split())) or type(error).__name__


LONGEST = 600
"""Maximum number of characters of a line."""


def bounded(line: str) -> str:
    """Return a line of at most ``LONGEST`` characters; a longer one loses its middle."""
    half = (LONGEST - 5) // 2
    return line if len(line) <= LONGEST else f"{line[:half]} ... {line[-half:]}"
