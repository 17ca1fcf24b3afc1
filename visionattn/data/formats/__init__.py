"""Image files in any format: the choice of a reader and the conversion of values to pixels."""

from visionattn.data.formats.channel_values import (
    bands_of,
    channels_of,
    extremes,
    read_blocks,
    read_image,
    resize,
    settle,
    settle_one,
)
from visionattn.data.formats.known_formats import (
    Openable,
    Source,
    check_file,
    extensions,
    is_folder_format,
    open_image,
    read_size,
)
from visionattn.data.formats.pillow import large_images_allowed
from visionattn.data.formats.read_options import (
    COLOURED,
    LARGEST_IMAGE_PX,
    ReadOptions,
    as_flags,
    check_reading,
    options_of,
)
from visionattn.data.formats.reader import (
    DAMAGED_IMAGE,
    Georeference,
    MissingPackage,
    NotAsAsked,
    Reader,
)

__all__ = [
    "COLOURED",
    "DAMAGED_IMAGE",
    "Georeference",
    "LARGEST_IMAGE_PX",
    "MissingPackage",
    "NotAsAsked",
    "Openable",
    "ReadOptions",
    "Reader",
    "Source",
    "as_flags",
    "bands_of",
    "channels_of",
    "check_file",
    "check_reading",
    "extensions",
    "extremes",
    "is_folder_format",
    "large_images_allowed",
    "open_image",
    "options_of",
    "read_blocks",
    "read_image",
    "read_size",
    "resize",
    "settle",
    "settle_one",
]
