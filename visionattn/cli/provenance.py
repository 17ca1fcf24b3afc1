"""Record the provenance of measured numbers: machine, versions, date and command.

This module imports nothing that only reading data or training needs.
"""

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import visionattn


def provenance(device: torch.device, *, threads: int | None = None) -> dict[str, Any]:
    """Return device, processor, versions and commit; the commit is None outside a checkout.

    Args:
        device: where the number was measured.
        threads: torch's CPU threads; None: the setting of this process.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type}, {threads or torch.get_num_threads()} threads"
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    found = {"device": name, "torch": torch.__version__, "visionattn": visionattn.__version__}
    return found | {"commit": commit, "processor": processor()}


def provenance_of(
    device: str, command: Sequence[str], *, threads: int | None = None
) -> dict[str, Any]:
    """Return the provenance of a command's numbers: ``provenance``, threads, load, date, command.

    ``load`` is the mean number of runnable processes in the minute before: above 0, the machine was
    shared.

    Args:
        device: where the numbers are measured.
        command: the words after ``visionattn``: the subcommand and its flags.
        threads: threads of the measuring processes; None: the setting of this process.
    """
    found = provenance(torch.device(device), threads=threads)
    found["threads"] = threads or torch.get_num_threads()
    found["load"] = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    found["date"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return found | {"command": shlex.join(["visionattn", *command])}


def summary(provenance: dict[str, Any]) -> str:
    """Return provenance as one line of text."""
    commit = (provenance["commit"] or "unknown")[:9]
    device = provenance["device"].replace(", 1 threads", ", 1 thread")
    where = f"{provenance['processor']}; {device}; load average {provenance['load']:.1f}"
    return f"{where}; torch {provenance['torch']}; commit {commit}; {provenance['date']}"


def processor() -> str:
    """Name the processor, its units for bfloat16, and the cores of this process: ``Intel Xeon
    with AMX and AVX512-BF16, 2 cores``.
    """
    linux = sys.platform.startswith("linux")
    cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count()
    return f"{processor_name()}{bfloat16_units()}, {cores} cores"


def bfloat16_units() -> str:
    """Return the processor's bfloat16 units as text: `` with AMX and AVX512-BF16``."""
    has = {"AMX": torch.cpu._is_amx_tile_supported()}
    has["AVX512-BF16"] = torch.cpu._is_avx512_bf16_supported()
    names = " and ".join(name for name, here in has.items() if here)
    return f" with {names}" if names else ""


def processor_name() -> str:
    """Name the processor as Linux does; elsewhere as Python does, or by its architecture."""
    listed = Path("/proc/cpuinfo")
    text = listed.read_text() if listed.exists() else ""
    found = re.search(r"^model name[ \t]*:[ \t]*(\S.*?)[ \t]*$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()
