"""Direct TaylorShift on a GPU and in the interpreter: values and gradients against float64, and
what the compiler says.
"""

import pytest
import torch

from tests.helpers.kernel_checks import assert_within_budget, every_place, guarded, poisoned_memory
from tests.helpers.tools import words
from visionattn.ops import reference

pytest.importorskip("triton", reason="GPU kernels need Triton")
from visionattn.ops.taylorshift.kernels import (
    direct,  # noqa: E402
    direct_backward,  # noqa: E402
)

poisoned = pytest.fixture(autouse=True)(poisoned_memory)
COEFFICIENTS = (0.7, 1.1, 0.9)
KERNELS = tuple(
    words(
        "_taylor_direct_means _taylor_direct_terms _taylor_direct_queries_backward "
        "_taylor_direct_keys_backward"
    )
)


def drawn(batch, heads, queries, keys, d, e, device, dtype):
    """q, k, v and a gradient; scores of the size that a temperature of 10 gives."""
    generator = torch.Generator().manual_seed(1000 * queries + keys + d)
    q, k = (torch.randn(batch, heads, n, d, generator=generator) for n in (queries, keys))
    v, grad = (torch.randn(batch, heads, n, e, generator=generator) for n in (keys, queries))
    q, k = 10 * q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    return [x.to(device, dtype) for x in (q, k, v, grad)]


def weights_of(q, k, mask):
    """``a x^2 + b x + c``, 0 for absent keys, ``[B, h, N, M]``."""
    a, b, c = COEFFICIENTS
    x = q @ k.mT
    w = a * x**2 + b * x + c
    return w if mask is None else torch.where(mask[:, None, None], w, 0)


def expected(q, k, v, grad, mask):
    """The mean and its gradients, by autograd in float64 through the quadratic definition."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    out = reference.taylorshift_attention(q, k, v, coefficients=COEFFICIENTS, key_mask=mask)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad.double())
    return {"out": out, "q": dq, "k": dk, "v": dv}


def computed(q, k, v, grad, mask):
    q, k, v, grad = (guarded(x) for x in (q, k, v, grad))
    out, mass = direct.forward(q, k, v, mask, COEFFICIENTS, divide=True)
    dq, dk, dv = direct_backward.backward(grad, guarded(out), mass, q, k, v, mask, COEFFICIENTS)
    assert {x.dtype for x in (out, dq, dk, dv)} == {q.dtype}
    return {"out": out, "q": dq, "k": dk, "v": dv}, mass


@every_place
@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys", "d", "e"),
    [
        (1, 1, 1, 2, 16, 16),
        (2, 3, 17, 65, 24, 32),
        (1, 2, 65, 17, 8, 24),
        (1, 1, 130, 64, 32, 16),
        (1, 2, 129, 257, 16, 24),
        (1, 1, 63, 130, 64, 40),
        (1, 1, 40, 33, 48, 128),
    ],
)
def test_mean_mass_and_gradients_are_those_of_the_definition(
    batch, heads, queries, keys, d, e, device, dtype
):
    if dtype == torch.float32 and max(d, e) > 32:
        pytest.skip("in float32 there are kernels up to a width of 32")
    tensors = drawn(batch, heads, queries, keys, d, e, device, dtype)
    actual, mass = computed(*tensors, None)
    wanted = expected(*tensors, None)
    assert_within_budget(actual, wanted, dtype)
    weights = weights_of(tensors[0].double(), tensors[1].double(), None)
    assert_within_budget({"out": mass}, {"out": weights.sum(-1) / keys}, dtype)


@every_place
@pytest.mark.parametrize("factor", [64.0, 1e-3])
def test_gradients_of_any_size_pass(device, dtype, factor):
    q, k, v, grad = drawn(1, 2, 65, 128, 16, 16, device, dtype)
    grad = (grad.double() * factor).to(dtype)
    scaled = []
    for results in (computed(q, k, v, grad, None)[0], expected(q, k, v, grad, None)):
        scaled.append(
            {name: x.double() / (1 if name == "out" else factor) for name, x in results.items()}
        )
    assert_within_budget(*scaled, dtype)


@every_place
def test_masked_keys_take_no_part_whatever_their_rows_hold(device, dtype):
    q, k, v, grad = drawn(2, 3, 65, 77, 16, 24, device, dtype)
    mask = torch.rand(2, 77, generator=torch.Generator().manual_seed(0)).to(device) < 0.6
    wanted = expected(q, k, v, grad, mask)
    k, v = (
        torch.where(mask[:, None, :, None], x, min(1e15, torch.finfo(dtype).max)) for x in (k, v)
    )
    actual, mass = computed(q, k, v, grad, mask)
    assert_within_budget(actual, wanted, dtype)
    for name in ("k", "v"):
        assert (actual[name].transpose(1, 2)[~mask] == 0).all()
    weights = weights_of(q.double(), k.double(), mask)
    assert_within_budget({"out": mass}, {"out": weights.sum(-1) / 77}, dtype)


@every_place
def test_a_query_without_keys_gets_zero_and_gives_zero(device, dtype):
    q, k, v, grad = drawn(2, 1, 33, 20, 16, 16, device, dtype)
    mask = torch.ones(2, 20, dtype=torch.bool, device=device)
    mask[0] = False
    actual, mass = computed(q, k, v, grad, mask)
    assert all((x[0] == 0).all() for x in (*actual.values(), mass))
    wanted = expected(q[1:], k[1:], v[1:], grad[1:], mask[1:])
    assert_within_budget({name: x[1:] for name, x in actual.items()}, wanted, dtype)


@every_place
@pytest.mark.parametrize("masked", [False, True])
def test_sums_before_the_division_are_float32_in_units_of_the_number_of_keys(masked, device, dtype):
    q, k, v, _ = drawn(1, 3, 65, 100, 32, 24, device, dtype)
    mask = torch.arange(100, device=device)[None] % 3 != 0 if masked else None
    values, mass = direct.forward(
        guarded(q), guarded(k), guarded(v), mask, COEFFICIENTS, divide=False
    )
    assert values.dtype == mass.dtype == torch.float32
    weights = weights_of(q.double(), k.double(), mask)
    assert_within_budget({"out": values}, {"out": weights @ v.double() / 100}, dtype)
    assert_within_budget({"out": mass}, {"out": weights.sum(-1) / 100}, dtype)


@every_place
def test_gradients_divide_by_the_mass_of_all_terms(device, dtype):
    """Of another term only its share in the mean and in the mass is known here."""
    q, k, v, grad = drawn(1, 2, 40, 50, 16, 24, device, dtype)
    more_values = torch.randn(1, 2, 40, 24).double().to(device)
    more_mass = torch.rand(1, 2, 40, 1).double().to(device)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    weights = weights_of(leaves[0], leaves[1], None) / 50
    mass = weights.sum(-1, keepdim=True) + more_mass
    out = (weights @ leaves[2] + more_values) / mass
    gradients = torch.autograd.grad(out, leaves, grad.double())
    given = (grad, out.detach().to(dtype), mass.detach().float().squeeze(-1))
    actual = direct_backward.backward(*given, q, k, v, None, COEFFICIENTS)
    assert_within_budget(
        dict(zip("qkv", actual, strict=True)), dict(zip("qkv", gradients, strict=True)), dtype
    )


@every_place
def test_wide_gradients_of_queries_and_keys_are_those_that_are_rounded_otherwise(device, dtype):
    q, k, v, grad = drawn(1, 2, 40, 50, 16, 24, device, dtype)
    out, mass = direct.forward(q, k, v, None, COEFFICIENTS, divide=True)
    given = (grad, out, mass, q, k, v, None, COEFFICIENTS)
    *wide, dv = direct_backward.backward(*given, torch.float32, torch.float32)
    assert {x.dtype for x in wide} == {torch.float32} and dv.dtype == dtype
    for x, rounded in zip((*wide, dv), direct_backward.backward(*given), strict=True):
        assert torch.equal(x.to(dtype), rounded)


@every_place
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
def test_nothing_to_see_gives_zero(queries, keys, device, dtype):
    q, k, v = (
        torch.ones(1, 2, n, width, device=device, dtype=dtype)
        for n, width in ((queries, 16), (keys, 16), (keys, 8))
    )
    out, mass = direct.forward(q, k, v, None, COEFFICIENTS, divide=True)
    gradients = direct_backward.backward(
        torch.ones_like(out), out, mass, q, k, v, None, COEFFICIENTS
    )
    assert all((x == 0).all() for x in (out, mass, *gradients))
