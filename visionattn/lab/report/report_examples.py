"""Predict images of a run's test or validation split with its best weights, for a report.

Runs with the same images, labels and names of classes share a gallery.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from einops import rearrange
from PIL import Image

from visionattn.cli.exit_codes import is_out_of_memory
from visionattn.data.batches import Item, SampleKey, Unreadable
from visionattn.data.streams import Shards
from visionattn.lab.report.run_reading import Run
from visionattn.model_config import VECTOR_TASKS
from visionattn.models.patches import call, takes_sizes
from visionattn.models.pixel_classes import ious_of, painted, palette
from visionattn.models.segmentation import IGNORED
from visionattn.models.weights import DataSpec
from visionattn.training.mistakes import SMALL_PX, address, data_url
from visionattn.training.objectives import confusion_of
from visionattn.training.output_scores import decided, in_words
from visionattn.training.validate import Validation, parse_validate

LARGEST_PX, MASK_PX = 224, 448
"""Longest side in pixels of images, and of masks with their images."""


@dataclass(frozen=True)
class Said:
    """The prediction of a run for an image."""

    run: str
    text: str
    """The most probable class, all predicted classes, or the values; empty for masks."""
    share: float | None
    """The probability of the class, or the mean IoU of the mask. None for several classes and for
    values.
    """
    right: bool | None
    """Whether the prediction is right; None for values."""
    mask: str | None = None
    """The predicted mask in colors, as a data URL."""


@dataclass
class ReportExample:
    """An image with its label and the predictions of all runs."""

    source: str
    """The image as a data URL."""
    label: str
    """The class, classes or values; empty for masks."""
    mask: str | None = None
    """The ground-truth mask in colors, as a data URL."""
    said: list[Said] = field(default_factory=list)


@dataclass
class Gallery:
    """Images that several runs share."""

    split: str
    total: int
    """Number of images in the split."""
    size_px: int
    """The longest side of the images in pixels."""
    legend: list[tuple[str, str]]
    """Color and name of each pixel class in the images."""
    examples: list[ReportExample]
    runs: list[str] = field(default_factory=list)

    @property
    def small(self) -> bool:
        """Whether all images are small, so that the page enlarges them without smoothing."""
        return self.size_px <= SMALL_PX

    def wrong(self, run: str) -> int:
        """Return how many of the shown images a run misclassifies."""
        said = [said for example in self.examples for said in example.said if said.run == run]
        return sum(each.right is False for each in said)


def galleries(runs: Sequence[Run], count: int) -> tuple[list[Gallery], dict[str, str]]:
    """Predict up to ``count`` random images of each run. Runs with the same data get the same
    images.

    Returns:
        The galleries, and the reason for each run without a gallery, as one line.
    """
    found: dict[tuple, Gallery] = {}
    skipped: dict[str, str] = {}
    for run in (run for run in runs if run.task != "generate"):
        try:
            add(found, run, count)
        except (ValueError, OSError, RuntimeError, MemoryError) as error:
            full = is_out_of_memory(error)
            skipped[run.name] = "out of memory" if full else " ".join(str(error).split())
    return list(found.values()), skipped


def add(found: dict[tuple, Gallery], run: Run, count: int) -> None:
    """Add the predictions of a run to the gallery of its images; create the gallery if missing.

    Raises:
        ValueError, OSError: weights or images are missing or do not match; one line.
    """
    validation, items = drawn(run, count)
    spec, labels = validation.spec, [np.asarray(item.label) for item in items]
    said = [judged(validation, item, run.name) for item in items]
    images = [item.pixels.tobytes() for item in items]
    key = (validation.split, spec.class_names, *images, *(label.tobytes() for label in labels))
    if key not in found:
        values = np.unique(np.concatenate([label.ravel() for label in labels]))
        names = [*enumerate(spec.output_names), (IGNORED, "does not count")]
        masked = spec.task == "segmentation"
        legend = [
            ("#{:02x}{:02x}{:02x}".format(*painted(np.array([[value]]), spec)[0, 0]), name)
            for value, name in names
            if masked and value in values
        ]
        px = MASK_PX if masked else LARGEST_PX
        examples = [
            ReportExample(address(item.pixels, (px, px)),
                    "" if masked else in_words(spec, label),
                    mask_address(label, spec) if masked else None)
            for item, label in zip(items, labels, strict=True)
        ]  # fmt: skip
        longest = max(max(item.pixels.shape[:2]) for item in items)
        total = len(validation.dataset)
        found[key] = Gallery(validation.split, total, longest, legend, examples)
    gallery = found[key]
    gallery.runs.append(run.name)
    for example, one in zip(gallery.examples, said, strict=True):
        example.said.append(one)


def drawn(run: Run, count: int) -> tuple[Validation, list[Item]]:
    """Open the best weights of a run with their data, and draw up to ``count`` readable images, in
    the order of the data.

    Raises:
        ValueError, OSError: weights are missing or do not match the images, no image can be read,
            or the images come as a stream; one line.
    """
    if not run.weights.is_file():
        raise FileNotFoundError(f"there is no {run.weights.name}")
    flags = ["--checkpoint", str(run.weights), "--device", "cpu"]
    if (run.setting("data", "args") or {}).get("download"):
        flags += ["--data.args.download", "false"]
    flags += ["--split", "test"] if run.result.get("test_images") else []
    validation = Validation(parse_validate(flags))
    dataset = validation.dataset
    if isinstance(dataset, Shards):
        raise ValueError("the images are a stream, which has no indices")
    found: dict[int, Item] = {}
    for index in np.random.default_rng(0).permutation(len(dataset)).tolist():
        sample = dataset[SampleKey(index, 0, validation.geometries[0])]
        if not isinstance(sample, Unreadable):
            found[index] = sample
        if len(found) == count:
            break
    if not found:
        raise ValueError("no image can be read")
    return validation, [found[index] for index in sorted(found)]


@torch.inference_mode()
def judged(validation: Validation, item: Item, run: str) -> Said:
    """Return the prediction of a run's weights for an image.

    Raises:
        ValueError: the outputs are not finite.
    """
    spec, model = validation.spec, validation.model
    pixels = rearrange(torch.from_numpy(np.array(item.pixels, order="C")), "h w c -> 1 c h w")
    partly = item.present != item.pixels.shape[:2] and takes_sizes(model)
    sizes = torch.tensor([item.present]) if partly else None
    if spec.task != "segmentation":
        outputs = call(model, spec.prepare(pixels), sizes).float()[0]
        if spec.task in VECTOR_TASKS:
            said, known = decided(spec, spec.values_of(outputs).numpy()), np.asarray(item.label)
            right = bool(((said == known) | np.isnan(known)).all())
            kept = right if spec.task == "multilabel" else None
            return Said(run, in_words(spec, said), None, kept)
        chance, best = outputs.softmax(0).max(0)
        names = spec.output_names
        return Said(run, names[int(best)], chance.item(), int(best) == int(item.label))
    found, known = model.masks(spec.prepare(pixels), sizes)[0].numpy(), np.asarray(item.label)
    rows, columns = item.present
    found[rows:], found[:, columns:] = IGNORED, IGNORED
    if (found[known != IGNORED] == IGNORED).any():
        raise ValueError("the outputs of its weights are not finite")
    table = confusion_of(torch.from_numpy(known), torch.from_numpy(found), spec.num_classes)
    ious = ious_of(table.numpy())
    mean = float(np.mean(ious[np.isfinite(ious)])) if np.isfinite(ious).any() else float("nan")
    return Said(run, "", mean, True, mask_address(found, spec))


def mask_address(mask: np.ndarray, spec: DataSpec) -> str:
    """Return a mask ``[H, W]`` in colors as a data URL, at most ``MASK_PX`` per side."""
    picture = Image.fromarray(mask)
    picture.putpalette(palette(spec))
    picture.thumbnail((MASK_PX, MASK_PX), Image.Resampling.NEAREST)
    return data_url(picture, "png", optimize=True)
