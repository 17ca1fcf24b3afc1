"""The command ``visionattn`` itself, the configurations it finds, and what importing it costs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from visionattn.cli import commands, shipped_configs
from visionattn.command import SUBCOMMANDS

ROOT = Path(__file__).parents[2]


def fresh(code, *words, cwd=ROOT):
    """A fresh process that finds the package."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *(["-c", code] if code else []), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)


def test_importing_registers_the_models_and_neither_handlers_nor_readers_of_images():
    code = (
        "import signal, sys\n"
        "before = signal.getsignal(signal.SIGINT)\n"
        "import visionattn, visionattn.cli.interruption\n"
        "assert signal.getsignal(signal.SIGINT) is before\n"
        "heavy = {'albumentations', 'pydantic', 'matplotlib', 'sklearn', 'tensorboard'}\n"
        "assert {'train', 'predict', 'load_model', 'ops'} <= set(dir(visionattn))\n"
        "assert not heavy & set(sys.modules)\n"
        "import timm\n"
        "assert timm.is_model('scaleformer_vit_t') and timm.is_model('taylorshift_vit_t')\n"
        "assert visionattn.ops.softmax_attention and visionattn.load_model\n"
    )
    done = fresh(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_help_wrong_names_and_mistyped_options_are_answered_without_torch():
    code = (
        "import sys\n"
        "sys.argv, sys.modules['torch'] = ['visionattn'], None\n"
        "from visionattn.command import SUBCOMMANDS, main\n"
        "codes = [main([word]) for word in ('--help', '--version', 'sweeps')] + [main([])]\n"
        "quick = [name for name, row in SUBCOMMANDS.items() if row.options]\n"
        "codes += [main([name, '--sede', '3']) for name in quick]\n"
        "assert codes == [0, 0, 2, 2, 2, 2, 2, 2], codes\n"
    )
    done = fresh(code)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name} " in done.stdout for name in SUBCOMMANDS)
    assert re.search(r"^visionattn \d+\.\d+\.\d+$", done.stdout, re.MULTILINE)
    first, usage, *_ = said = done.stderr.splitlines()
    assert (
        first == "error: visionattn has no command sweeps; did you mean sweep? "
        "--help lists all commands"
    )
    assert usage.startswith("usage: visionattn COMMAND")
    assert said[-4:] == ["error: unknown option --sede; did you mean --seed?"] * 4


def test_commands_are_printed_as_the_script_beside_this_python_or_as_the_package(monkeypatch):
    monkeypatch.setattr(commands.shutil, "which", lambda name: f"/elsewhere/{name}")
    monkeypatch.setattr(sys, "executable", "/here/python")
    assert commands.typed("train", "--run", "a b") == (
        "/here/python -m visionattn train --run 'a b'"
    )
    monkeypatch.setattr(commands.shutil, "which", lambda name: f"/here/{name}")
    assert commands.typed("train", "--run", "a b") == "visionattn train --run 'a b'"


def test_shipped_configurations_are_found_by_name_and_files_go_first(tmp_path, monkeypatch):
    files = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    assert list(shipped_configs.shipped()) == files
    monkeypatch.chdir(tmp_path)
    for name in ("digits", "digits.yaml", Path("digits")):
        assert shipped_configs.find_config(name) == ROOT / "configs" / "digits.yaml"
    (tmp_path / "digits").mkdir()
    assert shipped_configs.find_config("digits") == ROOT / "configs" / "digits.yaml"
    (tmp_path / "digits.yaml").write_text("epochs: 2\n")
    assert shipped_configs.find_config("digits.yaml") == Path("digits.yaml")
    near = "did you mean the shipped digits?"
    listed = f"shipped are {', '.join(files)}"
    for name, rest in {"digitz": near, "xyz": listed, "a/digitz.yaml": "check the path"}.items():
        with pytest.raises(FileNotFoundError) as error:
            shipped_configs.find_config(name)
        assert str(error.value) == f"no configuration file at {name}; {rest}"


def test_an_installed_package_has_its_configurations_within(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "small.yaml").write_text("epochs: 2\n")
    monkeypatch.setattr(shipped_configs, "PACKAGE", tmp_path)
    assert shipped_configs.shipped() == {"small": tmp_path / "configs" / "small.yaml"}


@pytest.mark.slow
def test_the_page_about_python_runs_as_it_stands(tmp_path, started_quickly):
    page = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    done = fresh("\n".join(["import torch; torch.set_num_threads(1)", *blocks]), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^0\.\d{3} of the test images", done.stdout, re.MULTILINE)
    assert "torch.Size([6, 1, 8, 8]) ['image 0', 'image 0', 'image 1'," in done.stdout
    for size in ("[3, 192])", "[192, 4, 5])", "[2, 10])", "[1, 10]) 32", "[2, 6, 21, 16])"):
        assert f"torch.Size({size}\n" in done.stdout, size
    assert done.stdout.endswith("['flowers/0.png']\n")
