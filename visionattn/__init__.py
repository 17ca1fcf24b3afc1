"""Vision transformers whose cost grows with the number of patches and not with its square.

Importing registers the models with timm: ``timm.create_model("scaleformer_vit_s")``.
"""

from visionattn.models.weights import DataSpec, load_model

__version__ = "0.1.0"
__all__ = ["DataSpec", "load_model"]
