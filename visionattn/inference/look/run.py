"""``visionattn look``: the pictures of all images, their page and their numbers, in one folder that
appears whole or not at all.
"""

import base64
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from visionattn.cli.files import printable, whole_folder
from visionattn.cli.progress import Progress
from visionattn.cli.provenance import provenance
from visionattn.data.geometry import Box
from visionattn.inference.banded import Banding
from visionattn.inference.listing import find_images
from visionattn.inference.look import drawing
from visionattn.inference.look.drawing import Ground, Picture
from visionattn.inference.look.find import Look, asked_of, look_at
from visionattn.inference.look.options import SUMMARY, Asked, LookOptions
from visionattn.inference.opening import Opened, open_model
from visionattn.inference.reading import ReadImages
from visionattn.models.attribution import offset_weights
from visionattn.models.patches import call

PAGE = "index.html"
MOST_DRAWN_PX = 2**27
"""Files of more pixels are drawn at the size at which the model saw them."""
REDUCED_PX = 2**24
"""Files that the model sees band by band are drawn at about so many pixels at most."""
PREVIEW_PX, DETAIL_PX = 1000, 640
"""The longest side of a picture on the page, and of the part of it that is shown pixel by pixel."""
LISTED = 10
"""Patches and keys whose numbers are kept."""
COMPRESSION = 3
"""Of PNG, from 0 to 9: noisy paper of 4,096 px takes seconds longer with the usual 6, and becomes
hardly smaller.
"""
PageOf = Callable[[str, Sequence[dict[str, Any]]], str]
"""``page(title, parts)``: the page; ``visionattn.lab.report.look`` has the one of the command."""


class Looking:
    """Model and images, after all checks; nothing is written before ``run``.

    Args:
        options: what ``parse_look`` returned.

    Raises:
        ValueError, FileNotFoundError: something is wrong or in the way; one line.
    """

    def __init__(self, options: LookOptions):
        self.options, self.folder = options, Path(options.output or "")
        self.listing = find_images(options.images or [])
        self.opened: Opened = open_model(options, classifies=True)
        self.asked = asked_of(options, self.opened)
        self.images = ReadImages(
            self.listing, self.opened.spec, self.opened.geometry, options.max_pixels
        )
        self.banding = Banding(self.opened, self.images, call)
        self.images.check_asked()

    def run(self, say: Callable[[str], None], page: PageOf) -> None:
        """Draw all images and write the folder, and say what came of it.

        Raises:
            ValueError: an image cannot be read, or a query lies outside of it; nothing is written.
            OutOfMemory: an image does not fit into memory.
        """
        for note in (*self.opened.notes, *self.banding.lines):
            say(note)
        replaces = SUMMARY if self.options.overwrite else None
        parts, numbers = [], []
        progress = Progress(len(self.listing))
        with whole_folder(self.folder, replaces=replaces) as place, progress:
            self.banding.before = progress.stop
            for index in range(len(self.listing)):
                look, image = self.look(index)
                figures = []
                for picture in drawn(look, image, self.asked):
                    name = f"{index + 1}-{picture.name}.png"
                    _write(place / name, picture.image)
                    figures.append(on_page(name, picture))
                title = printable(look.path)
                parts.append({"title": title, "lines": said(look), "figures": figures})
                numbers.append(numbers_of(look, self.asked.term))
                progress.advance(1, 0)
                progress.say(f"{printable(look.path)}: {said(look)[0]}", say)
            if "tables" in self.asked.show:
                parts += self._tables(place)
            title = f"Evidence: {self.opened.name}"
            (place / PAGE).write_bytes(printable(page(title, parts)).encode())
            about = provenance(self.opened.device) | {
                "model": self.opened.notes,
                "options": asdict(self.options),
            }
            text = json.dumps({"provenance": about, "images": numbers}, indent=1)
            (place / SUMMARY).write_bytes(printable(text).encode())
        count = len(self.listing)
        say(f"{self.folder / PAGE}: evidence in {count} image{'s' if count > 1 else ''}")

    def look(self, index: int) -> tuple[Look, np.ndarray]:
        """Return the evidence in an image, and the image to draw it over, ``[H, W, C]``.

        Raises:
            ValueError, OutOfMemory: as ``run``.
        """
        look, sample = look_at(self.banding, index, self.asked)
        if look.in_bands:
            return look, self.images.reduced(index, REDUCED_PX)
        view = look.view
        height, width = view.content
        own = (sample.height, sample.width)
        if view.content == own or own[0] * own[1] > MOST_DRAWN_PX:
            return look, sample.pixels[:, :height, :width].permute(1, 2, 0).numpy()
        return look, self.images.whole(index)

    def _tables(self, place: Path) -> list[dict[str, Any]]:
        """Write the picture of the model's relative tables, where it has any."""
        found, signed = [], False
        for number, block in enumerate(self.opened.model.blocks):
            weights = offset_weights(block.attn)
            if weights is not None:
                found.append((number, weights))
                signed = signed or block.attn.relative.signed
        if not found:
            return []
        picture = drawing.tables(found, signed)
        _write(place / "tables.png", picture.image)
        figures = [on_page("tables.png", picture)]
        return [{"title": "The model", "lines": [], "figures": figures}]


def drawn(look: Look, image: np.ndarray, asked: Asked) -> Iterator[Picture]:
    """Draw what was asked for of one image, as far as the model has it, picture by picture."""
    if look.in_bands:  # over a smaller picture of the file
        height, width = image.shape[:2]
        look = replace(look, view=look.view._replace(box=Box(0, 0, height, width)))
        yield drawing.winners(Ground(image, look))
        return
    ground = Ground(image, look)
    if "winners" in asked.show and look.evidence.patches is not None:
        yield drawing.winners(ground)
    if "gradient" in asked.show:
        yield drawing.gradient(ground)
    if "rows" in asked.show:
        for row in look.rows:
            yield drawing.row(ground, row, asked.term, asked.head)
    if "features" in asked.show:
        yield drawing.features(ground, asked.features_block)


def said(look: Look) -> list[str]:
    """Say in sentences what was found in an image."""
    evidence = look.evidence
    lines = [
        f"{look.class_name}, {100 * look.probability:.1f} %, {evidence.margin:.3g} above the mean "
        "of all classes"
    ]
    if look.in_bands:
        lines.append(
            "It was computed band by band: gradients, rows of attention and features need all "
            "patches at once, and are left out."
        )
    if evidence.patches is None:
        lines.append(f"{evidence.how[0].upper()}{evidence.how[1:]}.")
    box = look.box(*look.top)
    seen, own = look.view.content, look.view.box
    lines.append(
        f"The model saw {own.height} x {own.width} px at {own.top},{own.left} as "
        f"{seen[0]} x {seen[1]} px."
        if (seen != (own.height, own.width) or own.top or own.left)
        else f"The model saw {seen[0]} x {seen[1]} px as they are."
    )
    lines.append(
        f"The patch of the highest evidence: {box.height} x {box.width} px at {box.top},{box.left} "
        "(down and right)."
    )
    return lines


def on_page(name: str, picture: Picture) -> dict[str, Any]:
    """Return a picture as the page shows it: small, with a part of it pixel by pixel."""
    image, details = picture.image, []
    if picture.focus is not None and max(image.size) > PREVIEW_PX:
        details.append(address(cut(picture)))
    small = image.copy() if max(image.size) <= PREVIEW_PX else reduced(image)
    return {
        "title": picture.title,
        "lines": [printable(line) for line in picture.lines if line],
        "file": name,
        "source": address(small),
        "details": details,
    }


def reduced(image: Image.Image) -> Image.Image:
    """Return a picture whose longest side is ``PREVIEW_PX``."""
    scale = PREVIEW_PX / max(image.size)
    size = tuple(max(1, round(side * scale)) for side in image.size)
    return image.resize(size, Image.Resampling.BOX, reducing_gap=2.0)


def cut(picture: Picture) -> Image.Image:
    """Return the part of a picture around its focus, without the sentences below it."""
    width, height = picture.drawn
    assert picture.focus is not None
    left = picture.focus.left + picture.focus.width // 2 - DETAIL_PX // 2
    top = picture.focus.top + picture.focus.height // 2 - DETAIL_PX // 2
    left, top = max(0, min(left, width - DETAIL_PX)), max(0, min(top, height - DETAIL_PX))
    right, bottom = min(width, left + DETAIL_PX), min(height, top + DETAIL_PX)
    return picture.image.crop((left, top, right, bottom))


def address(image: Image.Image) -> str:
    """Return a picture as a data address."""
    stream = io.BytesIO()
    image.save(stream, format="JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _write(path: Path, image: Image.Image) -> None:
    """Write a PNG into a folder that ``whole_folder`` gave."""
    image.save(path, format="PNG", compress_level=COMPRESSION)


def numbers_of(look: Look, term: str) -> dict[str, Any]:
    """Return what was found as JSON types."""
    evidence, found = look.evidence, {"path": look.path, "class": look.class_name}
    found |= {"probability": look.probability, "logits": evidence.logits.tolist()}
    found |= {"margin": evidence.margin, "rest": evidence.rest, "grid": list(look.grid)}
    found |= {"patch_px": list(look.patch_px), "view": asdict_of(look)}
    if evidence.patches is not None:
        found["winners"] = [
            {"row": row, "column": column, "box": list(look.box(row, column))}
            | {"added": float(evidence.patches[row, column])}
            | (
                {}
                if evidence.channels is None
                else {"channels": int(evidence.channels[row, column])}
            )
            for row, column in drawing.highest(look, LISTED)
        ]
    found["rows"] = [
        {"block": row.block, "query": row.query, "prefix": row.prefix}
        | {"content": float(row.content.sum())}
        | {"place": None if row.relative is None else float(row.relative.sum())}
        | {"highest": largest(row.term(term).numpy())}
        for row in look.rows
    ]
    if look.shares is not None:
        found["shares"] = look.shares.tolist()
    return found


def asdict_of(look: Look) -> dict[str, Any]:
    """Return the view as JSON types."""
    return {key: list(value) for key, value in look.view._asdict().items()}


def largest(weights: np.ndarray) -> list[dict[str, float]]:
    """Return the patches of the largest weights, the largest first."""
    order = np.argsort(-weights, axis=None, kind="stable")[:LISTED]
    places = (map(int, np.unravel_index(place, weights.shape)) for place in order)
    return [
        {"row": row, "column": column, "weight": float(weights[row, column])}
        for row, column in places
    ]
