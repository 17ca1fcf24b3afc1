"""How far a tool has come, on standard error: a bar on a terminal, elsewhere a line now and
then.
"""

import sys
import time
from typing import TextIO

SECONDS_PER_LINE = 10.0


class Progress:
    """Show how many images are done, out of ``total``; a context manager.

    Args:
        total: images in all.
        done: images done before.
        stream: where to print; standard error unless given.
    """

    def __init__(self, total: int, done: int = 0, stream: TextIO | None = None):
        self.stream, self.total = stream or sys.stderr, total
        self.done, self._unread = done, 0
        self._bar = ProgressBar(self.stream) if self.stream.isatty() else None
        self._start = self._last = time.perf_counter()
        self._before = done

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, images: int, failed: int) -> None:
        """Count images that are done, and how many of them have no result."""
        self.done, self._unread = self.done + images, self._unread + failed
        note = f"{self._unread} without a result" if self._unread else ""
        now = time.perf_counter()
        if self._bar:
            self._bar.show("images", self.done, self.total, note)
        elif now - self._last >= SECONDS_PER_LINE:
            self._last = now
            speed = f"{(self.done - self._before) / (now - self._start):.3g} images/s"
            line = ", ".join(filter(None, (f"{self.done} of {self.total} images", speed, note)))
            print(line, file=self.stream, flush=True)


class ProgressBar:
    """Draw a moving line on a terminal. It shows no percentage, so that every percentage on the
    screen is a result.
    """

    def __init__(self, stream: TextIO):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._progress = Progress(
            *columns, console=Console(file=stream, highlight=False), transient=True
        )
        self._task = self._progress.add_task("", note="")
        self._progress.start()

    def print(self, line: str) -> None:
        """Print above the bar."""
        self._progress.console.print(line, markup=False, soft_wrap=True)

    def show(self, what: str, done: int, total: int, note: str) -> None:
        """Show how far something has come."""
        self._progress.update(self._task, description=what, completed=done, total=total, note=note)

    def stop(self) -> None:
        """Remove the bar."""
        self._progress.stop()
