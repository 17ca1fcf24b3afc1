"""Augmentation by parts, with albumentations, whose draws depend on a key and on nothing else.

This is the only module that imports albumentations, which takes seconds; whoever augments nothing
does not import it. What the parts are, and which of them a preset has, is in ``presets.py``.
"""

import math
import os
import random
from typing import Literal

import cv2
import numpy as np

os.environ.setdefault(
    "NO_ALBUMENTATIONS_UPDATE", "1"
)  # it asks the network for a newer version otherwise
import albumentations as A

from visionattn.data.data_config import AugmentConfig
from visionattn.data.geometry import Box, Size
from visionattn.data.presets import whole_parts
from visionattn.models.segmentation import IGNORED

_BOX_STREAM, _CALL_STREAM = 1, 2
_BORDERS = {
    "black": cv2.BORDER_CONSTANT,
    "reflect": cv2.BORDER_REFLECT_101,
    "edge": cv2.BORDER_REPLICATE,
}
_CROP_TRIALS = 10


class Augment:
    """Augment images by a preset, whose parts may be set one by one.

    ``box`` draws which part of an image is seen. Whoever reads the image resizes this part to the
    size at which the model sees it, and the call does everything else: flips, turns, affine
    change, colour, blur, shadow, noise and erasing, in this order.

    Attributes:
        parts: the part of every field, as ``presets.whole_parts`` makes it.
        crops: whether ``box`` draws anything; it returns the whole image otherwise.
    """

    def __init__(
        self,
        name: str,
        given: AugmentConfig | None = None,
        *,
        bands: int = 3,
        smallest_crop: float | None = None,
        border: Literal["black", "reflect", "edge"] | None = None,
    ):
        """Choose the parts.

        Args:
            name: a key of ``presets.PRESETS``.
            given: parts that replace the preset's.
            bands: channels of the images.
            smallest_crop: the lowest ``crop_scale`` of presets that crop, instead of their own.
            border: what lies beyond the edge of a moved image: black, the image mirrored, or its
                outermost pixels again. None: "edge" for ``documents``, as a mirrored mark would
                count twice; "reflect" for the others.

        Raises:
            ValueError: a part is out of its range, or cannot act; one line.
        """
        self.parts = whole_parts(name, given or AugmentConfig(), bands, smallest_crop)
        self.crops = self.parts.crop_scale != [1.0, 1.0]
        self._border = _BORDERS[border or ("edge" if name == "documents" else "reflect")]
        steps = [*self._moves(), *self._colours(bands)]
        steps += self._rand() if name == "rand" else []
        steps += self._spoils()
        self._pipeline = A.Compose(steps)

    def box(self, height: int, width: int, canvas: Size, entropy: tuple[int, ...]) -> Box:
        """Draw the part of an image that is seen, as torchvision's ``RandomResizedCrop`` does.

        Its share of the area is uniform in ``crop_scale``; the logarithm of its aspect ratio is
        uniform around that of ``canvas``. Where ten draws do not fit into the image, it is the
        largest centred part that has an allowed aspect ratio.

        Args:
            height, width: size of the image in pixels.
            canvas: height and width to which the part is going to be resized.
            entropy: decides the draw.
        """
        if not self.crops:
            return Box(0, 0, height, width)
        rng = np.random.default_rng((*entropy, _BOX_STREAM))
        ratios = [each * canvas[1] / canvas[0] for each in self.parts.crop_ratio]
        for _ in range(_CROP_TRIALS):
            area = height * width * rng.uniform(*self.parts.crop_scale)
            ratio = math.exp(rng.uniform(math.log(ratios[0]), math.log(ratios[1])))
            rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < rows <= height and 0 < columns <= width:
                top = int(rng.integers(height - rows + 1))
                return Box(top, int(rng.integers(width - columns + 1)), rows, columns)
        ratio = min(max(width / height, ratios[0]), ratios[1])
        rows = min(height, max(1, round(width / ratio)))
        columns = min(width, max(1, round(height * ratio)))
        return Box((height - rows) // 2, (width - columns) // 2, rows, columns)

    def __call__(self, image: np.ndarray, entropy: tuple[int, ...]) -> np.ndarray:
        """Augment an image ``[H, W, C]``, uint8 or float32 in [0, 1]; the result has its size and
        dtype.

        Args:
            image: as it has been read and resized.
            entropy: decides every draw; other numbers follow from it than for ``box``.
        """
        return self._change({"image": image}, entropy)["image"]

    def both(
        self, image: np.ndarray, mask: np.ndarray, entropy: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Augment an image as a call does, and move its mask, uint8 ``[H, W]``, with it: each pixel
        of the mask takes the nearest value, and ``IGNORED`` where it comes from beyond a black
        border. What is erased, shaded or blurred keeps its class.
        """
        changed = self._change({"image": image, "mask": mask}, entropy)
        return changed["image"], changed["mask"]

    def _change(
        self, given: dict[str, np.ndarray], entropy: tuple[int, ...]
    ) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((*entropy, _CALL_STREAM))
        height, width = given["image"].shape[:2]
        # A turn by 90 degrees keeps the size of a square alone.
        quarters = int(rng.integers(1, 4)) if height == width else 2
        if rng.random() < self.parts.quarter_turns:
            given = {name: np.rot90(each, quarters) for name, each in given.items()}
        # One state for all steps: set_random_seed would give each step the same draws.
        self._pipeline.set_random_state(rng, random.Random(int(rng.integers(2**63))))
        return self._pipeline(**{name: np.ascontiguousarray(x) for name, x in given.items()})

    def _moves(self) -> list[A.BasicTransform]:
        """Return what moves pixels."""
        parts = self.parts
        steps = [A.HorizontalFlip(p=parts.flip_horizontal), A.VerticalFlip(p=parts.flip_vertical)]
        if parts.shift or parts.turn or parts.scale != [1.0, 1.0]:
            steps.append(self._affine(parts.shift, parts.scale, parts.turn))
        return steps

    def _colours(self, bands: int) -> list[A.BasicTransform]:
        """Return what changes the value of each pixel: at most one of three, then colour."""
        parts, amount = self.parts, self.parts.colour
        # Weights of human eyes where the bands are red, green and blue; the mean of others.
        method = "weighted_average" if bands == 3 else "average"
        one_of = [
            A.ToGray(num_output_channels=bands, method=method, p=parts.grey),
            A.Solarize(threshold_range=(0.5, 0.5), p=parts.solarise),
            A.GaussianBlur(blur_limit=0, sigma_limit=tuple(parts.blur_sigma), p=parts.blur),
        ]
        one_of = [each for each in one_of if each.p]
        # OneOf takes its members' p as weights; its own p is that any of them acts.
        steps = [A.OneOf(one_of, p=min(1.0, sum(each.p for each in one_of)))] if one_of else []
        if amount and bands in (1, 3):
            around = (1 - amount, 1 + amount)
            steps.append(A.ColorJitter(around, around, around, hue=(0, 0), p=1))
        elif amount:
            steps.append(A.RandomBrightnessContrast(amount, amount, brightness_by_max=False, p=1))
        return steps

    def _spoils(self) -> list[A.BasicTransform]:
        """Return what spoils an image: shadow, noise, erasing."""
        parts = self.parts
        shadow = A.RandomShadow(
            shadow_roi=(0, 0, 1, 1),
            num_shadows_limit=(1, 2),
            shadow_dimension=3,  # more corners cross each other into splinters
            shadow_intensity_range=(0.1, 0.4),
            p=parts.shadow,
        )
        noise = A.GaussNoise(std_range=(0.0, parts.noise), p=float(parts.noise > 0))
        erase = A.Erasing(scale=(0.02, 0.33), ratio=(0.3, 3.3), fill="random", p=parts.erase)
        return [step for step in (shadow, noise, erase) if step.p]

    def _rand(self) -> list[A.BasicTransform]:
        changes = [
            A.AutoContrast(p=1),
            A.Equalize(p=1),
            A.Posterize(num_bits=(4, 7), p=1),
            A.Solarize(threshold_range=(0.3, 0.9), p=1),
            A.ColorJitter((0.5, 1.5), (1, 1), (1, 1), (0, 0), p=1),
            A.ColorJitter((1, 1), (0.5, 1.5), (1, 1), (0, 0), p=1),
            A.ColorJitter((1, 1), (1, 1), (0.2, 1.8), (0, 0), p=1),
            A.Sharpen(alpha=(0.1, 0.6), p=1),
            A.InvertImg(p=1),
            self._affine(0.3, (1, 1), 0),
            self._affine(0.0, (1, 1), 25),
            A.Affine(shear=(-15, 15), border_mode=self._border, fill_mask=IGNORED, p=1),
        ]
        return [A.SomeOf(changes, n=2, replace=False, p=1)]

    def _affine(self, shift: float, scale: list[float] | tuple, degrees: float) -> A.Affine:
        return A.Affine(
            translate_percent=(-shift, shift),
            scale=tuple(scale),
            rotate=(-degrees, degrees),
            border_mode=self._border,
            fill_mask=IGNORED,
            p=1,
        )
