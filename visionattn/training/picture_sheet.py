"""Draw sheets of pictures with captions: the first batches of training and validation as the model
sees them, for ``--show-batch``, and the predictions of a split, for TensorBoard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.nn.functional import one_hot

from visionattn.data.batches import Batch, EvalBatches, TrainBatches
from visionattn.data.geometry import Geometry
from visionattn.data.lettering import EDGE, HATCH, INK, MUTED, PAPER, font_of, printable
from visionattn.data.splits import Splits
from visionattn.data.synthetic_images import seen_as
from visionattn.model_config import VECTOR_TASKS
from visionattn.models.pixel_classes import striped
from visionattn.models.segmentation import IGNORED
from visionattn.models.weights import DataSpec
from visionattn.training.config import TrainConfig
from visionattn.training.evaluate import MOST_CURVES, Example, Tally
from visionattn.training.output_scores import decided, in_words

MOST_PICTURES = 16
"""Maximum number of training pictures and of validation pictures of ``--show-batch``."""
EVENT_PX = 640
"""Maximum width of a sheet for TensorBoard in pixels; long captions may exceed it."""
MASK_PX = 256
"""Maximum side of a mask drawn for TensorBoard in pixels."""
MOST_PX, COLUMNS = 2400, 8
"""Maximum width of a sheet in pixels, and maximum number of pictures in a row."""
ENLARGED_PX, MOST_TIMES, LEAST_PX = 256, 4, 24
"""Small pictures are enlarged by a common integer factor, up to ``ENLARGED_PX`` and ``MOST_TIMES``;
large pictures are shrunk to a common longest side of at least ``LEAST_PX``.
"""
MARGIN, GAP, NARROWEST, HEAD_PX, CAPTION_PX = 24, 14, 128, 60, 17
CELL_PX, NAME_PX = 40, 160
"""Side of a cell of a confusion matrix, and maximum width of a class name, in pixels."""
BLUE = (29, 86, 184)
"""The color of a share of 1."""
SMALL = 12
"""The usual font size."""


@dataclass(frozen=True)
class SheetPicture:
    """An image and its captions."""

    pixels: np.ndarray
    """uint8 ``[H, W, 3]``."""
    present: tuple[int, int]
    """Height and width in pixels of the image, from the top left; padding is drawn hatched."""
    captions: tuple[str, ...]
    """Lines below the picture; the first line is its name."""


@dataclass(frozen=True)
class SheetPart:
    """A title with its pictures."""

    title: str
    note: str
    pictures: Sequence[SheetPicture]


def visible(image: Tensor) -> np.ndarray:
    """Convert an image ``[C, H, W]``, uint8 or float32 in [0, 1], to uint8 ``[H, W, 3]``: its first
    three bands, or its first band as gray.
    """
    values = rearrange(image[:3] if image.shape[0] >= 3 else image[:1], "c h w -> h w c").numpy()
    if values.dtype != np.uint8:
        values = np.rint(values.clip(0, 1) * 255).astype(np.uint8)
    return np.broadcast_to(values, (*values.shape[:2], 3))


# The first batches


def truth_of(spec: DataSpec, batch: Batch) -> Tensor:
    """Return the ground truth of a batch: shares of classes ``[B, classes]``, labels of
    ``VECTOR_TASKS`` ``[B, K]``, or masks, uint8 ``[B, H, W]``.
    """
    if spec.task == "segmentation" or spec.task in VECTOR_TASKS:
        return batch.labels
    if not spec.num_classes:
        return batch.images.new_zeros(len(batch.images), 0)
    return one_hot(batch.labels, spec.num_classes)


def first_of(batches: Any, name: str) -> list[tuple[int, Batch, list[str]]]:
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


def sheet_part(
    title: str,
    model: nn.Module,
    splits: Splits,
    batches: Sequence[tuple[Tensor, Tensor, Tensor | None, list[str]]],
    geometry: Geometry,
    *,
    changes: str,
) -> SheetPart:
    """Return the first images of batches as pictures with captions.

    Args:
        title: the split of the batches.
        model: the model of the run.
        splits: the images of the run.
        batches: for each batch: images ``[B, C, H, W]`` before ``DataSpec.prepare``; ground truth
            from ``truth_of``; height and width in pixels of each image without padding, ``[B,
            2]``, or None without padding; file names.
        geometry: their preprocessing.
        changes: the augmentation, in words.
    """
    spec, masked = splits.spec, splits.spec.task == "segmentation"
    most = MOST_PICTURES // (1 + masked)
    pictures: list[SheetPicture] = []
    for images, classes, present, names in batches:
        full = (images.shape[2], images.shape[3])
        for index, image in enumerate(images[: most - len(pictures) // (1 + masked)]):
            filled = full if present is None else tuple(present[index].tolist())
            name = "image" if masked else named(spec, classes[index])
            lines = [*filter(None, [names[index]]), *sizes(model, filled, full)]
            pictures.append(SheetPicture(visible(image), filled, (name, *lines)))
            if masked:  # the mask comes after its image
                lines = in_mask(spec, classes[index][: filled[0], : filled[1]])
                colours = striped(classes[index].numpy(), spec)
                pictures.append(SheetPicture(colours, filled, ("its mask", *lines)))
    count, bands = sum(len(images) for images, *_ in batches), batches[0][0].shape[1]
    which = f"{most} of the" if count > most else "all"
    of = "batch" if len(batches) == 1 else f"{len(batches)} batches"
    seen = seen_as(splits.train, geometry)
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


def sizes(model: nn.Module, present: tuple[int, ...], full: tuple[int, ...]) -> list[str]:
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


# Predictions


def add_predictions(
    events: Any,
    split: str,
    step: int,
    spec: DataSpec,
    tally: Tally,
    rows: np.ndarray,
    probabilities: np.ndarray,
) -> None:
    """Write the predictions of a split as TensorBoard events: the example pictures, and for at most
    ``MOST_CURVES`` classes the confusion matrix and a precision-recall curve of each class.

    Args:
        events: a ``SummaryWriter``.
        split: the name of the split.
        step: the step of the events.
        spec: the specification of the images.
        tally: the record of the first process.
        rows: ``Tally.rows`` of all processes.
        probabilities: ``Tally.probabilities`` of all processes, in the order of ``rows``.
    """
    if tally.examples:
        add_picture(events, f"{split}/examples", draw_examples(tally.examples, split, spec), step)
    if spec.num_classes > MOST_CURVES:
        return
    names, confusion = spec.output_names, tally.confusion
    classes = np.arange(spec.num_classes)
    if spec.task in VECTOR_TASKS:
        labels, probabilities, _ = np.split(rows, [len(classes), 2 * len(classes)], 1)
    elif len(probabilities):
        known, said = rows[:, :2].astype(np.int64).T
        confusion = np.zeros((len(classes), len(classes)), np.int64)
        np.add.at(confusion, (known, said), 1)
        labels = known[:, None] == classes
    if len(probabilities) and spec.task != "regression":
        for name, known, found in zip(names, labels.T, probabilities.T, strict=True):
            counted = np.isfinite(known)
            tag = f"precision_recall_{split}/{name}"
            events.add_pr_curve(tag, known[counted], found[counted], step)
    if confusion is not None:
        add_picture(events, f"{split}/confusion", draw_confusion(confusion, names), step)


def add_picture(events: Any, tag: str, picture: Image.Image, step: int) -> None:
    """Write a picture as an event."""
    events.add_image(tag, np.asarray(picture), step, dataformats="HWC")


def draw_examples(examples: Sequence[Example], split: str, spec: DataSpec) -> Image.Image:
    """Draw images with their true and their predicted class, or with both masks."""
    if spec.task == "segmentation":
        pictures = [each for example in examples for each in with_masks(example, spec)]
        columns = 6
    else:
        pictures = [with_outputs(example, spec) for example in examples]
        columns = 4
    part = SheetPart(split, f"{len(examples)} images", pictures)
    return draw_sheet([part], most_px=EVENT_PX, columns=columns)


def with_outputs(example: Example, spec: DataSpec) -> SheetPicture:
    """Return an image with its label, and below it the prediction."""
    label, output, names = example.label, example.output, spec.output_names
    if spec.task in VECTOR_TASKS:
        labels = label.numpy(), decided(spec, output.numpy())
        lines = [in_words(spec, each) for each in labels]
    else:
        said = int(output.argmax())
        lines = [in_words(spec, label.numpy()), f"{names[said]}, {output.softmax(0)[said]:.0%}"]
    captions = f"true: {lines[0]}", f"predicted: {lines[1]}"
    return SheetPicture(visible(example.image), tuple(example.image.shape[1:]), captions)


def with_masks(example: Example, spec: DataSpec) -> list[SheetPicture]:
    """Return an image, its mask and the predicted mask."""
    pixels = {"image": visible(example.image)}
    stride = -(-max(example.label.shape) // MASK_PX)
    for name, mask in {"mask": example.label, "prediction": example.output}.items():
        pixels[name] = striped(mask[::stride, ::stride].numpy(), spec)
    return [SheetPicture(values, values.shape[:2], (name,)) for name, values in pixels.items()]


# Drawing


def draw_sheet(
    parts: Sequence[SheetPart], *, most_px: int = MOST_PX, columns: int = COLUMNS
) -> Image.Image:
    """Draw pictures, each at its own aspect ratio, part below part.

    All pictures have the same scale: tiny pictures are enlarged by an integer factor, large ones
    are shrunk to a common longest side.

    Args:
        parts: the parts in reading order, with at least one picture.
        most_px: maximum width of the sheet in pixels; long captions may exceed it.
        columns: maximum number of pictures in a row.
    """
    longest = max(max(picture.pixels.shape[:2]) for part in parts for picture in part.pictures)
    times = max(1, min(MOST_TIMES, ENLARGED_PX // longest))
    columns = min(columns, max(len(part.pictures) for part in parts))
    cap = min(times * longest, max(LEAST_PX, (most_px - 2 * MARGIN) // columns - GAP))
    how = f"; shown {times} times as large" if times > 1 else ""
    if cap < longest:
        how = f"; shown at {cap} px at most"
    rows = []
    for part in parts:
        rows.append([draw_head(part.title, part.note + how)])
        tiles = [draw_picture(picture, times, cap) for picture in part.pictures]
        rows += [tiles[start : start + columns] for start in range(0, len(tiles), columns)]
    widths = [sum(tile.width + GAP for tile in row) - GAP for row in rows]
    heights = [max(tile.height for tile in row) + GAP for row in rows]
    size = max(widths) + 2 * MARGIN, sum(heights) - GAP + 2 * MARGIN
    sheet, top = Image.new("RGB", size, PAPER), MARGIN
    for row, height in zip(rows, heights, strict=True):
        left = MARGIN
        for tile in row:
            sheet.paste(tile, (left, top))
            left += tile.width + GAP
        top += height
    return sheet


def draw_head(title: str, note: str) -> Image.Image:
    """Draw a title with a note below it."""
    width = int(font_of(SMALL).getlength(note)) + 1
    head = Image.new("RGB", (max(width, NARROWEST), HEAD_PX), PAPER)
    pen = ImageDraw.Draw(head)
    pen.text((0, 0), title, fill=INK, font=font_of(20, bold=True))
    pen.text((0, 32), note, fill=MUTED, font=font_of(SMALL))
    return head


def draw_picture(picture: SheetPicture, times: int, cap: int) -> Image.Image:
    """Draw a picture, enlarged ``times`` but at most ``cap`` pixels long, with a frame and its
    captions.
    """
    full_height, full_width = picture.pixels.shape[:2]
    scale = min(times, cap / max(full_height, full_width))
    height, width = max(1, round(full_height * scale)), max(1, round(full_width * scale))
    lines = len(picture.captions)
    tile_width = max(width + 2, NARROWEST)
    tile = Image.new("RGB", (tile_width, height + 6 + lines * CAPTION_PX), PAPER)
    # Hatching shows the padding around the image.
    area = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(area)
    for start in range(-height, width, 8):
        pen.line((start, height, start + height, 0), fill=HATCH)
    rows, columns = picture.present
    seen = Image.fromarray(np.ascontiguousarray(picture.pixels[:rows, :columns]))
    size = max(1, round(columns * scale)), max(1, round(rows * scale))
    method = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS
    area.paste(seen.resize(size, method))
    tile.paste(area, (1, 1))
    pen = ImageDraw.Draw(tile)
    pen.rectangle((0, 0, width + 1, height + 1), outline=EDGE)
    for number, caption in enumerate(picture.captions):
        font = font_of(SMALL) if number else font_of(13, bold=True)
        text = shortened(printable(caption), font, tile_width)
        place = (0, height + 5 + number * CAPTION_PX)
        pen.text(place, text, fill=MUTED if number else INK, font=font)
    return tile


def shortened(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """Cut a text to at most ``width`` pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def draw_confusion(confusion: np.ndarray, names: Sequence[str]) -> Image.Image:
    """Draw a confusion matrix: a row for each true class, a column for each predicted class.

    Each cell has the share of its row as color. Its text is the count, or the share in percent if
    a count has more than four digits.

    Args:
        confusion: counts ``[classes, classes]``.
        names: the names of the classes.
    """
    shares = confusion / confusion.sum(1, keepdims=True).clip(1)
    counted = confusion.max() < 10_000
    font, size = font_of(SMALL), CELL_PX * len(names)
    names = [shortened(printable(name), font, NAME_PX) for name in names]
    edge = GAP + max(int(font.getlength(name)) for name in names)
    named = Image.new("RGB", (edge, size), PAPER)
    for row, name in enumerate(names):
        place = (edge - 4, CELL_PX * (row + 0.5))
        ImageDraw.Draw(named).text(place, name, fill=INK, font=font, anchor="rm")
    head = draw_head("confusion matrix", "rows: true class; columns: predicted class")
    sides = max(edge + size + GAP, head.width + 2 * GAP), HEAD_PX + size + edge
    sheet = Image.new("RGB", sides, PAPER)
    sheet.paste(head, (GAP, GAP // 2))
    sheet.paste(named, (0, HEAD_PX))
    sheet.paste(named.rotate(90, expand=True), (edge, HEAD_PX + size))
    pen = ImageDraw.Draw(sheet)
    for (row, column), share in np.ndenumerate(shares):
        left, top = edge + CELL_PX * column, HEAD_PX + CELL_PX * row
        fill = tuple(round(255 + share * (level - 255)) for level in BLUE)
        pen.rectangle((left, top, left + CELL_PX, top + CELL_PX), fill=fill, outline=EDGE)
        text = str(confusion[row, column]) if counted else f"{share:.0%}"
        centre, ink = (left + CELL_PX / 2, top + CELL_PX / 2), PAPER if share > 0.5 else INK
        pen.text(centre, text, fill=ink, font=font, anchor="mm")
    return sheet
