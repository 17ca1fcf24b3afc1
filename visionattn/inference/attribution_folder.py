"""``visionattn look``: the pictures, page and numbers of all images, in one folder that is written
completely or not at all.
"""

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torch import nn

from visionattn.cli.files import printable, whole_folder, write_text
from visionattn.cli.progress import Progress
from visionattn.data.formats.reader import Georeference
from visionattn.inference import attribution_pictures
from visionattn.inference.image_attribution import ClassAttribution, ImageAttribution
from visionattn.inference.image_listing import find_images
from visionattn.inference.image_reading import ReadImages
from visionattn.inference.look_options import SUMMARY, LookOptions
from visionattn.inference.model_opening import open_model
from visionattn.inference.picture_folder import write_summary
from visionattn.inference.polygons import box_feature, write_geojson
from visionattn.models.attribution import offset_weights

PAGE = "index.html"
MOST_DRAWN_PX, REDUCED_PX = 2**27, 2**24
"""Maximum number of pixels of a picture: larger files are drawn reduced. The second limit is for
images computed band by band.
"""
PREVIEW_PX, DETAIL_PX = 1000, 640
"""Longest side of a picture on the page, and of its detail at full resolution."""
LISTED = 10
"""Number of patches and keys listed with their numbers."""
COMPRESSION = 3
"""PNG compression level, 0 to 9. The default 6 takes seconds longer for noisy images of 4,096 px
and saves little.
"""
PageOf = Callable[[str, Sequence[dict[str, Any]]], str]
"""``page(title, parts)`` returns the page; the command passes the function of
``lab.report.templates``.
"""


def look(options: LookOptions, say: Callable[[str], None], page: PageOf) -> None:
    """Draw all images, write the folder, and report the result; nothing is written before all
    options are checked.

    Args:
        options: result of ``parse_look``.
        say: receives the lines of the report.
        page: see ``PageOf``.

    Raises:
        ValueError, FileNotFoundError: an option is wrong, a file is in the way, an image cannot be
            read, or a query lies outside of it; nothing is written.
        OutOfMemory: an image does not fit into memory.
    """
    folder, listing = Path(options.output or ""), find_images(options.images or [])
    opened = open_model(options, classifies=True)
    images = ReadImages(listing, opened.spec, opened.geometry, options.max_pixels)
    attribution = ImageAttribution(opened, images, options)
    images.check_asked()
    for note in (*opened.notes, *attribution.banding.lines):
        say(note)
    replaces = SUMMARY if options.overwrite else None
    parts, numbers, count = [], [], len(listing)
    progress = Progress(count)
    with whole_folder(folder, replaces=replaces) as place, progress:
        attribution.banding.before = progress.stop
        for index in range(count):
            found, canvas = _canvas(attribution, index)
            figures = [
                _write(place, f"{index + 1}-", picture) for picture in _drawn(attribution, canvas)
            ]
            title = printable(found.path)
            parts.append({"title": title, "lines": said(found), "figures": figures})
            numbers.append(numbers_of(found, options.term))
            if "boxes" in options.show and "winners" in numbers[-1]:
                with images.opened(index) as reader:
                    georeference = reader.georeference
                _write_boxes(place / f"{index + 1}-boxes.geojson", numbers[-1], georeference)
            progress.advance(1, 0)
            progress.say(f"{title}: {said(found)[0]}", say)
        if "tables" in options.show and (picture := _tables(opened.model)):
            figures = [_write(place, "", picture)]
            parts.append({"title": "The model", "lines": [], "figures": figures})
        text = page(f"Attribution: {opened.name}", parts)
        write_text(place / PAGE, text)
        write_summary(place / SUMMARY, opened, options, numbers)
    say(f"{folder / PAGE}: attribution in {count} image{'s' if count > 1 else ''}")


def _canvas(
    attribution: ImageAttribution, index: int
) -> tuple[ClassAttribution, attribution_pictures.BackgroundImage]:
    """Return the attribution in an image, and the image to draw it over."""
    look, sample = attribution.look(index)
    size = sample.height, sample.width
    most = REDUCED_PX if look.in_bands else MOST_DRAWN_PX
    is_larger = size[0] * size[1] > most
    image = attribution.images.reduced(index, most if is_larger else None)
    return look, attribution_pictures.BackgroundImage(image, size, look)


def _drawn(
    attribution: ImageAttribution, canvas: attribution_pictures.BackgroundImage
) -> Iterator[attribution_pictures.Picture]:
    """Yield the requested pictures of one image, as far as they exist."""
    look, options = canvas.look, attribution.options
    if "winners" in options.show and look.evidence.patches is not None:
        yield attribution_pictures.winners(canvas)
    if "gradient" in options.show and look.evidence.gradient is not None:
        yield attribution_pictures.gradient(canvas)
    for row in look.rows:
        yield attribution_pictures.row(canvas, row, options.term, options.head)
    if look.components is not None:
        yield attribution_pictures.features(canvas, attribution.features_block)


def _write_boxes(path: Path, numbers: dict[str, Any], place: Georeference | None) -> None:
    """Write the winning patches of an image as GeoJSON."""
    boxes = [
        box_feature(each.pop("box"), numbers["class"], attribution_pictures.FOR, place, **each)
        for each in map(dict, numbers["winners"])
    ]
    write_geojson(path, boxes, place)


def _tables(model: nn.Module) -> attribution_pictures.Picture | None:
    """Return a picture of the model's relative tables; None if it has none."""
    blocks = [block.attn for block in model.blocks]
    found = [(number, offset_weights(each)) for number, each in enumerate(blocks)]
    found = [(number, weights) for number, weights in found if weights is not None]
    if not found:
        return None
    return attribution_pictures.tables(found, any(blocks[i].relative.signed for i, _ in found))


def said(look: ClassAttribution) -> list[str]:
    """Describe the attribution in an image in sentences."""
    evidence, box, own, seen = look.evidence, look.box(*look.top), look.view.box, look.view.content
    value = f"{100 * look.probability:.1f} %"
    if look.task == "regression":
        value = f"{look.probability:.5g}"
    lines = [f"{look.class_name}, {value}, {evidence.margin:.3g} {look.above}"]
    if look.in_bands:
        lines.append(
            "It was computed band by band, without gradient, rows of attention and features, "
            "which need all patches at once."
        )
    if evidence.patches is None:
        lines.append(f"{evidence.how[0].upper()}{evidence.how[1:]}.")
    lines.append(
        f"The model saw {own.height} x {own.width} px at {own.top},{own.left} as "
        f"{seen[0]} x {seen[1]} px."
    )
    lines.append(
        f"Patch with the highest attribution: {box.height} x {box.width} px at "
        f"{box.top},{box.left} (down, right)."
    )
    return lines


def _write(folder: Path, prefix: str, picture: attribution_pictures.Picture) -> dict[str, Any]:
    """Write a picture into a folder from ``whole_folder``; return its entry for the page: a small
    version, and a detail at full resolution.
    """
    name, image = f"{prefix}{picture.name}.png", picture.image
    image.save(folder / name, format="PNG", compress_level=COMPRESSION)
    small, details = image.copy(), []
    small.thumbnail((PREVIEW_PX, PREVIEW_PX), Image.Resampling.BOX)
    if picture.focus is not None and small.size != image.size:
        details.append(address(cut(picture)))
    return {
        "title": picture.title,
        "lines": [printable(line) for line in picture.lines],
        "file": name,
        "source": address(small),
        "details": details,
    }


def cut(picture: attribution_pictures.Picture) -> Image.Image:
    """Return the part of a picture around its focus, without the sentences below it."""
    focus, ends = picture.focus, []
    assert focus is not None
    middles = focus.left + focus.width // 2, focus.top + focus.height // 2
    for middle, length in zip(middles, picture.drawn, strict=True):
        first = max(0, min(middle - DETAIL_PX // 2, length - DETAIL_PX))
        ends.append((first, min(length, first + DETAIL_PX)))
    (left, right), (top, bottom) = ends
    return picture.image.crop((left, top, right, bottom))


def address(image: Image.Image) -> str:
    """Return a picture as a data URL."""
    stream = io.BytesIO()
    image.save(stream, format="JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def numbers_of(look: ClassAttribution, term: str) -> dict[str, Any]:
    """Return the attribution as JSON types."""
    evidence = look.evidence
    found: dict[str, Any] = {
        "path": look.path,
        "class": look.class_name,
        "probability": look.probability,
        "logits": evidence.logits.tolist(),
        "margin": evidence.margin,
        "rest": evidence.rest,
        "grid": look.grid,
        "patch_px": look.patch_px,
        "view": look.view._asdict(),
    }
    if evidence.patches is not None:
        found["winners"] = [
            {"row": row, "column": column, "box": look.box(row, column)}
            | {"added": float(evidence.patches[row, column])}
            for row, column in attribution_pictures.highest(evidence.patches, LISTED)
            if evidence.patches[row, column] > 0
        ]
    if evidence.channels is not None:
        for each in found["winners"]:
            each["channels"] = int(evidence.channels[each["row"], each["column"]])
    found["rows"] = [
        {
            "block": row.block,
            "query": row.query,
            "place": None if row.relative is None else float(row.relative.sum()),
            "content": float(row.content.sum()),
            "prefix": row.prefix,
            "highest": [
                {"row": place[0], "column": place[1], "weight": float(row.term(term)[place])}
                for place in attribution_pictures.highest(row.term(term), LISTED)
            ],
        }
        for row in look.rows
    ]
    if look.shares is not None:
        found["shares"] = look.shares.tolist()
    return found
