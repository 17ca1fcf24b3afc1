"""``visionattn benchmark tune``: block sizes, warps and stages of the kernels, timed on the GPU at
hand, into ``launches.json``.

A row of the table is tuned within the operation that launches it: another row is put in its place
and the result is checked against PyTorch's operations in float32. Then the launches that take the
row are replayed alone and timed, so that a kernel of a small part of the operation gains what it
gains. Rows of other GPUs and of the default section stay as they are.

It varies the blocks, PAIRS, warps and stages of the rows, one at a time. It does not vary: stages
of a kernel whose row has one, into how many segments the tokens are cut (``launch.segments``), the
precision of products, the estimate by which ``form="auto"`` chooses (``taylorshift/gpu.py``), and
what follows from the sizes alone, such as the order of programs. Rows are timed at the tokens of
``OPERATIONS``, without key_mask.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from visionattn.cli.ends import Failed
from visionattn.cli.files import check_free, write_text
from visionattn.cli.tables import Record, duration, heading, line
from visionattn.lab.accuracy import errors_of, wrong
from visionattn.lab.cases import Case
from visionattn.lab.gpu.device import Call, Gpu
from visionattn.lab.gpu.operations import (
    Bench,
    call_of,
    draw,
    eager_wider,
    outputs,
)
from visionattn.lab.gpu.timing import Budget, Timed, in_words, is_fatal, sets_needed
from visionattn.lab.operations import function_of
from visionattn.lab.target_table import BATCH, HEADS
from visionattn.lab.targets import choose_rows
from visionattn.ops.gpu import launch
from visionattn.ops.gpu.launch import launching_with
from visionattn.ops.taylorshift.gpu import TILE, tile_features

Row = dict[str, int]
Table = dict[str, dict[str, list[Row]]]
Key = tuple[str, int, int, int]
"""Kernel, and the d, e and bits of a row of it."""
Print = Callable[[str], None]

HELD = ("d", "e", "bits")
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 256
"""A product of matrices wants 16 at least; larger blocks than the largest only where the row has
one.
"""
BLOCK_REACH = 4
"""A block may become this many times larger or smaller."""
WARPS = (2, 4, 8, 16)
STAGES = (1, 2, 3, 4)
PASSES = 2
"""How often each size of a row has its turn."""
GAIN = 0.02
"""A row is replaced by one that is faster by this part at least."""
COLUMNS = ("kernel", "d", "e", "bits", "operation", "was", "now", "time was", "time now", "tried")
Operations = Sequence[tuple[str, str, int]]
OPERATIONS: Operations = (
    ("kernelized", "efficient", 16_384),
    ("kernelized+causal", "efficient", 16_384),
    ("kernelized+joint", "efficient", 16_384),
    ("taylorshift+temperature", "efficient", 16_384),
    ("taylorshift+temperature", "direct", 4096),
)
"""What launches the kernels: name, form and tokens; of each the forward, then forward and backward.
"""


def sizes_of(row: Row) -> list[str]:
    """Return what of a row can be changed: blocks, pairs, warps, stages. One stage stays one, see
    ``candidates``.
    """
    return [
        name
        for name in row
        if name.startswith(("BLOCK", "PAIRS", "num_warps"))
        or (name == "num_stages" and row[name] > 1)
    ]


def candidates(row: Row, name: str, d: int) -> list[int]:
    """Return values of one size that are worth a try, the present one included.

    Programs share the pairs of tiles of the widest q that the row serves, d, evenly: PAIRS divides
    1, 3, 6 or 10.

    A kernel whose loops must not be pipelined has one stage and keeps it: Triton before 3.9
    miscompiles products whose left operand is computed in such a loop, which a check need not
    notice.
    """
    value = row[name]
    if name == "PAIRS":
        pairs = tile_features(d) // TILE**2
        return [part for part in range(1, pairs + 1) if pairs % part == 0]
    if name == "num_stages":
        return list(STAGES)
    if name == "num_warps":
        return [warps for warps in WARPS if value <= 2 * warps and warps <= 2 * value]
    powers = [1 << power for power in range(16)]
    low = max(SMALLEST_BLOCK, value // BLOCK_REACH)
    high = max(value, min(LARGEST_BLOCK, value * BLOCK_REACH))
    return [power for power in powers if min(low, value) <= power <= high]


def descend(row: Row, d: int, seconds: Callable[[Row], float | None]) -> tuple[Row, int]:
    """Return the fastest row that is found by changing one size at a time, and how many rows were
    tried.

    Args:
        d: the widest q that the row serves.
        seconds: of a row; None: it does not run, or is wrong.
    """
    known: dict[tuple, float | None] = {}

    def of(trial: Row) -> float:
        place = tuple(trial.items())
        if place not in known:
            known[place] = seconds(trial)
        return float("inf") if known[place] is None else known[place]  # type: ignore[return-value]

    best = row
    for _ in range(PASSES):
        before = best
        for name in sizes_of(row):
            best = min(
                [best, *(best | {name: value} for value in candidates(row, name, d))], key=of
            )
        if best == before:
            break
    return best, len(known)


def rows_of(table: Table, capability: str, kernel: str) -> list[Row]:
    """Return the rows of a kernel that a GPU takes: its own, and of the default section those wider
    than all of its own.
    """
    own = table.get(capability, {}).get(kernel, [])

    def is_held(row: Row) -> bool:
        return any(
            x["d"] >= row["d"] and x["e"] >= row["e"] and x["bits"] == row["bits"] for x in own
        )

    return own + [row for row in table["default"].get(kernel, []) if not is_held(row)]


def key_of(table: Table, capability: str, kernel: str, d: int, e: int, bits: int) -> Key | None:
    """Return the row that serves these widths; see ``launch.launch_row``."""
    for rows in (table.get(capability, {}).get(kernel, []), table["default"].get(kernel, [])):
        fit = [row for row in rows if row["d"] >= d and row["e"] >= e and row["bits"] == bits]
        if fit:
            least = min(fit, key=lambda row: (row["d"], row["e"]))
            return (kernel, *(least[name] for name in HELD))  # type: ignore[return-value]
    return None


def all_keys(table: Table, capability: str) -> list[Key]:
    """Return every row of every kernel."""
    return [
        (kernel, *(row[name] for name in HELD))
        for kernel in table["default"]
        for row in rows_of(table, capability, kernel)
    ]


def name_of(key: Key) -> str:
    """Return the text that ``--only`` looks at."""
    return "{} d = {} e = {} {} bits".format(*key)


def put(table: Table, capability: str, key: Key, row: Row) -> None:
    """Give the section of a GPU this row. The section has all rows of a kernel or none, and none
    that is all default.
    """
    kernel, *held = key
    section = table.setdefault(capability, {})
    rows = [dict(old) for old in rows_of(table, capability, kernel)]
    section[kernel] = [
        dict(zip(HELD, held, strict=True)) | row if [old[n] for n in HELD] == held else old
        for old in rows
    ]
    if section[kernel] == table["default"].get(kernel):
        del section[kernel]
    if not section:
        del table[capability]


def text_of(table: Table) -> str:
    """Return the table as JSON, one row in a line."""

    def kernel_text(name: str, rows: Sequence[Row]) -> str:
        lines = ",\n".join(f"      {json.dumps(row)}" for row in rows)
        return f"    {json.dumps(name)}: [\n{lines}\n    ]"

    sections = []
    for name, kernels in table.items():
        inside = ",\n".join(kernel_text(kernel, rows) for kernel, rows in kernels.items())
        sections.append(f"  {json.dumps(name)}: {{\n{inside}\n  }}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def save(table: Table) -> None:
    """Write the table, from which launches are taken at once."""
    write_text(launch.TABLE, text_of(table))
    launch.forget()


@contextmanager
def rows_asked(table: Table, capability: str) -> Iterator[list[Key]]:
    """Launch nothing within it; append the rows that launches would take to the list."""
    keys: list[Key] = []

    def ask(row_of, kernel, d, e, dtype, device) -> Row:
        key = key_of(table, capability, kernel, d, e, 8 * dtype.itemsize)
        if key not in keys:
            keys.append(key)
        return row_of(kernel, d, e, dtype, device)

    with launching_with(run=lambda *launched, **meta: None, rows=ask):
        yield keys


MARK = "of_the_row"
"""Among the compile-time values of a launch while a row is replaced: the launch took them from it.
"""


@contextmanager
def replaced_row(table: Table, capability: str, key: Key, row: Row) -> Iterator[list[Call]]:
    """Let launches within it that take the row of the key take this one.

    Yields:
        A list that gets each of these launches as it is made, to be made again.
    """
    launches: list[Call] = []

    def take(row_of, kernel, d, e, dtype, device) -> Row:
        asked = key_of(table, capability, kernel, d, e, 8 * dtype.itemsize)
        return row | {MARK: True} if asked == key else row_of(kernel, d, e, dtype, device)

    def note(launch_one, kernel, grid, *args, **meta) -> None:
        if meta.pop(MARK, False):
            launches.append(partial(launch_one, kernel, grid, *args, **meta))
        launch_one(kernel, grid, *args, **meta)

    with launching_with(run=note, rows=take):
        yield launches


def again(launched: Call) -> Call:
    """Return a launch made again; what it writes to may have been made for inference alone."""

    def call() -> None:
        with torch.inference_mode():
            launched()

    return call


def workloads(
    table: Table, capability: str, operations: Operations = OPERATIONS
) -> Iterator[tuple[Case, int]]:
    """Yield operations and widths of values, those of 16 bits and of d = e = 64, 32, 16 first."""
    widths = {
        key[1:] for key in all_keys(table, capability) if min(key[1], key[2]) >= SMALLEST_BLOCK
    }
    usual = (64, 32, 16)
    order = sorted(
        widths,
        key=lambda w: (
            w[2] != 16,
            w[0] != w[1],
            usual.index(w[0]) if w[0] in usual else len(usual),
            w,
        ),
    )
    for d, e, bits in order:
        for name, form, tokens in operations:
            for backward in (False, True):
                dtype = "bfloat16" if bits == 16 else "float32"
                yield Case("operation", name, tokens, d, form, dtype, backward, BATCH, HEADS), e


class Workload:
    """An operation on inputs in memory, whose result is known."""

    def __init__(self, case: Case, value_width: int, bench: Bench):
        self.case, self.bench = case, bench
        self.function = function_of(case, case.size, str(bench.device), bench.impl)
        first = draw(case, bench, value_width)
        size = sum(first[name].numel() * first[name].element_size() for name in "qkv")
        self.sets = [
            first,
            *(draw(case, bench, value_width) for _ in range(sets_needed(size, bench.gpu) - 1)),
        ]
        self.expected = eager_wider(case, first, bench)

    def prepare(self, launches: list[Call]) -> Timed | None:
        """Return the launches of a row, of each set of inputs, ready to be timed; None where one
        does not run, or is wrong.

        Args:
            launches: gets them as the operation makes them; see ``replaced_row``.
        """
        from triton.errors import TritonError

        try:
            if wrong(
                errors_of(outputs(self.function, self.sets[0], self.case.backward), self.expected),
                self.case.dtype,
            ):
                return None
            # The check has launched, too: only what follows is timed.
            launches.clear()
            for tensors in self.sets:
                call_of(self.function, tensors, self.case.backward)()
            return (
                self.bench.recorded([again(launched) for launched in launches])
                if launches
                else None
            )
        except (
            TritonError,
            RuntimeError,
            ValueError,
            AssertionError,
        ) as error:  # too large, not compiled, not launched
            if is_fatal(error):
                raise
            return None

    def seconds(self, *prepared: Timed) -> list[float]:
        """Return the medians of one interleaved run."""
        return [spread.median for spread in self.bench.seconds_of(prepared, 1 / 4)]


def tune_row(
    work: Workload, table: Table, capability: str, key: Key
) -> tuple[Row, Row, list[float], int]:
    """Tune a row: return it as it is and as it is best, the seconds of a launch with either, and
    how many rows were tried.
    """
    held = dict(zip(HELD, key[1:], strict=True))
    old = next(row for row in rows_of(table, capability, key[0]) if row.items() >= held.items())
    row = {name: value for name, value in old.items() if name not in HELD}

    def prepared(trial: Row) -> Timed | None:
        with replaced_row(table, capability, key, trial) as launches:
            return work.prepare(launches)

    def seconds(trial: Row) -> float | None:
        found = prepared(trial)
        return None if found is None else work.seconds(found)[0]

    best, tried = descend(row, held["d"], seconds)
    entries = [found for found in map(prepared, (row, best)) if found is not None]
    times = work.seconds(*entries) if entries else []
    if len(times) == 2 and times[1] > (1 - GAIN) * times[0]:
        best, times = row, times[:1]
    return row, best, times, tried


def check_rows(only: str | None) -> None:
    """Raise ValueError for an ``--only`` that fits no row of the table, and for a table that cannot
    be written.
    """
    table = json.loads(launch.TABLE.read_text())
    choose_rows(only, [name_of(key) for key in all_keys(table, "default")])
    check_free(launch.TABLE, overwrite=True)


@contextmanager
def ended_by_fatal_errors() -> Iterator[None]:
    """Raise Failed where a kernel has broken what this process computes on the GPU."""
    try:
        yield
    except Exception as error:
        if is_fatal(error):
            raise Failed(
                f"{in_words(error)}; rows that were tuned before are written, others need a new "
                f"process"
            ) from error
        raise


@ended_by_fatal_errors()
def run_tune(
    only: str | None,
    minutes: float,
    bench: Bench,
    capability: str,
    show: Print,
    operations: Operations = OPERATIONS,
) -> list[Record]:
    """Tune rows until the time is over, print each, and write the table after each that changes.

    Args:
        only: regular expression over rows, such as "taylor direct d = 64"; None: all.
        minutes: after which no row is begun.
        capability: of the GPU, as "9.0".
        operations: that launch the rows.

    Raises:
        Failed: a kernel has broken what this process computes on the GPU.
    """
    table, budget, records = json.loads(launch.TABLE.read_text()), Budget(minutes), []
    keys = all_keys(table, capability)
    left = {keys[i] for i in choose_rows(only, [name_of(key) for key in keys])}
    show(heading(COLUMNS))
    # An operation launches several rows: its inputs are made once for all that are asked of it.
    for case, value_width in workloads(table, capability, operations):
        if not left or budget.over:
            break
        try:
            asked = keys_of(case, value_width, table, capability, bench)
            work = Workload(case, value_width, bench) if left.intersection(asked) else None
        except Exception as error:  # the other operations are tuned all the same
            if is_fatal(error):
                raise
            show(line([f"{case.label}: {in_words(error)}", *[None] * (len(COLUMNS) - 1)]))
            continue
        for key in asked:
            if key not in left or budget.over:
                continue
            left.remove(key)
            row, best, times, tried = tune_row(work, table, capability, key)
            if best != row:
                put(table, capability, key, best)
                save(table)
            records.append(_record(key, case, row, best, times, tried))
            show(line(_cells(records[-1])))
    show(
        f"\n{len(records)} rows tuned, {sum(r['now'] != r['was'] for r in records)} changed, "
        f"{len(left)} not reached"
    )
    return records


def keys_of(case: Case, value_width: int, table: Table, capability: str, bench: Bench) -> list[Key]:
    """Return the rows that an operation takes; none where it has no kernels for these widths."""
    function = function_of(case, case.size, str(bench.device), bench.impl)
    with rows_asked(table, capability) as keys:
        try:
            outputs(function, draw(case, bench, value_width), case.backward)
        except (NotImplementedError, ValueError):
            return []
    return [key for key in keys if key is not None]


def _record(
    key: Key, case: Case, row: Row, best: Row, times: Sequence[float], tried: int
) -> Record:
    way = "forward+backward" if case.backward else "forward"
    record: Record = dict(zip(("kernel", *HELD), key, strict=True)) | {
        "operation": f"{case.label} {way}"
    }
    record |= {"was": json.dumps(row), "now": json.dumps(best)}
    padded = [*times, None, None]
    return record | {"seconds_was": padded[0], "seconds_now": padded[1], "tried": tried}


def _cells(record: Record) -> list:
    now = record["now"] if record["now"] != record["was"] else "unchanged"
    times = [record[name] and duration(record[name]) for name in ("seconds_was", "seconds_now")]
    return [
        *(record[name] for name in ("kernel", *HELD, "operation", "was")),
        now,
        *times,
        record["tried"],
    ]


def make_bench(gpu: Gpu) -> Bench:
    """Return the kernels on this GPU, with fresh random data."""
    return Bench(gpu, gpu.generator(torch.seed() % 2**31))
