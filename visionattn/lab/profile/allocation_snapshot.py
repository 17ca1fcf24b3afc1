"""Write the allocations of one pass to a file for PyTorch's memory viewer,
https://pytorch.org/memory_viz, which runs in the browser.

On a GPU the file is PyTorch's own recording. PyTorch records no history on a CPU, so there the file
has the allocations of its profiler in the same format. Memory of libraries (oneDNN's scratch) and
of Python bypasses PyTorch's allocator and is missing.
``python -m torch.cuda._memory_viz trace FILE`` prints the file without a browser.
"""

import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from visionattn.cli.files import write_whole
from visionattn.lab.model_step import ModelStep

Record = dict[str, Any]
MAX_EVENTS = 1_000_000
"""The most events of PyTorch's recording on a GPU."""
PICKLE_PROTOCOL = 4
"""The latest protocol that the viewer reads."""


def write_snapshot(path: Path, step: ModelStep) -> None:
    """Run and record the pass, and write its allocations."""
    if step.device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS)
        step.run()
        write_whole(path, lambda place: torch.cuda.memory._dump_snapshot(str(place)))
        return
    before = [*step.parameters(), *step.optimizer_state(), step.images]
    content = pickle.dumps(record(step.run, before), protocol=PICKLE_PROTOCOL)
    write_whole(path, lambda place: place.write_bytes(content))


def record(work: Callable[[], object], before: Sequence[Tensor] = ()) -> Record:
    """Run ``work()`` on the CPU under the profiler, and return its allocations as a snapshot.

    Args:
        work: the function to record.
        before: tensors allocated before, for which no allocation is recorded.

    Returns:
        ``{"segments": ..., "device_traces": [...]}`` in the format of
        ``torch.cuda.memory._snapshot``. A CPU's allocator keeps no cache, so each block
        is its own segment, and the final segments are the blocks alive at the end.
    """
    how = dict(profile_memory=True, record_shapes=True, with_stack=True)
    with profile(activities=[ProfilerActivity.CPU], **how) as profiler:
        work()
    storages = [tensor.untyped_storage() for tensor in before]
    living = {each.data_ptr(): {"size": each.nbytes(), "frames": []} for each in storages}
    living.pop(0, None)  # address of empty tensors
    trace: list[Record] = []
    for event in sorted(allocations(profiler), key=lambda event: event.start_time_ns):
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        entry = {"addr": address, "size": abs(size), "frames": list(frames(event.parent))}
        entry |= {"stream": 0, "time_us": event.start_time_ns // 1000}
        if size > 0:
            living[address] = entry
            actions = ("segment_alloc", "alloc")
        else:
            living.pop(address, None)
            actions = ("free_requested", "free_completed", "segment_free")
        trace += [{"action": action} | entry for action in actions]
    segments = [segment_of(address, block) for address, block in living.items()]
    return {"segments": segments, "device_traces": [trace]}


def allocations(profiler: profile) -> Iterator[Any]:
    """Yield the profiler's events that allocate CPU memory (``alloc_size`` above 0) or free it."""
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            yield event


def frames(event: Any) -> Iterator[Record]:
    """Yield the call stack from the innermost frame: operators by name, Python by file and line."""
    while event is not None:
        python = re.fullmatch(r"(.+)\((\d+)\): (.+)", event.name)
        filename, line, name = python.groups() if python else ("", 0, event.name)
        yield {"filename": filename, "line": int(line), "name": name}
        event = event.parent


def segment_of(address: int, block: Record) -> Record:
    """Return a segment that consists of one block."""
    size, frames_of = block["size"], block["frames"]
    inner = {"address": address, "size": size, "requested_size": size, "frames": frames_of}
    whole = {"device": 0, "address": address, "stream": 0, "segment_type": "large"}
    whole |= dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), size)
    whole |= {"segment_pool_id": (0, 0), "frames": frames_of}
    return whole | {"blocks": [inner | {"state": "active_allocated"}]}
