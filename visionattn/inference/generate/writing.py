"""Images that a ``PixelDecoder`` writes value by value: what is drawn, and how writing goes on.

This module owns random numbers, the choice of levels and the state of a batch that is being
written. It knows no files of images.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from visionattn.data.geometry import Size
from visionattn.models.pixel_decoder import PixelDecoder

BLOCK = 1024
"""Values of an image whose random numbers are drawn at once; a multiple of the four numbers that
the generator makes of a count.
"""


@dataclass(frozen=True)
class Asked:
    """Images of one size that are to be written together.

    Args:
        size: their height and width in pixels.
        numbers: of each image its number, and that of its completion, 0 for the first.
        labels: their classes, int64 ``[B]``; None for a model that is not conditioned.
        given: their first values in raster order, int64 ``[B, t]``; t may be 0.
    """

    size: Size
    numbers: tuple[tuple[int, int], ...]
    labels: Tensor | None
    given: Tensor


def uniform(seed: int, image: int, copy: int, start: int, count: int) -> np.ndarray:
    """Return random numbers of an image, which depend on nothing but the arguments: float64
    ``[count]`` in [0, 1), those of its values from number ``start`` on.

    Source: Salmon et al. 2011, Philox 4x64-10, keyed by seed and image and counting values; 53 bits
    of each number that it makes.
    """
    key = np.array([seed, image], np.uint64)
    counter = np.array([start // 4, 0, 0, copy], np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(start % 4 + count)
    return (raw[start % 4 :] >> np.uint64(11)) * 2.0**-53


def choose(logits: Tensor, temperature: float, numbers: Tensor) -> Tensor:
    """Choose a level for each image, where its number falls among the summed probabilities.

    Args:
        logits: log-probabilities up to a constant, float64 ``[B, levels]``.
        temperature: what they are divided by; 0 takes the most probable level, the lowest of
            several.
        numbers: float64 ``[B]`` in [0, 1).

    Returns:
        int64 ``[B]``.
    """
    if temperature == 0:
        return logits.argmax(1)
    # The largest is 0 before the division: however low the temperature, nothing overflows.
    relative = (logits - logits.amax(1, keepdim=True)) / temperature
    up_to = relative.exp().cumsum(1)
    places = numbers[:, None] * up_to[:, -1:]
    return torch.searchsorted(up_to, places, right=True)[:, 0].clamp(max=logits.shape[1] - 1)


class Writing:
    """Images that are being written. Its methods are called in ``torch.inference_mode``.

    Attributes:
        values: int64 ``[B, N]``, the values in raster order; 0 where there are none yet.
        nats: float64 ``[B, 2]``: minus the log-probabilities that the model gives, summed over the
            given values and over the written ones, whatever the temperature.
    """

    def __init__(self, model: PixelDecoder, asked: Asked, *, temperature: float, seed: int):
        """Begin with the first value.

        Args:
            model: in eval mode.
            asked: the images; tensors are on the device of the model.
            temperature: see ``choose``.
            seed: see ``uniform``.
        """
        self.model, self.asked = model, asked
        self.temperature, self.seed = temperature, seed
        self._state = model.begin(len(asked.numbers), asked.size, asked.labels)
        shape, device = (len(asked.numbers), self._state.values), asked.given.device
        self.values = torch.zeros(shape, dtype=torch.int64, device=device)
        self.nats = torch.zeros(shape[0], 2, dtype=torch.float64, device=device)
        self._drawn = -1, torch.empty(0)

    @property
    def position(self) -> int:
        """The number of values that are there."""
        return self._state.position

    @property
    def is_done(self) -> bool:
        """Whether the images are whole."""
        return self.position == self._state.values

    def step(self) -> None:
        """Take or write the next value of each image.

        Raises:
            ValueError: the outputs of the model are not finite; it is raised within ``BLOCK``
                values.
        """
        place = self.position
        before = self.values[:, place - 1] if place else None
        logits = self.model.step(before, self._state).double()
        is_written = place >= self.asked.given.shape[1]
        if is_written:
            chosen = choose(logits, self.temperature, self._numbers(place))
        else:
            chosen = self.asked.given[:, place]
        likelihoods = logits.log_softmax(1).gather(1, chosen[:, None])
        self.nats[:, int(is_written)] -= likelihoods[:, 0]
        self.values[:, place] = chosen
        # To look at the sums takes as long on a GPU as a step.
        if (place % BLOCK == 0 or self.is_done) and not self.nats.isfinite().all():
            raise ValueError(f"the outputs of the model are not finite by value {place + 1}")

    def _numbers(self, place: int) -> Tensor:
        """Return the random numbers of a value, float64 ``[B]``."""
        block, within = divmod(place, BLOCK)
        if self._drawn[0] != block:
            count = min(BLOCK, self._state.values - block * BLOCK)
            rows = [uniform(self.seed, *each, block * BLOCK, count) for each in self.asked.numbers]
            drawn = torch.from_numpy(np.stack(rows, 1)).to(self.values.device)
            self._drawn = block, drawn
        return self._drawn[1][within]

    def tensors(self) -> dict[str, Tensor]:
        """Return all that ``restore`` needs to go on with the same bits, on the CPU; of whole
        images without the state.
        """
        held = {"values": self.values[:, : self.position].to(torch.int32), "nats": self.nats}
        if not self.is_done:
            held |= {f"state.{name}": value for name, value in self._state.tensors().items()}
        return {name: value.cpu().contiguous() for name, value in held.items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Go on where ``tensors`` was called.

        Raises:
            ValueError: they are of other images or of another model.
        """
        missing = {"values", "nats"} - set(tensors)
        if missing or tensors["nats"].shape != self.nats.shape:
            raise ValueError("values or sums are missing, or of other images")
        values, device = tensors["values"], self.values.device
        count = values.shape[1] if values.ndim == 2 else -1
        if len(values) != len(self.values) or not 0 <= count <= self._state.values:
            raise ValueError(f"values are {list(values.shape)}")
        if values.is_floating_point() or (count and not 0 <= values.min() <= values.max()):
            raise ValueError("values are no levels")
        if count and int(values.max()) >= self.model.levels:
            raise ValueError("values are no levels")
        if count < self._state.values:
            state = {
                name.removeprefix("state."): value.to(device)
                for name, value in tensors.items()
                if name.startswith("state.")
            }
            # Before anything is made of a size that a file says.
            if "size" not in state or state["size"].tolist() != list(self.asked.size):
                raise ValueError("the state is missing, or of images of another size")
            self._state = self.model.restore(state)
            if self._state.position != count or len(self.values) != len(tensors["values"]):
                raise ValueError(f"the state is at value {self._state.position}, not at {count}")
        else:
            self._state.position = count
        self.values[:, :count] = values.to(device)
        self.nats.copy_(tensors["nats"])
