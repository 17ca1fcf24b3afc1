"""Several processes of one run: what each takes, how they agree, and how the end of one ends
all.
"""

import errno
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import time
from dataclasses import replace

import pytest
import torch
from torch.distributed import TCPStore

from tests.helpers.several_processes import run_processes
from visionattn.cli.ends import NonFinite, OutOfMemory, run_tool
from visionattn.cli.interruption import Interrupted
from visionattn.data.batches import share
from visionattn.training.distributed import Processes, joined
from visionattn.training.watchdog import Waits

QUICK = Waits(start=60.0, beat=0.1, silence=2.5, doubt=1.0, grace=0.3, leave=60.0)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 5, 8, 23])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_parts_of_a_batch_are_disjoint_and_together_are_the_batch(length, size, pairs):
    keys = random.Random(length).sample(range(100), length)
    parts = [share(keys, rank, size, pairs=pairs) for rank in range(size)]
    assert sorted(key for part in parts for key in part) == sorted(keys)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= (2 if pairs else 1)
    if size == 1 or not pairs:
        assert [key for part in parts for key in part] == keys


@pytest.mark.parametrize("length", [6, 7, 23])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_images_that_are_mixed_with_each_other_are_in_the_same_part(length, size):
    even = length // 2 * 2
    opposite = {key: even - 1 - key for key in range(even)}
    for rank in range(size):
        part = share(list(range(length)), rank, size, pairs=True)
        mixed = part[: len(part) // 2 * 2]
        assert [opposite[key] for key in mixed] == mixed[::-1]
        assert part[len(mixed) :] in ([], [length - 1])


def test_one_process_asks_nobody():
    alone = Processes()
    assert (alone.first, alone.speaks, alone.sum(2, 3.5), alone.gather("a")) == (
        True,
        True,
        [2, 3.5],
        ["a"],
    )
    assert alone.together(lambda: 5) == alone.on_first(lambda: 5) == 5
    with pytest.raises(KeyError), alone.guard():
        alone.together(lambda: {}["a"])
    with joined() as processes:
        assert processes.size == 1 and not torch.distributed.is_initialized()


def test_an_environment_that_does_not_say_which_process_this_is_is_refused_in_one_line(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with (
        pytest.raises(
            ValueError,
            match="^WORLD_SIZE is set but not RANK, .*; start several processes with torchrun$",
        ),
        joined(),
    ):
        pass


def test_sums_and_values_are_those_of_all_processes(tmp_path):
    def work(rank):
        with joined() as processes:
            total = processes.sum(rank, 2**53 - 1 if rank else 1)
            values = [processes.together(lambda: rank), processes.on_first(lambda: {"from": rank})]
            print(
                json.dumps(
                    [total, processes.gather(f"p{rank}"), values, processes.size, processes.first]
                )
            )

    ended = run_processes(3, work, tmp_path)
    for rank, each in enumerate(ended):
        expected = [[3, float(2**54 - 1)], ["p0", "p1", "p2"], [rank, {"from": 0}], 3, rank == 0]
        assert (each.code, json.loads(each.out), each.err) == (0, expected, ""), rank


ERRORS = {
    "one": {1: ValueError("cannot read image a.png")},
    "two": {
        2: OSError(errno.ENOSPC, "No space left on device", "last.pt"),
        1: ValueError("second"),
    },
    "memory": {1: torch.OutOfMemoryError("CUDA out of memory")},
    "interrupted": {0: Interrupted(), 2: ValueError("the error counts")},
}


@pytest.mark.parametrize(
    ("case", "code", "line"),
    [
        ("one", 2, "error: cannot read image a.png (process 1 on "),
        ("two", 2, "error: second (process 1 on "),
        ("memory", 3, "error: CUDA out of memory (process 1 on "),
        ("interrupted", 2, "error: the error counts (process 2 on "),
    ],
)
def test_an_error_of_one_process_is_raised_on_all_and_told_once(tmp_path, case, code, line):
    def work(rank):
        def fail():
            if rank in ERRORS[case]:
                raise ERRORS[case][rank]

        def tool():
            with joined() as processes, processes.guard():
                processes.together(fail)
                raise AssertionError("goes on alone")

        return run_tool(tool, several=True)

    ended = run_processes(3, work, tmp_path)
    assert [each.code for each in ended] == [code] * 3
    assert ended[0].err.startswith(line) and ended[0].err.count("\n") == 1
    assert [each.err for each in ended[1:]] == ["", ""]


def test_processes_with_other_images_or_classes_are_refused_on_all(tmp_path):
    def work(rank):
        def tool():
            with joined() as processes:
                processes.check_same({"classes": ["a", "é\udcff"], "training images": ["/0", "/1"]})
                images = ["/0", "/3"] if rank == 2 else ["/0", "/1", "/2"]
                processes.check_same({"classes": ["a"], "training images": images})

        return run_tool(tool, several=True)

    ended = run_processes(3, work, tmp_path)
    assert [each.code for each in ended] == [2] * 3
    assert re.fullmatch(
        r"error: process 2 on \S+ has 2 training images, the first process 3; the first that "
        r"differs: '/3' for '/1'; wanted the same data on every machine\n",
        ended[0].err,
    )


def test_what_only_the_first_process_does_fails_on_all(tmp_path):
    def work(rank):
        def fail():
            assert rank == 0
            raise OSError(errno.EACCES, "Permission denied", "run")

        def tool():
            with joined() as processes:
                processes.on_first(fail)

        return run_tool(tool, several=True)

    ended = run_processes(2, work, tmp_path)
    assert [(each.code, each.err) for each in ended] == [
        (2, "error: run: Permission denied\n"),
        (2, ""),
    ]


@pytest.mark.parametrize("late", [0, 2])
def test_a_process_that_ends_before_it_has_joined_is_named(tmp_path, late):

    def work(rank):
        def tool():
            with joined(replace(QUICK, start=1.0)):
                raise AssertionError("goes on without one")

        return 9 if rank == late else run_tool(tool, several=True)

    ended = run_processes(3, work, tmp_path)
    others = [each for rank, each in enumerate(ended) if rank != late]
    assert [each.code for each in others] == [4, 4]
    line = f"error: process {late} of 3 did not start within 1 s of the others"
    assert re.findall("^error: .*", others[0].err, re.MULTILINE) == [line]
    assert "error: " not in others[1].err


def test_sigterm_ends_a_process_that_waits_for_one_that_does_not_join(tmp_path):
    """``torchrun`` sends it as soon as one has died; nobody waits for the 30 s until it kills."""

    def work(rank):
        if rank == 1:
            time.sleep(60)
        (tmp_path / "ready").touch()
        with joined(replace(QUICK, start=10.0)):
            raise AssertionError("goes on without one")

    def meanwhile(processes):
        wait_for(tmp_path / "ready")
        time.sleep(1.0)  # by then it waits for the other one
        os.kill(processes[0].pid, signal.SIGTERM)
        processes[0].join(300)
        os.kill(processes[1].pid, signal.SIGKILL)

    first, _ = run_processes(2, work, tmp_path, meanwhile=meanwhile)
    assert (first.code, first.err) == (-signal.SIGTERM, "")


def test_processes_whose_store_nobody_serves_say_so(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))

        def work(rank):
            def tool():
                os.environ["MASTER_PORT"] = str(free.getsockname()[1])
                with joined(replace(QUICK, start=1.0)):
                    raise AssertionError("goes on alone")

            return run_tool(tool, several=True)

        ended = run_processes(2, work, tmp_path)
    assert [each.code for each in ended] == [2, 2] and "error: " not in ended[1].err
    said = re.findall("^error: .*", ended[0].err, re.MULTILINE)
    assert len(said) == 1
    assert said[0].startswith("error: torchrun or the first process does not answer at 127.0.0.1:")
    assert ended[0].err.count("\n") == 1 and "refused; start torchrun on each machine" in said[0]


def wait_for(path) -> None:
    while not path.exists():
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("dead", "signal_number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)]
)
def test_a_process_that_dies_or_is_stopped_ends_the_others_with_the_reason(
    tmp_path, dead, signal_number
):
    """A stopped process keeps its connections, as one whose machine is cut off does: only the
    watchdog notices.
    """

    def work(rank):
        def tool():
            with (
                joined(QUICK) as processes,
                processes.guard(lambda verdict: print("kept", verdict.reason, flush=True)),
            ):
                processes.sum(1)
                (tmp_path / f"ready{rank}").touch()
                if rank == dead:
                    time.sleep(60)
                processes.sum(1)

        return run_tool(tool, several=True)

    def meanwhile(processes):
        for rank in range(3):
            wait_for(tmp_path / f"ready{rank}")
        os.kill(processes[dead].pid, signal_number)
        living = [process for rank, process in enumerate(processes) if rank != dead]
        for process in living:
            process.join(300)
        os.kill(processes[dead].pid, signal.SIGKILL)

    ended = run_processes(3, work, tmp_path, meanwhile=meanwhile)
    living = [each for rank, each in enumerate(ended) if rank != dead]
    assert [each.code for each in living] == [4, 4]
    said = (
        re.escape(f"error: process {dead} on {socket.gethostname()} has not answered for ")
        + r"\d+ s\n"
    )
    assert re.fullmatch(said, living[0].err) and living[1].err == ""
    if signal_number == signal.SIGSTOP:
        assert living[0].out.startswith(f"kept process {dead} on")


def serve(path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    path.with_suffix(".tmp").write_text(str(store.port))
    path.with_suffix(".tmp").rename(path)
    time.sleep(120)


@pytest.mark.parametrize(
    ("signal_number", "what"), [(signal.SIGSTOP, "does not answer"), (signal.SIGKILL, "has ended")]
)
@pytest.mark.parametrize("raises", [False, True])
def test_a_store_that_stands_still_or_ends_ends_all_processes(
    tmp_path, signal_number, what, raises
):
    """It is served by ``torchrun`` of the first machine; one that is cut off answers as little as
    one that is stopped.
    """
    server = multiprocessing.get_context("fork").Process(target=serve, args=(tmp_path / "port",))
    server.start()
    wait_for(tmp_path / "port")

    def work(rank):
        os.environ["MASTER_PORT"] = (tmp_path / "port").read_text()

        def tool():
            with (
                joined(QUICK) as processes,
                processes.guard(lambda verdict: print("kept", verdict.reason, flush=True)),
            ):
                processes.sum(1)
                (tmp_path / f"ready{rank}").touch()
                if raises:
                    wait_for(tmp_path / "stopped")
                    raise OutOfMemory("out of memory")
                if rank == 1:
                    time.sleep(60)
                processes.sum(1)

        return run_tool(tool, several=True)

    def meanwhile(processes):
        for rank in range(2):
            wait_for(tmp_path / f"ready{rank}")
        os.kill(server.pid, signal_number)
        (tmp_path / "stopped").touch()
        for process in processes:
            process.join(300)

    try:
        ended = run_processes(2, work, tmp_path, meanwhile=meanwhile)
    finally:
        server.kill()
        server.join()
    reason = f"torchrun or the first process, on {socket.gethostname()}, {what}"
    said = [
        re.findall("^error: .*", each.err, re.MULTILINE) for each in ended
    ]  # between warnings of the store's client
    if raises:  # each may have a reason of its own
        assert {each.code for each in ended} <= {3, 4} and len(said[0]) <= 1 and len(said[1]) <= 1
    else:
        assert [each.code for each in ended] == [4, 4] and said == [[], [f"error: {reason}"]]
        assert ended[1].out == f"kept {reason}\n"


def test_at_the_end_processes_that_are_stuck_are_waited_for_no_longer_than_a_minute(
    tmp_path,
):

    def work(rank):
        with joined(replace(QUICK, leave=1.0)) as processes:
            processes.sum(1)
            if rank == 1:
                wait_for(tmp_path / "ended")
        (tmp_path / "ended").touch()

    ended = run_processes(2, work, tmp_path)
    assert [each.code for each in ended] == [0, 0] and ended[1].err == ""
    assert "error: " not in ended[0].err  # but perhaps a warning of the store's client


def test_a_process_without_memory_ends_the_others_that_wait_for_it_in_a_message(tmp_path):
    def work(rank):
        def tool():
            with (
                joined(QUICK) as processes,
                processes.guard(lambda verdict: print(verdict.kind, flush=True)),
            ):
                processes.sum(1)
                if rank == 1:
                    raise OutOfMemory("out of memory at batch 7")
                processes.sum(1)

        return run_tool(tool, several=True)

    ended = run_processes(3, work, tmp_path)
    assert [each.code for each in ended] == [3, 3, 3]
    assert ended[0].err.startswith("error: out of memory at batch 7 (process 1 on ")
    assert ended[1].err == ended[2].err == ""


def test_an_unforeseen_error_shows_its_traceback_and_ends_the_others(tmp_path):
    def work(rank):
        def tool():
            with joined(QUICK) as processes, processes.guard():
                if rank == 1:
                    raise TypeError("a mistake")
                processes.sum(1)

        return run_tool(tool, several=True)

    first, second = run_processes(2, work, tmp_path)
    assert (first.code, second.code) == (4, 1) and "Traceback" in second.err
    assert first.err.startswith("error: TypeError: a mistake (process 1 on ")


def test_ends_that_all_processes_know_of_wait_for_the_slowest_and_are_no_deaths(tmp_path):
    def work(rank):
        def tool():
            with joined(QUICK) as processes, processes.guard():
                if rank == 0:
                    time.sleep(3)
                (tmp_path / f"ended{rank}").touch()
                raise NonFinite("the loss was not finite")

        code = run_tool(tool, several=True)
        print(sorted(path.name for path in tmp_path.glob("ended*")))
        return code

    ended = run_processes(2, work, tmp_path)
    assert [each.code for each in ended] == [1, 1]
    assert ended[0].err == "error: the loss was not finite\n"
    assert ended[1].err == "" and ended[1].out == "['ended0', 'ended1']\n"


def test_an_interruption_of_one_process_alone_ends_the_others(tmp_path):
    def work(rank):
        def tool():
            with joined(QUICK) as processes, processes.guard():
                if rank == 1:
                    raise KeyboardInterrupt
                processes.sum(1)

        return run_tool(tool, several=True)

    first, second = run_processes(2, work, tmp_path)
    assert (first.code, second.code) == (4, 130)
    assert first.err == f"error: interrupted (process 1 on {socket.gethostname()})\n"
    assert second.err == ""


def test_a_job_that_is_stopped_for_a_while_and_goes_on_has_no_dead_processes(tmp_path):
    def work(rank):
        with joined(replace(QUICK, doubt=60.0)) as processes, processes.guard():
            processes.sum(1)
            (tmp_path / f"ready{rank}").touch()
            time.sleep(1.5)
            processes.sum(1)

    def meanwhile(processes):
        for rank in range(2):
            wait_for(tmp_path / f"ready{rank}")
        os.kill(processes[1].pid, signal.SIGSTOP)
        time.sleep(0.4)  # the first one notes the last sign of the second one
        os.kill(processes[0].pid, signal.SIGSTOP)
        time.sleep(QUICK.silence + 0.5)
        os.kill(processes[0].pid, signal.SIGCONT)
        time.sleep(0.5)
        os.kill(processes[1].pid, signal.SIGCONT)

    ended = run_processes(2, work, tmp_path, meanwhile=meanwhile)
    assert [(each.code, each.err) for each in ended] == [(0, ""), (0, "")]
