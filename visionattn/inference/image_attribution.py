"""The attribution of a class in one image file, with class names and the places of patches in the
file. It draws nothing.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.cli.exit_codes import OutOfMemory, is_out_of_memory
from visionattn.cli.untrusted import brief
from visionattn.data.geometry import Box, Size, View, pixels
from visionattn.inference.banded_inference import Banding
from visionattn.inference.image_reading import ReadImages, Sample
from visionattn.inference.look_options import (
    CLASS,
    SHOWN,
    TOP,
    LookOptions,
    check_asked,
    parse_queries,
)
from visionattn.inference.model_opening import Opened
from visionattn.layout import Grid
from visionattn.model_config import VECTOR_TASKS, Task
from visionattn.models.attribution import (
    Attribution,
    block_number,
    check_model,
    divides,
    find_attribution,
    principal,
    watch,
)
from visionattn.models.patch_heads import PatchClassifier
from visionattn.models.patches import call, grid_of
from visionattn.models.weights import DataSpec

Place = tuple[int, int]
"""Row and column of a patch."""


class TokenWeights(NamedTuple):
    """The attention weights of one token of a block over the patches."""

    block: int
    query: str
    """``class``, or the patch as ``row 3, column 17``."""
    place: Place | None
    """The query patch; None: the class token."""
    content: Tensor
    """float32 ``[H, W]``: the share of the weight from content; 0 for absent patches."""
    relative: Tensor | None
    """The share from place, likewise; None if it is not a summand."""
    prefix: float
    """The weight of class and register tokens."""

    def term(self, name: str) -> Tensor:
        """Return the weights for ``both``, or the shares of ``content`` or ``place``."""
        if name == "place" and self.relative is None:
            raise ValueError(
                f"block {self.block} has no separate weights for content and position; remove "
                "--term"
            )
        if self.relative is None or name == "content":
            return self.content
        return self.relative if name == "place" else self.content + self.relative


@dataclass(frozen=True)
class ClassAttribution:
    """The attribution of a class in one image."""

    path: str
    class_name: str
    """Name of the class; its index if the classes have no names."""
    probability: float
    """Probability of the class, in [0, 1]; for ``regression`` the value of the target."""
    evidence: Attribution
    grid: Grid
    """Rows and columns of patches."""
    patch_px: Size
    view: View
    """The part of the file that the model saw, and its size there."""
    present: Tensor | None
    """bool ``[H, W]``, False for absent patches; None: all are present."""
    rows: list[TokenWeights] = field(default_factory=list)
    components: Tensor | None = None
    """The first three principal components of the features, float64 ``[3, H, W]``; None if not
    requested.
    """
    shares: Tensor | None = None
    """The share of the variance of each component."""
    task: Task = "classification"
    """The task of the model."""
    in_bands: bool = False
    """Whether it was computed band by band, without gradient, rows and features."""

    @property
    def output(self) -> str:
        """Return the attributed value in words."""
        less = "" if self.task in VECTOR_TASKS else " minus the mean of all classes"
        return f"the output of {self.class_name!r}{less}"

    @property
    def above(self) -> str:
        """Return the reference point of the margin in words."""
        of_task = {"multilabel": "(logit)", "regression": "standard deviations from the mean"}
        return of_task.get(self.task, "above the mean of all classes")

    @property
    def top(self) -> Place:
        """Return the patch that adds most to the class.

        If the pooling cannot be divided, it is the patch with the largest sum of absolute gradient
        times input.
        """
        scores = self.evidence.patches
        if scores is None:
            scores = of_patches(self.evidence.gradient, self.patch_px)
        if self.present is not None:
            scores = scores.masked_fill(~self.present, float("-inf"))
        row, column = divmod(int(scores.argmax()), self.grid.width)
        return row, column

    def box(self, row: int, column: int) -> Box:
        """Return the box of a patch in the file, in pixels."""
        first, length, seen = self._axes()
        ends = np.array([(row, column), (row + 1, column + 1)]) * self.patch_px
        ends = np.rint(np.minimum(ends, seen) * length / seen).astype(int)
        return Box(*(first + ends[0]).tolist(), *(ends[1] - ends[0]).tolist())

    def patch_at(self, down: int, right: int) -> Place:
        """Return the patch that contains a pixel of the file.

        Raises:
            ValueError: the pixel lies outside of the image, or of the part that the model sees.
        """
        first, length, seen = self._axes()
        at = np.array((down, right)) - first
        if (at < 0).any() or (at >= length).any():
            box = self.view.box
            raise ValueError(
                f"expected a query within the part of the image that the model sees, {box.height} "
                f"x {box.width} pixels from {box.top},{box.left}, got {down},{right}"
            )
        row, column = ((at + 0.5) * seen / length // self.patch_px).astype(int).tolist()
        return row, column

    def _axes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, for down and right, the start of the visible part in the file, its length there,
        and its length as the model sees it.
        """
        return np.array(self.view.box[:2]), np.array(self.view.box[2:]), np.array(self.view.content)


def of_patches(gradient: Tensor, patch_px: Size) -> Tensor:
    """Return the sums of absolute values over the pixels of each patch, float64 ``[H, W]``."""
    values = gradient.double().abs()[None]
    return F.avg_pool2d(values, patch_px, ceil_mode=True, divisor_override=1)[0]


def class_number(word: str, spec: DataSpec) -> int:
    """Return the index of a class from its name, or from a number if no name matches.

    Raises:
        ValueError: there is no such class; one line.
    """
    names = spec.class_names
    if word in names:
        return names.index(word)
    if word.isdecimal() and len(word) < 10 and int(word) < spec.num_classes:
        return int(word)
    known = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
    known = known or f"0 to {spec.num_classes - 1}"
    kind = ("target", "targets") if spec.task == "regression" else ("class", "classes")
    raise ValueError(f"there is no {kind[0]} {brief(word)}; the {kind[1]} are {known}")


class ImageAttribution:
    """Computes the attribution in images with the given options.

    Args:
        opened: the model.
        images: the images.
        options: checked by ``inference_options.check``.

    Raises:
        ValueError: the model has no classes or is not ours, there is no such class, block, head or
            token, or an option has no effect; one line.
    """

    def __init__(self, opened: Opened, images: ReadImages, options: LookOptions):
        spec, self.opened, self.images, self.options = opened.spec, opened, images, options
        if spec.num_classes < 1:
            raise ValueError(f"expected a model with classes, got {opened.name}")
        self.model = model = check_model(opened.model)
        self.target = None if options.target is None else class_number(options.target, spec)
        self.banding = Banding(opened, images, call)
        if isinstance(model, PatchClassifier):
            if options.show != list(SHOWN) and not {"winners", "boxes"}.issuperset(options.show):
                raise ValueError("a head on patches supports only --show winners and boxes")
            self.options = replace(options, show=["winners"])
        check_asked(self.options)
        if isinstance(model, PatchClassifier):
            return
        self.blocks = [block_number(model, index) for index in options.blocks]
        self.features_block = block_number(model, options.features_block)
        heads = min(block.attn.num_heads for block in model.blocks)
        if options.head is not None and not 0 <= options.head < heads:
            raise ValueError(f"expected head 0 to {heads - 1} of {heads}, got {options.head}")
        queries = parse_queries(options.queries)
        if queries is None:
            queries = [CLASS if model.has_class_token and model.global_pool == "token" else TOP]
        if CLASS in queries and not model.has_class_token:
            raise ValueError(f"{opened.name} has no class token; pass places or top as queries")
        self.queries = queries

    def look(self, index: int) -> tuple[ClassAttribution, Sample]:
        """Return the attribution in an image by its index, and the image as it was read.

        Raises:
            ValueError: it cannot be read, a query lies outside, or outputs are not finite; one line
                that begins with the path.
            OutOfMemory: it does not fit into memory.
        """
        sample, path = self.images[index], self.images.listing.name(index)
        try:
            if sample.banded:
                return self._in_bands(index, sample, path), sample
            if sample.pixels is None:
                raise ValueError(sample.reason)
            return self._find(sample, path), sample
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or sample.pixels is None:
                raise
            size = pixels(sample.pixels.shape[1:])
            raise OutOfMemory(
                f"{path}: out of memory with an image of {size}; try --show winners rows"
            ) from error

    def _look(
        self, sample: Sample, path: str, evidence: Attribution, **more: object
    ) -> ClassAttribution:
        view = self.images.geometry.view(sample.height, sample.width)
        spec, patch_px = self.opened.spec, tuple(self.model.patch_embed.patch_size)
        names, values = spec.class_names, evidence.logits.softmax(0)
        if spec.task in VECTOR_TASKS:
            values = spec.values_of(evidence.logits)
        return ClassAttribution(
            path,
            names[evidence.target] if names else str(evidence.target),
            float(values[evidence.target]),
            evidence,
            Grid(view.canvas[0] // patch_px[0], view.canvas[1] // patch_px[1]),
            patch_px,
            view,
            task=spec.task,
            **more,
        )

    def _in_bands(self, index: int, sample: Sample, path: str) -> ClassAttribution:
        """Compute it without the gradient, rows of attention and features."""
        if not {"winners", "boxes"} & {*self.options.show} or not divides(self.model):
            raise ValueError(
                "the image does not fit into memory in one pass; band by band only --show "
                "winners and boxes work, for models that pool by maximum or mean; pass a smaller "
                "--img-size"
            )
        banding = self.banding
        how = dict(target=self.target, memory=banding.memory_bytes(), say=banding.say)
        with banding.opened_image(index) as source:
            evidence = banding.compute(source, want="evidence", **how)
        return self._look(sample, path, evidence, present=None, in_bands=True)

    def _find(self, sample: Sample, path: str) -> ClassAttribution:
        model, show, sizes, present = self.model, self.options.show, None, None
        prefix = model.num_prefix_tokens
        inputs = self.opened.spec.prepare(sample.pixels[None].to(self.opened.device))
        if sample.present != tuple(inputs.shape[2:]):
            sizes = torch.tensor([sample.present], device=inputs.device)
            grid = grid_of(inputs.shape[2:], model.patch_embed.patch_size)
            present = model.present_patches(inputs, sizes)[0].cpu().unflatten(0, tuple(grid))
        evidence = find_attribution(
            model,
            inputs,
            sizes=sizes,
            target=self.target,
            gradient="gradient" in show or not divides(model),
        )
        look = self._look(sample, path, evidence, present=present)
        tokens: dict[Place | None, int] = {}
        for query in self.queries if "rows" in show else ():
            place = None if query == CLASS else look.top if query == TOP else look.patch_at(*query)
            tokens[place] = 0 if place is None else prefix + place[0] * look.grid.width + place[1]
        rows, features = watch(
            model,
            inputs,
            dict.fromkeys(self.blocks, list(tokens.values())) if tokens else {},
            sizes=sizes,
            features=self.features_block if "features" in show else None,
        )
        for block, found in rows.items():
            for number, place in enumerate(tokens):
                content = self._map(found.content, number)
                relative = None if found.relative is None else self._map(found.relative, number)
                whole = content if relative is None else content + relative
                query = CLASS if place is None else f"row {place[0]}, column {place[1]}"
                own, others = (
                    None if each is None else each[prefix:].unflatten(0, tuple(look.grid))
                    for each in (content, relative)
                )
                assert own is not None
                rest = float(whole[:prefix].sum())
                look.rows.append(TokenWeights(block, query, place, own, others, rest))
        if features is None:
            return look
        components, shares = principal(features, look.present)
        return replace(look, components=components, shares=shares)

    def _map(self, shares: Tensor, number: int) -> Tensor:
        """Return the weights ``[N]`` of a query in ``[1, h, Q, N]``, for one head or averaged over
        heads.
        """
        own, head = shares[0, :, number], self.options.head
        return (own.mean(0) if head is None else own[head]).float().cpu()
