"""A linear probe of patch features against masks: how well a feature map tells what lies where.

This module owns which patches are fitted on, the classifier, and its figures.
``data/drawn_images.py`` says what lies in a patch.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from einops import rearrange
from torch import Tensor

from visionattn.data.drawn_images import BACKGROUND, DISTRACTOR, FIRST_CLASS, patch_labels
from visionattn.data.geometry import Size
from visionattn.inference.drawn import SPLITS, Drawn
from visionattn.inference.probe import fit_linear, without_features
from visionattn.inference.reading import ReadImages
from visionattn.inference.shards import read_features
from visionattn.models.pixel_classes import ious_of

MOST_OF_IMAGE = 50
"""The most patches of background, and of distractors, of one image that are fitted on."""

Patches = tuple[np.ndarray, np.ndarray]
"""Features of patches of an image, float32 ``[n, D]``, and what lies in them, int64 ``[n]``."""
Maps = Callable[[range], Iterator[tuple[int, Tensor]]]
"""``maps(numbers)`` yields number and map ``[D, H, W]`` of those of these images that have one."""


@dataclass(frozen=True)
class DenseResult:
    """What a probe makes of the judged patches."""

    confusion: np.ndarray
    """How many patches of each value of the masks, by row, the probe gives which, by column: int64
    ``[values, values]``.
    """
    fitted: int
    """Patches that it is fitted on."""
    note: str
    """What to say of the fit; empty where it has converged."""

    @property
    def ious(self) -> np.ndarray:
        """Return the intersection over union of each value; NaN where no judged patch has it."""
        return ious_of(self.confusion)

    @property
    def mean_iou(self) -> float:
        """Return the mean over the values that judged patches have."""
        return float(np.nanmean(self.ious))

    @property
    def accuracy(self) -> float:
        """Return the share of the judged patches that the probe gives their value."""
        return float(np.diag(self.confusion).sum() / self.confusion.sum())

    def line(self, name: str) -> str:
        """Put the figures into a line for people; that of classes is their mean."""
        ious = self.ious
        there = np.flatnonzero(~np.isnan(ious))
        classes = ious[there[there >= FIRST_CLASS]]
        parts = [f"background {percent(ious[BACKGROUND])}"] if BACKGROUND in there else []
        parts += [f"distractors {percent(ious[DISTRACTOR])}"] if DISTRACTOR in there else []
        parts += [f"{len(classes)} classes {percent(classes.mean())}"] if len(classes) else []
        return (
            f"{name}{self.note}: mean IoU {percent(self.mean_iou)} ({', '.join(parts)}), accuracy "
            f"{percent(self.accuracy)}"
        )


def percent(share: float) -> str:
    """Write a share for people."""
    return f"{100 * share:.2f} %"


def sampled(patches: Patches, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Choose the patches of an image that are fitted on: all of classes, and at most
    ``MOST_OF_IMAGE`` of background and of distractors each, drawn at random.

    Returns:
        Features, values, and weights float32 ``[n]``: how many patches of the image each stands
        for, so that the fit is one to all of them.
    """
    features, values = patches
    chosen, weights = [], []
    for value in np.unique(values):
        places = np.flatnonzero(values == value)
        kept = places
        if value < FIRST_CLASS and len(places) > MOST_OF_IMAGE:
            kept = rng.choice(places, MOST_OF_IMAGE, replace=False)
        chosen.append(kept)
        weights.append(np.full(len(kept), len(places) / len(kept), np.float32))
    order = np.concatenate(chosen)
    return features[order], values[order], np.concatenate(weights)


def fit_and_judge(
    fitted: Iterable[Patches], judged: Iterable[Patches], values: int, seed: int
) -> DenseResult:
    """Fit a logistic regression on standardised features of patches, and judge it on others.

    Args:
        fitted, judged: the patches, image by image; those of one image at a time are in memory,
            besides those that ``sampled`` chooses.
        values: how many values masks may have.
        seed: of that choice.

    Raises:
        ValueError: fewer than two values to fit, or nothing to judge.
    """
    rng = np.random.default_rng(seed)
    chosen = [sampled(patches, rng) for patches in fitted]
    if len(np.unique(np.concatenate([[], *(known for _, known, _ in chosen)]))) < 2:
        raise ValueError(
            "a dense probe wants patches of two kinds to fit on, and the masks show fewer; draw "
            "more images: --eval-images"
        )
    x, y, weights = (np.concatenate(parts) for parts in zip(*chosen, strict=True))
    probe, note = fit_linear(x, y, weights)
    confusion = np.zeros((values, values), np.int64)
    for features, known in judged:
        np.add.at(confusion, (known, probe.predict(features)), 1)
    if not confusion.any():
        raise ValueError("none of the images to judge has features")
    return DenseResult(confusion, len(y), note)


def patches_of(maps: Iterator[tuple[int, Tensor]], drawn: Drawn) -> Iterator[Patches]:
    """Pair the patches of maps with what lies in them; what images do not fill is left out."""
    for index, feature_map in maps:
        mask, present = drawn.mask(index)
        rows, columns = feature_map.shape[1:]
        known = patch_labels(mask, (rows, columns), len(drawn.value_names))
        # A patch that is filled in part counts, as it does to models that leave the others out.
        filled = (-(-present[0] * rows // mask.shape[0]), -(-present[1] * columns // mask.shape[1]))
        part = feature_map[:, : filled[0], : filled[1]].float().numpy()
        yield rearrange(part, "d h w -> (h w) d"), known[: filled[0], : filled[1]].ravel()


def pixel_map(pixels: Tensor, rows: int, columns: int) -> Tensor:
    """Return the pixels ``[C, H, W]`` of each patch as its features ``[D, rows, columns]``."""
    return rearrange(pixels, "c (h p) (w q) -> (c p q) h w", h=rows, w=columns)


def probe_maps(maps: Maps, drawn: Drawn, seed: int) -> DenseResult:
    """Fit on the maps of the validation images, and judge on those of the test images."""
    fitted, judged = (patches_of(maps(drawn.numbers(split)), drawn) for split in SPLITS)
    return fit_and_judge(fitted, judged, len(drawn.value_names), seed)


def probe_folder(folder: Path, images: ReadImages, drawn: Drawn, seed: int) -> Iterator[str]:
    """Probe the maps of a folder and, for comparison, the pixels of the same patches.

    Args:
        folder: where the shards are.
        images, drawn: the images that the maps are of.
        seed: of the choice of patches.

    Yields:
        Lines for people; the last one is that of the maps.
    """
    numbers = {drawn.name(number): number for number in range(len(drawn))}
    grids: dict[int, Size] = {}

    def maps(wanted: range) -> Iterator[tuple[int, Tensor]]:
        for path, feature_map in read_features(folder, {drawn.name(number) for number in wanted}):
            grids[numbers[path]] = feature_map.shape[1:]
            yield numbers[path], feature_map

    def of_pixels(wanted: range) -> Iterator[tuple[int, Tensor]]:
        for number in wanted:
            if number in grids:
                yield number, pixel_map(images[number].pixels, *grids[number])

    found = probe_maps(maps, drawn, seed)
    each, judged = len(drawn.numbers("test")), found.confusion.sum()
    yield from without_features(len(drawn) - len(grids))
    yield (
        f"linear probes are fitted on {found.fitted:,} patches of {each} validation images and "
        f"judged on {judged:,} of {each} test images"
    )
    yield probe_maps(of_pixels, drawn, seed).line("pixels")
    yield found.line("dense probe")
