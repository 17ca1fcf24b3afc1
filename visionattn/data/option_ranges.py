"""Ranges of numbers in data options, for any dataset. Imports no image reader, because
configurations are checked without one too.
"""

import os
import re
from collections.abc import Sequence
from math import inf, isfinite

from visionattn.cli.untrusted import refuse
from visionattn.data.data_config import DataConfig

LARGEST = 1e9
"""Maximum rate, weight or limit of a training; a larger number is a mistake."""
FEW_WORKERS, WORKERS_PER_CORE = 64, 16
"""Maximum number of loading processes: on any machine, and per core."""


def check_workers(count: int, key: str) -> None:
    """Raise ValueError for a number of processes that would overload the machine."""
    most = max(FEW_WORKERS, WORKERS_PER_CORE * (os.cpu_count() or 1))
    refuse(
        (count < 0, f"{key} must be at least 0, got {count}"),
        (count > most, f"{key} must be at most {most} on {os.cpu_count()} cores, got {count}"),
    )


def check_least(least: float, **numbers: float | Sequence[float] | None) -> None:
    """Raise ValueError for an option with a number below ``least``; None is allowed."""
    for name, given in numbers.items():
        for number in given if isinstance(given, Sequence) else [given]:
            if number is not None and not least <= number < inf:
                raise ValueError(f"{name} must be at least {least:g}, got {number}")


def check_signs(positive: dict[str, float | None], not_negative: dict[str, float | None]) -> None:
    """Raise ValueError for options out of range.

    A number must be finite and at least 0, and above 0 in ``positive``; a float must not exceed
    ``LARGEST``. None is skipped.
    """
    for key, value in (positive | not_negative).items():
        low, number = "above" if key in positive else "at least", 1 if value is None else value
        refuse(
            (
                not isfinite(number) or number < 0 or (number == 0 and key in positive),
                f"{key} must be {low} 0, got {value}",
            ),
            (
                isinstance(number, float) and number > LARGEST,
                f"{key} must be at most {LARGEST:.0e}, got {value}",
            ),
        )


def check_ranges(config: DataConfig) -> None:
    """Check single values, for any dataset.

    Raises:
        ValueError: one line with the key, the allowed values and the given value.
    """
    positive = {"data.batch_patches": config.batch_patches, "data.crops": config.crops}
    positive |= {
        f"data.img_size_choices[{i}]": size for i, size in enumerate(config.img_size_choices or [])
    }
    if config.img_size_choices == []:
        raise ValueError("data.img_size_choices is empty; pass sizes, or remove it")
    check_signs(positive, {})
    around, share = config.crop_around, config.val_fraction
    refuse(
        (not 0 <= around <= 1, f"data.crop_around must be in [0, 1], got {around}"),
        (not 0 < share < 1, f"data.val_fraction must be in (0, 1), got {share}"),
    )
    check_workers(config.workers, "data.workers")
    fold_of(config.fold)
    try:
        re.compile(config.group_from or "")
    except re.error as error:
        raise ValueError(
            f"data.group_from {config.group_from} is no regular expression: {error}"
        ) from error


def fold_of(text: str | None) -> tuple[int, int] | None:
    """Return number and count of ``data.fold``, such as ``1/5``; None without folds.

    Raises:
        ValueError: it is not a fold; one line.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text, re.ASCII)
    number, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= count or count < 2:
        raise ValueError(
            f"data.fold must be k/n with k from 1 to n and n at least 2, e.g. 1/5, got {text}"
        )
    return number, count


def fold_name(fold: str | None) -> str:
    """Return the part of a run's name that names its fold, ``_fold1of5``; empty without folds."""
    return "" if fold is None else f"_fold{fold.replace('/', 'of')}"
