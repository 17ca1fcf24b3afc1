"""Ctrl-C and SIGTERM while a command imports its libraries, which takes seconds: one line.

It is imported before them, acts for this package's commands alone, and ``run_tool`` takes over.
"""

import os
import signal
import sys
import threading
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def is_command() -> bool:
    """Tell whether this process is a command of the package: its script, ``python -m``, or a file
    of ``tools/``; not one of several that ``torchrun`` has started.
    """
    script, words = Path(sys.argv[0] if sys.argv else ""), sys.orig_argv
    named = script.name == PACKAGE.name or script.absolute().parent == PACKAGE.parent / "tools"
    if str(script) == "-m":  # so it is called while the package is imported
        named = words[words.index("-m") + 1 :][:1] == [PACKAGE.name]
    return named and os.environ.get("WORLD_SIZE", "1") == "1"


def _end(signum: int, frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


if is_command() and threading.current_thread() is threading.main_thread():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
