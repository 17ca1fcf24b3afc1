"""Autoregressive image generation: causal attention along the raster, without an encoder.

The parallel form computes the likelihoods of all values of given images at once, for training. The
recurrent form computes the likelihoods of the next value, for generation. Both are the same
function.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.models import generate_default_cfgs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from visionattn.layers.block import Block
from visionattn.layers.hook_detection import check_unchanged
from visionattn.layers.raster import RasterAttention
from visionattn.layout import Grid, TokenLayout
from visionattn.models.registration import register_writer
from visionattn.ops.nonfinite import is_readable
from visionattn.ops.recurrence import KeyValueCache, PastTable, RecurrentState

WAVES = 32
"""Number of wavelengths of the sinusoids along an axis in pixels; four more are relative to the
whole axis.
"""
OUTPUTS = ("categorical", "mixture")
Size = tuple[int, int]


@dataclass
class DecoderState:
    """The state of a ``PixelDecoder`` after the values so far.

    Args:
        size: height and width of the images in pixels.
        labels: int64 ``[B]``; None if the model is not conditioned.
        position: number of values so far.
        blocks: the state of each block, and the table of its relative position.
        places: terms for rows, columns and channels of pixels that are added to tokens, ``[H, D]``,
            ``[W, D]`` and ``[C, D]``.
        about: term for the labels, ``[B, D]`` or ``[D]``.
    """

    size: Size
    labels: Tensor | None
    position: int
    blocks: list[tuple[RecurrentState | KeyValueCache, PastTable | None]]
    places: tuple[Tensor, Tensor, Tensor]
    about: Tensor

    @property
    def values(self) -> int:
        """The number of values of an image."""
        return math.prod(map(len, self.places))


class PixelDecoder(nn.Module):
    """Compute the likelihood of every value of an image given the values before it, in raster
    order.

    Tokens are values, row by row from the top left, the channels of a pixel next to each other:
    images ``[B, C, H, W]`` are sequences ``[B, N]`` with ``N = H * W * C``. Token i holds value i -
    1 and the place of value i, and predicts value i. Images may have any height and width; quality
    at other sizes than in training is not guaranteed.

    Args:
        in_chans: C.
        num_classes: number of classes of labels.
        embed_dim: D.
        depth: number of blocks.
        num_heads: h.
        mlp_ratio: hidden width of the MLPs over D.
        levels: values are integers from 0 to ``levels - 1``.
        attention: "kernelized", whose steps take constant time and memory, or "softmax", the
            quadratic baseline, whose steps read a cache of keys and values.
        feature_map: for kernelized attention: "elu1", "relu" or "random"; None: "elu1".
        relative: "flat", see ``RasterTables``, or "none".
        rows, reach: of the relative position; see ``RasterTables``. None: 2 and 3.
        normalization: "mean" or "sum"; None: "mean".
        output: "categorical": a probability for each level; "mixture": a mixture of logistic
            distributions, each integrated over the width of a level.
        mixtures: number of distributions; None: 10.
        conditioned: whether images depend on a class, so that every call needs labels.
        init_values: initial value of LayerScale; None: no LayerScale.
        proj_drop, drop_path: dropout after projections, and of residual branches.

    Raises:
        ValueError: an attention without a causal form, numbers out of range, or options without
            effect.

    Sources: Katharopoulos et al. 2020, section 4.2 (images by linear attention); Salimans et al.
    2017, section 2.1 (discretized logistic mixture).
    """

    def __init__(
        self,
        in_chans: int = 1,
        num_classes: int = 0,
        *,
        embed_dim: int = 128,
        depth: int = 4,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        levels: int = 256,
        attention: str = "kernelized",
        feature_map: str | None = None,
        relative: str = "flat",
        rows: int | None = None,
        reach: int | None = None,
        normalization: str | None = None,
        output: str = "categorical",
        mixtures: int | None = None,
        conditioned: bool = False,
        init_values: float | None = None,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
    ):
        super().__init__()
        least = {
            "depth": (depth, 1),
            "levels": (levels, 2),
            "mixtures": (1 if mixtures is None else mixtures, 1),
        }
        for name, (value, lowest) in least.items():
            if type(value) is not int or value < lowest:
                raise ValueError(f"{name}: expected an integer of at least {lowest}, got {value!r}")
        if output not in OUTPUTS:
            raise ValueError(f"output {output!r}: expected {' or '.join(OUTPUTS)}")
        if mixtures is not None and output != "mixture":
            raise ValueError("mixtures need output='mixture'; remove them")
        if not isinstance(conditioned, bool):
            raise ValueError(f"conditioned: expected true or false, got {conditioned!r}")
        if conditioned and not num_classes:
            raise ValueError("conditioned needs classes; pass num_classes")
        if relative == "none" and not (rows is None and reach is None):
            raise ValueError("rows and reach need relative position; remove them")
        self.in_chans, self.num_classes, self.levels = in_chans, num_classes, levels
        self.embed_dim, self.attention, self.output = embed_dim, attention, output
        self.conditioned = conditioned
        self.grad_checkpointing = False
        # The last row is the embedding before the first value.
        self.value_embed = nn.Embedding(levels + 1, embed_dim)
        self.row_embed = nn.Linear(2 * (WAVES + 4), embed_dim, bias=False)
        self.column_embed = nn.Linear(2 * (WAVES + 4), embed_dim, bias=False)
        self.channel_embed = nn.Embedding(in_chans, embed_dim)
        self.class_embed = nn.Embedding(num_classes, embed_dim) if conditioned else None
        options = {"attention": attention, "feature_map": feature_map, "relative": relative}
        options |= {"normalization": normalization, "channels": in_chans}
        options |= {} if rows is None else {"rows": rows}
        options |= {} if reach is None else {"reach": reach}
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                num_heads,
                mlp_ratio=mlp_ratio,
                qkv_bias=True,
                init_values=init_values,
                proj_drop=proj_drop,
                drop_path=drop_path * number / max(1, depth - 1),
                attn_layer=RasterAttention,
                attn_options=options,
            )
            for number in range(depth)
        )
        self.norm = nn.LayerNorm(embed_dim)
        self.mixtures = 10 if mixtures is None else mixtures
        outputs = levels if output == "categorical" else 3 * self.mixtures
        self.head = nn.Linear(embed_dim, outputs)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize projections as timm does; similar values get similar embeddings, and logistic
        distributions cover the range.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for embed in (self.channel_embed, self.class_embed):
            if embed is not None:
                nn.init.normal_(embed.weight, std=0.2)
        for line in (self.row_embed, self.column_embed):
            nn.init.normal_(line.weight, std=0.5 / math.sqrt(WAVES + 4))
        phase, turns = torch.rand(2, self.embed_dim) * 2 * math.pi
        level = torch.linspace(0, 1, self.levels)[:, None]
        self.value_embed.weight[:-1] = torch.cos(level * 4 * turns + phase) * 0.5
        nn.init.normal_(self.value_embed.weight[-1:], std=0.35)
        if self.output == "mixture":
            _, means, scales = self.head.bias.chunk(3)
            means.copy_(torch.linspace(-1, 1, self.mixtures))
            scales.fill_(-2)

    def no_weight_decay(self) -> set[str]:
        """Return patterns of parameters without weight decay: embeddings and relative tables."""
        return {"*_embed.weight", "*.attn.relative.*"}

    def group_matcher(self, coarse: bool = False) -> dict:
        """Return timm's grouping of parameters by depth."""
        return dict(
            stem=r"^(?:value|row|column|channel|class)_embed",
            blocks=[(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks in the backward pass."""
        self.grad_checkpointing = enable

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the log-probability of every value in nats.

        Args:
            images: integers ``[B, C, H, W]``, uint8 or int64.
            labels: int64 ``[B]``, only for a conditioned model.

        Returns:
            ``[B, C, H, W]``, float32 (float64 for a float64 model).
        """
        values, size = self._values(images)
        out = _full(self.head(self._features(values[:, :-1], size, labels)))
        if self.output == "categorical":
            found = -F.cross_entropy(out.mT, values, reduction="none")
        else:
            found = log_mixture(out, values[..., None], self.levels)[..., 0]
        # FSDP does not accept views.
        return found.unflatten(1, (*size, self.in_chans)).permute(0, 3, 1, 2).clone()

    def logits(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return log-probabilities of all levels at every value, up to a constant per value:
        ``[B, levels, C, H, W]``.

        This is the format of ``F.cross_entropy``; arguments as in ``forward``.
        """
        values, size = self._values(images)
        logits = self.predict(values[:, :-1], size, labels)
        return logits.unflatten(1, (*size, self.in_chans)).permute(0, 4, 3, 1, 2)

    def predict(self, values: Tensor, size: Size, labels: Tensor | None = None) -> Tensor:
        """Return log-probabilities of all levels, up to a constant per value, for the values so far
        and the next one.

        Args:
            values: the first t values of images, int64 ``[B, t]``, fewer than the images have.
            size: height and width of the images in pixels.
            labels: int64 ``[B]``, only for a conditioned model.

        Returns:
            ``[B, t + 1, levels]``.
        """
        return self._logits(self.head(self._features(values, size, labels)))

    @torch.no_grad()
    def begin(self, batch: int, size: Size, labels: Tensor | None = None) -> DecoderState:
        """Return the state before the first value, from which ``step`` generates images.

        Args:
            batch: B.
            size: height and width in pixels.
            labels: int64 ``[B]``, only for a conditioned model.

        Raises:
            ValueError: a block or its attention, whose parts ``step`` calls separately, is replaced
                or has hooks.
        """
        for number, block in enumerate(self.blocks):
            check_unchanged(f"blocks.{number}", block, Block)
            check_unchanged(f"blocks.{number}.attn", block.attn, RasterAttention)
        about, layout = self._about(batch, labels), self._layout(size)
        blocks = [block.attn.begin(batch, layout) for block in self.blocks]
        return DecoderState(size, labels, 0, blocks, self._places(size), about)

    @torch.no_grad()
    def step(self, values: Tensor | None, state: DecoderState) -> Tensor:
        """Add a value to the state, in place, and return log-probabilities of the next value's
        levels, up to a constant, ``[B, levels]``.

        Args:
            values: the previous values, int64 ``[B]``; None before the first value.
            state: from ``begin`` or an earlier step, with the same weights.

        Raises:
            ValueError: the image is complete, or values are missing, or given before the first.
        """
        if (values is None) != (state.position == 0):
            wanted = "none before the first one" if state.position == 0 else "the last ones"
            raise ValueError(f"values: expected {wanted} at position {state.position}")
        if state.position == state.values:
            raise ValueError(f"the images are complete: all {state.values} values are generated")
        pixel, channel = divmod(state.position, self.in_chans)
        rows, columns, channels = state.places
        y, x = divmod(pixel, state.size[1])
        if values is None:
            values = torch.full((1,), self.levels, device=rows.device)
        before = self.value_embed(values)
        token = before + rows[y] + columns[x] + channels[channel] + state.about
        token = token.expand(self._batch(state), -1).unsqueeze(1)
        for block, (past, table) in zip(self.blocks, state.blocks, strict=True):
            token = block.added(token, block.attn.step(block.norm1(token), past, table))
        state.position += 1
        return self._logits(self.head(self.norm(token[:, 0])))

    def _batch(self, state: DecoderState) -> int:
        past = state.blocks[0][0]
        return len(past.keys if isinstance(past, KeyValueCache) else past.S)

    def _values(self, images: Tensor) -> tuple[Tensor, Size]:
        """Return the values of images in raster order, int64 ``[B, N]``, and the image size."""
        if images.ndim != 4 or images.shape[1] != self.in_chans or images.is_floating_point():
            raise ValueError(
                f"expected integers [B, {self.in_chans}, H, W], got {images.dtype} "
                f"{list(images.shape)}"
            )
        size = images.shape[2], images.shape[3]
        if is_readable(images) and images.numel():
            least, most = (int(value) for value in images.aminmax())
            if least < 0 or most >= self.levels:
                got = least if least < 0 else f"{most}; pass a larger --model.args.levels"
                raise ValueError(
                    f"expected values 0 to {self.levels - 1} for levels {self.levels}, got {got}"
                )
        return images.permute(0, 2, 3, 1).flatten(1).long(), size

    def _layout(self, size: Size) -> TokenLayout:
        return TokenLayout(0, Grid(size[0], size[1] * self.in_chans))

    def _about(self, batch: int, labels: Tensor | None) -> Tensor:
        """Return the term for the labels that is added to every token, ``[B, D]``; without labels
        ``[D]``.
        """
        if self.class_embed is None:
            if labels is not None:
                raise ValueError(
                    "labels need a conditioned model; remove them, or build it with conditioned"
                )
            return self._like.new_zeros(self.embed_dim)
        if labels is None or tuple(labels.shape) != (batch,):
            got = "none" if labels is None else list(labels.shape)
            raise ValueError(f"labels: expected [{batch}] for a conditioned model, got {got}")
        return self.class_embed(labels)

    def _places(self, size: Size) -> tuple[Tensor, Tensor, Tensor]:
        """Return the terms of rows, columns and channels: ``[H, D]``, ``[W, D]``, ``[C, D]``."""
        like = self._like
        rows, columns = (
            embed(sinusoids(length, like.device).to(like.dtype))
            for embed, length in zip((self.row_embed, self.column_embed), size, strict=True)
        )
        return rows, columns, self.channel_embed(torch.arange(self.in_chans, device=like.device))

    @property
    def _like(self) -> Tensor:
        """Return a parameter with the device and dtype of the tokens."""
        return next(self.value_embed.parameters())

    def _features(self, values: Tensor, size: Size, labels: Tensor | None) -> Tensor:
        """Return the output of the blocks for the start token and the first values,
        ``[B, t + 1, D]``.
        """
        batch, given = values.shape
        rows, columns, channels = self._places(size)
        tokens = len(rows) * len(columns) * len(channels)
        if given >= tokens:
            raise ValueError(f"expected fewer than the {tokens} values of the images, got {given}")
        places = rows[:, None, None] + columns[:, None] + channels
        about = self._about(batch, labels)
        x = self.value_embed(F.pad(values, (1, 0), value=self.levels))
        x = x + places.flatten(0, 2)[: given + 1] + (about if about.ndim == 1 else about[:, None])
        layout = self._layout(size)
        for block in self.blocks:
            if self.grad_checkpointing and self.training:
                x = checkpoint(block, x, layout, use_reentrant=False)
            else:
                x = block(x, layout)
        return self.norm(x)

    def _logits(self, out: Tensor) -> Tensor:
        """Return log-probabilities of all levels from the output of the head, ``[..., levels]``."""
        if self.output == "categorical":
            return out
        return log_mixture(_full(out), torch.arange(self.levels, device=out.device), self.levels)


default_cfgs = generate_default_cfgs(
    {"pixel_decoder.untrained": dict(input_size=(1, 32, 32), num_classes=0, fixed_input_size=False)}
)
register_writer(__name__, "pixel_decoder", PixelDecoder)


def log_mixture(out: Tensor, values: Tensor, levels: int) -> Tensor:
    """Return the log-probability of levels under mixtures of logistic distributions over levels.

    The probability of a level is the mass of the interval of its width around it, on a scale from
    -1 to 1; the outermost levels extend to infinity. An interval (a, b) in units of the scale has
    ``sigmoid(b) sigmoid(-a) (1 - exp(a - b))``, which keeps precision in the tails.

    Args:
        out: ``[..., 3 K]``: logits, means, logarithms of scales; logarithms below -7 count as -7.
        values: integers from 0 to ``levels - 1``, ``[V]`` or ``[..., V]``.
        levels: 2 or more.

    Returns:
        ``[..., V]``.

    Source: Salimans et al. 2017, section 2.1.
    """
    weights, means, scales = (x.unsqueeze(-2) for x in out.chunk(3, -1))
    values = values.unsqueeze(-1).to(out.dtype)
    half = 1 / (levels - 1)
    inverse = torch.exp(-scales.clamp(min=-7))
    offset = values * (2 * half) - 1 - means
    below, above = (offset - half) * inverse, (offset + half) * inverse
    at_bottom, at_top = F.logsigmoid(above), F.logsigmoid(-below)
    # The width of an interval in units of the scale does not depend on its position.
    inside = at_bottom + at_top + torch.log(-torch.expm1(-2 * half * inverse))
    found = torch.where(values == 0, at_bottom, inside)
    found = torch.where(values == levels - 1, at_top, found)
    return torch.logsumexp(F.log_softmax(weights, -1) + found, -1)


def _full(x: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sinusoids(length: int, device: torch.device | str = "cpu") -> Tensor:
    """Return sines and cosines of places along an axis, float32 ``[length, 2 * (WAVES + 4)]``.

    Wavelengths run from 6 pixels up, as in transformers; four more span a half, one, two and four
    waves over the whole axis.

    Source: Vaswani et al. 2017, section 3.5.
    """
    place = torch.arange(length, device=device, dtype=torch.float32)[:, None]
    powers = torch.arange(WAVES, device=device, dtype=torch.float32) / WAVES
    along = place * 10_000.0**-powers
    whole = (place + 0.5) / length * math.pi * torch.tensor([1.0, 2.0, 4.0, 8.0], device=device)
    angles = torch.cat([along, whole], 1)
    return torch.cat([angles.sin(), angles.cos()], 1)
