"""Freeze parts of a model, so that a training changes only the rest.

Source of linear probing: Alain and Bengio 2016, Understanding intermediate layers using linear
classifier probes.
"""

from typing import Literal

from torch import nn

from visionattn.models.patch_heads import PatchModel
from visionattn.training.distributed import stages


def freeze(model: nn.Module, what: Literal["backbone"] | int) -> None:
    """Freeze all parameters except the head's (``backbone``), or the parameters of the patch
    embedding and of the first ``what`` blocks. Frozen parameters get no gradient, no weight decay
    and no optimizer state.

    Raises:
        ValueError: the model has no head or no blocks, or fewer blocks; one line.
    """
    if isinstance(what, int):
        frozen = _lowest(model, what)
    else:
        learnt = set(_head(model))
        frozen = [parameter for parameter in model.parameters() if parameter not in learnt]
    for parameter in frozen:
        parameter.requires_grad_(False)


def _head(model: nn.Module) -> list[nn.Parameter]:
    """Return the head's parameters: the classifier, or the modules after the patch features."""
    if isinstance(model, PatchModel):
        of_body = set(model.backbone.parameters())
        return [parameter for parameter in model.parameters() if parameter not in of_body]
    found = model.get_classifier() if hasattr(model, "get_classifier") else ()
    heads = found if isinstance(found, tuple) else (found,)  # timm's distilled models have two
    parameters = [parameter for head in heads for parameter in head.parameters()]
    if not parameters:
        raise ValueError(
            f"freeze backbone needs a head, and {type(model).__name__} has none; pass a number of "
            "blocks, or remove freeze"
        )
    return parameters


def _lowest(model: nn.Module, count: int) -> list[nn.Parameter]:
    """Return the parameters of the first blocks, and of everything before the blocks."""
    blocks = stages(model)
    if not blocks:
        raise ValueError(
            f"freeze {count} needs blocks, and {type(model).__name__} has none; pass backbone, or "
            "remove freeze"
        )
    if count > len(blocks):
        raise ValueError(
            f"expected freeze at most {len(blocks)}, the blocks of {type(model).__name__}, got "
            f"{count}; pass fewer, or backbone"
        )
    found, first = [], next(blocks[0].parameters())
    for parameter in model.parameters():
        if parameter is first:
            break
        found.append(parameter)
    return [*found, *(each for block in blocks[:count] for each in block.parameters())]


def begin_training(model: nn.Module, frozen: str | int | None) -> None:
    """Put a model into train mode, but its frozen parts into eval mode: dropout and drop path are
    off, and running statistics stay.

    Args:
        model: the model.
        frozen: the option ``freeze``; None: everything is in train mode.
    """
    model.train()
    if frozen is None:
        return
    follows = False
    # Backwards: a module without parameters, such as a dropout, belongs to the next one with some.
    for module in reversed(list(model.modules())):
        own = [parameter.requires_grad for parameter in module.parameters(recurse=False)]
        within = [parameter.requires_grad for parameter in module.parameters()]
        follows = not any(own) if own else follows
        if not any(within) if within else follows:
            module.eval()
