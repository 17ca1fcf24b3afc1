"""Kernels beside eager operations on a GPU, each called as a user calls it: what ``impl="auto"``
may take.
"""

from collections.abc import Iterator, Sequence

from visionattn.cli.tables import Record, duration
from visionattn.lab.accuracy import errors_of, wrong
from visionattn.lab.cases import Case
from visionattn.lab.gpu.operations import (
    Bench,
    call_of,
    draw,
    eager_wider,
    outputs,
)
from visionattn.lab.gpu.timing import called, seconds_of
from visionattn.lab.operations import function_of
from visionattn.lab.target_table import BATCH, HEADS

AGAINST_EAGER = "kernel against eager"
COLUMNS = (
    "operation",
    "dtype",
    "N",
    "d",
    "pass",
    "kernel",
    "eager",
    "eager / kernel",
    "error",
    "status",
)
ROUNDS, SECONDS = 3, 0.03
"""How long a row is timed: there are many rows, and a factor is wanted, not percents."""
TOKENS = (196, 1024, 16_384)
"""Images of 224, 512 and 2048 px."""
SHIFT = "taylorshift+temperature"
OPERATIONS = (
    ("kernelized", "efficient"),
    ("kernelized+causal", "efficient"),
    ("kernelized+joint", "efficient"),
    (SHIFT, "efficient"),
    (SHIFT, "direct"),
    (f"{SHIFT}+joint", "efficient"),
)
MASKED = (
    ("kernelized+masked", "efficient"),
    (f"{SHIFT}+masked", "efficient"),
    (f"{SHIFT}+masked", "direct"),
)
WIDEST_CAUSAL_FLOAT32 = 16


def eager_cases() -> list[Case]:
    """Return where kernels are compared with eager operations: 16 bits before 32, and small before
    large.
    """
    return sorted(_cases(), key=lambda case: (case.dtype == "float32", case.size))


def _cases() -> Iterator[Case]:
    plain = [
        (*operation, "bfloat16", width, tokens)
        for operation in OPERATIONS
        for width in (16, 32, 64)
        for tokens in TOKENS
    ]
    masked = [(*operation, "bfloat16", 32, tokens) for operation in MASKED for tokens in TOKENS[1:]]
    wide = [
        (*operation, "float32", 32, tokens) for operation in OPERATIONS for tokens in TOKENS[1:]
    ]
    for name, form, dtype, width, tokens in plain + masked + wide:
        width = (
            min(width, WIDEST_CAUSAL_FLOAT32) if dtype == "float32" and "causal" in name else width
        )
        for backward in (False, True):
            yield Case("operation", name, tokens, width, form, dtype, backward, BATCH, HEADS)


def name_of(case: Case) -> str:
    """Return the text that ``--only`` looks at."""
    return f"{AGAINST_EAGER} {_in_short(case)}"


def _in_short(case: Case) -> str:
    return f"{case.label} {_pass(case)} {case.dtype} N = {case.size} d = {case.width}"


def _pass(case: Case) -> str:
    return "forward+backward" if case.backward else "forward"


def measure_against_eager(case: Case, bench: Bench) -> Record:
    """Measure the seconds of the kernels and of eager operations, and the error to eager operations
    of more digits.
    """
    tensors, where = draw(case, bench), str(bench.device)
    kernel, eager = (function_of(case, case.size, where, impl) for impl in (bench.impl, "eager"))
    errors = errors_of(outputs(kernel, tensors, case.backward), eager_wider(case, tensors, bench))
    found: Record = {"status": wrong(errors, case.dtype) or "ok", "error": max(errors.values())}
    if found["status"] != "ok":
        return found
    works = [called([call_of(function, tensors, case.backward)]) for function in (kernel, eager)]
    mine, other = seconds_of(
        works, bench.gpu, seconds=min(SECONDS, bench.seconds), rounds=min(ROUNDS, bench.rounds)
    )
    return found | {
        "seconds": mine.median,
        "eager_seconds": other.median,
        "ratio": other.median / mine.median,
    }


def record_of(case: Case, found: Record) -> Record:
    """Return the row as plain values, whatever of it was measured."""
    record: Record = {
        "what": AGAINST_EAGER,
        "operation": case.label,
        "dtype": case.dtype,
        "tokens": case.size,
    }
    record |= {"width": case.width, "pass": _pass(case)}
    return record | dict.fromkeys(("seconds", "eager_seconds", "ratio", "error")) | found


def cells_of(record: Record) -> list:
    """Return the row for people, under ``COLUMNS``."""
    times = [record[name] and duration(record[name]) for name in ("seconds", "eager_seconds")]
    ratio = record["ratio"] and f"{record['ratio']:.3g}"
    error = None if record["error"] is None else f"{record['error']:.1e}"
    status = "eager is faster" if is_slower(record) else record["status"]
    return [
        *(record[name] for name in ("operation", "dtype", "tokens", "width", "pass")),
        *times,
        ratio,
        error,
        status,
    ]


def is_slower(record: Record) -> bool:
    """Tell whether eager operations were faster than the kernels."""
    return bool(record["ratio"]) and record["ratio"] < 1


def verdict(cases: Sequence[Case], records: Sequence[Record]) -> str:
    """Return one line that names the rows in which eager operations were faster, and what to do
    about them.
    """
    slower = [
        _in_short(case) for case, record in zip(cases, records, strict=True) if is_slower(record)
    ]
    measured = sum(record["ratio"] is not None for record in records)
    among = (
        f"in {len(slower) or 'none'} of the {measured} rows that were timed ({len(cases)} in all)"
    )
    if not slower:
        return f"eager was faster {among}"
    hint = (
        "operation and dtype belong into NOT_BY_AUTO in visionattn/ops/gpu/machine.py, with the "
        "batch x heads x N from "
        'which kernels are faster, so that impl="auto" takes eager below it'
    )
    return f"eager was faster {among}: {'; '.join(slower)} - their {hint}"
