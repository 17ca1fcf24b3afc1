"""Detection of modules whose call no longer runs only ``forward`` of their class.

Code that runs the parts of a module without calling it needs this check.
"""

import torch
from torch import nn

WATCHERS = ("visionattn.", "torch.utils.module_tracker")
"""Modules whose hooks change nothing: progress bars of this package, counters of torch."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def changed(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Return the reason why a call of a module runs more than ``kind.forward``; None if there is
    none.

    Parametrizations change parameters, not the call, and are accepted.
    """
    if not isinstance(module, kind):
        return f"is a {type(module).__module__}.{type(module).__qualname__}"
    if getattr(module.forward, "__func__", None) is not kind.forward:
        return "has another forward"
    return "has hooks" if has_hooks(module) else None


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks from modules outside ``WATCHERS`` act on a call of the module."""
    common = torch.nn.modules.module
    tables = [common._global_forward_pre_hooks, common._global_forward_hooks]
    hooks = [x for table in [*tables, *(getattr(module, n) for n in HOOKS)] for x in table.values()]
    homes = [getattr(getattr(hook, "func", hook), "__module__", None) or "" for hook in hooks]
    return not all(home.startswith(WATCHERS) for home in homes)


def check_unchanged(name: str, module: nn.Module, kind: type[nn.Module]) -> None:
    """Raise ValueError if a call of the module would run more than ``kind.forward``.

    Args:
        name: name of the module in its model, for the message; "": the model itself.
        kind: the class that defines the expected ``forward``.
    """
    if (why := changed(module, kind)) is not None:
        raise ValueError(
            f"{name or 'the model'} {why}, which would be bypassed, because only the parts of "
            f"{kind.__name__} are called"
        )
