"""Work in a process of its own: what it gives back, and how its end is told."""

import os
import signal

import pytest
import torch

from visionattn.cli.ends import Failed
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
