"""Data sets whose samples are drawn on the fly, each from random numbers of its own."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from torch.utils.data import Dataset

from visionattn.data.batches import Item, SampleKey
from visionattn.data.geometry import Geometry, pixels
from visionattn.data.images import see_array

TEST_SEED = 20
Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class DrawnArgs:
    """What ``data.args`` says of a drawn data set."""

    train_images: int = 20_000
    """Images drawn per epoch."""
    eval_images: int = 2_000
    """Images of the validation split and of the test split, each."""

    def __post_init__(self) -> None:
        for key in ("train_images", "eval_images"):
            if getattr(self, key) < 1:
                raise ValueError(f"data.args.{key} must be above 0, got {getattr(self, key)}")


class DrawnDataset(Dataset):
    """Samples that seed, split, index and epoch decide. Those of the test split are the same for
    every seed.

    Args:
        split: which samples; those of different splits share no draw.
        length: how many there are.
        seed: of all draws but those of the test split.
        masked: each pixel has a class, not the image.
    """

    STREAMS: ClassVar[dict[Split, int]]
    """The stream of random numbers of each split, see ``batches.py``."""
    SEEN: ClassVar[str] = ""
    """How a model sees the samples, where the geometry would not tell: none of them is cut."""

    def __init__(self, split: Split, length: int, seed: int, *, masked: bool = False):
        self.split, self.length, self.masked = split, length, masked
        self.seed = TEST_SEED if split == "test" else seed

    def __len__(self):
        return self.length

    def draws(self, index: int, epoch: int) -> np.random.Generator:
        """Return the random numbers of a sample."""
        entropy = np.random.SeedSequence((self.seed, self.STREAMS[self.split], epoch, index))
        return np.random.Generator(np.random.SFC64(entropy))

    def draw(self, key: SampleKey, *, masked: bool = False) -> Any:
        """Draw the image of a key, as large as its geometry asks, and ``masked`` its mask."""
        raise NotImplementedError

    def __getitem__(self, key: SampleKey) -> Item:
        drawn = self.draw(key, masked=self.masked)
        label = drawn.label if drawn.mask is None else drawn.mask
        return see_array(drawn.image, label, key, self.seed)


def seen_as(dataset: Dataset, geometry: Geometry) -> str:
    """Say in words for people what becomes of the images of a data set."""
    seen = getattr(dataset, "SEEN", "")
    return f"{seen}, {pixels(geometry.img_size)}" if seen else geometry.describe()
