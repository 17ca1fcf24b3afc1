"""Dropout of attention, with one meaning in every form: whole rows of the values are dropped.

Single weights cannot be dropped in linear time. A row of v that is dropped adds nothing to the sums
of values, and the others are scaled up by ``1 / (1 - p)``; mass and counts stay as they are, so the
expected output is that without dropout.
"""

import torch
from torch import Tensor


def check_value_drop(value_drop: float, generator: torch.Generator | None) -> None:
    """Raise ValueError unless ``0 <= value_drop < 1``, or for a generator that is none or has
    nothing to draw.
    """
    if not isinstance(value_drop, int | float) or not 0 <= value_drop < 1:
        raise ValueError(f"value_drop: wanted a probability in [0, 1), got {value_drop!r}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator: wanted a torch.Generator, got {type(generator).__name__}")
    if generator is not None and value_drop == 0:
        raise ValueError(
            "generator draws which values to drop, and value_drop is 0: leave it out, or set "
            "value_drop"
        )


def drop_values(v: Tensor, value_drop: float, generator: torch.Generator | None = None) -> Tensor:
    """``v [B, h, M, e]`` with each row dropped with probability ``value_drop``, the others times
    ``1 / (1 - value_drop)``.
    """
    if value_drop == 0:
        return v
    shape, options = (*v.shape[:3], 1), dict(device=v.device, dtype=torch.float32)
    # A compiler of varying sizes cannot take generator=None.
    uniform = (
        torch.rand(shape, **options)
        if generator is None
        else torch.rand(shape, generator=generator, **options)
    )
    return v * (uniform >= value_drop).to(v.dtype).div(1 - value_drop)
