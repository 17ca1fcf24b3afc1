"""The folder beside an output in which images that are computed band by band keep how far they have
come, so that the same command goes on after a kill.

This module owns its name, whose work it is, and when it goes. What is in it is written by
``models/tiled`` and ``inference/banded.py``.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from visionattn.cli.files import Continued, write_text
from visionattn.inference.listing import digest_of

STATE = "work.json"


def _beside(output: Path) -> Path:
    whole = Path(os.path.abspath(output)) if output.name in ("", "..") else output
    return whole.parent / f"{whole.name}.work"


def is_begun(output: Path) -> bool:
    """Tell whether a command for an output was stopped, and left its work."""
    return Continued.beside(_beside(output), folder=True).exists()


class WorkFolder:
    """The work of one command; a context manager within which it may be used.

    Without an error it is done, and the folder goes. After one it stays, unless nothing but its
    description is in it.

    Args:
        output: what the command writes; the folder is beside it, under a hidden name.
        identity: returns JSON types that tell this work from that of other commands; it is asked
            where there is work alone.
        overwrite: work of another command is deleted instead of refused.
    """

    def __init__(self, output: Path, identity: Callable[[], dict[str, Any]], *, overwrite: bool):
        self.output, self.overwrite = output, overwrite
        self._path, self._identity = _beside(output), identity
        self._held: Continued | None = None
        self._memory: int | None = None

    @property
    def folder(self) -> Path:
        """Return where the work is, or would be."""
        return Continued.beside(self._path, folder=True)

    @cached_property
    def _digest(self) -> str:
        return digest_of([json.dumps(self._identity(), sort_keys=True, default=str)])

    def check(self) -> None:
        """Raise ValueError where there is the work of another command; one line."""
        if not self.overwrite and (found := self._state()) and found.get("of") != self._digest:
            raise ValueError(
                f"{self.folder} keeps the work of other images, weights or options that was to "
                f"become {self.output}; delete it, choose another --output, or begin anew with "
                "--overwrite"
            )

    def _state(self) -> dict[str, Any] | None:
        """Return what the folder says of itself; None where there is none, or it says nothing."""
        with suppress(OSError, ValueError):
            found = json.loads((self.folder / STATE).read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        return None

    def __enter__(self) -> Self:
        self.check()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        held = Continued(self._path, folder=True, overwrite=True)
        with ExitStack() as failed:
            failed.callback(held.close)
            self._begin(held)
            failed.pop_all()
        self._held = held
        return self

    def _begin(self, held: Continued) -> None:
        found = self._state()
        if found is None or found.get("of") != self._digest:
            held.empty()
            found = None
        for place in held.place.glob("*/tmp*"):  # files that a killed pass had mapped
            shutil.rmtree(place, ignore_errors=True)
        self._memory = (found or {}).get("memory")

    def options(self, index: int, memory: int | None) -> dict[str, Any]:
        """Return options of ``forward_tiled`` for an image: its folder, and the memory with which
        the first of these passes began, as the same bands lead to the same bytes.
        """
        assert self._held is not None
        if self._state() is None:
            self._memory = memory
            state = {"of": self._digest, "memory": memory}
            write_text(self._held.place / STATE, json.dumps(state))
        return {"work": self._held.place / f"{index:06d}", "memory": self._memory}

    def finish(self) -> None:
        """Note that from now on the output may be there."""
        assert self._held is not None
        state = (self._state() or {}) | {"of": self._digest, "finishing": True}
        write_text(self._held.place / STATE, json.dumps(state))

    def is_finishing(self) -> bool:
        """Tell whether this command was killed as its output got its name."""
        found = self._state() or {}
        return bool(found.get("finishing")) and found.get("of") == self._digest

    def result(self, index: int) -> Path:
        """Return the file in which the output of an image is kept until the command is done."""
        assert self._held is not None
        return self._held.place / f"{index:06d}.npy"

    def drop(self, index: int) -> None:
        """Delete what is there of an image."""
        if self._held is not None:
            shutil.rmtree(self._held.place / f"{index:06d}", ignore_errors=True)
            result = self.result(index)
            for place in (result, Continued.beside(result)):
                place.unlink(missing_ok=True)

    def forget(self) -> None:
        """Delete it."""
        if self._held is not None:
            self._held.forget()
        self._held = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._held is None:
            return
        kept = [each for each in self._held.place.iterdir() if each.name != STATE]
        kept = [each for each in kept if each.is_file() or any(each.iterdir())]
        if kind is None or not kept:
            self.forget()
        else:
            self._held.close()
