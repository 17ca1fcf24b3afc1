"""Colors and fonts of pictures."""

from functools import cache
from pathlib import Path

from PIL import ImageFont

PAPER, INK, MUTED, EDGE, HATCH = "#ffffff", "#1a1a1a", "#6b6b6b", "#d4d4d4", "#c4c4c4"


def printable(text: str) -> str:
    """Return a text with unprintable characters replaced."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def font_file(name: str) -> Path:
    """Return the file of a font that matplotlib ships, by its name without ``.ttf``."""
    import matplotlib  # takes a tenth of a second

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"


@cache
def font_of(size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Return the font that matplotlib ships, which has more alphabets than Pillow's."""
    return ImageFont.truetype(str(font_file("DejaVuSans-Bold" if bold else "DejaVuSans")), size)
