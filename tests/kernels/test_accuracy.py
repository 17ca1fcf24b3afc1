"""Kernels keep to the rule of accuracy; a fault of one token, class or missed barrier does not."""

from functools import lru_cache, partial

import pytest

pytest.importorskip("triton", reason="GPU kernels need Triton")

import torch
from torch import Tensor

from tests.helpers.accuracy_rule import (
    CONTENT,
    HEADS,
    INPUTS,
    POSITION,
    both_passes,
    by_definition,
    inputs_of,
    judged_with,
    spots,
)
from tests.helpers.kernel_checks import INTERPRETED, poisoned_memory
from tests.helpers.operations import OPERATIONS
from tests.helpers.planted_faults import Planted, changed
from visionattn.lab.accuracy import judge

poisoned = pytest.fixture(autouse=True)(poisoned_memory)
interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="on a GPU the tests marked gpu run instead"
)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

ANY_LENGTH = [1, 17, 63, 64, 65, 1000, 70_001]
ON_A_GPU = [(name, n) for name in CONTENT for n in ANY_LENGTH if "direct" not in name or n <= 1000]
ON_A_GPU += [(name, n) for name in POSITION for n in (47, 98, 4900)]
IN_THE_INTERPRETER = [(name, n) for name in CONTENT for n in (1, 150)]
IN_THE_INTERPRETER += [(name, 98) for name in POSITION]


def keep_to_the_rule(
    name: str, n: int, dtype: torch.dtype, device: str, heads: int, record_property
) -> None:
    """Judge the kernels with both kinds of inputs; ``conftest`` prints what there is to spare."""
    judged = {
        inputs: judged_with(name, inputs, n, dtype, device, heads, "triton") for inputs in INPUTS
    }
    where, worst = min(
        ((inputs, x) for inputs in judged for x in judged[inputs]),
        key=lambda found: found[1].margin,
    )
    eps = worst.error / torch.finfo(dtype).eps
    error = f"{eps:.2f} eps in {where}, N = {n}, {worst.quantity}, {worst.measure}"
    record_property(
        "accuracy", [name, str(dtype).removeprefix("torch."), round(worst.margin, 2), error]
    )
    wrong = [(inputs, x) for inputs in judged for x in judged[inputs] if not x.passes]
    assert not wrong, wrong


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize(("name", "n"), IN_THE_INTERPRETER)
def test_kernels_keep_to_the_rule(name, n, dtype, record_property):
    keep_to_the_rule(name, n, dtype, "cpu", 1, record_property)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bfloat16", "float16", "float32"]
)
@pytest.mark.parametrize(("name", "n"), ON_A_GPU)
def test_on_a_gpu_kernels_keep_to_the_rule(name, n, dtype, record_property):
    keep_to_the_rule(name, n, dtype, "cuda", HEADS, record_property)


LOST_AT_ANY_LENGTH = [
    (name, n) for name in CONTENT if "direct" not in name for n in (64, 1000, 70_001)
]
LOST_AT_ANY_LENGTH += [(name, n) for name in POSITION for n in (98, 4900)]


@pytest.mark.parametrize(("name", "n"), LOST_AT_ANY_LENGTH)
def test_one_token_is_more_than_bfloat16_may_err_however_many_there_are(name, n):
    """In float64: the mean without the value of a spot, and gradients without those of a query."""
    tensors, grad = spots(name, n, 16, 16, heads=1)
    function = partial(OPERATIONS[name].fast, impl="eager")
    right = both_passes(function, tensors, grad)
    for token in (0, (n - 1) // 64 * 64, n - 1):
        others = (torch.arange(n) != token)[:, None]
        lost = {"out": function(**tensors | {"v": tensors["v"] * others})}
        less = both_passes(function, tensors, grad * others)
        for results in (lost, {x: less[x] for x in "kv"}):
            judged = judge(results, {x: right[x] for x in results}, torch.bfloat16)
            assert min(x.margin for x in judged) < 0.25, (token, judged)


class Right:
    """One head of an operation without a fault, ready for backward passes, and what is expected."""

    def __init__(self, name: str):
        tensors, self.grad = inputs_of(
            name, "spots", 98 if "joint" in name else 150, torch.float16, heads=1
        )
        self.expected = by_definition(name, tensors, self.grad)
        self.inputs = {x: t.requires_grad_() for x, t in tensors.items()}
        self.operation = partial(OPERATIONS[name].fast, impl="triton")
        self.out = self.forward()
        self.results = {"out": self.out.detach()} | self.backward()

    def forward(self) -> Tensor:
        return self.operation(**self.inputs)

    def backward(self) -> dict[str, Tensor]:
        gradients = torch.autograd.grad(
            self.out, list(self.inputs.values()), self.grad, retain_graph=True
        )
        return dict(zip(self.inputs, gradients, strict=True))


@pytest.fixture(scope="module")
def right():
    """``Right`` by operation, each made once."""
    return lru_cache(Right)


def is_rejected(found: Right, results: dict[str, Tensor], fault: str) -> None:
    """``results`` break the rule in float16 and bfloat16; without the fault they keep to it."""
    excess = {}
    for dtype in (torch.float16, torch.bfloat16):
        expected = {x: found.expected[x] for x in results}
        without = judge({x: found.results[x] for x in results}, expected, torch.bfloat16)
        assert without and all(judged.passes for judged in without), without
        excess[dtype] = max(
            judged.error / judged.allowed for judged in judge(results, expected, dtype)
        )
    times = " and ".join(f"{x:.0f} x what {dtype} may" for dtype, x in excess.items())
    print(f"{fault}: {' and '.join(results)} err {times}")
    assert min(excess.values()) > 1


def put(x: Tensor, to: slice, of: slice, columns: slice = slice(None)) -> None:
    """Rows ``to`` of ``x`` become its rows ``of``."""
    x[:, :, to, columns] = x[:, :, of, columns].clone()


EDGE, BEFORE = slice(64, 65), slice(48, 49)
"""A token that is the first of a block, and one that another block has in its place."""


def without(x: Tensor, token: int) -> Planted:
    return Planted(present=torch.arange(x.shape[2])[None] != token % x.shape[2])


def with_change(x: Tensor, change, **options) -> Planted:
    return Planted([changed(x, change)], **options)


IN_THE_MEAN = {
    "the first key is left out": lambda t, _: without(t["k"], 0),
    "a key at the edge of a block is left out": lambda t, _: without(t["k"], 64),
    "the last key is left out": lambda t, _: without(t["k"], -1),
    "the value of a key counts twice": lambda t, _: with_change(
        t["v"], lambda v: v[:, :, 64].mul_(2)
    ),
    "eight values of a key are stale": lambda t, _: with_change(
        t["v"], lambda v: put(v, EDGE, BEFORE, slice(8, 16))
    ),
}
IN_SEGMENTS = {"the sums of a segment are lost": lambda t, _: Planted(lost_part=True)}
IN_POSITION = {
    "a class of one key is dropped": lambda t, _: with_change(
        t["table"], lambda x: x[:, 1, 2].zero_()
    ),
    "a class of many keys is dropped": lambda t, _: with_change(
        t["table"], lambda x: x[:, 1, 0].zero_()
    ),
    "classes are shifted by one": lambda t, _: with_change(
        t["table"], lambda x: x.copy_(x.roll(1, 2))
    ),
    "weights of eight queries are stale": lambda t, _: with_change(
        t["q"], lambda q: put(q, slice(84, 92), slice(49, 57)), beside=t["table"]
    ),
}
IN_SUMS_OVER_QUERIES = {
    "the first query is left out": lambda t, grad: with_change(grad, lambda g: g[:, :, 0].zero_()),
    "a query at the edge of a block is left out": lambda t, grad: with_change(
        grad, lambda g: g[:, :, 64].zero_()
    ),
    "the last query is left out": lambda t, grad: with_change(grad, lambda g: g[:, :, -1].zero_()),
    "eight gradients of a query are stale": lambda t, grad: with_change(
        grad, lambda g: put(g, EDGE, BEFORE, slice(8, 16))
    ),
}
IN_SUMS_OVER_KEYS = {
    "a key at the edge of a block is left out": lambda t, _: without(t["k"], 64),
    "eight values of a key are stale": lambda t, _: with_change(
        t["v"], lambda v: put(v, EDGE, BEFORE, slice(8, 16))
    ),
}


def in_the_mean(name: str) -> dict:
    """Faults of a forward pass. The content of ``Joint`` has the segments of content alone."""
    segments = IN_SEGMENTS if name in CONTENT and "direct" not in name else {}
    return IN_THE_MEAN | segments | (IN_POSITION if name in POSITION else {})


@interpreted
@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name in CONTENT + POSITION for fault in in_the_mean(name)]
)
def test_a_fault_in_the_mean_breaks_the_rule(name, fault, right):
    found = right(name)
    with torch.no_grad():
        out = in_the_mean(name)[fault](found.inputs, found.grad).into(found.forward)
    is_rejected(found, {"out": out}, fault)


OF_QUERIES = [(name, fault) for name in CONTENT for fault in IN_SUMS_OVER_QUERIES]
OF_QUERIES += [(name, fault) for name in POSITION for fault in list(IN_SUMS_OVER_QUERIES)[1::2]]


@interpreted
@pytest.mark.parametrize(("name", "fault"), OF_QUERIES)
def test_a_fault_in_sums_over_queries_breaks_the_rule(name, fault, right):
    found = right(name)
    results = IN_SUMS_OVER_QUERIES[fault](found.inputs, found.grad).into(found.backward)
    is_rejected(found, {x: results[x] for x in "kv"}, fault)
    if "table" in results:
        is_rejected(found, {"table": results["table"]}, fault)


@interpreted
@pytest.mark.parametrize("fault", IN_SUMS_OVER_KEYS)
@pytest.mark.parametrize("name", [name for name in CONTENT if "direct" in name or "causal" in name])
def test_a_fault_in_sums_over_keys_for_gradients_breaks_the_rule(name, fault, right):
    """The other forms take these sums from the forward pass."""
    found = right(name)
    results = IN_SUMS_OVER_KEYS[fault](found.inputs, found.grad).into(found.backward)
    is_rejected(found, {"q": results["q"]}, fault)


@interpreted
@pytest.mark.parametrize("name", CONTENT + POSITION)
def test_a_stale_row_breaks_the_rule(name, right):
    """A row that is not written holds what was there: here, at best, a row of another tile."""
    found = right(name)
    for x in ("out", "q", "k", "v"):
        stale = found.results[x].clone()
        put(stale, EDGE, BEFORE)
        is_rejected(found, {x: stale}, "a row is stale")
        put(stale := found.results[x].clone(), EDGE, BEFORE, slice(8, 16))
        is_rejected(found, {x: stale}, "eight elements of a row are stale")
    if "table" in found.results:
        is_rejected(
            found, {"table": found.results["table"].roll(1, 2)}, "classes are shifted by one"
        )
        lost = found.results["table"].clone()
        lost[:, 1, 2] = 0
        is_rejected(found, {"table": lost}, "a class is lost")
