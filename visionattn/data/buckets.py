"""Images of many sizes in batches of equal size: which images share a batch, and how many.

This module owns buckets. It is arithmetic alone, and knows images by number and size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from visionattn.data.geometry import Geometry, Size

CELL_PX = 256
"""Pixels that count as one patch where a model has none."""


@dataclass(frozen=True)
class Buckets:
    """Images that have the same size for a model, whichever geometry their batch gets.

    Args:
        bucket: the number of each image's bucket, ``[n]``.
        room: how many images a batch of each bucket holds, ``[buckets]``.
        unseen: the numbers of images that the model does not take, or whose size is not known.
    """

    bucket: np.ndarray
    room: np.ndarray
    unseen: np.ndarray

    @classmethod
    def of(
        cls,
        canvases: np.ndarray,
        choices: Sequence[Geometry],
        batch_size: int,
        batch_patches: int | None,
    ) -> "Buckets":
        """Divide images into buckets.

        A batch may get any of the geometries, so its images are equal under each, and it is counted
        at its largest: then every epoch has as many batches.

        Args:
            canvases: the size of the model's input for each image under each geometry, ``[n,
                geometries, 2]``; 0 where it is not known.
            choices: the geometries.
            batch_size: images per batch where ``batch_patches`` is None: as many patches as they
                have on average.
            batch_patches: the most patches of a batch; an image with more is alone.
        """
        distinct, bucket = np.unique(
            canvases.reshape(len(canvases), -1), axis=0, return_inverse=True
        )
        patches = distinct.reshape(len(distinct), -1, 2).prod(2).max(1) / cell_px(choices[0])
        if batch_patches is None:
            batch_patches = batch_size * patches[bucket].mean()
        room = np.maximum(1, np.floor(batch_patches / np.maximum(patches, 1))).astype(np.int64)
        own = bucket.reshape(-1)
        return cls(own, room, np.flatnonzero((patches == 0)[own]))

    @property
    def count(self) -> int:
        """Count the batches of an epoch."""
        members = np.bincount(self.bucket, minlength=len(self.room))
        return int(np.ceil(members / self.room).sum())

    def fill(self, order: np.ndarray) -> list[np.ndarray]:
        """Return the numbers of the images of each batch, in the order in which batches fill; those
        that do not fill come last.

        Args:
            order: the numbers of all images, ``[n]``, in the order in which they are taken.
        """
        whole, rest = [], []
        # The places in the order of each bucket's images, bucket after bucket.
        sorted_places = np.argsort(self.bucket[order], kind="stable")
        members = np.bincount(self.bucket, minlength=len(self.room))
        for places, room in zip(
            np.split(sorted_places, members.cumsum()[:-1]), self.room.tolist(), strict=True
        ):
            for first in range(0, len(places), room):
                taken = places[first : first + room]
                # A batch is full when its last image is taken.
                (whole if len(taken) == room else rest).append((taken[-1], order[taken]))
        whole.sort(key=lambda batch: batch[0])
        return [batch for _, batch in whole + rest]


def canvases(sizes: np.ndarray, geometry: Geometry) -> np.ndarray:
    """Return the size of the model's input for images of some sizes, both int64 ``[n, 2]``."""
    # Few sizes are different, and each is looked at once.
    known, which = np.unique(sizes, axis=0, return_inverse=True)
    seen = [canvas_of(rows, columns, geometry) for rows, columns in known.tolist()]
    return np.array(seen, np.int64).reshape(-1, 2)[which.reshape(-1)]


def canvas_of(height: int, width: int, geometry: Geometry) -> Size:
    """Return the size of the model's input for an image; none for one that the model does not take,
    or whose size is not known, which reading it will say.
    """
    try:
        return geometry.view(height, width).canvas
    except ValueError:
        return (0, 0)


def cell_px(geometry: Geometry) -> int:
    """Return how many pixels count as one patch."""
    patch = geometry.patch_px[0] * geometry.patch_px[1]
    return CELL_PX if patch == 1 else patch
