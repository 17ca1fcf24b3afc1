"""Detection of modules whose call runs other code than ``forward`` of their class.

Code that calls the parts of a module instead of the module would bypass hooks and replaced methods.
"""

import torch
from torch import nn

WATCHERS = ("visionattn.", "torch.utils.module_tracker")
"""Prefixes of modules whose hooks only observe: progress bars of this package, counters of
torch.
"""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def changed(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Return the reason why a call of a module runs other code than ``kind.forward``; None if it
    does not.

    Parametrizations change parameters, not the call, and are accepted.
    """
    if not isinstance(module, kind):
        return f"is a {type(module).__module__}.{type(module).__qualname__}"
    if getattr(module.forward, "__func__", None) is not kind.forward:
        return "has another forward"
    return "has hooks" if has_hooks(module) else None


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of the module runs hooks that are not from ``WATCHERS``."""
    common = torch.nn.modules.module
    tables = [common._global_forward_pre_hooks, common._global_forward_hooks]
    hooks = [x for table in [*tables, *(getattr(module, n) for n in HOOKS)] for x in table.values()]
    modules = [getattr(getattr(hook, "func", hook), "__module__", None) or "" for hook in hooks]
    return not all(name.startswith(WATCHERS) for name in modules)


def check_unchanged(name: str, module: nn.Module, kind: type[nn.Module]) -> None:
    """Raise ValueError if a call of the module runs other code than ``kind.forward``.

    Args:
        name: name of the module in its model, for the message; "": the model itself.
        kind: the class that defines the expected ``forward``.
    """
    if (why := changed(module, kind)) is not None:
        raise ValueError(
            f"{name or 'the model'} {why}, which would be bypassed, because only the parts of "
            f"{kind.__name__} are called"
        )
