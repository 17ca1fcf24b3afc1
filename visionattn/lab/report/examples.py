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
from visionattn.data.batches import Item, SampleKey, Unreadable
from visionattn.data.streams import Shards
from visionattn.lab.report.runs import Run
from visionattn.models.patches import call, takes_sizes
from visionattn.models.pixel_classes import class_names, ious_of, painted, palette
from visionattn.models.segmentation import IGNORED
from visionattn.models.weights import DataSpec
from visionattn.training.mistakes import SMALL_PX, address
from visionattn.training.objectives import confusion_of
from visionattn.training.validate import Validation, parse_validate

LARGEST_PX, MASK_PX = 224, 448
"""The longest sides of images, and of masks with their images."""


@dataclass(frozen=True)
class Said:
    """What a run says of an image."""

    run: str
    text: str
    """The most probable class; empty for masks."""
    share: float
    """The probability of the class, or the mean IoU over the classes of the known mask."""
    right: bool
    mask: str | None = None
    """The mask in colours, as a data address."""


@dataclass
class Example:
    """An image."""

    source: str
    """Its data address."""
    label: str
    """The name of its class; of a mask nothing."""
    mask: str | None = None
    """The known mask in colours, as a data address."""
    said: list[Said] = field(default_factory=list)


@dataclass
class Gallery:
    """Images that some runs share."""

    split: str
    total: int
    """Images of the split."""
    size_px: int
    """The longest side of the images in pixels."""
    legend: list[tuple[str, str]]
    """Colour and name of each class of pixels that lies in the images."""
    examples: list[Example]
    runs: list[str] = field(default_factory=list)

    @property
    def small(self) -> bool:
        """Tell whether each pixel is to be seen."""
        return self.size_px <= SMALL_PX

    def wrong(self, run: str) -> int:
        """Return how many of the images shown a run gets wrong."""
        said = [said for example in self.examples for said in example.said if said.run == run]
        return sum(not each.right for each in said)


def galleries(runs: Sequence[Run], count: int) -> tuple[list[Gallery], dict[str, str]]:
    """Show up to ``count`` images of each run that tells classes, drawn at random, the same for
    every run with the same data.

    Returns:
        The galleries, and for the runs that are in none the reason, a line each.
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
    """Put what a run says into the gallery of its images, which is made where there is none.

    Raises:
        ValueError, OSError: there are no weights or no images, or they do not go together; one
            line.
    """
    validation, items = drawn(run, count)
    spec, labels = validation.spec, [np.asarray(item.label) for item in items]
    said = [judged(validation, item, run.name) for item in items]
    images = [item.pixels.tobytes() for item in items]
    key = (validation.split, spec.class_names, *images, *(label.tobytes() for label in labels))
    if key not in found:
        values = np.unique(np.concatenate([label.ravel() for label in labels]))
        names = [*enumerate(class_names(spec)), (IGNORED, "does not count")]
        masked = spec.task == "segmentation"
        legend = [
            ("#{:02x}{:02x}{:02x}".format(*painted(np.array([[value]]), spec)[0, 0]), name)
            for value, name in names
            if masked and value in values
        ]
        px = MASK_PX if masked else LARGEST_PX
        examples = [
            Example(address(item.pixels, (px, px)),
                    "" if masked else names[int(label)][1],
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
    """Return the best weights of a run with their images, and up to ``count`` of these, in the
    order of the data; unreadable ones left out.

    Raises:
        ValueError, OSError: there are no weights, they do not go with the images, no image can be
            read, or they come as a stream; one line.
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
        raise ValueError("the images come as a stream, of which none can be picked")
    found: dict[int, Item] = {}
    for index in np.random.default_rng(0).permutation(len(dataset)).tolist():
        sample = dataset[SampleKey(index, 0, validation.geometries[0])]
        if not isinstance(sample, Unreadable):
            found[index] = sample
        if len(found) == count:
            break
    if not found:
        raise ValueError("none of the images can be read")
    return validation, [found[index] for index in sorted(found)]


@torch.inference_mode()
def judged(validation: Validation, item: Item, run: str) -> Said:
    """Return what the weights of a run say of an image.

    Raises:
        ValueError: the classes of pixels are not finite.
    """
    spec, model = validation.spec, validation.model
    pixels = rearrange(torch.from_numpy(np.array(item.pixels, order="C")), "h w c -> 1 c h w")
    partly = item.present != item.pixels.shape[:2] and takes_sizes(model)
    sizes = torch.tensor([item.present]) if partly else None
    if spec.task != "segmentation":
        outputs = call(model, spec.prepare(pixels), sizes).float()[0]
        chance, best = outputs.softmax(0).max(0)
        names = class_names(spec)
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
    """Return a mask ``[H, W]`` in its colours as a data address, of at most ``MASK_PX`` a side."""
    picture = Image.fromarray(mask)
    picture.putpalette(palette(spec))
    picture.thumbnail((MASK_PX, MASK_PX), Image.Resampling.NEAREST)
    stream = io.BytesIO()
    picture.save(stream, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
