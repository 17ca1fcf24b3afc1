"""A forward pass over an image that is larger than memory: exact, band by band of rows."""

from visionattn.models.tiled.ends import Sink, Source
from visionattn.models.tiled.forward import forward_tiled

__all__ = ["Sink", "Source", "forward_tiled"]
