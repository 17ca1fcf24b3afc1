"""Rows of values that other ranks have, and the sums of those that are too far to come one by one.

A rank sends each other rank those of its rows that lie in the other's halo, and one sum of those
that lie beyond it. Sums are from one side, never differences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visionattn.models.sequence.collectives import exchanged
from visionattn.models.sequence.share import Share
from visionattn.ops.position.kinds import Flat, Joint
from visionattn.ops.strips import SeenRows, Strip, halo_of, seen_span

Sides = tuple[slice, slice]


@dataclass(frozen=True)
class Halo:
    """Rows of patches that a rank sees one by one: those of ``strip``.

    Args:
        strip: the rank's own rows and those around them.
        values: ``[B, h, rows, W, c]``.
        above, below: ``[B, h, ...]``, sums of what lies beyond a halo of its own; None: nothing
            does, or nothing was asked for.
    """

    strip: Strip
    values: Tensor
    above: Tensor | None = None
    below: Tensor | None = None

    def rows_of(self, strip: Strip) -> Tensor:
        """Return the rows of a strip within this one."""
        return self.values[:, :, strip.first - self.strip.first : strip.last - self.strip.first]


def far_sides(relative: Joint | Flat | None, strip: Strip) -> Sides | None:
    """Return the places beyond what a strip sees one by one, before and behind it: rows of the
    grid for ``Joint``, patches of the sequence for ``Flat``. None for None.
    """
    if relative is None:
        return None
    seen, grid = seen_span(relative, strip), strip.grid
    total = grid.height if isinstance(relative, Joint) else grid.num_patches
    return slice(0, seen.start), slice(seen.stop, total)


def _common(places: slice, begin: int, end: int) -> slice:
    """Return the places that lie in ``begin .. end - 1``, counted from ``begin``."""
    low, high = max(places.start, begin), min(places.stop, end)
    return slice(low - begin, max(low, high) - begin)


class _Far:
    """The sums of a rank's places that lie beyond what others see one by one."""

    def __init__(self, relative: Joint | Flat | None, share: Share):
        self.relative, self.share = relative, share
        self.width = share.grid.width if isinstance(relative, Flat) else 1

    def part(self, of: int, seen_from: int) -> slice | None:
        """Return the places of one rank, counted from its first, that lie beyond what another sees
        one by one; None where there are none.
        """
        sides = far_sides(self.relative, self.share.strip_of(seen_from))
        if sides is None:
            return None
        own = self.share.strip_of(of)
        # Ranks with lower numbers lie above.
        side = sides[0] if of < seen_from else sides[1]
        part = _common(side, own.first * self.width, own.last * self.width)
        return part if part.stop > part.start else None

    def shape(self, like: Tensor) -> tuple[int, ...]:
        """Return the shape of a sum of places of ``like [B, h, rows, W, c]``."""
        return (*like.shape[:2], *(like.shape[4:] if self.width > 1 else like.shape[3:]))


def with_halo(
    x: Tensor, share: Share, wanted: Sequence[Strip], relative: Joint | Flat | None = None
) -> Halo:
    """Return a rank's rows with those around them that it wants, of all ranks in one exchange.

    Args:
        x: ``[B, h, rows, W, c]``, the rank's own rows.
        share: who has which rows.
        wanted: the rows that each rank wants, its own among them.
        relative: whose sums of far values are wanted too; None: none.
    """
    me, own, far = share.rank, share.strip, _Far(relative, share)
    places = x.flatten(2, 3) if isinstance(relative, Flat) else x
    made: dict[tuple[int, int], Tensor] = {}

    def total(part: slice) -> Tensor:
        # Ranks that see no row of this one by one get the same sum.
        key = part.start, part.stop
        if key not in made:
            made[key] = places[:, :, part].sum(2)
        return made[key]

    sent: list[list[Tensor]] = []
    shapes: list[list[tuple[int, ...]]] = []
    for rank in range(share.ranks):
        if rank == me:
            sent.append([])
            shapes.append([])
            continue
        there, asked = share.strip_of(rank), wanted[rank]
        sent.append([x[:, :, _common(slice(asked.first, asked.last), own.first, own.last)]])
        if (part := far.part(me, rank)) is not None:
            sent[-1].append(total(part))
        mine = _common(slice(wanted[me].first, wanted[me].last), there.first, there.last)
        shapes.append([(*x.shape[:2], mine.stop - mine.start, *x.shape[3:])])
        if far.part(rank, me) is not None:
            shapes[-1].append(far.shape(x))
    found = exchanged(sent, shapes, share.group) if share.ranks > 1 else [[]]
    rows = [x if rank == me else found[rank][0] for rank in range(share.ranks)]
    sums = [of[1] if len(of) > 1 else None for of in found]
    return Halo(wanted[me], torch.cat(rows, 2), _added(sums[:me]), _added(sums[me + 1 :]))


def _added(sums: Sequence[Tensor | None]) -> Tensor | None:
    there = [x for x in sums if x is not None]
    return torch.stack(there).sum(0) if there else None


def seen_rows(halo: Halo, relative: Joint | Flat, strip: Strip) -> SeenRows:
    """Return what the relative position of a strip's queries needs of a halo."""
    if isinstance(relative, Joint):
        values = halo.rows_of(strip.with_halo(halo_of(relative)))
        return SeenRows(values, halo.above, halo.below)
    width, (before, behind) = strip.grid.width, far_sides(relative, strip)
    offset = halo.strip.first * width
    run = halo.values.flatten(2, 3)[:, :, before.stop - offset : behind.start - offset]
    return SeenRows(run, halo.above, halo.below)
