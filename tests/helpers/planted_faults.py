"""Faults of single tokens, classes and tiles, planted into real launches of kernels.

A launch is given what a faulty kernel would make of its inputs, by
``visionattn.ops.gpu.launch.run``, which all launches go through: a key that a kernel passes
over is a key that its launch is told to be absent, a tile that a missed barrier leaves as it was
is a tile of the operand whose rows are those of the tile before. Other launches, and other passes,
are given the right inputs. So nothing here names a kernel; a fault that meets no launch says so.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from visionattn.ops.gpu import launch

PARTS = 3
"""Segments to cut tokens into where one is to be lost: nothing else of one head is as long."""


@dataclass
class Planted:
    """What launches are given instead, while ``into`` runs them.

    Args:
        swaps: pairs of a tensor that a launch takes and of what it takes instead.
        present: bool ``[1, M]``, the keys that launches are told to take; None: all.
        beside: only launches that take this tensor too are given what is swapped; None: all.
        lost_part: whether the second of ``PARTS`` parts is lost of every float32 result.
    """

    swaps: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    beside: Tensor | None = None
    present: Tensor | None = None
    lost_part: bool = False
    launches_met: int = 0

    def into(self, work: Callable[[], object]) -> object:
        """``work()``, its launches with the fault in them."""
        with pytest.MonkeyPatch.context() as patch:
            right = launch.run
            patch.setattr(
                launch,
                "run",
                lambda kernel, grid, *args, **meta: self._run(right, kernel, grid, args, meta),
            )
            if self.lost_part:
                patch.setattr(launch, "segments", lambda *args: PARTS)
            result = work()
        assert self.launches_met, "the fault met no launch"
        return result

    def _run(self, right, kernel, grid, args: tuple, meta: dict) -> None:
        concerned = self.beside is None or any(_same(x, self.beside) for x in args)
        given = [self._instead_of(x) for x in args] if concerned else list(args)
        if self.present is not None and "p_present" in kernel.arg_names:
            given[kernel.arg_names.index("p_present")] = self.present
            meta = meta | {"MASKED": True}
            self.launches_met += 1
        right(kernel, grid, *given, **meta)
        if self.lost_part:
            for x in args:
                if isinstance(x, Tensor) and x.dtype == torch.float32 and x.shape[:1] == (PARTS,):
                    x[1] = 0
                    self.launches_met += 1

    def _instead_of(self, x: object) -> object:
        for tensor, instead in self.swaps:
            if _same(x, tensor):
                self.launches_met += 1
                return instead
        return x


def _same(x: object, tensor: Tensor) -> bool:
    return isinstance(x, Tensor) and x.data_ptr() == tensor.data_ptr() and x.shape == tensor.shape


def changed(x: Tensor, change: Callable[[Tensor], object]) -> tuple[Tensor, Tensor]:
    """``x`` and a copy that is changed, for ``Planted.swaps``."""
    instead = x.detach().clone()
    change(instead)
    return x, instead
