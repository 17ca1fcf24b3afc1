"""Segmentation with a vision transformer: a linear head on its patch features.

This module owns the head and the upsampling of its logits to pixels. The body is any ViT, ours or
timm's, built by name as for classification.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d, to_2tuple
from torch import Tensor, nn

from visionattn.models.mixed_blocks import places_of_blocks

IGNORED = 255
"""Class of ignored pixels, so there are at most 255 others."""
HEAD_ARGS = ("head_blocks", "head_stride")
"""Arguments of a ``Segmenter`` in addition to the body's."""


class Segmenter(nn.Module):
    """A vision transformer whose outputs are logits of each pixel, ``[B, classes, H_px, W_px]``.

    The feature maps of the chosen blocks are concatenated along the channels. Each passes the
    body's final norm, or its own norm if the body pools before the norm, as for the linear heads of
    DINOv2 (Oquab et al. 2023, section 7.4). One linear layer gives the logits of each patch's
    cells, and bilinear interpolation the logits of pixels.

    Args:
        backbone: a ViT without classifier, ours or timm's, with ``blocks``,
            ``patch_embed.patch_size`` and ``forward_intermediates``. Blocks above the last chosen
            one are removed.
        num_classes: number of pixel classes.
        head_blocks: the blocks whose features are used (negative: from the end); None: the last.
        head_stride: side in pixels of the cells that get a logit; it divides both sides of a patch.
            None: the largest such side, so that a square patch is one cell.

    Raises:
        ValueError: the body is not such a ViT, has no such blocks, or cells do not fill patches.
    """

    def __init__(
        self,
        backbone: nn.Module,
        num_classes: int,
        *,
        head_blocks: Sequence[int] | None = None,
        head_stride: int | None = None,
    ):
        super().__init__()
        patch_px = getattr(getattr(backbone, "patch_embed", None), "patch_size", None)
        parts = ("blocks", "forward_intermediates", "prune_intermediate_layers")
        if patch_px is None or not all(hasattr(backbone, part) for part in parts):
            raise ValueError(
                f"{type(backbone).__name__} has no patch features for a head of pixels; take a "
                "vision transformer, such as scaleformer_vit_s or vit_small_patch16_224"
            )
        if hasattr(backbone, "pyramid"):
            raise ValueError(
                f"{type(backbone).__name__} gives a pyramid of maps, and this head takes the "
                "features of patches; take the model without _pyramid, or a decoder for pyramids"
            )
        rows, columns = to_2tuple(patch_px)
        self.taken = places_of_blocks(
            [-1] if head_blocks is None else head_blocks, len(backbone.blocks), "head_blocks"
        )
        if not self.taken:
            raise ValueError("head_blocks: wanted a block or more, got none")
        self.stride = math.gcd(rows, columns) if head_stride is None else head_stride
        if type(self.stride) is not int:
            raise ValueError(f"head_stride must be a whole number, got {self.stride!r:.80}")
        if self.stride < 1 or rows % self.stride or columns % self.stride:
            raise ValueError(
                f"head_stride {self.stride} does not divide the sides of a patch of {rows} x "
                f"{columns} pixels"
            )
        # timm's own method drops the parts that no chosen block needs; the final norm stays.
        backbone.prune_intermediate_layers(self.taken, prune_norm=False, prune_head=True)
        self.backbone = backbone
        self.num_classes = num_classes
        self.cells = rows // self.stride, columns // self.stride
        """Rows and columns of cells in a patch."""
        # A body that pools before its norm has no norm for patches.
        unnormed = isinstance(backbone.norm, nn.Identity)
        self.norms = nn.ModuleList(
            LayerNorm2d(backbone.embed_dim) if unnormed else nn.Identity() for _ in self.taken
        )
        width = len(self.taken) * backbone.embed_dim
        self.cell_logits = num_classes * math.prod(self.cells)
        """Number of logits of a patch, over all its cells."""
        self.head = nn.Conv2d(width, self.cell_logits, 1)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    @property
    def patch_embed(self) -> Any:
        """Return the body's patch embedding, which defines the accepted image sizes."""
        return self.backbone.patch_embed

    @property
    def blocks(self) -> Any:
        """Return the body's blocks."""
        return self.backbone.blocks

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks in the backward pass."""
        self.backbone.set_grad_checkpointing(enable)

    def set_input_size(self, *args, **kwargs) -> None:
        """Change the body's native size; see there."""
        self.backbone.set_input_size(*args, **kwargs)

    def no_weight_decay(self) -> set[str]:
        """Return the body's parameters without weight decay."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's grouping of parameters by depth: the body's stem, its blocks, the rest."""
        return dict(
            stem=r"^backbone\.(?:cls_token|reg_token|pos_embed|patch_embed|norm_pre)",
            blocks=[
                (r"^backbone\.blocks\.(\d+)", None),
                (r"^backbone\.norm", (99999,)),
            ],
        )

    def forward_cells(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Return the logits of cells, ``[B, classes, rows, columns]``; arguments as for
        ``forward``.

        Cells of absent patches repeat the nearest present ones.
        """
        given = {} if sizes is None else {"sizes": sizes}
        maps = self.backbone.forward_intermediates(
            x, indices=self.taken, norm=True, intermediates_only=True, **given
        )
        normed = [norm(each) for norm, each in zip(self.norms, maps, strict=True)]
        logits = self.head(torch.cat(normed, 1))
        batch, _, height, width = logits.shape
        down, across = self.cells
        logits = logits.view(batch, self.num_classes, down, across, height, width)
        size = (batch, self.num_classes, height * down, width * across)
        logits = logits.permute(0, 1, 4, 2, 5, 3).reshape(size)
        return logits if sizes is None else self._extended(logits, sizes)

    def _extended(self, logits: Tensor, sizes: Tensor) -> Tensor:
        """Repeat the last filled row and column, up to whole patches, so that absent parts do not
        affect the interpolation.
        """
        rows, columns = logits.shape[2:]
        patch = torch.tensor(to_2tuple(self.patch_embed.patch_size), device=sizes.device)
        last = (sizes + patch - 1) // patch * torch.tensor(self.cells, device=sizes.device) - 1
        down = torch.arange(rows, device=sizes.device).minimum(last[:, :1])
        across = torch.arange(columns, device=sizes.device).minimum(last[:, 1:])
        batch = torch.arange(len(logits), device=sizes.device)[:, None, None]
        return logits[batch, :, down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)

    def forward(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Turn images ``[B, C, H_px, W_px]`` into logits ``[B, classes, H_px, W_px]``.

        Args:
            sizes: int64 ``[B, 2]``, filled height and width of each image in pixels, for bodies
                that leave out the rest; logits there are undefined.
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
        logits = self.forward_cells(x, sizes).float()
        found = []
        for first in range(0, logits.shape[2], strip):
            # The interpolation needs one row of cells on either side.
            above, last = max(0, first - 1), min(logits.shape[2], first + strip)
            part = enlarged(logits[:, :, above : last + 1], self.stride)
            begin = (first - above) * self.stride
            found.append(convert(part[:, :, begin : begin + (last - first) * self.stride]))
        return torch.cat(found, 2)[:, :, : x.shape[2], : x.shape[3]]


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
    """Return maps ``[B, C, H, W]`` enlarged by an integer factor, bilinearly between the centres of
    cells.
    """
    if times == 1:
        return logits
    return F.interpolate(logits, scale_factor=times, mode="bilinear", align_corners=False)
