"""Available memory, the memory of this process, and the largest size that fits.

This module asks Linux and the GPU's driver. It knows nothing of models and images.
"""

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from visionattn.cli.ends import DoesNotFit
from visionattn.cli.tables import sized

MARGIN = 1.2
"""Error of an estimate: expected memory above this multiple of the available memory does not fit.
"""
SHARE = 0.85
"""The share of the memory there is that ``--batch-size auto`` fills."""
UNLIMITED = 1 << 60
"""From here on, a limit of a control group stands for none."""


def resident_bytes(field: str, process: int | str = "self") -> int:
    """Return a field of ``/proc/self/status``: VmRSS and VmHWM are resident now and at most, VmData
    is asked for.
    """
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE).group(1))


def taken_bytes(device: torch.device) -> int:
    """Return the memory of this process now: resident memory, or tensors on a GPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return resident_bytes("VmRSS") if sys.platform.startswith("linux") else 0


def memory_there_is(device: torch.device, processes: int = 1) -> int | None:
    """Return the bytes that this process may take in all, including its present memory; None if
    unknown.

    Args:
        device: of a GPU its free memory counts, else the free memory of the machine and of the
            control groups, whichever is less.
        processes: how many like this one share the machine; a GPU is one process's own.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if not sys.platform.startswith("linux"):
        return None
    left = [free for free in (free_of_machine(), free_of_groups()) if free is not None]
    return taken_bytes(device) + min(left) // processes if left else None


def free_of_machine(root: Path = Path("/")) -> int | None:
    """Return the bytes that the machine can give without swapping."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", (root / "proc/meminfo").read_text(), re.M)
    except OSError:
        return None
    return 1024 * int(found.group(1)) if found else None


def free_of_groups(root: Path = Path("/")) -> int | None:
    """Return the bytes that the control groups of this process leave, of both versions; None where
    no group has a limit.
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
        # A group is limited by those around it; in a container its own may be the top.
        group = top / name.lstrip("/")
        while group.is_relative_to(top):
            left.append(_left_in(group, *names))
            group = group.parent
    return min((free for free in left if free is not None), default=None)


def _left_in(group: Path, limit: str, usage: str, file_cache: str) -> int | None:
    """Return the free bytes of one control group; its cache of files counts as free."""
    try:
        most = (group / limit).read_text().strip()
        used = int((group / usage).read_text())
        kept = re.search(rf"^{file_cache} (\d+)$", (group / "memory.stat").read_text(), re.M)
    except OSError:
        return None
    if most == "max" or int(most) >= UNLIMITED:
        return None
    return max(0, int(most) - used + (int(kept.group(1)) if kept else 0))


def largest_fit(fits: Callable[[int], bool], start: int = 16, most: int | None = None) -> int:
    """Return the largest whole number from 1 for which ``fits`` holds; 0 where it holds for none.

    Args:
        fits: true up to some number and false beyond it; called some ``2 log2`` of the result
            times, never twice for a number.
        start: the first number to try; it is doubled while it fits.
        most: no number above it is asked for.
    """
    low, high = 0, start if most is None else min(start, most)
    while high and fits(high):
        if high == most:
            return high
        low, high = high, 2 * high if most is None else min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def sensible(count: int) -> int:
    """Return the largest number up to ``count``, 1 or more, that is a power of two, or above 8 a
    multiple of 8.
    """
    return count // 8 * 8 if count >= 8 else 1 << (count.bit_length() - 1)


def clearly_above(expected: float | None, there: int | None, *, bounded: bool = False) -> bool:
    """Tell whether something clearly takes more memory than there is, or, if ``bounded``, more than
    is allowed; no if unknown.
    """
    known = expected is not None and there is not None
    return known and expected > (1.0 if bounded else MARGIN) * there


def room_of(there: int, *, bounded: bool) -> str:
    """Say how much memory there is, or, if ``bounded``, which option allows so much."""
    return f"memory_gib is {there / 2**30:.3g}" if bounded else f"there are {sized(there)}"


def check_fits(
    expected: float | None,
    there: int | None,
    what: str,
    way_out: Callable[[], str],
    *,
    bounded: bool = False,
):
    """Refuse work that clearly takes more than the available memory.

    Args:
        expected: bytes, which may be infinite; None if unknown.
        there: likewise.
        what: the work, for the error.
        way_out: says what would fit; called where it does not.
        bounded: ``there`` is what ``memory_gib`` allows, and no estimate.

    Raises:
        DoesNotFit: one line.
    """
    if clearly_above(expected, there, bounded=bounded):
        assert expected is not None and there is not None
        room = sized(there)
        much = (
            f"about {sized(expected)} of memory, and {room_of(there, bounded=bounded)}"
            if expected < math.inf  # a GPU on which it was tried tells no more
            else f"more than the {room} of memory that there are"
        )
        raise DoesNotFit(f"{what} would take {much}; {way_out()}")
