"""Evidence drawn over an image, pixel for pixel, with a scale below it.

This module owns colours, scales and letters. It knows what was found, and nothing of models or
files.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from visionattn.cli.files import printable
from visionattn.data.geometry import Box, Size
from visionattn.data.lettering import INK, MUTED, PAPER, font_of
from visionattn.data.lettering import printable as shown_text
from visionattn.inference.look.find import Look, Row

FOR, AGAINST, QUERY = (213, 94, 0), (0, 114, 178), (0, 128, 80)
"""Colours of what speaks for the class, of what speaks against it, and of the token that asks."""
STRONGEST = 0.8
"""How much of a pixel is the colour where the evidence is strongest."""
LEAST_PX, MOST_TIMES = 512, 16
"""Smaller images are enlarged by a whole number, to about so many pixels."""
LETTER_SHARE, LEAST_LETTER = 90, 13
"""Letters are as high as a part of the longest side, and at least so many pixels."""
BAND = 256
"""Rows that are painted at a time."""
BOXED = 5
"""How many patches of the highest evidence are boxed."""
EXTREME_SHARE, MOST_EXTREME = 0.005, 1000
"""How many pixels' gradient times input is as strong as can be: a part of them, at most so many."""


@dataclass(frozen=True)
class Picture:
    """One picture of an image."""

    name: str
    """For its file: letters, digits and hyphens."""
    title: str
    lines: tuple[str, ...]
    """What it shows, in sentences."""
    image: Image.Image
    focus: Box | None
    """Where in it the highest evidence or weight is, in its pixels; None: nowhere."""
    drawn: tuple[int, int]
    """Width and height of what is drawn, from its upper left corner; sentences stand below."""


class Ground:
    """The image below the evidence, and which patch and which pixel of the input lies where."""

    def __init__(self, image: np.ndarray, look: Look):
        """Take the file's image ``[H, W, C]``, uint8 or float32 in [0, 1], whole or, where it is
        as large as that, the part that the model saw.
        """
        self.look = look
        height, width = image.shape[:2]
        box, content = look.view.box, look.view.content
        self.times = max(1, min(MOST_TIMES, LEAST_PX // max(height, width)))
        whole = box.height + 2 * box.top > height or box.width + 2 * box.left > width
        # What the model saw, where the file itself is not drawn.
        self.box = Box(0, 0, *content) if (height, width) == content and whole else box
        self.grey = _grey(image)
        self.rows = _seen(height, self.box.top, self.box.height, content[0])
        self.columns = _seen(width, self.box.left, self.box.width, content[1])

    def patch_box(self, row: int, column: int) -> Box:
        """Return where a patch is drawn, in pixels of the picture."""
        scale = self.times
        if self.box == self.look.view.box:
            own = self.look.box(row, column)
        else:
            (down, right), (height, width) = self.look.patch_px, self.look.view.content
            top, left = row * down, column * right
            own = Box(top, left, min(down, height - top), min(right, width - left))
        return Box(*(scale * value for value in own))

    def paint(self, strength: np.ndarray, per: Size) -> Image.Image:
        """Colour the image by strengths in [-1, 1], below 0 with ``AGAINST``.

        Args:
            strength: ``[h, w]``, one for ``per`` pixels of the model's input.
        """
        rows = np.where(self.rows < 0, -1, self.rows // per[0])
        columns = np.where(self.columns < 0, -1, self.columns // per[1])
        out = np.empty((*self.grey.shape, 3), np.uint8)
        colours = np.array((AGAINST, FOR), np.float32)
        for first in range(0, len(rows), BAND):
            band = slice(first, first + BAND)
            inside = (rows[band] >= 0)[:, None] & (columns >= 0)
            of_band = np.where(inside, strength[rows[band]][:, columns], 0).astype(np.float32)
            share = (STRONGEST * np.abs(of_band))[:, :, None]
            grey = self.grey[band].astype(np.float32)
            grey = np.where(inside, grey, 255 - (255 - grey) * 0.35)[:, :, None]
            colour = colours[(of_band > 0).astype(np.int8)]
            out[band] = np.rint(grey * (1 - share) + colour * share)
        return self.enlarged(out)

    def plain(self, colours: np.ndarray) -> Image.Image:
        """Show one colour ``[h, w, 3]``, uint8, for each patch, and white where none is."""
        rows, columns = (
            np.where(places < 0, -1, places // px)
            for places, px in zip((self.rows, self.columns), self.look.patch_px, strict=True)
        )
        out = colours[rows][:, columns]
        out[~((rows >= 0)[:, None] & (columns >= 0))] = 255
        return self.enlarged(out)

    def enlarged(self, pixels: np.ndarray) -> Image.Image:
        """Return pixels as a picture, each of them as a square where there are few."""
        picture = Image.fromarray(pixels)
        if self.times == 1:
            return picture
        return picture.resize(
            (picture.width * self.times, picture.height * self.times), Image.Resampling.NEAREST
        )


def _grey(image: np.ndarray) -> np.ndarray:
    """Return an image of any bands as grey levels, uint8 ``[H, W]``: of many the first three are
    taken as colours, of two the first.
    """
    if image.dtype != np.uint8:
        image = np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)
    if image.shape[2] < 3:
        return np.ascontiguousarray(image[:, :, 0])
    return np.asarray(Image.fromarray(np.ascontiguousarray(image[:, :, :3])).convert("L"))


def _seen(length: int, first: int, part: int, content: int) -> np.ndarray:
    """Return for each pixel along a side of the file which pixel of the model's input shows it, or
    -1 where none does.
    """
    places = np.arange(length)
    seen = ((places - first + 0.5) * content / part).astype(np.int64)
    return np.where((places >= first) & (places < first + part), np.minimum(seen, content - 1), -1)


def winners(ground: Ground) -> Picture:
    """Draw what each patch adds to the class through the pooling."""
    look, evidence = ground.look, ground.look.evidence
    added = evidence.patches.numpy()
    most = float(np.abs(added).max()) or 1.0
    picture = ground.paint(added / most, look.patch_px)
    best = highest(look, BOXED)
    size = letter(picture)
    for place in best:
        _mark(picture, ground.patch_box(*place), FOR, size)
    whole = float(added.sum())
    rest = f"{'-' if evidence.rest < 0 else '+'} {abs(evidence.rest):.3g}"
    lines = [
        f"What patches add to the output of {look.class_name!r} less the mean of all classes: "
        f"{evidence.margin:.3g} = {whole:.3g} of patches {rest} of biases "
        "and of prefix tokens that are pooled.",
        f"{evidence.how[0].upper()}{evidence.how[1:]}. The {len(best)} highest are boxed and "
        f"add {sum(float(added[place]) for place in best):.3g}.",
    ]
    scale = Scale("against", "for", (-most, 0.0, most), signed=True)
    return _with_scale("winners", "Winning patches", lines, picture, scale, ground, best)


def highest(look: Look, count: int) -> list[tuple[int, int]]:
    """Return rows and columns of the patches that add most to the class, those that add something,
    the highest first.
    """
    added = look.evidence.patches.flatten()
    order = added.argsort(descending=True, stable=True)[:count].tolist()
    return [divmod(place, look.grid.width) for place in order if added[place] > 0]


def gradient(ground: Ground) -> Picture:
    """Draw the input times the gradient of the class's output, pixel by pixel."""
    look = ground.look
    values = look.evidence.gradient.numpy()
    sizes = np.abs(values).ravel()
    beyond = max(1, min(MOST_EXTREME, round(EXTREME_SHARE * sizes.size)))
    most = float(np.partition(sizes, sizes.size - beyond)[sizes.size - beyond]) or 1.0
    picture = ground.paint(np.clip(values / most, -1, 1), (1, 1))
    lines = [
        f"The input times the gradient of the output of {look.class_name!r} less the mean of all "
        f"classes, pixel by pixel; the {beyond:,} largest, up to {float(sizes.max()):.2g}, are as "
        "strong as the ends of the scale."
    ]
    scale = Scale("against", "for", (-most, 0.0, most), signed=True)
    return _with_scale(
        "gradient", "Gradient times input", lines, picture, scale, ground, [look.top]
    )


def row(ground: Ground, found: Row, term: str, head: int | None) -> Picture:
    """Draw the weights with which a token sees the patches, coloured by their ranks."""
    look = ground.look
    weights = found.term(term).numpy().astype(np.float64)
    there = np.ones(weights.shape, bool) if look.present is None else look.present.numpy()
    count = int(there.sum())
    strength = np.zeros(weights.shape)
    strength[there] = by_rank(weights[there])
    picture = ground.paint(strength, look.patch_px)
    size = letter(picture)
    if found.place is not None:
        _mark(picture, ground.patch_box(*found.place), QUERY, size)
    whole = "class token" if found.place is None else f"patch in {found.query} (green)"
    what = {"both": "Weights", "content": "Shares of content in the weights"}
    heads = "the mean of all heads" if head is None else f"head {head}"
    lines = [
        f"{what.get(term, 'Shares of place in the weights')} with which the {whole} sees the "
        f"patches in block {found.block}, {heads}, in multiples of 1 / {count:,}, that of each "
        "patch if all were alike. Colours go by rank.",
        _terms(found),
    ]
    best = np.argsort(-np.where(there, weights, -1), axis=None, kind="stable")[0]
    top = tuple(map(int, np.unravel_index(best, weights.shape)))
    name = f"block-{found.block}-" + (
        "class" if found.place is None else f"{found.place[0]}-{found.place[1]}"
    )
    title = f"Attention of block {found.block}: {found.query}"
    scale = Scale("", "", ranked(weights[there] * count), signed=False)
    return _with_scale(name, title, lines, picture, scale, ground, [top])


def _terms(found: Row) -> str:
    """Say how a row is divided between content, place and prefix tokens."""
    own = float(found.content.sum())
    if found.relative is None:
        said = f"Patches have {100 * own:.1f} % of the weight"
    else:
        place = float(found.relative.sum())
        said = f"Of the weight {100 * own:.1f} % are for the content of patches and "
        said += f"{100 * place:.1f} % for their place"
    return said + (f", {100 * found.prefix:.1f} % prefix tokens." if found.prefix else ".")


def by_rank(values: np.ndarray) -> np.ndarray:
    """Return strengths in [0, 1] of values ``[n]``: 0 for the lowest, and as much more for each
    tenth of the values that are left above one; equal values have the mean of their ranks.
    """
    if not len(values):
        return values
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    below = counts.cumsum() - counts
    share = ((below + counts / 2) / len(values))[inverse]
    return -np.log10(1 - share) / math.log10(2 * len(values))


def ranked(values: np.ndarray) -> tuple[tuple[float, str], ...]:
    """Return places on the scale of ``by_rank`` with the values there, for people."""
    count, found = len(values), []
    ordered = np.sort(values)[::-1]
    for share, name in ((0.5, "half"), (0.1, "10 %"), (0.01, "1 %"), (0.001, "0.1 %")):
        if share * count >= 2 or share == 0.5:
            place = -math.log10(share) / math.log10(2 * count) if count > 1 else 0.0
            value = ordered[min(count - 1, int(share * count))]
            found.append((place, f"{name} above {value:.3g}"))
    return (*found, (1.0, f"highest {ordered[0]:.3g}"))


def features(ground: Ground, block: int) -> Picture:
    """Draw the main components of the features as red, green and blue."""
    look, shares = ground.look, ground.look.shares
    values = look.components.numpy()
    there = np.ones(values.shape[1:], bool) if look.present is None else look.present.numpy()
    colours = np.full((*values.shape[1:], 3), 255, np.uint8)
    for channel, of in enumerate(values[:3]):
        low, high = np.quantile(of[there], (0.01, 0.99))
        spread = (of - low) / (high - low) if high > low else np.full(of.shape, 0.5)
        colours[..., channel] = np.rint(np.clip(spread, 0, 1) * 255)
    colours[~there] = 255
    told = ", ".join(
        f"{name} {100 * share:.0f} %"
        for name, share in zip(("red", "green", "blue"), shares.tolist(), strict=False)
    )
    lines = [
        f"The three main components of the features after block {block}, of this image alone, each "
        f"from its 1st to its 99th percentile; share of the variance: {told}."
    ]
    picture = ground.plain(colours)
    return _with_scale("features", "Features", lines, picture, None, ground, [])


def tables(found: Sequence[tuple[int, Tensor]], signed: bool) -> Picture:
    """Draw the relative tables of a model, a row for each block and a column for each head.

    Args:
        found: numbers of blocks, and of each the weights of offsets ``[h, 2R+1 or 1, 2R+1]``.
        signed: they are lengths of entries under a softmax.
    """
    size, gap = 16, 12
    heads = max(len(each) for _, each in found)
    side = max(max(each.shape[1:]) for _, each in found)
    cell = max(7, 112 // side)
    width, height = heads * (side * cell + gap), len(found) * (side * cell + gap + size)
    sheet = Image.new("RGB", (width + 90 + gap, height + size + 2 * gap), PAPER)
    pen, font = ImageDraw.Draw(sheet), font_of(size - 3)
    for head in range(heads):
        left = 90 + head * (side * cell + gap)
        pen.text((left, gap), f"head {head}", fill=MUTED, font=font)
    for line, (number, weights) in enumerate(found):
        top = 2 * gap + size + line * (side * cell + gap + size)
        pen.text((gap, top), f"block {number}", fill=INK, font=font)
        for head, own in enumerate(weights.double().numpy()):
            left, level = 90 + head * (side * cell + gap), np.log(np.maximum(own, 1e-30))
            spread = float(level.max() - level.min()) or 1.0
            tint = ((level - level.min()) / spread)[..., None]
            square = np.rint(255 * (1 - tint) + np.array(FOR) * tint).astype(np.uint8)
            shown = Image.fromarray(square).resize(
                (own.shape[1] * cell, own.shape[0] * cell), Image.Resampling.NEAREST
            )
            sheet.paste(shown, (left, top))
            edge = (left - 1, top - 1, left + shown.width, top + shown.height)
            pen.rectangle(edge, outline=MUTED)
            text = f"{own.min():.2g} to {own.max():.2g}"
            pen.text((left, top + shown.height + 1), text, fill=MUTED, font=font_of(10))
    what = (
        "lengths of the entries that are added to scores"
        if signed
        else "weights that a query of zeros gives to each offset"
    )
    lines = (
        f"Relative position, block by block and head by head: {what}. The middle is the patch "
        "itself, keys above it stand above; the outermost entries are those of all offsets beyond. "
        "Colours go by the logarithm, from the least of a head to its largest, which stand below.",
    )
    return Picture("tables", "Relative tables", lines, sheet, None, sheet.size)


@dataclass(frozen=True)
class Scale:
    """The scale below a picture."""

    low: str
    high: str
    ticks: Sequence
    """Values of the ends and of the middle, or places in [0, 1] with texts."""
    signed: bool


def letter(picture: Image.Image) -> int:
    """Return the height of letters for a picture, in pixels."""
    return max(LEAST_LETTER, round(max(picture.size) / LETTER_SHARE))


def _mark(picture: Image.Image, box: Box, colour: tuple[int, int, int], size: int) -> None:
    """Draw a frame around a box, with a white edge."""
    pen, line = ImageDraw.Draw(picture), max(1, round(size / 10))
    right, bottom = box.left + box.width - 1, box.top + box.height - 1
    for width, tone in ((2 * line, (255, 255, 255)), (line, colour)):
        edge = (box.left - width, box.top - width, right + width, bottom + width)
        pen.rectangle(edge, outline=tone, width=width)


def _with_scale(
    name: str,
    title: str,
    lines: Sequence[str],
    picture: Image.Image,
    scale: Scale | None,
    ground: Ground,
    focus: Sequence[tuple[int, int]],
) -> Picture:
    """Put title, sentences and scale below a picture, whose own pixels stay as they are."""
    size = letter(picture)
    width = max(picture.width, 34 * size)
    gap, step = size, round(1.35 * size)
    small, bold = font_of(size), font_of(size, bold=True)
    told = [shown_text(printable(text)) for text in lines if text]
    wrapped = [part for text in told for part in _wrapped(text, small, width - 2 * gap)]
    heading = shown_text(printable(f"{title}: {ground.look.path}"))
    head = _wrapped(heading, bold, width - 2 * gap)
    below = gap + step * (len(head) + len(wrapped)) + gap
    sheet = Image.new("RGB", (width, picture.height + below + (4 * step if scale else 0)), PAPER)
    sheet.paste(picture, (0, 0))
    pen, top = ImageDraw.Draw(sheet), picture.height + gap
    for text in head:
        pen.text((gap, top), text, fill=INK, font=bold)
        top += step
    for text in wrapped:
        pen.text((gap, top), text, fill=INK, font=small)
        top += step
    if scale is not None:
        _draw_scale(sheet, scale, Box(top + step // 2, gap, step, width - 2 * gap), size)
    at = ground.patch_box(*focus[0]) if focus else None
    return Picture(name, title, tuple(lines), sheet, at, picture.size)


def _draw_scale(sheet: Image.Image, scale: Scale, box: Box, size: int) -> None:
    """Draw a bar of the colours, over white paper, with its ticks below."""
    places = np.linspace(-1 if scale.signed else 0, 1, box.width)
    share = (STRONGEST * np.abs(places))[:, None]
    colour = np.array((AGAINST, FOR), np.float64)[(places > 0).astype(int)]
    line = np.rint(255 * (1 - share) + colour * share).astype(np.uint8)
    sheet.paste(Image.fromarray(np.repeat(line[None], box.height, 0)), (box.left, box.top))
    pen, font = ImageDraw.Draw(sheet), font_of(size)
    edge = (box.left - 1, box.top - 1, box.left + box.width, box.top + box.height)
    pen.rectangle(edge, outline=MUTED)
    if scale.signed:
        low, middle, high = scale.ticks
        ticks = [(0.0, f"{low:.2g} {scale.low}"), (0.5, f"{middle:g}")]
        ticks.append((1.0, f"{scale.high} {high:.2g}"))
    else:
        ticks = list(scale.ticks)
    free, down = box.left, box.top + box.height
    for number, (place, text) in enumerate(ticks):
        text = text.replace("-", "\N{MINUS SIGN}")
        long, x = font.getlength(text), box.left + place * (box.width - 1)
        start = min(max(box.left, x - long / 2), box.left + box.width - long)
        last = number == len(ticks) - 1
        if not last and (
            start < free
            or start + long > box.left + box.width - font.getlength(ticks[-1][1]) - size
        ):
            continue
        pen.line((x, down, x, down + size // 3), fill=MUTED, width=max(1, size // 10))
        pen.text((start, down + size // 3), text, fill=INK, font=font)
        free = start + long + size


def _wrapped(text: str, font, width: float) -> list[str]:
    """Divide a text into lines that are no wider than that."""
    lines: list[str] = []
    for word in text.split():
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(joined) <= width:
            lines[-1] = joined
            continue
        while font.getlength(word) > width and len(word) > 1:  # a long name without spaces
            cut = next(
                i for i in range(len(word), 0, -1) if i == 1 or font.getlength(word[:i]) <= width
            )
            lines.append(word[:cut])
            word = word[cut:]
        lines.append(word)
    return lines
