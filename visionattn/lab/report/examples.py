"""Images of a run's test or validation split with what its best weights say of them. It knows
nothing of pages.

Runs that show the same images, bit for bit and with the same names of classes, share them.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from einops import rearrange
from PIL import Image

from visionattn.data.batches import Item, SampleKey, Unreadable
from visionattn.data.geometry import Size
from visionattn.data.streams import Shards
from visionattn.lab.report.runs import Run, for_each
from visionattn.lab.report.tables import is_of_pixels
from visionattn.models.patches import call, takes_sizes
from visionattn.training.validate import Validation, parse_validate

LARGEST_PX, SMALL_PX = 224, 64
"""Images are shown with at most so many pixels a side; up to the second, each pixel is shown as a
square.
"""


@dataclass(frozen=True)
class Prediction:
    """What a run says of an image."""

    run: str
    label: str
    """Name of the most probable class."""
    probability: float
    """The probability of the class, in [0, 1]."""
    right: bool


@dataclass
class Example:
    """An image."""

    source: str
    """It, as a data address."""
    label: str
    """Name of its class."""
    predictions: list[Prediction] = field(default_factory=list)


@dataclass
class Gallery:
    """Images that some runs share."""

    split: str
    """``test`` or ``validation``."""
    total: int
    """Images of the split."""
    size_px: int
    examples: list[Example]
    runs: list[str] = field(default_factory=list)

    @property
    def small(self) -> bool:
        """Tell whether each pixel is to be seen."""
        return self.size_px <= SMALL_PX

    def wrong(self, run: str) -> int:
        """Return how many of the images shown a run gets wrong."""
        return sum(
            not said.right
            for example in self.examples
            for said in example.predictions
            if said.run == run
        )


def galleries(runs: Sequence[Run], count: int) -> tuple[list[Gallery], dict[str, str]]:
    """Show up to ``count`` images of each run, drawn at random, the same for every run with the
    same data.

    Returns:
        The galleries, and for the runs that are in none the reason, a line each.
    """
    found: dict[tuple, Gallery] = {}
    named = [run for run in runs if not is_of_pixels(run)]
    skipped = for_each(named, lambda run: add(found, run, count))
    return list(found.values()), skipped


def add(found: dict[tuple, Gallery], run: Run, count: int) -> None:
    """Put what a run says into the gallery of its images, which is made where there is none.

    Raises:
        ValueError, OSError: there are no weights or no images, or they do not go together; one
            line.
    """
    validation, items = drawn(run, count)
    images, filled = [item.pixels for item in items], [item.present for item in items]
    labels = tuple(int(item.label) for item in items)
    longest = max(max(image.shape[:2]) for image in images)
    # Runs share a gallery where split, names, labels and every byte of the images agree.
    key = (
        validation.split,
        validation.spec.class_names,
        labels,
        tuple((image.shape, image.tobytes()) for image in images),
    )
    names = validation.spec.class_names or tuple(map(str, range(validation.spec.num_classes)))
    if key not in found:
        examples = [
            Example(address(image), names[label])
            for image, label in zip(images, labels, strict=True)
        ]
        found[key] = Gallery(validation.split, len(validation.dataset), longest, examples)
    gallery = found[key]
    gallery.runs.append(run.name)
    shown = zip(gallery.examples, images, labels, filled, strict=True)
    for example, image, label, size in shown:
        probability, best = predict(validation, image, size)
        example.predictions.append(Prediction(run.name, names[best], probability, best == label))


def drawn(run: Run, count: int) -> tuple[Validation, list[Item]]:
    """Return the best weights of a run with their images, and up to ``count`` of these, in the
    order of the data; unreadable ones left out.

    Raises:
        ValueError, OSError: there are no weights, they do not go with the images, no image can be
            read, or they come as a stream; one line.
    """
    if not run.weights.is_file():
        raise FileNotFoundError(f"there is no {run.weights.name}")
    flags = ["--checkpoint", str(run.weights), "--device", "cpu"]
    flags += ["--data.download", "false"] if run.setting("data", "download") else []
    flags += ["--split", "test"] if run.result.get("test_images") else []
    validation = Validation(parse_validate(flags))
    dataset = validation.dataset
    if isinstance(dataset, Shards):
        raise ValueError("the images come as a stream, of which none can be picked")
    order = np.random.default_rng(0).permutation(len(dataset))
    found: list[tuple[int, Item]] = []
    for index in order.tolist():
        if len(found) == count:
            break
        sample = dataset[SampleKey(index, 0, validation.geometries[0])]
        if not isinstance(sample, Unreadable):
            found.append((index, sample))
    if not found:
        raise ValueError("none of the images can be read")
    found.sort(key=lambda entry: entry[0])
    return validation, [item for _, item in found]


@torch.inference_mode()
def predict(validation: Validation, image: np.ndarray, filled: Size) -> tuple[float, int]:
    """Return probability and number of the most probable class of an image ``[H, W, C]`` that
    fills so many pixels from the top left.

    Raises:
        ValueError: the weights give numbers that are not finite.
    """
    pixels = rearrange(torch.from_numpy(np.array(image, order="C")), "h w c -> 1 c h w")
    sizes = torch.tensor([filled]) if filled != image.shape[:2] else None
    model = validation.model
    if not takes_sizes(model):
        sizes = None
    outputs = call(model, validation.spec.prepare(pixels), sizes).float()[0]
    if not outputs.isfinite().all():
        raise ValueError("the best weights give numbers that are not finite")
    probability, best = outputs.softmax(0).max(0)
    return probability.item(), int(best)


def address(image: np.ndarray, most_px: int = LARGEST_PX) -> str:
    """Return an image ``[H, W, C]`` as a data address: PNG where it is small, else JPEG of at most
    ``most_px`` a side. Of many bands the first three are shown, of two the first.
    """
    if image.dtype != np.uint8:
        image = np.rint(image * 255).astype(np.uint8)
    picture = Image.fromarray(image[..., 0] if image.shape[2] < 3 else image[..., :3].copy())
    small, stream = max(picture.size) <= SMALL_PX, io.BytesIO()
    picture.thumbnail((most_px, most_px))
    picture.save(
        stream,
        **({"format": "PNG", "optimize": True} if small else {"format": "JPEG", "quality": 85}),
    )
    kind = "png" if small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"
