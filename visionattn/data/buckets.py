"""Buckets: images of many sizes grouped into batches of equal size.

This module is pure arithmetic on the indices and sizes of images.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from visionattn.data.geometry import Geometry, Size

CELL_PX = 256
"""Pixels that count as one patch for a model without patches."""


@dataclass(frozen=True)
class Buckets:
    """Groups of images with equal input size, under any geometry that their batch gets.

    Args:
        bucket: index of each image's bucket, ``[n]``.
        room: number of images per batch of each bucket, ``[buckets]``.
        unseen: indices of images that the model does not accept, or of unknown size.
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
        """Group images into buckets.

        A batch may get any of the geometries, so its images have equal sizes under each, and it is
        counted at its largest. Every epoch then has the same number of batches.

        Args:
            canvases: input size of each image under each geometry, ``[n, geometries, 2]``; 0 if
                unknown.
            choices: the geometries.
            batch_size: images per batch if ``batch_patches`` is None: the patch limit is this
                number of average images.
            batch_patches: maximum number of patches per batch; an image with more forms its own
                batch.
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

    def fill(self, order: np.ndarray) -> list[np.ndarray]:
        """Return the indices of the images of each batch, in the order in which batches fill;
        incomplete batches come last.

        Args:
            order: indices of images in the order in which they are used; an image may recur.
        """
        whole, rest = [], []
        # Positions in the order of each bucket's images, bucket by bucket.
        own = self.bucket[order]
        sorted_places = np.argsort(own, kind="stable")
        members = np.bincount(own, minlength=len(self.room))
        for places, room in zip(
            np.split(sorted_places, members.cumsum()[:-1]), self.room.tolist(), strict=True
        ):
            for first in range(0, len(places), room):
                taken = places[first : first + room]
                # A batch is full when its last image arrives.
                (whole if len(taken) == room else rest).append((taken[-1], order[taken]))
        whole.sort(key=lambda batch: batch[0])
        return [batch for _, batch in whole + rest]


def canvases(sizes: np.ndarray, geometry: Geometry) -> np.ndarray:
    """Return the model's input sizes for images of some sizes, both int64 ``[n, 2]``."""
    # Few sizes are distinct, and each is computed once.
    known, which = np.unique(sizes, axis=0, return_inverse=True)
    seen = [canvas_of(rows, columns, geometry) for rows, columns in known.tolist()]
    return np.array(seen, np.int64).reshape(-1, 2)[which.reshape(-1)]


def canvas_of(height: int, width: int, geometry: Geometry) -> Size:
    """Return the model's input size for an image. (0, 0) if the model does not accept it or its
    size is unknown; reading it will raise the error.
    """
    try:
        return geometry.view(height, width).canvas
    except ValueError:
        return (0, 0)


def cell_px(geometry: Geometry, encoding: str | None = None) -> int:
    """Return the number of pixels that count as one patch: ``CELL_PX`` for a model without patches,
    but 1 for a model of one-hot pixels, which has an ``encoding``.
    """
    patch = geometry.patch_px[0] * geometry.patch_px[1]
    return CELL_PX if patch == 1 and encoding is None else patch
