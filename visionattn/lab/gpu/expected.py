"""What an operation cannot do without, and what each mark of the GPU table is expected to come to,
from counts and rates alone.

It measures nothing. ``cost_of`` counts per head of N tokens of width d, in two bytes per element;
the efficient form of TaylorShift is counted with the features of whole pairs of tiles of 16, which
is what fast code computes. Attention is expected as ``counts.py`` says. What is compared with it is
modelled more coarsely:

- SDPA: the exponentials, 16 in a cycle of a multiprocessor, and the products, one after the other,
  over a share that gives the 335 TFLOP/s of FlashAttention-2 on an H100 (Dao 2023, section 4.1).
- The rest of a model: each product as the slower of its operations and its bytes, and 17 D elements
  of each token and layer that compiled code reads or writes between products, 25 D with output gate
  and convolution of values; three times that with a backward pass. Patch embedding and head are
  left out.
"""

from collections.abc import Callable
from dataclasses import dataclass

from visionattn.lab.cases import Case
from visionattn.lab.gpu.counts import H100, H200, Gpu, expected_seconds, operations_of
from visionattn.lab.gpu.timing import Ceilings
from visionattn.lab.target_table import WITH_GRAPH
from visionattn.lab.targets import Target
from visionattn.models.registration import DEFAULTS
from visionattn.ops.taylorshift.gpu import tile_features

DEPTH, WIDTH = 12, 64
"""Blocks of the models, and d."""
EXPONENTIALS_PER_CYCLE = 16
FLASH_SHARE = 0.78
PRODUCT_SHARE = 0.7
"""The share of the rate of large products that those of a layer are assumed to reach."""
ELEMENTS_BETWEEN = 17
"""Elements of each token in units of the model's width: norm 2, sum and norm 4, GELU 8, sum 3."""
ELEMENTS_OF_GATE = 3
ELEMENTS_OF_CONVOLUTION = 5
"""The same of the product with the gate, and of the convolution, 2, and its sum, 3."""
PRODUCTS = ((1, 3), (1, 1), (1, 4), (4, 1))
"""Widths of what each product of a layer is given and makes, in units of the model's width."""
BYTES = 2
BACKWARD_TIMES = 3
"""Forward and backward of a layer take so many times its forward."""


@dataclass(frozen=True)
class Cost:
    """The work that has to be done."""

    operations: float
    """The operations of matrix products; a multiply and an add are two."""
    bytes: float
    """Each input read once, each output written once."""


def cost_of(operation: str, form: str, tokens: int, d: int, *, groups: int, backward: bool) -> Cost:
    """Return counts of one forward, or of one forward and one backward, of ``groups`` heads with
    values as wide as d.

    Args:
        operation: "kernelized" or "taylorshift".
        form: "direct" or "efficient".
    """
    if operation == "taylorshift" and form == "direct":
        operations = (4 + 10 * backward) * tokens**2 * d
    elif operation == "taylorshift":
        operations = (4 + 8 * backward) * tokens * tile_features(d) * d + (
            8 + 20 * backward
        ) * tokens * d**2
    else:
        operations = (4 + 8 * backward) * tokens * d**2
    return Cost(groups * operations, groups * (8 + 14 * backward) * tokens * d)


def cost_of_case(case: Case) -> Cost:
    """Return counts of an operation, of its efficient form unless it is the direct one."""
    form = "direct" if case.form == "direct" else "efficient"
    sizes = dict(groups=case.batch * case.heads, backward=case.backward)
    return cost_of(case.base, form, case.size, case.width, **sizes)


def in_units(
    cost: Cost, seconds: float, rates: Gpu | Ceilings, sdpa: float | None
) -> dict[str, float]:
    """Return what seconds of an operation come to in the units of its bounds.

    Args:
        rates: of a copy and of a product of matrices.
        sdpa: seconds of ``scaled_dot_product_attention``; None: nothing is said of them.
    """
    by_unit = {
        "% of the copy": cost.bytes / seconds / rates.bytes_per_second,
        "% of the matmul": cost.operations / seconds / rates.operations_per_second,
        "TFLOP/s": cost.operations / seconds / 1e12,
    }
    if sdpa is not None:
        by_unit |= {"x SDPA": sdpa / seconds, "TFLOP/s of SDPA": cost.operations / sdpa / 1e12}
    return by_unit


@dataclass(frozen=True)
class Expected:
    """What one figure is expected to come to."""

    seconds: float
    """The seconds of what is timed."""
    values: tuple[float | None, ...]
    """One for each bound, in its unit; None where counts say nothing of it, as of memory."""

    def text(self, figure: Target) -> str:
        """Return the values with their units."""
        pairs = zip(figure.bounds, self.values, strict=True)
        return ", ".join("?" if value is None else bound.text(value) for bound, value in pairs)


def expected(figure: Target, gpu: Gpu = H100, triton: str | None = None) -> Expected | None:
    """Return what a figure is expected to come to; None where the launches of its operations are
    not recorded.
    """
    if figure.kind not in BY_KIND:
        return None
    operations = [
        expected_seconds(case, gpu, triton) for case in operations_of(figure.case, figure.kind)
    ]
    if None in operations:
        return None
    seconds, by_unit = BY_KIND[figure.kind](figure, operations, gpu)
    return Expected(seconds, tuple(by_unit.get(bound.unit) for bound in figure.bounds))


def expected_on(name: str | None, figure: Target) -> Expected | None:
    """Return what a figure is expected to come to on the GPU of this name: the rates of an H200 for
    one that is called so, and those of an H100 for all others.
    """
    return expected(figure, H200 if name and H200.name in name else H100)


def sdpa_seconds(case: Case, gpu: Gpu) -> float:
    """Return the seconds of FlashAttention-2 on the inputs of an operation."""
    pairs = case.batch * case.heads * case.size**2
    exponential = 1 / (EXPONENTIALS_PER_CYCLE * gpu.multiprocessors * gpu.clock_hertz)
    product = 2 * case.width / gpu.operations_per_second
    passes = 2 * product + exponential
    if case.backward:
        passes += 5 * product + exponential
    return pairs * passes / FLASH_SHARE


def rest_of_model_seconds(case: Case, gpu: Gpu, model: str) -> float:
    """Return the seconds of all layers but attention, in a model whose attention is ``case``.

    Args:
        model: its name; gate and convolution are counted where the name stands for them.
    """
    options = DEFAULTS.get(model, {})
    width, tokens = case.heads * WIDTH, case.batch * case.size
    elements, products = ELEMENTS_BETWEEN, PRODUCTS
    if options.get("output_gate"):
        elements, products = elements + ELEMENTS_OF_GATE, (*products, (1, 1))
    if options.get("value_conv"):
        elements += ELEMENTS_OF_CONVOLUTION
    seconds = elements * width * tokens * BYTES / gpu.bytes_per_second
    for given, made in products:
        operations = 2 * tokens * given * made * width**2
        moved = BYTES * tokens * (given + made) * width
        seconds += max(
            operations / (PRODUCT_SHARE * gpu.operations_per_second), moved / gpu.bytes_per_second
        )
    return DEPTH * seconds * (BACKWARD_TIMES if case.backward else 1)


def _operation(figure: Target, seconds: list[float], gpu: Gpu) -> tuple[float, dict[str, float]]:
    case, (own,) = figure.case, seconds
    return own, in_units(cost_of_case(case), own, gpu, sdpa_seconds(case, gpu))


def _crossover(figure: Target, seconds: list[float], gpu: Gpu) -> tuple[float, dict[str, float]]:
    # At one number of tokens in all, the direct form grows with N and the efficient form stays.
    direct, efficient = seconds
    return efficient, {"tokens": figure.case.size * efficient / direct}


def _model(figure: Target, seconds: list[float], gpu: Gpu) -> tuple[float, dict[str, float]]:
    (attention,) = operations_of(figure.case, figure.kind)
    rest = rest_of_model_seconds(attention, gpu, figure.case.base)
    own = rest + DEPTH * seconds[0]
    other = rest
    if "identity" not in (baseline := figure.baseline or ""):
        other = rest_of_model_seconds(attention, gpu, baseline) + DEPTH * sdpa_seconds(
            attention, gpu
        )
    ratio = other / own
    by_unit = {"x images/s": ratio, "x steps/s": ratio, WITH_GRAPH: ratio}
    return own, by_unit | {"s": own, "ms": 1e3 * own}


BY_KIND: dict[str, Callable] = {"operation": _operation, "crossover": _crossover}
BY_KIND |= dict.fromkeys(("model", "image", "training", "latency"), _model)
