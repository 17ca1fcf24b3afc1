"""Draw the first batches of training and validation as the model sees them, for ``--show-batch``.
The batches are made as in a run, but no file of a run is written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from visionattn.cli.files import check_free, write_whole
from visionattn.data.batches import Batch, EvalBatches, TrainBatches, seed_batch
from visionattn.data.geometry import Geometry
from visionattn.data.splits import check_root, training_geometry
from visionattn.data.synthetic_images import seen_as
from visionattn.model_config import VECTOR_TASKS
from visionattn.models.pixel_classes import striped
from visionattn.models.segmentation import IGNORED
from visionattn.models.weights import DataSpec
from visionattn.training import engine
from visionattn.training.config import TrainConfig, check
from visionattn.training.distributed import Processes
from visionattn.training.output_scores import in_words
from visionattn.training.picture_sheet import SheetPart, SheetPicture, draw_sheet, visible
from visionattn.training.trainer import Trainer

MOST_PICTURES = 16
"""Maximum number of training pictures and of validation pictures."""


def show_batch(config: TrainConfig) -> str:
    """Draw the first batches of a run to the file ``config.show_batch``, and return its summary
    line.

    Raises:
        ValueError, FileNotFoundError: wrong configuration, data or file. One line; nothing is
            written.
        OSError: the file cannot be written.
    """
    check(config)
    check_root(config.data)
    path = Path(config.show_batch or "")
    check_free(path, config.overwrite)
    parts = first_batches(config)
    sheet = draw_sheet(parts)
    write_whole(path, lambda place: sheet.save(place, format="PNG"))
    masked = config.data.task == "segmentation"
    what = " and ".join(f"{len(part.pictures) // (1 + masked)} {part.title}" for part in parts)
    seen = "images with their masks" if masked else "images"
    return f"{path}: {what} {seen} as the model sees them; nothing was trained"


def first_batches(config: TrainConfig) -> list[SheetPart]:
    """Return the first pictures of training, augmented and mixed as configured, and of validation.

    Raises:
        ValueError, FileNotFoundError: the configuration or the data are wrong.
    """
    data = config.data
    # Images do not depend on the number of loader processes, except in a stream.
    if not (data.root or "").startswith("wds/"):
        data = replace(data, workers=0)
    config = replace(config, data=data, parallel=None)
    trainer, *_ = engine.build(config, None, False, Processes(), torch.device("cpu"))
    training = []
    for number, batch, names in first(trainer.batches, "training"):
        images, classes = batch.images, known(trainer.spec, batch)
        if trainer.mix is not None:
            seed_batch(config.seed, 0, number)
            inputs, classes = trainer.inputs(batch)
            images = unprepared(trainer.spec, inputs)
        training.append((images, classes, batch.sizes, names))
    validation = [
        (batch.images, known(trainer.spec, batch), batch.sizes, names)
        for _, batch, names in first(trainer.validation, "validation")
    ]
    seen, whole = training_geometry(trainer.spec, data), trainer.geometry
    return [
        part("training", trainer, training, seen, changes=training_changes(config)),
        part("validation", trainer, validation, whole, changes="not augmented"),
    ]


def known(spec: DataSpec, batch: Batch) -> Tensor:
    """Return the ground truth of a batch: shares of classes ``[B, classes]``, labels of
    ``VECTOR_TASKS`` ``[B, K]``, or masks, uint8 ``[B, H, W]``.
    """
    if spec.task == "segmentation" or spec.task in VECTOR_TASKS:
        return batch.labels
    if not spec.num_classes:
        return batch.images.new_zeros(len(batch.images), 0)
    return one_hot(batch.labels, spec.num_classes)


def first(batches: Any, name: str) -> list[tuple[int, Batch, list[str]]]:
    """Return the first batches with images, enough to fill a sheet: number, batch, and the file
    name of each image, empty without files.

    Raises:
        ValueError: no image can be read.
    """
    found: list[tuple[int, Batch, list[str]]] = []
    for number, (batch, names) in enumerate(with_names(batches)):
        if len(batch.labels):
            found.append((number, batch, names))
        if sum(len(each.labels) for _, each, _ in found) >= MOST_PICTURES:
            break
    if not found:
        raise ValueError(f"expected a readable {name} image to show, got none; check the files")
    return found


def with_names(batches: Any) -> Iterator[tuple[Batch, list[str]]]:
    """Yield the batches of the first epoch with the names of their files."""
    if not isinstance(batches, TrainBatches | EvalBatches):  # a stream has no indices
        for batch in batches.epoch(0) if hasattr(batches, "epoch") else batches:
            yield batch, [""] * len(batch.labels)
        return
    name = getattr(batches.dataset, "name", lambda _: "")
    for batch, numbers in batches.numbered():
        yield batch, [Path(name(number)).name for number in numbers]


def unprepared(spec: DataSpec, inputs: Tensor) -> Tensor:
    """Invert ``DataSpec.prepare``: return the images of inputs ``[B, C, H, W]``, float32 in [0, 1];
    one-hot gray levels become ``[B, 1, H, W]``.
    """
    if spec.encoding == "grey_one_hot":
        return torch.einsum("bchw,c->bhw", inputs, torch.linspace(0, 1, 256))[:, None]
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (spec.mean, spec.std))
    return (inputs * std + mean).clamp(0, 1)


def part(
    title: str,
    trainer: Trainer,
    batches: Sequence[tuple[Tensor, Tensor, Tensor | None, list[str]]],
    geometry: Geometry,
    *,
    changes: str,
) -> SheetPart:
    """Return the first images of batches as pictures with captions.

    Args:
        title: the split of the batches.
        trainer: the trainer of the run.
        batches: for each batch: images ``[B, C, H, W]`` before ``DataSpec.prepare``; ground truth
            from ``known``; height and width in pixels of each image without padding, ``[B, 2]``, or
            None without padding; file names.
        geometry: their preprocessing.
        changes: the augmentation, in words.
    """
    spec, masked = trainer.spec, trainer.spec.task == "segmentation"
    most = MOST_PICTURES // (1 + masked)
    pictures: list[SheetPicture] = []
    for images, classes, present, names in batches:
        full = (images.shape[2], images.shape[3])
        for index, image in enumerate(images[: most - len(pictures) // (1 + masked)]):
            filled = full if present is None else tuple(present[index].tolist())
            name = "image" if masked else named(spec, classes[index])
            lines = [*filter(None, [names[index]]), *sizes(trainer.model, filled, full)]
            pictures.append(SheetPicture(visible(image), filled, (name, *lines)))
            if masked:  # the mask comes after its image
                lines = in_mask(spec, classes[index][: filled[0], : filled[1]])
                colours = striped(classes[index].numpy(), spec)
                pictures.append(SheetPicture(colours, filled, ("its mask", *lines)))
    count, bands = sum(len(images) for images, *_ in batches), batches[0][0].shape[1]
    which = f"{most} of the" if count > most else "all"
    of = "batch" if len(batches) == 1 else f"{len(batches)} batches"
    seen = seen_as(trainer.splits.train, geometry)
    note = f"{which} {count} images of the first {of}; {seen}; {changes}; sizes: height x width"
    if bands not in (1, 3):
        note += f"; of {bands} bands {'the first three are' if bands > 3 else 'the first is'} drawn"
    return SheetPart(title, note, pictures)


def named(spec: DataSpec, shares: Tensor) -> str:
    """Return the ground truth as text: a class name, several class names, numbers, or the names and
    shares of the two largest classes of a mixture.
    """
    if not len(shares):
        return "no class"
    if spec.task in VECTOR_TASKS:
        return in_words(spec, shares.numpy())
    parts, classes = shares.float().topk(min(2, len(shares)))
    # Label smoothing gives every class a share; mixing gives two classes more.
    if len(parts) < 2 or parts[1] <= shares.float().min() + 1e-3:
        return spec.output_names[classes[0]]
    pairs = zip(parts.tolist(), classes.tolist(), strict=True)
    return " + ".join(f"{100 * share:.0f} % {spec.output_names[each]}" for share, each in pairs)


def sizes(model: torch.nn.Module, present: tuple[int, ...], full: tuple[int, ...]) -> list[str]:
    """Return lines about the pixels and patches without padding, and the size of the batch."""
    lines = [f"{present[0]} x {present[1]} px"]
    if present != full:
        lines[0] += f" of {full[0]} x {full[1]}"
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if patch is not None:
        grid = [-(-px // each) for px, each in zip(present, patch, strict=True)]
        lines.append(f"{grid[0]} x {grid[1]} patches")
    return lines


def in_mask(spec: DataSpec, mask: Tensor) -> list[str]:
    """Name the classes in a mask and the share of ignored pixels. The last class comes first,
    because the first is often background.
    """
    found = [value for value in mask.unique().tolist()[::-1] if value != IGNORED]
    named = ", ".join(spec.output_names[value] for value in found) or "nothing that counts"
    ignored = (mask == IGNORED).float().mean().item()
    return [named, *([f"striped: {ignored:.0%} ignored"] if ignored else [])]


def training_changes(config: TrainConfig) -> str:
    """Describe the augmentation of training images."""
    data, optim = config.data, config.optim
    mixing = {"mixup": optim.mixup, "cutmix": optim.cutmix}
    given = [f"{name} {value}" for name, value in mixing.items() if value]
    return ", ".join([f"augment {data.augment}", *given])
