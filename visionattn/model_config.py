"""The user's description of a model: its name and arguments, its task, and its preprocessing.

The module imports no library, so that errors about options do not wait for torch.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

Task = Literal["classification", "segmentation", "generate", "multilabel", "regression"]
"""Meaning of the outputs: one class per image, one class per pixel, the next value of an image,
several independent classes per image, or numbers per image.
"""
VECTOR_TASKS = ("multilabel", "regression")
"""Tasks whose labels are K numbers per image, float32 ``[K]``."""
Fit = Literal["native", "pad", "stretch", "crop"]
"""How images of any size are fitted to a model; see ``visionattn.data.geometry``."""


@dataclass
class ModelConfig:
    """Which model to build: ``timm.create_model(name, num_classes=..., **args)``."""

    name: str = "scaleformer_vit_t"
    """A timm name: one of our models or any other timm model."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the model, e.g. ``{num_heads: 6, patch_size: 8}``. They replace all
    arguments of a configuration; ``--model.args.num_heads 6`` changes a single one.

    For ``data.task`` segmentation they include two arguments of the head: ``head_blocks``, the
    blocks whose features the head uses (default: the last), and ``head_stride``, the pixels per
    logit along a side (default: the patch size).
    """
    grad_checkpointing: bool = False
    """Gradient checkpointing: recompute blocks in the backward pass, for less memory and more
    time.
    """
