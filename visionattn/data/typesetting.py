"""Text, tables and lists as ink, set line by line as on printed pages.

This module owns the fonts, the words and the layout of a page. Paper, marks and datasets are
elsewhere. The fonts come with matplotlib, so nothing is downloaded.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from visionattn.data.lettering import font_file

TEXT_FONTS = ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "cmr10", "cmss10")
MONO_FONTS = ("DejaVuSansMono", "cmtt10")
HEADING_FONTS = ("DejaVuSans-Bold", "DejaVuSerif-Bold", "STIXGeneralBol", "cmb10")
TEXT_PX = (9, 13)
"""Smallest and largest size of running text, in pixels to the em."""

_STRIP_PX = 700
_STRIPS = {"words": 6, "prices": 2, "pages": 1}
_WORD_SEED = 41
_SYLLABLES = (
    "an be co da del e er fi ga hi in ka la li lo ma me mi na ne no o pa per pi qua ra re ri ro sa "
    "se si sol ta te ti to tra u ul va ve vi za"
)


Kind = Literal["words", "prices", "pages"]


class Strips(NamedTuple):
    """Lines of words in one font and size, from which text is cut at word boundaries."""

    images: np.ndarray
    """uint8 ``[strips, height, width]``, 255 for full ink."""
    starts: list[np.ndarray]
    """Start of each word of each strip, in pixels, ascending."""
    ends: list[np.ndarray]
    """End of each word."""


class Style(NamedTuple):
    """The fonts and sizes of one page."""

    text: str
    heading: str
    text_px: int
    heading_px: int
    pitch: int
    """Distance between lines of text, in pixels."""
    ragged: float
    """Maximum share of a line left free at its end."""


def _words(rng: np.random.Generator, count: int, kind: Kind) -> list[str]:
    """Return random words of one to four syllables, some with capital or full stop, or numbers."""
    if kind == "pages":
        return [str(number) for number in rng.integers(1, 500, count)]
    if kind == "prices":
        places = rng.integers(1, 5, count)
        return [f"{rng.integers(10**place)}.{rng.integers(100):02d}" for place in places]
    lengths = rng.integers(1, 5, count)
    syllables = _SYLLABLES.split()
    words = ["".join(rng.choice(syllables, length)) for length in lengths]
    capitals, stops = rng.random((2, count)) < 0.12
    return [
        (word.capitalize() if capital else word) + ("." if stop else "")
        for word, capital, stop in zip(words, capitals, stops, strict=True)
    ]


@lru_cache(maxsize=512)
def strips(font: str, px: int, kind: Kind = "words") -> Strips:
    """Render lines of words, of prices or of page numbers in a font at ``px`` pixels to the em.

    The words depend only on the arguments. A process renders them once; pages cut from them.
    """
    rng = np.random.default_rng((_WORD_SEED, px, *kind.encode(), *font.encode()))
    face = ImageFont.truetype(font_file(font), px, layout_engine=ImageFont.Layout.BASIC)
    top, bottom = (face.getbbox("Adgjpq", anchor="ls")[edge] for edge in (1, 3))
    images = np.zeros((_STRIPS[kind], bottom - top, _STRIP_PX), np.uint8)
    starts, ends = [], []
    for image in images:
        line = Image.new("L", (_STRIP_PX, bottom - top))
        draw = ImageDraw.Draw(line)
        left, edges = 0, []
        for word in _words(rng, _STRIP_PX // 8, kind):
            right = left + round(face.getlength(word))
            if right > _STRIP_PX:
                break
            draw.text((left, -top), word, fill=255, font=face, anchor="ls")
            edges.append((left, right))
            left = right + max(2, round(0.3 * px))
        image[:] = np.asarray(line)
        starts.append(np.array([edge[0] for edge in edges]))
        ends.append(np.array([edge[1] for edge in edges]))
    return Strips(images, starts, ends)


def _put(ink: np.ndarray, part: np.ndarray, top: int, left: int) -> None:
    """Draw ``part`` on the ink, cropped at the edges of the page."""
    place = ink[top : top + part.shape[0], left : left + part.shape[1]]
    np.maximum(place, part[: place.shape[0], : place.shape[1]], out=place)


def _words_of(
    source: Strips, room: int, draws: np.ndarray, *, most: int | None = None
) -> np.ndarray:
    """Return up to ``most`` whole words that fit into ``room`` pixels; ``draws`` are two numbers in
    [0, 1).
    """
    number = int(draws[0] * len(source.images))
    starts, ends = source.starts[number], source.ends[number]
    # The first word must leave enough words after it.
    enough = _STRIP_PX - min(room, _STRIP_PX // 3)
    first = int(draws[1] * np.searchsorted(starts, enough))
    last = int(np.searchsorted(ends, starts[first] + room, side="right"))
    if last <= first:
        return source.images[number, :, :0]
    last = last if most is None else min(last, first + most)
    return source.images[number, :, starts[first] : ends[last - 1]]


def _line(
    ink: np.ndarray, source: Strips, top: int, left: int, right: int, rng: np.random.Generator
) -> None:
    """Draw words from ``left`` to at most ``right``."""
    while right - left > 8:
        part = _words_of(source, right - left, rng.random(2))
        if not part.shape[1]:
            return
        _put(ink, part, top, left)
        left += part.shape[1] + max(3, part.shape[0] // 3)


class Column(NamedTuple):
    """A column for blocks: the ink of the page, and the column's edges in pixels."""

    ink: np.ndarray
    left: int
    right: int
    bottom: int


Block = Callable[[Column, int, Style, np.random.Generator], int]
"""``block(column, top, style, rng)`` draws a block at ``top`` and returns its end."""


def _paragraph(column: Column, top: int, style: Style, rng: np.random.Generator) -> int:
    source, width = strips(style.text, style.text_px), column.right - column.left
    lines = int(rng.integers(2, 8))
    shares = 1 - style.ragged * rng.random(lines)
    shares[-1] *= rng.uniform(0.3, 1.0)
    indent = int(rng.integers(2)) * style.text_px
    for number, share in enumerate(shares):
        if top + style.pitch > column.bottom:
            break
        left = column.left + (indent if number == 0 else 0)
        _line(column.ink, source, top, left, column.left + round(width * share), rng)
        top += style.pitch
    return top + style.pitch // 2


def _heading(column: Column, top: int, style: Style, rng: np.random.Generator) -> int:
    source = strips(style.heading, style.heading_px)
    if top + source.images.shape[1] > column.bottom:
        return column.bottom
    room = (column.right - column.left) * rng.uniform(0.4, 0.9)
    part = _words_of(source, int(room), rng.random(2))
    spare = column.right - column.left - part.shape[1]
    _put(column.ink, part, top, column.left + int(spare // 2 * rng.integers(2)))
    return top + part.shape[0] + style.pitch // 2


def _list(column: Column, top: int, style: Style, rng: np.random.Generator) -> int:
    source = strips(style.text, style.text_px)
    dot = max(2, style.text_px // 4)
    for _ in range(int(rng.integers(2, 7))):
        if top + style.pitch > column.bottom:
            break
        middle = top + source.images.shape[1] // 2
        column.ink[middle - dot // 2 : middle - dot // 2 + dot, column.left + 2 :][:, :dot] = 230
        left = column.left + 2 * style.text_px
        right = left + (column.right - left) * rng.uniform(0.3, 1.0)
        _line(column.ink, source, top, left, int(right), rng)
        top += style.pitch
    return top + style.pitch // 2


def _table(column: Column, top: int, style: Style, rng: np.random.Generator) -> int:
    """Draw a table: words in the first column, right-aligned numbers in the others, and rules."""
    width, pitch = column.right - column.left, style.pitch + 3
    rows = min(int(rng.integers(2, 9)), (column.bottom - top) // pitch)
    if rows < 1:
        return column.bottom
    words = strips(style.text, style.text_px)
    numbers = strips(style.text, style.text_px, "prices")
    columns = 1 + min(int(rng.integers(1, 5)), max(1, width // (7 * style.text_px)))
    edges = column.left + np.linspace(0, width - 1, columns + 1).astype(int)
    for row in range(rows):
        line = top + row * pitch + 2
        _put(
            column.ink, _words_of(words, edges[1] - edges[0] - 4, rng.random(2)), line, edges[0] + 3
        )
        for edge, draws in zip(edges[2:], rng.random((columns - 1, 2)), strict=True):
            part = _words_of(numbers, 5 * style.text_px, draws, most=1)
            _put(column.ink, part, line, max(column.left, edge - 3 - part.shape[1]))
    # Rules: all lines, only lines between rows, or only lines around the header.
    rules = [top + row * pitch for row in range(rows + 1)]
    kind = int(rng.integers(3))
    for rule in rules if kind else (rules[0], rules[1], rules[-1]):
        column.ink[rule : rule + 1, column.left : column.right] = 220
    if kind == 2:
        for edge in edges:
            column.ink[top : rules[-1] + 1, edge : edge + 1] = 220
    return rules[-1] + style.pitch


def _rule(column: Column, top: int, style: Style, rng: np.random.Generator) -> int:
    thickness = int(rng.integers(1, 3))
    column.ink[top : min(top + thickness, column.bottom), column.left : column.right] = 220
    return top + style.pitch // 2 + thickness


_BLOCKS: tuple[Block, ...] = (_paragraph, _heading, _table, _list, _rule)
_BLOCK_SHARES = np.cumsum((0.45, 0.15, 0.2, 0.15, 0.05))


def _draw_style(rng: np.random.Generator, width: int) -> Style:
    """Return random fonts for a page; narrow pages, like receipts, often use a typewriter font."""
    mono = rng.random() < (0.5 if width < 200 else 0.1)
    text = str(rng.choice(MONO_FONTS if mono else TEXT_FONTS))
    text_px = int(rng.integers(TEXT_PX[0], TEXT_PX[1] + 1))
    heading_px = 2 * round(text_px * rng.uniform(0.6, 0.85))
    pitch = round(text_px * rng.uniform(1.15, 1.5))
    return Style(
        text, str(rng.choice(HEADING_FONTS)), text_px, heading_px, pitch, rng.uniform(0, 0.3)
    )


def typeset(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Fill a page with headings, paragraphs, tables and lists in one or several columns, and a page
    number if there is room.

    Args:
        rng: the source of all randomness.
        height, width: size of the page in pixels.

    Returns:
        The ink: uint8 ``[height, width]``, 255 for full ink.
    """
    ink = np.zeros((height, width), np.uint8)
    style = _draw_style(rng, width)
    margin = 3 + int(min(height, width) * rng.uniform(0.02, 0.08))
    bottom = height - margin
    if height > 12 * style.pitch:
        bottom -= 2 * style.pitch
        number = _words_of(
            strips(style.text, style.text_px, "pages"), 2 * style.text_px, rng.random(2)
        )
        _put(ink, number, height - margin - style.pitch, (width - number.shape[1]) // 2)
    # Columns of a readable width: 14 to 34 em.
    column_px = style.text_px * rng.uniform(14, 34)
    count = max(1, int((width - 2 * margin) / column_px))
    edges = np.linspace(margin, width - margin + style.text_px, count + 1).astype(int)
    for left, right in zip(edges[:-1], edges[1:], strict=True):
        column, top = Column(ink, int(left), int(right) - style.text_px, bottom), margin
        while top + style.pitch <= bottom:
            block = _BLOCKS[int(np.searchsorted(_BLOCK_SHARES, rng.random(), side="right"))]
            top = block(column, top, style, rng)
    return ink
