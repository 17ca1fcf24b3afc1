"""Time an operation with other block sizes, warps and stages of each kernel:
``python -m visionattn.lab.gpu.launch_tuning taylorshift 4096 64 direct``.

Each trial replaces a row of ``launches.json``. It is checked, and timed in forward and backward. To
use the fastest row of a kernel, paste it into the section of ``launches.json`` for the compute
capability of the GPU.
"""

import argparse
import json
from collections.abc import Iterator, Sequence

from visionattn.cli.tables import duration
from visionattn.lab.gpu.gpu_operations import (
    Bench,
    call_of,
    check,
    draw,
    expected_of,
    in_words,
    is_broken,
    operation_of,
    pick_gpu,
    seconds_of,
)
from visionattn.lab.gpu.gpu_rows import operation
from visionattn.ops.gpu import launch
from visionattn.ops.gpu.launch import launching_with

Row = dict[str, int]


def trials(row: Row) -> Iterator[Row]:
    """Yield the row, and rows with one size halved or doubled, or one stage more or less.

    A kernel with a single stage keeps it, because its loops must not be pipelined. Triton before
    3.9 miscompiles products whose left operand is computed in a pipelined loop, and a check may not
    notice.
    """
    yield row
    for name, value in row.items():
        others = (value // 2, value * 2) if name.startswith(("BLOCK", "PAIRS", "num_warps")) else ()
        if name == "num_stages" and value > 1:
            others = (value - 1, value + 1)
        least = 16 if name.startswith("BLOCK") else 1  # matrix products need 16
        yield from (row | {name: other} for other in others if other >= least)


def tune(name: str, tokens: int, width: int, form: str, bench: Bench) -> Iterator[str]:
    """Yield a line for each kernel and row: the time of forward and backward, or the error."""
    dtype = "float16" if bench.rehearsed else "bfloat16"
    case = operation(name, tokens, width, form, dtype=dtype, backward=True)
    tensors = draw(case, bench)
    expected = expected_of(case, tensors, bench)
    call = call_of(operation_of(case, bench), tensors, backward=True)
    asked: list[tuple] = []

    def note(row_of, *given) -> Row:
        asked.append(given)
        return row_of(*given)

    with launching_with(run=lambda *launched, **meta: None, rows=note):
        call()
    for of_kernel in dict.fromkeys(asked):
        for row in trials(launch.table_row(*of_kernel)):

            def take(row_of, *given, of_kernel=of_kernel, row=row) -> Row:
                return launch.given_of(row) if given == of_kernel else row_of(*given)

            try:
                with launching_with(rows=take):
                    status, _ = check(case, tensors, expected, bench)
                    outcome = duration(seconds_of(call, bench.device)) if status == "ok" else status
            except Exception as error:  # exceptions of compilers and launches share no base class
                if is_broken(error):
                    raise
                outcome = in_words(error)
            yield f"{of_kernel[0]}: {json.dumps(row)}: {outcome}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the lines of one operation on the GPU of this machine."""
    parser = argparse.ArgumentParser("python -m visionattn.lab.gpu.launch_tuning")
    for name, kind in dict(operation=str, tokens=int, width=int, form=str).items():
        parser.add_argument(name, type=kind)
    flags = parser.parse_args(argv)
    bench = Bench.on(pick_gpu())
    for text in tune(flags.operation, flags.tokens, flags.width, flags.form, bench):
        print(text, flush=True)


if __name__ == "__main__":
    main()
