"""One image band by band of rows (``models/large``), with its file as a source.

This module is imported where an image does not fit into memory, or is to become one map.
"""

from typing import Any

from visionattn.data.formats import DAMAGED_IMAGE, NotAsAsked, as_flags
from visionattn.data.large import ImageSource, open_source
from visionattn.data.large.source import UnreadablePart
from visionattn.inference.opening import Opened
from visionattn.inference.reading import ReadImages
from visionattn.models.large.forward_bands import forward_tiled
from visionattn.models.machine import autocast


class UnreadableImage(ValueError):
    """An image cannot be read, or not as it is asked for; the text says which rows, or why."""


def open_image_source(images: ReadImages, index: int) -> ImageSource:
    """Open an image of a listing to read bands of it as its options say.

    Raises:
        UnreadableImage: it cannot be opened.
    """
    listing = images.listing
    try:
        held = getattr(listing, "array", lambda index: None)(index)  # a picture in memory
        given = listing.open(index) if held is None else held
        return open_source(given, options=images.options, name=listing.name(index))
    except DAMAGED_IMAGE as error:
        raise UnreadableImage(_line(error)) from error


def compute_bands(
    opened: Opened,
    source: ImageSource,
    sink: Any = None,
    *,
    amp: str,
    identity: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Call ``forward_tiled`` for an image with what a model expects of it.

    Args:
        opened: the model.
        source: the image.
        sink: where a map goes; None: it is returned.
        amp: precision.
        identity: what tells the work from others beside the image.
        options: further ones of ``forward_tiled``.

    Raises:
        UnreadableImage: a band cannot be read, or its values have no known range.
    """
    try:
        prepare = source.prepare(opened.spec)
    except DAMAGED_IMAGE as error:
        raise UnreadableImage(_line(error)) from error
    known = (identity or {}) | {"image": source.identity(), "amp": amp}
    try:
        with autocast(opened.device, amp):
            return forward_tiled(
                opened.model, source, sink, identity=known, prepare=prepare, **options
            )
    except (UnreadablePart, NotAsAsked) as error:
        raise UnreadableImage(_line(error)) from error


def _line(error: BaseException) -> str:
    return as_flags(" ".join(str(error).split())) or type(error).__name__
