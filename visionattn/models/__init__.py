"""Models. Importing this package registers their names with timm."""

from visionattn.models import scaleformer_vit, shipped, taylorshift_vit
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.conversion import Converted, from_softmax
from visionattn.models.pixel_decoder import PixelDecoder

__all__ = [
    "Converted",
    "PixelDecoder",
    "VisionAttnTransformer",
    "from_softmax",
    "scaleformer_vit",
    "shipped",
    "taylorshift_vit",
]
