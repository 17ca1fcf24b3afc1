"""Data sets whose samples are drawn on the fly, each from random numbers of its own."""

from typing import ClassVar

import numpy as np
from torch.utils.data import Dataset

from visionattn.data.embedded import Split
from visionattn.data.geometry import Geometry, pixels

TEST_SEED = 20


class DrawnDataset(Dataset):
    """Samples that seed, split, index and epoch decide. Those of the test split are the same for
    every seed.

    Args:
        split: which samples; those of different splits share no draw.
        length: how many there are.
        seed: of all draws but those of the test split.
    """

    STREAMS: ClassVar[dict[Split, int]]
    """The stream of random numbers of each split, see ``batches.py``."""
    SEEN: ClassVar[str] = ""
    """How a model sees the samples, where the geometry would not tell: none of them is cut."""

    def __init__(self, split: Split, length: int, seed: int):
        self.split, self.length = split, length
        self.seed = TEST_SEED if split == "test" else seed

    def __len__(self):
        return self.length

    def draws(self, index: int, epoch: int) -> np.random.Generator:
        """Return the random numbers of a sample."""
        entropy = np.random.SeedSequence((self.seed, self.STREAMS[self.split], epoch, index))
        return np.random.Generator(np.random.SFC64(entropy))


def seen_as(dataset: Dataset, geometry: Geometry) -> str:
    """Say in words for people what becomes of the images of a data set."""
    seen = getattr(dataset, "SEEN", "")
    return f"{seen}, {pixels(geometry.img_size)}" if seen else geometry.describe()
