"""``--help`` of every command ends with an example, and the options of the example are right."""

import contextlib
import shlex
import sys
from pathlib import Path

import pytest

from tests.helpers.tools import load_tool
from visionattn.cli.parsing import field_types
from visionattn.command import SUBCOMMANDS, main
from visionattn.inference.feature_options import ExtractOptions
from visionattn.inference.inference_options import PredictOptions
from visionattn.training.config import TrainConfig, ValidateConfig

ROOT = Path(__file__).parents[2]
TOOLS = sorted((ROOT / "tools").glob("*.py"))


def example_of(name, folder, capsys):
    """The last line of a command's help, as it is printed in the folder where it is pasted."""
    with contextlib.chdir(folder), pytest.raises(SystemExit) as end:
        main([name, "--help"])
    printed = capsys.readouterr().out
    assert end.value.code == 0 and printed.startswith(f"usage: visionattn {name} ")
    return printed.splitlines()[-1].strip()


@pytest.mark.parametrize("name", [name for name in SUBCOMMANDS if name != "benchmark"])
def test_help_ends_with_a_command_whose_options_are_right(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = example_of(name, tmp_path, capsys)
    words = shlex.split(line)
    (tmp_path / "checkpoints" / "digits").mkdir(parents=True)
    (tmp_path / "checkpoints" / "digits" / "best.safetensors").touch()
    given = [*words[words.index(name) + 1 :], "--print_config"]
    with pytest.raises(SystemExit) as end:
        main([name, *given, *(["--data.name=digits"] if name == "validate" else [])])
    assert end.value.code == 0 and ": " in capsys.readouterr().out


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.stem)
def test_the_help_of_a_tool_has_its_file_for_a_name_and_is_else_that_of_its_command(
    tool, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", [str(tool), "--help"])
    main_of_tool = load_tool(tool.stem)
    with pytest.raises(SystemExit) as end:
        main_of_tool()
    of_tool = capsys.readouterr().out
    assert end.value.code == 0 and of_tool.startswith(f"usage: {tool.name} ")
    monkeypatch.setattr(sys, "argv", ["visionattn"])
    with pytest.raises(SystemExit):
        main([*main_of_tool.args, "--help"])
    of_command = capsys.readouterr().out
    behind = [text.partition("options")[2] for text in (of_tool, of_command)]
    options = [text.partition("example:")[0] for text in behind]
    assert options[0] == options[1] != ""
    assert max(map(len, of_command.splitlines()[:-1])) <= 100


def test_the_help_of_train_begins_with_the_ten_most_used_options(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    parts = capsys.readouterr().out.split("\n\n")
    assert parts[2].startswith("most used options:\n  --config FILE")
    assert parts[2].count("\n  --") == 10 and "\n  --epochs INT" in parts[2]
    assert "\n  --epochs" not in "".join(parts[3:]) and "None: " not in parts[4]


def test_every_command_has_a_tool():
    named = [text for tool in TOOLS for text in tool.read_text().splitlines() if "partial(" in text]
    assert sorted(text.split('"')[1] for text in named) == sorted(SUBCOMMANDS)


@pytest.mark.parametrize("kind", [TrainConfig, ValidateConfig, PredictOptions, ExtractOptions])
def test_the_most_used_options_are_options(kind):
    assert set(kind.MOST_USED) <= set(field_types(kind))
