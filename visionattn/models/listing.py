"""How tensors are listed for people."""

from torch import Tensor


def shorten(names: list[str], most: int = 12) -> str:
    """Join names in a line; those that differ only in the number of the block become one:
    ``blocks.{0-11}.attn.table``.
    """
    groups: dict[str, list[int]] = {}
    for name in names:
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        key = name if number is None else ".".join([*parts[:number], "*", *parts[number + 1 :]])
        groups.setdefault(key, []).append(-1 if number is None else int(parts[number]))
    written = [
        key
        if len(numbers) == 1 and numbers[0] < 0
        else key.replace(
            "*", str(numbers[0]) if len(numbers) == 1 else f"{{{min(numbers)}-{max(numbers)}}}", 1
        )
        for key, numbers in groups.items()
    ]
    return ", ".join(written[:most]) + (
        f" and {len(written) - most} more" if len(written) > most else ""
    )


def shape(tensor: Tensor) -> str:
    """Write the shape of a tensor, e.g. ``192x3x16x16``."""
    return "x".join(map(str, tensor.shape))
