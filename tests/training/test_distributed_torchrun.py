"""The tool as users start it on several processes: ``torchrun tools/train.py ...``."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.tools import words
from visionattn.training.watchdog import Waits

ROOT = Path(__file__).parents[2]
MODEL = "{patch_size: 8, embed_dim: 16, depth: 1, num_heads: 2}"
LIMIT_S = 400
"""For the processes to start and end, on a machine that is busy with other things."""


def torchrun(folder: Path, *options: str, size: int = 2) -> subprocess.Popen:
    """Start it; its lines go to files in the folder."""
    launch = words(
        "{} -m torch.distributed.run --standalone --nproc-per-node {} --", sys.executable, size
    )
    data = words("--data.name digits --data.img_size 16 --data.workers 1 --model.args {}", MODEL)
    command = [
        *launch,
        "tools/train.py",
        *data,
        *words("--batch_size 256 --output {} --run run", folder),
        *options,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT, env=environment)


def status(folder: Path) -> dict:
    return json.loads((folder / "run" / "status.json").read_text())


def lines(folder: Path) -> list[dict]:
    """Of the metrics; the last one may still be in the writing."""
    path = folder / "run" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def process_of(launcher: subprocess.Popen, rank: int) -> int:
    """The id of the process of that number."""
    for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError("torchrun has no such process")


def test_torchrun_trains_on_two_processes(tmp_path, started_quickly):
    launcher = torchrun(
        tmp_path, "--epochs", "1", "--optim.warmup_epochs", "0.2", "--log_every", "1"
    )
    assert launcher.wait(LIMIT_S) == 0, (tmp_path / "err").read_text()
    out = (tmp_path / "out").read_text().splitlines()
    assert "6 steps on 2 processes (ddp), cpu" in out[1] and out[4].startswith("epoch 1/1")
    assert out[-1].startswith("test accuracy ")
    assert len([line for line in out if "test accuracy" in line]) == 1
    kinds = [(line["kind"], line["step"]) for line in lines(tmp_path)]
    assert kinds == [*(("train", step) for step in range(1, 7)), ("epoch", 6), ("test", 6)]
    found = status(tmp_path)
    assert (found["status"], found["exit_code"], found["provenance"]["processes"]) == (
        "finished",
        0,
        2,
    )
    assert found["result"]["test_images"] == 359


def test_a_silent_process_is_ended_within_a_minute_on_an_idle_machine():
    """The last sign of life, the silence after it, the time for a process that waits for the silent
    one to end, and the 30 s after which torchrun kills what does not end on SIGTERM.
    """
    waits = Waits()
    assert waits.beat + waits.silence + waits.grace + 30 < 60
    assert waits.silence + waits.doubt + waits.grace < 30  # so it can say so before it is killed


def test_a_killed_process_ends_the_run_with_the_reason(tmp_path):
    """The first one, whose part in telling the reason another one then takes."""
    launcher = torchrun(tmp_path, "--epochs", "5000", "--log_every", "1")
    start = time.monotonic()
    while not any(line["step"] == 3 for line in lines(tmp_path)):
        assert launcher.poll() is None and time.monotonic() - start < LIMIT_S, (
            tmp_path / "err"
        ).read_text()
        time.sleep(0.2)
    os.kill(process_of(launcher, 0), signal.SIGKILL)
    assert launcher.wait(LIMIT_S) != 0
    found, errors = status(tmp_path), (tmp_path / "err").read_text()
    assert (found["status"], found["exit_code"]) == ("failed", 4)
    assert found["reason"].startswith("process 0 on ") and "has not answered for" in found["reason"]
    assert errors.count(f"error: {found['reason']}\n") == 1 and "exitcode  : 4" in errors
