"""Measure available memory and the memory of this process, and find the largest size that fits.

This module asks Linux and the GPU's driver. It knows nothing of models and images.
"""

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from visionattn.cli.exit_codes import DoesNotFit
from visionattn.cli.tables import sized

MARGIN = 1.2
"""Tolerance of an estimate: work is refused above this multiple of the available memory."""
SHARE = 0.85
"""The share of the available memory that ``--batch-size auto`` fills."""
UNLIMITED = 1 << 60
"""A limit of a control group from this number of bytes on means no limit."""


def resident_bytes(field: str, process: int | str = "self") -> int:
    """Return a field of ``/proc/self/status`` in bytes: VmRSS is resident memory, VmHWM its peak,
    VmData allocated memory.
    """
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE).group(1))


def taken_bytes(device: torch.device) -> int:
    """Return the bytes that this process uses now: resident memory, or tensors on a GPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return resident_bytes("VmRSS") if sys.platform.startswith("linux") else 0


def memory_there_is(device: torch.device, processes: int = 1) -> int | None:
    """Return the bytes that this process may use in total, including its present memory; None if
    unknown.

    Args:
        device: a GPU, for its free memory; else the minimum of free RAM and the cgroup limits.
        processes: number of equal processes that share the machine; each has its own GPU.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if not sys.platform.startswith("linux"):
        return None
    left = [free for free in (free_of_machine(), free_of_groups()) if free is not None]
    return taken_bytes(device) + min(left) // processes


def free_of_machine(root: Path = Path("/")) -> int:
    """Return the bytes of RAM that are available without swapping."""
    text = (root / "proc/meminfo").read_text()
    return 1024 * int(re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.M).group(1))


def free_of_groups(root: Path = Path("/")) -> int | None:
    """Return the bytes that the control groups (v1 and v2) of this process leave; None if no group
    has a limit.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    left = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Parent groups limit a group, too. In a container its own group may be the top.
        group = top / name.lstrip("/")
        while group.is_relative_to(top):
            left.append(_left_in(group, *names))
            group = group.parent
    return min((free for free in left if free is not None), default=None)


def _left_in(group: Path, limit: str, usage: str, file_cache: str) -> int | None:
    """Return the free bytes of one control group; its file cache counts as free."""
    try:
        most = (group / limit).read_text().strip()
        used = int((group / usage).read_text())
        kept = re.search(rf"^{file_cache} (\d+)$", (group / "memory.stat").read_text(), re.M)
    except OSError:
        return None
    if most == "max" or int(most) >= UNLIMITED:
        return None
    return max(0, int(most) - used + (int(kept.group(1)) if kept else 0))


def largest_fit(fits: Callable[[int], bool]) -> int:
    """Return the largest integer from 1 on that ``fits``; 0 if none does.

    Args:
        fits: true up to some number and false beyond it; called about ``2 log2(result)`` times,
            never twice for a number.
    """
    low, high = 0, 16
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def sensible(count: int) -> int:
    """Round ``count`` (at least 1) down to a multiple of 8, or below 8 to a power of two."""
    return count // 8 * 8 if count >= 8 else 1 << (count.bit_length() - 1)


def clearly_above(expected: float | None, there: int | None, *, bounded: bool = False) -> bool:
    """Tell whether the expected memory clearly exceeds the available memory or, if ``bounded``, the
    given limit; False if unknown.
    """
    known = expected is not None and there is not None
    return known and expected > (1.0 if bounded else MARGIN) * there


def room_of(there: int, *, bounded: bool) -> str:
    """Describe the available memory or, if ``bounded``, the option that limits it."""
    return f"memory_gib is {there / 2**30:.3g}" if bounded else f"{sized(there)} are available"


def check_fits(
    expected: float | None,
    there: int | None,
    what: str,
    way_out: Callable[[], str],
    *,
    bounded: bool = False,
):
    """Refuse work that clearly needs more than the available memory.

    Args:
        expected: bytes that the work needs, possibly infinite; None if unknown.
        there: available bytes; None if unknown.
        what: name of the work, for the error.
        way_out: returns the advice for the error; called only for an error.
        bounded: ``there`` is the limit that ``memory_gib`` sets, not a measurement.

    Raises:
        DoesNotFit: one line.
    """
    if clearly_above(expected, there, bounded=bounded):
        assert expected is not None and there is not None
        room = sized(there)
        much = (
            f"about {sized(expected)} of memory, but {room_of(there, bounded=bounded)}"
            if expected < math.inf  # infinite: the work ran out of memory in a trial on the GPU
            else f"more than the available memory ({room})"
        )
        raise DoesNotFit(f"{what} would need {much}; {way_out()}")
