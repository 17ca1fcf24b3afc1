"""Models: importing registers their names with timm."""

from visionattn.models import scaleformer_vit, shipped, taylorshift_vit
from visionattn.models.backbone import VisionAttnTransformer

__all__ = ["VisionAttnTransformer", "scaleformer_vit", "shipped", "taylorshift_vit"]
