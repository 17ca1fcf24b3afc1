"""How a YAML file and flags become a dataclass, with errors of one line.

This module owns spelling: ``--init-from`` and ``--init_from``, ``--resume`` without a value,
``--sizes 96 128``, and the nearest right name for a wrong one. jsonargparse does the parsing; it is
imported when something is parsed.
"""

import argparse
import json
import os
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher
from functools import reduce
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from visionattn.cli.commands import program, typed
from visionattn.cli.configs import find_config
from visionattn.cli.ends import bounded
from visionattn.cli.untrusted import LARGEST_WHOLE, brief, checked, describe, from_yaml, read_yaml

Config = TypeVar("Config")

HIDDEN = {0xDC00 + byte: 0x10DC00 + byte for byte in range(128, 256)}
"""Bytes of file names that are no UTF-8, as Python has them, and letters of no script that stand
for them in YAML, which takes no such bytes.
"""
MOST = {"threads": 1024, "jobs": 1024}
"""The most that options of these names may be, in whatever tool: a machine has no more processors,
and starting more threads or processes ends it.
"""
OWN_OPTIONS = ("help", "config", "print_config")
"""Options besides the fields of a configuration."""


class Parser(argparse.ArgumentParser):
    """A parser of a module that is run by itself: a wrong argument is one line and exit code 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {bounded(message)}\n")


def whole_from(least: int, most: int = LARGEST_WHOLE) -> Callable[[str], int]:
    """Return what reads a whole number that is not below ``least`` nor above ``most``, for
    argparse.
    """

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > 20 or not least <= int(text) <= most:
            limit = f" to {most:,}" if most < LARGEST_WHOLE else ""
            raise argparse.ArgumentTypeError(
                f"wanted a whole number from {least}{limit}, got {brief(text)!r}"
            )
        return int(text)

    return read


def parse(
    config_class: type[Config],
    argv: Sequence[str],
    *,
    command: str = "",
    description: str = "",
    example: str | None = None,
    defaults: dict[str, Any] | None = None,
) -> Config:
    """Read a configuration from flags, the file that ``--config`` names, and defaults, in this
    order of precedence.

    ``--help`` and ``--print_config`` print and leave with ``SystemExit(0)``.

    Args:
        config_class: the dataclass; its fields become flags, those of nested dataclasses
            ``--group.field``.
        argv: the flags, without the program's name.
        command: the subcommand whose flags they are, for its help.
        description: what the command does, for its help.
        example: flags with which the command works as pasted, for the end of the help; None: none.
        defaults: dotted names and values that replace the defaults of the dataclass.

    Raises:
        ValueError: a name that does not exist (with the nearest that does), or a value of a wrong
            type; one line.
        FileNotFoundError: ``--config`` names neither a file nor a configuration of the package.
    """
    import jsonargparse

    class HelpFormatter(jsonargparse.DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
        """Leave the example in a line of its own, so that it can be pasted."""

    # Names are checked before jsonargparse sees them: its errors for unknown ones run over many
    # lines.
    names = field_types(config_class)
    argv = [_with_file(word) for word in spell_out(argv, names)]
    for path in config_files(argv):
        check_file(path, names)
    # Docstrings under fields become the help of their flags.
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog=program(command),
        description=description,
        epilog=example and f"try:\n  {typed(*command.split())} {example}",
        formatter_class=HelpFormatter,
        exit_on_error=False,
    )
    parser.add_argument(
        "--config", action="config", help="YAML file with any of the options below."
    )
    parser.add_class_arguments(config_class, as_group=False)
    parser.set_defaults(defaults or {})
    try:
        parsed = parser.parse_args(argv)
    except jsonargparse.ArgumentError as error:
        raise ValueError(_shown(one_line(str(error), names))) from error
    values = _shown(parsed.as_dict())
    values.pop("config")
    for name, kind in names.items():  # jsonargparse takes null for any type, and NaN for a number
        value = checked(kind, reduce(dict.__getitem__, name.split("."), values), name)
        most = MOST.get(name.rpartition(".")[2])
        if most is not None and value is not None and value > most:
            raise ValueError(f"{name} must be at most {most:,}, got {value:,}")
        if value == "" or (isinstance(value, list) and "" in value):  # it names nothing
            raise ValueError(f"{name} is empty; give a value, or leave it out")
    return build(config_class, values)


def _with_file(word: str) -> str:
    """Return a spelled-out flag; ``--config`` gets the path of the file that it names."""
    flag, _, value = word.partition("=")
    return f"--config={find_config(value)}" if flag == "--config" else word.translate(HIDDEN)


def yaml_text(values: dict[str, Any]) -> str:
    """Write a configuration as YAML that ``parse`` reads, whatever bytes names of files have."""
    import yaml

    text = yaml.safe_dump(values, sort_keys=False)
    return re.sub(r"\\uDC([89A-F][0-9A-F])", r"\\U0010DC\1", text)


def _shown(value: Any) -> Any:
    """Put the bytes that are no UTF-8 back into a parsed value."""
    if isinstance(value, str):
        return value.translate({letter: byte for byte, letter in HIDDEN.items()})
    if isinstance(value, list):
        return [_shown(each) for each in value]
    if isinstance(value, dict):
        return {key: _shown(each) for key, each in value.items()}
    return value


def field_types(config_class: type, prefix: str = "") -> dict[str, Any]:
    """Return the dotted name and the type of each field of a dataclass, nested ones included."""
    found = {}
    hints = get_type_hints(config_class)
    for field in fields(config_class):
        if is_dataclass(hints[field.name]):
            found |= field_types(hints[field.name], f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = hints[field.name]
    return found


def build(config_class: type[Config], values: dict[str, Any]) -> Config:
    """Make the dataclass, and those within it, of nested dicts."""
    hints = get_type_hints(config_class)
    return config_class(
        **{
            key: build(hints[key], value) if is_dataclass(hints[key]) else value
            for key, value in values.items()
        }
    )


def spell_out(argv: Sequence[str], names: dict[str, Any]) -> list[str]:
    """Rewrite what people type into what the parser takes, and refuse names that do not exist.

    ``--init-from x`` becomes ``--init_from=x``, ``--resume`` becomes ``--resume=true``,
    ``--sizes 96 128`` becomes ``--sizes=[96, 128]``, and texts of a list are quoted, whatever
    commas, colons and brackets they have.
    """
    written = []
    for flag, values in split_options(argv):
        name = flag.replace("-", "_")
        # A flag below a field of dicts, such as --args.depth, belongs to that field.
        owner = next(
            (
                known
                for known, kind in names.items()
                if name.startswith(known + ".") and accepts(kind, dict)
            ),
            name,
        )
        if owner not in (*names, *OWN_OPTIONS):
            raise ValueError(f"unknown option --{brief(flag)}; {way_out(name, names, '--')}")
        kind = names.get(owner, str)
        # What people leave out: the value of a switch, quotes of texts, brackets of a list.
        if accepts(kind, bool) and not values:
            values = ["true"]
        quoted = not is_list(values) or os.path.exists(values[0])
        if values and accepts(kind, list[str]):
            values = [json.dumps(values, ensure_ascii=False)] if quoted else values
        elif (
            accepts(kind, list)
            and values not in ([], ["null"])
            and not is_list(values)
            and not (len(values) == 1 and accepts(kind, int))
        ):
            values = [f"[{', '.join(values)}]"]
        if not values and name not in ("help", "print_config"):
            raise ValueError(f"--{flag} needs a value: {describe(kind)}")
        if len(values) > 1:
            raise ValueError(f"--{flag} takes one value, got {brief(' '.join(values))}")
        # Texts are not parsed, alone or as a list that is quoted here.
        if values and not accepts(kind, str) and not (accepts(kind, list[str]) and quoted):
            check_value(values[0].translate(HIDDEN), flag)
        written.append(f"--{name}={values[0]}" if values else f"--{name}")
    return written


def check_value(text: str, flag: str) -> None:
    """Check that a value that is to be parsed as YAML is within the bounds of a file of it.

    Raises:
        ValueError: it is not; one line.
    """
    if set("[{&*") & set(text):
        try:
            from_yaml(text)
        except ValueError as error:
            raise ValueError(f"--{flag} cannot be read: {error}") from error


def with_first(argv: Sequence[str], flag: str) -> list[str]:
    """Return the words of a command with the flag that may be left out before the first of them.

    Raises:
        ValueError: the flag is given too.
    """
    if not argv or argv[0].startswith("-"):
        return list(argv)
    words = [f"--{flag}", *argv]
    if [name for name, _ in split_options(words)].count(flag) > 1:
        raise ValueError(f"what stands first is --{flag}, which is given too; leave one out")
    return words


def split_options(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Split flags from their values: the words up to the next flag, or what follows an equals sign.
    The hyphens are taken off.
    """
    options: list[tuple[str, list[str]]] = []
    closed = True
    for word in argv:
        if re.match(r"--?[A-Za-z]", word):
            flag, equals, value = word.lstrip("-").partition("=")
            if not word.startswith("--") and flag != "h":
                raise ValueError(f"{brief(word)} belongs to no option; options begin with --")
            options.append(("help" if flag == "h" else flag, [value] if equals else []))
            closed = bool(equals)
        elif closed:
            raise ValueError(f"{brief(word)} belongs to no option; options begin with --")
        else:
            options[-1][1].append(word)
    return options


def is_list(values: list[str]) -> bool:
    """Tell whether the words behind a flag are a list written as YAML already, ``[96, 128]``."""
    return len(values) == 1 and values[0].startswith("[") and values[0].endswith("]")


def accepts(kind: Any, wanted: Any) -> bool:
    """Tell whether a type annotation is, or in a union contains, ``wanted``, e.g. ``bool``,
    ``list`` or ``list[str]``.
    """
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return any(wanted in (member, get_origin(member)) for member in members)


ALIKE = 0.6
"""How much a known name looks like a wrong one, of 1, to be taken for what was meant."""


def way_out(name: str, names: Sequence[str], dashes: str = "") -> str:
    """Return the known dotted name that looks most like a wrong one: as a whole, by its last part,
    or by its initials; or where all are listed, if none does.
    """
    name = name[:200]
    leaf = name.rpartition(".")[2]
    initials = "".join(part[:1] for part in leaf.split("_"))

    def likeness(known: str) -> float:
        known_leaf = known.rpartition(".")[2]
        by_initials = 0.9 if len(initials) > 1 and initials == known_leaf else 0.0
        whole = SequenceMatcher(None, name, known).ratio()
        return (
            max(whole, 0.95 * SequenceMatcher(None, leaf, known_leaf).ratio(), by_initials)
            + 0.01 * whole
        )

    best = max(names, key=likeness)
    if likeness(best) < ALIKE:
        return "--help lists all"
    return f"the nearest is {dashes}{best}"


def config_files(argv: Sequence[str]) -> list[str]:
    """Return the values of ``--config``."""
    return [value for flag, values in split_options(argv) if flag == "config" for value in values]


def check_file(path: str, names: dict[str, Any]) -> None:
    """Check that a YAML file parses and uses only names that exist.

    Raises:
        ValueError: it is no YAML mapping, is not within the bounds of ``read_yaml``, or uses a name
            that does not exist.
    """
    content = read_yaml(path)
    if content is not None and not isinstance(content, dict):
        raise ValueError(f"{path} must hold names and values, got a {type(content).__name__}")
    groups = {name[:i] for name in names for i, letter in enumerate(name) if letter == "."}

    def walk(mapping: dict, prefix: str) -> None:
        for key, value in mapping.items():
            name = f"{prefix}{key}"
            if name in groups:
                if not isinstance(value, dict):
                    raise ValueError(
                        f"{path}: {name} must hold names and values, got {brief(value)}"
                    )
                walk(value, name + ".")
            elif name not in names:
                raise ValueError(f"{path}: unknown key {brief(name)}; {way_out(name, names)}")

    walk(content or {}, "")


def one_line(message: str, names: dict[str, Any]) -> str:
    """Put what the parser says in several lines into one: the key, the type it wants, the value it
    got.
    """
    key = re.search(r'key "([\w.]+)"', message)
    given = re.search(r"(?:Given value|Got value): (.*)", message)
    if key and key[1] in names:
        return f"{key[1]} must be {describe(names[key[1]])}" + (
            f", got {brief(given[1])}" if given else ""
        )
    return " ".join(message.split())
