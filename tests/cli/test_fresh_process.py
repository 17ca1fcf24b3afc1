"""Work in a process of its own: what it gives back, and how its end is told."""

import os
import signal
import subprocess

import pytest
import torch

from visionattn.cli import fresh_process
from visionattn.cli.exit_codes import Failed
from visionattn.cli.fresh_process import ask


def whoami(words):
    print("a line that is no answer")
    return [os.getpid(), os.getppid(), os.environ.get("MALLOC_MMAP_THRESHOLD_"), words]


def run_out(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise {"full": MemoryError(), "wrong": RuntimeError("shapes disagree")}[how]


def test_a_process_of_its_own_is_another_one_each_time(started_quickly):
    first, second = (ask(whoami, {"words": "böse"}, "who") for _ in range(2))
    assert first[0] != second[0] and os.getpid() not in (first[0], second[0])
    assert first[2:] == ["65536", "böse"]


def test_the_end_of_the_process_is_an_error_here(started_quickly):
    with pytest.raises(torch.OutOfMemoryError, match="^77 px does not fit into memory$"):
        ask(run_out, {"how": "full"}, "77 px")
    with pytest.raises(Failed, match="^RuntimeError: shapes disagree$"):
        ask(run_out, {"how": "wrong"}, "77 px")
    with pytest.raises(Failed, match="^killed by signal 9$"):
        ask(run_out, {"how": "kill"}, "77 px")


def test_a_killed_process_ran_out_of_memory_only_where_the_system_says_so(monkeypatch):
    killed = subprocess.CompletedProcess([], -9, "", "")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: killed)
    kills = iter([5, 5, 5, 6])
    monkeypatch.setattr(fresh_process, "memory_kills", lambda: next(kills))
    with pytest.raises(Failed, match="killed by signal 9"):
        ask(whoami, {"words": 1}, "77 px")
    with pytest.raises(torch.OutOfMemoryError, match="77 px does not fit"):
        ask(whoami, {"words": 1}, "77 px")


def test_kills_for_want_of_memory_are_those_of_the_control_group_or_of_the_system(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(fresh_process, "Path", lambda name: tmp_path / name.lstrip("/"))
    assert fresh_process.memory_kills() == 0
    group = tmp_path / "sys" / "fs" / "cgroup" / "a" / "b"
    for folder in (tmp_path / "proc" / "self", group):
        folder.mkdir(parents=True)
    (tmp_path / "proc" / "vmstat").write_text("nr_free_pages 77\noom_kill 4\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("4:memory:/c\n0::/a/b\n")
    assert fresh_process.memory_kills() == 4
    (group / "memory.events").write_text("low 0\noom 9\noom_kill 2\noom_group_kill 0\n")
    assert fresh_process.memory_kills() == 2
