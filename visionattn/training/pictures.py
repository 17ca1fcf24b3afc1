"""Images as data addresses: small files in text, for pages and for files that pages are made of."""

import base64
import io
import re

import numpy as np
from PIL import Image

SMALL_PX = 64
"""Images of at most so many pixels a side are kept as they are, as PNG; others become JPEG."""
QUALITIES = (85, 70, 50, 30)
"""The qualities of JPEG that are tried until an image is small enough; then it is shrunk."""
ADDRESS = re.compile(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/]+={0,2}")
"""What an address of a picture looks like."""


def address(image: np.ndarray, most_px: tuple[int, int], most_bytes: int) -> str:
    """Return an image as a data address.

    Args:
        image: ``[H, W, C]``, uint8 or float32 in [0, 1]; of many bands the first three are shown,
            of two the first.
        most_px: the largest height and width in pixels of a JPEG; a larger image is shrunk.
        most_bytes: the most bytes of the file.
    """
    if image.dtype != np.uint8:
        image = np.rint(image.clip(0, 1) * 255).astype(np.uint8)
    picture = Image.fromarray(image[..., 0] if image.shape[2] < 3 else image[..., :3].copy())
    if max(picture.size) <= SMALL_PX:
        return _address("png", _encoded(picture, format="PNG", optimize=True))
    height, width = most_px
    while True:
        picture.thumbnail((width, height), reducing_gap=3)
        for quality in QUALITIES:
            content = _encoded(picture, format="JPEG", quality=quality)
            if len(content) <= most_bytes or max(picture.size) <= SMALL_PX:
                return _address("jpeg", content)
        height, width = height * 3 // 4, width * 3 // 4


def _encoded(picture: Image.Image, **options) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, **options)
    return stream.getvalue()


def _address(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
