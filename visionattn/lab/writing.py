"""Images written value by value: ``python -m visionattn.lab.writing`` measures the table and the
picture of ``docs/generation.md``.

Three ways write the same sizes with models of one width and depth: the recurrence of kernelized
attention, softmax attention with a cache of keys and values, and softmax attention without one,
which computes all values so far for each new one. The sequence is cut into equal segments; in every
round each way is timed in each segment in turn, so what slows the machine slows all of them. A way
that writes whole images fast enough is timed on all of its steps, another on some in the middle of
each segment, times the steps of the segment. Values are given and none are drawn, which costs all
ways the same.

Seconds are the processor's, for one thread. Peak memory is that of the last step, the state
included and the weights not, in a fresh process.
"""

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from visionattn.cli.ends import Failed, run_tool
from visionattn.cli.files import check_free, write_text
from visionattn.cli.fresh_process import Done, Forks, ask, run_alone
from visionattn.cli.parsing import Parser, whole_from
from visionattn.cli.provenance import provenance_of, summary
from visionattn.cli.tables import Record, csv_text
from visionattn.lab.compare import Quartiles, ratio_of, spread
from visionattn.lab.measure import peak_bytes
from visionattn.lab.written import (
    NO_CACHE,
    RECURRENCE,
    SEGMENTS,
    WAYS,
    draw,
    segment,
    table,
)
from visionattn.models import PixelDecoder
from visionattn.models.pixel_decoder import DecoderState

RELATIVE = ("flat", "none")
MODEL = {"embed_dim": 128, "depth": 4, "num_heads": 4}
PAIRS = 1 << 20
"""Without a cache so many pairs of values are computed at once at most, or one image: 16 images of
1,024 values at once took 1.27 times as long as one after the other."""
SAMPLE_SECONDS, MOST_STEPS = 0.05, 32
"""How long steps in the middle of a segment are timed, and how many at most."""
SLOW_SECONDS, FEW_SEGMENTS = 1.0, (0, 4, 7, 11)
"""Where a step takes longer, these segments are timed alone; the others are on the parabola through
them: such a step is quadratic in its position."""


@dataclass(frozen=True)
class Case:
    """What is written: a batch of square images of one channel."""

    way: str
    relative: str
    side: int
    batch: int

    @property
    def values(self) -> int:
        """N, values of an image."""
        return self.side**2

    @property
    def at_once(self) -> int:
        """How many images are computed at once."""
        fits = max(1, PAIRS // self.values**2)
        return min(self.batch, fits) if self.way == NO_CACHE else self.batch

    @property
    def label(self) -> str:
        """The case in words, for errors."""
        return f"{self.way}, {self.side} x {self.side} px, batch {self.batch}"


def build(case: Case) -> PixelDecoder:
    """Return the model of a case; those of one relative position start from the same draws."""
    torch.manual_seed(0)
    attention = "kernelized" if case.way == RECURRENCE else "softmax"
    return PixelDecoder(attention=attention, relative=case.relative, **MODEL).eval()


def fill(state: DecoderState) -> int:
    """Fill the memory of a state with numbers above 0, as much as a whole image takes; return its
    bytes.
    """
    count = 0
    for past, _ in state.blocks:
        for held in vars(past).values():
            if isinstance(held, Tensor):
                held.uniform_(0.5, 1.5)
                count += held.nbytes
    return count


class Writer:
    """A model that is ready to write a batch."""

    def __init__(self, case: Case):
        self.case, self.model = case, build(case)
        shape = case.at_once, case.values
        self.values = torch.randint(256, shape, generator=torch.Generator().manual_seed(1))
        self.size = case.side, case.side
        self.state: DecoderState | None = None
        self.state_bytes = 0

    def begin(self) -> "Writer":
        """Make the state, where there is one, and fill it; return the writer."""
        if self.case.way != NO_CACHE:
            self.state = self.model.begin(self.case.at_once, self.size)
            self.state_bytes = fill(self.state)
        return self

    def go_to(self, position: int) -> None:
        """Let the state be that of so many values; what it holds is not of those."""
        if self.state is not None:
            self.state.position = position
            for past, _ in self.state.blocks:
                past.count = position

    def step(self, position: int) -> Tensor:
        """Return log-probabilities of the value at a position, ``[B, levels]``."""
        if self.state is None:
            return self.model.predict(self.values[:, :position], self.size)[:, -1]
        return self.model.step(self.values[:, position - 1] if position else None, self.state)

    def seconds(self, steps: range) -> float:
        """Return the seconds of a step, the mean of those at these positions."""
        begun = time.process_time()
        for position in steps:
            self.step(position)
        return (time.process_time() - begun) / len(steps)


def check(relative: str, side: int = 6, bound: float = 1e-4) -> None:
    """Compare the steps of each way with the log-probabilities of whole images.

    Raises:
        Failed: they differ by more than the bound.
    """
    for way in WAYS:
        writer = Writer(Case(way, relative, side, 2))
        if way != NO_CACHE:
            writer.state = writer.model.begin(2, writer.size)
        images = writer.values.view(-1, 1, *writer.size)
        wanted = writer.model.logits(images).flatten(2).permute(2, 0, 1)
        found = torch.stack([writer.step(i) for i in range(side**2)])
        error = (found - wanted).abs().max().item()
        if not error < bound:
            raise Failed(f"{way} differs from the whole image by {error:.2g}, more than {bound:g}")


def middle(steps: range, count: int) -> range:
    """Return so many positions in the middle of some, all of them at most."""
    count = min(count, len(steps))
    first = steps.start + (len(steps) - count) // 2
    return range(first, first + count)


class Timed:
    """The seconds of a case, round by round and segment by segment."""

    def __init__(self, case: Case, whole_seconds: float):
        self.case, self.writer = case, Writer(case).begin()
        self.rounds: list[list[float]] = []
        """Seconds of a step, ``[rounds][segments]``."""
        # The second call at each place tells how many steps make a sample.
        first = [self._sample(number, 1) for number in (0, SEGMENTS - 1)]
        if max(first) < SLOW_SECONDS:
            first = [self._sample(number, 1) for number in (0, SEGMENTS - 1)]
        self.is_whole = sum(first) / len(first) * case.values <= whole_seconds
        self.steps = max(1, min(MOST_STEPS, round(SAMPLE_SECONDS / max(first))))
        slow = max(first) > SLOW_SECONDS and not self.is_whole
        self.segments = FEW_SEGMENTS if slow else tuple(range(SEGMENTS))

    def _sample(self, number: int, count: int) -> float:
        steps = middle(segment(number, self.case.values), count)
        self.writer.go_to(steps.start)
        if self.case.way != NO_CACHE and steps.stop < self.case.values:
            self.writer.step(steps.start)  # other ways have used the caches of the processor
            steps = range(steps.start + 1, steps.stop + 1)
        return self.writer.seconds(steps)

    def take(self, number: int) -> None:
        """Time a segment, where this case is timed; the first begins a round."""
        if number == 0:
            self.rounds.append([])
            self.writer.go_to(0)
        if number not in self.segments:
            return
        whole = segment(number, self.case.values)
        one = self.writer.seconds(whole) if self.is_whole else self._sample(number, self.steps)
        self.rounds[-1].append(one)
        if number == SEGMENTS - 1 and len(self.segments) < SEGMENTS:
            line = np.polynomial.Polynomial.fit(self.segments, self.rounds[-1], 2)
            self.rounds[-1] = [float(line(i)) for i in range(SEGMENTS)]

    def samples(self) -> list[float]:
        """Return the seconds of writing the batch, round by round."""
        lengths = [len(segment(number, self.case.values)) for number in range(SEGMENTS)]
        times = self.case.batch / self.case.at_once
        return [
            times * sum(n * s for n, s in zip(lengths, steps, strict=True)) for steps in self.rounds
        ]

    def by_segment(self) -> list[float]:
        """Return the median seconds of a step of the batch in each segment."""
        times = self.case.batch / self.case.at_once
        return [times * statistics.median(each) for each in zip(*self.rounds, strict=True)]


def measure_times(
    cases: Sequence[Case], rounds: int, seconds: float, whole_seconds: float
) -> list[Timed]:
    """Time cases in turns.

    Args:
        cases: of one size.
        rounds: at most; two at least.
        seconds: after which no further round is begun.
        whole_seconds: a way that takes so many for whole images at most is timed on all its steps.
    """
    begun, timed = time.monotonic(), [Timed(case, whole_seconds) for case in cases]
    for turn in range(rounds):
        for number in range(SEGMENTS):
            first = (turn + number) % len(timed)
            for each in (*timed[first:], *timed[:first]):
                each.take(number)
        if turn and time.monotonic() - begun > seconds:
            break
    return timed


def peak_here(case: Record, threads: int) -> int:
    """Return the bytes that the last step of a case takes in this process, its state included and
    the weights not.
    """
    torch.set_num_threads(threads)
    told = Case(**case)
    writer = Writer(told)

    def work() -> None:
        writer.begin().go_to(told.values - 1)
        writer.step(told.values - 1)

    with torch.inference_mode():
        # What libraries keep from their first calls is not memory of the work.
        small = Writer(Case(told.way, told.relative, 16, 1)).begin()
        small.go_to(255)
        small.step(255)
        return peak_bytes(work)


def _peak(case: Case, run: Callable[[str], Done]) -> int | None:
    # The module that is run has no name by which another process could find it.
    from visionattn.lab.writing import peak_here

    given = {"case": asdict(case), "threads": torch.get_num_threads()}
    try:
        return ask(peak_here, given, case.label, run)
    except torch.OutOfMemoryError:
        return None


def measure(
    cases: Sequence[Case],
    rounds: int,
    seconds: float,
    whole_seconds: float,
    run: Callable[[str], Done] = run_alone,
) -> list[Record]:
    """Return a row of plain values for each case of one size and relative position.

    Args:
        cases, rounds, seconds, whole_seconds: see ``measure_times``.
        run: runs the processes that measure memory.
    """
    # Where images are computed one by one, a batch is so many times one image.
    own = {(case.way, case.at_once): case for case in reversed(cases)}
    with torch.inference_mode():
        timed = measure_times(list(own.values()), rounds, seconds, whole_seconds)
    by_case = {}
    for case in cases:
        each = timed[list(own).index((case.way, case.at_once))]
        by_case[case] = each, case.batch / each.case.batch
    records = []
    for case, (each, times) in by_case.items():
        samples = [times * sample for sample in each.samples()]
        base, base_times = by_case[Case(RECURRENCE, case.relative, case.side, case.batch)]
        ratio = ratio_of(samples, [base_times * sample for sample in base.samples()])
        quartiles = Quartiles.of(samples)
        record: Record = {"way": case.way, "relative": case.relative, "side_px": case.side}
        record |= {"values": case.values, "batch": case.batch, "at_once": case.at_once}
        record |= {"timed": "whole" if each.is_whole else "integrated", "rounds": len(samples)}
        record |= {"segments": len(each.segments)}
        record |= {"steps_of_a_segment": None if each.is_whole else each.steps}
        record |= spread("seconds", quartiles)
        record |= {"images_per_second": case.batch / quartiles.median}
        record |= spread("times_recurrence", ratio)
        record |= {"state_bytes": each.writer.state_bytes, "peak_bytes": _peak(case, run)}
        steps = " ".join(f"{times * step:.4g}" for step in each.by_segment())
        records.append(record | {"step_seconds_by_segment": steps})
    return records


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write rows and picture; return the exit code."""
    about = "Measure how fast images are written value by value, and with how much memory."
    parser = Parser("python -m visionattn.lab.writing", description=about)
    number = whole_from(1)
    parser.add_argument("--sides", type=number, nargs="+", default=[16, 32, 64, 128], help="px")
    parser.add_argument("--batches", type=number, nargs="+", default=[1, 16], help="images")
    parser.add_argument("--relative", nargs="+", choices=RELATIVE, default=[*RELATIVE])
    parser.add_argument("--rounds", type=number, default=7, help="of each size, at most")
    seconds = "after which no further round of a size is begun; two are made"
    parser.add_argument("--seconds", type=number, default=120, help=seconds)
    whole = "whole images are timed where they take so many seconds at most"
    parser.add_argument("--whole-seconds", type=number, default=4, help=whole)
    parser.add_argument("--threads", type=whole_from(1, 1024), default=1, help="threads of torch")
    parser.add_argument("--csv", help="file for the rows, which is replaced")
    parser.add_argument("--png", help="file for the picture, which is replaced")
    flags = parser.parse_args(argv)

    def work() -> None:
        for path in (flags.csv, flags.png):
            if path:
                check_free(Path(path), overwrite=True)
        if min(flags.sides) ** 2 < 2 * SEGMENTS:
            raise ValueError(
                f"--sides: images of {min(flags.sides)} px have too few values; take 5"
            )
        words = ["python", "-m", "visionattn.lab.writing", *(argv or sys.argv[1:])]
        provenance = provenance_of("cpu", [], threads=flags.threads)
        provenance["command"] = shlex.join(words)
        print(summary(provenance), flush=True)
        before, records = torch.get_num_threads(), []
        torch.set_num_threads(flags.threads)
        try:
            for group in measure_all(flags):
                records += group
                print(table(group), flush=True)
                if flags.csv:  # as soon as a size is done
                    write_text(flags.csv, csv_text(records, provenance))
        finally:
            torch.set_num_threads(before)
        print(f"\n{table(records)}")
        if flags.png:
            draw(Path(flags.png), records, provenance)

    return run_tool(work)


def measure_all(flags: argparse.Namespace) -> Iterator[list[Record]]:
    """Yield the rows of one relative position and size after the other."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Forks(Path(folder) / "log", returning=True) as run,
    ):
        for relative in flags.relative:
            with torch.inference_mode():
                check(relative)
            for side in flags.sides:
                cases = [
                    Case(way, relative, side, batch) for batch in flags.batches for way in WAYS
                ]
                yield measure(cases, flags.rounds, flags.seconds, flags.whole_seconds, run)


if __name__ == "__main__":
    raise SystemExit(main())
