"""Content of files that anybody may have written, read into checked types, within bounds.

A reader states the shape of what it reads as a type: a dataclass, a ``TypedDict``, a list of
either. What is not of that shape is one ValueError with the file, the key, what was wanted and what
came. No reader deletes or replaces a file that it cannot read. The module knows no file of a tool.
"""

import csv
import io
import json
import math
import os
import stat
import types
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import (
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from visionattn.cli.tables import from_text

LONGEST_NUMBER = 100
YAML_BYTES, JSON_BYTES, CSV_BYTES = 200_000, 2**26, 2**26
"""The largest files that are read: configurations have some kB, tables and records some MB."""
DEEPEST = 32
"""The most levels of lists and mappings within each other."""
MOST_VALUES = 20_000
"""The most values of a YAML file, each alias counted as what it stands for."""
LARGEST_WHOLE = 2**63
"""Whole numbers are smaller, either way: torch and numpy take no others."""
SHOWN = 60
"""The most characters that an error shows of a value."""


def checked(kind: Any, value: Any, name: str, *, nan: bool = False) -> Any:
    """Return a value as a type says: dataclasses are made of mappings, tuples of lists.

    Args:
        kind: a type annotation of plain types, ``Literal``, lists, tuples, mappings, dataclasses
            and ``TypedDict``; of another class, such as a tensor, the value must be an instance.
        value: plain values, as JSON, YAML or ``torch.load`` with ``weights_only`` give them.
        name: what the error calls the value; names of what is within follow behind points.
        nan: whether numbers may be NaN.

    Raises:
        ValueError: the value is not of this type, too large or too deep; one line.
    """
    origin, members = _parts_of(kind)
    # Rows come by the million: what is most frequent comes first.
    several = origin in (Union, types.UnionType)
    own = type(value)
    if own in (str, bool, type(None)) and (kind is own or (several and own in members)):
        return value
    if kind is Any:
        return _plain(value, name)
    if several:
        return _one_of(members, value, kind, name, nan)
    if origin is Literal:
        fits = any(type(value) is type(member) and value == member for member in members)
    elif origin in (list, tuple) and isinstance(value, (list, tuple)):
        return _sequence(origin, members, value, name, nan)
    elif origin is dict and isinstance(value, dict):
        of_key, of_value = members or (Any, Any)
        return {
            checked(of_key, key, f"a key of {name}"): checked(
                of_value, each, under(name, key), nan=nan
            )
            for key, each in value.items()
        }
    elif (is_dataclass(kind) or is_typeddict(kind)) and isinstance(value, dict):
        return _record(kind, value, name, nan)
    else:
        fits = _is_scalar(kind, value, nan)
    if not fits:
        raise ValueError(f"{name} must be {describe(kind)}, got {brief(value)}")
    return float(value) if kind is float else value


@cache
def _parts_of(kind: Any) -> tuple[Any, tuple]:
    """Return what a type is of, and of what."""
    return get_origin(kind) or kind, get_args(kind)


def _is_scalar(kind: Any, value: Any, nan: bool) -> bool:
    """Tell whether a value is of a plain type; true and false are no numbers."""
    if kind in (int, float):
        known = isinstance(value, (int, float) if kind is float else int)
        if not known or isinstance(value, bool):
            return False
        if isinstance(value, int):
            return abs(value) < LARGEST_WHOLE
        return nan or not math.isnan(value)
    return isinstance(kind, type) and not is_typeddict(kind) and isinstance(value, kind)


def _one_of(members: tuple, value: Any, kind: Any, name: str, nan: bool) -> Any:
    """Return a value as the first of several types that it is of. Where a single one of them is
    made of others, its error tells where it fails.
    """
    for member in members:
        try:
            return checked(member, value, name, nan=nan)
        except ValueError as error:
            within = isinstance(value, (dict, list)) and str(error).split(" ")[0] != name
            if within and len([each for each in members if each is not type(None)]) == 1:
                raise
    raise ValueError(f"{name} must be {describe(kind)}, got {brief(value)}")


def _sequence(origin: Any, members: tuple, value: Any, name: str, nan: bool) -> Any:
    kinds = members or (Any, ...)
    if origin is list or kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    elif len(kinds) != len(value):
        raise ValueError(f"{name} must have {len(kinds)} values, got {len(value)}")
    return origin(
        checked(kind, each, f"{name}[{i}]", nan=nan)
        for i, (kind, each) in enumerate(zip(kinds, value, strict=True))
    )


def _record(kind: Any, value: dict, name: str, nan: bool) -> Any:
    """Make a dataclass of a mapping; of a ``TypedDict`` check the keys that it names, and leave
    others as they are.
    """
    hints, required = _fields_of(kind)
    if not is_typeddict(kind) and (unknown := [key for key in value if key not in hints]):
        raise ValueError(f"{name} has an unknown key {brief(unknown[0])}")
    if missing := [key for key in hints if key in required and key not in value]:
        raise ValueError(f"{name} has no {missing[0]}")
    found = {
        key: checked(hints[key], each, under(name, key), nan=nan) if key in hints else each
        for key, each in value.items()
    }
    return found if is_typeddict(kind) else kind(**found)


@cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of the fields of a dataclass or a ``TypedDict``, and which must be there."""
    if is_typeddict(kind):
        return get_type_hints(kind), kind.__required_keys__
    return get_type_hints(kind), frozenset(
        field.name
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    )


def check_partly(config_class: type, value: Any, name: str) -> None:
    """Check that a mapping is of options of a dataclass, of this version or of another: those that
    it has not are left out, and those that are not known here are left alone.

    Raises:
        ValueError: an option has a value of another type; one line.
    """
    checked(dict[str, Any], value, name)
    hints = get_type_hints(config_class)
    for key, each in value.items():
        if is_dataclass(hints.get(key)):
            check_partly(hints[key], each, under(name, key))
        elif key in hints:
            checked(hints[key], each, under(name, key))


def under(name: str, key: Any) -> str:
    """Return what an error calls the value of a key."""
    return f"{name}.{key if isinstance(key, str) and len(key) <= SHOWN else brief(key)}"


def _plain(value: Any, name: str) -> Any:
    """Return plain values as they are, mappings with texts as keys."""
    level = [value]
    for _ in range(DEEPEST):
        for each in level:
            if isinstance(each, dict) and (keys := [k for k in each if not isinstance(k, str)]):
                raise ValueError(f"keys of {name} must be text, got {brief(keys[0])}")
            if isinstance(each, (list, tuple, dict)) or each is None:
                continue
            if not isinstance(each, (bool, int, float, str)):
                raise ValueError(f"{name} must be a plain value, got {brief(each)}")
            if isinstance(each, int) and abs(each) >= LARGEST_WHOLE:
                raise ValueError(f"{name} has a number beyond 2**63: {brief(each)}")
        level = [inner for each in level for inner in _inner(each)]
        if not level:
            return value
    raise ValueError(f"{name} has more than {DEEPEST} levels of lists and mappings")


def _inner(value: Any) -> Iterator[Any]:
    """Yield what lies directly within a value."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value


def describe(kind: Any) -> str:
    """Put a type into words for people: ``a number``, ``one of none, bf16, fp16``, ``a list of
    whole numbers or null``.
    """
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    if kind in words:
        return words[kind]
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(describe(member) for member in get_args(kind))
    if get_origin(kind) in (list, tuple):
        words = {int: "whole numbers", float: "numbers"}
        words[int | list[int]] = "whole numbers or of pairs of them"
        return "a list of " + words.get(get_args(kind)[0], "values")
    if (get_origin(kind) or kind) is dict or is_dataclass(kind) or is_typeddict(kind):
        return "names and values"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(kind))
    return f"a {kind.__name__.lower()}"


def brief(value: Any, most: int = SHOWN) -> str:
    """Return a value for an error, in one line of at most ``most`` characters, whatever it is."""
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return str(value)
    if isinstance(value, int):
        size = value.bit_length()
        return str(value) if size < 100 else f"a number of {math.ceil(size * 0.30103)} digits"
    if isinstance(value, str):
        text = " ".join(value[: 2 * most].split())
        return text if len(value) <= most and text else repr(text[: most - 5]) + "..." * bool(text)
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, dict):
        return f"names and values ({len(value)})" if value else "no names and values"
    return f"a {type(value).__name__.lower()}"


def read_text(path: str | Path, most_bytes: int) -> str:
    """Return the text of a regular file in UTF-8 of at most ``most_bytes``.

    Raises:
        ValueError: it is another kind of file, larger, or no text; one line.
        OSError: it cannot be read.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is a pipe, a socket or a device and no file")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{path} is larger than the {most_bytes:,} bytes that are read of it")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8") from error


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe that nobody writes to does not block."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def from_json(kind: Any, text: str, name: str) -> Any:
    """Return what a text in JSON says, as a type says.

    Raises:
        ValueError: it is no JSON, has a key twice or NaN, or is not of this type; one line.
    """
    try:
        value = json.loads(text, parse_constant=_no_number, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError(f"{name} has too many levels of lists and mappings") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is no JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{name}: {brief(str(error), 120)}") from error
    return checked(kind, value, name)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping in which no key comes twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {brief(twice)} comes twice")
    return found


def read_json(kind: Any, path: Path, way_out: str) -> Any:
    """Return what a JSON file says, as a type says.

    Args:
        kind: as ``checked`` takes it.
        path: the file.
        way_out: what the error says at its end.

    Raises:
        ValueError: it is not such a file; one line.
        OSError: it cannot be read.
    """
    try:
        return from_json(kind, read_text(path, JSON_BYTES), path.name)
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); {way_out}") from error


def read_csv(path: str | Path, *, ours: bool = False) -> tuple[list[str], list[dict[str, str]]]:
    """Return the names of the columns of a CSV file and its rows; what a row lacks is empty, what
    it has too much is left out, and texts are as they were before ``tables.as_text``.

    Args:
        path: the file.
        ours: a tool wrote it, so that no row has more cells than there are columns.

    Raises:
        ValueError: it is no CSV file; one line.
        OSError: it cannot be read.
    """
    text = read_text(path, CSV_BYTES)
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        found = list(reader)
    except csv.Error as error:
        raise ValueError(f"{path} is no CSV file: {error}") from error
    if ours and any(None in row for row in found):
        raise ValueError("a row has more cells than there are columns")
    rows = [
        {key: from_text(value or "") for key, value in row.items() if key is not None}
        for row in found
    ]
    return list(reader.fieldnames or ()), rows


def read_yaml(path: str | Path) -> Any:
    """Return what a YAML file says, as plain values.

    Raises:
        ValueError: it is no YAML file, has a key twice, or is too large once its aliases are
            written out; one line.
        OSError: it cannot be read.
    """
    try:
        return from_yaml(read_text(path, YAML_BYTES))
    except ValueError as error:
        text = str(error).removeprefix(f"{path} is ")
        raise ValueError(f"{path} is no YAML file: {text}") from error


def from_yaml(text: str) -> Any:
    """Return what a text in YAML says, as plain values.

    Raises:
        ValueError: as ``read_yaml``.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            count_values(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError as error:
        raise ValueError("it has too many levels of lists and mappings") from error
    except (LookupError, AttributeError) as error:  # of a reader of numbers, words or dates
        raise ValueError("a value is not of the kind that its tag names") from error
    except (yaml.YAMLError, ValueError, OverflowError, TypeError) as error:
        raise ValueError(" ".join(str(error).split())[:160]) from error


def count_values(root: Any) -> int:
    """Return how many values a YAML node stands for, aliases written out.

    Raises:
        ValueError: they are too many or too deep, one lies in itself, or a key comes twice.
    """
    import yaml

    known: dict[int, tuple[int, int] | None] = {}

    def count(node: Any) -> tuple[int, int]:
        """Return how many values a node stands for, and how many levels they have."""
        if id(node) in known:
            found = known[id(node)]
            if found is None:
                raise ValueError("an alias stands for a value that it lies in")
            return found
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > LONGEST_NUMBER:
            raise ValueError(f"a whole number has more than {LONGEST_NUMBER} digits")
        known[id(node)] = None
        within = []
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if len(set(keys)) < len(keys):
                twice = next(key for i, key in enumerate(keys) if key in keys[:i])
                raise ValueError(f"the key {brief(twice)} comes twice")
            within = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            within = node.value
        counts = [count(each) for each in within]
        total = 1 + sum(values for values, _ in counts)
        levels = 1 + max((below for _, below in counts), default=0)
        if total > MOST_VALUES:
            raise ValueError(f"it stands for more than {MOST_VALUES:,} values")
        if levels > DEEPEST:
            raise ValueError(f"it has more than {DEEPEST} levels of lists and mappings")
        known[id(node)] = (total, levels)
        return total, levels

    return count(root)[0]
