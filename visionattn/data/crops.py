"""Pieces of drawn pages at the pages' own scale, for models that write images.

A page that is shrunk to some tens of pixels shows nothing of its text, so pieces are cut out of
pages instead. ``documents.py`` draws the pages.
"""

import numpy as np

from visionattn.data.batches import Item, SampleKey
from visionattn.data.documents import draw_page
from visionattn.data.drawn import DrawnDataset
from visionattn.data.images import see_array

SMALLEST_PAGE_PX = 128
"""Pages have sides of at least so many pixels."""
SIDES = 3
"""Sides of a page over those of a piece, where that is more."""
LARGEST_PIECE_PX = 256


class PagePieces(DrawnDataset):
    """One piece of a page of its own for each key, at a place that is drawn too. They have no
    classes.
    """

    STREAMS = {"train": 40, "validation": 41, "test": 42}
    SEEN = "as pieces of pages at the pages' own scale"

    def __getitem__(self, key: SampleKey) -> Item:
        rng = self.draws(key.index, key.epoch)
        rows, columns = key.geometry.img_size
        height, width = (max(SMALLEST_PAGE_PX, SIDES * side) for side in (rows, columns))
        page = draw_page(rng, height, width, None).image
        top, left = rng.integers(height - rows + 1), rng.integers(width - columns + 1)
        piece = np.ascontiguousarray(page[top : top + rows, left : left + columns])
        return see_array(piece, 0, key, self.seed)
