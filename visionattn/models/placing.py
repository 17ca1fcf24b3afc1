"""State dicts that are loaded whole and are not wholly of the model: those of a plain ViT, of a
segmentation, of a model without a pyramid, and of the model that a wrapper of features holds.

``timm.create_model(name, checkpoint_path=FILE)`` calls ``load_state_dict`` and nothing else, so
that is where they are fitted. Where ``strict`` is false, everything is left to the caller.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from timm.models._features import FeatureGetterNet
from torch import Tensor, nn

from visionattn.models.convert import OURS, PYRAMID, checkpoint_filter_fn
from visionattn.models.listing import shorten

PRUNED = ("head.", "norm.", "fc_norm.", "attn_pool.", PYRAMID)
"""Parts that a wrapper of features may have dropped, besides blocks."""
BODY = "backbone."
"""Where a segmentation has its body, which lacks what is ``ABOVE`` the patches."""
ABOVE = ("head.", "norm.", "fc_norm.", "attn_pool.")


def _is_ours(name: str) -> bool:
    return any(part in name for part in OURS)


def fitted_whole(model: nn.Module, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict to load, fitted to the model where it is that of a plain ViT, of a
    segmentation, or of a model without a pyramid; what the model keeps of its own is named in one
    warning.

    A dict that has any part that is ours alone is of ours: what it lacks but a whole pyramid is
    missing, as torch then says.
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
    if fresh:
        say_fresh(fresh)
    return fitted


def say_fresh(names: list[str]) -> None:
    """Warn in one line of parameters of which a file has none; a pyramid's are named by level."""
    parts = [".".join(n.split(".")[:3]) if n.startswith(PYRAMID) else n for n in names]
    listed = shorten(list(dict.fromkeys(parts)))
    warnings.warn(f"not in the weights, so that they start fresh: {listed}", stacklevel=2)


def filter_pretrained(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Do what ``checkpoint_filter_fn`` does, and name a pyramid of which the weights have none."""
    fresh = [name for name in model.state_dict() if name.startswith(PYRAMID)]
    if fresh and not any(PYRAMID in name for name in state_dict):
        say_fresh(fresh)
    return checkpoint_filter_fn(state_dict, model)


class FeatureMaps(FeatureGetterNet):
    """timm's wrapper of features, which takes the state dict of the model within too, without what
    the wrapper dropped of it.
    """

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ):
        """Load as ``torch.nn.Module`` does."""
        if strict and not any(name.startswith("model.") for name in state_dict):
            own, blocks = self.model.state_dict(), len(self.model.blocks)
            kept = {
                name: value
                for name, value in state_dict.items()
                if name in own or not (name.startswith(PRUNED) or _block(name) >= blocks)
            }
            kept = fitted_whole(self.model, kept)
            state_dict = {f"model.{name}": value for name, value in kept.items()}
        return super().load_state_dict(state_dict, strict, assign)


def _block(name: str) -> int:
    """Return the number of the block that a tensor is of; -1: none."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blocks" and parts[1].isdecimal() else -1
