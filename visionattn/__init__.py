"""Vision transformers whose cost grows linearly with the number of patches.

Importing the package registers the models with timm: ``import timm, visionattn;
timm.create_model("scaleformer_vit_s")``. Functions that read images or train are imported on first
use. The command ``visionattn`` registers the models after it has checked the names of its options.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from visionattn.cli.interruption import is_command

if TYPE_CHECKING:
    from visionattn.data.large.tiled_files import forward_tiled, forward_tiles
    from visionattn.inference.image_generation import Generated, generate
    from visionattn.inference.python_functions import (
        Predictions,
        extract_features,
        look,
        predict,
        segment,
    )
    from visionattn.models.weights import DataSpec, load_model
    from visionattn.training.train_call import train

if not is_command():
    import visionattn.models  # noqa: F401  registers them with timm

__version__ = "0.3.0"
__all__ = [
    "DataSpec",
    "Generated",
    "Predictions",
    "extract_features",
    "forward_tiled",
    "forward_tiles",
    "generate",
    "load_model",
    "look",
    "predict",
    "segment",
    "train",
]

_MODULES = {
    "DataSpec": "visionattn.models.weights",
    "Generated": "visionattn.inference.image_generation",
    "Predictions": "visionattn.inference.python_functions",
    "extract_features": "visionattn.inference.python_functions",
    "forward_tiled": "visionattn.data.large.tiled_files",
    "forward_tiles": "visionattn.data.large.tiled_files",
    "generate": "visionattn.inference.image_generation",
    "load_model": "visionattn.models.weights",
    "look": "visionattn.inference.python_functions",
    "predict": "visionattn.inference.python_functions",
    "segment": "visionattn.inference.python_functions",
    "train": "visionattn.training.train_call",
}


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'visionattn' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__():
    return sorted({*globals(), *__all__})
