"""A cluster of Ray with two simulated nodes on this machine, in a process of its own: it prints the
address, kills the second node with all its processes at a line ``kill``, and ends where its
standard input does.

The tests' own process imports no Ray.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
NODE = {"num_cpus": 1, "object_store_memory": 75 * 2**20, "include_dashboard": False}


def environment() -> dict[str, str]:
    """What processes of Ray inherit: this package, one thread, and their share of the machine."""
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
    own |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return kept | own | {"PYTHONPATH": paths}


class Nodes:
    """The cluster as a test has it."""

    def __init__(self, process: subprocess.Popen):
        self._process = process
        self.address = self._answer()

    def _answer(self) -> str:
        line = self._process.stdout.readline().strip()
        assert line.startswith("ray: "), line
        return line.removeprefix("ray: ")

    def kill_second(self) -> None:
        self._process.stdin.write("kill\n")
        self._process.stdin.flush()
        assert self._answer() == "killed"


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Start two nodes with a processor each."""
    command = [sys.executable, "-W", "ignore", __file__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(), **pipes) as process:
        yield Nodes(process)
        process.stdin.close()
        assert process.wait(60) == 0


def below(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, open_ = [], [pid]
    while open_:
        children = parents.get(open_.pop(), [])
        found += children
        open_ += children
    return found


def main() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    second = cluster.add_node(**NODE)
    print(f"ray: {cluster.address}", flush=True)
    for line in sys.stdin:
        assert line == "kill\n"
        raylets = [found.process.pid for found in second.all_processes["raylet"]]
        for pid in [*raylets, *(child for raylet in raylets for child in below(raylet))]:
            os.kill(pid, signal.SIGKILL)
        cluster.remove_node(second, allow_graceful=False)
        print("ray: killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
