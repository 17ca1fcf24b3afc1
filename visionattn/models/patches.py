"""Patches of images of any size: their embedding, absent patches of images that do not fill their
canvas, and calls of any model, ours or timm's, on such images.

Patch (y, x) of an image is present if its first pixel is, and it is used unchanged, padding at its
lower and right edges included. In the blocks, attention reads this from the ``TokenLayout``. Our
models skip the unfilled part of the canvas; other models see it as black. FX does not trace into
the functions here, so they may test arguments that can be None. Their names have no underscore,
because FX only wraps such names.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from timm.layers import PatchDropoutWithIndices, PatchEmbed, resample_abs_pos_embed
from timm.layers.pool1d import global_pool_nlc
from timm.models import register_notrace_function, register_notrace_module
from torch import Tensor, nn

from visionattn.layout import Grid, TokenLayout
from visionattn.ops.attention_sums import accumulation_dtype, product
from visionattn.ops.checks import check_device, described
from visionattn.ops.nonfinite import is_readable


@register_notrace_module
class DynamicPatchEmbed(PatchEmbed):
    """timm's PatchEmbed for images of any whole number of patches, ``[B, C, H_px, W_px]`` to
    ``[B, H, W, D]``.

    Sizes are formatted into messages only after a failed check: formatting them earlier, as timm
    does, makes a compiler build one graph per size.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Embed images.

        Raises:
            ValueError: not four dimensions, an image that is not a whole number of patches, or
                (strict) of another size.
        """
        if x.ndim != 4:
            raise ValueError(f"expected images [B, C, H_px, W_px], got {list(x.shape)}")
        check_image_size(self, *x.shape[-2:])
        return self.embed(x)

    def embed(self, x: Tensor) -> Tensor:
        """Embed images, or whole rows of patches of images, whose size is checked."""
        if self.dynamic_img_pad:
            height, width = x.shape[-2:]
            x = F.pad(x, (0, -width % self.patch_size[1], 0, -height % self.patch_size[0]))
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


def check_image_size(embed: PatchEmbed, height: int, width: int) -> None:
    """Raise ValueError if a patch embedding does not accept images of this size in pixels."""
    rows, columns = embed.patch_size
    if embed.strict_img_size and (height != embed.img_size[0] or width != embed.img_size[1]):
        raise ValueError(
            f"image of {height} x {width} pixels, but dynamic_img_size=False fixes {embed.img_size}"
        )
    if not embed.dynamic_img_pad and (height % rows or width % columns):
        raise ValueError(wrong_size(height, width, embed.patch_size))


def grid_of(size: Sequence[int], patch_size: tuple[int, int]) -> Grid:
    """Return the grid of the patches that cover an image, whose height and width are in pixels."""
    height, width = size
    return Grid(-(-height // patch_size[0]), -(-width // patch_size[1]))


def wrong_size(
    height: int, width: int, patch_size: tuple[int, int], *, square: bool = False
) -> str:
    """Return an error message about an image that is not a whole number of patches, with the
    nearest sizes that fit.

    Args:
        height, width: size of the image in pixels.
        patch_size: height and width of a patch in pixels.
        square: the image is square; name only squares.
    """

    def nearest(pixels: int, patch: int) -> str:
        below, above = pixels // patch * patch, -(-pixels // patch) * patch
        return str(pixels) if below == above else f"{below} or {above}" if below else str(above)

    rows, columns = patch_size
    patch = rows if rows == columns else f"{rows} x {columns}"
    way_out = (
        f"the nearest that fit: {nearest(height, math.lcm(rows, columns))}"
        if square
        else f"crop or pad it to {nearest(height, rows)} x {nearest(width, columns)}"
    )
    return (
        f"image of {height} x {width} pixels is not a whole number of {patch}-pixel patches; "
        f"{way_out}"
    )


def check_sizes(images: Tensor, sizes: Tensor) -> None:
    """Raise ValueError unless ``sizes`` are int64 ``[B, 2]``, on the device of
    ``images [B, C, H_px, W_px]`` and in range.

    The range, 1 to H_px and W_px, is checked only if reading is cheap.
    """
    batch, _, height, width = images.shape
    if not isinstance(sizes, Tensor) or sizes.dtype != torch.int64 or sizes.shape != (batch, 2):
        raise ValueError(
            f"sizes: expected int64 [{batch}, 2], height and width of each image in pixels, got "
            f"{described(sizes)}"
        )
    check_device("sizes", sizes, images.device, "images")
    if not is_readable(sizes):
        return
    for i, (rows, columns) in enumerate(sizes.tolist()):
        if not (1 <= rows <= height and 1 <= columns <= width):
            raise ValueError(
                f"sizes: expected 1 to {height} x 1 to {width} pixels, as the images have, got "
                f"{rows} x {columns} for image {i}"
            )


@register_notrace_function
def filled_grids(
    images: Tensor, sizes: Tensor | None, patch_size: tuple[int, int]
) -> Tensor | None:
    """Return the rows and columns of patches that each image fills, int64 ``[B, 2]``, from sizes in
    pixels, after checking them; None for None.
    """
    if sizes is None:
        return None
    check_sizes(images, sizes)
    return torch.stack(
        [-(-of // pixels) for of, pixels in zip(sizes.unbind(1), patch_size, strict=True)], dim=1
    )


def _inside(filled: Tensor, height: int, width: int) -> Tensor:
    """Return True for places of ``height`` x ``width`` in the first ``filled [B, 2]`` rows and
    columns: bool ``[B, height, width]``.
    """
    rows, columns = (torch.arange(n, device=filled.device) for n in (height, width))
    return (rows < filled[:, :1])[:, :, None] & (columns < filled[:, 1:])[:, None, :]


@register_notrace_function
def present_places(filled: Tensor | None, grid: Grid) -> Tensor | None:
    """Return True for the places of the grid that images fill, bool ``[B, H*W]``, from
    ``filled_grids``.
    """
    return None if filled is None else _inside(filled, *grid).flatten(1)


@register_notrace_function
def blank_absent(images: Tensor, filled: Tensor | None, patch_size: tuple[int, int]) -> Tensor:
    """Return the images with 0 in absent patches, so that weights never multiply NaN there."""
    if filled is None:
        return images
    ends = torch.stack(
        [of * pixels for of, pixels in zip(filled.unbind(1), patch_size, strict=True)], dim=1
    )
    return images.masked_fill(~_inside(ends, *images.shape[2:])[:, None], 0)


@register_notrace_function
def absolute_position(
    position: Tensor,
    grid: Grid,
    own_grid: tuple[int, int],
    filled: Tensor | None,
    *,
    antialias: bool = True,
) -> Tensor:
    """Return the learned position ``[1, h*w, D]`` resampled to the grid that each image fills:
    ``[1 or B, H*W, D]``.

    Args:
        position: of a grid of h x w.
        grid: H and W.
        own_grid: h and w.
        filled: see ``filled_grids``; None: all images fill the grid, and timm's function is used.
        antialias: see ``axis_weights``.
    """
    if filled is None:
        return resample_abs_pos_embed(
            position,
            new_size=grid,
            old_size=own_grid,
            num_prefix_tokens=0,
            antialias=antialias,
        )
    patches = position[0].float().unflatten(0, own_grid)
    # Rows first, then columns: bicubic interpolation is a matrix product per axis.
    rows = axis_weights(filled[:, 0], grid[0], own_grid[0], antialias)
    own = product(rows, patches.flatten(1)).unflatten(2, patches.shape[1:])
    columns = axis_weights(filled[:, 1], grid[1], own_grid[1], antialias)
    own = product(columns[:, None].expand(-1, grid[0], -1, -1), own)
    return own.flatten(1, 2).to(position.dtype)


def axis_weights(filled: Tensor, length: int, old: int, antialias: bool = True) -> Tensor:
    """Return the weights ``[B, length, old]`` that resample an axis from ``old`` entries to
    ``filled [B]``.

    Entries beyond ``filled`` repeat the last one.

    Source: ``torch.nn.functional.interpolate(mode="bicubic")``, with ``antialias`` Keys' kernel
    with a = -0.5 at the scale of the result; without, a = -0.75 at the scale of the entries, whose
    ends are repeated.
    """
    scale = (old / filled.float())[:, None, None]
    entry = torch.arange(length, device=filled.device).minimum(filled[:, None] - 1)[:, :, None]
    if not antialias:
        at = (entry + 0.5) * scale - 0.5
        taps = at.floor() + torch.arange(-1, 3, device=filled.device)
        weights = _keys((at - taps).abs(), -0.75)
        empty = weights.new_zeros(*taps.shape[:2], old)
        return empty.scatter_add(2, taps.clamp(0, old - 1).long(), weights)
    centre = torch.arange(old, device=filled.device) + 0.5
    weights = _keys(((centre - (entry + 0.5) * scale) / scale.clamp(min=1)).abs(), -0.5)
    return weights / weights.sum(2, keepdim=True)


def _keys(x: Tensor, a: float) -> Tensor:
    """Return Keys' cubic kernel at distances x."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0))


@register_notrace_module
class PatchDropout(PatchDropoutWithIndices):
    """timm's patch dropout, which drops the same share of each image's filled patches as of a full
    canvas.

    If that leaves fewer patches than tokens, absent patches fill up the sequence.
    """

    def forward(self, x: Tensor, present: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the kept tokens of ``[B, P + H*W, D]``, and the places of their patches on the
        grid, int64 ``[B, n]``; None if none was dropped.

        Args:
            present: bool ``[B, H*W]``, places with content; None: all.
        """
        if present is None or not self.training or self.prob == 0:
            return super().forward(x)
        prefix, patches = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        batch, places = present.shape
        # Random order, absent places last: an image keeps its share of its own patches, then absent
        # ones.
        order = torch.randn(batch, places, device=x.device)
        order = order.masked_fill(~present, float("inf")).argsort(dim=1)
        number = max(1, int(places * (1.0 - self.prob)))
        there = present.sum(1, keepdim=True)
        share = (there * torch.full_like(there, 1.0 - self.prob, dtype=torch.float64)).long()
        share = share.clamp(min=1)
        rank = torch.arange(number, device=x.device)
        kept = order.gather(1, torch.where(rank < share, rank, there - share + rank))
        patches = patches.gather(1, kept.unsqueeze(-1).expand(-1, -1, x.shape[2]))
        return torch.cat([prefix, patches], dim=1), kept


@register_notrace_function
def present_patches_of(layout: TokenLayout) -> Tensor | None:
    """Return False for absent patches of the sequence, bool ``[B, n]``; None: all are present."""
    return layout.patch_mask()


@register_notrace_function
def zero_absent(tokens: Tensor, layout: TokenLayout) -> Tensor:
    """Return ``[B, P + n, D]`` with 0 for absent patches."""
    present = layout.key_mask()
    return tokens if present is None else tokens.masked_fill(~present.unsqueeze(2), 0)


def _present_of_pooled(tokens: Tensor, present: Tensor, num_prefix: int, with_prefix: bool):
    """Check the mask of patches, and return the mask of pooled tokens, ``[B, n]`` or
    ``[B, P + n]``.
    """
    wanted = (tokens.shape[0], tokens.shape[1] - num_prefix)
    if not isinstance(present, Tensor) or present.dtype != torch.bool or present.shape != wanted:
        raise ValueError(
            f"present: expected bool {list(wanted)}, True for the present patches of the "
            f"sequence, got {described(present)}"
        )
    return F.pad(present, (num_prefix, 0), value=True) if with_prefix else present


@register_notrace_function
def pool_present(
    tokens: Tensor, present: Tensor | None, pool_type: str, num_prefix: int, with_prefix: bool
) -> Tensor:
    """Pool tokens ``[B, P + n, D]`` as timm's ``global_pool_nlc`` does, over the patches in
    ``present [B, n]``; None: all. ``top5`` is the mean of the five largest values of each channel,
    or of all if there are fewer.
    """
    if pool_type.startswith("top"):
        x = tokens if with_prefix else tokens[:, num_prefix:]
        largest = min(int(pool_type.removeprefix("top")), x.shape[1])
        if present is None:
            return x.topk(largest, 1).values.mean(1)
        there = _present_of_pooled(tokens, present, num_prefix, with_prefix)
        best = x.masked_fill(~there.unsqueeze(2), float("-inf")).topk(largest, 1).values
        count = there.sum(1).clamp(max=largest)[:, None, None]
        beyond = torch.arange(largest, device=x.device)[:, None] >= count
        return best.masked_fill(beyond, 0).sum(1) / count[:, 0]
    if present is None:
        return global_pool_nlc(tokens, pool_type, num_prefix, with_prefix)
    absent = ~_present_of_pooled(tokens, present, num_prefix, with_prefix).unsqueeze(2)
    if pool_type in ("", "token"):
        return global_pool_nlc(tokens, pool_type, num_prefix, with_prefix)
    x = tokens if with_prefix else tokens[:, num_prefix:]
    pooled = []
    if pool_type in ("max", "avgmax"):
        pooled.append(x.masked_fill(absent, float("-inf")).amax(1))
    if pool_type in ("avg", "avgmax"):
        # Sum in float32: half precision would overflow.
        total = x.masked_fill(absent, 0).sum(1, dtype=accumulation_dtype(x))
        pooled.append((total / (~absent).sum(1)).to(x.dtype))
    return pooled[0] if len(pooled) == 1 else 0.5 * (pooled[0] + pooled[1])


@register_notrace_function
def scores_of_absent(
    tokens: Tensor, present: Tensor | None, num_prefix: int, with_prefix: bool
) -> Tensor | None:
    """Return the mask that attention pooling adds to scores, ``[B, 1, 1, n or P + n]``: -inf for
    absent patches; None if ``present`` is None.
    """
    if present is None:
        return None
    present = _present_of_pooled(tokens, present, num_prefix, with_prefix)[:, None, None]
    return tokens.new_zeros(present.shape).masked_fill(~present, float("-inf"))


def takes_sizes(model: nn.Module) -> bool:
    """Return whether a model skips the unfilled part of a canvas."""
    # A compiled model's own forward accepts any arguments.
    plain = getattr(model, "_orig_mod", model)
    return "sizes" in inspect.signature(getattr(plain, "backbone", plain).forward).parameters


def input_size(model: nn.Module, size: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns of a model's input for an image of a height and width in pixels:
    patches for feature maps (``KeptMaps``), else pixels.
    """
    down, across = getattr(getattr(model, "backbone", model), "input_px", (1, 1))
    return size[0] // down, size[1] // across


def call(model: Callable[..., Tensor], inputs: Tensor, sizes: Tensor | None) -> Tensor:
    """Return the outputs per class for inputs ``[B, C, H, W]``. Images fill them up to ``sizes``,
    int64 ``[B, 2]`` in pixels; None: completely.
    """
    return model(inputs) if sizes is None else model(inputs, sizes=sizes.to(inputs.device))


def pooled(model: nn.Module, inputs: Tensor, sizes: Tensor | None) -> Tensor:
    """Return the features before the classifier, ``[B, D]``."""
    if sizes is None:
        return model.forward_head(model.forward_features(inputs), pre_logits=True)
    sizes = sizes.to(inputs.device)
    tokens = model.forward_features(inputs, sizes=sizes)
    present = model.present_patches(inputs, sizes)
    return model.forward_head(tokens, pre_logits=True, present=present)


def last_map(model: nn.Module, inputs: Tensor, sizes: Tensor | None) -> Tensor:
    """Return the last feature map, after the final norm if there is one, ``[B, D, H, W]``."""
    given = {} if sizes is None else {"sizes": sizes}
    # A pyramid's ``forward_intermediates`` returns its own maps.
    forward = getattr(model, "block_intermediates", model.forward_intermediates)
    return forward(inputs, indices=1, norm=True, intermediates_only=True, **given)[-1]


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode in the context, and restore the mode of each part."""
    training = [part for part in model.modules() if part.training]
    try:
        model.eval()
        yield
    finally:
        for part in training:
            part.training = True
