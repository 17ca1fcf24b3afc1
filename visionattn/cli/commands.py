"""How the package's commands are called: as one types them here, and as their help names them.

Every printed command follows the rule of this module: ``visionattn NAME``, and where that script is
not on the path, ``python -m visionattn NAME`` with the Python that runs.
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

PACKAGE = "visionattn"


def typed(name: str, *words: str) -> str:
    """Return a line that works when it is pasted in this folder: the command ``name`` and its
    words.
    """
    return shlex.join([*_caller(), name, *words])


def _caller() -> list[str]:
    """Return the script that was installed beside this Python, or this Python with the package."""
    script = shutil.which(PACKAGE)
    if script and Path(script).parent == Path(sys.executable).parent:
        return [PACKAGE]
    return [python_command(), "-m", PACKAGE]


def started(name: str) -> tuple[str, ...]:
    """Return the words that start the command ``name`` as a process of its own, from any folder
    whose Python finds the package.
    """
    return (sys.executable, "-m", PACKAGE, name)


def program(name: str) -> str:
    """Return what its help calls the command ``name``: the file of ``tools/`` that was started, or
    ``visionattn NAME``.
    """
    file = Path(sys.argv[0])
    return file.name if file.parent.name == "tools" else f"{PACKAGE} {name}"


def python_command() -> str:
    """Return the shortest call of this Python that works in the current folder."""
    return "python" if shutil.which("python") == sys.executable else from_here(sys.executable)


def from_here(path: str | Path) -> str:
    """Return a path as one would type it: relative where it lies in the current folder."""
    path = os.path.abspath(path)
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
