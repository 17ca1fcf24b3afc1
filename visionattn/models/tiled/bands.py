"""How a grid is divided into bands of rows, and sums of what lies far from each of them."""

from itertools import pairwise

from torch import Tensor

from visionattn.ops.chunking import chunks

Bands = list[tuple[int, int]]
"""First row and the row behind the last, band by band, from the top."""


def even_bands(height: int, rows: int) -> Bands:
    """Return bands of ``rows`` rows; the last may have fewer."""
    return [(part.start, part.stop) for part in chunks(height, rows)]


def window_bands(height: int, rows: int, window: int, shifted: bool) -> Bands:
    """Return bands of about ``rows`` rows that part no window, of ``window`` rows each, the first
    of half as many where they are ``shifted``.
    """
    step = max(1, rows // window) * window
    begin = window // 2 if shifted else 0
    cuts = [0, *range(begin + step, height, step), height]
    return list(pairwise(cuts))


class FarSums:
    """Sums of the items of a sequence that lie before and behind each of some spans, gathered as
    the items arrive in any order: sums of pieces between the ends of spans, added up from one side.

    Args:
        spans: first item and the one behind the last of each span.
        total: the number of items.
        like: an item as it is summed: shape, dtype and device.
    """

    def __init__(self, spans: Bands, total: int, like: Tensor):
        ends = {end for span in spans for end in span}
        self.cuts = sorted(ends | {0, total})
        self.sums = like.new_zeros(len(self.cuts) - 1, *like.shape)

    def add(self, first: int, items: Tensor) -> None:
        """Add items ``[n, ...]``, of which the first has the number ``first``."""
        last = first + len(items)
        for piece, (begin, end) in zip(self.sums, pairwise(self.cuts), strict=True):
            begin, end = max(begin, first), min(end, last)
            if begin < end:
                piece += items[begin - first : end - first].sum(0, dtype=piece.dtype)

    def around(self, first: int, last: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the sums of the items before a span and of those behind it; None of none."""
        before, behind = self.cuts.index(first), self.cuts.index(last)
        return (
            self.sums[:before].sum(0) if before else None,
            self.sums[behind:].sum(0) if behind < len(self.sums) else None,
        )
