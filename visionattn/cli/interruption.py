"""End a command within seconds of Ctrl-C or SIGTERM, whatever it computes or imports.

Python runs signal handlers between two of its instructions, but one operation on a large image or a
backward pass takes minutes. So a thread receives signals at once, and ends the process if it has
not begun to end by itself within ``GRACE``. This module owns that thread and the clean-up.
``import visionattn`` imports it first, so that a signal during slow imports ends a command with one
line.
"""

import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
PACKAGE = Path(__file__).parents[1]
GRACE = 2.0
"""Seconds from a signal until the thread ends a process that has not begun to end by itself."""
STOPPED = 130
"""The exit code after Ctrl-C or SIGTERM."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_undone: list[Callable[[], object]] = []
"""Clean-up functions, called in reverse order before the thread ends the process."""
_active: list["_Listener"] = []


class Interrupted(Exception):
    """Ctrl-C or SIGTERM came; raised by ``Interruption.watch`` between two items."""


def is_alone() -> bool:
    """Tell whether this is the only process of its run, not one of several under ``torchrun``."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def is_command() -> bool:
    """Tell whether this process runs a command of the package on its own: the script,
    ``python -m``, or a file of ``tools/``.
    """
    script, words = Path(sys.argv[0] if sys.argv else ""), sys.orig_argv
    named = script.name == PACKAGE.name or script.absolute().parent == PACKAGE.parent / "tools"
    if str(script) == "-m":  # the value while Python imports the package
        named = words[words.index("-m") + 1 :][:1] == [PACKAGE.name]
    return named and is_alone()


@contextmanager
def undone_at_end(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` if the thread ends the process within this context."""
    _undone.append(undo)
    try:
        yield
    finally:
        _undone.remove(undo)


class _Listener(threading.Thread):
    """Receive signals, and end the process if it does not end by itself."""

    def __init__(self) -> None:
        super().__init__(name="signals", daemon=True)
        self.last_words: Callable[[], int] | None = None
        """Prints why the process ends, and returns the exit code."""
        self.ending, self.left = False, threading.Event()
        self._own, self._system = socket.socketpair()
        self._system.setblocking(False)

    def __enter__(self) -> "_Listener":
        self._previous = {number: signal.signal(number, _interrupt) for number in SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._system.fileno(), warn_on_full_buffer=False)
        _active.append(self)
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        _active.remove(self)
        signal.set_wakeup_fd(self._wakeup)
        _restore(self._previous)
        self.left.set()
        self._system.send(b"\0")
        self.join()
        self._own.close()
        self._system.close()

    def run(self) -> None:
        """Wait for a signal, and then for the process to end."""
        while not (heard := self._own.recv(1)) or heard[0] not in SIGNALS:
            if self.left.is_set():
                return
        if not self.left.wait(GRACE) and not self.ending:
            _leave(self.last_words or _say_interrupted)


def _leave(last: Callable[[], int]) -> None:
    """Clean up and end the process without waiting for the thread that computes."""
    code = STOPPED
    try:
        code = last()
    finally:
        for undo in reversed(_undone):
            with suppress(OSError):
                undo()
        for child in multiprocessing.active_children():
            child.kill()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _say_interrupted() -> int:
    print("interrupted", file=sys.stderr, flush=True)
    return STOPPED


def _interrupt(signum: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # some tools send it twice
    raise KeyboardInterrupt


def _restore(handlers: dict[int, object]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _forget_in_child() -> None:
    """Stop listening in a forked child, which handles its own signals."""
    if _active:
        signal.set_wakeup_fd(-1)
        _active.clear()
        _undone.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def ends_in_time(*, alone: bool):
    """Return a context in which Ctrl-C and SIGTERM raise ``KeyboardInterrupt``, and end the process
    if that has no effect within ``GRACE``.

    The context does nothing outside the main thread and within another such context.

    Args:
        alone: whether this is the only process of the run; several end together in another way.
    """
    return _Listener() if alone and _in_main_thread() and not _active else nullcontext()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class Interruption:
    """Record the first Ctrl-C in this context; a second one raises ``KeyboardInterrupt`` at once.

    SIGTERM is only recorded, however often it comes: clusters, ``timeout`` and ``torchrun`` send
    it, some of them twice.

    Args:
        last_words: called from another thread if the process does not end within ``GRACE``, as one
            operation may take longer. It prints why the process ends, and returns the exit code.
            None: the thread does not end the process.
    """

    def __init__(self, last_words: Callable[[], int] | None = None) -> None:
        self.requested = False
        self._last_words = last_words
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        if _in_main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        for listener in _active:
            listener.last_words = self._last_words
            listener.ending = self._last_words is None
        return self

    def __exit__(self, *exception: object) -> None:
        _restore(self._previous)
        for listener in _active:
            listener.last_words, listener.ending = None, self.requested

    def _note(self, signum: int, frame: object) -> None:
        if self.requested and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    def watch(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield items, and raise ``Interrupted`` before the next one after a signal. From then on
        the thread does not end the process.

        A signal also ends the loader's processes; the loader's error then counts as the
        interruption.
        """
        iterator = iter(items)
        while not self.requested:
            try:
                item = next(iterator)
            except StopIteration:
                return
            except RuntimeError:
                if self.requested:
                    break
                raise
            yield item
        for listener in _active:
            listener.ending = True
        raise Interrupted


def _end_at_once(signum: int, frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(STOPPED)


if is_command() and _in_main_thread():
    for _number in SIGNALS:
        signal.signal(_number, _end_at_once)
