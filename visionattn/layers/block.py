"""The transformer block: attention of this package with timm's other parts and names."""

from timm.layers import DropPath, LayerNorm, LayerScale, Mlp
from torch import Tensor, nn

from visionattn.layers.attention_layer import Attention
from visionattn.layout import TokenLayout


class Block(nn.Module):
    """Pre-norm block ``x + attn(norm1(x))``, ``x + mlp(norm2(x))`` over tokens ``[B, N, D]``.

    Args:
        dim: D.
        num_heads: h.
        mlp_ratio: hidden width of the MLP divided by D.
        qkv_bias, qk_norm, scale_attn_norm, proj_bias, attn_drop, proj_drop: see ``Attention``.
        scale_mlp_norm: normalize the hidden activations of the MLP.
        init_values: initial value of LayerScale; None: no LayerScale.
        drop_path: probability of dropping each residual branch.
        attn_layer: class of the attention; it receives ``attn_options``.
        attn_options: further keyword arguments of the attention.
        depth: index of the block, from 0; unused, but timm passes it.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_attn_norm: bool = False,
        scale_mlp_norm: bool = False,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        init_values: float | None = None,
        drop_path: float = 0.0,
        act_layer: type[nn.Module] = nn.GELU,
        norm_layer: type[nn.Module] = LayerNorm,
        mlp_layer: type[nn.Module] = Mlp,
        attn_layer: type[nn.Module] = Attention,
        attn_options: dict | None = None,
        depth: int = 0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        # Both branches, attention and MLP, have timm's parameter names.
        self.norm1 = norm_layer(dim, **dd)
        self.attn = attn_layer(
            dim,
            num_heads,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            scale_norm=scale_attn_norm,
            proj_bias=proj_bias,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            norm_layer=norm_layer,
            **(attn_options or {}),
            **dd,
        )
        self.ls1 = LayerScale(dim, init_values=init_values, **dd) if init_values else nn.Identity()
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = norm_layer(dim, **dd)
        self.mlp = mlp_layer(
            in_features=dim,
            hidden_features=int(dim * mlp_ratio),
            act_layer=act_layer,
            norm_layer=norm_layer if scale_mlp_norm else None,
            bias=proj_bias,
            drop=proj_drop,
            **dd,
        )
        self.ls2 = LayerScale(dim, init_values=init_values, **dd) if init_values else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(
        self,
        x: Tensor,
        layout: TokenLayout | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Map ``[B, N, D]`` to ``[B, N, D]``; see ``Attention.forward`` for the arguments."""
        return self.added(x, self.attn(self.norm1(x), layout, attn_mask, is_causal))

    def added(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the output of the block for input tokens ``x`` and the output ``attended`` of the
        attention.

        Each token is independent of the others, so callers may process the tokens in pieces.
        """
        x = x + self.drop_path1(self.ls1(attended))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
