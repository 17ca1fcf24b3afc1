"""How the package's commands are called: as one types them here, and as their help names them.

Owns the rule that every printed command keeps to: ``visionattn NAME``, and where that script is not
on the path, ``python -m visionattn NAME`` with the Python that runs.
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

PACKAGE = "visionattn"


def typed(name: str, *words: str) -> str:
    """A line that works where it is pasted in this folder: the command ``name`` with its words."""
    return shlex.join([*_caller(), name, *words])


def _caller() -> list[str]:
    """The script that was installed beside this Python, or this Python with the package."""
    script = shutil.which(PACKAGE)
    if script and Path(script).parent == Path(sys.executable).parent:
        return [PACKAGE]
    return [python_command(), "-m", PACKAGE]


def started(name: str) -> tuple[str, ...]:
    """The words that start the command ``name`` as a process of its own, from any folder whose
    Python finds the package.
    """
    return (sys.executable, "-m", PACKAGE, name)


def program(name: str) -> str:
    """What the help of the command ``name`` calls it: the file of ``tools/`` that was started, or
    ``visionattn NAME``.
    """
    file = Path(sys.argv[0])
    return file.name if file.parent.name == "tools" else f"{PACKAGE} {name}"


def python_command() -> str:
    """How to call this Python from the current folder, as short as it works."""
    return "python" if shutil.which("python") == sys.executable else from_here(sys.executable)


def from_here(path: str | Path) -> str:
    """A path as one would type it: relative to the current folder where it lies within it."""
    path = os.path.abspath(path)
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
