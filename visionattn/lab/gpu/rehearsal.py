"""The table of a GPU rehearsed on a processor: the same lines, tiny sizes, Triton's interpreter.

What a clock would say is made up (``device.RehearsedCuda``), so nothing here is a measurement;
that each kind of row runs, is right and is written is what a rehearsal shows. float16 stands for
bfloat16, which the interpreter computes wrongly.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from visionattn.cli.ends import Failed
from visionattn.cli.tables import Record
from visionattn.lab.cases import Case
from visionattn.lab.gpu import eager as gpu_eager
from visionattn.lab.gpu import table as gpu
from visionattn.lab.gpu import tune
from visionattn.lab.gpu.device import rehearsed
from visionattn.lab.gpu.operations import Bench
from visionattn.lab.gpu.timing import Budget
from visionattn.lab.target_table import gpu_targets
from visionattn.lab.targets import Target
from visionattn.ops.gpu import launch

SEED = 1
RATES = dict(copy_bytes=2**12, matmul_size=16)
LARGEST_IMAGE = 48
TUNED = "kernelized means d = 16 e = 16 32 bits"
"""float32: no workload has float16, and bfloat16 is not interpreted."""


def check_interpreter() -> None:
    """Raise ValueError where kernels of tensors on a processor are not interpreted."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "a rehearsal interprets kernels: set TRITON_INTERPRET=1 before Python starts"
        )


def make_bench() -> Bench:
    """Make the bench: kernels in the interpreter, also in models, as on a GPU; blocks of models
    traced and not compiled, one round of each.
    """
    device = rehearsed()
    few = dict(seconds=0.0, rounds=1, depth=1, filled_tokens=512, model_impl="triton")
    return Bench(device, device.generator(SEED), backend="aot_eager", **few)


def shrink(case: Case) -> Case:
    """Return the case in float16 at a size that the interpreter has done at once; other sizes stay
    others.
    """
    dtype = "float16" if case.dtype == "bfloat16" else case.dtype
    if case.kind == "model":
        size = min(LARGEST_IMAGE, max(32, case.size // 64 // 16 * 16))
        wide = case.image_width and size + 16
        sizes = dict(size=size, image_width=wide, batch=min(case.batch, 2))
        return replace(case, dtype=dtype, amp=case.amp.replace("bf16", "fp16"), **sizes)
    return replace(case, size=8 + 2 * case.size.bit_length(), batch=1, heads=1, dtype=dtype)


def all_rows() -> tuple[list[Target], list[Case]]:
    """Return figures, and operations against eager ones, that differ in more than their size."""
    kinds: dict[tuple, Target] = {}
    for figure in gpu_targets():
        units = tuple(bound.unit for bound in figure.bounds)
        kinds.setdefault((figure.kind, figure.what, units, figure.case.width), figure)
    figures = [replace(figure, case=shrink(figure.case)) for figure in kinds.values()]
    first: dict[tuple, Case] = {}
    for case in gpu_eager.eager_cases():
        if case.backward:
            first.setdefault((case.name, case.form, case.dtype), case)
    return figures, [shrink(case) for case in first.values()]


def rows(only: str | None) -> tuple[list[Target], list[Case]]:
    """Return the rows that ``--only`` leaves; see ``gpu.rows``."""
    return gpu.chosen(only, *all_rows())


def run_gpu(
    only: str | None, minutes: float, provenance: Record, show: gpu.Print, keep: gpu.Keep
) -> tuple[list[Record], int]:
    """Run the table as ``gpu.run_gpu`` does; a row that has no time is broken."""
    figures, cases = rows(only)
    records, broken = gpu.run_table(
        make_bench(), figures, cases, SEED, Budget(minutes), provenance, show, keep, **RATES
    )
    return records, max(broken, sum(map(is_broken, records)))


def is_broken(record: Record) -> bool:
    """Tell whether something of the row has no time that has one where all is well."""
    others = [record.get(f"{name}_seconds") for name in ("sdpa", "flash", "flex", "eager")]
    return record["status"] != "ok" or any(isinstance(other, str) for other in others)


def run_tune(only: str | None, minutes: float, show: gpu.Print) -> list[Record]:
    """Tune one row, in a copy of the launch table.

    Raises:
        Failed: no row was tuned.
    """
    table = json.loads(launch.TABLE.read_text())
    fewer = [(name, form, 40) for name, form, _ in tune.OPERATIONS]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / launch.TABLE.name
        copy.write_text(tune.text_of(table))
        with launch.launching_with(table=copy):
            records = tune.run_tune(only or TUNED, minutes, make_bench(), "9.0", show, fewer)
    if not any(record["seconds_was"] for record in records):
        raise Failed("no row was tuned")
    return records


def selected_tests() -> Sequence[str]:
    """Return what pytest runs in a rehearsal: a test of kernels that takes no time."""
    return ("-m", "not gpu", "tests/kernels/test_unit.py", "-k", "shorter_than_the_guard")
