"""The calibration of ``form="auto"``: measures both forms of each attention on this machine's CPU
and fits the coefficients that predict their times.

``python -m visionattn.lab.calibrate`` prints measured against predicted seconds; ``--write`` also
replaces the CPU's entry of ``visionattn/ops/calibration.json``. It runs on as many threads as
torch takes by default, as users do. What is counted, and how the choice follows from it, stands in
``ops/choice.py``.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from itertools import combinations, cycle
from pathlib import Path
from statistics import mean, median
from time import perf_counter

import torch
from torch import Tensor

from visionattn.cli.files import write_text
from visionattn.cli.parsing import Parser
from visionattn.cli.provenance import processor_name
from visionattn.ops import attentions, choice

ATTENTIONS = {
    operation: partial(kind.function, causal=True) if "causal" in operation else kind.function
    for kind in attentions.ATTENTIONS.values()
    if kind.forms
    for operation in kind.operations
}
"""The operations that have forms, by the names of ``choice.OPERATIONS``."""
DTYPES = {"float32": torch.float32, "float64": torch.float64}
TOKENS = (49, 96, 197, 384, 785, 1536, 3137, 6144)
WIDTHS = (16, 32, 64, 128)
GROUPS = ((1, 3), (2, 6), (1, 12), (4, 3), (1, 6))
MOST_MULTIPLY_ADDS = 1_500_000_000


@dataclass(frozen=True)
class Sizes:
    """Sizes of one attention: queries, keys, widths of q and k and of v, images and heads.

    A ``Case`` of the laboratory has as many queries as keys and one width; counts of work do not.
    """

    n: int
    m: int
    d: int
    e: int
    batch: int
    heads: int

    def work(self, operation: str, form: str) -> dict[str, int]:
        """Return what the form does at these sizes, by kind; see ``choice.work``."""
        return choice.work(
            operation, form, self.n, self.m, self.d, self.e, heads=self.heads, batch=self.batch
        )


@dataclass(frozen=True)
class Row:
    """One case: measured seconds per forward, and by form what a fit of all the other rows predicts
    for it.
    """

    case: Sizes
    measured: dict[str, float]
    predicted: dict[str, float]

    @property
    def chosen(self) -> str:
        """Return the form that is predicted to be the faster one."""
        return "direct" if self.predicted["direct"] <= self.predicted["efficient"] else "efficient"

    @property
    def regret(self) -> float:
        """Time lost by the chosen form against the faster one, as a fraction of the latter."""
        return self.measured[self.chosen] / min(self.measured.values()) - 1


def cases(most: int = MOST_MULTIPLY_ADDS) -> list[Sizes]:
    """Return the grid: each width at each length, with as many images and heads as keep both forms
    of TaylorShift below ``most``.

    ``most`` is in multiply-adds; a single head may take four times as many. A few cases have other
    keys or other v.
    """
    grid = []
    groups = cycle(GROUPS)
    for d in WIDTHS:
        for n in TOKENS:
            few, many = Sizes(n, n, d, d, 1, 1), Sizes(n, n, d, d, *next(groups))
            grid.append(many if _multiply_adds(many) <= most else few)
        grid += [Sizes(320, 1280, d, d, 1, 2), Sizes(900, 900, d, 2 * d, 1, 1)]
    return [case for case in grid if _multiply_adds(case) <= 4 * most]


def _multiply_adds(case: Sizes) -> int:
    return max(case.work("taylorshift", form)["multiply_adds"] for form in choice.FORMS)


def measure(
    attention: Callable, case: Sizes, dtype: torch.dtype, *, rounds: int = 30, seconds: float = 0.4
) -> dict[str, float]:
    """Measure the seconds of one forward by form, the fastest of ``rounds`` rounds or of
    ``seconds``; four rounds at least.

    The forms take turns. The fastest call and not the median: what else the machine does only ever
    adds.
    """
    generator = torch.Generator().manual_seed(case.n)
    shapes = ((case.n, case.d), (case.m, case.d), (case.m, case.e))
    q, k, v = (
        torch.randn(case.batch, case.heads, *shape, dtype=dtype, generator=generator)
        for shape in shapes
    )
    fastest = dict.fromkeys(choice.FORMS, math.inf)
    with torch.no_grad():
        for form in choice.FORMS:
            attention(q, k, v, form=form)
        begin = perf_counter()
        for done in range(rounds):
            if done >= 4 and perf_counter() - begin > seconds:
                break
            for form in choice.FORMS:
                start = perf_counter()
                attention(q, k, v, form=form)
                fastest[form] = min(fastest[form], perf_counter() - start)
    return fastest


def fit(
    operation: str, measured: Sequence[tuple[Sizes, dict[str, float]]]
) -> dict[str, dict[str, float]]:
    """Return seconds per unit of each kind of work, by form: non-negative least squares of the
    relative error.

    The call of the efficient form costs at least that of the direct one. The difference of two
    predictions is then convex in N and not positive at 0, so it changes sign once: an attention
    that takes the efficient form keeps it as N grows.
    """
    seconds, base = {}, 0.0
    for form in choice.FORMS:
        counts = [case.work(operation, form) for case, _ in measured]
        taken = torch.tensor([times[form] for _, times in measured], dtype=torch.float64)
        terms = (
            torch.tensor([list(count.values()) for count in counts], dtype=torch.float64)
            / taken[:, None]
        )
        scale = terms.norm(dim=0)
        found = non_negative_fit(terms / scale, 1 - base / taken) / scale
        seconds[form] = dict(zip(counts[0], found.tolist(), strict=True))
        seconds[form]["calls"] += base
        base = seconds[form]["calls"]
    return seconds


def non_negative_fit(terms: Tensor, wanted: Tensor) -> Tensor:
    """Return the ``x >= 0`` that minimises ``|terms x - wanted|``, for ``terms [rows, kinds]`` of
    few kinds: each set of kinds is tried.

    Where x is positive the minimum is that of plain least squares of those kinds alone; the best
    such x is the answer.
    """
    kinds = terms.shape[1]
    best, least = terms.new_zeros(kinds), wanted.norm()
    for size in range(1, kinds + 1):
        for chosen in combinations(range(kinds), size):
            found = torch.linalg.lstsq(terms[:, chosen], wanted[:, None], driver="gelsd").solution[
                :, 0
            ]
            error = (terms[:, chosen] @ found - wanted).norm()
            if (found >= 0).all() and error < least:
                best, least = terms.new_zeros(kinds), error
                best[list(chosen)] = found
    return best


def predict(operation: str, case: Sizes, seconds: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return seconds by form under the coefficients of ``fit``."""
    return {
        form: sum(seconds[form][kind] * count for kind, count in case.work(operation, form).items())
        for form in choice.FORMS
    }


def cross_validate(operation: str, measured: Sequence[tuple[Sizes, dict[str, float]]]) -> list[Row]:
    """Return a row per case, predicted by a fit of all the other cases."""
    rows = []
    for i, (case, times) in enumerate(measured):
        others = [*measured[:i], *measured[i + 1 :]]
        rows.append(Row(case, times, predict(operation, case, fit(operation, others))))
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    """Return lines with sizes, measured and predicted milliseconds of both forms, the choice and
    what it lost.
    """
    heads = (
        "N",
        "M",
        "d",
        "e",
        "B",
        "h",
        "direct",
        "predicted",
        "efficient",
        "predicted",
        "chosen",
        "lost",
    )
    lines = ["".join(f"{head:>10}" for head in heads)]
    for row in rows:
        milliseconds = [
            1e3 * source[form] for form in choice.FORMS for source in (row.measured, row.predicted)
        ]
        sizes = "".join(f"{size:>10}" for size in asdict(row.case).values())
        lines.append(
            sizes
            + "".join(f"{t:>10.3f}" for t in milliseconds)
            + f"{row.chosen:>10}{row.regret:>10.1%}"
        )
    return lines


def summary(rows: Sequence[Row]) -> str:
    """Return one line: how often the faster form was chosen, what was lost, and how far predictions
    are off.
    """
    right = sum(row.regret == 0 for row in rows)
    errors = [
        abs(row.predicted[form] / row.measured[form] - 1) for row in rows for form in choice.FORMS
    ]
    lost = [row.regret for row in rows]
    return (
        f"the faster form in {right} of {len(rows)} cases; lost {mean(lost):.1%} on average, "
        f"{max(lost):.1%} at worst; "
        f"predictions off by {median(errors):.0%} in the median"
    )


def provenance() -> dict[str, str | int]:
    """Return where and with what the numbers were measured."""
    return {
        "cpu": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "command": "python -m visionattn.lab.calibrate --write",
    }


def write(seconds: dict[str, dict], results: dict[str, dict[str, str]], path: Path) -> None:
    """Replace the CPU's entry in the file by ``seconds`` [dtype][operation][form][kind], or leave
    it as it was.
    """
    content = json.loads(path.read_text())
    content["devices"]["cpu"] = {"provenance": provenance(), "results": results, "seconds": seconds}
    text = json.dumps(content, indent=1) + "\n"
    write_text(path, text)


def calibrate(operation: str, dtype: str, grid: Sequence[Sizes]) -> tuple[dict, list[Row]]:
    """Return the coefficients of the operation in the dtype, and the cross-validated rows."""
    measured = [(case, measure(ATTENTIONS[operation], case, DTYPES[dtype])) for case in grid]
    return fit(operation, measured), cross_validate(operation, measured)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, fit and print; with ``--write`` keep the coefficients. Wrong arguments end with one
    line and exit code 2.
    """
    parser = Parser(
        prog="python -m visionattn.lab.calibrate",
        description='Measure both forms of each attention on this CPU, for form="auto". Takes two '
        "to three minutes.",
        epilog="example:\n  python -m visionattn.lab.calibrate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--write", action="store_true", help=f"replace the CPU's entry of {choice.CALIBRATION.name}"
    )
    args = parser.parse_args(argv)
    seconds, results = {}, {}
    print(", ".join(f"{key} {value}" for key, value in provenance().items() if key != "command"))
    for dtype in DTYPES:
        seconds[dtype], results[dtype] = {}, {}
        for operation in ATTENTIONS:
            seconds[dtype][operation], rows = calibrate(operation, dtype, cases())
            results[dtype][operation] = summary(rows)
            print(
                "\n".join([f"\n{operation}, {dtype}, milliseconds", *table(rows), summary(rows)]),
                flush=True,
            )
    if args.write:
        write(seconds, results, choice.CALIBRATION)
        print(f"\nwrote {choice.CALIBRATION}")


if __name__ == "__main__":
    main()
