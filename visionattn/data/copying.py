"""Sequences that say everything twice, as images of one row: whoever writes them has to copy.

A sequence is ``0 w 0 w`` and zeros up to its end: 0 is the separator, and w is a random word of the
symbols 1 to 10, whose length is drawn too. Only the values of the second w can be known beforehand,
and only they count.

Source: Katharopoulos et al. 2020, section 4.1.1, after Kitaev et al. 2020. The shortest words are
those of the authors' code, a quarter of a sequence.
"""

import numpy as np

from visionattn.data.batches import Item, SampleKey
from visionattn.data.drawn import DrawnDataset

SYMBOLS = 10
"""Values are 0, the separator, and as many symbols from 1 on."""
SHORTEST = 4
"""Least length of a sequence: both separators and a symbol twice."""


def word_lengths(length: int) -> tuple[int, int]:
    """Return the least and the largest length of w in sequences of ``length`` values."""
    return length // 4, (length - 2) // 2


def draw_sequence(rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw a sequence.

    Args:
        rng: the source of all randomness.
        length: N, ``SHORTEST`` at least.

    Returns:
        Values from 0 to ``SYMBOLS``, and which of them count, 0 or 1; both uint8 ``[N]``.
    """
    shortest, longest = word_lengths(length)
    size = int(rng.integers(shortest, longest + 1))
    word = rng.integers(1, SYMBOLS + 1, size, dtype=np.uint8)
    values, counted = np.zeros((2, length), np.uint8)
    values[1 : size + 1] = word
    values[size + 2 : 2 * size + 2] = word
    counted[size + 2 : 2 * size + 2] = 1
    return values, counted


class CopyingDataset(DrawnDataset):
    """A sequence of its own for each key. Items have the mask of the values that count in place of
    a class.
    """

    STREAMS = {"train": 50, "validation": 51, "test": 52}
    SEEN = "as sequences of one row"

    def __getitem__(self, key: SampleKey) -> Item:
        rows, columns = key.geometry.img_size
        values, counted = draw_sequence(self.draws(key.index, key.epoch), columns)
        return Item(values[None, :, None], counted[None], (rows, columns))
