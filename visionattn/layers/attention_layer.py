"""Multi-head self-attention with this package's operations and timm's parameter names."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm
from timm.models import register_notrace_module
from torch import Tensor, nn

from visionattn.layers.hook_detection import changed
from visionattn.layers.position_tables import RelativeTables
from visionattn.layers.value_convolution import ValueConvolution
from visionattn.layout import TokenLayout
from visionattn.ops import OPERATIONS
from visionattn.ops.attention_additions import centred_keys, gated
from visionattn.ops.attention_rows import ROWS, AttentionRows
from visionattn.ops.attentions import ATTENTIONS, AttentionKind, get_attention
from visionattn.ops.checks import check_form
from visionattn.ops.feature_maps import make_feature_map
from visionattn.ops.states import State, summarize
from visionattn.ops.window import WINDOW_SIZE, check_window_size


@register_notrace_module
class Attention(nn.Module):
    """Self-attention over tokens ``[B, N, D]``; replaces timm's ``Attention``.

    Args:
        dim: D.
        num_heads: h, a divisor of D.
        attention: a name of ``visionattn.ops.attentions``: "kernelized", "taylorshift", "softmax"
            or "window" (softmax within windows of the grid).
        relative: "joint", "axial", "flat" or "none"; window attention does not support "flat".
        horizon: R of the relative position, in patches; None: 3. Not for window attention, where it
            is ``window_size - 1``: each offset within a window has its own entry.
        normalization: "mean" or "sum"; None: "mean". Not for softmax or window attention.
        temperature_init: initial temperature of TaylorShift for every head; None: 4.
        feature_map: for kernelized attention: "elu1", "relu", "softmax" (Shen: over features for
            queries, over positions for keys) or "random" (FAVOR+); None: "elu1". "random" draws its
            rows from torch's generator when the layer is built and saves them with the weights;
            ``layer.feature_map.redraw()`` draws new rows. Relative position always uses elu1 for
            queries. GPU kernels support "elu1" and "relu".
        random_features: number of features of "random"; None: the head width.
        form: "efficient" (linear), "direct" (quadratic), or "auto" for the faster form; both
            compute the same result. Not for softmax or window attention.
        window_size: patches along a side of a window; None: 7.
        shifted: begin each axis with half a window, so that patches attend across the window
            borders of unshifted layers.
        value_conv: side in patches, odd, of a depth-wise convolution of the values over the grid;
            0: none. Its result is added to the output of the operation. Its weights start at 0.
        centre_keys: subtract from each key the mean key of its head.
        output_gate: multiply the output of each token (all heads, convolution included) by
            ``silu(x W)`` of the token's input x, before ``scale_norm``; W is ``[D, D]``, without a
            bias.
        qkv_bias, proj_bias: biases of the two projections.
        qk_norm: normalize q and k per head with ``norm_layer``.
        scale_norm: normalize with ``norm_layer`` before the output projection.
        attn_drop: probability, in training, of dropping a token's values for all queries; see
            ``drop_values`` in ``ops/attention_sums.py``.
        proj_drop: dropout after the output projection.

    Raises:
        ValueError: ``num_heads`` does not divide the width, a name is unknown, or an option has no
            effect with the other options.

    The attribute ``operation`` is the function that computes the attention. It may be replaced by a
    function with the same arguments.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        attention: str = "kernelized",
        relative: str = "joint",
        horizon: int | None = None,
        normalization: str | None = None,
        temperature_init: float | None = None,
        feature_map: str | None = None,
        random_features: int | None = None,
        form: str = "auto",
        window_size: int | None = None,
        shifted: bool = False,
        value_conv: int = 0,
        centre_keys: bool = False,
        output_gate: bool = False,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] = LayerNorm,
        device=None,
        dtype=None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        if num_heads < 1 or dim % num_heads:
            divisors = ", ".join(str(n) for n in range(1, dim + 1) if dim % n == 0)
            raise ValueError(
                f"expected num_heads that divides the width {dim} ({divisors}), got {num_heads}"
            )
        # Refuse options without effect.
        kind = get_attention(attention)
        if normalization not in (None, "mean", "sum"):
            raise ValueError(f"normalization {normalization!r}: expected mean or sum")
        check_form(form)
        self.head_dim = dim // num_heads
        self.feature_map = (
            make_feature_map(feature_map or "elu1", self.head_dim, random_features, **dd)
            if kind.feature_map
            else None
        )
        values = dict(
            horizon=horizon,
            normalization=normalization,
            temperature_init=temperature_init,
            feature_map=feature_map,
            random_features=random_features,
            form=None if form == "auto" else form,
            window_size=window_size,
            shifted=shifted or None,
            centre_keys=centre_keys or None,
        )
        for name, reason in idle_options(kind, relative, feature_map).items():
            if values[name] is not None:
                raise ValueError(f"{name}={values[name]!r} has no effect: {reason}")
        if kind.windows and relative == "flat":
            raise ValueError(
                f"relative='flat': attention={attention!r} is on a grid; expected joint, axial or "
                "none"
            )
        self.window_size = WINDOW_SIZE if window_size is None else window_size
        self.shifted = shifted
        check_window_size(self.window_size)
        self.attention, self.form = attention, form
        self.kind, self.operation = kind, OPERATIONS[kind.name]
        self.num_heads = num_heads
        # Wrappers of timm expect the attributes ``scale`` and ``fused_attn``.
        self.scale = self.head_dim**-0.5
        self.fused_attn = True
        self.native_layout: TokenLayout | None = None
        # Parameters have timm's names, so that its checkpoints fit.
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias, **dd)
        self.q_norm = norm_layer(self.head_dim, **dd) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim, **dd) if qk_norm else nn.Identity()
        default_horizon = self.window_size - 1 if kind.windows else 3
        self.relative = (
            None
            if relative == "none"
            else RelativeTables(
                relative,
                num_heads,
                self.head_dim,
                horizon=default_horizon if horizon is None else horizon,
                normalization="sum" if kind.signed else normalization or "mean",
                signed=kind.signed,
                **dd,
            )
        )
        self.value_conv = ValueConvolution(dim, value_conv, **dd) if value_conv else None
        self.centre_keys = centre_keys
        self.temperature_init = 4.0 if temperature_init is None else temperature_init
        self.temperature = nn.Parameter(torch.empty(num_heads, **dd)) if kind.temperature else None
        self.attn_drop = nn.Dropout(attn_drop)
        # Not named ``gate``: the gate of timm's attention has this name and is a sigmoid after the
        # norm, and its weights would load here.
        self.output_gate = nn.Linear(dim, dim, bias=False, **dd) if output_gate else None
        self.norm = norm_layer(dim, **dd) if scale_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the temperature to its initial value; submodules have their own resets."""
        if self.temperature is not None:
            self.temperature.fill_(self.temperature_init)

    def _layout(self, layout: TokenLayout | None, tokens: int) -> TokenLayout:
        """Return ``layout``, or if it is None the native layout, which must have as many tokens."""
        if layout is not None:
            return layout
        native = self.native_layout
        if native is not None and native.num_tokens == tokens:
            return native
        known = "none is known" if native is None else f"the native one has {native.num_tokens}"
        raise ValueError(
            f"expected a layout for {tokens} tokens ({known}); pass "
            "layout=TokenLayout(num_prefix, Grid(height, width))"
        )

    def _options(self, is_causal: bool) -> dict[str, Any]:
        """Return the options of the operation that not all operations accept."""
        kind = self.kind
        taken = {
            "form": (kind.forms, self.form),
            "causal": (kind.causal, is_causal),
            "temperature": (kind.temperature, self.temperature),
            "feature_map": (kind.feature_map, self.feature_map),
            "window_size": (kind.windows, self.window_size),
            "shifted": (kind.windows, self.shifted),
        }
        return {name: value for name, (takes, value) in taken.items() if takes}

    def forward(
        self,
        x: Tensor,
        layout: TokenLayout | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Apply self-attention.

        Args:
            x: ``[B, N, D]``.
            layout: the grid positions of the tokens, and which tokens are absent. Relative
                position, windows and ``value_conv`` need it, unless N is the native number of
                tokens.
            attn_mask: bool ``[B, 1, 1, N]`` or ``[B, N]``, a mask of keys; True takes part. Linear
                time allows no other masks. Masked tokens may hold NaN in a forward pass. In
                training they need finite numbers, because weight gradients of the projections and
                of the gate sum over all tokens.
            is_causal: each token attends only to itself and earlier tokens. Kernelized attention
                supports it with "flat" or no relative position, softmax attention with any. It
                excludes ``value_conv`` and ``centre_keys``, which mix in later tokens.

        Raises:
            ValueError: a layout is missing, the mask is not a mask of keys, or causal attention is
                not available. Also if ``fused_attn`` is False, by which timm's
                ``AttentionExtract`` requests the weights of all pairs.
        """
        if not self.fused_attn:
            raise ValueError(
                "fused_attn=False needs the attention matrix, which this attention never computes"
            )
        q, k, v, layout, key_mask, options = self._operands(x, layout, attn_mask, is_causal)
        options["value_drop"] = self.attn_drop.p if self.training else 0.0
        out = self.operation(q, k, v, **options)
        if self.value_conv is not None:
            # The first operand determines the memory layout of the sum, and the projection is
            # fastest with the layout of the convolution.
            out = self.value_conv(v, layout, key_mask) + out
        return self.project(out.transpose(1, 2).reshape(x.shape), x)

    def _check(self, is_causal: bool) -> None:
        """Raise ValueError if causal attention is requested but not available."""
        if is_causal and not self.kind.causal:
            raise ValueError(
                f"is_causal=True: attention={self.attention!r} has no causal form "
                f"({self.kind.why_not_causal}); "
                f"{' and '.join(name for name, kind in ATTENTIONS.items() if kind.causal)} have"
            )
        if is_causal and (self.value_conv is not None or self.centre_keys):
            raise ValueError(
                "is_causal=True: value_conv and centre_keys let tokens see later tokens; build the "
                "model with value_conv=0 and centre_keys=False"
            )

    def _operands(
        self,
        x: Tensor,
        layout: TokenLayout | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor, TokenLayout | None, Tensor | None, dict[str, Any]]:
        """Return q, k, v ``[B, h, N, d]``, the layout, the key mask, and all options of the
        operation except ``value_drop``.
        """
        self._check(is_causal)
        q, k, v = self.heads(x)
        key_mask, options = _key_mask(attn_mask, x), self._options(is_causal)
        # With relative position or windows, the operation takes absent tokens from the layout; else
        # it needs them in the key mask.
        if self.relative is not None or self.kind.windows or self.value_conv is not None:
            layout = self._layout(layout, x.shape[1])
        if self.centre_keys:
            k = centred_keys(k, key_mask if layout is None else layout.key_mask(key_mask))
        if self.relative is not None:
            options["relative"], options["key_mask"] = self.relative(layout), key_mask
        elif self.kind.windows:
            options["layout"], options["key_mask"] = layout, key_mask
        else:
            options["key_mask"] = key_mask if layout is None else layout.key_mask(key_mask)
        return q, k, v, layout, key_mask, options

    @torch.no_grad()
    def weights(
        self,
        x: Tensor,
        rows: Tensor,
        layout: TokenLayout | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> AttentionRows:
        """Return the attention weights of chosen tokens over all tokens, in linear time and memory.

        They are the weights by which ``forward`` averages the values. ``value_conv`` and
        ``output_gate`` have no weights of keys and do not enter.

        Args:
            x: ``[B, N, D]``; ``x``, ``layout``, ``attn_mask`` and ``is_causal`` are as for
                ``forward``.
            rows: int64 ``[Q]``, indices of the chosen tokens, from 0 to N - 1.

        Returns:
            ``AttentionRows`` with the parts from content and from relative position,
            ``[B, h, Q, N]``. Rows of absent patches are undefined.

        Raises:
            ValueError: as ``forward``, or ``rows`` is out of range.
        """
        q, k, _, _, _, options = self._operands(x, layout, attn_mask, is_causal)
        options.pop("form", None)
        return ROWS[self.attention](q, k, rows, **options)

    def heads(self, x: Tensor, which: Literal["q", "v", "kv", "qkv"] = "qkv") -> list[Tensor]:
        """Return queries, keys and values ``[B, h, N, d]`` of tokens ``[B, N, D]``, as ``which``
        selects.

        Queries and keys are normalized (``qk_norm``); keys are not yet centered. Only the selected
        parts are computed, unless the projection is not a plain ``nn.Linear``.
        """
        begin = "qkv".index(which) * x.shape[2]
        rows = slice(begin, begin + len(which) * x.shape[2])
        weight = None if which == "qkv" or changed(self.qkv, nn.Linear) else self.qkv.weight
        if type(weight) in (Tensor, nn.Parameter):
            bias = self.qkv.bias
            parts = F.linear(x, weight[rows], None if bias is None else bias[rows])
        else:  # LoRA, quantization and hooks need the call
            parts = self.qkv(x)[..., rows].contiguous()
        # Split ``[B, N, n D]`` into n views ``[B, h, N, d]`` without a copy.
        split = parts.unflatten(2, (len(which), self.num_heads, self.head_dim))
        norms = {"q": self.q_norm, "k": self.k_norm}
        named_parts = zip(which, split.permute(2, 0, 3, 1, 4).unbind(0), strict=True)
        return [norms[name](part) if name in norms else part for name, part in named_parts]

    def summarize(self, k: Tensor, v: Tensor) -> State:
        """Reduce keys and values to the state of the content term; states of disjoint keys add.

        Raises:
            ValueError: a softmax, or a feature map whose keys depend on each other, has no state.
        """
        options = self._options(is_causal=False)
        taken = {name: options[name] for name in options if name in ("feature_map", "temperature")}
        return summarize(k, v, self.attention, **taken)

    def project(self, out: Tensor, x: Tensor) -> Tensor:
        """Gate, normalize and project the output of the heads, ``out [B, N, D]``.

        The gate is computed from the input tokens ``x [B, N, D]``.
        """
        if self.output_gate is not None:
            out = gated(out, self.output_gate(x))
        return self.proj_drop(self.proj(self.norm(out)))


def idle_options(
    kind: AttentionKind, relative: str | None = None, feature_map: str | None = None
) -> dict[str, str]:
    """Return the options of ``Attention`` that would have no effect, each with the reason.

    Args:
        kind: the attention.
        relative: "joint", "axial", "flat" or "none"; None: any.
        feature_map: the requested feature map.
    """
    of = f"attention={kind.name!r}"
    reasons = (
        (kind.signed, "centre_keys", "a softmax ignores terms that all keys share"),
        (not kind.temperature, "temperature_init", f"{of} has no temperature"),
        (feature_map != "random", "random_features", 'only feature_map="random" uses it'),
        (not kind.feature_map, "feature_map random_features", f"{of} has no feature map"),
        (not kind.forms, "form", f"{of} has no forms"),
        (kind.windows, "horizon", f"{of} has an entry for each offset within a window"),
        (not kind.windows, "window_size shifted", f"{of} has no windows"),
        (kind.signed, "normalization", f"the softmax of {of} normalizes the weights"),
        (relative == "none", "horizon normalization", "there is no relative position"),
    )
    return {name: reason for idle, names, reason in reasons if idle for name in names.split()}


def _key_mask(attn_mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Return timm's ``attn_mask`` as a key mask ``[B, N]``."""
    if attn_mask is None:
        return None
    batch, tokens = x.shape[:2]
    if attn_mask.dtype != torch.bool or tuple(attn_mask.shape) not in {
        (batch, 1, 1, tokens),
        (batch, tokens),
    }:
        raise ValueError(
            f"attn_mask: expected a bool mask of keys, [{batch}, 1, 1, {tokens}] or [{batch}, "
            f"{tokens}], got {attn_mask.dtype} {tuple(attn_mask.shape)}; linear attention cannot "
            "mask single pairs"
        )
    return attn_mask.reshape(batch, tokens)
