"""What can be wrong with a value, a tree of values and the bytes of a file."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HUGE = 10**30
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]


OTHER = {"null": None, "text": "x", "list": [], "nested": {"a": {"b": [1]}}, "deep": DEEP}
ABSURD = {"huge": HUGE, "negative": -7, "nan": float("nan"), "inf": float("inf")}


def wrong_for(value: Any) -> dict[str, Any]:
    """Return values of other types than a value's, and absurd ones for a number, by name."""
    own = {type(None): "null", str: "text", list: "list"}.get(type(value))
    further = ABSURD if type(value) in (int, float) else {"number": 7}
    return {kind: each for kind, each in (OTHER | further).items() if kind != own}


def places(tree: Any, path: tuple = ()) -> Iterator[tuple]:
    """Return the path of each value of a tree, the root's included; of lists the first element."""
    yield path
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from places(value, (*path, key))
    elif isinstance(tree, list) and tree:
        yield from places(tree[0], (*path, 0))


def at(tree: Any, path: tuple) -> Any:
    """Return the value at a path."""
    for key in path:
        tree = tree[key]
    return tree


def put(tree: Any, path: tuple, value: Any) -> Any:
    """Return a copy of a tree with another value at a path."""
    if not path:
        return value
    changed = copy.deepcopy(tree)
    at(changed, path[:-1])[path[-1]] = value
    return changed


def without(tree: Any, path: tuple) -> Any:
    """Return a copy of a tree without the value at a path."""
    changed = copy.deepcopy(tree)
    del at(changed, path[:-1])[path[-1]]
    return changed


def broken_trees(tree: Any) -> Iterator[tuple[str, Any]]:
    """Return trees in which one value is of another type, absurd, or missing, by name."""
    for path in places(tree):
        name = ".".join(map(str, path)) or "all"
        for kind, value in wrong_for(at(tree, path)).items():
            yield f"{name}={kind}", put(tree, path, value)
        if path and isinstance(at(tree, path[:-1]), dict):
            yield f"{name} missing", without(tree, path)


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


def few(found: Iterator[tuple[str, Any]], most: int = 2) -> Iterator[tuple[str, Any]]:
    """Return of the ways in which each value can be wrong some, other ones from value to value; all
    that are missing.
    """
    turn, counts = 0, {}
    for name, tree in found:
        place, _, kind = name.partition("=")
        if not kind:
            yield name, tree
            continue
        number = counts[place] = counts.get(place, -1) + 1
        if number == 0:
            turn += 1
        if (number + turn) % 4 < most / 2:
            yield name, tree


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
