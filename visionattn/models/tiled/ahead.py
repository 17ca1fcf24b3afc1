"""Bands of an image, the next one being read while the caller computes."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from visionattn.models.tiled.ends import Source


class Ahead:
    """Bands of rows of an image in their order, an iterator and a context manager: while the caller
    computes with one, a thread reads and prepares the next, and none beyond it.

    Args:
        source: the image; nobody else reads it meanwhile.
        bands: rows of pixels of each band.
        prepare: what becomes of the pixels ``[h, w, channels]``, in the thread that reads.
        device: where the tensors go.

    Attributes:
        waited_s: seconds that the caller has waited for bands, the first included.
        read_s: seconds that the thread has read and prepared.
    """

    def __init__(
        self,
        source: Source,
        bands: Iterable[slice],
        prepare: Callable[[np.ndarray], Tensor],
        device: torch.device,
    ):
        self._source, self._bands = source, iter(bands)
        self._prepare, self._device = prepare, device
        self._pool = ThreadPoolExecutor(1, "reading ahead")
        self.waited_s = self.read_s = 0.0

    def __iter__(self) -> Iterator[Tensor]:
        """Yield what was prepared of each band. What reading or preparing raises comes up in the
        turn of its band.
        """
        following = self._start()
        while following is not None:
            begun = perf_counter()
            band = following.result()
            # From pinned memory the copy is queued, and whatever uses it is queued behind it.
            band = band.to(self._device, non_blocking=True)
            self.waited_s += perf_counter() - begun
            following = self._start()
            yield band

    def _start(self) -> Future[Tensor] | None:
        rows = next(self._bands, None)
        return None if rows is None else self._pool.submit(self._read, rows)

    def _read(self, rows: slice) -> Tensor:
        begun = perf_counter()
        band = self._prepare(self._source.read(rows, slice(0, self._source.width)))
        if self._device.type == "cuda":
            band = band.pin_memory()
        self.read_s += perf_counter() - begun
        return band

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
