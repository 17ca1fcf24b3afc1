"""Which numbers options of the data may be, whatever the data set. It imports no reader of images,
as configurations are checked where none is installed.
"""

import os
from math import isfinite

from visionattn.data.data_config import DataConfig

LARGEST = 1e9
"""No rate, weight or bound of a training is above it: such a number is a slip."""
FEW_WORKERS, WORKERS_PER_CORE = 64, 16
"""Processes that load images: so many are allowed on any machine, and so many for each core."""


def check_workers(count: int, key: str) -> None:
    """Raise ValueError where a count of processes would bring the machine to a stand."""
    most = max(FEW_WORKERS, WORKERS_PER_CORE * (os.cpu_count() or 1))
    if count < 0:
        raise ValueError(f"{key} must be at least 0, got {count}")
    if count > most:
        raise ValueError(f"{key} must be at most {most} on {os.cpu_count()} cores, got {count}")


def check_signs(positive: dict[str, float | None], not_negative: dict[str, float | None]) -> None:
    """Raise ValueError for a number, by its option, that is not finite, below 0, or 0 among those
    that must be above it, and for a fraction above ``LARGEST``; None is no number.
    """
    for key, value in (positive | not_negative).items():
        low = "above" if key in positive else "at least"
        if value is not None and (
            not isfinite(value) or value < 0 or (value == 0 and key in positive)
        ):
            raise ValueError(f"{key} must be {low} 0, got {value}")
        if isinstance(value, float) and value > LARGEST:
            raise ValueError(f"{key} must be at most {LARGEST:.0e}, got {value}")


def check_ranges(config: DataConfig) -> None:
    """Check what values alone can be wrong, whatever the data set.

    Raises:
        ValueError: one line with the key, what it may be, and what it is.
    """
    positive = {"data.batch_patches": config.batch_patches}
    positive |= {
        f"data.img_size_choices[{i}]": size for i, size in enumerate(config.img_size_choices or [])
    }
    check_signs(positive, {})
    check_workers(config.workers, "data.workers")
    if not 0 < config.val_fraction < 1:
        raise ValueError(f"data.val_fraction must be in (0, 1), got {config.val_fraction}")
