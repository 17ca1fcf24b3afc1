"""Images and maps larger than memory, read and written in bands of rows."""

from visionattn.data.large.sink import open_sink
from visionattn.data.large.source import ImageSource, open_source

__all__ = ["ImageSource", "open_sink", "open_source"]
