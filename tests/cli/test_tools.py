"""Commands as they are typed: what they print, how they end, and where the system is another."""

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from itertools import takewhile
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from tests.helpers.inference_files import write_image, write_weights
from tests.helpers.tools import assert_one_error, load_tool, read_csv, words, written
from visionattn.cli import exit_codes
from visionattn.command import main

ROOT = Path(__file__).parents[2]
SMALL = words(
    "--model.args {} --data.img_size=16 --data.workers=0 --batch_size=128 --epochs=1 "
    "--optim.warmup_epochs=0.5",
    "{patch_size: 8, embed_dim: 16, depth: 1, num_heads: 2}",
)


train, validate = load_tool("train"), load_tool("validate")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run on the digits, its folder and its output."""
    output = tmp_path_factory.mktemp("runs")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert train([*SMALL, f"--output={output}", "--run=one"]) == 0
    return output / "one", printed.getvalue()


def environment() -> dict[str, str]:
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def flags_of(line: str, name: str) -> list[str]:
    """What stands behind a command that was printed, which is the script or the package's."""
    words = shlex.split(line)
    place = words.index(name)
    assert words[:place] == ["visionattn"] or words[1:place] == ["-m", "visionattn"]
    return words[place + 1 :]


def test_training_ends_with_time_checkpoint_a_command_and_the_test_accuracy_as_the_last_line(
    finished,
):
    folder, printed = finished
    lines = printed.splitlines()
    assert re.fullmatch(r"test accuracy \d+\.\d %", lines[-1])
    assert re.fullmatch(r"trained in \d+ seconds", lines[-5])
    assert lines[-4] == f"best weights (of epoch 1): {folder / 'best.safetensors'}"
    assert lines[-3] == "try next:"
    assert not any("%" in line for line in lines[-5:-1])
    assert flags_of(lines[-2], "validate")[0] == "--checkpoint"


def test_validation_prints_a_row_per_size_and_keeps_it_with_its_origin(finished, capsys, tmp_path):
    folder, printed = finished
    kept = tmp_path / "rows.json"
    assert (
        validate(
            words("--checkpoint {} --img-size 16 32 --json {}", folder / "best.safetensors", kept)
        )
        == 0
    )
    head, columns, *rows = capsys.readouterr().out.splitlines()
    where = f"{folder / 'best.safetensors'} on the test images of digits"
    assert head == f"{where}; preprocessing: crop, at several sizes"
    assert columns.split() == ["size", "images", "accuracy", "top-5", "images/s"]
    accuracy = printed.splitlines()[-1].split()[2]
    assert rows[0].split()[:2] == ["16", "359"] and f"{float(rows[0].split()[2]):.1f}" == accuracy
    content = json.loads(kept.read_text())
    assert [row["img_size"] for row in content["rows"]] == [16, 32] and content["split"] == "test"
    assert content["provenance"]["torch"] == torch.__version__ and content["config"]["seed"] == 0
    assert {"device", "commit", "visionattn"} < set(content["provenance"])


def test_bad_input_ends_validation_with_one_line_and_code_2(finished, tmp_path, capsys):
    folder, _ = finished
    best = str(folder / "best.safetensors")
    cut, alone = tmp_path / "cut.safetensors", tmp_path / "alone.safetensors"
    cut.write_bytes(Path(best).read_bytes()[:3000])
    alone.write_bytes(Path(best).read_bytes())
    sizes = tmp_path / "sizes.yaml"
    sizes.write_text("data: {img_size: 24}\n")
    before = written(folder)
    for flags, part in (
        ([], "expected --checkpoint: the best.safetensors"),
        (["--checkpoint", "nowhere.safetensors"], "no checkpoint at nowhere.safetensors"),
        (["--checkpoint", str(folder / "last.pt")], "pass the best.safetensors of a run"),
        (["--checkpoint", str(alone)], "expected --data.name, such as --data.name folder"),
        (["--checkpoint", str(cut), "--data.name=digits"], "truncated"),
        (
            ["--checkpoint", best, "--img-size", "20"],
            "image of 20 x 20 pixels is not a whole number of 8-pixel patches; the nearest "
            "that fit: 16 or 24",
        ),
        (["--checkpoint", best, "--img-size", "0"], "img_size must be above 0, got 0"),
        (
            ["--checkpoint", best, "--img-sizes", "16"],
            "unknown option --img-sizes; did you mean --img_size?",
        ),
        (
            ["--checkpoint", best, "--img-size", "big"],
            "img_size[0] must be an integer or a list, got big",
        ),
        (["--checkpoint", best, "--batch_size", "0"], "batch_size must be above 0, got 0"),
        (["--checkpoint", best, "--seed", "-1"], "seed must be at least 0, got -1"),
        (["--checkpoint", best, "--json", str(tmp_path / "no" / "a.json")], "for a.json"),
        (["--checkpoint", best, "--data.name=folder", "--data.root=nowhere"], "nowhere"),
        (
            ["--checkpoint", best, "--img-size", "16", "--data.name=canvas"],
            "canvas of 16 pixels is too small",
        ),
        (
            ["--checkpoint", best, "--img-size", "64", "32", "--data.name=canvas"],
            "canvas of 32 pixels is too small",
        ),
        (
            ["--checkpoint", best, "--data.img_size=32"],
            "data.img_size applies only to training; pass the sizes to evaluate at",
        ),
        (
            ["--checkpoint", best, "--data.img-size", "16"],
            "data.img_size applies only to training; pass the sizes",
        ),
        (
            ["--checkpoint", best, "--data.img_size_choices", "16", "24"],
            "data.img_size_choices applies only to training",
        ),
        (["--checkpoint", best, "--config", str(sizes)], "data.img_size applies only to training"),
        (
            ["--checkpoint", best, "--data.args.eval_images=9"],
            "data.args needs one of canvas, documents, copy",
        ),
    ):
        assert validate(flags) == 2, flags
        assert_one_error(capsys, part)
    assert written(folder) == before and not (tmp_path / "no").exists()


def test_other_data_are_evaluated_without_the_options_that_are_for_those_of_the_run_alone(
    finished, tmp_path, capsys
):
    folder, _ = finished
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["data"] |= dict(name="canvas", img_size=64, img_size_choices=[48, 64])
    config["data"]["args"] = {"train_images": 9}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config | {"seed": 7}))
    (tmp_path / "best.safetensors").write_bytes((folder / "best.safetensors").read_bytes())
    kept = tmp_path / "rows.json"
    flags = [
        "--checkpoint",
        str(tmp_path / "best.safetensors"),
        "--data.name=digits",
        f"--json={kept}",
    ]
    assert validate(flags) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[:2] == ["16", "359"]
    content = json.loads(kept.read_text())["config"]
    assert content["seed"] == 7 and content["data"]["workers"] == 0
    assert content["data"]["args"] == {}


def test_ctrl_c_saves_the_state_says_how_to_go_on_and_that_works(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "tools" / "train.py"),
        *SMALL,
        "--data.workers=1",
        f"--output={tmp_path}",
        "--run=two",
    ]
    command += ["--epochs=500", "--optim.warmup_epochs=1"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
    try:
        said = list(takewhile(lambda line: line[:5] != "epoch", iter(process.stdout.readline, "")))
        assert "epochs of 11 steps" in said[1] and "preprocessing: center crop" in said[2]
        assert re.search(r"peak memory: [\d.]+ [MG]iB estimated.* per step", said[3])
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the loader's processes too
        _, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 130
    place, _, command = errors.rstrip("\n").partition("; to resume: ")
    said = rf"stopped after step \d+ \(epoch \d+ of 500\); the state is in {tmp_path}/two/last.pt"
    assert re.fullmatch(said, place)
    last = tmp_path / "two" / "last.pt"
    epoch = torch.load(last, weights_only=True)["position"]["epoch"] + 1
    go_on = flags_of(command, "train")
    assert go_on == ["--config", f"{tmp_path}/two/config.yaml", "--resume"]
    assert train([*go_on, f"--epochs={epoch}", "--data.workers=0"]) == 0
    assert torch.load(last, weights_only=True)["position"]["epoch"] == epoch


SEVERAL = {"train", "distil"}
ALONE = sorted({path.stem for path in (ROOT / "tools").glob("*.py")} - SEVERAL)


def test_tools_that_run_as_one_process_are_not_started_by_torchrun(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = "error: this command runs as one process; start it without torchrun\n"
    for name in ALONE:
        for rank, said in (("0", line), ("1", "")):
            monkeypatch.setenv("RANK", rank)
            assert load_tool(name)(["--help"]) == 2
            assert capsys.readouterr() == ("", said)


def test_a_warning_of_the_package_is_one_line_without_a_place_in_its_code():
    usual = warnings.formatwarning
    own, other = str(ROOT / "visionattn" / "data" / "splits.py"), str(ROOT / "tests" / "x.py")
    with exit_codes.told_in_one_line():
        written = [
            warnings.formatwarning("two pages,\n one is read", kind, place, 7)
            for kind, place in ((UserWarning, own), (UserWarning, other), (RuntimeWarning, own))
        ]
    assert written[0] == "note: two pages, one is read\n"
    assert all("Warning: two pages" in line and ".py:7" in line for line in written[1:])
    assert warnings.formatwarning is usual


LATIN = os.fsdecode(b"caf\xe9")
"""A name in Latin-1, as Python has it."""


def test_images_with_names_in_another_encoding_have_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    write_image(tmp_path / "images" / f"{LATIN}.png", 16, 24, 7)
    given = ["predict", "--checkpoint", "best.safetensors", "--images", "images", "--workers", "0"]
    assert main(given) == 0 and "caf?.png" in capsys.readouterr().out
    assert main([*given, "--output", "a.csv"]) == 0
    assert os.fsencode(read_csv(tmp_path / "a.csv")[0]["path"]).endswith(b"caf\xe9.png")


OTHER_SYSTEM = """
import os, shutil, signal, sys
sys.modules["fcntl"] = sys.modules["resource"] = None
shutil._use_fd_functions = False
for name in "O_DIRECTORY O_NOFOLLOW killpg posix_fallocate register_at_fork sysconf".split():
    delattr(os, name)
del signal.SIGKILL

def of_package():
    return sys._getframe(2).f_globals["__name__"].startswith("visionattn")

def refused(path):
    raise PermissionError(13, "used by another process", str(path))

def opened(path, *options, real=os.open, **more):
    return refused(path) if of_package() and os.path.isdir(path) else real(path, *options, **more)

def renamed(real):
    def rename(*paths):
        for number in os.listdir("/proc/self/fd") if of_package() else ():
            held = os.path.realpath("/proc/self/fd/" + number)
            if any((held + "/").startswith(os.path.realpath(path) + "/") for path in paths):
                refused(held)
        return real(*paths)
    return rename

os.open, os.rename, os.replace = opened, renamed(os.rename), renamed(os.replace)
from visionattn.command import main
"""
RUN = """
run, small = ["--output=runs", "--run=a"], ["--optim.warmup_epochs=0", "--data.workers=0"]
small += ['--model.args={"embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 16}']
best = ["--checkpoint", "runs/a/best.safetensors"]
for words in (
    ["train", "--config", "digits", "--epochs=1", *run, *small],
    ["train", "--config", "runs/a/config.yaml", "--resume", "--epochs=2"],
    ["validate", *best],
    ["predict", *best, "--images", "image.png", "--output", "classes.csv"],
    ["features", *best, "--images", "image.png", "--output", "features"],
    ["features", *best, "--images", "image.png", "--output", "features", "--overwrite"],
    ["features", *best, "--images=image.png", "--img-size=native", "--dense", "--output=map.npy"],
):
    assert main(words) == 0, words
"""


@pytest.mark.slow
def test_digits_are_trained_and_used_where_the_system_is_not_posix(tmp_path, started_quickly):
    Image.linear_gradient("L").resize((32, 32)).save(tmp_path / "image.png")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})" + OTHER_SYSTEM + RUN
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "map.npy").exists() and (tmp_path / "features" / "index.csv").exists()
