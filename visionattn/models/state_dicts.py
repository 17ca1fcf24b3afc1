"""Adaptation of state dicts to our models: from plain ``vit_*``, from other patch sizes, grids and
horizons, from a segmentation model, and from the model inside a wrapper of features.

``timm.create_model(name, checkpoint_path=FILE)`` calls only ``load_state_dict``, so the adaptation
happens there. With ``strict`` false, nothing is adapted.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed_nhwc
from timm.models._features import FeatureGetterNet
from timm.models.vision_transformer import checkpoint_filter_fn as timm_checkpoint_filter_fn
from torch import Tensor, nn

MAY_BE_ABSENT = ("cls_token", "reg_token")
OURS = tuple(
    f".attn.{part}"
    for part in ("relative.", "temperature", "feature_map.", "value_conv.", "output_gate.")
)
"""Parts of parameter names that a plain ViT does not have."""
PYRAMID = "pyramid."
"""Prefix of a pyramid's parameters."""
ABOVE = ("head.", "norm.", "fc_norm.", "attn_pool.")
"""Parts above the patches. The body of a segmentation model lacks them, and a wrapper of features
may have dropped them, as well as a pyramid and blocks.
"""
BODY = "backbone."
"""Prefix of the body in a segmentation model."""


def _resamples(table: Tensor, shape: torch.Size) -> bool:
    return table.ndim == len(shape) and table.shape[0] == shape[0] and table.shape[-1] == shape[-1]


def resample_table(table: Tensor, shape: torch.Size) -> Tensor:
    """Resample a relative table ``[h, 2R+1, (2R+1,) d]`` to another horizon by interpolation
    between its outermost classes.

    The centre stays the centre. Heads, width and the number of axes are the same.
    """
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
    """Adapt a state dict of ours or of a timm ``vit_*`` to ``model``: patch embedding, absolute
    position, relative tables.

    If the architectures differ in their parts, so does the result. A plain ViT's absolute position
    and prefix tokens are dropped for a model without them, and its final norm moves to the place
    where the model has one (before or after pooling). Relative tables, temperatures, random
    features, value convolutions, output gates and pyramid layers that it lacks keep the model's
    values. Everything else that does not fit, such as tables with another number of heads, is
    passed on unchanged, and the loader reports it. The tables of a softmax baseline are signed:
    they have another meaning in a linear model, and vice versa.

    Args:
        state_dict: the weights, possibly under "model" or "state_dict".
        model: the model to adapt to.
        source_grid: (H, W) in patches of the absolute position; None: the model's own if the number
            of patches matches, else a square. A position that matches no grid is passed on
            unchanged.
    """
    own = model.state_dict()
    state_dict = state_dict.get("model", state_dict)
    state_dict = dict(state_dict.get("state_dict", state_dict))
    position = state_dict.pop("pos_embed", None)
    fitted = {
        name: value for name, value in own.items() if _is_ours(name) or name.startswith(PYRAMID)
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
    """Resample an absolute position ``[1, P + H*W, D]`` to the model's grid; leave it unchanged if
    its number of tokens matches no grid.
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
        position[:, prefix:].unflatten(1, tuple(old)), list(own), antialias=model.pos_antialias
    )
    return torch.cat([position[:, :prefix], resampled.flatten(1, 2)], dim=1)


def _place_norm(name: str, own: dict[str, Tensor]) -> str:
    """Return the final norm's name in the model: ``norm`` before pooling, ``fc_norm`` after it."""
    module, _, leaf = name.rpartition(".")
    other = {"norm": f"fc_norm.{leaf}", "fc_norm": f"norm.{leaf}"}.get(module)
    return other if name not in own and other in own else name


def _is_ours(name: str) -> bool:
    return any(part in name for part in OURS)


def fitted_whole(model: nn.Module, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict to load. It is adapted to the model if it comes from a plain ViT, a
    segmentation model or a model without a pyramid.

    One warning names the parameters that keep the model's values. A state dict with any part that
    only our models have counts as ours: torch then reports missing parts, except a whole pyramid.
    """
    own, fresh = model.state_dict(), []
    if any(name.startswith(f"{BODY}blocks.") for name in given):
        body = {n.removeprefix(BODY): value for n, value in given.items() if n.startswith(BODY)}
        fresh = [name for name in own if name.startswith(ABOVE) and name not in body]
        given = {**body, **{name: own[name] for name in fresh}}
    if "blocks.0.attn.qkv.weight" not in given:
        return given
    if not any(name.startswith(PYRAMID) for name in given):
        fresh += [name for name in own if name.startswith(PYRAMID)]
    fitted = {**given, **{name: own[name] for name in fresh}}
    plain = not any(map(_is_ours, given))
    if plain and (any(map(_is_ours, own)) or own.keys() != fitted.keys()):
        fresh += [name for name in own if _is_ours(name)]
        fitted = checkpoint_filter_fn(dict(given), model)
    _warn_of_fresh(fresh)
    return fitted


def _warn_of_fresh(names: list[str]) -> None:
    """Warn in one line about parameters that a file lacks; a pyramid's are named by level."""
    if names:
        parts = [".".join(n.split(".")[:3]) if n.startswith(PYRAMID) else n for n in names]
        listed = shorten(list(dict.fromkeys(parts)))
        warnings.warn(f"not in the weights, kept at their initial values: {listed}", stacklevel=3)


def filter_pretrained(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Apply ``checkpoint_filter_fn``, and warn if the weights lack a pyramid."""
    if not any(PYRAMID in name for name in state_dict):
        _warn_of_fresh([name for name in model.state_dict() if name.startswith(PYRAMID)])
    return checkpoint_filter_fn(state_dict, model)


class FeatureMaps(FeatureGetterNet):
    """timm's wrapper of features, which also loads the state dict of the model inside, without the
    parts that the wrapper dropped.
    """

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ):
        """Load as ``torch.nn.Module`` does."""
        if strict and not any(name.startswith("model.") for name in state_dict):
            own = self.model.state_dict()
            blocks = tuple(f"blocks.{i}." for i in range(len(self.model.blocks)))
            kept = {
                name: value
                for name, value in state_dict.items()
                if name in own
                or name.startswith(blocks)
                or not name.startswith((*ABOVE, PYRAMID, "blocks."))
            }
            kept = fitted_whole(self.model, kept)
            state_dict = {f"model.{name}": value for name, value in kept.items()}
        return super().load_state_dict(state_dict, strict, assign)


@dataclass(frozen=True)
class Placement:
    """A record of where each tensor of a model came from."""

    source: str
    """A file, or the name of another model."""
    taken: list[str]
    """Names in the model that have values of the source, including resampled ones."""
    resampled: list[str]
    """Names in ``taken``, with shapes, whose values were interpolated."""
    new: list[str]
    """Names in the model that the source does not have, at their initial values."""
    left_out: list[str]
    """Names in the source without a place in the model."""

    def lines(self) -> list[str]:
        """Return a compact, readable list of the origin of the weights."""
        several = len(self.taken) + len(self.new)
        parts = {"resampled": self.resampled, "new": self.new, "left out": self.left_out}
        lines = [
            f"{len(self.taken)} of {several} tensors come from {self.source}",
            *(f"  {what} ({len(of)}): {shorten(of)}" for what, of in parts.items() if of),
        ]
        if any(".output_gate." in name for name in self.new):
            lines.append(
                "  output gates start near 0 and suppress the copied attention; pass "
                "--model.args.output_gate false to remove them"
            )
        return lines


def shorten(names: list[str], most: int = 12) -> str:
    """Join names in a line; names that differ only in the block number become one:
    ``blocks.{0-8,10}.attn.table``.
    """
    groups: dict[str, list[int]] = {}
    for name in names:
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        key = name if number is None else ".".join([*parts[:number], "*", *parts[number + 1 :]])
        groups.setdefault(key, []).extend([] if number is None else [int(parts[number])])
    written = [key.replace("*", _ranges(numbers), 1) for key, numbers in groups.items()]
    return ", ".join(written[:most]) + (
        f" and {len(written) - most} more" if len(written) > most else ""
    )


def _ranges(numbers: list[int]) -> str:
    """Format integers as ranges, ``{0-8,10}``; a single number stays plain."""
    # Consecutive numbers have the same distance from their places.
    pairs = groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in pairs]
    written = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"{{{written}}}" if len(numbers) > 1 else written


def shape(tensor: Tensor) -> str:
    """Format the shape of a tensor, e.g. ``192x3x16x16``."""
    return "x".join(map(str, tensor.shape))
