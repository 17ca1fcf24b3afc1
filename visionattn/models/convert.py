"""Weights from elsewhere into our models: plain ``vit_*`` checkpoints, other patch sizes, grids and horizons."""

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import checkpoint_filter_fn as timm_checkpoint_filter_fn
from torch import Tensor, nn


def resample_table(table: Tensor, shape: torch.Size) -> Tensor:
    """A relative table ``[h, 2R+1, (2R+1,) d]`` at another horizon, interpolated between its outermost classes.

    The centre stays the centre; a table of another number of heads or another width cannot be resampled.

    Raises:
        ValueError: heads or width differ.
    """
    if table.shape[0] != shape[0] or table.shape[-1] != shape[-1] or table.ndim != len(shape):
        raise ValueError(f"relative table {tuple(table.shape)} cannot become {tuple(shape)}: only the horizon may differ")
    sides = tuple(shape[1:-1])
    if tuple(table.shape[1:-1]) == sides:
        return table
    channels_first = table.movedim(-1, 1).float()
    mode = "bilinear" if len(sides) == 2 else "linear"
    return F.interpolate(channels_first, size=sides, mode=mode, align_corners=True).movedim(1, -1).to(table.dtype)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Fit a state dict of ours or of a timm ``vit_*`` to ``model``: patch embedding, absolute position, relative tables.

    Names that the model lacks are dropped where that is what the architecture means: a plain ViT's absolute position in a
    model without one, and its class token in a model without one. Everything else that does not fit stays, for the loader
    to report. What the state dict lacks, the relative tables and temperatures of a plain ViT's, keeps the model's values.
    """
    state_dict = timm_checkpoint_filter_fn(state_dict, model)
    own = model.state_dict()
    fitted = {}
    for name, value in state_dict.items():
        if name in ("pos_embed", "cls_token", "reg_token") and name not in own:
            continue
        if ".attn.relative." in name and name in own:
            value = resample_table(value, own[name].shape)
        fitted[name] = value
    moved = {"norm": "fc_norm", "fc_norm": "norm"}
    for source, target in moved.items():
        for leaf in ("weight", "bias"):
            if f"{source}.{leaf}" in fitted and f"{source}.{leaf}" not in own and f"{target}.{leaf}" in own:
                fitted[f"{target}.{leaf}"] = fitted.pop(f"{source}.{leaf}")
    return {name: fitted.get(name, value) for name, value in own.items() if ".attn.relative." in name or "temperature" in name} | fitted
