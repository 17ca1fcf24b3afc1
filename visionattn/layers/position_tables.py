"""Tables of relative position as parameters, initialized to a local pattern.

For linear attention the entries are positive by construction.
"""

import torch
from torch import Tensor, nn

from visionattn.layout import TokenLayout
from visionattn.ops.feature_maps import elu1
from visionattn.ops.position.relative_position import KINDS, RelativePosition

HEAD_OFFSETS = ((0, -1), (0, 1), (-1, 0), (1, 0), (-1, -1), (1, 1), (-1, 1), (1, -1))
START_PEAK, START_FLOOR, START_NOISE = 2.0, -3.0, 0.3
REFERENCE_HEAD_DIM = 16


def entries(raw: Tensor, signed: bool) -> Tensor:
    """Return the entries of a table from its parameters ``[..., d]``: positive, unless signed."""
    return raw if signed else elu1(raw) * (REFERENCE_HEAD_DIM / raw.shape[-1])


class RelativeTables(nn.Module):
    """The tables of one attention layer.

    Initially, the table of head i has a peak at the small offset ``HEAD_OFFSETS[i % 8]``, like a
    convolution. Tables near 0 would average over all patches and carry no signal early in training.

    Entries are ``elu1`` of the parameters, scaled by ``16 / d``. The initial values were tuned at
    d = 16; the scale gives other head widths the same initial balance of content and position.

    Args:
        kind: "joint", "axial" or "flat".
        num_heads: h; every head has its own table.
        head_dim: d.
        horizon: R, in patches, at least 0.
        normalization: "mean" or "sum"; see ``visionattn.ops.position.relative_position``.
        signed: use the parameters unchanged; for softmax and window attention, where scores may
            have any sign.

    Source: Scaleformer, section 4; two dimensions, local start and scale are ours.
    """

    def __init__(
        self,
        kind: str,
        num_heads: int,
        head_dim: int,
        *,
        horizon: int = 3,
        normalization: str = "mean",
        signed: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"relative {kind!r}: expected one of {', '.join(KINDS)}, none")
        if horizon < 0:
            raise ValueError(f"horizon: expected 0 or more patches, got {horizon}")
        self.kind, self.horizon = kind, horizon
        self.normalization, self.signed = normalization, signed
        side = 2 * horizon + 1
        sides = {"axial": (side,), "joint": (side, side), "flat": (side,)}[kind]
        self.names = ("rows", "columns") if kind == "axial" else ("table",)
        for name in self.names:
            table = torch.empty(num_heads, *sides, head_dim, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(table))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the tables: random entries, and the peak of each head."""
        for parameter in self.parameters():
            parameter.normal_(std=START_NOISE).add_(START_FLOOR)
        reach = min(1, self.horizon)
        for head in range(len(getattr(self, self.names[0]))):
            dy, dx = (
                reach * offset + self.horizon for offset in HEAD_OFFSETS[head % len(HEAD_OFFSETS)]
            )
            places = {"rows": (dy,), "columns": (dx,)}
            places["table"] = (dy, dx) if self.kind == "joint" else (dx,)
            for name in self.names:
                getattr(self, name)[(head, *places[name])] += START_PEAK - START_FLOOR

    def forward(self, layout: TokenLayout) -> RelativePosition:
        """Return the relative position for a layout.

        Signed tables need no counts. The counts of the layout may be for another horizon, so they
        are dropped.
        """
        if self.signed:
            layout = layout._replace(counts=None)
        tables = {name: entries(getattr(self, name), self.signed) for name in self.names}
        return KINDS[self.kind](**tables, layout=layout, normalization=self.normalization)
