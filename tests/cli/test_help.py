"""``--help`` of every command ends with an example, and the example works as it is pasted."""

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from visionattn.command import SUBCOMMANDS, main

ROOT = Path(__file__).parents[2]
TOOLS = sorted((ROOT / "tools").glob("*.py"))
LONGEST_SECONDS = 600
"""Some 20 on a processor core of its own; many times that beside other work."""


def paste(command, folder):
    """Run a line as a shell does, with one thread."""
    packages = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = dict(PYTHONPATH=packages, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    given = dict(cwd=folder, env=os.environ | env, timeout=LONGEST_SECONDS)
    return subprocess.run(command, shell=True, capture_output=True, text=True, **given)


def example_of(name, folder, capsys):
    """The last line of a command's help, as it is printed in the folder where it is pasted."""
    with contextlib.chdir(folder), pytest.raises(SystemExit) as end:
        main([name, "--help"])
    printed = capsys.readouterr().out
    assert end.value.code == 0 and printed.startswith(f"usage: visionattn {name} ")
    return printed.splitlines()[-1].strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the images that examples name, and with nothing else of the repository: the
    package alone has the configurations.
    """
    place = tmp_path_factory.mktemp("pasted") / "work"
    place.mkdir()
    (place / "docs").symlink_to(ROOT / "docs")
    return place


@pytest.fixture
def trained(folder, capsys):
    """What the training of ``train --help`` printed, by the Python of this process; its run stands
    in for that of ``make demo``, which other commands use.
    """
    kept, printed = folder / "checkpoints" / "digits", folder / "printed"
    if not kept.exists():
        done = paste(example_of("train", folder, capsys), folder)
        assert done.returncode == 0, done.stderr
        (folder / "checkpoints" / "try").rename(kept)
        printed.write_text(done.stdout)
    return printed.read_text()


WRITER = """visionattn train --data.name digits --data.task generate --data.workers 0 \\
    --model.name pixel_decoder --model.args '{embed_dim: 8, depth: 1, num_heads: 1}' \\
    --epochs 1 --optim.warmup_epochs 0.5 --run digits_generate"""
"""A training of seconds that stands in for that of the run which ``generate --help`` names."""


def tracked_files():
    """Files of the repository's folders, which commands are to leave alone."""
    return sorted(
        path
        for name in ("tools", "configs", "docs", "visionattn")
        for path in (ROOT / name).rglob("*")
        if "__pycache__" not in path.parts
    )


QUICK = ("predict", "stats")
"""Run by default; the others take a training or an export each."""


@pytest.mark.parametrize(
    "name",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in SUBCOMMANDS],
)
def test_help_ends_with_a_command_that_works_as_pasted(
    name, folder, trained, started_quickly, capsys
):
    command = example_of(name, folder, capsys)
    assert f"visionattn {name} " in command
    if name == "train":
        assert "test accuracy" in trained
        return
    if name == "generate":
        made = paste(WRITER.replace("visionattn", f"{sys.executable} -m visionattn", 1), folder)
        assert made.returncode == 0, made.stderr
    before = tracked_files()
    done = paste(command, folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "Traceback" not in done.stderr
    assert tracked_files() == before


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.stem)
def test_the_help_of_a_tool_has_its_file_for_a_name_and_is_else_that_of_its_command(
    tool, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", [str(tool), "--help"])
    spec = importlib.util.spec_from_file_location(f"help_of_{tool.stem}", tool)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit) as end:
        module.main()
    of_tool = capsys.readouterr().out
    assert end.value.code == 0 and of_tool.startswith(f"usage: {tool.name} ")
    monkeypatch.setattr(sys, "argv", ["visionattn"])
    with pytest.raises(SystemExit):
        main([*module.main.args, "--help"])
    of_command = capsys.readouterr().out
    options = [text.partition("options:")[2] for text in (of_tool, of_command)]
    assert options[0] == options[1] != ""


def test_every_command_has_a_tool():
    named = [text for tool in TOOLS for text in tool.read_text().splitlines() if "partial(" in text]
    assert sorted(text.split('"')[1] for text in named) == sorted(SUBCOMMANDS)
