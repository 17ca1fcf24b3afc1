"""Augmentation pipelines of albumentations, whose draws depend on a key and on nothing else.

This is the only module that imports albumentations, which takes seconds; whoever augments nothing
does not import it.
"""

import os
import random
from typing import Literal

import cv2
import numpy as np

os.environ.setdefault(
    "NO_ALBUMENTATIONS_UPDATE", "1"
)  # it asks the network for a newer version otherwise
import albumentations as A

from visionattn.data.images import fit


class Augment:
    """Augment images of any size by a named pipeline: ``augment(image, img_size, entropy)``, as
    ``images.Augmentation`` asks.

    ``light`` takes the centre crop and shifts it by up to 6 %, scales it by 0.88 to 1.08 and
    rotates it by up to 10 degrees. The others take a random crop of at least ``smallest_crop`` of
    the area and flip it half of the time; then ``three`` applies one of greyscale, solarise and
    blur, and colour jitter of 0.3 (Touvron et al. 2022, DeiT III, section 3), and ``rand`` two of
    twelve changes of colour and shape (after Cubuk et al. 2020).
    """

    def __init__(
        self,
        name: Literal["light", "three", "rand"],
        *,
        smallest_crop: float = 0.08,
        border: Literal["black", "reflect"] = "reflect",
    ):
        """Name the pipeline; ``border`` is what lies beyond the edge of a moved image."""
        self.name, self.smallest_crop = name, smallest_crop
        self.border = cv2.BORDER_CONSTANT if border == "black" else cv2.BORDER_REFLECT_101
        self._pipelines: dict[int, A.Compose] = {}

    def __call__(self, image: np.ndarray, img_size: int, entropy: tuple[int, ...]) -> np.ndarray:
        pipeline = self._pipelines.get(img_size)
        if pipeline is None:
            pipeline = self._pipelines[img_size] = A.Compose(self._steps(img_size))
        rng = np.random.default_rng(entropy)
        # One state for all steps: set_random_seed would give each step the same draws.
        pipeline.set_random_state(rng, random.Random(int(rng.integers(2**63))))
        if self.name == "light":
            image = fit(image, img_size)
        return pipeline(image=image)["image"]

    def _steps(self, img_size: int) -> list[A.BasicTransform]:
        if self.name == "light":
            return [self._affine(shift=0.06, scale=(0.88, 1.08), degrees=10, p=1.0)]
        crop = A.RandomResizedCrop(
            (img_size, img_size),
            scale=(self.smallest_crop, 1.0),
            interpolation=cv2.INTER_CUBIC,
            area_for_downscale="image",
        )
        return [
            crop,
            A.HorizontalFlip(p=0.5),
            *(self._three() if self.name == "three" else self._rand()),
        ]

    def _three(self) -> list[A.BasicTransform]:
        one_of = [
            A.ToGray(p=1),
            A.Solarize(threshold_range=(0.5, 0.5), p=1),
            A.GaussianBlur(blur_limit=0, sigma_limit=(0.1, 2.0), p=1),
        ]
        return [
            A.OneOf(one_of, p=1),
            A.ColorJitter((0.7, 1.3), (0.7, 1.3), (0.7, 1.3), hue=(0, 0), p=1),
        ]

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
            self._affine(shift=0.3, scale=(1, 1), degrees=0, p=1.0),
            self._affine(shift=0.0, scale=(1, 1), degrees=25, p=1.0),
            A.Affine(shear=(-15, 15), border_mode=self.border, p=1),
        ]
        return [A.SomeOf(changes, n=2, replace=False, p=1)]

    def _affine(
        self, *, shift: float, scale: tuple[float, float], degrees: float, p: float
    ) -> A.Affine:
        return A.Affine(
            translate_percent=(-shift, shift),
            scale=scale,
            rotate=(-degrees, degrees),
            border_mode=self.border,
            p=p,
        )
