"""The processes of a run that ``torchrun`` has started: who they are, what each takes, and how they
end together.

Owns the process group, the division of batches, sums over all processes, and agreement on errors.
With one process there is no group, and everything here returns at once. Knows nothing of models and
steps; how a model is spread is the matter of ``parallel.py``, and how a process notices that
another one does not answer that of ``watchdog.py``.
"""

import atexit
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed
from torch.distributed.elastic.utils.store import barrier

from visionattn.cli.ends import (
    Failed,
    Interrupted,
    NonFinite,
    OutOfMemory,
    Stopped,
    is_out_of_memory,
)
from visionattn.cli.files import first_line
from visionattn.training.build import pick_device
from visionattn.training.watchdog import Verdict, Waits, Watchdog

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

WAITS = Waits()
SHARED = (ValueError, OSError, RuntimeError, OutOfMemory, Failed, Interrupted)
"""Errors of one process that ``together`` and ``on_first`` raise on all."""
SPOKEN = (ValueError, OSError, NonFinite, OutOfMemory, Failed, Stopped, KeyboardInterrupt)
"""Errors that a tool tells in a line; one process is enough for that."""


class Processes:
    """The processes of a run, seen from one of them.

    Args:
        rank: the number of this one.
        size: how many there are.
        local_rank: the number of this one on its machine.
        hosts: the machine of each.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, local_rank: int = 0, hosts: Sequence[str] = ("",)
    ):
        self.rank, self.size = rank, size
        self.local_rank, self.hosts = local_rank, list(hosts)
        self.watchdog: Watchdog | None = None
        self._agreed: BaseException | None = None

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """This process, for people."""
        return f"process {self.rank} on {socket.gethostname()}"

    def device(self, name: str) -> torch.device:
        """The device of this process: ``cpu``, or the GPU of its number.

        Raises:
            ValueError: there is no such device, or no GPU is left for this process.
        """
        if self.size == 1:
            return pick_device(name)
        if name.partition(":")[2]:
            raise ValueError(
                f"device {name} is one for all processes; say cuda, and each takes the GPU of its "
                f"number"
            )
        device = pick_device(name)
        if device.type != "cuda":
            return device
        found = torch.cuda.device_count()
        if self.local_rank >= found:
            raise ValueError(
                f"process {self.local_rank} of this machine has no GPU, there are {found}; "
                f"start torchrun with --nproc-per-node {found}"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def describe(self, device: torch.device, kind: str | None) -> str:
        """Where the run computes, for people."""
        if self.size == 1:
            return device.type
        machines = len(set(self.hosts))
        return f"{self.size} processes ({kind}), {device.type}" + (
            f", {machines} machines" if machines > 1 else ""
        )

    def sum(self, *values: float) -> list[float]:
        """The sum of each value over all processes, in float64."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(total)
        return total.tolist()

    def gather(self, value: Item) -> list[Item]:
        """What each process gives, in their order."""
        if self.size == 1:
            return [value]
        values = [value] * self.size
        distributed.all_gather_object(values, value)
        return values

    def together(self, work: Callable[[], Outcome]) -> Outcome:
        """Do work that may fail on one process alone, and that sends no messages; what one raises,
        all raise.

        Errors go before interruptions, and those of the first processes before others'.
        """
        if self.size == 1:
            return work()
        outcome, error = None, None
        try:
            outcome = work()
        except SHARED as own:
            error = own
        if self.sum(error is not None) == [0]:
            return outcome
        errors = [each for each in self.gather(self._portable(error)) if each is not None]
        chosen = min(errors, key=lambda each: isinstance(each, Interrupted))
        raise self.agree(chosen) from error

    def on_first(self, work: Callable[[], Outcome]) -> Outcome:
        """Do work on the first process alone; all get what it returns or raises."""
        if self.size == 1:
            return work()
        outcome, error = None, None
        if self.first:
            try:
                outcome = work()
            except SHARED as own:
                error = own
        message = [outcome, self._portable(error)]
        distributed.broadcast_object_list(message)
        if message[1] is not None:
            raise self.agree(message[1]) from error
        return message[0]

    def agree(self, error: Outcome) -> Outcome:
        """The error, which all processes are about to raise at the same place."""
        self._agreed = error
        return error

    def agreed(self, error: BaseException) -> bool:
        """Whether all processes raise this error at the same place, and could do something together
        before.
        """
        return self.size == 1 or error is self._agreed

    def _portable(self, error: BaseException | None) -> BaseException | None:
        """An error that can be sent, with the process that it comes from in its text unless that is
        the first one.
        """
        if error is None:
            return None
        place = "" if self.first else f" ({self.name})"
        if isinstance(error, OSError) and error.filename and error.strerror:
            made = OSError(error.errno, error.strerror + place, error.filename)
        else:
            kind = next(kind for kind in SHARED if isinstance(error, kind))
            made = (OutOfMemory if kind is RuntimeError and is_out_of_memory(error) else kind)(
                f"{error}{place}"
            )
        made.place = place
        return made

    @contextmanager
    def guard(self, keep: Callable[[Verdict], None] = lambda verdict: None) -> Iterator[None]:
        """While it lasts, an error that one process alone meets ends all of them, for the same
        reason.

        Args:
            keep: keeps the reason in the run's folder, on one process, where the others have no way
                to raise it.
        """
        if self.watchdog is None:
            yield
            return
        self.watchdog.keep, before = keep, self.watchdog.keep
        try:
            yield
        except (Stopped, NonFinite, Interrupted):  # the same on all
            raise
        except BaseException as error:
            if error is self._agreed or (
                isinstance(error, SystemExit) and not error.code
            ):  # the latter after --help
                raise
            verdict, own = self._judge(error)
            if own:
                raise
            raise self.agree(verdict.exception()) from error
        finally:
            self.watchdog.keep = before

    def _judge(self, error: BaseException) -> tuple[Verdict, bool]:
        """Why the run ends, and whether the reason is this error of this process."""
        self.watchdog.hold()
        memory = isinstance(error, OutOfMemory) or is_out_of_memory(error)
        # Perhaps of a message whose partner is gone, or torchrun's SIGTERM after another one's end.
        if isinstance(error, (RuntimeError, SystemExit)) and not memory:
            self.watchdog.doubt()
        kind = (
            "oom" if memory else "input" if isinstance(error, (ValueError, OSError)) else "failed"
        )
        said = " ".join(str(error).split()) or "interrupted"
        if not self.first:  # what all of them meet is told in the words of the first one
            self.watchdog.wait_a_beat()
        reason = (
            f"{said if isinstance(error, SPOKEN) else f'{type(error).__name__}: {said}'} "
            f"({self.name})"
        )
        verdict = self.watchdog.publish(Verdict(kind, reason))
        return verdict, verdict.reason == reason

    @property
    def speaks(self) -> bool:
        """Whether this process tells how the run ended."""
        verdict = self.watchdog.verdict if self.watchdog else None
        return self.rank == (verdict.speaker if verdict else 0)

    def terminate(self, signum: int, frame: object) -> None:
        """End on SIGTERM, unless this process is about to tell why the run ends."""
        if not self.watchdog.held:
            raise SystemExit(128 + signum)


@contextmanager
def joined(waits: Waits = WAITS) -> Iterator[Processes]:
    """Join the other processes that ``torchrun`` has started, and at the end wait for them.

    One process joins nothing. At the end only the first process leaves its line on standard error,
    and SIGTERM, which ``torchrun`` sends to the others as soon as one has ended, is ignored, so
    that each ends with the same exit code.

    Args:
        waits: how long to wait for others.

    Raises:
        ValueError: the environment says that there are several processes and not which this one is.
        Failed: torchrun or the first process does not answer, which one process of each machine
            tells. A process that does not come within ``waits.start`` ends all others, too.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(
            f"WORLD_SIZE is set but not {', '.join(missing)}; start several processes with torchrun"
        )
    processes = Processes(*(int(os.environ[name]) for name in names[:3]))
    store = reach_store(processes, waits)
    processes.watchdog = Watchdog(processes.rank, processes.size, store.clone(), waits)
    signal.signal(signal.SIGTERM, processes.terminate)
    try:
        with processes.guard():
            join_group(processes, store)
            yield processes
    except SPOKEN:
        if not processes.speaks:
            _be_quiet()
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        part(processes, store, waits)


def reach_store(processes: Processes, waits: Waits) -> distributed.Store:
    """The store with which the processes find each other, as far as this start of them uses it.

    Raises:
        Failed: it does not answer.
    """
    try:
        store, *_ = next(
            distributed.rendezvous(
                "env://",
                processes.rank,
                processes.size,
                timeout=timedelta(seconds=waits.start),
            )
        )
    except distributed.DistError as error:
        if processes.local_rank:
            _be_quiet()
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise Failed(
            f"torchrun or the first process does not answer at {place}: {first_line(error)}"
        ) from error
    store.set_timeout(distributed.default_pg_timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"visionattn/{attempt}", store)


def join_group(processes: Processes, store: distributed.Store) -> None:
    """Make the process group, and learn the machines of all processes."""
    on_gpus = torch.cuda.is_available() and distributed.is_nccl_available()
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
        store=store,
        rank=processes.rank,
        world_size=processes.size,
    )
    processes.hosts = processes.gather(socket.gethostname())


def part(processes: Processes, store: distributed.Store, waits: Waits) -> None:
    """Leave the others: after all have come here, where they all do, or else at once."""
    watchdog = processes.watchdog
    watchdog.hold()
    if watchdog.verdict is None:
        with suppress(RuntimeError):  # a dead process, or one that is alive and stuck
            barrier(store, processes.size, "ended", waits.leave)
    watchdog.leave()
    if watchdog.verdict is None:
        distributed.destroy_process_group()
    else:  # a message that is on its way to a dead process would hold up the usual end
        atexit.register(_end_at_once, watchdog.verdict.exit_code)


def place_of(error: BaseException) -> str:
    """The process that an error comes from, to put into a line that says it otherwise:
    `` (process 1 on host)``.

    Empty for errors of the first process, and for those that this process alone has met, whose
    place ``guard`` adds.
    """
    return getattr(error, "place", "")


def _be_quiet() -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  open until the process ends, which is now


def _end_at_once(exit_code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
