"""What is kept of an evaluation's counts: its classes, and its worst mistakes with pictures, for
which images are read again.
"""

import numpy as np
from torch.utils.data import Dataset

from visionattn.data.batches import SampleKey, Unreadable
from visionattn.data.geometry import Geometry
from visionattn.models.weights import DataSpec
from visionattn.training.mistakes import (
    MOST_BYTES,
    MOST_PX,
    MOST_PX_WIDE,
    VERSION,
    ByClass,
    Mistake,
    SplitName,
    is_wide,
)
from visionattn.training.pictures import address
from visionattn.training.tally import Counts, Wrong

MOST_PAIRS = 2000
"""How many pairs of a class and another that it was taken for are kept, the most frequent ones: all
of 45 classes.
"""


class Album:
    """The images of a split, from which pictures are made.

    Args:
        dataset: indexed by ``SampleKey``.
        geometry: how images come to the model.
        root: the folder that names of files are told from; None: there is none.
    """

    def __init__(self, dataset: Dataset, geometry: Geometry, root: str | None):
        self.dataset, self.geometry = dataset, geometry
        self.root = root

    def mistake(self, wrong: Wrong) -> Mistake:
        """Return a mistake with its picture, for which its image is read again."""
        name = size = picture = None
        if wrong.number >= 0:
            if hasattr(self.dataset, "name"):
                name = self.dataset.name(wrong.number).removeprefix(f"{self.root}/")
            item = self.dataset[SampleKey(wrong.number, 0, self.geometry)]
            if not isinstance(item, Unreadable):
                size = item.present
                most_px = MOST_PX_WIDE if is_wide(size) else MOST_PX
                picture = address(item.pixels[: size[0], : size[1]], most_px, MOST_BYTES)
        of_label = float(np.exp(-wrong.loss))
        said, own = (float(f"{value:.6g}") for value in (wrong.probability, of_label))
        return Mistake(wrong.label, wrong.said, said, own, name, size, picture)


def by_class(counts: Counts, album: Album, spec: DataSpec, split: SplitName, epoch: int) -> ByClass:
    """Return what is kept of counts.

    Args:
        counts: those of all processes.
        album: the images.
        spec: what they are.
        split: which of the splits they are.
        epoch: that of the weights, counted from 1.
    """
    label, said, count = counts.pairs.T
    hit = label == said
    columns = (
        np.bincount(which, count * weight, spec.num_classes)
        for which, weight in ((label, 1), (label, hit), (said, 1))
    )
    classes = np.stack([*columns], 1).astype(np.int64)
    wrong = counts.pairs[~hit]
    wrong = wrong[np.argsort(-wrong[:, 2], kind="stable")[:MOST_PAIRS]]
    return ByClass(
        VERSION,
        split,
        epoch,
        int(count.sum()),
        album.geometry.describe(),
        list(spec.class_names or ()),
        [tuple(row) for row in classes.tolist()],
        [tuple(row) for row in wrong.tolist()],
        [album.mistake(each) for each in counts.worst],
    )
