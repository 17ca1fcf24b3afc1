"""A thread in each process of a run that notices when another one has died, stands still or failed.

Owns the beats of the processes and the verdict, which are kept in the store that ``torchrun`` or
the first process serves, and notices when that no longer answers. A process that is alive and does
not get on, as in an endless loop, beats and is not noticed. Knows nothing of training: who writes
and who prints what a verdict says is told by ``distributed.py``.
"""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

from torch import distributed

from visionattn.cli.ends import Failed, NonFinite, OutOfMemory

Outcome = TypeVar("Outcome")

BEAT_SECONDS = 1.0
"""Between two signs of life."""
SILENCE_SECONDS = 20.0
"""A process that gives none for this long is taken for dead, and so is a store; ``torchrun`` leaves
the others 30 s to say so.
"""
DOUBT_SECONDS = 6.0
"""The same, once a message between processes has failed."""
GRACE_SECONDS = 3.0
"""From a verdict to the end of a process that does not see to it itself, because it waits for
another one.
"""
STORE_SECONDS = 30.0
"""Longest answer of the store, as far as its client sees to that: one that has connected waits for
a server that stands still.
"""
LEAVE_SECONDS = 60.0
"""Longest wait at the end for processes that are alive and do not end."""

KINDS = {
    "nan": (NonFinite, 1),
    "input": (ValueError, 2),
    "oom": (OutOfMemory, 3),
    "failed": (Failed, 4),
}
"""What a verdict can be: the exception that it is raised as, and the exit code."""
ENDED = "ended"


@dataclass(frozen=True)
class Verdict:
    """Why all processes end."""

    kind: str
    """One of ``KINDS``."""
    reason: str
    """One line."""
    speaker: int = 0
    """The process that says so, on the screen and in the run's folder: the first one that is alive.
    """

    @property
    def exit_code(self) -> int:
        """Of every process."""
        return KINDS[self.kind][1]

    def exception(self) -> Exception:
        """What the processes raise that are able to."""
        return KINDS[self.kind][0](self.reason)


class Watchdog(threading.Thread):
    """Gives signs of life, looks for those of the others, and ends this process where it cannot end
    itself.

    Args:
        rank: of this process.
        hosts: of each process, for people.
        store: a client of its own.

    Attributes:
        verdict: why the run ends; None as long as it does not.
        keep: called with the verdict before a process that hangs is ended, where this process is
            the speaker.
    """

    def __init__(self, rank: int, hosts: list[str], store: distributed.Store):
        super().__init__(name="watchdog", daemon=True)
        self.rank, self.hosts, self.store = rank, hosts, store
        self.verdict: Verdict | None = None
        self.keep: Callable[[Verdict], None] = lambda verdict: None
        self._known, self._stopped, self._handled = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._silence, self._beats, self._count = (
            SILENCE_SECONDS,
            [f"beat/{other}" for other in range(len(hosts))],
            0,
        )
        self._looked = time.monotonic()
        self._seen: list[tuple[bytes, float]] = [(b"", self._looked) for _ in hosts]
        self._lock = threading.Lock()

    def run(self) -> None:
        """Beat and look, until told to stop or until there is a verdict."""
        while not self._stopped.wait(BEAT_SECONDS):
            self._look()
            if self.verdict:
                if not self._handled.wait(GRACE_SECONDS) and not self._stopped.is_set():
                    self._end_process(self.verdict)
                return

    def hold(self) -> None:
        """This process sees to its end itself."""
        self._handled.set()

    def doubt(self) -> None:
        """A message between processes has failed: wait until it is known why, or that none has died
        or failed.
        """
        self._silence = DOUBT_SECONDS
        self.wait(DOUBT_SECONDS + 3 * BEAT_SECONDS)

    def wait(self, seconds: float) -> None:
        """Until there is a verdict, but no longer."""
        self._known.wait(seconds)

    def publish(self, verdict: Verdict) -> Verdict:
        """Tell all processes why they end; the first verdict counts, and is returned."""
        try:
            text = json.dumps(asdict(verdict))
            first = self.verdict or within(
                DOUBT_SECONDS, lambda: self.store.compare_set("verdict", "", text)
            )
            verdict = first if isinstance(first, Verdict) else Verdict(**json.loads(first))
        except RuntimeError:  # nobody is left to be told
            pass
        return self._settle(verdict)

    def leave(self) -> None:
        """Stop, after all others have ended too, are dead, or have had time to, which is less where
        there is a verdict.
        """
        self.hold()
        self._stopped.set()
        if self.is_alive():
            self.join(DOUBT_SECONDS)
        deadline = time.monotonic() + (
            GRACE_SECONDS + 3 * BEAT_SECONDS if self.verdict else LEAVE_SECONDS
        )
        try:
            within(DOUBT_SECONDS, lambda: self.store.set(self._beats[self.rank], ENDED))
            while time.monotonic() < deadline:
                within(DOUBT_SECONDS, self._read)
                if all(beat == ENDED.encode() for beat, _ in self._seen) or self._silent():
                    return
                time.sleep(BEAT_SECONDS / 10)
        except RuntimeError:  # the store went with the process or the machine that served it
            return

    def _look(self) -> None:
        try:
            verdict = within(SILENCE_SECONDS, self._beat)
            if verdict:
                self._settle(Verdict(**json.loads(verdict)))
            elif silent := self._silent():
                names = " and ".join(f"process {other} on {self.hosts[other]}" for other in silent)
                have = "have" if len(silent) > 1 else "has"
                speaker = min(set(range(len(self.hosts))) - set(silent))
                reason = f"{names} {have} not answered for {self._silence:.0f} s"
                self.publish(Verdict("failed", reason, speaker))
        except RuntimeError as error:
            what = "does not answer" if isinstance(error, Unanswered) else "has ended"
            speaker = min(
                (other for other in range(len(self.hosts)) if self.hosts[other] != self.hosts[0]),
                default=1,
            )
            self._settle(
                Verdict(
                    "failed", f"torchrun or the first process, on {self.hosts[0]}, {what}", speaker
                )
            )

    def _beat(self) -> bytes:
        self._count += 1
        self.store.set(self._beats[self.rank], str(self._count))
        return self._read()

    def _read(self) -> bytes:
        """Note the others' beats and return the verdict's text."""
        *beats, verdict = self.store.multi_get([*self._beats, "verdict"])
        now, before = time.monotonic(), self._looked
        paused = (
            now - before > SILENCE_SECONDS / 2
        )  # as all are when a scheduler stops a job for a while
        self._seen = [
            (beat, now if paused or beat != old else since)
            for beat, (old, since) in zip(beats, self._seen, strict=True)
        ]
        self._looked = now
        return verdict

    def _silent(self) -> list[int]:
        now = time.monotonic()
        return [
            other
            for other, (beat, since) in enumerate(self._seen)
            if other != self.rank and beat != ENDED.encode() and now - since > self._silence
        ]

    def _settle(self, verdict: Verdict) -> Verdict:
        with self._lock:
            self.verdict = self.verdict or verdict
        self._known.set()
        return self.verdict

    def _end_process(self, verdict: Verdict) -> None:
        try:
            if self.rank == verdict.speaker:
                self.keep(verdict)
                print(f"error: {verdict.reason}", file=sys.stderr, flush=True)
            within(GRACE_SECONDS, lambda: self.store.set(self._beats[self.rank], ENDED))
        finally:
            os._exit(verdict.exit_code)


class Unanswered(RuntimeError):
    """The store has not answered in time."""


def within(seconds: float, ask: Callable[[], Outcome]) -> Outcome:
    """What the store answers. The question is left to a thread of its own, as the client may wait
    without end.

    Args:
        seconds: to wait, counted in beats: while this process is stopped none pass.
        ask: the question.

    Raises:
        Unanswered: there is no answer by then.
        RuntimeError: the store is gone.
    """
    answers: list[tuple[Outcome | None, RuntimeError | None]] = []
    answered = threading.Event()

    def work() -> None:
        try:
            answers.append((ask(), None))
        except RuntimeError as error:
            answers.append((None, error))
        answered.set()

    threading.Thread(target=work, name="store", daemon=True).start()
    if not any(answered.wait(BEAT_SECONDS) for _ in range(math.ceil(seconds / BEAT_SECONDS))):
        raise Unanswered
    answer, error = answers[0]
    if error:
        raise error
    return answer


def start_watchdog(
    rank: int, hosts: list[str], address: tuple[str, int], meet: Callable[[], object]
) -> Watchdog:
    """Start the thread, with a connection of its own to the store.

    Args:
        rank: of this process.
        hosts: of each process.
        address: of the store.
        meet: returns once all processes have called it.
    """
    store = distributed.TCPStore(
        *address, is_master=False, timeout=timedelta(seconds=STORE_SECONDS), wait_for_workers=False
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = distributed.PrefixStore(f"visionattn/{attempt}", store)
    store.set(f"beat/{rank}", "0")
    if rank == 0:
        store.set("verdict", "")
    meet()
    watchdog = Watchdog(rank, hosts, store)
    watchdog.start()
    return watchdog
