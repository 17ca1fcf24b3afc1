"""Masks of a run's test or validation images: what is known, what its best weights give, and the
intersection over union of each class. It knows nothing of pages.
"""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from einops import rearrange
from PIL import Image

from visionattn.data.batches import Item
from visionattn.lab.report.examples import LARGEST_PX, address, drawn
from visionattn.lab.report.runs import Run, for_each, number
from visionattn.lab.report.tables import Cell, Table, is_of_pixels
from visionattn.models.patches import takes_sizes
from visionattn.models.pixel_classes import class_names, ious_of, painted, palette
from visionattn.models.segmentation import IGNORED, Segmenter
from visionattn.models.weights import DataSpec, described, read_metadata
from visionattn.training.segmentation import confusion_of
from visionattn.training.validate import Validation

MOST_CLASSES = 40
"""Rows of the table of classes; of more, those that the runs know worst are shown."""
MASK_PX = 2 * LARGEST_PX
"""The longest side in pixels of masks and their images."""


@dataclass(frozen=True)
class Given:
    """What a run gives for an image."""

    run: str
    source: str
    """The mask in colours, as a data address."""
    mean_iou: float
    """Over the classes that the known mask has, in [0, 1]."""


@dataclass
class Masked:
    """An image with its known mask."""

    image: str
    """It, as a data address."""
    known: str
    """The known mask in colours, as a data address."""
    given: list[Given] = field(default_factory=list)


@dataclass
class MaskGallery:
    """Images that some runs share."""

    split: str
    total: int
    """Images of the split."""
    size_px: int
    """The longest side of the images in pixels."""
    legend: list[tuple[str, str]]
    """Colour and name of each class that lies in the images."""
    masked: list[Masked]
    runs: list[str] = field(default_factory=list)


def mask_galleries(runs: Sequence[Run], count: int) -> tuple[list[MaskGallery], dict[str, str]]:
    """Show up to ``count`` images of each run with masks, drawn at random, the same for every run
    with the same data.

    Returns:
        The galleries, and for the runs that are in none the reason, a line each.
    """
    found: dict[tuple, MaskGallery] = {}
    skipped = for_each(
        [run for run in runs if is_of_pixels(run)], lambda run: add(found, run, count)
    )
    return list(found.values()), skipped


def add(found: dict[tuple, MaskGallery], run: Run, count: int) -> None:
    """Put the masks of a run into the gallery of its images, which is made where there is none.

    Raises:
        ValueError, OSError: there are no weights or no images, or they do not go together; one
            line.
    """
    validation, items = drawn(run, count)
    spec = validation.spec
    given = [judged(validation, item, run.name) for item in items]
    longest = max(max(item.pixels.shape[:2]) for item in items)
    known = [np.asarray(item.label) for item in items]
    key = (
        validation.split,
        spec.class_names,
        tuple(
            (item.pixels.tobytes(), mask.tobytes()) for item, mask in zip(items, known, strict=True)
        ),
    )
    if key not in found:
        values = np.unique(np.concatenate([mask.ravel() for mask in known]))
        legend = [
            ("#{:02x}{:02x}{:02x}".format(*painted(np.array([[value]]), spec)[0, 0]), name)
            for value, name in (*enumerate(class_names(spec)), (IGNORED, "does not count"))
            if value in values
        ]
        masked = [
            Masked(address(item.pixels, MASK_PX), mask_address(mask, spec))
            for item, mask in zip(items, known, strict=True)
        ]
        found[key] = MaskGallery(validation.split, len(validation.dataset), longest, legend, masked)
    gallery = found[key]
    gallery.runs.append(run.name)
    for shown, one in zip(gallery.masked, given, strict=True):
        shown.given.append(one)


def judged(validation: Validation, item: Item, run: str) -> Given:
    """Return what the weights of a run give for an image.

    Raises:
        ValueError: their outputs are not finite.
    """
    spec, known = validation.spec, np.asarray(item.label)
    found = predicted(validation, item.pixels, item.present)
    if (found[known != IGNORED] == IGNORED).any():
        raise ValueError("the outputs of its weights are not finite")
    table = confusion_of(torch.from_numpy(known), torch.from_numpy(found), spec.num_classes)
    ious = ious_of(table.numpy())
    mean = float(np.nanmean(ious)) if np.isfinite(ious).any() else math.nan
    return Given(run, mask_address(found, spec), mean)


def predicted(validation: Validation, image: np.ndarray, filled: tuple[int, int]) -> np.ndarray:
    """Return the class of each pixel of an image ``[H, W, C]`` that fills so many pixels from the
    top left, uint8 ``[H, W]``.
    """
    pixels = rearrange(torch.from_numpy(np.array(image, order="C")), "h w c -> 1 c h w")
    model = validation.model
    assert isinstance(model, Segmenter)
    partly = filled != image.shape[:2] and takes_sizes(model)
    sizes = torch.tensor([filled]) if partly else None
    given = model.masks(validation.spec.prepare(pixels), sizes)[0].numpy()
    given[filled[0] :], given[:, filled[1] :] = IGNORED, IGNORED
    return given


def mask_address(mask: np.ndarray, spec: DataSpec) -> str:
    """Return a mask ``[H, W]`` in its colours as a data address, of at most ``MASK_PX`` a side."""
    picture = Image.fromarray(mask)
    picture.putpalette(palette(spec))
    picture.thumbnail((MASK_PX, MASK_PX), Image.Resampling.NEAREST)
    stream = io.BytesIO()
    picture.save(stream, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def names_of(run: Run) -> tuple[str, ...]:
    """Return the names of a run's classes, as its weights say them; none where they do not."""
    try:
        return described(read_metadata(run.weights), run.weights)[2].class_names
    except (ValueError, OSError):
        return ()


def class_table(runs: Sequence[Run]) -> Table | None:
    """Return the intersection over union of each class, a column for each run that has it, of the
    test images or, where there are none, of the validation images; None where no run has it.
    """
    known = [run for run in runs if isinstance(run.result.get("ious"), list)]
    if not known:
        return None
    names = max((names_of(run) for run in known), key=len)
    count = max(len(run.result["ious"]) for run in known)
    names = [*names, *map(str, range(len(names), count))]
    columns = [[number(iou) for iou in run.result["ious"]] for run in known]

    def worst(value: int) -> float:
        ious = [column[value] for column in columns if value < len(column)]
        return min([iou for iou in ious if iou is not None], default=2.0)

    order = sorted(range(count), key=worst)[:MOST_CLASSES] if count > MOST_CLASSES else range(count)
    images = {True: "", False: " (validation)"}
    heads = [run.name + images[run.result.get("ious_of") == "test"] for run in known]
    table = Table(["class", *heads])
    for value in order:
        cells = [column[value] if value < len(column) else None for column in columns]
        texts = ["" if iou is None else f"{100 * iou:.2f} %" for iou in cells]
        table.rows.append([Cell(str(names[value])), *(Cell(text, True) for text in texts)])
    return table
