"""The folder beside an output in which images that are computed band by band, or written value by
value, keep how far they have come, so that the same command goes on after a kill.

This module owns its name, whose work it is, and when it goes. What is in it is written by
``models/large``, ``inference/banded.py`` and ``inference/generate``.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from visionattn.cli.files import Continued, check_folder, write_text, write_whole
from visionattn.cli.tables import write_rows

STATE = "work.json"


def briefly(*values: Any) -> list[str]:
    """Write values that differ for people: long ones from a little before the first difference."""
    texts = [str(value) for value in values]
    start = max(0, len(os.path.commonprefix(texts)) - 12)
    before, length = ("...", 36) if start else ("", 12)

    def brief(text: str) -> str:
        after = "..." if len(text) > start + length else ""
        return text if len(text) <= 40 else before + text[start : start + length] + after

    return [brief(text) for text in texts]


def write_array(path: Path, array: np.ndarray) -> None:
    """Write an ``.npy``, whole or not at all."""

    def write(place: Path) -> None:
        with open(place, "wb") as file:
            np.save(file, array)

    write_whole(path, write)


def write_table(path: Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as CSV, whole or not at all; names of files may be in any encoding."""

    def write(place: Path) -> None:
        with open(place, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            write_rows(file, columns, rows)

    write_whole(path, write)


def _beside(output: Path) -> Path:
    whole = Path(os.path.abspath(output)) if output.name in ("", "..") else output
    return whole.parent / f"{whole.name}.work"


def is_begun(output: Path) -> bool:
    """Tell whether a command for an output was stopped, and left its work."""
    return Continued.beside(_beside(output), folder=True).exists()


def in_the_way(check: Callable[[], object], output: Path) -> ValueError | None:
    """Return what ``check`` says is in the way of an output that a killed run may have finished.

    Raises:
        ValueError: of ``check``, where there is no work of such a run.
    """
    try:
        check()
    except ValueError as error:
        if not (os.path.lexists(output) and is_begun(output)):
            raise
        return error
    return None


class WorkFolder:
    """The work of one command; a context manager within which it may be used.

    Without an error it is done, and the folder goes. After one it stays, unless nothing but its
    description is in it.

    Args:
        output: what the command writes; the folder is beside it, under a hidden name.
        identity: returns JSON types that tell this work from that of other commands; it is asked
            where there is work alone.
        overwrite: work of another command is deleted instead of refused.
        bound_gib: the bound of memory that was asked for, which may be another one later.
    """

    def __init__(
        self,
        output: Path,
        identity: Callable[[], dict[str, Any]],
        *,
        overwrite: bool,
        bound_gib: float | None = None,
    ):
        self.output, self.overwrite, self.bound_gib = output, overwrite, bound_gib
        self._path, self._identity = _beside(output), identity
        self._held: Continued | None = None
        self._memory: int | None = None

    @property
    def folder(self) -> Path:
        """Return where the work is, or would be."""
        return Continued.beside(self._path, folder=True)

    @cached_property
    def _own(self) -> dict[str, str]:
        """Return what tells the work from others, by name, as texts."""
        return {
            key: json.dumps(value, sort_keys=True, default=str)
            for key, value in self._identity().items()
        }

    def check(self) -> None:
        """Raise ValueError where there is the work of another command; one line."""
        if self.overwrite or not (found := self._state()) or self._is_ours(found):
            return
        other = found.get("of") if isinstance(found.get("of"), dict) else {}
        key = next(key for key in self._own if other.get(key) != self._own[key])
        there, here = briefly(other.get(key), self._own[key])
        raise ValueError(
            f"{self.folder} keeps other work that was to become {self.output}: {key} {there} "
            f"there, {here} here; delete it, choose another --output, or begin anew with "
            "--overwrite"
        )

    def check_writable(self) -> None:
        """Raise ValueError where the folder cannot be made; one line."""
        way_out = f"the work on {self.output} is kept there meanwhile; choose another --output"
        check_folder(self._path, way_out)

    def _is_ours(self, found: dict[str, Any]) -> bool:
        return found.get("of") == self._own

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
        if found is None or not self._is_ours(found):
            held.empty()
            found = None
        for place in held.place.glob("*/tmp*"):  # files that a killed pass had mapped
            shutil.rmtree(place, ignore_errors=True)
        self._memory = (found or {}).get("memory")

    def describe(self, memory: int | None = None) -> None:
        """Note whose work it is, before anything is kept."""
        assert self._held is not None
        found = self._state()
        if found is None or found.get("bound_gib") != self.bound_gib:
            self._memory = memory
            state = {"of": self._own, "memory": memory, "bound_gib": self.bound_gib}
            write_text(self._held.place / STATE, json.dumps(state))

    def file(self, name: str) -> Path:
        """Return where a command keeps a file of this name, other than those of images."""
        assert self._held is not None
        return self._held.place / name

    def options(self, index: int, memory: int | None) -> dict[str, Any]:
        """Return options of ``forward_tiled`` for an image: its folder, and the memory with which
        the first of these passes began, as the same bands lead to the same bytes, unless another
        bound is asked for since.
        """
        assert self._held is not None
        self.describe(memory)
        return {"work": self._held.place / f"{index:06d}", "memory": self._memory}

    def finish(self) -> None:
        """Note that from now on the output may be there."""
        assert self._held is not None
        state = (self._state() or {}) | {"of": self._own, "finishing": True}
        write_text(self._held.place / STATE, json.dumps(state))

    def is_finished(self, in_the_way: ValueError | None) -> bool:
        """Tell whether this command was killed as its output got its name, so that nothing is left
        to do but to tidy up.

        Raises:
            ValueError: ``in_the_way``, which is not its own output.
        """
        found = self._state() or {}
        if in_the_way is not None and not (found.get("finishing") and self._is_ours(found)):
            raise in_the_way
        return in_the_way is not None

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
