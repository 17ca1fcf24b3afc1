"""Find the first module of a network that produces non-finite values."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def first_non_finite(model: nn.Module, run: Callable[[], Any]) -> str | None:
    """Run the model once and name the first place, in the order of the forward pass, with a NaN or
    an infinity.

    Args:
        model: the module to watch.
        run: calls the model on the inputs in question.

    Returns:
        E.g. ``the output of blocks.1.attn.proj (Linear)`` or ``the parameter norm.weight``; None if
        all values are finite.
    """
    found: list[str] = []
    names = {module: name for name, module in model.named_modules()}

    def before(module: nn.Module, args: tuple) -> None:
        if module is model and not all_finite(args):
            found.append("the input of the model")
        for key, parameter in module.named_parameters(names[module], recurse=False):
            if not all_finite(parameter):
                found.append(f"the parameter {key}")

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        if not all_finite(output):
            name = names[module] or "the model"
            found.append(f"the output of {name} ({type(module).__name__})")

    handles = [module.register_forward_pre_hook(before) for module in names]
    handles += [module.register_forward_hook(after) for module in names]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def name_fault(model: nn.Module, runs: Iterable[Callable[[], Any]]) -> str:
    """Name the fault of a step without finite values: the first place in a forward pass, or else a
    gradient.

    Args:
        model: the module, with the gradients of the step.
        runs: each calls the model on one batch of the step.
    """
    for run in runs:
        if place := first_non_finite(model, run):
            return place
    gradients = {name: value.grad for name, value in model.named_parameters()}
    names = [name for name, gradient in gradients.items() if not all_finite(gradient)]
    if names:
        return f"the gradient of {names[-1]}; the forward pass is finite"
    return "unknown; a second pass is finite"


def all_finite(value: Any) -> bool:
    """Tell whether all floating-point tensors in a nested value are finite."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return all(bool(torch.isfinite(each).all()) for each in tensors if each.is_floating_point())
