"""Processes as ``torchrun`` would start them, forked from this one, which has imported everything
already.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from visionattn.cli.exit_codes import run_tool
from visionattn.training.config import TrainConfig
from visionattn.training.distributed import joined
from visionattn.training.engine import train


@dataclass
class Ended:
    """How a process ended."""

    code: int
    """Its exit code, negative for a signal."""
    out: str
    """Its standard output."""
    err: str
    """Its standard error."""


def run_processes(
    size: int,
    work: Callable[[int], Any],
    folder: Path,
    *,
    limit_s: float = 300,
    meanwhile: Callable[[list[Any]], None] = lambda processes: None,
) -> list[Ended]:
    """Run ``work(rank)`` in each of ``size`` processes; what it returns is the exit code.

    Args:
        size: how many.
        work: called with the environment that ``torchrun`` sets, and with streams that go to files.
        folder: for the streams.
        limit_s: seconds after which the processes are killed, which fails the test.
        meanwhile: called with the processes once they are started.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    server = context.Process(
        target=_serve, args=(there,), daemon=True
    )  # its threads must not be those of a process that forks
    server.start()
    port = here.recv()
    folder.mkdir(parents=True, exist_ok=True)
    processes = [
        context.Process(target=_run, args=(rank, size, port, work, folder)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        meanwhile(processes)
        for process in processes:
            process.join(limit_s)
        assert all(process.exitcode is not None for process in processes), (
            "a process waits for another one"
        )
    finally:
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
        server.kill()
        server.join()
    read = [
        [(folder / f"{stream}{rank}").read_text() for stream in ("out", "err")]
        for rank in range(size)
    ]
    return [Ended(process.exitcode, *texts) for process, texts in zip(processes, read, strict=True)]


def training(config: TrainConfig) -> Callable[[int], int]:
    """The work of each process of a training."""

    def tool():
        with joined() as processes:
            train(config, processes=processes)

    return lambda rank: run_tool(tool, several=True)


def train_on(size: int, config: TrainConfig, *, code: int = 0) -> list[Ended]:
    """Train on so many processes, forked also where there is but one; the first alone speaks."""
    ended = run_processes(size, training(config), Path(config.output) / "streams")
    assert [each.code for each in ended] == [code] * size, "".join(each.err for each in ended)
    assert all(each.out == each.err == "" for each in ended[1:])
    return ended


def _serve(answer: Connection) -> None:
    """Serve the store, as ``torchrun`` does, until killed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answer.send(store.port)
    signal.pause()


def _run(rank: int, size: int, port: int, work: Callable[[int], Any], folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= dict(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True"
    )
    torch.set_num_threads(1)
    code = work(rank)
    sys.stdout.flush()
    sys.exit(code)
