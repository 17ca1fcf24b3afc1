"""Tokens of a whole image, in memory or in a file, and the progress of a pass."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from visionattn.cli.files import added_to, forget_unfinished, reserve_bytes, write_text
from visionattn.cli.tables import sized
from visionattn.layout import TokenLayout
from visionattn.models.large.band_plan import Bands, bands_of
from visionattn.models.weights import digest_of_weights

PIECE_TOKENS = 8192
"""Number of tokens per call of an MLP: its hidden layer is four times as wide."""
STATE, STORES = "progress.json", ("tokens", "cells")
"""Names of a pass's files; there are two of each store."""


class TokenStore:
    """Prefix tokens and rows of patches of one image.

    Args:
        layout: layout of the tokens.
        width: entries of a token.
        like: has the dtype of the tokens and the device of the computation.
        path: a file that is mapped into memory, keeping its content. None: memory.

    Raises:
        OSError: the disk has no space for the file.
    """

    def __init__(self, layout: TokenLayout, width: int, like: Tensor, path: Path | None = None):
        self.layout, self.device, self.mapped = layout, like.device, None
        shape = layout.num_tokens, width
        if path is None:
            self.tokens = like.new_empty(shape)
            return
        size = prod(shape) * like.element_size()
        _reserve(path, size)
        self.mapped = np.memmap(path, np.uint8, "r+", shape=size)
        self.tokens = torch.from_numpy(self.mapped).view(like.dtype).view(shape)

    def read(self, first: int, last: int) -> Tensor:
        """Return the tokens ``[1, n, width]`` of rows ``first`` to ``last - 1``, maybe a view."""
        return self.tokens[self._place(first) : self._place(last)].to(self.device)[None]

    @property
    def piece_rows(self) -> int:
        """Rows of about ``PIECE_TOKENS`` tokens."""
        return max(1, PIECE_TOKENS // self.layout.grid.width)

    def pieces(self, bands: Bands) -> Iterator[tuple[int | None, Tensor]]:
        """Yield all tokens: None and the prefix tokens, if there are any, then first row and tokens
        of each piece of each band.
        """
        if self.layout.num_prefix:
            yield None, self.prefix
        for first, last in bands:
            for begin, end in bands_of(last - first, self.piece_rows):
                yield first + begin, self.read(first + begin, first + end)

    def write(self, first: int, x: Tensor) -> None:
        """Store tokens ``[1, n, width]`` of rows from ``first`` on."""
        self.tokens[self._place(first) :][: x.shape[1]] = x[0]

    @property
    def prefix(self) -> Tensor:
        """The prefix tokens ``[1, P, width]``."""
        return self.tokens[: self.layout.num_prefix].to(self.device)[None]

    @prefix.setter
    def prefix(self, x: Tensor) -> None:
        self.tokens[: x.shape[1]] = x[0]

    def flush(self) -> None:
        """Return once everything written is on the disk."""
        if self.mapped is not None:
            self.mapped.flush()

    def _place(self, row: int) -> int:
        return self.layout.num_prefix + row * self.layout.grid.width


def _reserve(path: Path, size: int) -> None:
    """Reserve the size of a file on the disk: without space, writing to a mapped file would kill
    the process without a message.
    """
    with added_to(path) as file:
        try:
            reserve_bytes(file.fileno(), size)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            text = f"no space for {sized(size)} of tokens: {reason}"
            raise OSError(error.errno, text, str(path.parent)) from error


class PassProgress(NamedTuple):
    """The progress of a pass: ``step`` 0 embeds, step s maps block s - 1; ``bands`` are done."""

    step: int
    bands: int


class PassFolder:
    """The folder of a pass's tokens and progress, from which the same call resumes.

    Args:
        folder: created if needed, and then deleted at the end.
        model: its weights are part of the pass's identity.
        identity: JSON values that distinguish the pass from others.

    Attributes:
        place: progress of an earlier pass; None: none.
        rows: rows per band of an earlier pass; None: none.

    Raises:
        ValueError: the folder holds the work of another pass.
    """

    def __init__(self, folder: Path, model: nn.Module, identity: dict[str, Any]):
        self.folder, self.path = folder, folder / STATE
        known = {"weights": digest_of_weights(model)} | identity
        self.identity = json.dumps(known, sort_keys=True, default=str)
        found: dict[str, Any] = {"made": not folder.exists()}
        folder.mkdir(parents=True, exist_ok=True)
        forget_unfinished(self.path)
        if self.path.exists():
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["identity"] != self.identity:
                raise ValueError(
                    f"{folder} has the work of another image, model or options; delete it or pass "
                    "another folder"
                )
        self.made: bool = found["made"]
        self.rows: int | None = found.get("rows")
        self.place = PassProgress(*found["place"]) if "place" in found else None

    def record(self, place: PassProgress, rows: int) -> None:
        """Record progress that is already on the disk."""
        found = dict(identity=self.identity, place=place, rows=rows, made=self.made)
        write_text(self.path, json.dumps(found))

    def finish(self) -> None:
        """Remove the record of a finished pass."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Delete the files of a pass that is finished, or that has not begun."""
        if self.path.exists():
            return
        for name in STORES:
            for file in self.folder.glob(f"{name}.[01]"):
                file.unlink()
        if self.made:
            with suppress(OSError):  # not empty: others use it
                self.folder.rmdir()
