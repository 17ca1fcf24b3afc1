"""Define a user's description of a model: its name and arguments, its task, and its preprocessing.

The module imports no library, so that a wrong option is reported before torch is imported.
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
    """Keyword arguments of the model, e.g. ``{num_heads: 6, patch_size: 8}``; they replace all
    arguments of a configuration, while ``--model.args.num_heads 6`` changes one. For ``data.task``
    segmentation also arguments of the head: ``head_blocks``, blocks whose features it uses
    (default: the last), and ``head_stride``, side in pixels of a cell with one logit (default: a
    patch).
    """
    grad_checkpointing: bool = False
    """Gradient checkpointing: recompute blocks in the backward pass; less memory, more time."""
