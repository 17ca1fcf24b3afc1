"""Relative position tables as parameters: positive by construction for the linear forms, with a
local start.
"""

import torch
from torch import Tensor, nn

from visionattn.layout import TokenLayout
from visionattn.ops.feature_maps import elu1
from visionattn.ops.position.kinds import KINDS, Axial, Flat, Joint, RelativePosition

HEAD_OFFSETS = ((0, -1), (0, 1), (-1, 0), (1, 0), (-1, -1), (1, 1), (-1, 1), (1, -1))
START_PEAK, START_FLOOR, START_NOISE = 2.0, -3.0, 0.3
REFERENCE_HEAD_DIM = 16


class RelativeTables(nn.Module):
    """The tables of one attention layer.

    Each head starts peaked at one small offset (head i at ``HEAD_OFFSETS[i % 8]``), as a
    convolution would: tables near zero average over everything and carry no signal early in
    training. Entries pass through ``elu1`` and are scaled by ``16 / d``, so that other head widths
    start from the balance of content and position that was measured at 16.

    Args:
        kind: "joint", "axial" or "flat".
        num_heads: h; every head has its own table.
        head_dim: d.
        horizon: R, in patches, at least 0.
        normalization: "mean" or "sum"; see ``visionattn.ops.position.kinds``.
        signed: use the parameter as it is, for softmax attention, whose scores may have any sign.

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
            raise ValueError(f"relative {kind!r}: wanted one of {', '.join(KINDS)}, none")
        if horizon < 0:
            raise ValueError(f"horizon: wanted 0 or more patches, got {horizon}")
        self.kind, self.horizon = kind, horizon
        self.normalization, self.signed = normalization, signed
        side = 2 * horizon + 1
        dd = {"device": device, "dtype": dtype}
        if kind == "axial":
            self.rows = nn.Parameter(torch.empty(num_heads, side, head_dim, **dd))
            self.columns = nn.Parameter(torch.empty(num_heads, side, head_dim, **dd))
        else:
            sides = (side, side) if kind == "joint" else (side,)
            self.table = nn.Parameter(torch.empty(num_heads, *sides, head_dim, **dd))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the local start anew."""
        for parameter in self.parameters():
            parameter.normal_(std=START_NOISE).add_(START_FLOOR)
        peak = START_PEAK - START_FLOOR
        reach = min(1, self.horizon)
        for head in range(next(self.parameters()).shape[0]):
            dy, dx = (
                reach * offset + self.horizon for offset in HEAD_OFFSETS[head % len(HEAD_OFFSETS)]
            )
            if self.kind == "joint":
                self.table[head, dy, dx] += peak
            elif self.kind == "axial":
                self.rows[head, dy] += peak
                self.columns[head, dx] += peak
            else:
                self.table[head, dx] += peak

    def _entries(self, raw: Tensor) -> Tensor:
        return raw if self.signed else elu1(raw) * (REFERENCE_HEAD_DIM / raw.shape[-1])

    def forward(self, layout: TokenLayout) -> RelativePosition:
        """Return the relative position for tokens that lie as ``layout`` says. Its counts are of
        the positive tables of a model, and signed ones have no use for them.
        """
        if self.signed:
            layout = layout._replace(counts=None)
        if self.kind == "joint":
            return Joint(self._entries(self.table), layout, self.normalization)
        if self.kind == "axial":
            return Axial(
                self._entries(self.rows), self._entries(self.columns), layout, self.normalization
            )
        return Flat(self._entries(self.table), layout, self.normalization)
