"""Pieces of drawn pages at the pages' own scale, for models that write images.

A page that is shrunk to some tens of pixels shows nothing of its text, so pieces are cut out of
pages instead. ``documents.py`` draws the pages.
"""

import numpy as np
from torch.utils.data import Dataset

from visionattn.data.batches import Item, SampleKey
from visionattn.data.documents import draw_page
from visionattn.data.embedded import Split
from visionattn.data.images import see_array

SMALLEST_PAGE_PX = 128
"""Pages have sides of at least so many pixels."""
SIDES = 3
"""Sides of a page over those of a piece, where that is more."""
LARGEST_PIECE_PX = 256

_STREAM = {"train": 40, "validation": 41, "test": 42}
_TEST_SEED = 20


class PagePieces(Dataset):
    """One piece of a page of its own for each key: seed, split, index and epoch decide page and
    place. Test pieces are the same for every seed. They have no classes.

    Args:
        split: which pieces; those of different splits share no draw.
        length: how many there are.
        seed: of all draws but those of the test pieces.
    """

    def __init__(self, split: Split, length: int, seed: int):
        self.split, self.length = split, length
        self.seed = _TEST_SEED if split == "test" else seed

    def __len__(self):
        return self.length

    def __getitem__(self, key: SampleKey) -> Item:
        entropy = np.random.SeedSequence((self.seed, _STREAM[self.split], key.epoch, key.index))
        rng = np.random.Generator(np.random.SFC64(entropy))
        rows, columns = key.geometry.img_size
        height, width = (max(SMALLEST_PAGE_PX, SIDES * side) for side in (rows, columns))
        page = draw_page(rng, height, width, None).image
        top, left = rng.integers(height - rows + 1), rng.integers(width - columns + 1)
        piece = np.ascontiguousarray(page[top : top + rows, left : left + columns])
        return see_array(piece, 0, key, self.seed)
