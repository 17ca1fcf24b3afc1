"""Return the package's commands as text: for users to paste, for new processes, and for the help.

Every printed command is ``visionattn NAME``. Where that script is not on the path, it is
``python -m visionattn NAME`` with the running Python.
"""

import shlex
import shutil
import sys
from pathlib import Path

PACKAGE = "visionattn"


def typed(name: str, *words: str) -> str:
    """Return a shell line that runs the command ``name`` with ``words`` in the current folder."""
    return shlex.join([*_caller(), name, *words])


def _caller() -> list[str]:
    """Return the script in this Python's folder, or else a call of this Python with the package."""
    script = shutil.which(PACKAGE)
    if script and Path(script).parent == Path(sys.executable).parent:
        return [PACKAGE]
    python = "python" if shutil.which("python") == sys.executable else sys.executable
    return [python, "-m", PACKAGE]


def started(name: str) -> tuple[str, ...]:
    """Return the words that start the command ``name`` as a separate process.

    They work in any folder, provided that Python finds the package.
    """
    return (sys.executable, "-m", PACKAGE, name)


def program(name: str) -> str:
    """Return the program name for the help of the command ``name``: the file of ``tools/`` that was
    started, or ``visionattn NAME``.
    """
    file = Path(sys.argv[0])
    return file.name if file.parent.name == "tools" else f"{PACKAGE} {name}"
