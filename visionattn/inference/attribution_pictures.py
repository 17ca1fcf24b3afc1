"""Pictures of ``visionattn look`` and ``visionattn generate``: attribution over an image, with
title, sentences and scale below; tables of relative position; grids of images.

This module owns colors, scales and fonts. It is independent of models and files.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from visionattn.cli.files import printable
from visionattn.data.geometry import Box, Size
from visionattn.data.lettering import INK, MUTED, PAPER, font_of
from visionattn.data.lettering import printable as shown_text
from visionattn.inference.image_attribution import ClassAttribution, Place, TokenWeights

FOR, AGAINST, QUERY = (213, 94, 0), (0, 114, 178), (0, 128, 80)
"""Colors of evidence for the class, evidence against it, and the query token."""
STRONGEST = 0.8
"""Opacity of the color at the strongest attribution."""
LEAST_PX, MOST_TIMES = 512, 16
"""Images are enlarged by an integer factor up to ``LEAST_PX`` pixels."""
LETTER_SHARE, LEAST_LETTER = 90, 13
"""Fraction of the longest side that is the letter height, which is at least ``LEAST_LETTER``
pixels.
"""
BOXED = 5
"""Number of patches with the highest attribution that are boxed."""
EXTREME_SHARE, MOST_EXTREME = 0.005, 1000
"""Share and maximum number of pixels that get the strongest color of the gradient."""
CELL_PX, TABLE_PX = 7, 112
"""Minimum side of a table entry, and the side up to which entries are enlarged."""
TILE_PX, GAP_PX, GROUND = 64, 6, "#c8c8c8"
"""Layout of a grid: smaller images are enlarged by an integer factor to at most ``TILE_PX``; width
and color of the gaps.
"""
MARK_PX = 2
"""Width of the line that marks given rows on the left."""


@dataclass(frozen=True)
class Picture:
    """One picture of an image."""

    name: str
    """Name for its file: letters, digits and hyphens."""
    title: str
    lines: tuple[str, ...]
    """Description of the picture, in sentences."""
    image: Image.Image
    focus: Box | None
    """Position of the highest attribution or weight, in its pixels; None: none."""
    drawn: tuple[int, int]
    """Width and height of the drawn image at the upper left; sentences are below."""


class BackgroundImage:
    """The image below the attribution, in gray, pale where the model does not see it.

    Args:
        image: the file's image ``[H, W, C]``, uint8 or float32 in [0, 1], or a reduced version.
        size: height and width of the file in pixels.
        look: the attribution.
    """

    def __init__(self, image: np.ndarray, size: Size, look: ClassAttribution):
        self.look = look
        times = max(1, min(MOST_TIMES, LEAST_PX // max(image.shape[:2])))
        self.scale = times / math.ceil(size[0] / len(image))
        grey = ImageOps.scale(_grey(image), times, Image.Resampling.NEAREST)
        self.part = self.scaled(look.view.box)
        pale = grey.point(lambda level: 255 - 0.35 * (255 - level) + 0.5)
        top, left, height, width = self.part
        pale.paste(grey.crop((left, top, left + width, top + height)), (left, top))
        self.paper = pale.convert("RGB")

    def scaled(self, box: Box) -> Box:
        """Return a box of the file in pixels of the picture."""
        ends = box.top, box.left, box.top + box.height, box.left + box.width
        top, left, bottom, right = (math.ceil(end * self.scale) for end in ends)
        return Box(top, left, bottom - top, right - left)

    def paint(self, strength: np.ndarray, per: Size) -> Image.Image:
        """Return the image colored by strengths ``[h, w]`` in [-1, 1], one per ``per`` pixels of
        the model's input; negative ones use ``AGAINST``.
        """
        picture = self.paper.copy()
        self.lay(picture, *tinted(strength, STRONGEST), per)
        return picture

    def lay(self, picture: Image.Image, colours: Image.Image, mask: Image.Image, per: Size) -> None:
        """Paste colors over the part that the model saw, one per ``per`` pixels of its input."""
        (height, width), part = self.look.view.content, self.part
        seen, size = (0, 0, width / per[1], height / per[0]), (part.width, part.height)
        colours, mask = (
            each.resize(size, Image.Resampling.NEAREST, box=seen) for each in (colours, mask)
        )
        picture.paste(colours, (part.left, part.top), mask)

    def mark(self, picture: Image.Image, place: Place, colour: tuple[int, int, int]) -> None:
        """Draw a frame around a patch, with a white edge."""
        pen, line = ImageDraw.Draw(picture), max(1, round(letter(picture) / 10))
        top, left, height, width = self.scaled(self.look.box(*place))
        for more, tone in ((2 * line, "white"), (line, colour)):
            edge = (left - more, top - more, left + width - 1 + more, top + height - 1 + more)
            pen.rectangle(edge, outline=tone, width=more)

    def picture(
        self,
        name: str,
        title: str,
        lines: Sequence[str],
        picture: Image.Image,
        ticks: tuple[str, str, str] | None = None,
        focus: Place | None = None,
    ) -> Picture:
        """Return a picture with title, sentences and a scale below it; its own pixels are
        unchanged.

        The scale has texts at its ends and its middle. A scale with a middle has colors against
        the class.
        """
        size = letter(picture)
        width, step = max(picture.width, 34 * size), round(1.35 * size)
        small, written = font_of(size), []
        heading = f"{title}: {self.look.path}"
        for font, texts in ((font_of(size, bold=True), [heading]), (small, lines)):
            for text in (shown_text(printable(text)) for text in texts):
                columns = 0.95 * (width - 2 * size) * len(text) / font.getlength(text)
                written += [(line, font) for line in textwrap.wrap(text, int(columns))]
        bottom = picture.height + size + step * len(written)
        sheet = Image.new("RGB", (width, bottom + (5 if ticks else 1) * size), PAPER)
        sheet.paste(picture, (0, 0))
        pen = ImageDraw.Draw(sheet)
        for number, (text, font) in enumerate(written):
            pen.text((size, picture.height + size + number * step), text, fill=INK, font=font)
        if ticks is not None:
            top, right = bottom + size // 2, width - size
            strength = np.linspace(-1 if ticks[1] else 0, 1, right - size)[None].repeat(size, 0)
            colours, mask = tinted(strength, STRONGEST)
            sheet.paste(colours, (size, top), mask)
            pen.rectangle((size - 1, top - 1, right, top + size), outline=MUTED)
            for text, at, anchor in zip(
                ticks, (size, width // 2, right), ("la", "ma", "ra"), strict=True
            ):
                text = text.replace("-", "\N{MINUS SIGN}")
                pen.text((at, bottom + 2 * size), text, fill=INK, font=small, anchor=anchor)
        at = None if focus is None else self.scaled(self.look.box(*focus))
        return Picture(name, title, tuple(lines), sheet, at, picture.size)


def letter(picture: Image.Image) -> int:
    """Return the letter height for a picture, in pixels."""
    return max(LEAST_LETTER, round(max(picture.size) / LETTER_SHARE))


def tinted(strength: np.ndarray, most: float) -> tuple[Image.Image, Image.Image]:
    """Return the colors of strengths ``[h, w]`` in [-1, 1], and their opacity up to ``most``, as a
    mask.
    """
    colours = np.array((AGAINST, FOR), np.uint8)[(strength > 0).astype(np.uint8)]
    share = np.rint(255 * most * np.abs(strength)).astype(np.uint8)
    return Image.fromarray(colours), Image.fromarray(share)


def _grey(image: np.ndarray) -> Image.Image:
    """Return an image of any bands in gray: with many bands the first three count as colors, with
    two only the first is used.
    """
    if image.dtype != np.uint8:
        image = np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)
    bands = image[:, :, 0] if image.shape[2] < 3 else image[:, :, :3]
    return Image.fromarray(np.ascontiguousarray(bands)).convert("L")


def _signed(most: float) -> tuple[str, str, str]:
    """Return the labels of a scale from ``-most`` to ``most``."""
    return f"-{most:.2g} against", "0", f"for {most:.2g}"


def winners(canvas: BackgroundImage) -> Picture:
    """Draw the contribution of each patch to the class through the pooling."""
    look, evidence = canvas.look, canvas.look.evidence
    added = evidence.patches.numpy()
    most = float(np.abs(added).max()) or 1.0
    best = [place for place in highest(evidence.patches, BOXED) if added[place] > 0]
    picture = canvas.paint(added / most, look.patch_px)
    for place in best:
        canvas.mark(picture, place, FOR)
    rest = f"{'-' if evidence.rest < 0 else '+'} {abs(evidence.rest):.3g}"
    lines = [
        f"Contributions to {look.output}: "
        f"{evidence.margin:.3g} = {float(added.sum()):.3g} of patches {rest} of biases "
        "and pooled prefix tokens.",
        f"{evidence.how[0].upper()}{evidence.how[1:]}. The {len(best)} highest are boxed and "
        f"add {sum(float(added[place]) for place in best):.3g}.",
    ]
    focus = best[0] if best else None
    return canvas.picture("winners", "Winning patches", lines, picture, _signed(most), focus)


def highest(values: Tensor, count: int) -> list[Place]:
    """Return the patches with the highest values of ``[H, W]``, the highest first."""
    order = values.flatten().argsort(descending=True, stable=True)[:count].tolist()
    return [divmod(place, values.shape[1]) for place in order]


def gradient(canvas: BackgroundImage) -> Picture:
    """Draw the input times the gradient of the class's output, pixel by pixel."""
    look = canvas.look
    values = look.evidence.gradient.numpy()
    sizes = np.sort(np.abs(values), axis=None)
    beyond = max(1, min(MOST_EXTREME, round(EXTREME_SHARE * sizes.size)))
    most = float(sizes[-beyond]) or 1.0
    picture = canvas.paint(np.clip(values / most, -1, 1), (1, 1))
    lines = [
        f"The input times the gradient of {look.output}, pixel by pixel; the {beyond:,} largest, "
        f"up to {float(sizes[-1]):.2g}, have the colors of the ends of the scale."
    ]
    title = "Gradient times input"
    return canvas.picture("gradient", title, lines, picture, _signed(most), look.top)


def row(canvas: BackgroundImage, found: TokenWeights, term: str, head: int | None) -> Picture:
    """Draw the attention weights of a token over the patches, colored by their ranks."""
    look = canvas.look
    weights = found.term(term).numpy().astype(np.float64)
    there = np.ones(weights.shape, bool) if look.present is None else look.present.numpy()
    strength, count = np.zeros(weights.shape), int(there.sum())
    strength[there] = by_rank(weights[there])
    picture = canvas.paint(strength, look.patch_px)
    if found.place is not None:
        canvas.mark(picture, found.place, QUERY)
    who = "class token" if found.place is None else f"patch in {found.query} (green)"
    what = {"both": "Weights", "content": "Shares of content in the weights"}
    heads = "the mean of all heads" if head is None else f"head {head}"
    ranked = np.sort(weights[there] * count)[::-1]
    above = ", ".join(
        f"{name} of the patches above {ranked[min(count - 1, int(share * count))]:.3g}"
        for share, name in ((0.5, "half"), (0.1, "10 %"), (0.01, "1 %"), (0.001, "0.1 %"))
        if share * count >= 2 or share == 0.5
    )
    lines = [
        f"{what.get(term, 'Shares of position in the weights')} with which the {who} sees the "
        f"patches in block {found.block}, {heads}, in multiples of 1 / {count:,}, the weight of "
        f"each patch if all were equal. Colors follow ranks: {above}.",
        _terms(found),
    ]
    place = "class" if found.place is None else f"{found.place[0]}-{found.place[1]}"
    return canvas.picture(
        f"block-{found.block}-{place}",
        f"Attention of block {found.block}: {found.query}",
        lines,
        picture,
        ("lowest", "", f"highest {ranked[0]:.3g}"),
        highest(found.term(term), 1)[0],
    )


def _terms(found: TokenWeights) -> str:
    """Describe the shares of content, place and prefix tokens in a row."""
    own = f"{100 * float(found.content.sum()):.1f} %"
    said = f"Patches have {own} of the weight"
    if found.relative is not None:
        place = f"{100 * float(found.relative.sum()):.1f} %"
        said = (
            f"Of the weight, {own} depend on the content of patches and {place} on their position"
        )
    return said + (f", {100 * found.prefix:.1f} % prefix tokens." if found.prefix else ".")


def by_rank(values: np.ndarray) -> np.ndarray:
    """Return strengths in [0, 1] of values ``[n]`` by rank: 0 for the lowest, and one equal step
    for each factor of ten in the share of values above.

    Equal values get the mean of their ranks.
    """
    from scipy.stats import rankdata

    share = (rankdata(values) - 0.5) / len(values)
    return -np.log10(1 - share) / math.log10(2 * len(values))


def features(canvas: BackgroundImage, block: int) -> Picture:
    """Draw the first three principal components of the features as red, green and blue."""
    look, shares = canvas.look, canvas.look.shares
    values = look.components.numpy()
    there = np.ones(values.shape[1:], bool) if look.present is None else look.present.numpy()
    colours = np.full((*there.shape, 3), 255, np.uint8)
    for channel, of in enumerate(values[:3]):
        low, high = np.quantile(of[there], (0.01, 0.99))
        spread = (of - low) / (high - low) if high > low else np.full(of.shape, 0.5)
        colours[..., channel] = np.rint(np.clip(spread, 0, 1) * 255)
    picture, mask = Image.new("RGB", canvas.paper.size, "white"), 255 * there.astype(np.uint8)
    canvas.lay(picture, Image.fromarray(colours), Image.fromarray(mask), look.patch_px)
    told = ", ".join(
        f"{name} {100 * share:.0f} %"
        for name, share in zip(("red", "green", "blue"), shares.tolist(), strict=False)
    )
    lines = [
        f"The three main components of the features after block {block} in this image, each "
        f"from its 1st to its 99th percentile; share of the variance: {told}."
    ]
    return canvas.picture("features", "Features", lines, picture)


def tables(found: Sequence[tuple[int, Tensor]], signed: bool) -> Picture:
    """Draw the relative tables of a model, a row for each block and a column for each head.

    Args:
        found: indices of blocks, and for each the weights of offsets ``[h, 2R+1 or 1, 2R+1]``.
        signed: whether they are norms of entries under a softmax.
    """
    size, gap, indent = LEAST_LETTER, 12, 90
    side = max(max(each.shape[1:]) for _, each in found)
    heads, cell = max(len(each) for _, each in found), max(CELL_PX, TABLE_PX // side)
    right, down = side * cell + gap, side * cell + gap + size
    width, top = indent + heads * right + gap, 2 * gap + size
    sheet = Image.new("RGB", (width, top + len(found) * down), PAPER)
    pen, font = ImageDraw.Draw(sheet), font_of(size)
    for head in range(heads):
        pen.text((indent + head * right, gap), f"head {head}", fill=MUTED, font=font)
    for number, weights in found:
        pen.text((gap, top), f"block {number}", fill=INK, font=font)
        for head, own in enumerate(weights.double().numpy()):
            left, level = indent + head * right, np.log(np.maximum(own, 1e-30))
            tint = (level - level.min()) / (np.ptp(level) or 1.0)
            colours, mask = (
                ImageOps.scale(each, cell, Image.Resampling.NEAREST) for each in tinted(tint, 1.0)
            )
            sheet.paste(colours, (left, top), mask)
            bottom = top + mask.height
            pen.rectangle((left - 1, top - 1, left + mask.width, bottom), outline=MUTED)
            text = f"{own.min():.2g} to {own.max():.2g}"
            pen.text((left, bottom + 1), text, fill=MUTED, font=font_of(10))
        top += down
    what = (
        "lengths of the entries that are added to scores"
        if signed
        else "weights of each offset for a query of zeros"
    )
    lines = (
        f"Relative position, block by block and head by head: {what}. The middle is the patch "
        "itself; keys above it are drawn above. The outermost entries apply to all larger "
        "offsets. Colors are logarithmic, from the smallest to the largest value of a head, "
        "printed below.",
    )
    return Picture("tables", "Relative tables", lines, sheet, None, sheet.size)


def grid(pictures: np.ndarray, columns: int, given: Sequence[int] | None = None) -> Image.Image:
    """Return a grid of small pictures, row by row, each pixel enlarged to a square.

    Args:
        pictures: uint8 ``[n, H, W, 1]`` or ``[n, H, W, 3]``.
        columns: pictures in a row.
        given: number of given rows of each picture, marked by a line to its left; None: no marks.
            With marks the grid is colored.
    """
    count, height, width, channels = pictures.shape
    times = max(1, TILE_PX // max(height, width))
    down, right = height * times + GAP_PX, width * times + GAP_PX
    size = min(columns, count) * right + GAP_PX, math.ceil(count / columns) * down + GAP_PX
    sheet = Image.new("L" if channels == 1 and given is None else "RGB", size, GROUND)
    pen = ImageDraw.Draw(sheet)
    for number, array in enumerate(pictures):
        top, left = GAP_PX + number // columns * down, GAP_PX + number % columns * right
        large = ImageOps.scale(picture_of(array), times, Image.Resampling.NEAREST)
        sheet.paste(large, (left, top))
        if given is not None and given[number]:
            line, bottom = left - 2 * MARK_PX, top + given[number] * times - 1
            pen.rectangle((line, top, line + MARK_PX - 1, bottom), fill=FOR)
    return sheet


def picture_of(array: np.ndarray) -> Image.Image:
    """Return uint8 ``[H, W, 1]`` or ``[H, W, 3]`` as a Pillow picture."""
    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
