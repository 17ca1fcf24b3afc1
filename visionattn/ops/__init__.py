"""Attention as pure functions of ``[B, h, N, d]`` tensors, without images, models or timm."""

from importlib.util import find_spec

import visionattn.ops.plain_forms  # noqa: F401  registers decompositions for exporters
from visionattn.ops.attention_additions import centred_keys, value_convolution
from visionattn.ops.attention_sums import Sums
from visionattn.ops.feature_maps import RandomFeatures
from visionattn.ops.kernelized.kernelized_attention import kernelized_attention
from visionattn.ops.operator import count_operations
from visionattn.ops.position.relative_position import (
    Axial,
    Flat,
    Joint,
    RelativePosition,
    count_classes,
)
from visionattn.ops.softmax import softmax_attention
from visionattn.ops.states import KernelState, TaylorState, attend, step, summarize
from visionattn.ops.taylorshift.taylorshift_attention import taylorshift_attention
from visionattn.ops.window import window_attention

OPERATIONS = {
    "taylorshift": taylorshift_attention,
    "kernelized": kernelized_attention,
    "softmax": softmax_attention,
    "window": window_attention,
}
"""The function of each attention, by its name in ``attentions.py``."""

__all__ = [
    "OPERATIONS",
    "Axial",
    "Flat",
    "Joint",
    "KernelState",
    "RandomFeatures",
    "RelativePosition",
    "Sums",
    "TaylorState",
    "attend",
    "centred_keys",
    "count_classes",
    "kernelized_attention",
    "softmax_attention",
    "step",
    "summarize",
    "taylorshift_attention",
    "value_convolution",
    "window_attention",
]

if find_spec("triton") is not None:
    count_operations()
