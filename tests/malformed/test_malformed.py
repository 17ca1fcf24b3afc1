"""Some malformed inputs, and what ``python -m tests.malformed`` counts as a fault."""

import signal
import subprocess
import sys

import pytest

from tests.helpers.tools import ROOT
from tests.malformed.__main__ import all_cases
from tests.malformed.mutations import write
from tests.malformed.runner import Case, Result, run

SMOKE = (
    Case("a list", ("train", "--config", "odd.yaml"), write("odd.yaml", "epochs: [1]\n")),
    Case("no weights", ("validate", "--checkpoint", "a.pt"), write("a.pt", b"\x80\x04")),
    Case("no table", ("report", "a.csv", "--output", "page.html"), write("a.csv", b"\xff\xfe")),
    Case("no flag", ("features", "--no_such_flag", "1")),
)


def test_a_few_malformed_inputs_give_one_line_and_exit_code_2(tmp_path):
    for result in run(SMOKE, tmp_path):
        assert result.faults() == [], result


@pytest.mark.slow
def test_a_tenth_of_the_malformed_inputs_gives_one_line_and_exit_code_2():
    command = [sys.executable, "-m", "tests.malformed", "--every", "10", "--seconds", "300"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_many_cases_and_each_has_a_name_of_its_own():
    names = [case.name for case in all_cases()]
    assert len(names) > 1500 and len(set(names)) == len(names)


REFUSED = Case("one", ("train",))
GOES_ON = Case("two", ("report",), tolerated="1 run")


@pytest.mark.parametrize(
    "result, fault",
    [
        (Result(REFUSED, 2, "", "error: no\n", ()), None),
        (Result(REFUSED, -signal.SIGALRM, "", "", ()), "hangs"),
        (Result(REFUSED, 1, "", "Traceback ...\nKeyError: 'x'\n", ()), "traceback: KeyError"),
        (Result(REFUSED, 0, "", "", ()), "exit code 0, not 2"),
        (Result(REFUSED, 2, "", "note: a\nerror: no\n", ()), "not one line"),
        (Result(REFUSED, 2, "", f"error: {'x' * 600}\n", ()), "a line of 608 characters"),
        (Result(REFUSED, 2, "", "error: no\n", ("out",)), "left behind or changed: out"),
        (Result(GOES_ON, 0, "page: 1 run", "", ()), None),
        (Result(GOES_ON, 0, "page", "", ()), "does not say '1 run'"),
        (Result(GOES_ON, 2, "", "error: 1 run\n", ()), "exit code 2, not 0"),
    ],
)
def test_each_way_of_breaking_the_promise_is_a_fault(result, fault):
    found = result.faults()
    assert found == [] if fault is None else found[0].startswith(fault), found
