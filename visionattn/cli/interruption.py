"""Ctrl-C and SIGTERM: a tool ends within seconds, whatever it computes or imports.

Python runs its handlers of signals between two of its own instructions, and one operation on a
large image, or a backward pass, takes minutes. So a thread hears of a signal from the system at
once, and ends the process where it has not begun to end by itself within ``GRACE``. This module
owns that thread and the clean-up before it ends the process. ``import visionattn`` imports it
first: while a command of the package imports its libraries, a signal ends it with one line.
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
"""Seconds from a signal until a process is ended that has not begun to end by itself."""
STOPPED = 130
"""The exit code after Ctrl-C or SIGTERM."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_undone: list[Callable[[], object]] = []
"""Clean-up functions, called in reverse order before the thread ends the process."""
_active: list["_Listener"] = []


class Interrupted(Exception):
    """Ctrl-C or SIGTERM came; raised by ``Interruption.watch`` between two items."""


def is_alone() -> bool:
    """Tell whether this is the only process of its run, and not one of several of ``torchrun``."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def is_command() -> bool:
    """Tell whether this process is a command of the package by itself: its script, ``python -m``,
    or a file of ``tools/``.
    """
    script, words = Path(sys.argv[0] if sys.argv else ""), sys.orig_argv
    named = script.name == PACKAGE.name or script.absolute().parent == PACKAGE.parent / "tools"
    if str(script) == "-m":  # so it is called while the package is imported
        named = words[words.index("-m") + 1 :][:1] == [PACKAGE.name]
    return named and is_alone()


@contextmanager
def undone_at_end(undo: Callable[[], object]) -> Iterator[None]:
    """Have ``undo`` called should the process be ended within this context."""
    _undone.append(undo)
    try:
        yield
    finally:
        _undone.remove(undo)


class _Listener(threading.Thread):
    """Hear of signals from the system, and end the process that does not end by itself."""

    def __init__(self) -> None:
        super().__init__(name="signals", daemon=True)
        self.last_words: Callable[[], int] | None = None
        """Says why the process ends, and returns the exit code."""
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
        """Wait for a signal, then for the process to end."""
        while not (heard := self._own.recv(1)) or heard[0] not in SIGNALS:
            if self.left.is_set():
                return
        if not self.left.wait(GRACE) and not self.ending:
            _leave(self.last_words or _say_interrupted)


def _leave(last: Callable[[], int]) -> None:
    """End the process without the thread that computes."""
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
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # some send it twice; the end is under way
    raise KeyboardInterrupt


def _restore(handlers: dict[int, object]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _forget_in_child() -> None:
    """A child process hears of its own signals in its own way."""
    if _active:
        signal.set_wakeup_fd(-1)
        _active.clear()
        _undone.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def ends_in_time(*, alone: bool):
    """Return a context in which Ctrl-C and SIGTERM raise ``KeyboardInterrupt``, and end the process
    where that has no effect in time.

    Args:
        alone: whether this is the only process of a run; several end together, by means of their
            own, and so does what is not the main thread or computes within another tool.
    """
    return _Listener() if alone and _in_main_thread() and not _active else nullcontext()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class Interruption:
    """While active, the first Ctrl-C is noted and a second one raises ``KeyboardInterrupt`` at
    once.

    SIGTERM, which clusters, ``timeout`` and ``torchrun`` send, some of them twice, is noted however
    often it comes.

    Args:
        last_words: called from another thread where a tool's process does not come to an end by
            itself, as one operation takes longer than ``GRACE``: it says why the process ends, and
            returns the exit code. None: the process is left to itself.
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
        """Pass items on, and raise ``Interrupted`` before the next one once a signal was noted.
        From then on the process is left to itself.

        A signal reaches the loader's processes too: the loader's error about their end then counts
        as the interruption.
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
