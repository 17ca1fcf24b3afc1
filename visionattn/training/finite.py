"""Which module of a network is the first to produce values that are not finite."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def first_non_finite(model: nn.Module, run: Callable[[], Any]) -> str | None:
    """Run the model once and name the first place, in the order of the forward pass, with a NaN or
    an infinity.

    A module's own parameters are looked at when it starts, its outputs when it ends.

    Args:
        model: the module to watch.
        run: calls the model on the inputs in question.

    Returns:
        E.g. ``the output of blocks.1.attn.proj (Linear)`` or ``the parameter norm.weight``; None
        where all is finite.
    """
    found: list[str] = []

    # Hooks look before and after each module; the first that finds something ends the search.
    def before(name: str):
        def hook(module: nn.Module, args: tuple) -> None:
            if found:
                return
            if not name and not all_finite(args):
                found.append("the input of the model")
            for key, parameter in module.named_parameters(recurse=False):
                if not found and not all_finite(parameter):
                    found.append(f"the parameter {name + '.' if name else ''}{key}")

        return hook

    def after(name: str):
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            if not found and not all_finite(output):
                found.append(f"the output of {name or 'the model'} ({type(module).__name__})")

        return hook

    # No gradient is needed, and hooks are removed whatever happens.
    handles = []
    try:
        for name, module in model.named_modules():
            handles += [
                module.register_forward_pre_hook(before(name)),
                module.register_forward_hook(after(name)),
            ]
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def name_fault(model: nn.Module, runs: Iterable[Callable[[], Any]]) -> str:
    """Name what is at fault for a step without finite values: the first place in a forward pass, or
    else a gradient.

    Args:
        model: the module, with the gradients of the step.
        runs: each calls the model on one batch of the step.
    """
    for run in runs:
        if place := first_non_finite(model, run):
            return place
    names = [
        name
        for name, value in model.named_parameters()
        if value.grad is not None and not all_finite(value.grad)
    ]
    return (
        f"the gradient of {names[-1]}; the forward pass is finite"
        if names
        else "nothing that a second pass shows"
    )


def all_finite(value: Any) -> bool:
    """Tell whether all floating-point tensors in a value, also within tuples, lists and dicts, are
    finite.
    """
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return True
    return all(all_finite(part) for part in value)
