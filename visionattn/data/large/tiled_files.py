"""``forward_tiled`` and ``forward_tiles`` for paths, arrays and tensors."""

from contextlib import nullcontext
from functools import wraps
from typing import Any

from torch import Tensor, nn

from visionattn.data.large.image_parts import open_source
from visionattn.models.large import forward_bands, tiled_inference

SOURCE = ("height", "width", "channels", "read")
"""Attributes of a ``PartSource``."""


@wraps(forward_bands.forward_tiled)
def forward_tiled(model: nn.Module, source: Any, *args: Any, **options: Any) -> Any:
    """Open the image, compute, and close the image."""
    with _opened(source) as image:
        return forward_bands.forward_tiled(model, image, *args, **options)


@wraps(tiled_inference.forward_tiles)
def forward_tiles(model: nn.Module, image: Any, **options: Any) -> Tensor | None:
    """Compute over tiles; a tensor is the model's input."""
    with nullcontext(image) if isinstance(image, Tensor) else _opened(image) as opened:
        return tiled_inference.forward_tiles(model, opened, **options)


def _opened(image: Any) -> Any:
    """Return a context that yields the source of an image."""
    if all(hasattr(image, name) for name in SOURCE):
        return nullcontext(image)
    if isinstance(image, Tensor) and image.ndim == 4 and len(image) == 1:
        image = image[0]
    return open_source(image)
