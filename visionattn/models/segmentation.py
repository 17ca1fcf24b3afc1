"""Segmentation with a vision transformer: a head on its patch features.

This module owns the head and the upsampling of its logits to pixels. The body is any ViT, ours or
timm's, built by name as for classification.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visionattn.models.patch_heads import PatchClassifier, PatchModel

IGNORED = 255
"""Class of ignored pixels, so there are at most 255 others."""


class Segmenter(PatchModel):
    """A vision transformer whose outputs are logits of each pixel, ``[B, classes, H_px, W_px]``.

    The last layer of the head gives the logits of each patch's cells, and bilinear interpolation
    the logits of pixels.

    Args:
        backbone: see ``PatchModel``.
        num_classes: number of pixel classes.
        head_stride: side in pixels of the cells that get a logit; it divides both sides of a patch.
            None: the largest such side, so that a square patch is one cell.
        head: further arguments of ``PatchModel``.

    Raises:
        ValueError: as ``PatchModel``, or cells do not fill patches.
    """

    def __init__(
        self,
        backbone: nn.Module,
        num_classes: int,
        *,
        head_stride: int | None = None,
        **head: Any,
    ):
        super().__init__(backbone, **head)
        rows, columns = self.patch_px
        self.stride = math.gcd(rows, columns) if head_stride is None else head_stride
        if type(self.stride) is not int:
            raise ValueError(f"head_stride must be an integer, got {self.stride!r:.80}")
        if self.stride < 1 or rows % self.stride or columns % self.stride:
            raise ValueError(
                f"expected a head_stride that divides a patch of {rows} x {columns} pixels, got "
                f"{self.stride}"
            )
        self.num_classes = num_classes
        self.cells = rows // self.stride, columns // self.stride
        """Rows and columns of cells in a patch."""
        self.cell_logits = num_classes * math.prod(self.cells)
        """Number of logits of a patch, over all its cells."""
        self.head = nn.Conv2d(self.features, self.cell_logits, 1)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward_cells(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Return the logits of cells, ``[B, classes, rows, columns]``; arguments as for
        ``forward``.

        Cells of absent patches repeat the nearest present ones.
        """
        logits = self.cells_of(self.head(self.forward_patches(x, sizes)))
        return logits if sizes is None else self._extended(logits, self.filled(x, sizes))

    def cells_of(self, logits: Tensor) -> Tensor:
        """Turn the logits of patches, ``[B, cell_logits, H, W]``, into maps of their cells."""
        parts = logits.unflatten(1, (self.num_classes, *self.cells))
        return parts.permute(0, 1, 4, 2, 5, 3).flatten(4, 5).flatten(2, 3)

    def strips(self, cells: Tensor, rows: slice, step: int) -> Iterator[Tensor]:
        """Yield the logits of the pixels of some rows of cells, ``step`` rows at a time."""
        for first in range(rows.start, rows.stop, step):
            # The interpolation needs one row of cells on either side.
            above, last = max(0, first - 1), min(rows.stop, first + step)
            part = enlarged(cells[:, :, above : last + 1], self.stride)
            begin = (first - above) * self.stride
            yield part[:, :, begin : begin + (last - first) * self.stride]

    def _extended(self, logits: Tensor, filled: Tensor) -> Tensor:
        """Repeat the last filled row and column, up to whole patches, so that absent parts do not
        affect the interpolation.
        """
        rows, columns = logits.shape[2:]
        last = filled * torch.tensor(self.cells, device=filled.device) - 1
        down = torch.arange(rows, device=filled.device).minimum(last[:, :1])
        across = torch.arange(columns, device=filled.device).minimum(last[:, 1:])
        batch = torch.arange(len(logits), device=filled.device)[:, None, None]
        return logits[batch, :, down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)

    def forward(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Turn images ``[B, C, H_px, W_px]`` into logits ``[B, classes, H_px, W_px]``.

        Args:
            sizes: int64 ``[B, 2]``, filled height and width of each image in pixels, for bodies
                that skip padding; logits there are undefined.
        """
        logits = enlarged(self.forward_cells(x, sizes), self.stride)
        if getattr(self.patch_embed, "dynamic_img_pad", False):
            # FSDP does not accept views.
            return logits[:, :, : x.shape[2], : x.shape[3]].clone()
        return logits

    def masks(self, x: Tensor, sizes: Tensor | None = None, *, strip: int = 64) -> Tensor:
        """Return the class of each pixel, uint8 ``[B, H_px, W_px]``; ``IGNORED`` for logits that
        are not finite.

        The logits of all cells are in memory, but the logits of pixels only in strips.

        Args:
            x, sizes: as for ``forward``.
            strip: rows of cells per strip.
        """
        return self._in_strips(classes_of, x, sizes, strip)[:, 0]

    def probabilities(self, x: Tensor, sizes: Tensor | None = None, *, strip: int = 64) -> Tensor:
        """Return ``probabilities_of`` each pixel, float16 ``[B, classes, H_px, W_px]``; arguments
        as for ``masks``.
        """
        return self._in_strips(probabilities_of, x, sizes, strip)

    @torch.inference_mode()
    def _in_strips(
        self, convert: Callable[[Tensor], Tensor], x: Tensor, sizes: Tensor | None, strip: int
    ) -> Tensor:
        cells = self.forward_cells(x, sizes).float()
        found = [convert(part) for part in self.strips(cells, slice(0, cells.shape[2]), strip)]
        return torch.cat(found, 2)[:, :, : x.shape[2], : x.shape[3]]


@torch.no_grad()
def classifier_of(model: Segmenter, top: int) -> PatchClassifier:
    """Return an image classifier that shares body and hidden layers with the model. Its output for
    a class is the mean over the ``top`` largest patches of the class's logit minus the logit of the
    first class, the background; the first class has no output.

    Raises:
        ValueError: a patch has several cells, there are fewer than three classes, or as
            ``PatchClassifier``.
    """
    if model.cells != (1, 1) or model.num_classes < 3:
        raise ValueError(
            "expected one logit per patch, and two classes in addition to the background, got "
            f"{model.cells} cells and {model.num_classes} classes"
        )
    made = PatchClassifier(
        model.backbone, model.num_classes - 1, head_blocks=model.taken, head_top=top
    )
    made.norms, made.neck, made.encoder = model.norms, model.neck, model.encoder
    made.head = nn.Conv2d(model.features, made.num_classes, 1)
    made.head.weight.copy_(model.head.weight[1:] - model.head.weight[:1])
    made.head.bias.copy_(model.head.bias[1:] - model.head.bias[:1])
    return made


def classes_of(logits: Tensor) -> Tensor:
    """Return the class of each pixel of ``[..., C, H, W]``, uint8 ``[..., 1, H, W]``; ``IGNORED``
    for logits that are not finite.
    """
    found = logits.argmax(-3, keepdim=True).to(torch.uint8)
    return found.masked_fill_(~logits.isfinite().all(-3, keepdim=True), IGNORED)


def probabilities_of(logits: Tensor) -> Tensor:
    """Return the softmax probabilities of each pixel of ``[..., C, H, W]``, float16 of this shape;
    NaN for logits that are not finite.

    ``classes_of`` gives the same classes for logits and probabilities.
    """
    best = logits.argmax(-3, keepdim=True)
    found = logits.softmax(-3).to(torch.float16)
    # Where rounding makes an earlier class equal to the best, the best gets the next larger number.
    tied = found.argmax(-3, keepdim=True) != best
    found.view(torch.int16).scatter_add_(-3, best, tied.to(torch.int16))
    return found.masked_fill_(~logits.isfinite().all(-3, keepdim=True), float("nan"))


def enlarged(logits: Tensor, times: int) -> Tensor:
    """Return maps ``[B, C, H, W]`` enlarged by an integer factor, bilinearly between the centers of
    cells.
    """
    if times == 1:
        return logits
    return F.interpolate(logits, scale_factor=times, mode="bilinear", align_corners=False)
