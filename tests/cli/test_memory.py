"""How much memory there is, what of a size fits, and work in a process of its own."""

import os
import signal
import subprocess

import pytest
import torch

from visionattn.cli import fresh_process
from visionattn.cli.exit_codes import DoesNotFit, Failed, OutOfMemory
from visionattn.cli.fresh_process import ask
from visionattn.cli.memory import (
    check_fits,
    free_of_groups,
    free_of_machine,
    largest_fit,
    memory_there_is,
)

GIB = 2**30


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_machine_gives_what_it_says_is_available(tmp_path):
    write(tmp_path, {"proc/meminfo": "MemTotal: 900 kB\nMemFree: 7 kB\nMemAvailable:   33 kB\n"})
    assert free_of_machine(tmp_path) == 33 * 1024


STEP, JOB, OLD = "sys/fs/cgroup/job.slice/step", "sys/fs/cgroup/job.slice", "sys/fs/cgroup/memory"
VERSION_2 = {
    "proc/self/cgroup": "0::/job.slice/step\n",
    f"{STEP}/memory.max": "max\n",
    f"{STEP}/memory.current": "5\n",
    f"{STEP}/memory.stat": "anon 3\ninactive_file 1\n",
    f"{JOB}/memory.max": "1000\n",
    f"{JOB}/memory.current": "700\n",
    f"{JOB}/memory.stat": "anon 600\ninactive_file 40\nactive_file 7\n",
}
VERSION_1 = {
    "proc/self/cgroup": "4:cpu,cpuacct:/\n7:memory:/docker/x\n",
    f"{OLD}/memory.limit_in_bytes": f"{2**63 - 4096}\n",
    f"{OLD}/memory.usage_in_bytes": "9\n",
    f"{OLD}/memory.stat": "total_inactive_file 2\n",
}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        (VERSION_2, 1000 - 700 + 40),
        (VERSION_2 | {f"{STEP}/memory.max": "31\n"}, 31 - 5 + 1),
        (VERSION_1, None),
        (VERSION_1 | {f"{OLD}/memory.limit_in_bytes": "100\n"}, 100 - 9 + 2),
        ({}, None),
    ],
)
def test_the_tightest_group_around_a_process_counts_and_files_in_memory_can_go(
    tmp_path, files, free
):
    write(tmp_path, files)
    assert free_of_groups(tmp_path) == free


def test_the_machine_is_shared_and_what_the_process_has_is_its_own(monkeypatch):
    from visionattn.cli import memory

    monkeypatch.setattr(memory, "free_of_machine", lambda: 8 * GIB)
    monkeypatch.setattr(memory, "taken_bytes", lambda device: GIB)
    for groups, alone, shared in ((None, 9, 3), (4 * GIB, 5, 2)):
        monkeypatch.setattr(memory, "free_of_groups", lambda groups=groups: groups)
        cpu = torch.device("cpu")
        assert memory_there_is(cpu) == alone * GIB and memory_there_is(cpu, 4) == shared * GIB


def test_what_is_clearly_too_much_is_refused_and_what_may_just_do_is_not():
    for expected, there in ((None, 5), (5, None), (5, 5), (119, 100)):
        check_fits(expected, there, "a step", lambda: pytest.fail("asked for a way out"))
    with pytest.raises(
        DoesNotFit,
        match="a step would need about 3.0 GiB of memory, but 2.0 GiB are available; a smaller one",
    ):
        check_fits(3 * GIB, 2 * GIB, "a step", lambda: "a smaller one")
    assert issubclass(DoesNotFit, OutOfMemory)


def test_the_search_asks_for_no_number_twice():
    for limit in (*range(45), 1000):
        asked = []
        found = largest_fit(lambda n, a=asked, x=limit: (a.append(n), n <= x)[1])
        assert found == limit and len(asked) == len(set(asked)) <= 20


def test_of_a_gpu_what_is_free_and_what_this_process_keeps_of_it_count(monkeypatch):
    from visionattn.cli import memory

    for name, value in {
        "mem_get_info": lambda device: (300, 900),
        "memory_reserved": lambda device: 40,
        "memory_allocated": lambda device: 7,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    gpu = torch.device("cuda", 0)
    assert memory_there_is(gpu) == memory_there_is(gpu, 4) == 340
    assert memory.taken_bytes(gpu) == 7


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
