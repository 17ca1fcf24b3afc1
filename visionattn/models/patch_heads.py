"""Heads on the patch features of a vision transformer: what segmentation and classification by
patches share, and the classifier.

The body is any ViT with patches, ours or timm's. ``KeptMaps`` replaces it where its feature maps
are the inputs, so that a head can be trained on features in files.
"""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import LayerNorm2d, to_2tuple
from torch import Tensor, nn

from visionattn.layout import Grid, TokenLayout
from visionattn.models.bag import BagEncoder
from visionattn.models.mixed_blocks import places_of_blocks
from visionattn.models.patches import filled_grids, grid_of, pool_present, present_places

HEAD_ARGS = ("head_blocks", "head_stride", "head_hidden", "head_drop", "head_depth")
HEAD_ARGS += ("head_attention", "head_top")
"""Arguments of a head on patch features in addition to the body's."""
HEAD_WIDTH = 64
"""Width of an attention head in the blocks of a head, or somewhat more."""


class PatchModel(nn.Module):
    """A vision transformer with outputs from its patch features; the base of ``Segmenter`` and
    ``PatchClassifier``.

    The feature maps of the chosen blocks are concatenated along the channels. Each passes the
    body's final norm, or its own norm if the body pools before the norm, as for the linear heads of
    DINOv2 (Oquab et al. 2023, section 7.4). A linear layer gives the outputs of each patch, after a
    hidden layer and blocks with linear attention if requested.

    Args:
        backbone: a ViT without classifier, ours or timm's, with ``blocks``,
            ``patch_embed.patch_size`` and ``forward_intermediates``; or ``KeptMaps``. Blocks above
            the last chosen one are removed.
        head_blocks: the blocks whose features are used (negative: from the end); None: the last.
        head_hidden: width of a hidden layer with GELU; 0: a linear head.
        head_drop: dropout after the hidden layer.
        head_depth: number of blocks with attention over all patches after the hidden layer.
        head_attention: their attention, "kernelized" or "taylorshift", with joint relative
            position.

    Raises:
        ValueError: the body is not such a ViT, has no such blocks, or an option needs another one.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        head_blocks: Sequence[int] | None = None,
        head_hidden: int = 0,
        head_drop: float = 0.0,
        head_depth: int = 0,
        head_attention: str = "kernelized",
    ):
        super().__init__()
        patch_px = getattr(getattr(backbone, "patch_embed", None), "patch_size", None)
        parts = ("blocks", "forward_intermediates", "prune_intermediate_layers")
        if patch_px is None or not all(hasattr(backbone, part) for part in parts):
            raise ValueError(
                "expected a vision transformer with patch features, such as scaleformer_vit_s or "
                f"vit_small_patch16_224, got {type(backbone).__name__}"
            )
        if hasattr(backbone, "pyramid"):
            raise ValueError(
                "expected a model with patch features, got the pyramid "
                f"{type(backbone).__name__}; use the model without _pyramid, or a decoder for "
                "pyramids"
            )
        for option, value in {"head_hidden": head_hidden, "head_depth": head_depth}.items():
            if type(value) is not int or value < 0:
                raise ValueError(f"{option} must be an integer of at least 0, got {value!r:.80}")
        if not head_hidden and (head_drop or head_depth):
            option = "head_depth" if head_depth else "head_drop"
            raise ValueError(f"{option} needs a hidden layer; pass its width, head_hidden")
        if head_attention != "kernelized" and not head_depth:
            raise ValueError(
                "head_attention needs blocks in the head; pass their number, head_depth"
            )
        self.patch_px = to_2tuple(patch_px)
        """Height and width of a patch in pixels."""
        self.places = (1, 1) if isinstance(backbone, KeptMaps) else self.patch_px
        """Rows and columns of a patch in the inputs."""
        self.taken = places_of_blocks(
            [-1] if head_blocks is None else head_blocks, len(backbone.blocks), "head_blocks"
        )
        if not self.taken:
            raise ValueError("head_blocks: expected at least one block, got none")
        # timm's own method drops the parts that no chosen block needs; the final norm stays.
        backbone.prune_intermediate_layers(self.taken, prune_norm=False, prune_head=True)
        self.backbone = backbone
        # A body that pools before its norm has no norm for patches.
        unnormed = isinstance(backbone.norm, nn.Identity)
        self.norms = nn.ModuleList(
            LayerNorm2d(backbone.embed_dim) if unnormed else nn.Identity() for _ in self.taken
        )
        self.width = len(self.taken) * backbone.embed_dim
        """Channels of the concatenated maps."""
        self.neck, self.encoder = None, None
        if head_hidden:
            hidden = nn.Conv2d(self.width, head_hidden, 1)
            self.neck = nn.Sequential(hidden, nn.GELU(), nn.Dropout(head_drop))
        if head_depth:
            most = max(1, head_hidden // HEAD_WIDTH)
            heads = max(number for number in range(1, most + 1) if head_hidden % number == 0)
            options = dict(attention=head_attention, global_pool="avg")
            self.encoder = BagEncoder(head_hidden, head_hidden, head_depth, heads, 0, **options)
        self.features = head_hidden or self.width
        """Width of the last layer's input."""

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
        """Return the parameters without weight decay."""
        of_encoder = {"encoder.*.attn.relative.*", "encoder.*.attn.temperature"}
        return of_encoder | {f"backbone.{name}" for name in self.backbone.no_weight_decay()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's grouping of parameters by depth: the body's stem, its blocks, the rest."""
        return dict(
            stem=r"^backbone\.(?:cls_token|reg_token|pos_embed|patch_embed|norm_pre)",
            blocks=[
                (r"^backbone\.blocks\.(\d+)", None),
                (r"^backbone\.norm", (99999,)),
            ],
        )

    def maps(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Return the concatenated feature maps of images, ``[B, width, H, W]``; arguments as for
        the body.
        """
        given = {} if sizes is None else {"sizes": sizes}
        maps = self.backbone.forward_intermediates(
            x, indices=self.taken, norm=True, intermediates_only=True, **given
        )
        return torch.cat([norm(each) for norm, each in zip(self.norms, maps, strict=True)], 1)

    def filled(self, x: Tensor, sizes: Tensor | None) -> Tensor | None:
        """Return the rows and columns of patches that images fill, int64 ``[B, 2]``; None: all."""
        return filled_grids(x, sizes, self.places)

    def present_patches(self, x: Tensor, sizes: Tensor | None) -> Tensor | None:
        """Return True for the patches that images fill, bool ``[B, H*W]``; None: all."""
        return present_places(self.filled(x, sizes), grid_of(x.shape[2:], self.places))

    def forward_patches(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Return the input of the last layer, ``[B, features, H, W]``."""
        maps = self.maps(x, sizes)
        if self.neck is not None:
            maps = self.neck(maps)
        if self.encoder is None:
            return maps
        grid = Grid(*maps.shape[2:])
        layout = TokenLayout(0, grid, present=self.present_patches(x, sizes))
        tokens = self.encoder.encode(maps.flatten(2).mT, layout)
        return tokens.mT.unflatten(2, tuple(grid))


class PatchClassifier(PatchModel):
    """A vision transformer whose outputs for an image are the mean of each class's largest outputs
    over the patches, ``[B, classes]``: multiple-instance learning (Ilse et al. 2018, section 2).

    Small objects decide a few patches, and a mean over all patches would lose them.

    Args:
        backbone: see ``PatchModel``.
        num_classes: number of outputs; 0: only feature maps.
        head_top: number of patches in the mean; 1: the maximum; 0: the mean of all patches.
        head: further arguments of ``PatchModel``.

    Raises:
        ValueError: as ``PatchModel``.
    """

    num_prefix_tokens = 0

    def __init__(self, backbone: nn.Module, num_classes: int, *, head_top: int = 5, **head: Any):
        super().__init__(backbone, **head)
        if type(head_top) is not int or head_top < 0:
            raise ValueError(
                f"expected head_top to be a number of patches, or 0 for all, got {head_top}"
            )
        self.num_classes, self.top = num_classes, head_top
        self.head = nn.Identity()
        if num_classes:
            self.head = nn.Conv2d(self.features, num_classes, 1)
            nn.init.trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    def forward_intermediates(self, x: Tensor, *, sizes: Tensor | None = None, **_) -> list[Tensor]:
        """Return the only map, as ``last_map`` requests it."""
        return [self.maps(x, sizes)]

    def forward(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Turn images ``[B, C, H_px, W_px]`` into outputs ``[B, classes]``.

        Args:
            sizes: int64 ``[B, 2]``, filled height and width of each image in pixels, for bodies
                that skip padding.
        """
        scores = self.head(self.forward_patches(x, sizes)).flatten(2).mT
        how = f"top{self.top}" if self.top else "avg"
        return pool_present(scores, self.present_patches(x, sizes), how, 0, with_prefix=False)


class KeptMaps(nn.Module):
    """The body of a ``PatchModel`` whose inputs are feature maps in place of images.

    Args:
        width: channels of the maps.
        patch_px: height and width in pixels of the patches that they describe.

    Attributes:
        input_px: height and width in pixels of the image for each place of the inputs.
    """

    def __init__(self, width: int, patch_px: tuple[int, int]):
        super().__init__()
        self.embed_dim, self.input_px, self.patch_size = width, patch_px, patch_px
        self.blocks, self.norm = nn.ModuleList([nn.Identity()]), None

    @property
    def patch_embed(self) -> "KeptMaps":
        """Return the object with the patch size, as in other bodies."""
        return self

    def prune_intermediate_layers(self, *_, **__) -> None:
        """Do nothing: there is one map."""

    def no_weight_decay(self) -> set[str]:
        """Return an empty set: there are no parameters."""
        return set()

    def forward(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Return the maps."""
        return x

    def forward_intermediates(self, x: Tensor, **_) -> list[Tensor]:
        """Return the maps as the only block's."""
        return [x]
