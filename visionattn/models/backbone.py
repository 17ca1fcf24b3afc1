"""``VisionAttnTransformer``: timm's VisionTransformer for any grid, with our blocks.

The layout of the tokens is derived from the patches once per forward pass and passed to each block
as an argument.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import LayerNorm, Mlp, SwiGLU, SwiGLUPacked, get_norm_layer
from timm.models import VisionTransformer, checkpoint, register_notrace_function
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from visionattn.layers import Attention, Block
from visionattn.layout import Grid, TokenLayout
from visionattn.models.mixed_blocks import first_counted, options_of_blocks, warn_of_softmax
from visionattn.models.patches import (
    DynamicPatchEmbed,
    PatchDropout,
    absolute_position,
    blank_absent,
    filled_grids,
    grid_of,
    pool_present,
    present_patches_of,
    present_places,
    scores_of_absent,
    zero_absent,
)
from visionattn.models.state_dicts import fit_position, fitted_whole
from visionattn.ops import count_classes
from visionattn.ops.attention_sums import accumulation_dtype
from visionattn.ops.checks import refuse_tracing

PREFIX_STD = 0.02
"""Initial standard deviation of class and register tokens in models with an output gate.

timm's value is 1e-6. The gate of a token near 0 is closed: the token would get no attention, and
the gradients through its norms would be about 1,000 times as large as others.
"""
MLP_LAYERS = {"mlp": Mlp, "swiglu": SwiGLU, "swiglu_packed": SwiGLUPacked}
"""MLPs of a block by name: timm's plain MLP, and two gated ones, with the gate's weights separate
or packed with the others (``SwiGLUPacked`` of DINOv2's giant models). timm passes ``act_layer`` to
each.
"""


@register_notrace_function
def class_counts_like(layout: TokenLayout, horizon: int, like: Tensor) -> Tensor | None:
    """Count the keys of each class once for all blocks of a forward pass; None for a full grid on a
    GPU, whose kernels count themselves.

    The name has no underscore, because FX only wraps such names.
    """
    if like.device.type == "cuda" and layout.kept is None and layout.present is None:
        return None
    return count_classes(
        layout, (horizon, horizon), dtype=accumulation_dtype(like), device=like.device
    )


def with_counts(layout: TokenLayout, blocks: Iterable[nn.Module], like: Tensor) -> TokenLayout:
    """Return the layout with the counts that the blocks need, computed once for all of them, on the
    device and for the dtype of ``like``.
    """
    tables = first_counted(blocks)
    if tables is None:
        return layout
    return layout._replace(counts=class_counts_like(layout, tables.horizon, like))


class VisionAttnTransformer(VisionTransformer):
    """A vision transformer whose cost per patch does not depend on the number of patches.

    Images ``[B, C, H_px, W_px]`` may have any height and width that are multiples of the patch, in
    every call.

    Args:
        attention: a name of ``visionattn.ops.attentions``: "kernelized", "taylorshift", "softmax"
            (the quadratic baseline) or "window" (exact softmax within windows of the grid, shifted
            by half a window in every second window block); or a list of names, one per block.
            Options apply to the blocks that can use them; an option that no block can use is
            refused.
        relative: relative position of the patches: "joint", "axial", "flat" or "none".
        horizon: R in patches, default 3; offsets beyond it share the outermost entries. For windows
            it is always ``window_size - 1``, with an entry for each offset.
        normalization: "mean" (default) or "sum" over the keys of a class; see
            ``visionattn.ops.position.relative_position``.
        pos_embed: "none", or "learn" for absolute position, resampled to other grids.
        pos_antialias: False resamples it with plain bicubic interpolation, as the original DINOv2
            does, and not with timm's antialiased one.
        temperature_init: initial tau of TaylorShift, default 4.
        feature_map: for kernelized attention: "elu1" (default), "relu", "softmax" (Shen's efficient
            attention) or "random" (FAVOR+). "random" draws the rows of each block from torch's
            generator when the model is built, and saves them with the weights;
            ``block.attn.feature_map.redraw()`` draws new ones. Random features estimate the weights
            of a softmax, with errors that grow with q and k; ``qk_norm`` bounds these.
        random_features: number of features per head for "random", by default the head width.
        value_conv: side of a depth-wise convolution of the values over the patches, 3 or 5; 0:
            none. Every attention adds it to its output, and it starts at zero.
        centre_keys: subtract from each key the mean key of its head.
        output_gate: multiply the output of every attention, entry by entry, by ``silu(x W)`` of the
            token, before the output projection.
        form: form of every attention: "efficient" (linear), "direct" (quadratic), or "auto" for the
            faster form at each size.
        softmax_blocks: indices of blocks (negative: from the end) that use timm's own softmax,
            exact and quadratic, without relative position, convolution or gate.
        window_size: patches along a side of a window, default 7.
        global_pool: as in timm; default "max". It found small objects in large images when "avg"
            and "token" did not learn in a short training (``checkpoints/README.md``).
        dynamic_img_size: False accepts only ``img_size``.
        dynamic_img_pad: pad images at the bottom and the right to a whole number of patches.
        attn_drop_rate: probability, in training, of dropping a token's values in a block's
            attention.
        norm_eps: epsilon of all norms; default: the epsilon of ``norm_layer``.
        mlp_layer: a name of ``MLP_LAYERS``.

    The other arguments are as for timm's VisionTransformer.

    Source: TaylorShift (Nauen et al. 2024), Scaleformer (Favier and Dal'Maz Silva 2021),
    Dosovitskiy et al. 2021.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "max",
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        *,
        attention: str | Sequence[str] = "kernelized",
        relative: str = "joint",
        horizon: int | None = None,
        normalization: str | None = None,
        temperature_init: float | None = None,
        feature_map: str | None = None,
        random_features: int | None = None,
        value_conv: int = 0,
        centre_keys: bool = False,
        output_gate: bool = False,
        form: str = "auto",
        softmax_blocks: Sequence[int] | None = None,
        window_size: int | None = None,
        pos_embed: str = "none",
        pos_antialias: bool = True,
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = False,
        patch_drop_rate: float = 0.0,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        scale_attn_norm: bool = False,
        scale_mlp_norm: bool = False,
        proj_bias: bool = True,
        init_values: float | None = None,
        class_token: bool = True,
        no_embed_class: bool = False,
        reg_tokens: int = 0,
        pre_norm: bool = False,
        final_norm: bool = True,
        fc_norm: bool | None = None,
        pool_include_prefix: bool = False,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        weight_init: str = "",
        fix_init: bool = False,
        norm_layer: str | type[nn.Module] | None = None,
        norm_eps: float | None = None,
        act_layer: str | type[nn.Module] | None = None,
        mlp_layer: str = "mlp",
        device=None,
        dtype=None,
    ):
        # timm's class builds everything; blocks, attention and patch embedding are ours.
        attn_options = dict(
            relative=relative,
            horizon=horizon,
            normalization=normalization,
            temperature_init=temperature_init,
            feature_map=feature_map,
            random_features=random_features,
            value_conv=value_conv,
            centre_keys=centre_keys,
            output_gate=output_gate,
            form=form,
            window_size=window_size,
        )
        of_blocks = iter(options_of_blocks(attention, depth, attn_options, softmax_blocks or ()))
        for name, value in (("embed_dim", embed_dim), ("in_chans", in_chans)):
            if value < 1:
                raise ValueError(f"{name}: expected an integer of at least 1, got {value}")
        if mlp_layer not in MLP_LAYERS:
            raise ValueError(f"mlp_layer {mlp_layer!r}: expected one of {', '.join(MLP_LAYERS)}")
        norm = get_norm_layer(norm_layer) or LayerNorm
        if norm_eps is not None:
            norm = partial(norm, eps=norm_eps)
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            scale_attn_norm=scale_attn_norm,
            scale_mlp_norm=scale_mlp_norm,
            proj_bias=proj_bias,
            init_values=init_values,
            class_token=class_token,
            pos_embed=pos_embed,
            no_embed_class=no_embed_class,
            reg_tokens=reg_tokens,
            pre_norm=pre_norm,
            final_norm=final_norm,
            fc_norm=fc_norm,
            pool_include_prefix=pool_include_prefix,
            dynamic_img_size=True,
            dynamic_img_pad=dynamic_img_pad,
            drop_rate=drop_rate,
            pos_drop_rate=pos_drop_rate,
            proj_drop_rate=proj_drop_rate,
            attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate,
            weight_init=weight_init,
            fix_init=fix_init,
            embed_layer=DynamicPatchEmbed,
            norm_layer=norm,
            act_layer=act_layer,
            mlp_layer=MLP_LAYERS[mlp_layer],
            block_fn=lambda **options: Block(**options, attn_options=next(of_blocks)),
            attn_layer=Attention,
            device=device,
            dtype=dtype,
        )
        self.pos_antialias = pos_antialias
        # timm gets dynamic_img_size=True: our patch embedding checks sizes without one compiled
        # graph per size.
        self.dynamic_img_size = dynamic_img_size
        self.patch_embed.strict_img_size = not dynamic_img_size
        if patch_drop_rate > 0:
            self.patch_drop = PatchDropout(
                patch_drop_rate, num_prefix_tokens=self.num_prefix_tokens
            )
        self._share_native_layout()

    def _share_native_layout(self) -> None:
        """Give the attention layers the grid of ``img_size``, for calls without a layout."""
        layout = TokenLayout(self.num_prefix_tokens, Grid(*self.patch_embed.grid_size))
        for block in self.blocks:
            block.attn.native_layout = layout

    def set_input_size(self, img_size=None, patch_size=None) -> None:
        """Change the native size in pixels and the patch size; resample patch embedding and
        absolute position.
        """
        position, grid = self.pos_embed, self.patch_embed.grid_size
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        if self.pos_embed is not position and not self.pos_antialias:
            self.pos_embed.data = fit_position(position.data, self, grid)
        for info in self.feature_info:
            info["reduction"] = self.patch_embed.feat_ratio()
        self._share_native_layout()

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialize the weights as timm does; with an output gate, class and register tokens get
        ``PREFIX_STD``.
        """
        super().init_weights(mode, needs_reset)
        if any(block.attn.output_gate is not None for block in self.blocks):
            for token in (self.cls_token, self.reg_token):
                if token is not None:
                    nn.init.normal_(token, std=PREFIX_STD)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ):
        """Load as ``torch.nn.Module`` does.

        With ``strict`` it also accepts the weights of a plain ViT, and warns about parameters that
        keep their values: ``fitted_whole``.
        """
        fitted = fitted_whole(self, state_dict) if strict else state_dict
        return super().load_state_dict(fitted, strict, assign)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one of ``num_classes`` outputs (0: none).

        It has the device, dtype and mode of the old head, and is frozen if the old one was.
        """
        frozen = any(True for _ in self.head.parameters()) and not any(
            p.requires_grad for p in self.head.parameters()
        )
        super().reset_classifier(num_classes, global_pool)
        self.head.requires_grad_(not frozen)

    def no_weight_decay(self) -> set[str]:
        """Return patterns of parameters without weight decay: positions, prefix tokens, relative
        tables and temperatures.
        """
        return super().no_weight_decay() | {"*.attn.relative.*", "*.attn.temperature"}

    def with_prefix(self, x: Tensor) -> Tensor:
        """Prepend the prefix tokens to patches ``[B, n, D]``; the result is contiguous."""
        prefix = self.prefix_tokens()
        return torch.cat([x] if prefix is None else [prefix.expand(x.shape[0], -1, -1), x], dim=1)

    def prefix_tokens(self) -> Tensor | None:
        """Return the class and register tokens with their position, ``[1, P, D]``; None: none."""
        tokens = [token for token in (self.cls_token, self.reg_token) if token is not None]
        if not tokens:
            return None
        x = torch.cat(tokens, 1)
        if self.pos_embed is None or self.no_embed_class:
            return x
        return x + self.pos_embed[:, : self.num_prefix_tokens]

    def patch_position(self, grid: Grid, filled: Tensor | None = None) -> Tensor:
        """Return the learned position of the patches of a grid, ``[1 or B, H*W, D]``.

        ``filled`` is the result of ``filled_grids``.
        """
        prefix = 0 if self.no_embed_class else self.num_prefix_tokens
        own, antialias = self.patch_embed.grid_size, self.pos_antialias
        return absolute_position(self.pos_embed[:, prefix:], grid, own, filled, antialias=antialias)

    def _pos_embed(self, x: Tensor, filled: Tensor | None = None) -> Tensor:
        """Prepend prefix tokens and add the absolute position: ``[B, H, W, D]`` to
        ``[B, P + H*W, D]``.
        """
        grid, x = Grid(x.shape[1], x.shape[2]), x.flatten(1, 2)
        if self.pos_embed is not None:
            x = x + self.patch_position(grid, filled)
        return self.pos_drop(self.with_prefix(x))

    def _embed(self, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, TokenLayout]:
        """Turn images ``[B, C, H_px, W_px]`` into tokens ``[B, P + n, D]`` and their layout."""
        refuse_tracing()
        patch_size = self.patch_embed.patch_size
        filled = filled_grids(x, sizes, patch_size)
        x = self.patch_embed(blank_absent(x, filled, patch_size))
        grid = Grid(x.shape[1], x.shape[2])
        present = present_places(filled, grid)
        x = self._pos_embed(x, filled)
        kept = None
        if not isinstance(self.patch_drop, nn.Identity):
            x, kept = self.patch_drop(x, present)
        layout = TokenLayout(self.num_prefix_tokens, grid, kept, present=present)
        layout = with_counts(layout, self.blocks, x)
        x = self.norm_pre(x)
        warn_of_softmax(self.blocks, x)
        return x, layout

    def _run_block(
        self,
        block: nn.Module,
        x: Tensor,
        layout: TokenLayout,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, layout, attn_mask, is_causal)
        return block(x, layout, attn_mask, is_causal)

    def _tokens(
        self, x: Tensor, attn_mask: Tensor | None, is_causal: bool, sizes: Tensor | None
    ) -> tuple[Tensor, TokenLayout]:
        x, layout = self._embed(x, sizes)
        for block in self.blocks:
            x = self._run_block(block, x, layout, attn_mask, is_causal)
        return zero_absent(self.norm(x), layout), layout

    def forward_features(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """Turn images ``[B, C, H_px, W_px]`` into normalized tokens ``[B, P + n, D]``, 0 for absent
        patches.

        See ``forward`` for the arguments.
        """
        return self._tokens(x, attn_mask, is_causal, sizes)[0]

    def present_patches(self, x: Tensor, sizes: Tensor | None) -> Tensor | None:
        """Return True for each patch of images ``[B, C, H_px, W_px]`` that is not absent, row by
        row, bool ``[B, H*W]``.

        ``forward_head`` accepts this mask. None if ``sizes`` is None: no patch is absent.
        """
        patch_size = self.patch_embed.patch_size
        grid = grid_of(x.shape[2:], patch_size)
        return present_places(filled_grids(x, sizes, patch_size), grid)

    def pool(
        self, x: Tensor, pool_type: str | None = None, present: Tensor | None = None
    ) -> Tensor:
        """Pool tokens ``[B, P + n, D]`` as timm does, over the patches in ``present [B, n]``; None:
        all.
        """
        prefix, with_prefix = self.num_prefix_tokens, self.pool_include_prefix
        if self.attn_pool is None:
            pool_type = self.global_pool if pool_type is None else pool_type
            return pool_present(x, present, pool_type, prefix, with_prefix)
        if present is None:
            return super().pool(x, pool_type)
        scores = scores_of_absent(x, present, prefix, with_prefix)
        if self.global_pool == "prr":
            return self._pool_refined(x, present, scores)
        return self.attn_pool(x if with_prefix else x[:, prefix:], attn_mask=scores)

    def _pool_refined(self, x: Tensor, present: Tensor, scores: Tensor) -> Tensor:
        """Compute timm's ``AttentionPoolPrr``, which has no mask argument."""
        pool = self.attn_pool
        x = pool.pre_norm(x).unflatten(2, (pool.num_heads, -1)).transpose(1, 2)
        x = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=scores)
        x = pool.post_norm(x.transpose(1, 2).flatten(2))
        return pool_present(x, present, pool.pool, self.num_prefix_tokens, True)

    def forward_head(
        self, x: Tensor, pre_logits: bool = False, present: Tensor | None = None
    ) -> Tensor:
        """Turn tokens ``[B, P + n, D]`` into logits, or into pooled features (``pre_logits``).

        Args:
            present: bool ``[B, n]``, False for absent patches: the result of ``present_patches``,
                unless patches are dropped. None: all are present.
        """
        x = self.head_drop(self.fc_norm(self.pool(x, present=present)))
        return x if pre_logits else self.head(x)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """Turn images ``[B, C, H_px, W_px]`` into logits ``[B, num_classes]``.

        Same as timm's method. It is defined here because FX looks for functions that it must not
        trace in the module of the traced ``forward``.

        Args:
            attn_mask, is_causal: see ``Attention.forward``.
            sizes: int64 ``[B, 2]``, height and width in pixels of each image's content, from the
                top left. Patches beyond it are absent, whatever their pixels: no patch attends to
                them, and they are neither counted nor pooled. The result equals the result for the
                cropped image, up to rounding. A partly filled patch is used unchanged. None: every
                patch has content.

        Raises:
            ValueError: an image that is not a whole number of patches; sizes of another shape,
                dtype or device or, on a CPU outside of compiled graphs, out of range; see also
                ``Attention.forward``.
        """
        x, layout = self._tokens(x, attn_mask, is_causal, sizes)
        return self.forward_head(x, present=present_patches_of(layout))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        sizes: Tensor | None = None,
    ):
        """Return the tokens or maps after chosen blocks. Arguments and results are as in timm;
        ``sizes`` is as in ``forward``.

        Maps are ``[B, D, H, W]``; dropped or absent patches are zero.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt {output_fmt!r}: expected NCHW or NLC")
        take, last = feature_take_indices(len(self.blocks), indices)
        x, layout = self._embed(x, sizes)
        taken = []
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self._run_block(block, x, layout, attn_mask, is_causal)
            if i in take:
                taken.append(zero_absent(self.norm(x) if norm else x, layout))
        prefix = [y[:, : self.num_prefix_tokens] for y in taken] if self.num_prefix_tokens else None
        taken = [y[:, self.num_prefix_tokens :] for y in taken]
        if output_fmt == "NCHW":
            taken = [_to_map(y, layout) for y in taken]
        features = None if intermediates_only else zero_absent(self.norm(x), layout)
        return packed(taken, prefix if return_prefix_tokens else None, features, output_dict)


def packed(
    maps: list[Tensor],
    prefix: list[Tensor] | None,
    features: Tensor | None,
    output_dict: bool,
):
    """Return intermediates in the format of timm's ``forward_intermediates``.

    Args:
        maps: maps of chosen blocks or strides.
        prefix: the prefix tokens of each map; None: not requested, or there are none.
        features: the final tokens; None: not requested.
        output_dict: return a dictionary.
    """
    if output_dict:
        result: dict[str, Any] = {"image_intermediates": maps}
        result |= {} if prefix is None else {"image_intermediates_prefix": prefix}
        return result | ({} if features is None else {"image_features": features})
    pairs: list = maps if prefix is None else list(zip(maps, prefix, strict=True))
    return pairs if features is None else (features, pairs)


def _to_map(patches: Tensor, layout: TokenLayout) -> Tensor:
    """Turn ``[B, n, D]`` into ``[B, D, H, W]``, zero for absent patches."""
    if layout.kept is not None:
        index = layout.kept.unsqueeze(-1).expand(-1, -1, patches.shape[2])
        patches = patches.new_zeros(
            patches.shape[0], layout.grid.num_patches, patches.shape[2]
        ).scatter(1, index, patches)
    return patches.transpose(1, 2).unflatten(2, tuple(layout.grid)).contiguous()
