"""The words of a user about a model: its name and arguments, its task, and how images fit it.

The module imports no library, so that a wrong option is answered before torch is imported.
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
    """Keyword arguments of the model, e.g. ``{num_heads: 6, patch_size: 8}``, which replace all of
    a configuration's; ``--model.args.num_heads 6`` changes one. With ``data.task``
    segmentation also of its head: ``head_blocks``, the blocks whose features it uses (default: the
    last), and ``head_stride``, the side in pixels of the cells that get a logit (default: a patch).
    """
    grad_checkpointing: bool = False
    """Save only the inputs of blocks for the backward pass and recompute the rest: less memory,
    more time.
    """
