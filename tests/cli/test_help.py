"""``--help`` of every tool ends with a command, and the command works as it is pasted."""

import importlib.util
import io
import os
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = sorted((ROOT / "tools").glob("*.py"))
SEEN = ("tools", "configs", "docs", "visionattn")
"""What of the repository the commands are to find in their folder."""
LONGEST_SECONDS = 600
"""Some 20 on a processor core of its own; many times that beside other work."""


def paste(command, folder):
    """Run a line as a shell does, with this Python as ``python`` and one thread."""
    path = os.pathsep.join([str(folder.parent / "bin"), os.environ["PATH"]])
    packages = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {
        "PATH": path,
        "PYTHONPATH": packages,
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )


def example_of(tool):
    """The last line of its help."""
    spec = importlib.util.spec_from_file_location(f"help_of_{tool.stem}", tool)
    module, printed = importlib.util.module_from_spec(spec), io.StringIO()
    spec.loader.exec_module(module)
    with redirect_stdout(printed), pytest.raises(SystemExit) as end:
        module.main(["--help"])
    assert end.value.code == 0 and printed.getvalue().startswith(f"usage: {tool.name} ")
    return printed.getvalue().splitlines()[-1].strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the repository's can be read, and nothing written to them."""
    place = tmp_path_factory.mktemp("pasted") / "work"
    place.mkdir()
    for name in SEEN:
        (place / name).symlink_to(ROOT / name)
    python = place.parent / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    return place


@pytest.fixture(scope="module")
def trained(folder):
    """What the training of ``train.py --help`` printed; its run stands in for that of
    ``make demo``, which other commands use.
    """
    done = paste(example_of(ROOT / "tools" / "train.py"), folder)
    assert done.returncode == 0, done.stderr
    (folder / "checkpoints" / "try").rename(folder / "checkpoints" / "digits")
    return done.stdout


def tracked_files():
    """Files below the repository's folders that commands see, which they are to leave alone."""
    return sorted(
        path
        for name in SEEN
        for path in (ROOT / name).rglob("*")
        if "__pycache__" not in path.parts
    )


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.stem)
def test_help_ends_with_a_command_that_works_as_pasted(tool, folder, trained):
    command = example_of(tool)
    assert command.startswith(f"python tools/{tool.name} ")
    if tool.stem == "train":
        assert "test accuracy" in trained
        return
    before = tracked_files()
    done = paste(command, folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "Traceback" not in done.stderr
    assert tracked_files() == before
