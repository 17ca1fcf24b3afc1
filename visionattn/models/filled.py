"""Any model, of ours or of timm, on images that may not fill their input.

Models of ours leave out what an image does not fill; to others it is a black part of the image.
"""

import inspect
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.segmentation import Segmenter


def takes_sizes(model: nn.Module) -> bool:
    """Tell whether a model leaves out what an image does not fill."""
    # A compiled model's own forward takes anything.
    plain = getattr(model, "_orig_mod", model)
    forward = (plain.backbone if isinstance(plain, Segmenter) else plain).forward
    return "sizes" in inspect.signature(forward).parameters


def call(model: Callable[..., Tensor], inputs: Tensor, sizes: Tensor | None) -> Tensor:
    """Return the outputs per class for inputs ``[B, C, H, W]`` that images fill up to ``sizes``,
    int64 ``[B, 2]`` in pixels; None: they fill all.
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
    """Return the last feature map, after the final norm where there is one, ``[B, D, H, W]``."""
    given = {} if sizes is None else {"sizes": sizes}
    # Of blocks: by this name a pyramid gives maps of its own.
    ours = isinstance(model, VisionAttnTransformer)
    forward = partial(VisionAttnTransformer.forward_intermediates, model)
    return (forward if ours else model.forward_intermediates)(
        inputs, indices=1, norm=True, output_fmt="NCHW", intermediates_only=True, **given
    )[-1]
