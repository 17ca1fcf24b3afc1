"""Images and maps that are larger than memory: read by bands of rows, and written by them."""

from visionattn.data.large.sink import open_sink
from visionattn.data.large.source import ImageSource, open_source

__all__ = ["ImageSource", "open_sink", "open_source"]
