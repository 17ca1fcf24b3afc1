"""The commands in pages and in headers of configurations, found by rule, and their parsing."""

import argparse
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import timm
from torch.distributed.run import get_args_parser

from tests.helpers.tools import load_tool
from visionattn.cli.shipped_configs import find_config
from visionattn.command import SUBCOMMANDS, main
from visionattn.training.config import check, parse_train

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES += [ROOT / "checkpoints" / "README.md"]
HEADERS = sorted(ROOT.glob("configs/*.yaml"))
SHELL = ("", "sh", "bash", "shell", "console")
"""Languages of blocks with commands."""
COMMAND = re.compile(r"(?:\w+=\S+ )*(?:visionattn|python3?|torchrun|make|pip|tensorboard|for) \S")
LOOP = re.compile(r"for (\w+) in ([^;]+); do (.*); done")
NAMES_OF_MODELS = ("model", "model.name", "teacher", "init_from")
"""Flags whose values may be names of timm."""


class Documented(NamedTuple):
    """A command in a page."""

    page: str
    """Path of the page in the repository."""
    text: str
    """One line, as a shell takes it."""
    in_block: bool
    """Whether it stands in a block of commands, to be pasted, and not within a sentence."""

    def words(self) -> list[str]:
        """Return the words after the shell's quotes, comments and the first turn of a loop."""
        text = self.text
        if loop := LOOP.fullmatch(text):
            name, values, body = loop.groups()
            text = body.replace(f"${name}", values.split()[0])
        words = shlex.split(text, comments=True)
        while re.match(r"\w+=", words[0]):
            words.pop(0)
        return ["SUBSTITUTED" if word.startswith("$(") else word for word in words]


def commands_of_page(page: Path, text: str) -> list[Documented]:
    """Return the commands in the blocks and in the sentences of a Markdown page, in order."""
    name, found = str(page.relative_to(ROOT)), []
    # Every second part is a block, which begins with its language.
    for number, part in enumerate(re.split(r"^ *```", text, flags=re.M)):
        if number % 2 == 0:
            for code in re.findall(r"`([^`]+)`", part):
                line = " ".join(code.split())
                if COMMAND.match(line) and not line.startswith(("for ", "visionattn COMMAND")):
                    # A flag at the end is named without its value.
                    found.append(Documented(name, re.sub(r" --[\w.-]+$", "", line), False))
        elif part.partition("\n")[0].strip() in SHELL:
            for line in re.sub(r"\\\n\s*", "", part.partition("\n")[2]).splitlines():
                line = line.strip().removeprefix("$ ")
                if COMMAND.match(line):
                    found.append(Documented(name, line, True))
    return found


def commands_of_header(config: Path) -> list[Documented]:
    """Return the commands in the comments at the top of a configuration."""
    lines = config.read_text().split("\n")
    header = "\n".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    header = re.sub(r"\\\n\s*", "", header)
    found = re.findall(r"\bvisionattn [a-z]+ .*|\bmake [a-z-]+", header)
    return [Documented(str(config.relative_to(ROOT)), line, True) for line in found]


class Parsed(BaseException):
    """Raised in place of the work of a program once its options are parsed."""


def parse_command(words: list[str]) -> None:
    """Parse a command with the parser of its program, and do not run it.

    Raises:
        Exception: an unknown program, target, flag, name of a configuration or model, or a value
            of a wrong type.
    """
    program, *rest = words
    if program == "make":
        parse_make(rest)
    elif program == "pip":
        parse_pip(rest)
    elif program == "tensorboard":
        assert rest[0] == "--logdir" and len(rest) == 2, rest
    elif program == "torchrun":
        started = get_args_parser().parse_args(rest)
        parse_command(["python", started.training_script, *started.training_script_args])
    elif program == "visionattn" or rest[:2] == ["-m", "visionattn"]:
        parse_subcommand(*rest[2 * (program != "visionattn") :])
    elif rest[0] == "-m":
        parse_only(rest[1:], lambda: runpy.run_module(rest[1], run_name="__main__"))
    elif rest[0].startswith("tools/"):
        parse_subcommand(load_tool(Path(rest[0]).stem).args[0], *rest[1:])
    elif rest[0].startswith("docs/figures/") and len(rest) > 1:
        parse_only(rest, lambda: runpy.run_path(str(ROOT / rest[0]), run_name="__main__"))
    elif rest[0].startswith("docs/examples/"):
        usage = (ROOT / rest[0]).read_text().split("\n    python ")[1].split("\n")[0]
        assert len(usage.split()) == len(rest), usage
    else:  # a script without options, or one that the page prints
        assert Path(rest[0]).suffix == ".py" and len(rest) == 1, rest


def parse_make(words: list[str]) -> None:
    """Raise for a target or a variable that the Makefile lacks."""
    text = (ROOT / "Makefile").read_text()
    targets = {word for line in re.findall(r"^([\w -]+):", text, re.M) for word in line.split()}
    for word in words:
        name, equals, _ = word.partition("=")
        assert f"$({name})" in text if equals else name in targets, f"make {word}"


def parse_pip(words: list[str]) -> None:
    """Raise for an extra that pyproject.toml lacks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert words[0] == "install", words
    for word in words[1:]:
        extras = re.fullmatch(r"(?:visionattn|\.)\[([\w,]+)\]", word)
        for extra in extras[1].split(",") if extras else []:
            assert extra in project["optional-dependencies"], f"no extra {extra}"


def parse_only(argv: list[str], start: Callable[[], object]) -> None:
    """Start a program with a parser of ``argparse``, and stop it when its options are parsed."""
    usual = argparse.ArgumentParser.parse_args

    def parse(self, *given):
        usual(self, *given)
        raise Parsed

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse),
        mock.patch.object(sys, "argv", argv),
        pytest.raises(Parsed),
    ):
        start()


def parse_subcommand(name: str | None = None, *words: str) -> None:
    """Parse the flags of a subcommand of ``visionattn``."""
    assert name is None or name in SUBCOMMANDS, f"no command {name}"
    if not words:  # named in a sentence
        return
    if name == "benchmark" and words[0] == "gpu":
        parse_only(["visionattn"], lambda: main([name, *words]))
        return
    given = list(words)
    if name == "validate":  # the run beside its checkpoint, which is not there, names the data
        given.append("--data.name=digits")
    try:
        code = main([name, *given, "--print_config"])
    except SystemExit as end:
        code = end.code
    assert code == 0, "see the line on standard error"
    if name == "train":
        with mock.patch("visionattn.training.config.find_spec"):  # packages of --log
            check(parse_train(words))
    for flag, value in zip(words, words[1:], strict=False):
        flag = flag.lstrip("-").replace("-", "_")
        if flag == "base":
            find_config(value)
        if flag in NAMES_OF_MODELS and re.fullmatch(r"[a-z]\w*(\.[a-z]\w+)?", value):
            is_file = value.endswith((".safetensors", ".pth", ".bin"))
            assert is_file or timm.is_model(value.partition(".")[0]), f"no model {value}"
