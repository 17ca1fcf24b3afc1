"""Tools within one operation that takes hours, and how they end on a signal."""

import hashlib
import multiprocessing
import os
import sys
import time

from visionattn.cli.exit_codes import run_tool
from visionattn.cli.interruption import GRACE

FORK = multiprocessing.get_context("fork")
PATIENCE = 60.0
"""Seconds after which a process counts as not begun."""
SLACK = 20.0
"""Seconds that a machine with much other work may take beyond ``GRACE``; the operation itself takes
hours.
"""


def one_long_operation() -> None:
    """Compute what Python's handlers of signals cannot interrupt."""
    hashlib.pbkdf2_hmac("sha512", b"", b"", 2**31 - 1)


def ended(work, signum: int, begun, errors) -> tuple[int, str]:
    """Run ``work`` as a tool, send a signal once ``begun`` is set, and return the exit code and
    what was said.
    """

    def tool() -> None:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  pytest has replaced it
        code = run_tool(work)
        sys.stderr.flush()
        os._exit(code)

    process = FORK.Process(target=tool)
    process.start()
    assert begun.wait(PATIENCE)
    time.sleep(0.05)
    os.kill(process.pid, signum)
    process.join(GRACE + SLACK)
    alive = process.is_alive()
    process.kill()
    assert not alive, "it did not end"
    return process.exitcode, errors.read_text()
