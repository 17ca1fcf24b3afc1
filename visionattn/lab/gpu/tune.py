"""``visionattn benchmark tune``: block sizes, warps and stages of the kernels, timed on the GPU at
hand, into ``launches.json``.

A row of the table is tuned within an operation that launches it: another row is put in its place,
the result is checked, and the launches that take the row are replayed alone and timed. Sizes of a
row are varied one at a time. Rows of other GPUs and of the default section stay as they are.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from visionattn.cli.files import check_free, write_text
from visionattn.cli.tables import Record, duration, heading, line
from visionattn.lab.cases import Case
from visionattn.lab.gpu.gpu_operations import (
    Bench,
    call_of,
    check,
    draw,
    expected_of,
    operation_of,
)
from visionattn.lab.gpu.gpu_rows import SHIFT, operation
from visionattn.lab.gpu.gpu_timing import is_broken, seconds_of
from visionattn.lab.targets import choose_rows
from visionattn.ops.gpu import launch
from visionattn.ops.gpu.launch import launching_with
from visionattn.ops.taylorshift.gpu import TILE, tile_features

Row = dict[str, int]
BLOCKS = (16, 256)
"""The smallest block, which products of matrices want, and the largest."""
GAIN = 0.02
"""A row is replaced by one that is faster by this part at least."""
COLUMNS = ("row", "was", "now", "time was", "time now")
TUNED = ("kernelized", 16_384, "efficient"), ("kernelized+joint", 16_384, "efficient")
TUNED += (SHIFT, 16_384, "efficient"), (SHIFT, 4096, "direct")
"""What launches the kernels: name, tokens and form; of each forward and backward."""


def name_of(kernel: str, row: Row) -> str:
    """Return the text that ``--only`` looks at."""
    return "{} d = {d} e = {e} {bits} bits".format(kernel, **row)


def check_rows(only: str | None) -> list[str]:
    """Return the names of the rows of the table that ``--only`` fits.

    Raises:
        ValueError, OSError: it fits none, or the table cannot be written.
    """
    check_free(launch.TABLE, overwrite=True)
    default = json.loads(launch.TABLE.read_text())["default"]
    names = [name_of(kernel, row) for kernel, rows in default.items() for row in rows]
    return [names[i] for i in choose_rows(only, names)]


def candidates(row: Row) -> Iterator[Row]:
    """Yield rows that differ in one size: blocks and warps halved and doubled, stages, and shares
    of the pairs of tiles of q, which programs take evenly.

    A kernel whose loops must not be pipelined has one stage and keeps it: Triton before 3.9
    miscompiles products whose left operand is computed in such a loop, which a check need not
    notice.
    """
    pairs = tile_features(row["d"]) // TILE**2
    for name, value in row.items():
        others = [value // 2, value * 2]
        if name.startswith("BLOCK"):
            others = [x for x in others if BLOCKS[0] <= x <= max(value, BLOCKS[1])]
        elif name == "PAIRS":
            others = [x for x in range(1, pairs + 1) if pairs % x == 0]
        elif name == "num_stages":
            others = [1, 2, 3, 4] if value > 1 else []
        elif name != "num_warps":
            others = []
        yield from (row | {name: x} for x in others if x not in (0, value))


def descend(row: Row, seconds: Callable[[Row], float]) -> tuple[Row, float]:
    """Return the fastest row that is found by changing one size at a time, and its seconds;
    infinite seconds stand for a row that does not run or is wrong.
    """
    best, least = row, seconds(row)
    while True:
        trials = [(seconds(trial), trial) for trial in candidates(best)]
        fastest, trial = min(trials, key=lambda pair: pair[0])
        if fastest >= (1 - GAIN) * least:
            return best, least
        best, least = trial, fastest


def put(capability: str, kernel: str, row: Row) -> None:
    """Write a row into the section of a GPU, which gets all rows of the kernel that it has not;
    launches take it at once.
    """
    table = json.loads(launch.TABLE.read_text())
    rows = table.setdefault(capability, {}).setdefault(kernel, table["default"][kernel])
    others = [old for old in rows if name_of(kernel, old) != name_of(kernel, row)]
    table[capability][kernel] = [*others, row]
    text = json.dumps(table, indent=2)
    # One row in a line.
    text = re.sub(r"\{\s+([^{}]*?)\s+\}", lambda found: f"{{{' '.join(found[1].split())}}}", text)
    write_text(launch.TABLE, text + "\n")
    launch.forget()


class Workload:
    """An operation on inputs in memory, whose result is known."""

    def __init__(self, case: Case, bench: Bench):
        self.case, self.bench = case, bench
        self.tensors: dict[str, Tensor] = draw(case, bench)
        self.expected = expected_of(case, self.tensors, bench)

    def rows(self) -> dict[str, tuple[str, Row]]:
        """Return kernel and row of each row that the operation takes, by name; nothing is
        launched.
        """
        found: dict[str, tuple[str, Row]] = {}

        def ask(row_of, *asked) -> Row:
            row = launch.table_row(*asked)
            found[name_of(asked[0], row)] = asked[0], row
            return row_of(*asked)

        with launching_with(run=lambda *launched, **meta: None, rows=ask):
            call_of(operation_of(self.case, self.bench), self.tensors, self.case.backward)()
        return found

    def seconds(self, kernel: str, row: Row) -> float:
        """Return the seconds of the launches that take a row of this kernel and these widths, with
        this one in its place; infinity where they do not run, or the result is wrong.
        """
        from triton.errors import TritonError

        launches: list[Callable[[], None]] = []

        def take(row_of, *asked) -> Row:
            its = name_of(asked[0], launch.table_row(*asked)) == name_of(kernel, row)
            return launch.given_of(row) | {"OF_THE_ROW": True} if its else row_of(*asked)

        def note(launch_one, kernel, grid, *args, **meta) -> None:
            its = meta.pop("OF_THE_ROW", False)
            work = partial(launch_one, kernel, grid, *args, **meta)
            work()
            if its:
                launches.append(work)

        try:
            with launching_with(run=note, rows=take):
                status, _ = check(self.case, self.tensors, self.expected, self.bench)
            if status != "ok":
                return float("inf")
            with torch.inference_mode():  # some of what launches write to was made in it
                return seconds_of(lambda: [work() for work in launches], self.bench.device)
        except (TritonError, RuntimeError, ValueError, AssertionError) as error:
            if is_broken(error):
                raise
            return float("inf")


def workloads(bench: Bench, tokens: int | None) -> Iterator[Workload]:
    """Yield operations that have kernels, those of 16 bits and wide heads first."""
    for dtype in ("float16" if bench.rehearsed else "bfloat16", "float32"):
        for width in (64, 32, 16):
            for name, size, form in TUNED:
                given = dict(dtype=dtype, backward=True)
                work = Workload(operation(name, tokens or size, width, form, **given), bench)
                try:
                    work.rows()
                except NotImplementedError:  # no kernels so wide in float32
                    continue
                yield work


def run_tune(
    only: str | None,
    minutes: float,
    bench: Bench,
    capability: str,
    show: Callable[[str], None],
    tokens: int | None = None,
) -> list[Record]:
    """Tune rows until the time is over, print each, and write the table after each that changes.

    Args:
        only: regular expression over rows, such as "taylor direct d = 64"; None: all.
        minutes: after which no row is begun.
        tokens: of the operations; None: as ``TUNED`` says.
    """
    left, end = set(check_rows(only)), time.monotonic() + 60 * minutes
    records: list[Record] = []
    show(heading(COLUMNS))
    for work in workloads(bench, tokens):
        for name, (kernel, row) in work.rows().items():
            if name not in left or time.monotonic() > end:
                continue
            left.discard(name)
            before = work.seconds(kernel, row)
            best, after = descend(row, partial(work.seconds, kernel))
            if best != row:
                put(capability, kernel, best)
            values = name, json.dumps(row), json.dumps(best), duration(before), duration(after)
            records.append(dict(zip(COLUMNS, values, strict=True)))
            show(line(values))
        if not left or time.monotonic() > end:
            break
    show(f"\n{len(records)} rows tuned, {len(left)} not reached")
    return records
