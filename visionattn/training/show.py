"""What a model sees of its images: the first batches of training and validation, on one sheet.

The batches are made as a run makes them, and nothing of a run is written. ``sheet.py`` draws.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import one_hot

from visionattn.cli.files import check_free, write_whole
from visionattn.data.batches import Batch, seed_batch
from visionattn.data.drawn_images import seen_as
from visionattn.data.splits import check_root
from visionattn.models.pixel_classes import class_names, striped
from visionattn.models.segmentation import IGNORED
from visionattn.models.weights import DataSpec
from visionattn.training import engine
from visionattn.training.config import TrainConfig, check
from visionattn.training.distributed import Processes
from visionattn.training.sheet import Part, Picture, draw_sheet
from visionattn.training.trainer import Trainer

MOST_PICTURES = 16
"""Pictures of each of the two batches."""


def show_batch(config: TrainConfig) -> str:
    """Draw the first batches of a run into the file ``config.show_batch``, and return a line about
    it.

    Raises:
        ValueError, FileNotFoundError: something about the configuration, the data or the file is
            wrong; one line, and nothing is written.
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


def first_batches(config: TrainConfig) -> list[Part]:
    """Make the first batch of training, augmented and mixed as configured, and the first one of
    validation; of each, the first pictures.

    Raises:
        ValueError, FileNotFoundError: as a training does before its first step.
    """
    data = config.data
    # Images do not depend on the processes that load them, those of a stream excepted.
    if not (data.root or "").startswith("wds/"):
        data = replace(data, workers=0)
    config = replace(config, data=data, parallel=None, sequence_ranks=None)
    trainer, *_ = engine.build(config, None, False, Processes(), torch.device("cpu"))
    training = []
    for number, batch in first(trainer.batches.epoch(0), "training"):
        images, shares = batch.images, known(trainer.spec, batch)
        if trainer.mix is not None:
            seed_batch(config.seed, 0, number)
            inputs, shares = trainer.inputs(batch)
            images = unprepared(trainer.spec, inputs)
        training.append((images, shares, batch.sizes))
    validation = [
        (batch.images, known(trainer.spec, batch), batch.sizes)
        for _, batch in first(trainer.validation, "validation")
    ]
    return [
        part("training", trainer, training, changes=training_changes(config)),
        part("validation", trainer, validation, changes="not augmented"),
    ]


def known(spec: DataSpec, batch: Batch) -> Tensor:
    """Return the classes of a batch: their shares in each image, ``[B, classes]``, of no class
    where images have none, or masks, uint8 ``[B, H, W]``.
    """
    if spec.task == "segmentation":
        return batch.labels
    if not spec.num_classes:
        return batch.images.new_zeros(len(batch.images), 0)
    return one_hot(batch.labels, spec.num_classes)


def first(batches: Iterable[Batch], name: str) -> list[tuple[int, Batch]]:
    """Return the first batches that have images, as many as fill a sheet, and their numbers.

    Raises:
        ValueError: there are none.
    """
    found, images = [], 0
    for number, batch in enumerate(batches):
        if len(batch.labels):
            found.append((number, batch))
            images += len(batch.labels)
        if images >= MOST_PICTURES:
            break
    if not found:
        raise ValueError(f"none of the {name} images can be read, so there is nothing to show")
    return found


def unprepared(spec: DataSpec, inputs: Tensor) -> Tensor:
    """Return what ``DataSpec.prepare`` made inputs ``[B, C, H, W]`` of, also of mixed ones: float32
    in [0, 1], one-hot grey levels as ``[B, 1, H, W]``.
    """
    if spec.encoding == "grey_one_hot":
        return torch.einsum("bchw,c->bhw", inputs, torch.linspace(0, 1, 256))[:, None]
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (spec.mean, spec.std))
    return (inputs * std + mean).clamp(0, 1)


def part(
    title: str,
    trainer: Trainer,
    batches: Sequence[tuple[Tensor, Tensor, Tensor | None]],
    *,
    changes: str,
) -> Part:
    """Return the first images of batches as pictures with captions.

    Args:
        title: what the batches are for.
        trainer: whose images they are.
        batches: of each its images ``[B, C, H, W]``, before ``DataSpec.prepare``; what ``known``
            says of them; and height and width in pixels of what each image fills, from the top
            left, ``[B, 2]``, None where they fill all.
        changes: what was done to the images.
    """
    masked = trainer.spec.task == "segmentation"
    most = MOST_PICTURES // 2 if masked else MOST_PICTURES
    pictures: list[Picture] = []
    for images, shares, present in batches:
        full = (images.shape[2], images.shape[3])
        for index, image in enumerate(images[: most - len(pictures) // (1 + masked)]):
            filled = full if present is None else tuple(present[index].tolist())
            lines = sizes(trainer.model, filled, full)
            if masked:  # each image has its mask beside it
                pictures.append(Picture(visible(image), filled, ("image", *lines)))
                mask = shares[index][: filled[0], : filled[1]]
                colours = striped(shares[index].numpy(), trainer.spec)
                pictures.append(
                    Picture(colours, filled, ("its mask", *in_mask(trainer.spec, mask)))
                )
                continue
            captions: tuple[str, ...] = (named(trainer.spec, shares[index]), *lines)
            pictures.append(Picture(visible(image), filled, captions))
    count, bands = sum(len(images) for images, *_ in batches), batches[0][0].shape[1]
    which = f"{most} of the" if count > most else "all"
    of = "batch" if len(batches) == 1 else f"{len(batches)} batches"
    seen = seen_as(trainer.splits.train, trainer.geometry)
    note = f"{which} {count} images of the first {of}; {seen}; {changes}"
    if bands not in (1, 3):
        note += f"; of {bands} bands {'the first three are' if bands > 3 else 'the first is'} drawn"
    return Part(title, note, pictures)


def visible(image: Tensor) -> np.ndarray:
    """Return an image ``[C, H, W]``, uint8 or float32 in [0, 1], as uint8 ``[H, W, 3]``: its first
    three bands, or the first one alone as grey.
    """
    values = rearrange(image[:3] if image.shape[0] >= 3 else image[:1], "c h w -> h w c").numpy()
    if values.dtype != np.uint8:
        values = np.rint(values.clip(0, 1) * 255).astype(np.uint8)
    return np.broadcast_to(values, (*values.shape[:2], 3))


def named(spec: DataSpec, shares: Tensor) -> str:
    """Return the name of a class; of a mixture the names and shares of the largest two."""
    if not len(shares):
        return "no class"
    names = spec.class_names or tuple(map(str, range(spec.num_classes)))
    parts, classes = shares.float().topk(min(2, len(shares)))
    # Smoothing gives every class a share; mixing gives two more than that.
    mixed = len(parts) == 2 and parts[1] > shares.float().min() + 1e-3
    if not mixed:
        return names[classes[0]]
    return " + ".join(
        f"{100 * part:.0f} % {names[each]}"
        for part, each in zip(parts.tolist(), classes.tolist(), strict=True)
    )


def sizes(model: torch.nn.Module, present: tuple[int, ...], full: tuple[int, ...]) -> list[str]:
    """Return lines about the pixels and patches that are present, and that there is room for."""
    rows, columns = full
    lines = [f"{present[0]} x {present[1]} px"]
    if present != full:
        lines[0] += f" of {rows} x {columns}"
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if patch is not None:
        grid = [-(-px // each) for px, each in zip(present, patch, strict=True)]
        lines.append(f"{grid[0]} x {grid[1]} patches")
    return lines


def in_mask(spec: DataSpec, mask: Tensor) -> list[str]:
    """Name the classes of a mask's pixels, the last first, as the first often is background, and
    say what share of the pixels does not count.
    """
    found = [value for value in mask.unique().tolist()[::-1] if value != IGNORED]
    named = ", ".join(class_names(spec)[value] for value in found) or "nothing that counts"
    ignored = (mask == IGNORED).float().mean().item()
    return [named, *([f"striped: {ignored:.0%} ignored"] if ignored else [])]


def training_changes(config: TrainConfig) -> str:
    """Say how training images are changed."""
    data, optim = config.data, config.optim
    parts = [f"{name} {value}" for name, value in asdict(data.aug).items() if value is not None]
    parts += [
        f"{name} {getattr(optim, name)}" for name in ("mixup", "cutmix") if getattr(optim, name)
    ]
    return ", ".join([f"augment {data.augment}", *parts])
