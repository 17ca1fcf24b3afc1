"""A sheet of pictures with what stands below them, drawn with Pillow.

This module owns the layout: how large each picture is shown and where. It knows neither data sets
nor runs; ``show.py`` says what is on the sheet.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from visionattn.data.lettering import EDGE, HATCH, INK, MUTED, PAPER, font_of, printable

MOST_PX = 2400
"""Sheets are at most so wide and so high, as far as captions allow."""
COLUMNS = 8
"""The most pictures side by side."""
ENLARGED_PX, MOST_TIMES = 256, 4
"""Pictures are enlarged by a whole number, to at most so many pixels and so many times."""
LEAST_PX = 24
"""Pictures are not shrunk below this longest side."""

_MARGIN, _GAP, _BETWEEN_PARTS, _NARROWEST = 24, 14, 18, 128
_LARGE, _NAME, _SMALL = 20, 13, 12
_TITLE_PX, _NOTE_PX, _CAPTION_PX = 32, 28, 17


@dataclass(frozen=True)
class Picture:
    """An image and its captions."""

    pixels: np.ndarray
    """uint8 ``[H, W, 3]``."""
    present: tuple[int, int]
    """Height and width in pixels of what counts, from the top left; the rest is drawn hatched."""
    captions: tuple[str, ...]
    """Lines below it; the first one is its name."""

    @property
    def longest(self) -> int:
        """Return its longest side in pixels."""
        return max(self.pixels.shape[:2])


@dataclass(frozen=True)
class Part:
    """Pictures under one title."""

    title: str
    note: str
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class _Layout:
    """How large pictures are shown, and how many side by side."""

    columns: int
    times: int
    cap: float
    """The longest side in pixels at which a picture is shown."""

    def size(self, picture: Picture) -> tuple[int, int]:
        """Return height and width in pixels at which a picture is shown."""
        scale = min(self.times, self.cap / picture.longest)
        height, width = picture.pixels.shape[:2]
        return max(1, round(height * scale)), max(1, round(width * scale))

    def rows(self, part: Part) -> list[Sequence[Picture]]:
        """Divide the pictures of a part into rows."""
        return [
            part.pictures[first : first + self.columns]
            for first in range(0, len(part.pictures), self.columns)
        ]

    def cell(self, picture: Picture) -> int:
        """Return the width in pixels of a picture with its captions."""
        return max(self.size(picture)[1], _NARROWEST)

    def row_height(self, row: Sequence[Picture]) -> int:
        """Return the height in pixels of a row with its captions."""
        lines = max(len(picture.captions) for picture in row)
        return max(self.size(picture)[0] for picture in row) + 6 + lines * _CAPTION_PX + _GAP

    def note(self, part: Part) -> str:
        """Return a part's note, and how its pictures are shown if not pixel by pixel."""
        longest = max(picture.longest for picture in part.pictures)
        if self.times > 1 and self.cap >= self.times * longest:
            return f"{part.note}; shown {self.times} times as large"
        if self.cap < longest:
            return f"{part.note}; shown at {self.cap} px at most"
        return part.note

    def sheet(self, parts: Sequence[Part]) -> tuple[int, int]:
        """Return height and width of the sheet in pixels."""
        width, height = 0, _MARGIN - _BETWEEN_PARTS
        for part in parts:
            height += _BETWEEN_PARTS + _TITLE_PX + _NOTE_PX
            for row in self.rows(part):
                width = max(width, sum(map(self.cell, row)) + _GAP * (len(row) - 1))
                height += self.row_height(row)
            words = max(
                font_of(_SMALL).getlength(self.note(part)),
                font_of(_LARGE, bold=True).getlength(part.title),
            )
            width = max(width, math.ceil(words))
        return height + _MARGIN - _GAP, width + 2 * _MARGIN


def draw_sheet(parts: Sequence[Part], *, most_px: int = MOST_PX) -> Image.Image:
    """Draw pictures, each at its own aspect ratio, part below part.

    All pictures are shown in the same way: up to a longest side at their own size, above it shrunk
    to that side; tiny ones are all enlarged by the same whole number.

    Args:
        parts: in the order of reading, with at least one picture.
        most_px: the largest width and height of the sheet in pixels; many pictures of the least
            size may need more.
    """
    layout = _best_layout(parts, most_px)
    height, width = layout.sheet(parts)
    sheet = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(sheet)
    top = _MARGIN - _BETWEEN_PARTS
    for part in parts:
        top += _BETWEEN_PARTS
        pen.text((_MARGIN, top), part.title, fill=INK, font=font_of(_LARGE, bold=True))
        pen.text((_MARGIN, top + _TITLE_PX), layout.note(part), fill=MUTED, font=font_of(_SMALL))
        top += _TITLE_PX + _NOTE_PX
        for row in layout.rows(part):
            left = _MARGIN
            for picture in row:
                _draw_picture(sheet, pen, picture, (top, left), layout)
                left += layout.cell(picture) + _GAP
            top += layout.row_height(row)
    return sheet


def _best_layout(parts: Sequence[Part], most_px: int) -> _Layout:
    """Return the layout that shows pictures largest, and of these the widest."""
    longest = max(picture.longest for part in parts for picture in part.pictures)
    most = max(len(part.pictures) for part in parts)
    times = max(1, min(MOST_TIMES, ENLARGED_PX // longest))
    found = []
    for columns in range(1, min(COLUMNS, most) + 1):
        low, high = min(LEAST_PX, longest), times * longest
        # The largest cap that fits: the sheet grows with it.
        while low < high:
            middle = (low + high + 1) // 2
            fits = max(_Layout(columns, times, middle).sheet(parts)) <= most_px
            low, high = (middle, high) if fits else (low, middle - 1)
        found.append(_Layout(columns, times, low))
    return max(found, key=lambda layout: (layout.cap, layout.columns))


def _draw_picture(
    sheet: Image.Image,
    pen: ImageDraw.ImageDraw,
    picture: Picture,
    place: tuple[int, int],
    layout: _Layout,
) -> None:
    """Draw a picture and its captions; ``place`` is its top and left."""
    (top, left), (height, width) = place, layout.size(picture)
    full_height, full_width = picture.pixels.shape[:2]
    # What is absent is hatched, and what is present lies over it.
    if picture.present != (full_height, full_width):
        sheet.paste(_hatched(height, width), (left, top))
    rows, columns = picture.present
    seen = Image.fromarray(np.ascontiguousarray(picture.pixels[:rows, :columns]))
    size = max(1, round(columns * width / full_width)), max(1, round(rows * height / full_height))
    if size[0] >= columns:
        seen = seen.resize(size, Image.Resampling.NEAREST)
    else:
        seen = seen.resize(size, Image.Resampling.LANCZOS, reducing_gap=3)
    sheet.paste(seen, (left, top))
    pen.rectangle((left - 1, top - 1, left + width, top + height), outline=EDGE)
    for number, caption in enumerate(picture.captions):
        font = font_of(_NAME, bold=True) if number == 0 else font_of(_SMALL)
        text = _shortened(printable(caption), font, layout.cell(picture))
        colour = MUTED if number else INK
        pen.text((left, top + height + 5 + number * _CAPTION_PX), text, fill=colour, font=font)


def _hatched(height: int, width: int) -> Image.Image:
    """Return an area that shows that nothing is there."""
    area = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(area)
    for start in range(-height, width, 8):
        pen.line((start, height, start + height, 0), fill=HATCH)
    return area


def _shortened(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """Cut a text so that it is not wider than ``width`` pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
