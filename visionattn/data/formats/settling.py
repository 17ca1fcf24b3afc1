"""What is decided once for all files of a data set, by a look at a few: the range of values, and
what people are told of scale, offset and pages.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from visionattn.data.formats.options import ReadOptions
from visionattn.data.formats.reader import DAMAGED_IMAGE, NotAsAsked, Reader
from visionattn.data.formats.table import open_image
from visionattn.data.formats.values import bands_of, blocks, extremes, no_range, range_of

if TYPE_CHECKING:
    from visionattn.data.sources import Source

BITS = (8, 10, 12, 14, 16)
"""What integers of 16 bits may hold where their file does not say it."""
FEW_FILES = 8
PAGED, HEADS = (".tif", ".tiff", ".btf", ".tf8", ".gif", ".webp"), 256
"""The ends of names of formats that have pages, and how many such files are asked for theirs."""


def settle(
    source: "Source", indices: Sequence[int], options: ReadOptions, *, strict: bool = True
) -> tuple[ReadOptions, list[str]]:
    """Look at a few files of a data set, evenly spread, for what is decided once for all of them.

    Args:
        source: the files.
        indices: numbers of those of the data set.
        options: how they are read.
        strict: raise where values have no range; otherwise such a file is an error when its turn
            comes.

    Returns:
        The options, with the range of values of integers whose files do not state it, and lines
        that tell people of that range and of pages that are left out.

    Raises:
        ValueError: the values are no integers of up to 16 bits and have no range, or none of the
            files has the bands or the page, or the package, that it takes; one line with the file.
    """
    seen: list[_Seen] = []
    refused: list[str] = []
    for place in np.linspace(0, len(indices) - 1, min(FEW_FILES, len(indices))).round():
        index = int(indices[int(place)])
        try:
            with open_image(source.open(index), options) as reader:
                seen.append(_look(reader, source.name(index), options))
        except NotAsAsked as error:
            refused.append(f"{source.name(index)}: {error}")
        except DAMAGED_IMAGE:
            continue  # it is reported when its turn comes
    if strict and refused and not seen:
        raise ValueError(refused[0])
    many = max(seen, key=lambda file: file.pages, default=None)
    if many is None or many.pages == 1:
        many = _first_of_pages(source, indices, options)
    options, lines = _with_values(seen, options, strict)
    return options, lines + _of_pages(many)


def settle_one(reader: Reader, name: str, options: ReadOptions) -> tuple[ReadOptions, list[str]]:
    """Do the same for one image that is open, of which all is looked at where nothing says which
    range its values have.

    Raises:
        One of ``DAMAGED_IMAGE``: it cannot be read, or has no such bands.
    """
    seen = _look(reader, name, options)
    options, lines = _with_values([seen], options, strict=False)
    return options, lines + _of_pages(seen)


def _with_values(
    seen: Sequence["_Seen"], options: ReadOptions, strict: bool
) -> tuple[ReadOptions, list[str]]:
    """Return the options with the range of values, and lines that tell what is known of values."""
    ranged = options.value_range is not None and not options.found
    options, lines = _with_range(seen, options, strict)
    if ranged and seen and all(file.dtype == np.uint8 for file in seen):
        lines.append(
            f"data.value_range does not change files of 8 bits; files looked at: {len(seen)}, all "
            "of 8 bits"
        )
    if scaled := [file.name for file in seen if file.scaled]:
        lines.append(
            f"{scaled[0]} states scale and offset, which are applied: data.value_range is in "
            "physical units"
        )
    return options, lines


def _of_pages(many: "_Seen | None") -> list[str]:
    """Return the line that tells of pages that are left out."""
    if many is None or many.pages == 1:
        return []
    return [
        f"images have several pages ({many.pages} in {many.name}): the first of each is read, "
        "the others are left out; --data.page N takes another"
    ]


class _Seen(NamedTuple):
    """What a file of a data set has."""

    name: str
    pages: int
    """How many there are; 1 where a page is asked for."""
    dtype: np.dtype
    ends: tuple[float, float] | None
    """The smallest and the largest value, where nothing says which range they have."""
    unknown: str = ""
    """What is said where nobody gives that range."""
    scaled: bool = False
    """Whether it states scale and offset."""


def _first_of_pages(source: "Source", indices: Sequence[int], options: ReadOptions) -> _Seen | None:
    """Return the first file with several pages among the first ``HEADS`` whose names tell formats
    that have pages; their heads alone are read.
    """
    if options.page is not None:
        return None
    named = (int(index) for index in indices if source.name(int(index)).lower().endswith(PAGED))
    for index in islice(named, HEADS):
        try:
            with open_image(source.open(index), options) as reader:
                if reader.pages > 1:
                    return _Seen(source.name(index), reader.pages, reader.dtype, None)
        except DAMAGED_IMAGE:
            continue
    return None


def _look(reader: Reader, name: str, options: ReadOptions) -> _Seen:
    bands, ends, unknown = bands_of(reader, options), None, ""
    if reader.dtype != np.uint8 and range_of(reader, options) is None:
        parts = (reader.read(box, box.height, box.width, bands) for box in blocks(reader))
        found = [extremes(part) for part in parts]
        lows, highs = zip(*found, strict=True)
        ends = min(lows), max(highs)
        unknown = no_range(reader, ends)
    pages = reader.pages if options.page is None else 1
    return _Seen(name, pages, reader.dtype, ends, unknown, reader.meaning.scale is not None)


def _with_range(
    seen: Sequence[_Seen], options: ReadOptions, strict: bool
) -> tuple[ReadOptions, list[str]]:
    """Return the options with the range of integers whose files do not state it, and a line that
    tells it.
    """
    whole = []
    for file in seen:
        if file.ends is None:
            continue
        low, high = file.ends
        if file.dtype.kind in "ui" and low >= 0 and high < 2**16:
            whole.append(file)
        elif strict:
            raise ValueError(f"{file.name}: {file.unknown}")
    if not whole:
        return options, []
    largest = int(max(file.ends[1] for file in whole))
    held = next(few for few in BITS if largest < 2**few)
    bits = max(file.dtype.itemsize * 8 for file in whole)
    return replace(options, value_range=(0.0, float(2**held - 1)), found=True), [
        f"{bits}-bit images hold values up to {largest:,}: read as {held} bits; "
        "--data.value_range LOW HIGH says otherwise"
    ]
