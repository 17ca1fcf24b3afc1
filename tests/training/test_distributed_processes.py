"""Several processes of one run: what each takes, how they agree, and how the failure of one ends
all. ``torchrun`` starts those of the last tests.
"""

import errno
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.helpers.resumed_runs import state_of, status_of
from tests.helpers.several_processes import run_processes
from tests.helpers.small_runs import lines
from tests.helpers.tools import words
from visionattn.cli.exit_codes import NonFinite, OutOfMemory, run_tool
from visionattn.cli.interruption import Interrupted
from visionattn.command import main
from visionattn.data.batches import share
from visionattn.training import distributed
from visionattn.training.distributed import joined

HOST = socket.gethostname()


@pytest.mark.parametrize(("size", "pairs"), [(1, True), (3, False), (3, True), (7, True)])
def test_the_parts_of_a_batch_are_disjoint_and_together_are_the_batch(size, pairs):
    for length in (0, 1, 2, 5, 8, 23):
        keys = random.Random(length).sample(range(100), length)
        parts = [share(keys, rank, size, pairs=pairs) for rank in range(size)]
        together = [key for part in parts for key in part]
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= (2 if pairs else 1)
        assert sorted(together) == sorted(keys) and (together == keys or size > 1 and pairs)
        # Images that are mixed with each other are in the same part.
        even = length // 2 * 2
        opposite = {keys[place]: keys[even - 1 - place] for place in range(even)}
        for part in parts if pairs else ():
            mixed = part[: len(part) // 2 * 2]
            assert [opposite[key] for key in mixed] == mixed[::-1]
            assert part[len(mixed) :] in ([], keys[even:])


def test_processes_are_started_by_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    words = "^WORLD_SIZE is set but not RANK, .*; start several processes with torchrun$"
    with pytest.raises(ValueError, match=words), joined():
        pass


def test_processes_agree_on_sums_values_and_errors(tmp_path):
    def fail(error, on, rank):
        def work():
            if rank == on:
                raise error

        return work

    def caught(call, *given):
        try:
            call(*given)
        except Exception as error:
            return [type(error).__name__, str(error)]

    def work(rank):
        images = [ValueError("cannot read image a.png"), OSError(errno.ENOSPC, "No space", "last")]
        memory = torch.OutOfMemoryError("CUDA out of memory")
        lists = {"classes": ["a", "é\udcff"], "images": ["/0", "/3"][: 3 - rank]}

        def tool():
            with joined() as p, p.guard():
                total = p.sum(rank, 2**53 - 1 if rank else 1)
                values = [p.together(lambda: rank), p.on_first(lambda: {"from": rank})]
                found = [total, p.gather(f"p{rank}"), values, p.size, p.first]
                failing = [
                    fail(images[rank - 1], rank or None, rank),
                    fail(memory, 1, rank),
                    fail(Interrupted() if rank == 0 else ValueError("counts"), rank, rank),
                ]
                found += [caught(p.together, each) for each in failing]
                found.append(caught(p.on_first, fail(OSError(errno.EACCES, "No", "run"), 0, rank)))
                found.append(caught(p.check_same, {"classes": ["a"]}))
                found.append(caught(p.check_same, lists))
                print(json.dumps(found), flush=True)
                p.together(fail(ValueError("the end"), 2, rank))

        return run_tool(tool, several=True)

    ended = run_processes(3, work, tmp_path)
    for rank, each in enumerate(ended):
        values = [[3, float(2**54 - 1)], ["p0", "p1", "p2"], [rank, {"from": 0}], 3, rank == 0]
        errors = [
            ["ValueError", f"cannot read image a.png (process 1 on {HOST})"],
            ["OutOfMemory", f"CUDA out of memory (process 1 on {HOST})"],
            ["ValueError", f"counts (process 1 on {HOST})"],
            ["PermissionError", "[Errno 13] No: 'run'"],
            None,
            [
                "ValueError",
                f"expected the same images on every machine, got 1 on process 2 ({HOST}) and 2 on "
                "the first process",
            ],
        ]
        assert (each.code, json.loads(each.out)) == (2, values + errors), rank
    said = f"error: the end (process 2 on {HOST})\n"
    assert [each.err for each in ended] == [said, "", ""]


def wait_for(path) -> None:
    while not path.exists():
        time.sleep(0.05)


LOST = "another process has died or does not answer: (Read|Timed|Conn|Write)[^\n]{10,70}"
FAILURES = {
    "out of memory": (OutOfMemory("out of memory at batch 7"), 3, "out of memory at batch 7", 3),
    "a bad image": (ValueError("cannot read image"), 2, "cannot read image", 2),
    "a mistake": (TypeError("a mistake"), 1, "TypeError: a mistake", 4),
    "an interruption": (KeyboardInterrupt(), 130, "interrupted", 4),
    "a kill": (signal.SIGKILL, -9, LOST, 4),
    "a stop": (signal.SIGSTOP, -9, LOST, 4),
}


USUAL = [(1, "out of memory"), (1, "a kill"), (1, "a stop"), (0, "a kill")]
MORE = [(1, "a bad image"), (1, "a mistake"), (1, "an interruption"), (0, "out of memory")]
MORE += [(0, "a stop")]


@pytest.mark.parametrize(
    ("failing", "what"), [*USUAL, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_the_failure_of_one_process_ends_all_with_its_reason_and_exit_code(tmp_path, what, failing):
    cause, own_code, reason, code = FAILURES[what]
    killed, size = isinstance(cause, signal.Signals), 2 + failing

    def work(rank):
        def tool():
            with joined() as processes, processes.guard():
                processes.set_timeout(2.0)
                processes.sum(1)
                if rank == failing and killed:
                    os.kill(os.getpid(), cause)
                elif rank == failing:
                    raise cause
                processes.sum(1)

        return run_tool(tool, several=True)

    def meanwhile(processes):
        for rank, process in enumerate(processes):
            if rank != failing:
                process.join(300)
        processes[failing].join(0 if cause == signal.SIGSTOP else 300)
        processes[failing].kill()

    ended = run_processes(size, work, tmp_path, meanwhile=meanwhile)
    codes = [own_code if rank == failing else code for rank in range(size)]
    assert [each.code for each in ended] == codes
    assert ("Traceback" in ended[failing].err) == (what == "a mistake")
    # The first process speaks; where it is the one that failed, the second, but of its memory.
    speaker = 0 if failing or what == "out of memory" else 1
    place = rf" \(process {speaker if killed else failing} on {HOST}\)"
    told = f"error: {reason}{place if speaker != failing else ''}\n"
    assert re.fullmatch(told, ended[speaker].err), ended[speaker].err
    others = [each.err for rank, each in enumerate(ended) if rank not in (failing, speaker)]
    assert others == [""] * len(others)


@pytest.mark.slow
def test_a_process_that_waits_in_vain_for_others_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "START_SECONDS", 1.0)

    def late(rank):
        def tool():
            with joined():
                raise AssertionError("goes on without one")

        return 9 if rank == 2 else run_tool(tool, several=True)

    ended = run_processes(3, late, tmp_path)
    assert [each.code for each in ended] == [4, 4, 9]
    said = re.findall("^error: .*", ended[0].err, re.MULTILINE)
    assert len(said) == 1 and said[0].startswith("error: another process has died or does not ans")
    assert "error: " not in ended[1].err


def test_ends_that_all_know_of_wait_for_the_slowest_but_not_for_one_that_is_stuck(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(distributed, "LEAVE_SECONDS", 3.0)

    def work(rank):
        def tool():
            with joined() as processes, processes.guard():
                processes.sum(1)
                if rank == 0:
                    time.sleep(1.5)
                (tmp_path / f"ended{rank}").touch()
                if rank == 2:
                    wait_for(tmp_path / "over")
                raise NonFinite("the loss was not finite")

        code = run_tool(tool, several=True)
        print(sorted(path.name for path in tmp_path.glob("ended*")))
        (tmp_path / "over").touch()
        return code

    ended = run_processes(3, work, tmp_path)
    assert [each.code for each in ended] == [1, 1, 1]
    assert re.findall("^error: .*", ended[0].err, re.M) == ["error: the loss was not finite"]
    assert "error" not in ended[1].err and ended[1].out == "['ended0', 'ended1', 'ended2']\n"


ROOT = Path(__file__).parents[2]
MODEL = "{patch_size: 8, embed_dim: 16, depth: 1, num_heads: 2}"
DATA = "--data.name digits --data.img_size 16 --data.workers 1 --batch_size 256"
LIMIT_S = 400
"""For the processes to start and end, on a machine that is busy with other things."""


def flags(folder: Path, *options: str) -> list[str]:
    return [*words(f"{DATA} --output {{}} --run run --model.args {{}}", folder, MODEL), *options]


def torchrun(folder: Path, *options: str) -> subprocess.Popen:
    """Start ``tools/train.py`` on two processes; its lines go to files in the folder."""
    launch = words("{} -m torch.distributed.run --standalone --nproc-per-node 2 --", sys.executable)
    command = [*launch, "tools/train.py", *flags(folder, *options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT, env=environment)


def process_of(launcher: subprocess.Popen, rank: int) -> int:
    """The id of the process of that number."""
    for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError("torchrun has no such process")


def test_torchrun_trains_on_two_processes(tmp_path, started_quickly):
    launcher = torchrun(tmp_path, *words("--epochs 1 --optim.warmup_epochs 0.2"))
    assert launcher.wait(LIMIT_S) == 0, (tmp_path / "err").read_text()
    out = (tmp_path / "out").read_text().splitlines()
    assert "6 steps on 2 processes (ddp), cpu" in out[1] and out[4].startswith("epoch 1/1")
    assert [line.startswith("test accuracy ") for line in out] == [*[False] * (len(out) - 1), True]
    kinds = [(line["kind"], line["step"]) for line in lines(tmp_path / "run")]
    assert kinds == [*(("train", step) for step in range(1, 7)), ("epoch", 6), ("test", 6)]
    found = status_of(tmp_path / "run")
    assert (found["status"], found["exit_code"]) == ("finished", 0)
    assert found["provenance"]["processes"] == 2 and found["result"]["test_images"] == 359


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_run_and_a_single_one_goes_on_with_it(tmp_path, rank, capsys):
    launcher = torchrun(tmp_path, *words("--epochs 5000 --save_every 1"))
    state, errors, start = tmp_path / "run" / "last.pt", tmp_path / "err", time.monotonic()
    while not (state.exists() and state_of(state.parent)["position"]["step"] >= 3):
        assert launcher.poll() is None and time.monotonic() - start < LIMIT_S, errors.read_text()
        time.sleep(0.2)
    os.kill(process_of(launcher, rank), signal.SIGKILL)
    assert launcher.wait(LIMIT_S) != 0
    found = status_of(state.parent)
    [said] = re.findall("^error: (.*)", errors.read_text(), re.MULTILINE)
    assert re.fullmatch(rf"{LOST} \(process {1 - rank} on {HOST}\)", said)
    # Where the first process is the one that is dead, nobody writes how the run ended.
    if rank:
        assert (found["status"], found["exit_code"], found["reason"]) == ("failed", 4, said)
    else:
        assert found["status"] == "running"
        assert main(["train", *flags(tmp_path, "--resume", "--epochs", "2")]) == 0
        assert "resumes after epoch" in capsys.readouterr().out
