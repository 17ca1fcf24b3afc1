"""What a number depends on besides its configuration. It imports nothing that only reading data or training needs."""

import subprocess
from pathlib import Path
from typing import Any

import torch

import visionattn


def provenance(device: torch.device) -> dict[str, Any]:
    """What a number depends on besides the configuration: device, versions, commit (None outside a checkout)."""
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
    return {"device": name, "torch": torch.__version__, "visionattn": visionattn.__version__, "commit": commit}
