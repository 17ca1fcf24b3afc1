"""Sampling of images from a ``PixelDecoder``: random numbers, the choice of levels, and the loop
over values.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from visionattn.data.geometry import Size
from visionattn.models.pixel_decoder import PixelDecoder

BLOCK = 1024
"""Number of values of an image whose random numbers are drawn at once, and after which its outputs
are checked.
"""


def numbers_of(seed: int, image: int, copy: int) -> np.random.Generator:
    """Return a generator of random numbers for an image that depends only on the arguments.

    Source: Salmon et al. 2011, Philox 4x64-10, keyed by seed and image.
    """
    key, counter = np.array([seed, image], np.uint64), np.array([0, 0, 0, copy], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def choose(logits: Tensor, temperature: float, numbers: Tensor) -> Tensor:
    """Choose a level for each image by inverting the cumulative probabilities at its random number.

    Args:
        logits: log-probabilities up to a constant, float64 ``[B, levels]``.
        temperature: divides them; 0: choose the most probable level, the lowest of several.
        numbers: float64 ``[B]`` in [0, 1).

    Returns:
        int64 ``[B]``.
    """
    if temperature == 0:
        return logits.argmax(1)
    # The largest is 0 before the division, so no temperature overflows.
    relative = (logits - logits.amax(1, keepdim=True)) / temperature
    up_to = relative.exp().cumsum(1)
    places = numbers[:, None] * up_to[:, -1:]
    return torch.searchsorted(up_to, places, right=True)[:, 0].clamp(max=logits.shape[1] - 1)


@torch.inference_mode()
def sample_values(
    model: PixelDecoder,
    size: Size,
    numbers: Sequence[tuple[int, int]],
    labels: Tensor | None,
    given: Tensor,
    *,
    temperature: float,
    seed: int,
    stepped: Callable[[], object] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Generate images of one size together.

    Args:
        model: in eval mode.
        size: height and width in pixels.
        numbers: index of each image and of its completion, for ``numbers_of``.
        labels: classes, int64 ``[B]``; None for an unconditioned model.
        given: the first values in raster order, int64 ``[B, t]``; t may be 0.
        temperature: see ``choose``.
        seed: see ``numbers_of``.
        stepped: called after each value.

    Returns:
        The values in raster order, int64 ``[B, N]``; and the negative log-probabilities under the
        model at temperature 1, summed over the given and over the generated values, float64
        ``[B, 2]``.

    Raises:
        ValueError: the outputs of the model are not finite; raised within ``BLOCK`` values.
    """
    device = given.device
    state = model.begin(len(numbers), size, labels)
    values = torch.zeros(len(numbers), state.values, dtype=torch.int64, device=device)
    nats = torch.zeros(len(numbers), 2, dtype=torch.float64, device=device)
    chosen, randoms = None, [numbers_of(seed, *each) for each in numbers]
    for place in range(state.values):
        if place % BLOCK == 0:
            count = min(BLOCK, state.values - place)
            uniforms = nats.new_tensor(np.stack([each.random(count) for each in randoms], 1))
        logits = model.step(chosen, state).double()
        is_new = place >= given.shape[1]
        drawn = uniforms[place % BLOCK]
        chosen = choose(logits, temperature, drawn) if is_new else given[:, place]
        nats[:, int(is_new)] -= logits.log_softmax(1).gather(1, chosen[:, None])[:, 0]
        values[:, place] = chosen
        # On a GPU, reading the sums takes as long as a step.
        is_last = place == state.values - 1
        if (place % BLOCK == 0 or is_last) and not nats.isfinite().all():
            raise ValueError(
                f"the outputs of the model are not finite at value {place + 1} or before; try "
                "--amp none"
            )
        stepped()
    return values, nats
