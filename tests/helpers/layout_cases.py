"""Grids, prefixes, missing patches and masks on which operations with relative position are
compared.
"""

from dataclasses import dataclass

import torch

from tests.helpers.oracles import draw_kept, draw_mask, draw_qkv, draw_table
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Axial, Flat, Joint


@dataclass(frozen=True)
class Case:
    """One comparison: grid, horizon, prefix tokens, patches present (None: all), whether keys are
    masked, the rows and columns that each image fills (None: all), sizes.
    """

    grid: tuple[int, int]
    horizon: int
    prefix: int = 0
    present: int | None = None
    masked: bool = False
    filled: tuple[tuple[int, int], ...] | None = None
    shared: bool = False
    batch: int = 2
    d: int = 7
    e: int = 5

    def layout(self) -> TokenLayout:
        patches = self.grid[0] * self.grid[1]
        kept = None if self.present is None else draw_kept(self.batch, patches, self.present)
        return TokenLayout(self.prefix, Grid(*self.grid), kept, present=self.filled_places())

    def takes_part(self) -> list[list[bool]]:
        """Which tokens of which image take part as keys, told one by one."""
        layout, mask, places = self.layout(), self.mask(), self.filled_places()

        def one(b: int, token: int) -> bool:
            masked = mask is not None and not mask[b, token]
            patch = token - layout.num_prefix
            if masked or patch < 0 or places is None:
                return not masked
            return bool(places[b, patch if layout.kept is None else layout.kept[b, patch]])

        return [[one(b, token) for token in range(layout.num_tokens)] for b in range(self.batch)]

    def filled_places(self) -> torch.Tensor | None:
        if self.filled is None:
            return None
        places = torch.zeros(self.batch, *self.grid, dtype=torch.bool)
        for image, (rows, columns) in zip(places, self.filled, strict=True):
            image[:rows, :columns] = True
        return places.flatten(1)

    def mask(self) -> torch.Tensor | None:
        return draw_mask(self.batch, self.layout().num_tokens) if self.masked else None

    def tensors(self, kind: str, heads: int = 3) -> dict[str, torch.Tensor]:
        """q, k, v, and the tables of the kind under their names."""
        side, tables = 2 * self.horizon + 1, 1 if self.shared else heads
        shapes = {
            "flat": {"table": (side,)},
            "axial": {"rows": (side,), "columns": (side + 2,)},  # each axis has its own horizon
            "joint": {"table": (side, side)},
        }[kind]
        named = {
            name: draw_table(tables, *s, self.d, seed=40 + i)
            for i, (name, s) in enumerate(shapes.items())
        }
        return draw_qkv(self.batch, heads, self.layout().num_tokens, d=self.d, e=self.e) | named


CASES = {
    "horizon 1 and five prefix tokens": Case((5, 9), 1, prefix=5),
    "missing patches, horizon 3": Case((5, 9), 3, present=17),
    "missing patches and masked keys": Case((5, 9), 3, prefix=1, present=31, masked=True),
    "absent patches": Case((5, 9), 3, prefix=1, filled=((3, 7), (5, 4))),
    "absent and missing patches and masked keys": Case(
        (5, 9), 2, prefix=1, present=31, masked=True, filled=((4, 9), (5, 6))
    ),
    "one patch": Case((1, 1), 2, prefix=1),
}


def make_relative(kind: str, inputs: dict, layout: TokenLayout | None, normalization: str):
    """Take the tables out of ``inputs`` and build the relative position."""
    if kind == "axial":
        return Axial(inputs.pop("rows"), inputs.pop("columns"), layout, normalization=normalization)
    return (Flat if kind == "flat" else Joint)(
        inputs.pop("table"), layout=layout, normalization=normalization
    )
