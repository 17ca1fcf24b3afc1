"""Signs of life between the processes of a run, and why all of them end.

``torchrun`` ends the others when a process has died or failed, and this module leaves that to it.
Three things were seen to be missing without it, with torch 2.15 and gloo; the table of all trials
is in ``docs/several-processes.md``:

- A process that is stopped, or whose machine is cut off, keeps its connections, and the job stood
  still for as long as it was watched (100 s). A time-out of the process group of 25 s ended such
  jobs after 67 to 73 s, and after 33 s a healthy one whose first process took 40 s to save. Signs
  of life tell the two apart; here the job ends after 58 to 60 s, 30 of which are ``torchrun``'s.
- Where the first process was killed, nobody else wrote ``status.json``, which went on saying
  ``running``. Here the first one that is alive writes it.
- Where another process was out of memory or could not read an image, the first one met "Connection
  closed by peer" and gave that as the reason. Here it learns the reason.

The verdict is made here: why all processes end, and which of them says so. The module knows nothing
of training; ``distributed.py`` tells it who writes what a verdict says.
"""

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import count

from torch import distributed

from visionattn.cli.ends import Failed, NonFinite, OutOfMemory

KINDS = {
    "nan": (NonFinite, 1),
    "input": (ValueError, 2),
    "oom": (OutOfMemory, 3),
    "failed": (Failed, 4),
}
"""What a verdict can be: the exception that it is raised as, and the exit code."""


@dataclass(frozen=True)
class Waits:
    """Seconds that a process waits for others."""

    start: float = 120.0
    """From its own start to the first sign of life of the others."""
    beat: float = 1.0
    """Between two signs of life."""
    silence: float = 20.0
    """A process that gives none for this long is taken for dead, and so is a store that does not
    answer. ``torchrun`` leaves the others 30 s to say so."""
    doubt: float = 6.0
    """The same, once a message between processes has failed."""
    grace: float = 3.0
    """From a verdict until a process is ended that cannot end itself, because it waits for another
    one."""
    leave: float = 20.0
    """At the end, for processes that do not end."""


@dataclass(frozen=True)
class Verdict:
    """Why all processes end."""

    kind: str
    """One of ``KINDS``."""
    reason: str
    """One line."""
    speaker: int = 0
    """The process that says so, on the screen and in the run's folder: the first one that is
    alive."""

    @property
    def exit_code(self) -> int:
        """Return the exit code of every process."""
        return KINDS[self.kind][1]

    def exception(self) -> Exception:
        """Return what a process raises that is able to."""
        return KINDS[self.kind][0](self.reason)


class Watchdog:
    """Give signs of life, look for those of the others, and end this process where it cannot end
    itself.

    One thread speaks with the store. It may wait without end, as the store's client has no limit
    for a server that is stopped or cut off. The other thread counts beats and judges by them. While
    this process is stopped it counts none: a job that a scheduler stops as a whole for a while goes
    on afterwards.

    Args:
        rank: the number of this process.
        size: how many processes there are.
        store: a client that nobody else uses.
        waits: how long to wait for what.

    Attributes:
        hosts: the machine of each process, as far as they have said it.
        verdict: why the run ends; None as long as it does not.
        keep: called with the verdict before a process that hangs is ended, if it is the speaker.
    """

    def __init__(self, rank: int, size: int, store: distributed.Store, waits: Waits):
        self.rank, self.store, self.waits = rank, store, waits
        self.hosts = [""] * size
        self.verdict: Verdict | None = None
        self.keep: Callable[[Verdict], None] = lambda verdict: None
        self._proposal: Verdict | None = None
        self._silence = waits.silence
        self._ticks = 0
        self._answered = 0
        self._beats = [b""] * size
        self._heard = [0] * size
        self._lock = threading.Lock()
        self._known = threading.Event()
        self._wake = threading.Event()
        self._held = threading.Event()
        self._left = threading.Event()
        for work in (self._beat, self._watch):
            threading.Thread(target=work, name="watchdog", daemon=True).start()

    @property
    def held(self) -> bool:
        """Tell whether this process ends itself."""
        return self._held.is_set()

    def hold(self) -> None:
        """Let this process end itself: the watchdog no longer does."""
        self._held.set()

    def doubt(self) -> None:
        """Wait, after a message between processes has failed, until it is known why, or until it is
        known that no process is silent.
        """
        self._silence = self.waits.doubt
        self._known.wait(self.waits.doubt + 3 * self.waits.beat)

    def wait_a_beat(self) -> None:
        """Wait for a verdict, at most until the next sign of life."""
        self._known.wait(self.waits.beat)

    def publish(self, verdict: Verdict) -> Verdict:
        """Tell all processes why they end, and return the verdict that counts: the first one."""
        self._proposal = self._proposal or verdict
        self._wake.set()
        self._known.wait(self.waits.doubt)
        return self._settle(verdict)

    def leave(self) -> None:
        """Stop watching."""
        self._left.set()
        self._wake.set()

    def _beat(self) -> None:
        """Give signs of life and read those of the others, until there is a verdict."""
        keys = [*(f"beat/{other}" for other in range(len(self.hosts))), "verdict"]
        host = socket.gethostname()
        try:
            for key in keys:  # to read one that is missing would wait for it
                self.store.compare_set(key, "", "")
            for number in count():
                self.store.set(keys[self.rank], f"{host} {number}")
                *beats, verdict = self.store.multi_get(keys)
                self._hear(beats)
                if self._proposal and not verdict:
                    text = json.dumps(asdict(self._proposal))
                    verdict = self.store.compare_set("verdict", "", text)
                if verdict or self._left.is_set():
                    break
                self._wake.wait(self.waits.beat)
        except RuntimeError:
            self._settle(self._proposal or self._without_store("has ended"))
        else:
            if verdict:
                self._settle(Verdict(**json.loads(verdict)))

    def _hear(self, beats: Iterable[bytes]) -> None:
        """Note which processes have given a sign of life since the last time."""
        self._answered = self._ticks
        for other, beat in enumerate(beats):
            if beat != self._beats[other]:
                self.hosts[other] = beat.decode().rpartition(" ")[0]
                self._beats[other] = beat
                self._heard[other] = self._ticks

    def _watch(self) -> None:
        """Judge by the signs of life, and end this process where it does not do so itself."""
        while not self._known.wait(self.waits.beat):
            if self._left.is_set():
                return
            self._ticks += 1
            self._judge()
        cannot_end_itself = not self._held.wait(self.waits.grace) and not self._left.is_set()
        if cannot_end_itself and self.verdict:
            self._end_process(self.verdict)

    def _judge(self) -> None:
        """Publish a verdict if the store or a process is silent."""
        if self._seconds_since(self._answered) > self.waits.silence:
            self._settle(self._without_store("does not answer"))
            return
        limits = [self._silence if beat else self.waits.start for beat in self._beats]
        silent = [
            other
            for other, since in enumerate(self._heard)
            if other != self.rank and self._seconds_since(since) > limits[other]
        ]
        if silent:
            speaker = min(set(range(len(self.hosts))) - set(silent))
            reason = " and ".join(self._said_of(other) for other in silent)
            self.publish(Verdict("failed", reason, speaker))

    def _seconds_since(self, tick: int) -> float:
        return (self._ticks - tick) * self.waits.beat

    def _said_of(self, silent: int) -> str:
        if self._beats[silent]:
            name = f"process {silent} on {self.hosts[silent]}"
            return f"{name} has not answered for {self._silence:.0f} s"
        name = f"process {silent} of {len(self.hosts)}"
        return f"{name} did not start within {self.waits.start:.0f} s of the others"

    def _without_store(self, what: str) -> Verdict:
        """Return the verdict for a store that can no longer be read: the first process of another
        machine than the store's says so.
        """
        place = f", on {self.hosts[0]}," if self.hosts[0] else ""
        others = [rank for rank, host in enumerate(self.hosts) if host != self.hosts[0]]
        reason = f"torchrun or the first process{place} {what}"
        return Verdict("failed", reason, min(others, default=1))

    def _settle(self, verdict: Verdict) -> Verdict:
        """Take a verdict unless there is one already; return the one that counts."""
        with self._lock:
            counts = self.verdict = self.verdict or verdict
        self._known.set()
        return counts

    def _end_process(self, verdict: Verdict) -> None:
        """Say why, if this process is the speaker, and end at once."""
        try:
            if self.rank == verdict.speaker:
                self.keep(verdict)
                print(f"error: {verdict.reason}", file=sys.stderr, flush=True)
        finally:
            os._exit(verdict.exit_code)
