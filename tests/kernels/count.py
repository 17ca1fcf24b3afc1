"""Registers, programs per multiprocessor, instructions and bytes of every kernel's launches, counted without a GPU.

``python -m tests.kernels.count --help`` from the root of the repository.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from kernels import workloads  # noqa: E402
from kernels.counting import Count, count  # noqa: E402

TARGETS = {"8.0": 80, "9.0": 90, "10.0": 100}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
COLUMNS = ("kernel", "launch", "regs", "spill", "smem KB", "CTA/SM", "looped", "once", "mma/bar", "bytes", "unit")


def named(launch) -> str:
    """The kernel's row, its widths, and what else it was compiled for."""
    kernel, *held = launch.row or (launch.kernel.__name__, 0, 0, 0)
    flags = [name.lower() for name, value in launch.meta.items() if value is True]
    return " ".join([kernel, "x".join(map(str, held[:2])), *flags, launch.kernel.__name__])


def launched(launch) -> str:
    """Block sizes, warps and stages in short."""
    short = {"num_warps": "warps", "num_stages": "stages"}
    sizes = {k: v for k, v in launch.meta.items() if k.startswith(("BLOCK_N", "BLOCK_M", "BLOCK_T", "BLOCK_Y", "PAIRS", "num_"))}
    return " ".join(f"{short.get(name, name.removeprefix('BLOCK_'))}{value}" for name, value in sizes.items())


def cells(name: str, row: str, found: Count, tokens: int) -> list[str]:
    """One line of the table, per token and head."""
    per = found.matrix / found.barriers if found.barriers else found.matrix and float("inf")
    return [
        name, row, str(found.registers), str(found.spilled_bytes), f"{found.shared_bytes / 1024:.0f}", str(found.resident),
        f"{found.looped / tokens:.1f}", f"{found.once / tokens:.1f}", f"{per:.2f}", f"{found.bytes / tokens:.0f}", found.unit,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", default="", help="regular expression over rows of launches.json, as 'joint means'")
    parser.add_argument("--operation", default="", help=f"regular expression over {', '.join(workloads.OPERATIONS)}")
    parser.add_argument("--target", default="9.0", choices=TARGETS)
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--width", type=int, nargs="*", default=[64], help="d = e")
    parser.add_argument("--row", type=json.loads, default={}, help="""JSON put over the rows of --kernel: '{"BLOCK_N": 64}'""")
    args = parser.parse_args()
    if args.row and not args.kernel:
        parser.error("--row changes the rows that --kernel names: give --kernel too")

    def change(kernel: str, row: dict) -> dict:
        return row | args.row if re.search(args.kernel, kernel) else row

    seen, lines = set(), [COLUMNS]
    for operation in workloads.OPERATIONS:
        if not re.search(args.operation, operation):
            continue
        for d in args.width:
            case = workloads.case_of(operation, d, DTYPES[args.dtype], True)
            try:
                launches = workloads.launches_of(case, TARGETS[args.target], change=change)
            except (NotImplementedError, ValueError) as error:
                print(f"# {operation} d = {d}: {error}")
                continue
            for launch in launches:
                name = named(launch)
                if name in seen or not re.search(args.kernel, name):
                    continue
                seen.add(name)
                found = count(launch, TARGETS[args.target])
                lines.append(cells(name, launched(launch), found, case.batch * case.heads * case.size))
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
