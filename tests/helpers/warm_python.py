"""A Python that has imported the libraries already: torch and timm take 4 seconds of a processor,
and some tests start a dozen processes.

``python`` in the folder of ``serving()`` is called as any Python is. It asks a server, which
has imported libraries and nothing of this package, for a fork: that one imports the package anew
and runs the words as ``__main__``, with the caller's folder, environment and streams. Signals reach
it, its end is the caller's, and it is killed with its caller.
"""

import atexit
import contextlib
import json
import os
import random
import runpy
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

LIBRARIES = "albumentations jinja2 pydantic matplotlib.pyplot rich safetensors.torch"
LIBRARIES += " sklearn timm torch torch.utils.tensorboard torchvision"
PASSED_ON = signal.SIGINT, signal.SIGTERM


@contextlib.contextmanager
def serving() -> Iterator[Path]:
    """Start a server that ends with its input, and give the Python that asks it."""
    with tempfile.TemporaryDirectory(prefix="warm") as folder:
        place, python = Path(folder) / "socket", Path(folder) / "python"
        words = [sys.executable, "-IS", __file__, "ask", str(place)]
        python.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        python.chmod(0o755)
        # Memory that is freed goes back to the system, as processes that measure it ask for.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": ""}
        command = [sys.executable, __file__, "serve", str(place), str(python)]
        streams = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with subprocess.Popen(command, env=environment, **streams) as server:
            assert server.stdout.readline() == b"ready\n", "the server of processes has ended"
            yield python


def use(python: Path, patch: "pytest.MonkeyPatch") -> None:
    """Let this Python be ``python``, ``sys.executable`` and that of the package's own processes."""
    from visionattn.cli import fresh_process

    patch.setenv("PATH", str(python.parent), prepend=os.pathsep)
    patch.setattr(sys, "executable", str(python))
    patch.setattr(fresh_process, "COMMAND", (str(python), *fresh_process.COMMAND[1:]))


def ask(place: str, words: list[str]) -> int:
    """Let the server run these words, and end as they end."""
    told = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    text = json.dumps(told).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(place)
        socket.send_fds(server, [struct.pack("!I", len(text))], [0, 1, 2])
        server.sendall(text)
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        code = struct.unpack("!i", server.recv(4))[0]
    if code < 0:
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def serve(place: str, python: str) -> None:
    """Answer each caller by a fork that keeps one of its own, until its input ends."""
    for name in LIBRARIES.split():
        __import__(name)
    signal.signal(signal.SIGCHLD, _reap)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            caller, _ = listener.accept()
            if not os.fork():
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _keep(caller, python)
            caller.close()


def _reap(number: int, frame: object) -> None:
    """Wait for those that have answered, so that their time counts as that of the tests."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _keep(caller: socket.socket, python: str) -> None:
    """Run what the caller asks for in a fork; pass signals on, and tell the caller how it ended."""
    length, streams, _, _ = socket.recv_fds(caller, 4, 3)
    told = json.loads(caller.recv(struct.unpack("!I", length)[0], socket.MSG_WAITALL))
    child = os.fork()
    if not child:
        caller.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os._exit(_run(told["words"], told["folder"], told["environment"], python) & 255)

    def listen() -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            while numbers := caller.recv(1):
                os.kill(child, numbers[0])
            os.kill(child, signal.SIGKILL)  # the caller is gone

    threading.Thread(target=listen, daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        caller.sendall(struct.pack("!i", code))
    os._exit(0)


def _run(words: list[str], folder: str, environment: dict[str, str], python: str) -> int:
    """Run a module, code or a file as a Python that has just started, and return its exit code."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = python  # for processes that this one starts
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    random.seed()
    sys.modules["numpy"].random.seed()
    while words[0] in ("-u", "-B"):
        del words[0]
    kind = words.pop(0)
    what = words.pop(0) if kind in ("-m", "-c") else kind
    sys.argv = [kind if kind == "-c" else what, *words]
    home = str(Path(what).resolve().parent) if what is kind else folder if kind == "-m" else ""
    paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [home, *paths, *sys.path[1:]]
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif kind == "-c":
            exec(what, {"__name__": "__main__"})
        else:
            runpy.run_path(what, run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # as Python does with what nobody catches
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    role, place, *words = sys.argv[1:]
    sys.exit(ask(place, words) if role == "ask" else serve(place, *words))
