"""Show the progress of long work: a bar on a terminal, elsewhere a line every 30 seconds."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, TextIO, TypeVar

from torch import Tensor, nn

from visionattn.cli.interruption import undone_at_end
from visionattn.cli.tables import lasting

if TYPE_CHECKING:
    import rich.progress

Item = TypeVar("Item")
QUIET_SECONDS = 5.0
"""Shorter work shows no progress."""
SECONDS_PER_LINE = 30.0


class Progress:
    """Show how many of ``total`` items are done, the throughput, and the time left; a context
    manager.

    Args:
        total: number of items.
        done: items done by an earlier run.
        stream: where to print; None: standard error.
        what: name of the work, printed before the numbers.
        unit: name of the items.
        clock: returns seconds, from any start.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        stream: TextIO | None = None,
        *,
        what: str = "",
        unit: str = "images",
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.stream, self.total = stream or sys.stderr, total
        self.done, self.what, self.unit = done, what, unit
        self._before, self._failed, self._part = done, 0, 0.0
        self._clock = clock
        self._start = self._told = self._moved = clock()
        self._bar: rich.progress.Progress | None = None
        self._shown = ExitStack()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bar, and restore the cursor of the terminal."""
        self._shown.close()
        self._bar = None

    def advance(self, count: int, failed: int = 0, note: str = "") -> None:
        """Add ``count`` finished items, ``failed`` of them without a result."""
        self.done, self._failed = self.done + count, self._failed + failed
        self._part, self._moved = 0.0, self._clock()
        self.show(note)

    def resume(self, count: int) -> None:
        """Add ``count`` items of an earlier run, which do not count for the throughput."""
        self.done, self._before = self.done + count, self._before + count

    def over(self, items: Iterable[Item], count: Callable[[Item], int]) -> Iterator[Item]:
        """Yield items, and count each when the next one is requested."""
        for item in items:
            yield item
            self.advance(count(item))

    def show(self, note: str = "") -> None:
        """Update the bar, or print a line if one is due."""
        now = self._clock()
        if now - self._start < QUIET_SECONDS:
            return
        came = self.done - self._before + self._part
        speed = came / (now - self._start)
        said = [f"{speed:.3g} {self.unit}/s" if speed else "", note]
        said.append(f"{self._failed} without a result" if self._failed else "")
        if self._part and now - self._moved > QUIET_SECONDS:
            said.append(f"{self._part:.2f} in progress")
        words = ", ".join(filter(None, said))
        if self.stream.isatty():
            if self._bar is None:
                self._bar = self._shown.enter_context(_bar_on(self.stream))
                self._shown.enter_context(undone_at_end(self._bar.stop))
            (task,) = self._bar.task_ids
            place = dict(completed=self.done + self._part, total=self.total)
            self._bar.update(task, description=self.what or self.unit, note=words, **place)
        elif now - self._told >= SECONDS_PER_LINE:
            self._told = now
            left = self.total - self._before - came
            parts = [f"{self.done} of {self.total} {self.unit}", words]
            parts.append(f"{lasting(left / speed)} left" if speed and left else "")
            begin = f"{self.what}: " if self.what else ""
            print(begin + ", ".join(filter(None, parts)), file=self.stream, flush=True)

    def say(self, line: str, say: Callable[[str], object] = print) -> None:
        """Print a result, above the bar if both are on a terminal."""
        if self._bar and sys.stdout.isatty():
            self._bar.console.print(line, markup=False, soft_wrap=True)
        else:
            say(line)

    @contextmanager
    def within(self, model: nn.Module, images: int = 1) -> Iterator[None]:
        """Also show progress within one forward and backward pass, block by block.

        Args:
            model: the model; one without ``blocks`` shows nothing.
            images: maximum number of items of one pass.
        """
        blocks = list(getattr(model, "blocks", ()))
        count = len(blocks)

        def reached(done: int, of: int) -> None:
            # Recomputing a block for its gradient must not move the bar back.
            # The last pass may have fewer items.
            do = min(images, self.total - self.done)
            self._part = max(self._part, do * done / of)
            self.show()

        def hook(block: nn.Module, given: object, output: object, number: int) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                # The gradient arrives here after all later blocks have theirs.
                output.register_hook(lambda _: reached(2 * count - number, 2 * count))
                reached(number, 2 * count)
            else:
                reached(number, count)

        handles = [
            block.register_forward_hook(partial(hook, number=number))
            for number, block in enumerate(blocks, 1)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _bar_on(stream: TextIO) -> "rich.progress.Progress":
    """Return a progress bar on a terminal. It shows no percentage, so that every percentage on the
    screen is a result.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(file=stream, highlight=False),
        transient=True,
        redirect_stdout=False,  # results may go to a file while the bar is on a terminal
        redirect_stderr=False,
    )
    bar.add_task("", note="")
    return bar
