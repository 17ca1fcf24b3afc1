"""Ctrl-C and SIGTERM end a tool whatever it computes: one operation here takes hours."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.helpers.long_operation import FORK, PATIENCE, ended, one_long_operation
from visionattn.cli.exit_codes import run_tool
from visionattn.cli.interruption import GRACE, Interrupted, Interruption, undone_at_end

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_tool_ends_within_one_operation_and_undoes_what_is_half_done(tmp_path, signum):
    begun, half = FORK.Event(), tmp_path / "half"
    half.write_text("half a file")

    def work() -> None:
        with undone_at_end(half.unlink):
            begun.set()
            one_long_operation()

    assert ended(work, signum, begun, tmp_path / "errors") == (130, "interrupted\n")
    assert not half.exists()


@pytest.mark.parametrize("long", [False, True])
def test_a_process_that_ends_between_two_items_takes_its_time_and_another_one_does_not(
    tmp_path, long
):
    begun, log = FORK.Event(), tmp_path / "log"

    def say(word: str) -> int:
        with open(log, "a") as file:
            file.write(word + "\n")
        return 7

    def items():
        begun.set()
        while True:
            time.sleep(0.1)
            yield None

    def work() -> None:
        with Interruption(lambda: say("given up")) as interruption:
            try:
                for _ in interruption.watch(items()):
                    one_long_operation() if long else None
            except Interrupted:
                time.sleep(GRACE + 1)
                say("saved")

    code, _ = ended(work, signal.SIGINT, begun, tmp_path / "errors")
    assert (code, log.read_text()) == ((7, "given up\n") if long else (0, "saved\n"))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "words", [("-m", "visionattn", "train"), ("tools/train.py",)], ids=["module", "script"]
)
def test_a_command_that_imports_its_libraries_ends_with_one_line(signum, words):
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    maps = Path(f"/proc/{process.pid}/maps")
    while b"libtorch" not in maps.read_bytes() and process.poll() is None:
        time.sleep(0.001)  # libraries are imported after the handlers
    process.send_signal(signum)
    out, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, errors) == (130, b"", b"interrupted\n")


def test_handlers_and_threads_are_those_of_before_once_a_tool_has_ended():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads = threading.active_count()
    assert run_tool(lambda: None) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert threading.active_count() == threads and signal.set_wakeup_fd(-1) == -1
