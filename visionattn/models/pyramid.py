"""``PyramidTransformer``: our transformer with feature maps at strides of 4, 8, 16 and 32 px, for
segmentation decoders and detectors.

It computes the maps from the last block's map; decoders are elsewhere.
"""

from timm.layers import LayerNorm2d, to_2tuple
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from visionattn.models.backbone import VisionAttnTransformer, packed

STRIDES = (4, 8, 16, 32)
"""Strides of the maps in pixels."""
LARGEST_PATCH = 128


class SimplePyramid(nn.Module):
    """Maps at four strides from one map, each with its own layers.

    Transposed 2 x 2 convolutions, with a norm and a GELU between two of them, make a map finer, and
    maximum pooling makes it coarser. A 1 x 1 and a 3 x 3 convolution, each followed by a norm, then
    give every map the same number of channels. On grids with an odd side, pooling includes the
    border.

    Args:
        dim: D, channels of the map.
        patch_px: stride of the map in pixels, a power of two up to 128.
        channels: channels of each of the four maps.

    Raises:
        ValueError: another stride.

    Source: Li et al. 2022, "Exploring plain vision transformer backbones for object detection",
    section 3; the layers follow its published code.
    """

    def __init__(self, dim: int, patch_px: int, channels: int, device=None, dtype=None):
        super().__init__()
        if patch_px not in {1 << i for i in range(LARGEST_PATCH.bit_length())}:
            raise ValueError(
                f"expected a patch_size that is a power of two up to {LARGEST_PATCH}, for maps at "
                f"strides {', '.join(map(str, STRIDES))}, got {patch_px}"
            )
        dd = {"device": device, "dtype": dtype}
        self.levels = nn.ModuleList(
            _level(dim, patch_px, stride, channels, dd) for stride in STRIDES
        )

    def forward(self, x: Tensor, take: list[int]) -> list[Tensor]:
        """Turn a map ``[B, D, H, W]`` into the maps with indices ``take``, in their order."""
        return [self.levels[i](x) for i in take]


def _level(dim: int, patch_px: int, stride: int, channels: int, dd: dict) -> nn.Sequential:
    """Return the layers for the map of one stride."""
    layers: list[nn.Module] = []
    while patch_px > stride:
        if layers:
            layers += [LayerNorm2d(dim, **dd), nn.GELU()]
        half = max(1, dim // 2)
        layers.append(nn.ConvTranspose2d(dim, half, 2, 2, **dd))
        dim, patch_px = half, patch_px // 2
    if patch_px < stride:
        # Include the border, so that grids with an odd side lose no patch.
        layers.append(nn.MaxPool2d(stride // patch_px, ceil_mode=True))
    for inputs, side in ((dim, 1), (channels, 3)):
        layers.append(nn.Conv2d(inputs, channels, side, padding=side // 2, bias=False, **dd))
        layers.append(LayerNorm2d(channels, **dd))
    return nn.Sequential(*layers)


class PyramidTransformer(VisionAttnTransformer):
    """A ``VisionAttnTransformer`` whose intermediates are four maps of its last block, at strides
    of 4, 8, 16 and 32 px.

    timm's ``features_only`` passes them to decoders and detectors. A forward pass classifies like
    the model without a pyramid and does not use the pyramid's layers; that model's weights load
    here.

    Args:
        pyramid_channels: channels of each map.
        args, options: as for ``VisionAttnTransformer``; a patch is a square, of a power of two px.

    Raises:
        ValueError: another patch, or as ``VisionAttnTransformer``.

    Source: see ``SimplePyramid``.
    """

    block_intermediates = VisionAttnTransformer.forward_intermediates
    """Return maps of blocks; ``forward_intermediates`` returns maps of the pyramid."""

    def __init__(self, *args, pyramid_channels: int = 256, device=None, dtype=None, **options):
        super().__init__(*args, device=device, dtype=dtype, **options)
        rows, columns = self.patch_embed.patch_size
        if rows != columns:
            raise ValueError(f"expected square patches for a pyramid, got {rows} x {columns}")
        self.pyramid = SimplePyramid(self.embed_dim, rows, pyramid_channels, device, dtype)
        self.pyramid_channels = pyramid_channels
        self._say_maps()

    def _say_maps(self) -> None:
        """Describe the maps in timm's ``feature_info``."""
        self.feature_info = [
            dict(module=f"pyramid.levels.{i}", num_chs=self.pyramid_channels, reduction=stride)
            for i, stride in enumerate(STRIDES)
        ]

    def set_input_size(self, img_size=None, patch_size=None) -> None:
        """Change the native size in pixels, as ``VisionAttnTransformer`` does.

        Raises:
            ValueError: another patch size, for which the pyramid has no layers.
        """
        own = tuple(self.patch_embed.patch_size)
        if patch_size is not None and to_2tuple(patch_size) != own:
            raise ValueError(
                f"expected patch_size {own[0]}, for which the pyramid was built, got "
                f"{patch_size}; build the model with patch_size"
            )
        super().set_input_size(img_size=img_size)
        self._say_maps()

    def prune_intermediate_layers(
        self,
        indices: int | list[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Drop the layers of unrequested maps, and norm and head if requested; return the indices
        of the kept maps.
        """
        take, _ = feature_take_indices(len(STRIDES), indices)
        for i in range(len(STRIDES)):
            if i not in take:
                self.pyramid.levels[i] = nn.Identity()
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.fc_norm = nn.Identity()
            self.reset_classifier(0, "")
        return take

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        sizes: Tensor | None = None,
    ):
        """Return maps at chosen strides. Arguments and results are as in timm; ``sizes`` is as in
        the forward pass.

        Map i is ``[B, pyramid_channels, ceil(H_px / s), ceil(W_px / s)]`` with stride
        ``s = 4, 8, 16, 32``. All maps, and the prefix tokens returned with each, come from the last
        block, after the model's norm if ``norm`` is true. ``stop_early`` has no effect.
        """
        take, _ = feature_take_indices(len(STRIDES), indices)
        said = super().forward_intermediates(
            x,
            indices=1,
            return_prefix_tokens=True,
            norm=norm,
            output_dict=True,
            attn_mask=attn_mask,
            is_causal=is_causal,
            sizes=sizes,
        )
        (last,), prefix = said["image_intermediates"], said.get("image_intermediates_prefix")
        maps = self.pyramid(last, take)
        if output_fmt == "NLC":
            maps = [y.flatten(2).transpose(1, 2) for y in maps]
        elif output_fmt != "NCHW":
            raise ValueError(f"output_fmt {output_fmt!r}: expected NCHW or NLC")
        prefixes = prefix * len(maps) if prefix is not None and return_prefix_tokens else None
        features = None if intermediates_only else said["image_features"]
        return packed(maps, prefixes, features, output_dict)
