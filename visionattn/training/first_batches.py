"""What a model sees of its images: the first batches of training and validation, on one sheet.

The batches are made as a run makes them, and nothing of a run is written.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn.functional import one_hot

from visionattn.cli.files import check_free, write_whole
from visionattn.data.batches import Batch, seed_batch
from visionattn.data.drawn_images import seen_as
from visionattn.data.lettering import EDGE, HATCH, INK, MUTED, PAPER, font_of, printable
from visionattn.data.splits import check_root
from visionattn.models.pixel_classes import class_names, striped
from visionattn.models.segmentation import IGNORED
from visionattn.models.weights import DataSpec
from visionattn.training import engine
from visionattn.training.config import TrainConfig, check
from visionattn.training.distributed import Processes
from visionattn.training.trainer import Trainer

MOST_PICTURES = 16
"""Pictures of each of the two batches."""
MOST_PX, COLUMNS = 2400, 8
"""The largest width and height of a sheet in pixels, as far as captions allow, and the most
pictures side by side.
"""
ENLARGED_PX, MOST_TIMES, LEAST_PX = 256, 4, 24
"""Pictures are enlarged by a whole number, to at most so many pixels and so many times. They are
not shrunk below the longest side ``LEAST_PX``.
"""
MARGIN, GAP, BETWEEN_PARTS, NARROWEST = 24, 14, 18, 128
TITLE_PX, NOTE_PX, CAPTION_PX = 32, 28, 17
SMALL = 12
"""The size of most letters."""


@dataclass(frozen=True)
class Picture:
    """An image and its captions."""

    pixels: np.ndarray
    """uint8 ``[H, W, 3]``."""
    present: tuple[int, int]
    """Height and width in pixels of the image, from the top left; the rest is drawn hatched."""
    captions: tuple[str, ...]
    """Lines below it; the first one is its name."""


@dataclass(frozen=True)
class Part:
    """Pictures under one title."""

    title: str
    note: str
    pictures: Sequence[Picture]

    @property
    def longest(self) -> int:
        """Return the longest side of a picture in pixels."""
        return max(max(picture.pixels.shape[:2]) for picture in self.pictures)


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
    # Images do not depend on the processes that load them, except in a stream.
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
    """Return the classes of a batch: their shares in each image, ``[B, classes]`` (without classes
    ``[B, 0]``), or masks, uint8 ``[B, H, W]``.
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
    """Return the images, float32 in [0, 1], that ``DataSpec.prepare`` turned into inputs
    ``[B, C, H, W]``; one-hot grey levels become ``[B, 1, H, W]``.
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
        batches: for each its images ``[B, C, H, W]``, before ``DataSpec.prepare``; what ``known``
            says of them; and height and width in pixels of what each image fills, from the top
            left, ``[B, 2]``, None where they fill all.
        changes: what was done to the images.
    """
    spec, masked = trainer.spec, trainer.spec.task == "segmentation"
    most = MOST_PICTURES // 2 if masked else MOST_PICTURES
    pictures: list[Picture] = []
    for images, shares, present in batches:
        full = (images.shape[2], images.shape[3])
        for index, image in enumerate(images[: most - len(pictures) // (1 + masked)]):
            filled = full if present is None else tuple(present[index].tolist())
            name = "image" if masked else named(spec, shares[index])
            lines = sizes(trainer.model, filled, full)
            pictures.append(Picture(visible(image), filled, (name, *lines)))
            if masked:  # each image is followed by its mask
                lines = in_mask(spec, shares[index][: filled[0], : filled[1]])
                colours = striped(shares[index].numpy(), spec)
                pictures.append(Picture(colours, filled, ("its mask", *lines)))
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
    three bands, or of fewer the first one as grey.
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
    mixing = {name: getattr(optim, name) or None for name in ("mixup", "cutmix")}
    changes = (asdict(data.aug) | mixing).items()
    given = [f"{name} {value}" for name, value in changes if value is not None]
    return ", ".join([f"augment {data.augment}", *given])


@dataclass(frozen=True)
class Layout:
    """How large pictures are shown, and how many side by side."""

    columns: int
    times: int
    cap: float
    """The longest side in pixels at which a picture is shown."""

    def rows(self, part: Part) -> list[Sequence[Picture]]:
        """Divide the pictures of a part into rows."""
        firsts = range(0, len(part.pictures), self.columns)
        return [part.pictures[first : first + self.columns] for first in firsts]

    def size(self, picture: Picture) -> tuple[int, int]:
        """Return height and width in pixels at which a picture is shown."""
        height, width = picture.pixels.shape[:2]
        scale = min(self.times, self.cap / max(height, width))
        return max(1, round(height * scale)), max(1, round(width * scale))

    def width(self, picture: Picture) -> int:
        """Return the width in pixels of a picture with its captions."""
        return max(self.size(picture)[1], NARROWEST)

    def height(self, row: Sequence[Picture]) -> int:
        """Return the height in pixels of a row of pictures with its captions."""
        lines = max(len(picture.captions) for picture in row)
        return max(self.size(picture)[0] for picture in row) + 6 + lines * CAPTION_PX + GAP

    def note(self, part: Part) -> str:
        """Return a part's note, and how its pictures are shown if not pixel by pixel."""
        if self.times > 1 and self.cap >= self.times * part.longest:
            return f"{part.note}; shown {self.times} times as large"
        if self.cap < part.longest:
            return f"{part.note}; shown at {self.cap} px at most"
        return part.note

    def sheet(self, parts: Sequence[Part]) -> tuple[int, int]:
        """Return height and width of the sheet in pixels."""
        widths, height = [], 2 * MARGIN - GAP - BETWEEN_PARTS
        for part in parts:
            rows = self.rows(part)
            height += BETWEEN_PARTS + TITLE_PX + NOTE_PX + sum(map(self.height, rows))
            widths += [sum(map(self.width, row)) + GAP * (len(row) - 1) for row in rows]
            widths.append(math.ceil(font_of(SMALL).getlength(self.note(part))))
        return height, max(widths) + 2 * MARGIN


def best_layout(parts: Sequence[Part], most_px: int) -> Layout:
    """Return the layout that shows pictures largest, and of these the widest."""
    longest = max(part.longest for part in parts)
    most = max(len(part.pictures) for part in parts)
    times = max(1, min(MOST_TIMES, ENLARGED_PX // longest))
    found = []
    for columns in range(1, min(COLUMNS, most) + 1):
        low, high = min(LEAST_PX, longest), times * longest
        # The largest cap that fits: the sheet grows with it.
        while low < high:
            middle = (low + high + 1) // 2
            fits = max(Layout(columns, times, middle).sheet(parts)) <= most_px
            low, high = (middle, high) if fits else (low, middle - 1)
        found.append(Layout(columns, times, low))
    return max(found, key=lambda layout: (layout.cap, layout.columns))


def draw_sheet(parts: Sequence[Part], *, most_px: int = MOST_PX) -> Image.Image:
    """Draw pictures, each at its own aspect ratio, part below part.

    All pictures are shown in the same way: up to a longest side at their own size, above it shrunk
    to that side; tiny ones are all enlarged by the same whole number.

    Args:
        parts: in the order of reading, with at least one picture.
        most_px: the largest width and height of the sheet in pixels; many pictures of the least
            size may need more.
    """
    layout = best_layout(parts, most_px)
    height, width = layout.sheet(parts)
    sheet = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(sheet)
    top = MARGIN
    for part in parts:
        pen.text((MARGIN, top), part.title, fill=INK, font=font_of(20, bold=True))
        pen.text((MARGIN, top + TITLE_PX), layout.note(part), fill=MUTED, font=font_of(SMALL))
        top += TITLE_PX + NOTE_PX
        for row in layout.rows(part):
            left = MARGIN
            for picture in row:
                draw_picture(sheet, picture, (left, top), layout)
                left += layout.width(picture) + GAP
            top += layout.height(row)
        top += BETWEEN_PARTS
    return sheet


def draw_picture(
    sheet: Image.Image, picture: Picture, place: tuple[int, int], layout: Layout
) -> None:
    """Draw a picture and its captions; ``place`` is its left and top."""
    (left, top), (height, width) = place, layout.size(picture)
    full_height, full_width = picture.pixels.shape[:2]
    rows, columns = picture.present
    # The image lies over an area whose hatching shows that nothing is there.
    area = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(area)
    for start in range(-height, width, 8):
        pen.line((start, height, start + height, 0), fill=HATCH)
    seen = Image.fromarray(np.ascontiguousarray(picture.pixels[:rows, :columns]))
    size = max(1, round(columns * width / full_width)), max(1, round(rows * height / full_height))
    if size[0] >= columns:
        seen = seen.resize(size, Image.Resampling.NEAREST)
    else:
        seen = seen.resize(size, Image.Resampling.LANCZOS, reducing_gap=3)
    area.paste(seen)
    sheet.paste(area, place)
    pen = ImageDraw.Draw(sheet)
    pen.rectangle((left - 1, top - 1, left + width, top + height), outline=EDGE)
    for number, caption in enumerate(picture.captions):
        font = font_of(SMALL) if number else font_of(13, bold=True)
        text = shortened(printable(caption), font, layout.width(picture))
        line = (left, top + height + 5 + number * CAPTION_PX)
        pen.text(line, text, fill=MUTED if number else INK, font=font)


def shortened(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """Cut a text so that it is not wider than ``width`` pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
