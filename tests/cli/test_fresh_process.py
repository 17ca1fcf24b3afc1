"""Forks of a process that has imported all: what they give back, and how they and it end."""

import os
import signal
import time

import pytest
import torch

from visionattn.cli.ends import Failed
from visionattn.cli.fresh_process import Forks, ask

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


def whoami(words):
    print("a line that is no answer")
    return [os.getpid(), os.getppid(), os.environ.get("MALLOC_MMAP_THRESHOLD_"), words]


def run_out(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise {"full": MemoryError(), "wrong": RuntimeError("shapes disagree")}[how]


def take_the_other_down():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


@pytest.fixture
def forks(tmp_path):
    with Forks(tmp_path / "log", returning=True) as run:
        yield run


def test_each_question_has_a_fork_of_its_own_and_all_of_them_one_process(forks):
    first, second = (ask(whoami, {"words": word}, "who", forks) for word in ("böse", "b"))
    assert first[0] != second[0] and first[1] == second[1] != os.getpid()
    assert first[2:] == ["65536", "böse"] and second[2:] == ["65536", "b"]


def test_the_end_of_a_fork_is_an_error_here_and_the_next_question_is_answered(forks):
    with pytest.raises(torch.OutOfMemoryError, match="^77 px does not fit into memory$"):
        ask(run_out, {"how": "full"}, "77 px", forks)
    with pytest.raises(Failed, match="^RuntimeError: shapes disagree$"):
        ask(run_out, {"how": "wrong"}, "77 px", forks)
    assert forks.log.read_text().splitlines()[-1] == "RuntimeError: shapes disagree"
    with pytest.raises(Failed, match="^killed by signal 9$"):
        ask(run_out, {"how": "kill"}, "77 px", forks)
    assert not forks.ended and ask(whoami, {"words": 3}, "who", forks)[3] == 3


def test_a_process_that_forks_no_more_is_named_with_its_last_words(tmp_path):
    log = tmp_path / "log"
    with Forks(log) as run:
        assert ask(whoami, {"words": 1}, "who", run)[2] is None
        with pytest.raises(Failed, match=f"^the process that measures ended: .*; see {log}$"):
            ask(take_the_other_down, {}, "who", run)
        assert run.ended
        with pytest.raises(Failed, match="the process that measures ended"):
            ask(whoami, {"words": 1}, "who", run)


def test_descriptors_that_are_passed_on_are_held_until_the_end(tmp_path):
    reader, writer = os.pipe()
    with Forks(tmp_path / "log", pass_fds=[writer]) as run:
        os.close(writer)
        assert ask(whoami, {"words": 1}, "who", run)
        os.set_blocking(reader, False)
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_process_of_its_own_is_another_one_each_time():
    first, second = (ask(whoami, {"words": None}, "who") for _ in range(2))
    assert first[0] != second[0] and first[1] == second[1] == os.getpid()
