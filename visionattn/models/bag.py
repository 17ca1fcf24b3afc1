"""``BagEncoder``: classification of a bag of tile features with positions, such as a slide, in time
linear in the tiles.

The grid is a grid of tiles, not of pixels: tile (row, column) is a token at that place, and places
without a tile are absent. This module turns places into a ``TokenLayout``; it reads no files.
"""

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from visionattn.layers import Block
from visionattn.layout import Grid, TokenLayout
from visionattn.models.backbone import with_counts
from visionattn.models.patches import pool_present
from visionattn.ops.attentions import ATTENTIONS
from visionattn.ops.checks import described

KNOWN = tuple(name for name, kind in ATTENTIONS.items() if not kind.windows)
"""Attentions available for bags: windows need a grid without holes."""
RELATIVE = ("joint", "axial", "none")
POOLS = ("max", "avg", "token")
FREE_PLACES = 2**16
"""Grids of up to this many places are always accepted."""
PLACES_PER_TILE = 32
"""Maximum number of places per tile for larger grids: relative position takes memory for each
place.
"""


class BagEncoder(nn.Module):
    """A transformer over bags of features with places: tokens, blocks, pooling, classes.

    The order of the tiles and the position of the whole bag have no effect. Time and memory grow
    with the number of tiles and of places between them. Runs of empty rows or columns are shortened
    to ``horizon``, because larger distances make no difference.

    Args:
        in_features: width of the features of a tile.
        embed_dim: D.
        depth: number of blocks.
        num_heads: h.
        num_classes: number of outputs; 0: the pooled features.
        attention: "kernelized", "taylorshift" or, quadratic, "softmax".
        relative: relative position of the tiles: "joint", "axial" or "none".
        horizon: R in tiles.
        global_pool: "max", "avg", or "token" for a class token in front.
        mlp_ratio: hidden width of the MLPs over D.
        drop_rate: dropout before the classifier.
        drop_path_rate: probability of dropping a residual branch, rising from 0 to this value over
            the blocks.

    Raises:
        ValueError: an unknown option, or as ``Attention``.
    """

    def __init__(
        self,
        in_features: int,
        embed_dim: int = 192,
        depth: int = 2,
        num_heads: int = 3,
        num_classes: int = 2,
        *,
        attention: str = "kernelized",
        relative: str = "joint",
        horizon: int = 3,
        global_pool: str = "max",
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ):
        super().__init__()
        for name, value, known in (
            ("attention", attention, KNOWN),
            ("relative", relative, RELATIVE),
            ("global_pool", global_pool, POOLS),
        ):
            if value not in known:
                raise ValueError(f"{name} {value!r}: expected one of {', '.join(known)}")
        self.horizon, self.global_pool = horizon, global_pool
        self.in_features, self.has_places = in_features, relative != "none"
        self.num_prefix_tokens = int(global_pool == "token")
        options: dict = {"attention": attention, "relative": relative}
        if self.has_places:
            options["horizon"] = horizon
        # Normalize features before the projection, because their scale is arbitrary.
        self.embed = nn.Sequential(nn.LayerNorm(in_features), nn.Linear(in_features, embed_dim))
        self.cls_token = (
            nn.Parameter(torch.empty(1, 1, embed_dim)) if self.num_prefix_tokens else None
        )
        rates = torch.linspace(0, drop_path_rate, depth).tolist()
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                num_heads,
                mlp_ratio=mlp_ratio,
                qkv_bias=True,
                drop_path=rate,
                attn_options=options,
            )
            for rate in rates
        )
        self.norm = nn.LayerNorm(embed_dim)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize as timm's ViTs; relative tables and norms initialize themselves."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)

    def forward(self, features: Tensor, places: Tensor, present: Tensor | None = None) -> Tensor:
        """Turn bags into outputs.

        Args:
            features: ``[n, in_features]``, or of a batch ``[B, n, in_features]``.
            places: int64 row and column of each tile, ``[n, 2]`` or ``[B, n, 2]``, from any origin;
                unique within a bag.
            present: bool ``[n]`` or ``[B, n]``, False for padding in batches of bags with different
                sizes; padding may hold anything. None: all are present.

        Returns:
            ``[num_classes]``, or ``[B, num_classes]``.

        Raises:
            ValueError: wrong shapes or dtypes, an empty bag, two tiles at one place, or tiles too
                far apart for their number.
        """
        single = features.ndim == 2
        if single:
            features, places = features[None], places[None]
            present = None if present is None else present[None]
        self._check(features, places, present)
        layout = TokenLayout(self.num_prefix_tokens, Grid(1, places.shape[1]), present=present)
        if self.has_places:
            layout = layout_of(places, present, self.num_prefix_tokens, self.horizon)
        if present is not None:  # absent features may be NaN, and are multiplied by weights
            features = features.masked_fill(~present.unsqueeze(2), 0)
        tokens = self.encode(features, layout)
        pooled = pool_present(
            tokens, present, self.global_pool, self.num_prefix_tokens, with_prefix=False
        )
        out = self.head(self.head_drop(pooled))
        return out[0] if single else out

    def _check(self, features: Tensor, places: Tensor, present: Tensor | None) -> None:
        batch, tiles = features.shape[:2] if features.ndim == 3 else (-1, -1)
        if features.ndim != 3 or features.shape[2] != self.in_features or not tiles:
            raise ValueError(
                f"features: expected [n, {self.in_features}] or [B, n, {self.in_features}] with a "
                f"tile or more, got {described(features)}"
            )
        if places.dtype != torch.int64 or tuple(places.shape) != (batch, tiles, 2):
            raise ValueError(
                f"places: expected int64 [{batch}, {tiles}, 2], row and column of each tile, got "
                f"{described(places)}"
            )
        if present is None:
            return
        if present.dtype != torch.bool or tuple(present.shape) != (batch, tiles):
            raise ValueError(f"present: expected bool [{batch}, {tiles}], got {described(present)}")
        if not present.any(1).all():
            raise ValueError("present: expected at least one tile per bag, got none")

    def encode(self, features: Tensor, layout: TokenLayout) -> Tensor:
        """Return the normalized tokens ``[B, P + n, D]`` after the blocks, for the finite features
        ``[B, n, in_features]`` of tiles, or of patches, with any layout.
        """
        x = self.embed(features)
        layout = with_counts(layout, self.blocks, x)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x, layout)
        return self.norm(x)


def layout_of(places: Tensor, present: Tensor | None, num_prefix: int, horizon: int) -> TokenLayout:
    """Return the layout of the tiles of bags, on the smallest grid that is equivalent for relative
    position.

    Args:
        places: int64 ``[B, n, 2]``.
        present: bool ``[B, n]``; None: all are present.
        num_prefix: P.
        horizon: R; longer runs of empty rows and columns are shortened to R, which changes no class
            of relative position.

    Raises:
        ValueError: two tiles of a bag share a place, or there are far more places than tiles.
    """
    there = [None] * len(places) if present is None else list(present)
    bags = zip(places, there, strict=True)
    near = torch.stack([_drawn_near(bag, tiles, horizon) for bag, tiles in bags])
    height, width = (int(side) + 1 for side in near.flatten(0, 1).amax(0))
    batch, tiles = places.shape[:2]
    if height * width > max(FREE_PLACES, PLACES_PER_TILE * tiles):
        raise ValueError(
            f"places: expected at most {PLACES_PER_TILE} places per tile, got {height:,} x "
            f"{width:,} for {tiles:,} tiles; pass each part of the slide as a separate bag"
        )
    kept = near[..., 0] * width + near[..., 1]
    if present is not None:
        # Absent tiles are placed after the others, each at its own place.
        absent = (~present).cumsum(1) - 1
        most = int(absent.amax()) + 1
        kept = torch.where(present, kept, height * width + absent)
        height += -(-most // width)
    occupied = kept.new_zeros(batch, height * width).scatter_add_(1, kept, torch.ones_like(kept))
    if int(occupied.amax()) > 1:
        bag = int(occupied.amax(1).argmax())
        place = int(occupied[bag].argmax())
        row, column = places[bag][kept[bag] == place][0].tolist()
        raise ValueError(
            f"places: expected one tile per place, got two at row {row}, column {column}; remove "
            "one"
        )
    filled = None
    if present is not None:
        filled = torch.zeros_like(occupied, dtype=torch.bool).scatter(1, kept, present)
    return TokenLayout(num_prefix, Grid(height, width), kept, present=filled)


def _drawn_near(places: Tensor, present: Tensor | None, horizon: int) -> Tensor:
    """Return the places ``[n, 2]`` of a bag from 0 on, with gaps of at most ``horizon``; 0 for
    absent tiles.
    """
    return torch.stack([_axis_near(axis, present, horizon) for axis in places.unbind(1)], dim=1)


def _axis_near(axis: Tensor, present: Tensor | None, horizon: int) -> Tensor:
    known, number = torch.unique(axis if present is None else axis[present], return_inverse=True)
    gaps = known.diff().clamp(max=max(1, horizon))
    near = torch.cat([gaps.new_zeros(1), gaps.cumsum(0)])[number]
    return near if present is None else torch.zeros_like(axis).masked_scatter(present, near)
