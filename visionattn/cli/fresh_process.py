"""Work in a fresh process, where nothing freed earlier hides an allocation, and which may run out
of memory.

This module owns what such a process is given and what its end means.
``python -m visionattn.cli.fresh_process`` is that process: it reads from standard input which
function is called with what. With ``--forks`` it answers a line for each line that it reads, in a
fork of itself.
"""

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from visionattn.cli.ends import Failed, is_out_of_memory
from visionattn.cli.files import added_to

OUT_OF_MEMORY = 3
"""Exit code of a process whose work does not fit."""
PACKAGE = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "visionattn.cli.fresh_process")
FORKS = "--forks"
KILLED = 9
"""The number of SIGKILL, which Windows lacks."""
Done = subprocess.CompletedProcess


def memory_kills() -> int:
    """Count the processes that the system ended for want of memory: those of this control group, or
    all where groups are not counted, or 0 where nothing is.

    A process that ended by SIGKILL ran out of memory where the count has grown since it began.
    """
    group = Path("/proc/self/cgroup")
    name = group.read_text().strip().rpartition(":")[2].lstrip("/") if group.exists() else ""
    for counts in (Path("/sys/fs/cgroup") / name / "memory.events", Path("/proc/vmstat")):
        try:
            words = counts.read_text().split()
            return int(words[words.index("oom_kill") + 1])
        except (OSError, ValueError):
            continue
    return 0


def environment(*, returning: bool = False) -> dict[str, str]:
    """Return the environment of this process, with the package found wherever it is started.

    Args:
        returning: freed memory goes back to the system at once, which makes the level of memory
            exact and costs time.
    """
    paths = [str(PACKAGE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return found | ({"MALLOC_MMAP_THRESHOLD_": "65536"} if returning else {})


def ended_for_memory(code: int, kills: int) -> bool:
    """Tell whether the system ended a process for want of memory.

    Args:
        code: of its end; below 0 the signal that killed it.
        kills: what ``memory_kills`` said before it began.
    """
    return code == -KILLED and memory_kills() > kills


def run_alone(told: str) -> Done:
    """Run a process that imports all anew, so that even the level before the work is its own."""
    options = dict(capture_output=True, text=True, env=environment(returning=True))
    return subprocess.run(COMMAND, input=told, **options)


class Forks:
    """Run forks of a process that has imported all and computed nothing: no memory was freed and no
    thread begun. It is a context, at whose end that process ends.

    A fork shares the pages of libraries, which its level of memory counts only once it uses them.

    Args:
        log: file that takes what the processes write to standard error.
        returning: as ``environment`` takes it.
        pass_fds: file descriptors that the processes hold.
    """

    def __init__(self, log: Path, *, returning: bool = False, pass_fds: Sequence[int] = ()):
        self.log = log
        with added_to(log) as errors:
            self._process = subprocess.Popen(
                [*COMMAND, FORKS],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(returning=returning),
                pass_fds=pass_fds,
            )

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()

    @property
    def ended(self) -> bool:
        """Tell whether the process that forks has ended."""
        return self._process.poll() is not None

    def __call__(self, told: str) -> Done:
        """Run a fork.

        Raises:
            Failed: the process that forks has ended.
        """
        begin = self.log.stat().st_size
        try:
            self._process.stdin.write(told + "\n")
            self._process.stdin.flush()
            return Done([], *json.loads(self._process.stdout.readline()))
        except (BrokenPipeError, ValueError) as error:  # the latter of an empty answer
            said = self.log.read_bytes()[begin:].decode(errors="replace").strip()
            words = said.splitlines()[-1] if said else "without a word"
            self._process.kill()
            self._process.wait()
            raise Failed(f"the process that measures ended: {words}; see {self.log}") from error


def ask(
    function: Callable[..., Any],
    given: dict[str, Any],
    what: str,
    run: Callable[[str], Done] = run_alone,
) -> Any:
    """Return what ``function(**given)`` returns in a process of its own.

    Args:
        function: a function of a module of the package that takes and returns what JSON holds.
        given: its arguments.
        what: what is measured, for the error.
        run: ``run_alone`` or ``Forks``.

    Raises:
        torch.OutOfMemoryError: it does not fit, or the system ended the process for want of memory.
        Failed: the process failed in another way; the text is the last line that it wrote, or the
            signal that ended it.
    """
    named = {"module": function.__module__, "function": function.__name__}
    kills, done = memory_kills(), run(json.dumps(named | {"given": given}))
    full = done.returncode == OUT_OF_MEMORY or (done.returncode and "bad_alloc" in done.stderr)
    if full or ended_for_memory(done.returncode, kills):
        raise torch.OutOfMemoryError(f"{what} does not fit into memory")
    if done.returncode < 0:
        raise Failed(f"killed by signal {-done.returncode}")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [
            f"the process ended with code {done.returncode}"
        ]
        raise Failed(lines[-1][:160])
    return json.loads(done.stdout.splitlines()[-1])


def first_to_end() -> None:
    """Let this process be the first that the system ends when it runs out of memory."""
    if Path("/proc/self/oom_score_adj").exists():
        Path("/proc/self/oom_score_adj").write_text("1000")


def answer(told: str) -> int:
    """Print what the function that is asked for returns, and return the exit code."""
    first_to_end()
    request = json.loads(told)
    try:
        function = getattr(import_module(request["module"]), request["function"])
        print(json.dumps(function(**request["given"])))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return OUT_OF_MEMORY
    return 0


def answer_in_fork(told: str) -> list:
    """Return the exit code of a fork that answers, what it printed and what it said of errors."""
    import_module(json.loads(told)["module"])  # once, for this fork and all that follow
    with TemporaryFile() as out, TemporaryFile() as errors:

        def work() -> None:
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            sys.exit(answer(told))

        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join()
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    sys.stderr.write(texts[1])
    sys.stderr.flush()
    return [process.exitcode, *texts]


def main(argv: Sequence[str]) -> int:
    """Answer standard input, or each line of it in a fork."""
    if argv != [FORKS]:
        return answer(sys.stdin.read())
    for told in sys.stdin:
        print(json.dumps(answer_in_fork(told)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
