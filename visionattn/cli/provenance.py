"""What a number depends on besides its configuration. It imports nothing that only reading data or
training needs.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import visionattn


def provenance(device: torch.device) -> dict[str, Any]:
    """What a number depends on besides its settings: device, processor, versions, commit.

    The commit is None outside a checkout.
    """
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type}, {torch.get_num_threads()} threads"
    )
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    found = {"device": name, "torch": torch.__version__, "visionattn": visionattn.__version__}
    return found | {"commit": commit, "processor": processor()}


def processor() -> str:
    """Name of the processor, and how many cores this process may use: ``AMD EPYC, 2 cores``."""
    linux = sys.platform.startswith("linux")
    cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count()
    return f"{processor_name()}, {cores} cores"


def processor_name() -> str:
    """The processor as Linux names it; elsewhere what Python knows, at least the architecture."""
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        lines = listed.read_text().splitlines()
        names = [text.partition(":")[2].strip() for text in lines if text.startswith("model name")]
        if names and names[0]:
            return names[0]
    return platform.processor() or platform.machine()
