"""Weights from elsewhere into our models: plain ``vit_*`` checkpoints, other patch sizes, grids and
horizons.
"""

import math

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed_nhwc
from timm.models.vision_transformer import checkpoint_filter_fn as timm_checkpoint_filter_fn
from torch import Tensor, nn

MAY_BE_ABSENT = ("cls_token", "reg_token")
OURS = tuple(
    f".attn.{part}"
    for part in ("relative.", "temperature", "feature_map.", "value_conv.", "output_gate.")
)

PYRAMID = "pyramid."
"""How the names of a pyramid's parameters begin."""


def _resamples(table: Tensor, shape: torch.Size) -> bool:
    return table.ndim == len(shape) and table.shape[0] == shape[0] and table.shape[-1] == shape[-1]


def resample_table(table: Tensor, shape: torch.Size) -> Tensor:
    """Bring a relative table ``[h, 2R+1, (2R+1,) d]`` to another horizon by interpolating between
    its outermost classes.

    The centre stays the centre. A table of another number of heads or another width cannot be
    resampled.

    Raises:
        ValueError: heads, width or the number of axes differ.
    """
    if not _resamples(table, shape):
        raise ValueError(
            f"relative table {tuple(table.shape)} cannot become {tuple(shape)}: only the horizon "
            f"may differ"
        )
    sides = tuple(shape[1:-1])
    if tuple(table.shape[1:-1]) == sides:
        return table
    mode = "bilinear" if len(sides) == 2 else "linear"
    channels_first = table.movedim(-1, 1).float()
    return (
        F.interpolate(channels_first, size=sides, mode=mode, align_corners=True)
        .movedim(1, -1)
        .to(table.dtype)
    )


def checkpoint_filter_fn(
    state_dict: dict[str, Tensor], model: nn.Module, source_grid: tuple[int, int] | None = None
) -> dict[str, Tensor]:
    """Fit a state dict of ours or of a timm ``vit_*`` to ``model``: patch embedding, absolute
    position, relative tables.

    Where the architectures differ by meaning, so does the result: a plain ViT's absolute position
    and prefix tokens are left out of a model without them, its final norm moves to where the model
    has one (before or after pooling), and the relative tables, temperatures, random features,
    convolutions of values, output gates and layers of a pyramid that it lacks keep the model's
    values. Everything else
    that does not fit, such as the tables of another number of heads, is passed on as it is, for the
    loader to report.
    The tables of a softmax twin are signed: placed in a linear model, or the other way round, they
    mean something else.

    Args:
        state_dict: the weights, possibly under "model" or "state_dict".
        model: the model that they are to fit.
        source_grid: (H, W) in patches that the absolute position was made for; None: the model's
            own if it has as many patches, else a square. A position that no grid explains is passed
            on as it is.
    """
    own = model.state_dict()
    state_dict = state_dict.get("model", state_dict)
    state_dict = dict(state_dict.get("state_dict", state_dict))
    position = state_dict.pop("pos_embed", None)
    fitted = {
        name: value
        for name, value in own.items()
        if any(part in name for part in OURS) or name.startswith(PYRAMID)
    }
    for name, value in timm_checkpoint_filter_fn(state_dict, model).items():
        if name in MAY_BE_ABSENT and name not in own:
            continue
        if ".attn.relative." in name and name in own and _resamples(value, own[name].shape):
            value = resample_table(value, own[name].shape)
        fitted[_place_norm(name, own)] = value
    if position is not None and "pos_embed" in own:
        fitted["pos_embed"] = fit_position(position, model, source_grid)
    return fitted


def fit_position(position: Tensor, model: nn.Module, grid: tuple[int, int] | None) -> Tensor:
    """Bring an absolute position ``[1, P + H*W, D]`` to the model's grid; leave it as it is where
    no grid explains its number of tokens.
    """
    prefix = 0 if model.no_embed_class else model.num_prefix_tokens
    patches, own = position.shape[1] - prefix, tuple(model.patch_embed.grid_size)
    side = math.isqrt(max(0, patches))
    old = next(
        (g for g in (grid, own, (side, side)) if g is not None and g[0] * g[1] == patches), own
    )
    if tuple(old) == own:
        return position
    resampled = resample_abs_pos_embed_nhwc(
        position[:, prefix:].unflatten(1, tuple(old)), list(own)
    )
    return torch.cat([position[:, :prefix], resampled.flatten(1, 2)], dim=1)


def _place_norm(name: str, own: dict[str, Tensor]) -> str:
    """Return the final norm's name in the model: ``norm`` before pooling, ``fc_norm`` after it."""
    module, _, leaf = name.rpartition(".")
    other = {"norm": f"fc_norm.{leaf}", "fc_norm": f"norm.{leaf}"}.get(module)
    return other if name not in own and other in own else name
