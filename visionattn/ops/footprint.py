"""How many bytes of tensors a work holds at most, found without computing it.

The work runs on fake tensors, which have shapes and no memory, so that what would not fit can be
counted too. This module owns the count; it knows nothing of models, and nothing of what a process
takes besides tensors.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from visionattn.ops.chunking import only_few
from visionattn.ops.operator import function_of

LARGE_BYTES = 32 * 2**20
"""From here on, glibc takes each block from the system and gives it back when it is freed."""
Model = TypeVar("Model", bound=nn.Module)


class Footprint(TorchDispatchMode):
    """Count the bytes of the tensors that are alive while it is active.

    Attributes:
        live_bytes: those alive now, of tensors made within it.
        peak_bytes: the most at any time.
        small_bytes: those of them, at that time, of tensors below ``LARGE_BYTES``, which allocators
            put side by side, so that gaps stay between them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.small_bytes = self._live_small = 0
        self._alive: dict[int, tuple[weakref.ref, int]] = {}
        self._left_out: set[int] = set()
        self._inside: dict[tuple, int] = {}

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count what is there without the work, whatever views of it are made."""
        self._left_out = {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator and count what it returns; of ours also what they hold in between."""
        given = kwargs or {}
        own = function_of(func)
        tensors = [x for x in tree_leaves((args, given)) if isinstance(x, Tensor)]
        # On an accelerator ours are kernels, which do not run on fake tensors.
        if own is None or any(x.device.type != "cpu" for x in tensors):
            out = func(*args, **given)
        else:
            out = self._run_own(func, own, args, given)
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                self._count(made)
        return out

    def _run_own(self, func, own: Callable, args: tuple, given: dict) -> object:
        """Run an operator of ours from within, once for each kind of arguments: later calls hold as
        much.
        """
        kind = (func, *map(_kind, tree_leaves((args, given))))
        if kind in self._inside:
            self._note(self._inside[kind])
            return func(*args, **given)
        before, earlier = self.live_bytes, (self.peak_bytes, self.small_bytes)
        self.peak_bytes = before
        with self, only_few():
            out = own(*args, **given)
        self._inside[kind] = self.peak_bytes - before
        self.peak_bytes, self.small_bytes = max(earlier, (self.peak_bytes, self.small_bytes))
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._left_out:
            return
        self._alive[key] = (weakref.ref(storage, lambda _: self._forget(key)), size)
        self.live_bytes += size
        self._live_small += size if size < LARGE_BYTES else 0
        self._note(0)

    def _note(self, more_bytes: int) -> None:
        """Keep the level, with so many bytes more of small tensors, where it is the highest."""
        if self.live_bytes + more_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes + more_bytes
            self.small_bytes = self._live_small + more_bytes

    def _forget(self, key: int) -> None:
        size = self._alive.pop(key)[1]
        self.live_bytes -= size
        self._live_small -= size if size < LARGE_BYTES else 0


def _kind(value: object) -> object:
    """Return what of an argument decides how much memory a work takes."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return repr(value)


@contextmanager
def counting() -> Iterator[tuple[Footprint, Callable[[Model], Model]]]:
    """Make every tensor that is made in the context a fake one, and count their bytes.

    Gives the count, and a function that copies a module with fake parameters and buffers, which do
    not count.
    """
    # Fake tensors pretend that there is a GPU. A first backward pass after them would start a
    # thread for it, and with that thread no forked process could go backward any more.
    torch.ones((), requires_grad=True).backward()
    fake, count = FakeTensorMode(), Footprint()

    def copied(model: Model) -> Model:
        with torch.utils._python_dispatch._disable_current_modes(), FakeCopyMode(fake):
            made = copy.deepcopy(model)
        count.leave_out([*made.parameters(), *made.buffers()])
        return made

    with fake, count:
        yield count, copied
