"""The allocations of one pass as a file for PyTorch's memory viewer,
https://pytorch.org/memory_viz, which runs in the browser.

On a GPU it is PyTorch's own recording. On a CPU, of which PyTorch records no history, the
allocations that its profiler saw are written in the same format; the memory of libraries (oneDNN's
scratch) and of Python itself does not pass PyTorch's allocator and is not in it.
``python -m torch.cuda._memory_viz trace FILE`` prints the file without a browser.
"""

import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from visionattn.cli.files import write_whole
from visionattn.lab.profile.step import Step

Record = dict[str, Any]
MAX_EVENTS = 1_000_000
"""The most events of PyTorch's recording on a GPU."""
PICKLE_PROTOCOL = 4
"""The viewer reads no later one."""
NO_POOL = (0, 0)


def write_snapshot(path: Path, step: Step) -> None:
    """Run the pass once more, recorded, and write its allocations."""
    if step.device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS)
        try:
            step.run()
            write_whole(path, lambda temporary: torch.cuda.memory._dump_snapshot(str(temporary)))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        return
    step.model.zero_grad(set_to_none=True)
    before = [*step.model.parameters(), *step.model.buffers(), step.image]
    if step.optimizer is not None:
        before += [
            value
            for state in step.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
    content = record(step.run, before)
    write_whole(
        path,
        lambda temporary: temporary.write_bytes(pickle.dumps(content, protocol=PICKLE_PROTOCOL)),
    )


def record(work, before: Sequence[Tensor] = ()) -> Record:
    """Run ``work()`` on the CPU under the profiler; its allocations as a snapshot.

    Args:
        work: what is recorded.
        before: tensors that are there before, which no allocation would show.

    Returns:
        ``{"segments": ..., "device_traces": [...]}`` in the format of
        ``torch.cuda.memory._snapshot``. A CPU's allocator keeps no cache: each block is a segment
        of its own, and the segments at the end are what lives then.
    """
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
    ) as profiler:
        work()
    trace: list[Record] = []
    living: dict[int, Record] = {}
    for tensor in before:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            living[storage.data_ptr()] = {
                "addr": storage.data_ptr(),
                "size": storage.nbytes(),
                "frames": [],
            }
    # Each allocation is a segment of its own, which the free at its address ends.
    for event in sorted(allocations(profiler), key=lambda event: event.start_time_ns):
        fields, time_us = event.extra_fields, event.start_time_ns // 1000
        entry = {
            "addr": fields.ptr,
            "size": abs(fields.alloc_size),
            "stream": 0,
            "time_us": time_us,
            "frames": frames_of(event),
        }
        if fields.alloc_size > 0:
            living[fields.ptr] = entry
            actions = ("segment_alloc", "alloc")
        else:
            living.pop(fields.ptr, None)
            actions = ("free_requested", "free_completed", "segment_free")
        trace += [{"action": action} | entry for action in actions]
    return {"segments": [segment_of(block) for block in living.values()], "device_traces": [trace]}


def allocations(profiler: profile) -> Iterator[Any]:
    """Yield the events of the profiler at which memory of the CPU was taken (``alloc_size`` above
    0) or given back.
    """
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            yield event


def frames_of(event: Any) -> list[Record]:
    """Return what was running, from the innermost: operators by name, Python by file and line."""
    return list(_frames(event.parent))


def _frames(event: Any) -> Iterable[Record]:
    while event is not None:
        python = re.fullmatch(r"(.+)\((\d+)\): (.+)", event.name)
        filename, line, name = python.groups() if python else ("", 0, event.name)
        yield {"filename": filename, "line": int(line), "name": name}
        event = event.parent


def segment_of(block: Record) -> Record:
    """Return a block that is a segment of its own."""
    size = block["size"]
    inner = {
        "address": block["addr"],
        "size": size,
        "requested_size": size,
        "state": "active_allocated",
    }
    whole = {
        "device": 0,
        "address": block["addr"],
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": NO_POOL,
    }
    whole |= {
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
    }
    return whole | {"frames": block["frames"], "blocks": [inner | {"frames": block["frames"]}]}
