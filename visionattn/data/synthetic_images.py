"""Datasets whose samples are generated on request from their own random numbers, masks of generated
images, and sequences for the copying task.

A mask is uint8 ``[height, width]``, of the size of its image: ``BACKGROUND``, ``DISTRACTOR``, or
``FIRST_CLASS`` plus the index of the class. The code that draws an image also draws its mask.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from visionattn.data.batches import Item, SampleKey
from visionattn.data.geometry import Box, Geometry, Size, View, pixels
from visionattn.data.images import cut_mask, fill, see_array
from visionattn.data.option_ranges import check_signs

TEST_SEED = 20
Split = Literal["train", "validation", "test"]
BACKGROUND, DISTRACTOR, FIRST_CLASS = 0, 1, 2
INK = 64
"""Pixels of a glyph or of a mark above this value are ink: a quarter of 255."""
INKED_SHARE = 1 / 16
"""Minimum inked share of a patch that is not background."""
SYMBOLS = 10
"""Number of symbols; values are 0, the separator, and symbols from 1 on."""
SHORTEST = 4
"""Minimum length of a sequence: both separators, and a symbol twice."""


@dataclass(frozen=True)
class DrawnArgs:
    """Settings of a synthetic dataset in ``data.args``."""

    train_images: int = 20_000
    """Generated images per epoch."""
    eval_images: int = 2_000
    """Images of the validation split and of the test split, each."""

    def __post_init__(self) -> None:
        counts = {"train_images": self.train_images, "eval_images": self.eval_images}
        check_signs({f"data.args.{key}": count for key, count in counts.items()}, {})


class DrawnImage(NamedTuple):
    """A generated image."""

    image: np.ndarray
    """uint8, ``[height, width, 1]``."""
    label: int | None
    box: Box
    """Place of the digit or mark that determines the class."""
    mask: np.ndarray | None = None
    """uint8 ``[height, width]``; None if not requested."""


class DrawnDataset(Dataset):
    """Samples determined by seed, split, index and epoch. Test samples are the same for every seed.

    Args:
        split: which samples; different splits share no random numbers.
        length: number of samples.
        seed: seed of all training and validation samples.
        masked: labels are classes of pixels, not of the image.
    """

    STREAMS: ClassVar[dict[Split, int]]
    """The random stream of each split, see ``batches.py``."""
    SEEN: ClassVar[str] = ""
    """Description of the samples if the geometry does not describe them: they are not cropped."""

    def __init__(self, split: Split, length: int, seed: int, *, masked: bool = False):
        self.split, self.length, self.masked = split, length, masked
        self.seed = TEST_SEED if split == "test" else seed

    def __len__(self):
        return self.length

    def draws(self, index: int, epoch: int) -> np.random.Generator:
        """Return the random generator of a sample."""
        entropy = np.random.SeedSequence((self.seed, self.STREAMS[self.split], epoch, index))
        return np.random.Generator(np.random.SFC64(entropy))

    def draw(self, key: SampleKey, *, masked: bool = False) -> DrawnImage:
        """Generate the image of a key at the size of its geometry, and with ``masked`` its mask."""
        raise NotImplementedError

    def __getitem__(self, key: SampleKey) -> Item:
        drawn = self.draw(key, masked=self.masked)
        label = drawn.label if drawn.mask is None else drawn.mask
        return see_array(drawn.image, label, key, self.seed)


def seen_as(dataset: Dataset, geometry: Geometry) -> str:
    """Return the preprocessing of a dataset in words."""
    seen = getattr(dataset, "SEEN", "")
    return f"{seen}, {pixels(geometry.img_size)}" if seen else geometry.describe()


def value_names(class_names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the meaning of each value of a mask, from 0 on."""
    return ("background", "distractor", *class_names)


def paint(
    mask: np.ndarray, top: int, left: int, ink: np.ndarray, value: int, cover: np.ndarray | None
) -> None:
    """Set the inked pixels of a part to a value in the mask.

    Args:
        mask: mask of the whole image; changed in place.
        top, left: start of the part.
        ink: ink of the part, uint8 ``[h, w]``.
        value: the mask value.
        cover: the covered area, uint8 ``[h, w]``, which hides everything below: where it is above
            127 and not inked, the mask becomes background. None: the part covers nothing.
    """
    place = mask[top : top + ink.shape[0], left : left + ink.shape[1]]
    if cover is not None:
        place[cover > 127] = BACKGROUND
    place[ink > INK] = value


def see_mask(mask: np.ndarray, view: View) -> np.ndarray:
    """Resize a mask to the model's view, as ``images.fill`` fits the image: nearest values, and
    background for absent pixels.
    """
    return fill(cut_mask(mask, view)[:, :, None], view)[:, :, 0]


def patch_labels(mask: np.ndarray, grid: Size, values: int) -> np.ndarray:
    """Return the label of each patch: its most frequent inked value (ties: the smallest) if at
    least a sixteenth of its pixels is inked, else background.

    Args:
        mask: ``[height, width]``, in whole patches.
        grid: number of rows and columns of patches.
        values: number of possible mask values.

    Returns:
        int64 ``[rows, columns]``.

    Raises:
        ValueError: the mask is not a whole number of patches.
    """
    (rows, columns), (height, width) = grid, mask.shape
    if height % rows or width % columns:
        raise ValueError(
            f"expected whole patches in a grid of {rows} x {columns}, got an image of {height} x "
            f"{width} pixels; choose another size, or fit pad, crop or stretch"
        )
    patches = mask.reshape(rows, height // rows, columns, width // columns)
    counts = np.stack([(patches == value).sum((1, 3)) for value in range(1, values)])
    inked = counts.sum(0) >= INKED_SHARE * (height // rows) * (width // columns)
    return np.where(inked, 1 + counts.argmax(0), BACKGROUND)


def draw_sequence(rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``0 w 0 w`` and zeros up to the end: 0 is the separator, and w a random word of
    symbols from 1 on, of random length.

    Only the values of the second w are predictable, and only they count.

    Source: Katharopoulos et al. 2020, section 4.1.1, after Kitaev et al. 2020. The shortest words,
    a quarter of a sequence, are as in the authors' code.

    Args:
        rng: the source of all randomness.
        length: N, at least ``SHORTEST``.

    Returns:
        Values from 0 to ``SYMBOLS``, and a mask of the values that count, 0 or 1; both uint8
        ``[N]``.
    """
    size = int(rng.integers(length // 4, (length - 2) // 2 + 1))
    word = rng.integers(1, SYMBOLS + 1, size, dtype=np.uint8)
    values, counted = np.zeros((2, length), np.uint8)
    values[1 : size + 1] = word
    values[size + 2 : 2 * size + 2] = word
    counted[size + 2 : 2 * size + 2] = 1
    return values, counted


class CopyingDataset(DrawnDataset):
    """The copying task: one sequence per key, as an image of one row. Items have the mask of the
    values that count in place of a class.
    """

    STREAMS = {"train": 50, "validation": 51, "test": 52}
    SEEN = "sequences of one row"

    def __getitem__(self, key: SampleKey) -> Item:
        rows, columns = key.geometry.img_size
        values, counted = draw_sequence(self.draws(key.index, key.epoch), columns)
        return Item(values[None, :, None], counted[None], (rows, columns))
