"""Which rows of patches each process of a group has."""

from dataclasses import dataclass

from torch.distributed import ProcessGroup

from visionattn.layout import Grid
from visionattn.ops.strips import Strip


def cut_rows(height: int, ranks: int) -> tuple[int, ...]:
    """Return where the rows of each of so many ranks begin, and where the last ones end: as equal
    as whole rows allow.

    Raises:
        ValueError: there are fewer rows than ranks.
    """
    if height < ranks:
        raise ValueError(
            f"an image of {height} row{'s' if height > 1 else ''} of patches is too low for "
            f"{ranks} processes, each of which takes a row or more; take fewer processes for an "
            "image, or larger images"
        )
    return tuple(rank * height // ranks for rank in range(ranks + 1))


@dataclass(frozen=True)
class Share:
    """The rows of one rank of a group, among those of the others.

    Args:
        grid: of the whole image.
        cuts: where the rows of each rank begin, and where the last ones end.
        rank: in the group.
        group: those that have the other rows.
        num_prefix: P, the prefix tokens, which every rank has before its own patches.
    """

    grid: Grid
    cuts: tuple[int, ...]
    rank: int
    group: ProcessGroup
    num_prefix: int

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.cuts) - 1

    @property
    def strip(self) -> Strip:
        """The rank's own rows."""
        return self.strip_of(self.rank)

    @property
    def skipped(self) -> int:
        """How many of the rank's tokens do not count in sums over the group: the prefix tokens, of
        all ranks but the first, so that they count once.
        """
        return self.num_prefix if self.rank else 0

    @property
    def tokens(self) -> int:
        """The number of tokens of the image, those of all ranks together."""
        return self.num_prefix + self.grid.num_patches

    def strip_of(self, rank: int) -> Strip:
        """Return the rows of a rank."""
        return Strip(self.grid, self.cuts[rank], self.cuts[rank + 1])
