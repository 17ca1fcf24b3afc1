"""Registers, programs per multiprocessor, instructions and bytes of every kernel's launches,
counted without a GPU.

From the root of the repository: ``python -m tests.counting.count`` prints the table, ``--row``
tries another row of ``launches.json``, ``--record`` writes what is counted into
``visionattn/lab/gpu/counts.json``, ``--compare`` holds it against that.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from functools import partial

os.environ.pop("TRITON_INTERPRET", None)
from tests.counting import facts, record, workloads  # noqa: E402
from tests.counting.counting import Count, count  # noqa: E402
from tests.helpers.kernel_launches import Launch  # noqa: E402
from visionattn.lab.gpu import counts as gpu_counts  # noqa: E402

TARGETS = {"8.0": 80, "9.0": 90, "10.0": 100}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
COLUMNS = (
    "kernel",
    "row",
    "regs",
    "spill",
    "smem KB",
    "CTA/SM",
    "looped",
    "once",
    "mma/bar",
    "bytes",
    "loads",
    "us",
    "unit",
)


def cells(name: str, values: list, tokens: int) -> list[str]:
    """One line of the table, counts per token and head."""
    found = dict(zip(gpu_counts.FIELDS, values, strict=True))
    per = f"{found['matrix'] / found['barriers']:.2f}" if found["barriers"] else ""
    microseconds = 1e6 * gpu_counts.launch_from(name, values).seconds(gpu_counts.H100)
    per_token = [f"{found[field] / tokens:.1f}" for field in ("looped", "once")]
    counts = [str(found[field]) for field in ("registers", "spilled_bytes")]
    counts += [f"{found['shared_bytes'] / 1024:.0f}", str(found["resident"]), *per_token, per]
    counts += [f"{found[field] / tokens:.0f}" for field in ("bytes", "loaded_bytes")]
    return [name, found["row"], *counts, f"{microseconds:.0f}", found["unit"]]


def show(lines: list) -> None:
    """Print columns."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


def counted(args: argparse.Namespace) -> Iterator[tuple[workloads.Task, str, str, dict]]:
    """What ``record.counted`` gives of each task of the options, rows changed as they say."""

    def change(kernel: str, row: dict) -> dict:
        return row | args.row if re.search(args.kernel, kernel) else row

    for task in tasks_of(args):
        wanted = partial(re.search, args.kernel)
        counting = facts.count_in_full if args.compare else count
        counting = facts.count if args.registers else counting
        counting = count_checked if args.anew else counting
        yield task, *record.counted(task, change, wanted, counting)


def count_checked(launch: Launch, capability: int) -> Count:
    """Count a launch, and hold what is on record of it to what was counted.

    Raises:
        ValueError: the record says something else.
    """
    made, found = facts.compiled_facts(launch, capability), count(launch, capability)
    known = facts.recorded_of(launch, capability), facts.count_in_full(launch, capability)
    if known not in ((made, found), (None, found)):
        raise ValueError(f"{launch.kernel.__name__}: {known} on record, in truth {(made, found)}")
    return found


def print_table(args: argparse.Namespace) -> None:
    """Count and print what the options name."""
    lines = [COLUMNS]
    table: record.Table = {}
    for (_, case, _), group, operation, found in counted(args):
        tokens = case.batch * case.heads * case.size
        if not found:
            print(f"# {group}: no kernels of {operation}")
            continue
        known = table.get(group, {"launches": {}})["launches"]
        new = {name: x for name, x in found["launches"].items() if known.get(name) != x}
        lines += [cells(name, values, tokens) for name, values in new.items()]
        table.setdefault(group, {"launches": {}})["launches"] |= new
    show(lines)
    if args.csv:
        record.write_csv(args.csv, table)
    print("# looped, once: warp instructions per token and head; loads: bytes asked of the caches;")
    print("# us: microseconds expected on an H100 (visionattn/lab/gpu/counts.py)")


def compare(args: argparse.Namespace) -> int:
    """Print what is worse than recorded; the exit status."""
    import triton

    recorded = gpu_counts.recorded().get(triton.__version__)
    if recorded is None:
        print(f"not compared: no counts are recorded with Triton {triton.__version__}; {advice()}")
        return 0
    problems = []
    for _, group, operation, found in counted(args):
        if group not in recorded:
            print(f"not compared: {group} is not recorded; {advice()}")
            return 0
        if found:
            problems += record.worse(recorded, group, operation, found)
    print("\n".join(dict.fromkeys(problems)) or "nothing is worse than recorded")
    if problems:
        print(f"If that is meant, {advice()}")
    return bool(problems)


def record_all(args: argparse.Namespace) -> None:
    """Count in two processes and write."""
    import triton

    table = record.table_of(tasks_of(args) + (workloads.mark_tasks() if args.marks else []))
    record.save(triton.__version__, table)
    if args.csv:
        record.write_csv(args.csv, table)
    launches = sum(len(group["launches"]) for group in table.values())
    print(f"recorded {launches} launches of Triton {triton.__version__}")


def advice() -> str:
    """How what is counted now becomes what is recorded."""
    options = " ".join(a for a in sys.argv[1:] if a not in ("--compare", "--registers", "--anew"))
    return f"record it: python -m tests.counting.count --record {options}".rstrip()


def tasks_of(args: argparse.Namespace) -> list[workloads.Task]:
    """What the options name."""
    targets, dtypes = [TARGETS[x] for x in args.target], [DTYPES[x] for x in args.dtype]
    operations = [name for name in workloads.OPERATIONS if re.search(args.operation, name)]
    return [
        task
        for dtype in dtypes
        for task in workloads.usual_tasks(
            operations, targets, dtype, workloads.widths(dtype) if args.every_row else args.width
        )
    ]


def widths(text: str) -> tuple[int, int]:
    """d and e from "64" or "16x128"."""
    d, _, e = text.partition("x")
    return int(d), int(e or d)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kernel",
        default="",
        help="regular expression over rows of launches.json, as 'joint means'",
    )
    parser.add_argument(
        "--operation",
        default="",
        help=f"regular expression over: {', '.join(workloads.OPERATIONS)}",
    )
    parser.add_argument("--target", nargs="*", default=["9.0"], choices=list(TARGETS))
    parser.add_argument("--dtype", nargs="*", default=["bf16"], choices=list(DTYPES))
    parser.add_argument(
        "--width", type=widths, nargs="*", default=[(64, 64)], help="d and e, as 64 or 16x128"
    )
    parser.add_argument(
        "--every-row", action="store_true", help="all widths of launches.json instead of --width"
    )
    parser.add_argument(
        "--row",
        type=json.loads,
        default={},
        help="""JSON put over the rows of --kernel: '{"BLOCK_N": 64}'""",
    )
    parser.add_argument(
        "--record", action="store_true", help="write the counts of these options as recorded ones"
    )
    parser.add_argument(
        "--marks", action="store_true", help="with --record: the cases of the GPU table too"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="print what is worse than recorded; exit status 1 if anything is",
    )
    parser.add_argument(
        "--anew",
        action="store_true",
        help="with --compare: compile and count what tests/kernels/compiled.json has too, and hold "
        "the two to each other",
    )
    parser.add_argument(
        "--registers",
        action="store_true",
        help="registers, spills and programs per multiprocessor alone, as tests/kernels/"
        "compiled.json has them where it has the kernel",
    )
    parser.add_argument("--csv", metavar="FILE", help="write what is counted there too")
    args = parser.parse_args()
    if args.row and not args.kernel:
        parser.error("--row changes the rows that --kernel names: give --kernel too")
    if args.record and (args.registers or args.row or args.kernel or args.compare):
        parser.error("--record takes all kernels of an operation as they are, with all counts")
    return args


def main() -> int:
    """Do what the command line says; the exit status."""
    args = parsed()
    if args.compare:
        return compare(args)
    if args.record:
        record_all(args)
    else:
        print_table(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
