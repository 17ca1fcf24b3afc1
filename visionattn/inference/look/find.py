"""The evidence in one image of a file, with the names of classes and the places of patches.

This module owns which class, which tokens and which patches of the file are meant. It draws
nothing.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from visionattn.cli.ends import OutOfMemory, is_out_of_memory
from visionattn.cli.files import first_line
from visionattn.cli.untrusted import brief
from visionattn.data.geometry import Box, Size, View, pixels
from visionattn.inference.banded import Banding
from visionattn.inference.look.options import CLASS, TOP, Asked, LookOptions, parse_queries
from visionattn.inference.opening import Opened
from visionattn.inference.reading import Sample
from visionattn.layout import Grid
from visionattn.models.attribution import (
    Attribution,
    block_number,
    check_model,
    divides,
    find_attribution,
    grid_of,
    principal,
    watch,
)


class Row(NamedTuple):
    """With which weights one token of a block sees the patches."""

    block: int
    query: str
    """``class``, or the patch as ``row 3, column 17``."""
    place: tuple[int, int] | None
    """Row and column of the patch that asks; None: the class token."""
    content: Tensor
    """float32 ``[H, W]``: the share of the weight that comes of content; 0 where a patch is
    absent.
    """
    relative: Tensor | None
    """Likewise of place; None where that is no summand."""
    prefix: float
    """The weight of class and register tokens."""

    def term(self, name: str) -> Tensor:
        """Return what is asked for: ``both``, ``content`` or ``place``."""
        if name == "place" and self.relative is None:
            raise ValueError(
                f"block {self.block} has no share of place beside that of content; leave --term out"
            )
        if self.relative is None or name == "content":
            return self.content
        return self.relative if name == "place" else self.content + self.relative


@dataclass(frozen=True)
class Look:
    """Where the evidence for a class lies in one image."""

    path: str
    class_name: str
    """Of the class whose evidence it is; its number where the classes have no names."""
    probability: float
    """That of the class, in [0, 1]."""
    evidence: Attribution
    grid: Grid
    """Rows and columns of patches."""
    patch_px: Size
    view: View
    """Which part of the file the model saw, and at which size."""
    present: Tensor | None
    """bool ``[H, W]``, the patches that are not absent; None: all."""
    rows: list[Row] = field(default_factory=list)
    components: Tensor | None = None
    """The three main components of the features, float64 ``[3, H, W]``; None where they were not
    asked for.
    """
    shares: Tensor | None = None
    """The share of the variance along each of them."""
    in_bands: bool = False
    """Whether it was computed band by band, without gradient, rows and features."""

    @property
    def top(self) -> tuple[int, int]:
        """Return row and column of the patch of the highest evidence: that which adds most to the
        class, or, where the pooling does not say so, of the largest sum of the absolute values of
        gradient times input.
        """
        scores = self.evidence.patches
        if scores is None:
            scores = of_patches(self.evidence.gradient, self.grid, self.patch_px)
        scores = scores.double()
        if self.present is not None:
            scores = scores.masked_fill(~self.present, float("-inf"))
        row, column = divmod(int(scores.argmax()), self.grid.width)
        return row, column

    def box(self, row: int, column: int) -> Box:
        """Return where a patch lies in the file, in pixels."""
        (top, left, height, width), content = self.view.box, self.view.content

        def edges(number: int, patch: int, first: int, length: int, seen: int) -> tuple[int, int]:
            low, high = (
                round(min(end * patch, seen) * length / seen) for end in (number, number + 1)
            )
            return first + low, first + high

        upper, lower = edges(row, self.patch_px[0], top, height, content[0])
        near, far = edges(column, self.patch_px[1], left, width, content[1])
        return Box(upper, near, lower - upper, far - near)

    def patch_at(self, down: int, right: int) -> tuple[int, int]:
        """Return row and column of the patch that a pixel of the file lies in.

        Raises:
            ValueError: it lies outside of the image, or of what the model sees of it.
        """
        return patch_at(self.view, self.patch_px, (down, right))


def patch_at(view: View, patch_px: Size, place: tuple[int, int]) -> tuple[int, int]:
    """Return row and column of the patch that a pixel of the file lies in; ``Look.patch_at``."""
    box, content = view.box, view.content
    ends = ((box.top, box.height), (box.left, box.width))
    found = []
    for at, (first, length), seen, patch in zip(place, ends, content, patch_px, strict=True):
        if not first <= at < first + length:
            whole = f"{box.height} x {box.width} pixels from {box.top},{box.left} on"
            raise ValueError(
                f"query {place[0]},{place[1]} is outside of what the model sees of the image, "
                f"{whole}"
            )
        found.append(int((at - first + 0.5) * seen / length) // patch)
    return found[0], found[1]


def of_patches(gradient: Tensor, grid: Grid, patch_px: Size) -> Tensor:
    """Return the sums of absolute values over the pixels of each patch, float64 ``[H, W]``."""
    height, width = gradient.shape
    rows, columns = grid.height * patch_px[0] - height, grid.width * patch_px[1] - width
    whole = torch.nn.functional.pad(gradient.double().abs(), (0, columns, 0, rows))
    return whole.unflatten(1, (grid.width, -1)).unflatten(0, (grid.height, -1)).sum((1, 3))


def asked_of(options: LookOptions, opened: Opened) -> Asked:
    """Return what the options ask of a model.

    Raises:
        ValueError: the model has no classes or is none of ours, or there is no such class, block,
            head or token; one line.
    """
    model, names = opened.model, opened.spec.class_names
    if opened.spec.num_classes < 1:
        raise ValueError(f"{opened.name} has no classes, so there is no evidence for one to find")
    check_model(model)
    target = None
    if options.target is not None:
        target = class_number(options.target, names, opened.spec.num_classes)
    blocks = tuple(dict.fromkeys(block_number(model, index) for index in options.blocks))
    heads = min(model.blocks[number].attn.num_heads for number in blocks)
    if options.head is not None and options.head >= heads:
        raise ValueError(f"there is no head {options.head}; the {heads} heads are 0 to {heads - 1}")
    queries = parse_queries(options.queries)
    if queries is not None and CLASS in queries and not model.has_class_token:
        raise ValueError(f"{opened.name} has no class token to query; name places, or top")
    return Asked(
        target,
        frozenset(options.show),
        queries,
        blocks,
        options.head,
        options.term,
        block_number(model, options.features_block),
    )


def class_number(word: str, names: tuple[str, ...], count: int) -> int:
    """Return the number of a class that is named, or numbered where no name is the word.

    Raises:
        ValueError: there is none; one line.
    """
    if word in names:
        return names.index(word)
    if word.isdecimal() and len(word) < 10 and int(word) < count:
        return int(word)
    known = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "") if names else ""
    raise ValueError(
        f"there is no class {brief(word)}; the classes are {known or f'0 to {count - 1}'}"
    )


def look_at(banding: Banding, index: int, asked: Asked) -> tuple[Look, Sample]:
    """Find the evidence in an image by its number; return the image as it was read, too.

    Raises:
        ValueError: it cannot be read, or as ``find`` and ``find_in_bands``.
        OutOfMemory: it does not fit into memory.
    """
    images, path = banding.images, banding.images.listing.name(index)
    sample = images[index]
    if sample.banded:
        return find_in_bands(banding, index, sample, path, asked), sample
    if sample.pixels is None:
        raise ValueError(f"{path}: {sample.reason}")
    view = images.geometry.view(sample.height, sample.width)
    return find(banding.opened, sample, path, view, asked), sample


def find(opened: Opened, sample: Sample, path: str, view: View, asked: Asked) -> Look:
    """Find the evidence in one image.

    Args:
        opened: the model.
        sample: the image as it was read.
        path: its name.
        view: which part of the file is seen.
        asked: what is to be found.

    Raises:
        ValueError: a query lies outside, the model does not take the image, or its outputs are not
            finite; one line that begins with the path.
        OutOfMemory: it does not fit into memory.
    """
    try:
        return _find(opened, sample, path, view, asked)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (RuntimeError, MemoryError) as error:
        size = pixels(tuple(sample.pixels.shape[1:]))
        if is_out_of_memory(error):
            raise OutOfMemory(
                f"{path}: out of memory with an image of {size}; --show winners rows takes less"
            ) from error
        raise ValueError(
            f"{path}: {opened.name} does not take images of {size}: {first_line(error)}"
        ) from error


def _find(opened: Opened, sample: Sample, path: str, view: View, asked: Asked) -> Look:
    model = check_model(opened.model)
    patch_px = tuple(model.patch_embed.patch_size)
    places = [
        patch_at(view, patch_px, query)
        for query in asked.queries or ()
        if not isinstance(query, str)
    ]  # first of all, as it costs nothing
    inputs = opened.spec.prepare(sample.pixels[None].to(opened.device))
    sizes, present = None, None
    if sample.present != tuple(inputs.shape[2:]):
        sizes = torch.tensor([sample.present], device=inputs.device)
        present = model.present_patches(inputs, sizes)[0].cpu()
    grid = grid_of(model, inputs)
    evidence = find_attribution(
        model,
        inputs,
        sizes=sizes,
        target=asked.target,
        gradient="gradient" in asked.show or not divides(model),
    )
    names = opened.spec.class_names
    there = None if present is None else present.unflatten(0, tuple(grid))
    look = Look(
        path,
        names[evidence.target] if names else str(evidence.target),
        float(evidence.logits.softmax(0)[evidence.target]),
        evidence,
        grid,
        patch_px,
        view,
        there,
    )
    queries = asked.queries
    if queries is None:
        queries = (CLASS if model.has_class_token and model.global_pool == "token" else TOP,)
    tokens: dict[tuple[int, int] | None, int] = {}
    at = iter(places)
    for query in queries if "rows" in asked.show else ():
        place = None if query == CLASS else look.top if query == TOP else next(at)
        tokens[place] = (
            0 if place is None else (model.num_prefix_tokens + place[0] * grid.width + place[1])
        )
    rows, features = watch(
        model,
        inputs,
        dict.fromkeys(asked.blocks, list(tokens.values())) if tokens else {},
        sizes=sizes,
        features=asked.features_block if "features" in asked.show else None,
    )
    for block, found in rows.items():
        for number, place in enumerate(tokens):
            look.rows.append(
                _row(model.num_prefix_tokens, found, block, number, place, asked, grid)
            )
    if features is None:
        return look
    components, shares = principal(features, there)
    return replace(look, components=components, shares=shares)


def find_in_bands(banding: Banding, index: int, sample: Sample, path: str, asked: Asked) -> Look:
    """Find the evidence in an image that is computed band by band: without the gradient, rows of
    attention and features.

    Raises:
        ValueError: the pooling does not say what patches add, or as ``find``.
    """
    opened = banding.opened
    model = check_model(opened.model)
    if "winners" not in asked.show or not divides(model):
        raise ValueError(
            f"{path} does not fit into memory in one pass, and band by band there are winners "
            "alone, of models that pool by the maximum or the mean; name a smaller --img-size"
        )
    assert sample.height is not None and sample.width is not None
    view = opened.geometry.view(sample.height, sample.width)
    patch_px = tuple(model.patch_embed.patch_size)
    try:
        evidence = banding.evidence(index, asked.target)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    names = opened.spec.class_names
    return Look(
        path,
        names[evidence.target] if names else str(evidence.target),
        float(evidence.logits.softmax(0)[evidence.target]),
        evidence,
        Grid(view.canvas[0] // patch_px[0], view.canvas[1] // patch_px[1]),
        patch_px,
        view,
        None,
        in_bands=True,
    )


def _row(
    prefix: int, found, block: int, number: int, place: tuple[int, int] | None, asked: Asked, grid
) -> Row:
    """Return one row of one image as maps of patches, of one head or as the mean of all."""

    def of_heads(shares: Tensor | None) -> Tensor | None:
        if shares is None:
            return None
        own = shares[0, :, number]
        return (own.mean(0) if asked.head is None else own[asked.head]).float().cpu()

    content, relative = of_heads(found.content), of_heads(found.relative)
    first = content[:prefix].sum() + (0 if relative is None else relative[:prefix].sum())
    row = Row(
        block,
        CLASS if place is None else f"row {place[0]}, column {place[1]}",
        place,
        content[prefix:].unflatten(0, tuple(grid)),
        None if relative is None else relative[prefix:].unflatten(0, tuple(grid)),
        float(first),
    )
    row.term(asked.term)  # raises where there is none
    return row
