"""Read files that anybody may have written into checked types.

A reader states the shape of what it reads as a type: a dataclass, a ``TypedDict`` (of
``typing_extensions``, as pydantic asks for), or a list of either. Content of another shape is one
``ValueError`` with the file, the key, the expected type and the given value. No reader deletes or
replaces a file that it cannot read. pydantic checks the types; it is imported at the first check.
"""

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from visionattn.cli.tables import from_text

SHOWN = 60
"""The most characters that an error shows of a value."""
EXPECTED = {
    "int": "a whole number",
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
"""What an error of pydantic asks for, by its type or the first word of its type."""


def checked(kind: Any, value: Any, name: str) -> Any:
    """Return a value as a type says: dataclasses are made of mappings, tuples of lists, numbers of
    texts that say one.

    Args:
        kind: a type annotation. Of a ``TypedDict`` other keys stay as they are; a dataclass refuses
            them. Of another class, such as a tensor, the value must be an instance.
        value: plain values, as JSON, YAML or ``torch.load`` with ``weights_only`` give them.
        name: what the error calls the value; names within it follow behind points.

    Raises:
        ValueError: the value is not of this type; one line.
    """
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python([value])[0]
    except ValidationError as error:
        raise ValueError(_one_line(error.errors(), value, name)) from error


@cache
def _adapter(kind: Any) -> Any:
    """Return what checks a list of one value; a list passes the settings on to its type."""
    from pydantic import ConfigDict, TypeAdapter

    settings = ConfigDict(
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        extra="forbid" if is_dataclass(kind) else "allow",
    )
    return TypeAdapter(list[kind], config=settings)


def _one_line(errors: list[Any], value: Any, name: str) -> str:
    """Put the errors about a value into one line about the part that lies deepest in it: the
    members of a union have an error each.
    """
    found = [(*_part(error["loc"][1:], value, name), error) for error in errors]
    depth, part, error = max(found, key=lambda each: each[0])
    kind, given = error["type"], brief(error["input"])
    if kind == "value_error":  # of a dataclass that checks itself
        return str(error["ctx"]["error"])
    if kind == "missing":
        return f"{part} has no {error['loc'][-1]}"
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        *within, key = error["loc"][1:]
        return f"{_part(within, value, name)[1]} has an unknown key {brief(key)}"
    if kind in ("too_long", "too_short"):
        return f"{part} has {error['ctx']['actual_length']} values: {error['msg']}"
    wanted = dict.fromkeys(_expected(each) for at, each_part, each in found if each_part == part)
    return f"{part} must be {' or '.join(wanted)}, got {given}"


def _part(location: Sequence[Any], value: Any, name: str) -> tuple[int, str]:
    """Return how deep a place lies in a value, and its name. Pydantic's places also name members of
    unions, which are no keys of the value.
    """
    depth = 0
    for key in location:
        if isinstance(value, dict) and key in value:
            value, name, depth = value[key], under(name, key), depth + 1
        elif isinstance(value, (list, tuple)) and isinstance(key, int) and key < len(value):
            value, name, depth = value[key], f"{name}[{key}]", depth + 1
    return depth, name


def _expected(error: Any) -> str:
    """Put into words what an error of pydantic asks for."""
    kind = error["type"]
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        words = ", ".join(choices) or error["ctx"]["expected"]
        return words if len(choices) == 1 else f"one of {words}"
    if kind == "is_instance_of":
        return f"a {error['ctx']['class'].lower()}"
    return EXPECTED.get(kind) or EXPECTED.get(kind.partition("_")[0]) or error["msg"]


def under(name: str, key: Any) -> str:
    """Return what an error calls the value of a key; without a name, the key."""
    return ".".join(filter(None, [name, brief(key)]))


def brief(value: Any, most: int = SHOWN) -> str:
    """Return a value for an error, in one line of at most ``most`` characters."""
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
    """Return the text of a file in UTF-8.

    Raises:
        ValueError: it is no text; one line.
        OSError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8") from error


def from_json(kind: Any, text: str, name: str) -> Any:
    """Return the content of a text in JSON, as a type says.

    Raises:
        ValueError: it is no JSON, has NaN, or is not of this type; one line.
    """
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON: {error}") from error
    return checked(kind, value, name)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number")


def read_json(kind: Any, path: Path, way_out: str) -> Any:
    """Return the content of a JSON file, as a type says.

    Args:
        kind: as ``checked`` takes it.
        path: the file.
        way_out: the end of the error.

    Raises:
        ValueError: it is not such a file; one line.
        OSError: it cannot be read.
    """
    try:
        return from_json(kind, read_text(path), path.name)
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); {way_out}") from error


def read_csv(path: str | Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the names of the columns of a CSV file and its rows. Missing cells are empty, and
    cells beyond the columns are left out; texts are as they were before ``tables.as_text``.

    Raises:
        ValueError: it is no CSV file; one line.
        OSError: it cannot be read.
    """
    try:
        reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
        rows = [
            {key: from_text(value or "") for key, value in row.items() if key is not None}
            for row in reader
        ]
    except csv.Error as error:
        raise ValueError(f"{path} is no CSV file: {error}") from error
    return list(reader.fieldnames or ()), rows


def read_yaml(path: str | Path) -> Any:
    """Return the content of a YAML file, as plain values.

    Raises:
        ValueError: it is no YAML file; one line.
        OSError: it cannot be read.
    """
    try:
        return from_yaml(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path} is no YAML file: {error}") from error


def from_yaml(text: str) -> Any:
    """Return the content of a text in YAML, as plain values; ``1e-3`` is a number.

    Raises:
        ValueError: it is no YAML, or has a key twice; one line.
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
        """Take numbers as YAML 1.2 writes them, and no key twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [str(key.value) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise ValueError(f"the key {brief(key)} comes twice")
            return super().construct_mapping(node, deep)

    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader
