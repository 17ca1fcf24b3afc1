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

from visionattn.cli.ends import is_out_of_memory
from visionattn.data.batches import Unreadable
from visionattn.data.splits import SampleKey
from visionattn.data.streams import Shards
from visionattn.lab.report.runs import Run
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
    skipped: dict[str, str] = {}
    for run in runs:
        try:
            add(found, run, count)
        except (ValueError, OSError) as error:
            skipped[run.name] = " ".join(str(error).split())
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            skipped[run.name] = "out of memory"
    return list(found.values()), skipped


def add(found: dict[tuple, Gallery], run: Run, count: int) -> None:
    """Put what a run says into the gallery of its images, which is made where there is none.

    Raises:
        ValueError, OSError: there are no weights or no images, or they do not go together; one
            line.
    """
    if not run.weights.is_file():
        raise FileNotFoundError(f"there is no {run.weights.name}")
    flags = ["--checkpoint", str(run.weights), "--device", "cpu"]
    flags += ["--data.download", "false"] if run.setting("data", "download") else []
    validation = Validation(parse_validate(flags))
    images, labels = draw(validation, count)
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
        found[key] = Gallery(
            validation.split, len(validation.dataset), validation.sizes[0], examples
        )
    gallery = found[key]
    gallery.runs.append(run.name)
    for example, image, label in zip(gallery.examples, images, labels, strict=True):
        probability, best = predict(validation, image)
        example.predictions.append(Prediction(run.name, names[best], probability, best == label))


def draw(validation: Validation, count: int) -> tuple[list[np.ndarray], tuple[int, ...]]:
    """Read up to ``count`` images uint8 ``[H, W, C]`` and their classes, in the order of the data;
    unreadable ones left out.

    Raises:
        ValueError: no image can be read, or they come as a stream.
    """
    dataset = validation.dataset
    if isinstance(dataset, Shards):
        raise ValueError("the images come as a stream, of which none can be picked")
    order = np.random.default_rng(0).permutation(len(dataset))
    found: list[tuple[int, np.ndarray, int]] = []
    for index in order.tolist():
        if len(found) == count:
            break
        sample = dataset[SampleKey(index, 0, validation.sizes[0])]
        if not isinstance(sample, Unreadable):
            found.append((index, *sample))
    if not found:
        raise ValueError("none of the images can be read")
    found.sort(key=lambda entry: entry[0])
    return [image for _, image, _ in found], tuple(label for _, _, label in found)


@torch.inference_mode()
def predict(validation: Validation, image: np.ndarray) -> tuple[float, int]:
    """Return probability and number of the most probable class of an image uint8 ``[H, W, C]``.

    Raises:
        ValueError: the weights give numbers that are not finite.
    """
    pixels = rearrange(torch.from_numpy(np.ascontiguousarray(image)), "h w c -> 1 c h w")
    outputs = validation.model(validation.spec.prepare(pixels)).float()[0]
    if not outputs.isfinite().all():
        raise ValueError("the best weights give numbers that are not finite")
    probability, best = outputs.softmax(0).max(0)
    return probability.item(), int(best)


def address(image: np.ndarray) -> str:
    """Return an image uint8 ``[H, W, C]`` as a data address: PNG where it is small, else JPEG of at
    most ``LARGEST_PX`` a side.
    """
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    small, stream = max(picture.size) <= SMALL_PX, io.BytesIO()
    picture.thumbnail((LARGEST_PX, LARGEST_PX))
    picture.save(
        stream,
        **({"format": "PNG", "optimize": True} if small else {"format": "JPEG", "quality": 85}),
    )
    kind = "png" if small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"
