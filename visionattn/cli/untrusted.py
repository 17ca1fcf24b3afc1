"""Read untrusted files into checked types.

A reader states the expected content as a type: a dataclass, a ``TypedDict`` (from
``typing_extensions``, as pydantic requires), or a list of either. Other content is one
``ValueError`` with the file, the key, the expected type and the given value. No reader deletes or
replaces a file that it cannot read. pydantic checks the types; it is imported at the first check.
"""

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from visionattn.cli.tables import from_text

SHOWN = 60
"""Maximum number of characters of a value in an error."""
EXPECTED = {
    "int": "an integer",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "names and values",
    "dataclass": "names and values",
    "none_required": "null",
}
"""Expected values in words, by the type of pydantic's error or the first word of that type."""


def refuse(*rules: tuple[object, str]) -> None:
    """Raise ValueError with the text of the first rule whose condition holds."""
    for holds, text in rules:
        if holds:
            raise ValueError(text)


def checked(kind: Any, value: Any, name: str) -> Any:
    """Convert a value to a type: mappings to dataclasses, lists to tuples, texts to numbers.

    Args:
        kind: a type annotation. A ``TypedDict`` keeps unknown keys; a dataclass refuses them. For
            another class, such as a tensor, the value must be an instance.
        value: plain values from JSON, YAML or ``torch.load`` with ``weights_only``.
        name: name of the value in the error; a dot separates it from names within.

    Raises:
        ValueError: the value is not of this type; one line.
    """
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python([value])[0]
    except ValidationError as error:
        raise ValueError(_one_line(error.errors(), value, name, kind)) from error


@cache
def _adapter(kind: Any) -> Any:
    """Return the validator of a list of one value; a list passes the settings on to its type."""
    from pydantic import ConfigDict, TypeAdapter

    settings = ConfigDict(
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        extra="forbid" if is_dataclass(kind) else "allow",
    )
    return TypeAdapter(list[kind], config=settings)


def _one_line(errors: list[Any], value: Any, name: str, kind: Any) -> str:
    """Return the errors about a value as one line about its most deeply nested wrong part. Each
    member of a union has its own error.
    """
    found = [(*_part(error["loc"][1:], value, name), error) for error in errors]
    depth, part, error = max(found, key=lambda each: each[0])
    fault, given = error["type"], brief(error["input"])
    if fault == "value_error":  # of a dataclass that checks itself
        return str(error["ctx"]["error"])
    if fault == "missing":
        return f"{part} has no {error['loc'][-1]}"
    if fault in ("unexpected_keyword_argument", "extra_forbidden"):
        *within, key = error["loc"][1:]
        known = [each.name for each in fields(kind)] if is_dataclass(kind) and not within else []
        near = "".join(f"; did you mean {each}?" for each in get_close_matches(key, known, n=1))
        return f"{_part(within, value, name)[1]} has an unknown key {brief(key)}{near}"
    if fault in ("too_long", "too_short"):
        return f"{part} has {error['ctx']['actual_length']} values: {error['msg']}"
    wanted = dict.fromkeys(_expected(each) for at, each_part, each in found if each_part == part)
    return f"{part} must be {' or '.join(wanted)}, got {given}"


def _part(location: Sequence[Any], value: Any, name: str) -> tuple[int, str]:
    """Return the depth and the name of a location in a value. Pydantic's locations also name
    members of unions, which are not keys of the value.
    """
    depth = 0
    for key in location:
        if isinstance(value, dict) and key in value:
            value, depth = value[key], depth + 1
            name = f"{name}.{brief(key)}" if name else brief(key)
        elif isinstance(value, (list, tuple)) and isinstance(key, int) and key < len(value):
            value, name, depth = value[key], f"{name}[{key}]", depth + 1
    return depth, name


def _expected(error: Any) -> str:
    """Return the expected value of a pydantic error in words."""
    kind = error["type"]
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        words = ", ".join(choices) or error["ctx"]["expected"]
        return words if len(choices) == 1 else f"one of {words}"
    if kind == "is_instance_of":
        return f"a {error['ctx']['class'].lower()}"
    return EXPECTED.get(kind) or EXPECTED.get(kind.partition("_")[0]) or error["msg"]


def brief(value: Any, most: int = SHOWN) -> str:
    """Return a value as one line of at most ``most`` characters, for an error."""
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, dict):
        return f"names and values ({len(value)})" if value else "no names and values"
    if not isinstance(value, (int, float, str)):
        return f"a {type(value).__name__.lower()}"
    text = " ".join(str(value).split())
    return text if 0 < len(text) <= most else repr(text[: most - 5]) + "..." * bool(text)


def read_text(path: str | Path) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        ValueError: the file is not UTF-8; one line.
        OSError: the file cannot be read.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text") from error


def from_json(kind: Any, text: str, name: str) -> Any:
    """Parse JSON text into a checked type.

    Raises:
        ValueError: the text is not JSON, has NaN, or is not of this type; one line.
    """
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    return checked(kind, value, name)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is not a number")


def read_json(kind: Any, path: Path, way_out: str) -> Any:
    """Read a JSON file into a checked type.

    Args:
        kind: as for ``checked``.
        path: the file.
        way_out: advice at the end of the error.

    Raises:
        ValueError: the content is not JSON of this type; one line.
        OSError: the file cannot be read.
    """
    with intact(path, way_out):
        return from_json(kind, read_text(path), path.name)


@contextmanager
def intact(path: Path, way_out: str) -> Iterator[None]:
    """Name the file and the way out in errors about its content."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); {way_out}") from error


def read_csv(path: str | Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the column names and the rows of a CSV file, with texts unescaped by
    ``tables.from_text``. Missing cells are empty, and surplus cells are dropped.

    Raises:
        ValueError: the file is not CSV; one line.
        OSError: the file cannot be read.
    """
    try:
        reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
        rows = [
            {key: from_text(value or "") for key, value in row.items() if key is not None}
            for row in reader
        ]
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from error
    return list(reader.fieldnames or ()), rows


def read_yaml(path: str | Path) -> Any:
    """Return the content of a YAML file as plain values.

    Raises:
        ValueError: the file is not YAML; one line.
        OSError: the file cannot be read.
    """
    try:
        return from_yaml(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path} is not a YAML file: {error}") from error


def from_yaml(text: str) -> Any:
    """Return the content of YAML text as plain values; ``1e-3`` is a number.

    Raises:
        ValueError: the text is not YAML or has a duplicate key; one line.
    """
    import yaml

    try:
        return yaml.load(text, _yaml_loader())
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(" ".join(str(error).split())[:160]) from error
    except RecursionError as error:
        raise ValueError("it has too many levels of lists and mappings") from error


@cache
def _yaml_loader() -> type:
    import yaml

    class Loader(yaml.SafeLoader):
        """Read numbers as YAML 1.2 writes them, and refuse duplicate keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [str(key.value) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise ValueError(f"the key {brief(key)} occurs twice; remove one")
            return super().construct_mapping(node, deep)

    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader
