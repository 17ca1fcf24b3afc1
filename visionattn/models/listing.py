"""How tensors are listed for people."""

from torch import Tensor


def shorten(names: list[str], most: int = 12) -> str:
    """Join names in a line; those that differ only in the number of the block become one:
    ``blocks.{0-8,10}.attn.table``.
    """
    groups: dict[str, list[int]] = {}
    for name in names:
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        key = name if number is None else ".".join([*parts[:number], "*", *parts[number + 1 :]])
        groups.setdefault(key, []).extend([] if number is None else [int(parts[number])])
    written = [key.replace("*", _ranges(numbers), 1) for key, numbers in groups.items()]
    return ", ".join(written[:most]) + (
        f" and {len(written) - most} more" if len(written) > most else ""
    )


def _ranges(numbers: list[int]) -> str:
    """Write whole numbers as ranges, ``{0-8,10}``; one number alone as it is."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    written = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"{{{written}}}" if len(numbers) > 1 else written


def shape(tensor: Tensor) -> str:
    """Write the shape of a tensor, e.g. ``192x3x16x16``."""
    return "x".join(map(str, tensor.shape))
