"""``VisionAttnTransformer``: timm's VisionTransformer over any grid, with our blocks.

The layout of the tokens is read off the patches once per forward and passed to each block as an
argument.
"""

import functools
import math

import torch
from timm.layers import PatchDropoutWithIndices, PatchEmbed, resample_abs_pos_embed
from timm.models import (
    VisionTransformer,
    checkpoint,
    register_notrace_function,
    register_notrace_module,
)
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from visionattn.layers import Attention, Block
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import count_classes
from visionattn.ops.sums import accumulation_dtype


@register_notrace_module
class DynamicPatchEmbed(PatchEmbed):
    """timm's PatchEmbed for images of any whole number of patches, ``[B, C, H_px, W_px]`` to
    ``[B, H, W, D]``.

    Sizes are formatted into messages only after a check has failed: formatting them on the good
    path, as timm does, makes a compiler build one graph per size.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Embed; raises ValueError for an image that is not a whole number of patches, or (strict)
        of another size.
        """
        height, width = x.shape[-2:]
        if self.strict_img_size and (height != self.img_size[0] or width != self.img_size[1]):
            raise ValueError(
                f"image of {height} x {width} pixels, but dynamic_img_size=False fixes "
                f"{self.img_size}"
            )
        if self.dynamic_img_pad:
            x = nn.functional.pad(
                x, (0, -width % self.patch_size[1], 0, -height % self.patch_size[0])
            )
        elif height % self.patch_size[0] or width % self.patch_size[1]:
            raise ValueError(wrong_size(height, width, self.patch_size))
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


def wrong_size(
    height: int, width: int, patch_size: tuple[int, int], *, square: bool = False
) -> str:
    """Say that an image is not a whole number of patches, and name the nearest sizes that fit.

    Args:
        height, width: size of the image in pixels.
        patch_size: height and width of a patch in pixels.
        square: the image is a square; name only squares.
    """

    def nearest(pixels: int, patch: int) -> str:
        below, above = pixels // patch * patch, -(-pixels // patch) * patch
        return str(pixels) if below == above else f"{below} or {above}" if below else str(above)

    rows, columns = patch_size
    patch = rows if rows == columns else f"{rows} x {columns}"
    way_out = (
        f"the nearest that fit: {nearest(height, math.lcm(rows, columns))}"
        if square
        else f"crop or pad it to {nearest(height, rows)} x {nearest(width, columns)}"
    )
    return (
        f"image of {height} x {width} pixels is not a whole number of {patch}-pixel patches; "
        f"{way_out}"
    )


@register_notrace_function
def class_counts_like(layout: TokenLayout, horizon: int, like: Tensor) -> Tensor | None:
    """Count the keys of each class for all blocks of a forward pass, once; None for a full grid on
    a GPU, whose kernels count by themselves.

    The name has no underscore, as FX wraps only such names.
    """
    if like.device.type == "cuda" and layout.kept is None:
        return None
    return count_classes(
        layout, (horizon, horizon), dtype=accumulation_dtype(like), device=like.device
    )


class VisionAttnTransformer(VisionTransformer):
    """A vision transformer whose cost per patch does not depend on the number of patches.

    Images ``[B, C, H_px, W_px]`` may have any height and width that are multiples of the patch, in
    every call.

    Args:
        attention: a name of ``visionattn.ops.attentions``: "kernelized", "taylorshift" or
            "softmax" (the quadratic twin).
        relative: relative position of the patches: "joint", "axial", "flat" or "none".
        horizon: R in patches, 3 unless given; offsets beyond it share the outermost entries.
        normalization: "mean" (unless given) or "sum" over the keys of a class; see
            ``visionattn.ops.position.kinds``.
        pos_embed: "none", or "learn" for absolute position, resampled to other grids.
        temperature_init: TaylorShift's tau at the start, 4 unless given.
        feature_map: of kernelized attention: "elu1" (unless given), "relu", "softmax" (Shen's
            efficient attention) or "random" (FAVOR+), whose rows each block draws for itself when
            the model is made, from torch's generator, and saves with the weights;
            ``block.attn.feature_map.redraw()`` draws others. Random features estimate the weights
            of a softmax, worse the larger q and k are; ``qk_norm`` bounds those.
        random_features: how many features of a head "random" has, as many as it is wide unless
            given.
        form: of every attention: "efficient" (linear), "direct" (quadratic), or "auto" for the
            faster one at each size.
        global_pool: as in timm; "max" by default, which found small things on large images where
            "avg" and "token" did not learn in a short training (``checkpoints/README.md``).
        dynamic_img_size: False accepts only ``img_size``.
        dynamic_img_pad: pad images that are not a whole number of patches at the bottom and the
            right.
        attn_drop_rate: in training, probability with which a token's values are dropped in a
            block's attention.

    The other arguments are those of timm's VisionTransformer.

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
        attention: str = "kernelized",
        relative: str = "joint",
        horizon: int | None = None,
        normalization: str | None = None,
        temperature_init: float | None = None,
        feature_map: str | None = None,
        random_features: int | None = None,
        form: str = "auto",
        pos_embed: str = "none",
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = False,
        patch_drop_rate: float = 0.0,
        qkv_bias: bool = True,
        qk_norm: bool = False,
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
        act_layer: str | type[nn.Module] | None = None,
        device=None,
        dtype=None,
    ):
        # timm's class builds everything; blocks, attention and patch embedding are ours.
        attn_options = dict(
            attention=attention,
            relative=relative,
            horizon=horizon,
            normalization=normalization,
            temperature_init=temperature_init,
            feature_map=feature_map,
            random_features=random_features,
            form=form,
        )
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
            norm_layer=norm_layer,
            act_layer=act_layer,
            block_fn=functools.partial(Block, attn_options=attn_options),
            attn_layer=Attention,
            device=device,
            dtype=dtype,
        )
        # timm was told that sizes are dynamic: our patch embedding checks them, without a compiled
        # graph for each size.
        self.dynamic_img_size = dynamic_img_size
        self.patch_embed.strict_img_size = not dynamic_img_size
        if patch_drop_rate > 0:
            self.patch_drop = PatchDropoutWithIndices(
                patch_drop_rate, num_prefix_tokens=self.num_prefix_tokens
            )
        self._share_native_layout()

    def _share_native_layout(self) -> None:
        """Tell the attention layers the grid of ``img_size``, for blocks that are called without a
        layout.
        """
        layout = TokenLayout(self.num_prefix_tokens, Grid(*self.patch_embed.grid_size))
        for block in self.blocks:
            block.attn.native_layout = layout

    def set_input_size(self, img_size=None, patch_size=None) -> None:
        """Change the native size in pixels, and the patch size, resampling patch embedding and
        absolute position.
        """
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        for info in self.feature_info:
            info["reduction"] = self.patch_embed.feat_ratio()
        self._share_native_layout()

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Make a new head of ``num_classes`` outputs (0: none), on the old one's device, in its
        dtype and mode, frozen if the old one was.
        """
        frozen = any(True for _ in self.head.parameters()) and not any(
            p.requires_grad for p in self.head.parameters()
        )
        super().reset_classifier(num_classes, global_pool)
        self.head.requires_grad_(not frozen)

    def no_weight_decay(self) -> set[str]:
        """Return patterns of the parameters that do not decay: positions, prefix tokens, relative
        tables and temperatures.
        """
        return super().no_weight_decay() | {"*.attn.relative.*", "*.attn.temperature"}

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Put prefix tokens in front and add the absolute position: ``[B, H, W, D]`` to
        ``[B, P + H*W, D]``.
        """
        grid = (x.shape[1], x.shape[2])
        x = x.flatten(1, 2)
        prefix = [
            token.expand(x.shape[0], -1, -1)
            for token in (self.cls_token, self.reg_token)
            if token is not None
        ]
        if self.pos_embed is None:
            return self.pos_drop(torch.cat([*prefix, x], dim=1))
        position = resample_abs_pos_embed(
            self.pos_embed,
            new_size=grid,
            old_size=self.patch_embed.grid_size,
            num_prefix_tokens=0 if self.no_embed_class else self.num_prefix_tokens,
        )
        if self.no_embed_class:
            return self.pos_drop(torch.cat([*prefix, x + position], dim=1))
        return self.pos_drop(torch.cat([*prefix, x], dim=1) + position)

    def _embed(self, x: Tensor) -> tuple[Tensor, TokenLayout]:
        """Turn images ``[B, C, H_px, W_px]`` into tokens ``[B, P + n, D]``; say where they lie."""
        x = self.patch_embed(x)
        grid = Grid(x.shape[1], x.shape[2])
        x = self._pos_embed(x)
        kept = None
        if not isinstance(self.patch_drop, nn.Identity):
            x, kept = self.patch_drop(x)
        layout = TokenLayout(self.num_prefix_tokens, grid, kept)
        tables = self.blocks[0].attn.relative if len(self.blocks) else None
        if tables is not None and tables.kind == "joint" and not tables.signed:
            layout = layout._replace(counts=class_counts_like(layout, tables.horizon, x))
        return self.norm_pre(x), layout

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

    def forward_features(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Turn images ``[B, C, H_px, W_px]`` into normalised tokens ``[B, P + n, D]``."""
        x, layout = self._embed(x)
        for block in self.blocks:
            x = self._run_block(block, x, layout, attn_mask, is_causal)
        return self.norm(x)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Turn images ``[B, C, H_px, W_px]`` into logits ``[B, num_classes]``.

        This does what timm's does. It is defined here because FX looks for functions that it must
        not trace in the module of the ``forward`` that it traces.
        """
        return self.forward_head(self.forward_features(x, attn_mask=attn_mask, is_causal=is_causal))

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
    ):
        """Return the tokens or maps after chosen blocks; arguments and results are those of timm.

        Maps are ``[B, D, H, W]``; where patches were dropped, their places are zero.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt {output_fmt!r}: wanted NCHW or NLC")
        take, last = feature_take_indices(len(self.blocks), indices)
        x, layout = self._embed(x)
        taken = []
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self._run_block(block, x, layout, attn_mask, is_causal)
            if i in take:
                taken.append(self.norm(x) if norm else x)
        prefix = [y[:, : self.num_prefix_tokens] for y in taken] if self.num_prefix_tokens else None
        taken = [y[:, self.num_prefix_tokens :] for y in taken]
        if output_fmt == "NCHW":
            taken = [_to_map(y, layout) for y in taken]
        if output_dict:
            result = {"image_intermediates": taken}
            if prefix is not None and return_prefix_tokens:
                result["image_intermediates_prefix"] = prefix
            return result if intermediates_only else result | {"image_features": self.norm(x)}
        if return_prefix_tokens and prefix is not None:
            taken = list(zip(taken, prefix, strict=True))
        return taken if intermediates_only else (self.norm(x), taken)


def _to_map(patches: Tensor, layout: TokenLayout) -> Tensor:
    """Turn ``[B, n, D]`` into ``[B, D, H, W]``, zero where a patch is absent."""
    if layout.kept is not None:
        index = layout.kept.unsqueeze(-1).expand(-1, -1, patches.shape[2])
        patches = patches.new_zeros(
            patches.shape[0], layout.grid.num_patches, patches.shape[2]
        ).scatter(1, index, patches)
    return patches.transpose(1, 2).unflatten(2, tuple(layout.grid)).contiguous()
