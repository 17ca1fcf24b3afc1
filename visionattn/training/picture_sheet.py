"""Draw pictures with captions on one sheet."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from einops import rearrange
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from visionattn.data.lettering import EDGE, HATCH, INK, MUTED, PAPER, font_of, printable

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
