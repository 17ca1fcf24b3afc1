"""The name under which a profiler sees which form of an operation runs, also within a compiled graph."""

from torch.profiler import record_function

PREFIX = "visionattn.ops: "


def form_ran(operation: str, form: str) -> record_function:
    """A context for the work of one call, say ``form_ran("taylorshift", "efficient")``; some microseconds."""
    return record_function(f"{PREFIX}{operation} {form}")
