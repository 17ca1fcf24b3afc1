"""Synthetic document pages whose classes differ in one small mark at a random place.

This module owns the marks, the paper and the page sizes; ``typesetting.py`` sets the text. Loaders,
batches and configurations are elsewhere.
"""

import math

import cv2
import numpy as np

from visionattn.data.batches import SampleKey
from visionattn.data.buckets import canvases
from visionattn.data.geometry import Box, Geometry
from visionattn.data.synthetic_images import (
    DISTRACTOR,
    FIRST_CLASS,
    DrawnDataset,
    DrawnImage,
    Split,
    paint,
)
from visionattn.data.typesetting import typeset

CLASS_NAMES = ("bar", "pillar", "dot", "cross")
"""The symbol inside the ring that marks a page."""
MARK_PX = (22, 32)
"""Smallest and largest outer diameter of a mark, in pixels, on pages of any size."""
ASPECT = (1.4, 5.0)
"""Range of the aspect ratio (longer over shorter side), from a letter to a receipt or a strip."""
LONGEST = (0.7, 1.0)
"""Range of a page's longest side relative to the largest requested side."""
SMALLEST_PAGE_PX = 40
SMALLEST_SIZE_PX = 64
"""Minimum image size for pages."""
DISTRACTORS_PER_PX = 1 / 256**2
PIECE_SIDES, LARGEST_PIECE_PX = 3, 256
"""Side of a page relative to a crop of it, and the maximum side of a crop."""
PIECED_PAGE_PX = 128
"""Minimum side of a page for crops."""

_SHAPE_STREAM = 33
_SHIFT = 4  # cv2 draws with sixteenths of a pixel


def _points(*points: tuple[float, float]) -> np.ndarray:
    return np.round(np.array(points) * 2**_SHIFT).astype(np.int32)


def _symbol(image: np.ndarray, name: str, reach: float, degrees: float, thickness: int) -> None:
    """Draw a symbol that extends ``reach`` pixels from the center, rotated by ``degrees``."""
    middle = (image.shape[0] - 1) / 2
    angles = {"bar": (0,), "pillar": (90,), "cross": (45, 135), "dot": ()}[name]
    for angle in angles:
        turn = math.radians(angle + degrees)
        across, down = math.cos(turn) * reach, math.sin(turn) * reach
        ends = _points((middle - across, middle - down), (middle + across, middle + down))
        cv2.line(image, *ends.tolist(), 255, thickness, cv2.LINE_AA, _SHIFT)
    if name == "dot":
        centre = _points((middle, middle))[0].tolist()
        radius = round(0.8 * reach * 2**_SHIFT)
        cv2.circle(image, centre, radius, 255, cv2.FILLED, cv2.LINE_AA, _SHIFT)


def _mark(
    size_px: int, degrees: float, name: str | None, *, ring: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a mark: a ring or a square of ``size_px`` pixels, with a symbol or empty.

    Returns:
        Its ink and its covered area: uint8 ``[size_px, size_px]``, 0 to 255.
    """
    ink = np.zeros((size_px, size_px), np.uint8)
    cover = np.zeros_like(ink)
    thickness = max(2, round(size_px / 10))
    if ring:
        centre = _points(((size_px - 1) / 2,) * 2)[0].tolist()
        radius = (size_px - 1) / 2
        cv2.circle(cover, centre, int(radius * 2**_SHIFT), 255, cv2.FILLED, cv2.LINE_AA, _SHIFT)
        middle_line = int((radius - thickness / 2) * 2**_SHIFT)
        cv2.circle(ink, centre, middle_line, 255, thickness, cv2.LINE_AA, _SHIFT)
    else:
        cover[:] = 255
        cv2.rectangle(ink, (0, 0), (size_px - 1, size_px - 1), 255, 2 * thickness - 1)
    if name is not None:
        _symbol(ink, name, 0.25 * size_px, degrees, thickness)
    return ink, cover


def _stamp(ink: np.ndarray, top: int, left: int, mark: np.ndarray, cover: np.ndarray) -> None:
    """Draw a mark over the ink of a page; nothing below its covered area shows through."""
    place = ink[top : top + mark.shape[0], left : left + mark.shape[1]]
    kept = cv2.multiply(place, 255 - cover, scale=1 / 255)
    np.maximum(kept, cv2.min(mark, cover), out=place)


def _turned(ink: np.ndarray, degrees: float) -> np.ndarray:
    height, width = ink.shape
    turn = cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), degrees, 1.0)
    return cv2.warpAffine(ink, turn, (width, height))


def _on_paper(ink: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return ink printed on paper and scanned: uneven light, the shadow of an edge, grain and
    noise.
    """
    height, width = ink.shape
    paper, strength = rng.uniform(205, 245), rng.uniform(0.6, 0.9)
    rows = np.linspace(0, rng.uniform(-25, 25), height, dtype=np.float32)
    columns = np.linspace(paper, paper + rng.uniform(-25, 25), width, dtype=np.float32)
    # One edge is in the shadow of the lid or of the spine.
    depth, reach = rng.uniform(0, 70), rng.uniform(4, 40)
    line = (rows, columns)[int(rng.integers(2))]
    shadow = depth * np.exp(-np.arange(len(line), dtype=np.float32) / reach)
    line -= shadow if rng.integers(2) else shadow[::-1]
    page = rows[:, None] + columns[None, :]
    page *= 1 - ink * np.float32(strength / 255)
    # Grain spans 4 pixels, noise a single one.
    coarse = np.frombuffer(rng.bytes((height // 4 + 1) * (width // 4 + 1)), np.uint8)
    coarse = coarse.reshape(height // 4 + 1, width // 4 + 1)
    grain = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_LINEAR)
    noise = np.frombuffer(rng.bytes(height * width), np.uint8).reshape(height, width)
    noise = cv2.addWeighted(noise, rng.uniform(0.03, 0.12), grain, rng.uniform(0.02, 0.08), 0.0)
    page += noise
    page -= float(noise.mean())
    return np.clip(page, 0, 255).astype(np.uint8)


def draw_page(
    rng: np.random.Generator, height: int, width: int, label: int | None, *, masked: bool = False
) -> DrawnImage:
    """Draw a page with text, tables and lists, and a mark at a random place.

    The mark is a ring around one of four symbols and hides everything below it. Empty rings, and
    squares around the same symbols, are distractors. The label determines only the symbol.

    Args:
        rng: the source of all randomness.
        height, width: size of the page in pixels, at least ``SMALLEST_PAGE_PX`` each.
        label: which of ``CLASS_NAMES`` marks the page; None: no mark.
        masked: also make the mask; text is background, empty rings and squares are distractors.
    """
    # Draw the mark's appearance before anything that depends on the size of the page.
    size_px, tilt = int(rng.integers(MARK_PX[0], MARK_PX[1] + 1)), rng.uniform(-8, 8)
    down, right = rng.random(2)
    ink = _turned(typeset(rng, height, width), rng.uniform(-2, 2))
    mask = np.zeros_like(ink) if masked else None

    def stamp(top: int, left: int, part: np.ndarray, cover: np.ndarray, value: int) -> None:
        _stamp(ink, top, left, part, cover)
        if mask is not None:
            paint(mask, top, left, part, value, cover)

    count = rng.poisson(height * width * DISTRACTORS_PER_PX)
    for kind, *place in rng.random((count, 5)).tolist():
        side = MARK_PX[0] + int(place[0] * (MARK_PX[1] + 1 - MARK_PX[0]))
        ring = kind < 0.5
        name = None if ring else CLASS_NAMES[int(place[1] * len(CLASS_NAMES))]
        top, left = int(place[2] * (height - side + 1)), int(place[3] * (width - side + 1))
        stamp(top, left, *_mark(side, tilt, name, ring=ring), DISTRACTOR)

    top, left = int(down * (height - size_px + 1)), int(right * (width - size_px + 1))
    if label is not None:
        stamp(top, left, *_mark(size_px, tilt, CLASS_NAMES[label]), FIRST_CLASS + label)
    return DrawnImage(
        _on_paper(ink, rng)[:, :, None], label, Box(top, left, size_px, size_px), mask
    )


class DocumentsDataset(DrawnDataset):
    """Pages generated on request.

    The shape of a page depends on the index but not on the epoch. Training pages get a random
    class, evaluation pages the classes in rotation.

    Args:
        split, length, seed, masked: see ``DrawnDataset``.
    """

    STREAMS = {"train": 30, "validation": 31, "test": 32}

    def __init__(self, split: Split, length: int, seed: int, *, masked: bool = False):
        super().__init__(split, length, seed, masked=masked)
        rng = np.random.default_rng((self.seed, self.STREAMS[split], _SHAPE_STREAM))
        aspects = np.exp(rng.uniform(*np.log(ASPECT), length))
        longer = rng.uniform(*LONGEST, length)
        self._shapes = np.stack([longer, longer / aspects], axis=1)
        lying = rng.random(length) < 0.5
        self._shapes[lying] = self._shapes[lying, ::-1]

    def shapes(self, longest_px: int) -> np.ndarray:
        """Return height and width of each page in pixels, int64 ``[n, 2]``.

        Args:
            longest_px: maximum side of a page. Text and marks keep their sizes in pixels, so a
                larger page holds more.
        """
        shapes = np.round(self._shapes * longest_px).astype(np.int64)
        return np.maximum(shapes, SMALLEST_PAGE_PX)

    def canvases(self, geometry: Geometry) -> np.ndarray:
        """Return the size of the model's input for each page, ``[n, 2]``."""
        return canvases(self.shapes(max(geometry.img_size)), geometry)

    def draw(self, key: SampleKey, *, masked: bool = False) -> DrawnImage:
        """Draw the page of a key, at the size of its geometry."""
        rng = self.draws(key.index, key.epoch)
        drawn = int(rng.integers(len(CLASS_NAMES)))
        label = drawn if self.split == "train" else key.index % len(CLASS_NAMES)
        shape = np.round(self._shapes[key.index] * max(key.geometry.img_size)).astype(np.int64)
        height, width = np.maximum(shape, SMALLEST_PAGE_PX).tolist()
        return draw_page(rng, height, width, label, masked=masked)


class PagePieces(DrawnDataset):
    """Random crops of pages, one page per key, for image generation: a page shrunk to some tens of
    pixels shows nothing of its text. They have no classes.
    """

    STREAMS = {"train": 40, "validation": 41, "test": 42}
    SEEN = "crops of pages at their own scale"

    def draw(self, key: SampleKey, *, masked: bool = False) -> DrawnImage:
        """Draw a page, and return the crop of a key."""
        rng = self.draws(key.index, key.epoch)
        rows, columns = key.geometry.img_size
        height, width = (max(PIECED_PAGE_PX, PIECE_SIDES * side) for side in (rows, columns))
        page = draw_page(rng, height, width, None).image
        top, left = rng.integers(height - rows + 1), rng.integers(width - columns + 1)
        piece = np.ascontiguousarray(page[top : top + rows, left : left + columns])
        return DrawnImage(piece, 0, Box(int(top), int(left), rows, columns))
