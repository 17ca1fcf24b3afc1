"""What can be wrong with a text of JSON and with the bytes of a file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

GARBLED_JSON = ("", "{", "[1]", "null", "7", '"x"', "{'a': 1}", '{"a": NaN}', "[" * 5000, "\\ud800")
GARBLED_JSON += ("9" * 5000, '{"a": ' + "9" * 6000 + "}", '{"a": 1e999}', "\0", "{}" * 3)
"""Texts that are no mapping in JSON, or one that no file has."""
BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "one byte": lambda content: content[:1],
    "half": lambda content: content[: len(content) // 2],
    "less one byte": lambda content: content[:-1],
    "zeros": lambda content: bytes(len(content)),
    "0xff": lambda content: b"\xff" * len(content),
    "text": lambda content: b"this is no such file\n" * 20,
    "first bytes off": lambda content: bytes(255 - byte for byte in content[:16]) + content[16:],
    "middle off": lambda content: flipped(content),
    "pickle": lambda content: b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94\x8c\x01:\x85R.",
    "html": lambda content: b"<!DOCTYPE html><html>404</html>",
}
"""What can become of the bytes of a file, by name."""


def flipped(content: bytes) -> bytes:
    """Return bytes of which a tenth in the middle is inverted."""
    start, end = len(content) * 9 // 20, len(content) * 11 // 20 + 1
    return content[:start] + bytes(255 - byte for byte in content[start:end]) + content[end:]


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Return what changes the bytes of a file in a folder."""

    def apply(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return apply


def write(name: str, content: bytes | str) -> Callable[[Path], None]:
    """Return what writes a file in a folder."""

    def apply(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return apply


def shown(text: str) -> str:
    """Return a text for the name of a case."""
    return text if len(text) < 40 else f"{text[:12]}...({len(text)})"


def replace_by_folder(name: str) -> Callable[[Path], None]:
    """Return what puts a folder in place of a file."""

    def apply(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir(parents=True)

    return apply


def both(*changes: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Return what makes several changes."""

    def apply(folder: Path) -> None:
        for change in changes:
            change(folder)

    return apply
