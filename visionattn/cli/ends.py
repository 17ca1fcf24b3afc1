"""What ends a run early: a signal, at a moment where the state is whole; a loss that is not finite;
memory; a dead process.
"""

import signal
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

Item = TypeVar("Item")


class Stopped(Exception):
    """Ctrl-C or SIGTERM ended a run, whose state is saved; the text says where. The exit code is
    130 for both.
    """


class NonFinite(Exception):
    """The loss was not finite several steps in a row; the text names the first module with such
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
    """Whether the error says that an allocation failed, on a GPU or on a processor."""
    words = ("allocate memory", "not enough memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        word in str(error) for word in words
    )


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

        A signal reaches the loader's processes too; what the loader then says of their end counts
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
