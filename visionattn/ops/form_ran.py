"""The name under which a profiler sees which form of an operation runs, also within a compiled
graph.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

PREFIX = "visionattn.ops: "
NOBODY_LOOKS = nullcontext()


def form_ran(operation: str, form: str) -> AbstractContextManager:
    """A context for the work of one call, say ``form_ran("taylorshift", "efficient")``; nothing
    without a profiler.

    Operators alone enter it, whose bodies no compiler traces.
    """
    if not torch.autograd._profiler_enabled():
        return NOBODY_LOOKS
    return record_function(f"{PREFIX}{operation} {form}")
