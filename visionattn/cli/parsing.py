"""Turn flags and YAML files into a dataclass, with one-line errors, and print its help.

Flags have the names of fields, ``--group.field`` within a nested dataclass. ``--init-from`` equals
``--init_from``, a switch needs no value, and a list is ``--sizes 96 128``. ``untrusted.checked``
checks the types.
"""

import argparse
import ast
import inspect
import os
import re
import shutil
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from difflib import SequenceMatcher
from functools import partial, reduce
from itertools import pairwise
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from visionattn.cli.commands import program, typed
from visionattn.cli.shipped_configs import find_config
from visionattn.cli.untrusted import brief, checked, from_yaml, read_yaml, refuse

Config = TypeVar("Config")
LARGEST_WHOLE = 2**63 - 1
"""The largest integer that torch and numpy accept."""
MOST = {"threads": 1024, "jobs": 1024}
"""Upper limits of options by name: starting more threads crashes a process."""
OWN_OPTIONS = ("help", "config", "print_config")
"""Options that are not fields of a configuration."""
HELP_WIDTH = 100
"""Columns of the help, at most."""
ALIKE = 0.6
"""Similarity, from 0 to 1, from which a known name is proposed in place of a wrong one."""


def parse(
    config_class: type[Config],
    argv: Sequence[str],
    *,
    command: str = "",
    description: str = "",
    example: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Read a configuration from flags, the files of ``--config``, and defaults, in this order of
    precedence.

    ``--help`` and ``--print_config`` print and raise ``SystemExit(0)``.

    Args:
        config_class: the dataclass.
        argv: the flags, without the program's name.
        command: the subcommand, for the help.
        description: the purpose of the command, for the help.
        example: flags of a working call, for the end of the help.
        defaults: dotted names and values that replace defaults of the dataclass.

    Raises:
        ValueError: unknown name (the line proposes the nearest known one) or wrong type; one line.
        FileNotFoundError: ``--config`` names neither a file nor a configuration of the package.
    """
    names = field_types(config_class)
    given = flags_of(argv, names)
    if "help" in given:
        _print_help(config_class, command, description, example)
    # Fields of a partly given group keep the defaults that this class sets.
    usual = config_class()
    values = {name: reduce(getattr, name.split("."), usual) for name in names if "." in name}
    values |= defaults or {}
    for path in config_files(argv):
        values |= _values_of_file(find_config(path), names)
    values |= {name: value for name, value in given.items() if name not in OWN_OPTIONS}
    config = checked(config_class, _nested(values, names), "")
    for name in names:
        value = reduce(getattr, name.split("."), config)
        most = MOST.get(name.rpartition(".")[2], LARGEST_WHOLE)
        refuse(
            (
                isinstance(value, int) and abs(value) > most,
                f"{name} must be at most {most:,}, got {brief(value)}",
            ),
            (
                value == "" or (isinstance(value, list) and "" in value),
                f"{name} is empty; pass a value, or remove it",
            ),
        )
    if "print_config" in given:
        print(yaml_text(asdict(config)), end="")
        raise SystemExit(0)
    return config


def yaml_text(values: dict[str, Any]) -> str:
    """Write a configuration as YAML that ``parse`` reads."""
    import yaml

    return yaml.safe_dump(values, sort_keys=False)


def field_types(config_class: type, prefix: str = "") -> dict[str, Any]:
    """Return the type of each field of a dataclass by its dotted name, nested fields included."""
    found = {}
    hints = get_type_hints(config_class)
    for field in fields(config_class):
        if is_dataclass(hints[field.name]):
            found |= field_types(hints[field.name], f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = hints[field.name]
    return found


def _nested(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Turn dotted names and values into nested mappings. A key below a field, such as
    ``args.depth``, changes a copy of the field's mapping; null removes the key.
    """
    found: dict[str, Any] = {}
    for name in sorted(values, key=len):
        *groups, leaf = name.split(".")
        place = found
        for depth, group in enumerate(groups, start=1):
            inner = place.get(group) or {}
            place[group] = dict(inner) if ".".join(groups[:depth]) in names else inner
            place = place[group]
        if values[name] is None and leaf in place:
            del place[leaf]
        else:
            place[leaf] = values[name]
    return found


def flags_of(argv: Sequence[str], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of flags by dotted name; of a repeated flag, the last value.

    Args:
        argv: the flags.
        names: the type of each field, from ``field_types``.

    Raises:
        ValueError: unknown name, or a missing or unreadable value; one line.
    """
    found = {}
    for flag, words in split_options(argv):
        name = flag.replace("-", "_")
        # A flag below a field of mappings, such as --args.depth, sets one key of that field.
        owner = next((known for known in names if name.startswith(known + ".")), None)
        within = owner is not None and accepts(names[owner], dict)
        if not within and name not in (*names, *OWN_OPTIONS):
            raise ValueError(f"unknown option --{brief(flag)}; {way_out(name, names, '--')}")
        kind = Any if within else names.get(name, str)
        if not words:
            if not accepts(kind, bool) and name not in ("help", "print_config"):
                raise ValueError(f"--{flag} needs a value: {kind_words(kind)}")
            words = ["true"]
        try:
            found[name] = _value_of(words, kind)
        except ValueError as error:
            raise ValueError(f"--{flag} cannot be read: {error}") from error
        if isinstance(found[name], list) and not accepts(kind, list) and kind is not Any:
            raise ValueError(f"--{flag} expects one value, got {brief(' '.join(words))}")
    return found


def _value_of(words: list[str], kind: Any) -> Any:
    """Return the value of the words after a flag: a text, or a list of several words. Mappings,
    lists in brackets and values of any type are read as YAML.
    """
    if kind is Any:
        values = [from_yaml(word) if word else word for word in words]
        return values[0] if len(values) == 1 else values
    if len(words) != 1:
        return words
    word = words[0]
    if word in ("null", "None") and accepts(kind, type(None)):
        return None
    bracketed = word.startswith("[") and word.endswith("]") and not os.path.exists(word)
    if accepts(kind, dict) or (bracketed and accepts(kind, list)):
        return from_yaml(word)
    of_lists = {list, type(None)} >= {get_origin(each) or each for each in members(kind)}
    return [word] if of_lists else word


def with_first(argv: Sequence[str], flag: str) -> list[str]:
    """Return the words of a command; insert ``--flag`` if the first word is a value.

    Raises:
        ValueError: the flag is given, too.
    """
    if not argv or argv[0].startswith("-"):
        return list(argv)
    words = [f"--{flag}", *argv]
    if [name for name, _ in split_options(words)].count(flag) > 1:
        raise ValueError(f"the first word and --{flag} set the same option; remove one")
    return words


def split_options(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each flag, without hyphens, with its values: the words up to the next flag, or the
    text after an equals sign.
    """
    options: list[tuple[str, list[str]]] = []
    closed = True
    for word in argv:
        flag, equals, value = word.lstrip("-").partition("=")
        if re.match(r"--[A-Za-z]|-h$", word):
            options.append(("help" if word == "-h" else flag, [value] if equals else []))
            closed = bool(equals)
        elif closed or re.match(r"-[A-Za-z]", word):
            raise ValueError(f"expected an option that begins with --, got {brief(word)}")
        else:
            options[-1][1].append(word)
    return options


def members(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def accepts(kind: Any, wanted: Any) -> bool:
    """Tell whether a type is ``wanted``, or a union with it, e.g. ``bool`` or ``list``."""
    return any(wanted in (member, get_origin(member)) for member in members(kind))


def kind_words(kind: Any) -> str:
    """Return a type as the help shows it: ``INT|auto``, ``TEXT ...``."""
    if kind is Any:
        return "VALUE"
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is list:
        return f"{kind_words(get_args(kind)[0])} ..."
    if len(members(kind)) > 1:
        return "|".join(kind_words(each) for each in members(kind) if each is not type(None))
    words = {int: "INT", float: "NUMBER", str: "TEXT", bool: "true|false"}
    return words.get(kind, "{NAME: VALUE}")


def way_out(name: str, names: Iterable[str], dashes: str = "") -> str:
    """Propose the known dotted name most similar to a wrong one, or point to ``--help``.

    Names are compared as a whole, by their last part, and by its initials.
    """
    name = name[:200]
    if f"{name}.name" in names:
        return f"did you mean {dashes}{name}.name? Pass a file of options with --config"
    leaf = name.rpartition(".")[2]
    initials = "".join(part[:1] for part in leaf.split("_"))

    def likeness(known: str) -> float:
        known_leaf = known.rpartition(".")[2]
        by_initials = 0.9 if len(initials) > 1 and initials == known_leaf else 0.0
        whole = SequenceMatcher(None, name, known).ratio()
        by_leaf = 0.95 * SequenceMatcher(None, leaf, known_leaf).ratio()
        return max(whole, by_leaf, by_initials) + 0.01 * whole

    best = max(names, key=likeness)
    return f"did you mean {dashes}{best}?" if likeness(best) >= ALIKE else "--help lists all"


def config_files(argv: Sequence[str]) -> list[str]:
    """Return the values of ``--config``."""
    return [value for flag, values in split_options(argv) if flag == "config" for value in values]


def _values_of_file(path: str | os.PathLike[str], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a YAML file by dotted name.

    Raises:
        ValueError: the file is not a YAML mapping or has an unknown key.
    """
    groups = {name[:i] for name in names for i, letter in enumerate(name) if letter == "."}
    found = {}

    def walk(content: Any, name: str) -> None:
        if not isinstance(content, dict):
            what = f": {name}" if name else ""
            raise ValueError(f"{path}{what}: expected names and values, got {brief(content)}")
        for key, value in content.items():
            inner = f"{name}.{key}" if name else str(key)
            if inner in groups:
                walk(value, inner)
            elif inner in names:
                found[inner] = value
            else:
                raise ValueError(f"{path}: unknown key {brief(inner)}; {way_out(inner, names)}")

    walk(read_yaml(path) or {}, "")
    return found


def _print_help(config_class: type, command: str, description: str, example: str | None) -> None:
    """Print the options of a command with the docstrings of their fields; raise SystemExit.

    The options that ``MOST_USED`` of the dataclass names come first, in its order.
    """
    first = getattr(config_class, "MOST_USED", ())
    width = min(HELP_WIDTH, shutil.get_terminal_size((HELP_WIDTH, 1)).columns)
    parser = argparse.ArgumentParser(
        prog=program(command),
        usage=f"{program(command)} [--OPTION VALUE ...]",
        description=textwrap.fill(description, width),
        epilog=example and f"example:\n  {typed(*command.split())} {example}",
        formatter_class=partial(
            argparse.RawDescriptionHelpFormatter, width=width, max_help_position=30
        ),
        add_help=False,
    )
    top = parser.add_argument_group("most used options" if first else "options")
    top.add_argument("--config", metavar="FILE", help="YAML file with any of the options below")
    options = list(_described_options(config_class(), "", "other options" if first else "options"))
    options.sort(key=lambda option: first.index(option[1]) if option[1] in first else len(first))
    groups = {"options": top}
    for title, name, settings in options:
        if name not in first and title not in groups:
            groups[title] = parser.add_argument_group(textwrap.fill(title, width - 1))
        (top if name in first else groups[title]).add_argument(f"--{name}", **settings)
    last = groups.get("other options", top)
    last.add_argument("--print_config", action="store_true", help="print the options and exit")
    last.add_argument("-h", "--help", action="help", help="print this help and exit")
    parser.print_help()
    raise SystemExit(0)


def _described_options(config: Any, prefix: str, group: str) -> Iterator[tuple[str, str, dict]]:
    """Yield the group, the dotted name and the arguments of ``add_argument`` of each field; each
    nested dataclass is a group.
    """
    texts, hints = field_docstrings(type(config)), get_type_hints(type(config))
    for field in fields(config):
        value = getattr(config, field.name)
        text = " ".join(texts.get(field.name, "").split())
        if is_dataclass(value):
            yield from _described_options(value, f"{prefix}{field.name}.", text.rstrip("."))
            continue
        settings = {"metavar": kind_words(hints[field.name])}
        if value is False:
            settings = {"action": "store_true"}
        elif value is None:
            text = text.replace("; None: ", "; default: ").replace("None: ", "Default: ")
        elif value not in ([], {}):
            words = " ".join(map(str, value)) if isinstance(value, list) else brief(value)
            text = f"{text} (default: {words})"
        settings["help"] = text.replace("``", "`").replace("%", "%%")
        yield group, prefix + field.name, settings


def field_docstrings(config_class: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, inherited ones included."""
    found = {}
    for kind in reversed(config_class.__mro__[:-1]):
        body = ast.parse(inspect.cleandoc(inspect.getsource(kind))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = inspect.cleandoc(ast.literal_eval(text.value))
    return found
