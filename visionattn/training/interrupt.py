"""What ends a run early: Ctrl-C, at a moment where the state is whole, or a loss that is not finite."""

import signal
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


class Stopped(Exception):
    """Ctrl-C ended a run, whose state is saved; the text says where."""


class NonFinite(Exception):
    """The loss was not finite several steps in a row; the text names the first module with such values."""


class OutOfMemory(Exception):
    """A run needs more memory than there is; the text says at which batch and image size, and what helps."""


class Failed(Exception):
    """Another process of the run, one that loads data or one that trains, ended; the text says which."""


class Interrupted(Exception):
    """Ctrl-C was pressed; raised by ``Interruption.watch`` between two items."""


class Interruption:
    """While active, the first Ctrl-C is noted and a second one raises ``KeyboardInterrupt`` at once."""

    def __init__(self) -> None:
        self.requested = False
        self._previous = None

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, signum: int, frame: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def watch(self, items: Iterable[Item]) -> Iterator[Item]:
        """Pass items on, and raise ``Interrupted`` before the next one once Ctrl-C was pressed.

        Ctrl-C reaches the loader's processes too; what the loader then says of their end counts as the interruption.
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
