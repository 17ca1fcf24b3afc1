"""Which form of TaylorShift is expected to be faster, by counts alone, and what "auto" loses.

From the root of the repository: ``python -m tests.counting.crossings`` counts both forms on a GPU
of compute capability 9.0 for some numbers of tokens and heads, and prints from how many tokens on
the efficient form is the faster one, where "auto" changes to it, and how much longer its choice
takes than the better form at worst and in the mean of all cases.
"""

import itertools
import os
from statistics import mean

os.environ.pop("TRITON_INTERPRET", None)
import torch  # noqa: E402

from tests.counting import record  # noqa: E402
from visionattn.lab.cases import Case  # noqa: E402
from visionattn.lab.gpu.counts import H100, launch_from  # noqa: E402
from visionattn.lab.gpu.operations import auto_crossing  # noqa: E402
from visionattn.ops.taylorshift.gpu import takes_efficient_kernels  # noqa: E402

TOKENS = (49, 64, 100, 144, 196, 256, 324, 400, 484, 576, 784, 1024, 1444, 1936, 2304, 2704, 3136,
          3600, 4096, 5184, 6400)  # fmt: skip
HEADS = 6
BATCHES = (1, 4, 16, 64, 128)
FORMS = ("direct", "efficient")


def case_of(tokens: int, width: int, batch: int, form: str, backward: bool = True) -> Case:
    """TaylorShift with a temperature, as models have it."""
    name = "taylorshift+temperature"
    return Case("operation", name, tokens, width, form, "bfloat16", backward, batch, HEADS)


def seconds(tokens: int, width: int, batch: int, form: str) -> tuple[float, float]:
    """What a form is expected to take forward, and forward and backward."""
    _, name, found = record.counted((90, case_of(tokens, width, batch, form), width))
    took = {x: launch_from(x, values).seconds(H100) for x, values in found["launches"].items()}
    ways = found["operations"][name]
    return sum(took[x] for x in ways["forward"]), sum(took[x] for x in ways["both"])


def crossing(faster: list[bool]) -> str:
    """Between which two of ``TOKENS`` the efficient form becomes, for good, the faster one."""
    count = len(faster) - next((i for i, x in enumerate(reversed(faster)) if not x), len(faster))
    return f"{TOKENS[max(0, count - 1)]} to {TOKENS[min(count, len(TOKENS) - 1)]}"


def cells(width: int, batch: int, backward: bool, times: list[tuple[float, float]]) -> tuple:
    """One line of the table, from the seconds of both forms at each of ``TOKENS``."""
    losses = []
    for n, (direct, efficient) in zip(TOKENS, times, strict=True):
        q, k, v = torch.empty(3, batch, HEADS, n, width, device="meta")
        takes = takes_efficient_kernels("auto", q, k, v, backward)
        losses.append((efficient if takes else direct) / min(efficient, direct))
    faster = crossing([efficient < direct for direct, efficient in times])
    changes = auto_crossing(case_of(1, width, batch, "auto", backward), lambda n: batch)
    name = "forward+backward" if backward else "forward"
    lost = f"{max(losses):.2f} x", f"{mean(losses):.3f} x"
    return width, HEADS * batch, name, faster, changes, *lost


def main() -> None:
    """Count and print."""
    print("| d | heads x images | pass | faster from | auto changes at | loses at worst | mean |")
    print("|---|---|---|---|---|---|---|")
    for width, batch in itertools.product((16, 32, 64), BATCHES):
        times = [[seconds(n, width, batch, form) for form in FORMS] for n in TOKENS]
        for i_pass, backward in enumerate((False, True)):
            own = [(direct[i_pass], efficient[i_pass]) for direct, efficient in times]
            print("|", " | ".join(map(str, cells(width, batch, backward, own))), "|", flush=True)


if __name__ == "__main__":
    main()
