"""Augmentation with albumentations; its draws depend only on a key.

Only this module imports albumentations, which takes seconds. Programs without augmentation do not
import it.
"""

import math
import os
import random
from typing import Any, Literal

import cv2
import numpy as np

os.environ.setdefault(
    "NO_ALBUMENTATIONS_UPDATE", "1"
)  # otherwise it looks online for a newer version
import albumentations as A

from visionattn.cli.files import first_line
from visionattn.cli.untrusted import read_yaml, refuse
from visionattn.data.data_config import PRESETS
from visionattn.data.geometry import Box, Size
from visionattn.models.segmentation import IGNORED

_BOX_STREAM, _CALL_STREAM = 1, 2
_BORDERS = {
    "black": cv2.BORDER_CONSTANT,
    "reflect": cv2.BORDER_REFLECT_101,
    "edge": cv2.BORDER_REPLICATE,
}
_CROP_TRIALS = 10
_CROPPED = ("crop_flip", "three", "rand")
"""The presets that crop."""
_SMALLEST_CROP, _CROP_RATIO = 0.08, (3 / 4, 4 / 3)
_TRIAL_PX = 64
"""Side in pixels of the black image on which a pipeline from a file is tried."""


class Augment:
    """Augment images by a preset, or by a pipeline of albumentations in a YAML file.

    ``box`` draws the visible part of an image. The reader of the image resizes this part to the
    size of the model's input, and the call does the rest.

    Attributes:
        crops: whether ``box`` draws anything; it returns the whole image otherwise.
    """

    def __init__(
        self,
        name: str,
        *,
        bands: int = 3,
        smallest_crop: float = _SMALLEST_CROP,
        border: Literal["black", "reflect", "edge"] | None = None,
    ):
        """Choose the steps.

        Args:
            name: one of ``PRESETS``, or the path of a YAML file that ``albumentations.save`` wrote.
                If its first step is a ``RandomResizedCrop`` with ``p: 1``, ``box`` does it before
                resizing, for any input size of the model.
            bands: channels of the images.
            smallest_crop: minimum share of the area that cropping presets keep.
            border: padding beyond the edge of a moved image: black, the mirrored image, or its
                outermost pixels repeated. None: "edge" for ``documents``, because a mirrored mark
                would count twice; "reflect" for other presets.

        Raises:
            ValueError: the preset does not support these bands, or the file holds no pipeline that
                keeps the size of such images; one line.
            OSError: the file cannot be read.
        """
        self._name = name
        self.crops, self._scale, self._ratio = name in _CROPPED, (smallest_crop, 1.0), _CROP_RATIO
        self._quarter_turns = 0.75 if name == "aerial" else 0.0
        if name in PRESETS:
            _check_bands(name, bands)
            edge = _BORDERS[border or ("edge" if name == "documents" else "reflect")]
            self._pipeline = A.Compose(_preset(name, bands, edge))
        else:
            self._pipeline = self._read(name, bands)

    def _read(self, path: str, bands: int) -> A.Compose:
        """Read the pipeline of a file, and try it on a black image."""
        try:
            read = A.from_dict(read_yaml(path))
            steps = list(read.transforms) if type(read) is A.Compose else [read]
            first = steps[0] if steps else None
            if isinstance(first, A.RandomResizedCrop) and first.p == 1:
                self.crops, self._scale, self._ratio = True, first.scale, first.ratio
                steps = steps[1:]
            pipeline = A.Compose(steps)
            pipeline(image=np.zeros((_TRIAL_PX, _TRIAL_PX, bands), np.uint8))
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"expected an albumentations pipeline for {bands} bands in data.augment {path}, "
                f"saved by albumentations.save(transform, path, 'yaml'): {first_line(error)}"
            ) from error
        return pipeline

    def box(self, height: int, width: int, canvas: Size, entropy: tuple[int, ...]) -> Box:
        """Draw the visible part of an image, as torchvision's ``RandomResizedCrop`` does.

        Its share of the area is uniform; the logarithm of its aspect ratio is uniform around
        ``canvas``'s. If ten draws do not fit into the image, it is the largest centered
        part with an allowed aspect ratio.

        Args:
            height, width: size of the image in pixels.
            canvas: height and width to which the part will be resized.
            entropy: decides the draw.
        """
        if not self.crops:
            return Box(0, 0, height, width)
        rng = np.random.default_rng((*entropy, _BOX_STREAM))
        ratios = [each * canvas[1] / canvas[0] for each in self._ratio]
        for _ in range(_CROP_TRIALS):
            area = height * width * rng.uniform(*self._scale)
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
            image: the image as read and resized.
            entropy: decides every draw, independently of the draws of ``box``.

        Raises:
            ValueError: the pipeline of a file changes the size.
        """
        return self._change({"image": image}, entropy)["image"]

    def both(
        self, image: np.ndarray, mask: np.ndarray, entropy: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Augment an image and its mask, uint8 ``[H, W]``. Mask pixels get the nearest value, or
        ``IGNORED`` if a preset moves them in from beyond a black border. Shaded or blurred pixels
        keep their class.
        """
        changed = self._change({"image": image, "mask": mask}, entropy)
        return changed["image"], changed["mask"]

    def _change(
        self, given: dict[str, np.ndarray], entropy: tuple[int, ...]
    ) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((*entropy, _CALL_STREAM))
        size = given["image"].shape
        # Only squares keep their size when rotated by 90 degrees.
        quarters = int(rng.integers(1, 4)) if size[0] == size[1] else 2
        if rng.random() < self._quarter_turns:
            given = {name: np.rot90(each, quarters) for name, each in given.items()}
        # Use one random state for all steps: set_random_seed would give each step the same draws.
        self._pipeline.set_random_state(rng, random.Random(int(rng.integers(2**63))))
        changed = self._pipeline(**{name: np.ascontiguousarray(x) for name, x in given.items()})
        if changed["image"].shape != size:
            raise ValueError(
                f"data.augment {self._name}: expected images of {list(size)} (data.img_size), got "
                f"{list(changed['image'].shape)}; remove the step that changes the size"
            )
        return changed


def _check_bands(name: str, bands: int) -> None:
    """Raise ValueError for a preset whose changes of colour need another number of bands."""
    refuse(
        (
            name == "three" and bands == 1,
            "augment three needs color images, got one band; use another preset",
        ),
        (
            name == "rand" and bands not in (1, 3),
            f"augment rand needs images of 1 or 3 bands, got {bands}",
        ),
    )


def _preset(name: str, bands: int, border: int) -> list[A.BasicTransform]:
    """Return the steps of a preset: flips, affine change, color, blur, shadow, noise.

    ``three`` is the 3-Augment of Touvron et al. 2022 (DeiT III, section 3). ``rand``, after Cubuk
    et al. 2020, has two of twelve changes of color and shape. ``documents`` moves no pixel by more
    than 4.5 % of the longer side. ``aerial`` draws each of the eight symmetries of a square equally
    often.
    """
    flip_horizontal = 0.5 if name in (*_CROPPED, "aerial") else 0.0
    # Flips that never act stay: they draw numbers, on which the later steps depend.
    steps = [
        A.HorizontalFlip(p=flip_horizontal),
        A.VerticalFlip(p=0.5 if name == "aerial" else 0.0),
    ]
    if name == "light":
        steps.append(_affine(border, shift=0.06, scale=(0.88, 1.08), turn=10.0))
    elif name == "three":
        # Luminance weights for red, green and blue; the mean for other bands.
        method = "weighted_average" if bands == 3 else "average"
        one_of = [
            A.ToGray(num_output_channels=bands, method=method, p=1 / 3),
            A.Solarize(threshold_range=(0.5, 0.5), p=1 / 3),
            A.GaussianBlur(blur_limit=0, sigma_limit=(0.1, 2.0), p=1 / 3),
        ]
        steps += [A.OneOf(one_of, p=1.0), _colour(0.3, bands)]
    elif name == "rand":
        steps.append(A.SomeOf(_rand_changes(border), n=2, replace=False, p=1))
    elif name == "documents":
        shadow = A.RandomShadow(
            shadow_roi=(0, 0, 1, 1),
            num_shadows_limit=(1, 2),
            shadow_dimension=3,  # with more corners the shape crosses itself
            shadow_intensity_range=(0.1, 0.4),
            p=0.3,
        )
        steps.append(_affine(border, shift=0.01, scale=(0.98, 1.02), turn=2.0))
        steps += [_colour(0.2, bands), shadow, A.GaussNoise(std_range=(0.0, 0.04), p=1.0)]
    elif name == "aerial":
        steps.append(_colour(0.2, bands))
    return steps


def _affine(
    border: int, *, shift: float = 0.0, scale: tuple[float, float] = (1, 1), turn: float = 0.0
) -> A.Affine:
    return A.Affine(
        translate_percent=(-shift, shift),
        scale=scale,
        rotate=(-turn, turn),
        border_mode=border,
        fill_mask=IGNORED,
        p=1,
    )


def _colour(amount: float, bands: int) -> A.BasicTransform:
    """Return the step that changes brightness, contrast and, of three bands, saturation."""
    if bands not in (1, 3):
        return A.RandomBrightnessContrast(amount, amount, brightness_by_max=False, p=1)
    around = (1 - amount, 1 + amount)
    return A.ColorJitter(around, around, around, hue=(0, 0), p=1)


def _rand_changes(border: int) -> list[Any]:
    return [
        A.AutoContrast(p=1),
        A.Equalize(p=1),
        A.Posterize(num_bits=(4, 7), p=1),
        A.Solarize(threshold_range=(0.3, 0.9), p=1),
        A.ColorJitter((0.5, 1.5), (1, 1), (1, 1), (0, 0), p=1),
        A.ColorJitter((1, 1), (0.5, 1.5), (1, 1), (0, 0), p=1),
        A.ColorJitter((1, 1), (1, 1), (0.2, 1.8), (0, 0), p=1),
        A.Sharpen(alpha=(0.1, 0.6), p=1),
        A.InvertImg(p=1),
        _affine(border, shift=0.3),
        _affine(border, turn=25),
        A.Affine(shear=(-15, 15), border_mode=border, fill_mask=IGNORED, p=1),
    ]
