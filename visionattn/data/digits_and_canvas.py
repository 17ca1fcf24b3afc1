"""The embedded datasets: scikit-learn's real 8 x 8 digits, and canvases, a high-resolution task
made from them.

This module splits the digits and draws canvases. Loaders, batches and configurations are elsewhere.
"""

import math
from dataclasses import dataclass

import cv2
import numpy as np

from visionattn.cli.untrusted import refuse
from visionattn.data.batches import SampleKey
from visionattn.data.geometry import Box
from visionattn.data.synthetic_images import (
    DISTRACTOR,
    FIRST_CLASS,
    DrawnArgs,
    DrawnDataset,
    DrawnImage,
    Split,
    paint,
)

DISTRACTORS_PER_PX = 4 / 128**2
LARGER = 1.25
"""Minimum ratio of the labeled digit's side to the side of a second whole digit."""
ROOM = 1.2
"""Minimum ratio of a canvas's side to the side of its largest digit."""

_TEST_SPLIT_SEED = 20
_TEST_SHARE = 0.2
_CELL_PX = 4
# Ranges of rotation in degrees, shear, and scale of a varied digit.
_WARP_LOW, _WARP_HIGH = np.array((-12, -0.15, 0.88)), np.array((12, 0.15, 1.06))


@dataclass(frozen=True)
class CanvasArgs(DrawnArgs):
    """Settings of canvases in ``data.args``: their number and difficulty."""

    distractors: int | None = None
    """Fragments per canvas; None: 4 per 128 x 128 pixels."""
    digit_px: tuple[int, int] = (16, 40)
    """Smallest and largest side of digits and fragments, in pixels."""
    whole_digits: int = 1
    """1, or 2 for a second whole digit of another class, whose side is at most 0.8 of the first's.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        smallest, largest = self.digit_px
        whole = self.whole_digits
        refuse(
            (
                (self.distractors or 0) < 0,
                f"data.args.distractors must be at least 0, got {self.distractors}",
            ),
            (whole not in (1, 2), f"data.args.whole_digits must be 1 or 2, got {whole}"),
            (
                not 8 <= smallest <= largest,
                "data.args.digit_px: expected the smallest and largest side of digits, at least 8 "
                f"pixels, got {[smallest, largest]}",
            ),
            (
                whole == 2 and largest < math.ceil(LARGER * smallest),
                f"expected data.args.digit_px with a largest side of at least {LARGER} times the "
                f"smallest for two whole digits, got {smallest} {largest}",
            ),
        )

    @property
    def smallest_px(self) -> int:
        """Minimum side of a canvas, in pixels."""
        return math.ceil(ROOM * self.digit_px[1])


USUAL = CanvasArgs()


@dataclass(frozen=True)
class Digits:
    """Real digits: ``images [n, 8, 8]`` uint8 (0..255), ``labels [n]`` int64."""

    images: np.ndarray
    labels: np.ndarray


def stratified_split(labels: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split indices so that the second part gets the share ``share`` of each class, rounded.

    A class of at least two members has at least one in each part.

    Args:
        labels: ``[n]``.
        share: in (0, 1).
        seed: seed of the split.

    Returns:
        Sorted indices of the first and the second part; together each index once.
    """
    rng = np.random.default_rng(seed)
    held = []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        count = min(max(1, round(len(members) * share)), len(members) - 1)
        held.append(members[:count])
    second = np.sort(np.concatenate(held))
    return np.setdiff1d(np.arange(len(labels)), second), second


def digit_splits(val_fraction: float, seed: int) -> dict[Split, Digits]:
    """Split scikit-learn's 1797 digits, class by class, into train, validation and test.

    The test fifth is the same for every seed, so that no run trains on a test digit of another run.
    ``seed`` splits the rest, with the share ``val_fraction`` for validation.

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI 1998, as shipped by
    scikit-learn.
    """
    from sklearn.datasets import load_digits  # importing takes a second

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    labels = bunch.target.astype(np.int64)
    rest, test = stratified_split(labels, _TEST_SHARE, _TEST_SPLIT_SEED)
    train, validation = stratified_split(labels[rest], val_fraction, seed)
    parts = {"train": rest[train], "validation": rest[validation], "test": test}
    return {name: Digits(images[index], labels[index]) for name, index in parts.items()}


def _glyph(digit: np.ndarray, size_px: int, warp: tuple[float, float, float]) -> np.ndarray:
    """Enlarge a digit, with a blank pixel around it, to ``size_px``.

    ``warp`` is a rotation in degrees, a shear and a scale.
    """
    padded = cv2.copyMakeBorder(digit, 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0)
    if warp == (0.0, 0.0, 1.0):
        return cv2.resize(padded, (size_px, size_px), interpolation=cv2.INTER_CUBIC)
    degrees, shear, scale = warp
    zoom = size_px / padded.shape[0]
    cosine = math.cos(math.radians(degrees)) * zoom * scale
    sine = math.sin(math.radians(degrees)) * zoom * scale
    linear = np.array([[cosine, shear * cosine - sine], [sine, shear * sine + cosine]])
    source_centre, target_centre = (padded.shape[0] - 1) / 2, (size_px - 1) / 2
    shift = target_centre - linear.sum(axis=1) * source_centre
    return cv2.warpAffine(
        padded, np.column_stack([linear, shift]), (size_px, size_px), flags=cv2.INTER_CUBIC
    )


def _fragment(glyph: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return 40 to 60 % of the inked part of a glyph, cut straight across; narrow digits are cut
    across their length.
    """
    left, top, width, height = cv2.boundingRect(cv2.inRange(glyph, 65, 255))
    right, bottom = left + width, top + height
    side, share = rng.integers(4), rng.uniform(0.4, 0.6)
    if width < 0.6 * height:
        side %= 2
    if side == 0:
        return glyph[: top + round(height * share)]
    if side == 1:
        return glyph[bottom - round(height * share) :]
    if side == 2:
        return glyph[:, : left + round(width * share)]
    return glyph[:, right - round(width * share) :]


def _place(
    rng: np.random.Generator, shape: tuple[int, int], part: tuple[int, int], *taken: np.ndarray
) -> Box | None:
    """Return a random place for ``part`` that touches no taken cell of the first mask, or else of
    the next.

    40 places are tried per mask. The place is marked as taken in the first mask. None if no place
    was found.
    """
    height, width = part
    for mask in taken:
        for down, right in rng.random((40, 2)):
            top, left = int(down * (shape[0] - height + 1)), int(right * (shape[1] - width + 1))
            rows = slice(top // _CELL_PX, (top + height - 1) // _CELL_PX + 1)
            columns = slice(left // _CELL_PX, (left + width - 1) // _CELL_PX + 1)
            if not mask[rows, columns].any():
                taken[0][rows, columns] = True
                return Box(top, left, height, width)
    return None


def _add(image: np.ndarray, box: Box, glyph: np.ndarray, contrast: float) -> None:
    """Brighten ``image`` inside ``box`` by ``contrast * glyph``, saturating at 255."""
    part = image[box.top : box.top + box.height, box.left : box.left + box.width]
    cv2.addWeighted(part, 1.0, glyph, contrast, 0.0, dst=part)


def draw_canvas(
    digits: Digits,
    index: int,
    height: int,
    width: int,
    rng: np.random.Generator,
    *,
    vary: bool,
    task: CanvasArgs = USUAL,
    masked: bool = False,
) -> DrawnImage:
    """Draw digit ``index`` whole, and fragments of other digits, on noisy gray.

    The whole digit and the fragments get sides drawn from ``task.digit_px``, for any canvas size.
    Nothing overlaps the whole digit. Fragments overlap each other only if 40 draws found no room,
    and a fragment that cannot be placed even so is omitted (on canvases below 96 pixels, with four
    per 128). The side and appearance of the whole digit are drawn first, so that a generator in the
    same state gives the same digit on a canvas of another size. A second whole digit is omitted if
    there is no room.

    Args:
        digits: source of the digit and the fragments.
        index: index of the whole digit.
        height, width: size of the canvas in pixels, at least ``task.smallest_px`` each.
        rng: the source of all randomness.
        vary: rotate, shear and scale the digits slightly (training).
        task: number and size of fragments, and number of whole digits.
        masked: also make the mask.

    Returns:
        ``DrawnImage``, with the box of the whole digit.
    """
    smallest, largest = task.digit_px

    def warp():
        if not vary:
            return 0.0, 0.0, 1.0
        return tuple((_WARP_LOW + (_WARP_HIGH - _WARP_LOW) * rng.random(3)).tolist())

    # Draw everything about the digit before anything that depends on the canvas.
    least = smallest if task.whole_digits == 1 else math.ceil(LARGER * smallest)
    size_px = int(rng.integers(least, largest + 1))
    contrast, grey = rng.uniform(0.5, 0.7), int(rng.integers(24, 57))
    glyph = _glyph(digits.images[index], size_px, warp())

    # Noise on gray, and the digit at the first drawn place: nothing is taken yet.
    image = np.frombuffer(rng.bytes(height * width), np.uint8).reshape(height, width)
    image = cv2.addWeighted(image, 0.15, image, 0.0, grey)
    taken = np.zeros((-(-height // _CELL_PX), -(-width // _CELL_PX)), bool)
    digit_box = _place(rng, (height, width), glyph.shape, taken)
    label = int(digits.labels[index])
    mask = np.zeros((height, width), np.uint8) if masked else None

    def add(box: Box, glyph: np.ndarray, contrast: float, value: int) -> None:
        _add(image, box, glyph, contrast)
        if mask is not None:
            paint(mask, box.top, box.left, glyph, value, None)

    add(digit_box, glyph, contrast, FIRST_CLASS + label)
    if task.whole_digits == 2:
        second = rng.choice(np.flatnonzero(digits.labels != digits.labels[index]))
        side = int(rng.integers(smallest, int(size_px / LARGER) + 1))
        glyph = _glyph(digits.images[second], side, warp())
        box = _place(rng, (height, width), glyph.shape, taken)
        if box is not None:
            add(box, glyph, rng.uniform(0.5, 0.7), DISTRACTOR)
    only_digits = taken.copy()

    # Fragments come from other digits only.
    count = task.distractors
    if count is None:
        count = round(height * width * DISTRACTORS_PER_PX)
    others = rng.integers(len(digits.labels) - 1, size=count)
    for other in others + (others >= index):
        side = int(rng.integers(smallest, largest + 1))
        fragment = _fragment(_glyph(digits.images[other], side, warp()), rng)
        box = _place(rng, (height, width), fragment.shape, taken, only_digits)
        if box is not None:
            add(box, fragment, rng.uniform(0.5, 0.7), DISTRACTOR)
    return DrawnImage(image[:, :, None], label, digit_box, mask)


class CanvasDataset(DrawnDataset):
    """Canvases generated at the requested size, determined by seed, split and key.

    Evaluation uses epoch 0 and the digits in rotation; training draws the digit at random.

    Args:
        digits: digits of the split.
        split, length, masked: see ``DrawnDataset``.
        seed: seed of all draws.
        vary: rotate, shear and scale the digits slightly.
        task: difficulty of the canvases.
    """

    STREAMS = {"train": 0, "validation": 1, "test": 2}

    def __init__(
        self,
        digits: Digits,
        split: Split,
        length: int,
        seed: int,
        *,
        vary: bool = False,
        task: CanvasArgs = USUAL,
        masked: bool = False,
    ):
        super().__init__(split, length, seed, masked=masked)
        self.seed = seed  # test canvases differ by seed, test digits do not
        self.digits, self.vary, self.task = digits, vary, task

    def draw(self, key: SampleKey, *, masked: bool = False) -> DrawnImage:
        """Draw the canvas of a key, at the size of its geometry."""
        rng, count = self.draws(key.index, key.epoch), len(self.digits.labels)
        digit = int(rng.integers(count)) if self.split == "train" else key.index % count
        how = dict(vary=self.vary, task=self.task, masked=masked)
        return draw_canvas(self.digits, digit, *key.geometry.img_size, rng, **how)
