"""Images and maps larger than memory, read and written in bands of rows."""

from visionattn.data.large.image_parts import ImageSource, open_source
from visionattn.data.large.map_writing import open_sink

__all__ = ["ImageSource", "open_sink", "open_source"]
