"""Kernels of the efficient form of TaylorShift: right in the interpreter and on a GPU, fit for
three generations of GPUs.
"""

import pytest

pytest.importorskip("triton", reason="GPU kernels need Triton")

import torch
from torch import Tensor

from tests.helpers.kernel_checks import (
    assert_within_budget,
    every_place,
    guarded,
    poisoned_memory,
    relative_error,
)
from tests.helpers.oracles import draw
from visionattn.ops import reference

poisoned = pytest.fixture(autouse=True)(poisoned_memory)

DEFAULT = (0.5, 1.0, 1.0)
UNEQUAL = (0.7, -0.6, 1.3)


def inputs(
    device: str, dtype: torch.dtype, batch: int, heads: int, n: int, m: int, d: int, e: int
) -> dict[str, Tensor]:
    """q of length 2, k of length 1, v and the gradient of the mean, between rows of NaN."""
    shapes = {"q": (n, d), "k": (m, d), "v": (m, e), "grad": (n, e)}
    drawn = {
        name: draw(batch, heads, *shape, seed=i) for i, (name, shape) in enumerate(shapes.items())
    }
    drawn["q"] = 2 * reference.unit_length(drawn["q"])
    drawn["k"] = reference.unit_length(drawn["k"])
    return {name: guarded(x.to(dtype).to(device)) for name, x in drawn.items()}


def with_kernels(
    q, k, v, grad, key_mask: Tensor | None = None, abc=DEFAULT, temperature=None
) -> dict[str, Tensor]:
    """The mean and its gradients by the functions of the modules, one after the other."""
    from visionattn.ops.taylorshift.kernels import efficient, efficient_backward

    normalised = temperature is not None
    state = efficient.state_of_keys(k, v, key_mask, abc, normalised=normalised)
    out, mass = efficient.forward(q, temperature, state, abc, divide=True)
    gradients = efficient_backward.backward(
        grad, out, mass, q, k, v, temperature, key_mask, state, abc
    )
    names = ("q", "k", "v", "temperature") if normalised else "qkv"
    return {"out": out} | dict(zip(names, gradients, strict=False))


def by_definition(
    q, k, v, grad, key_mask: Tensor | None = None, abc=DEFAULT, temperature=None
) -> dict[str, Tensor]:
    """The same in float64 by the quadratic definition."""
    given = (q, k, v) if temperature is None else (q, k, v, temperature)
    leaves = [x.double().cpu().detach().requires_grad_() for x in given]
    mask = None if key_mask is None else key_mask.cpu()
    learned = dict(zip(("temperature",), leaves[3:], strict=False))
    out = reference.taylorshift_attention(*leaves[:3], key_mask=mask, coefficients=abc, **learned)
    names = ("q", "k", "v", *learned)
    return {"out": out} | dict(
        zip(names, torch.autograd.grad(out, leaves, grad.double().cpu()), strict=True)
    )


def weights(q: Tensor, k: Tensor, abc: tuple[float, float, float]) -> Tensor:
    """``a x^2 + b x + c`` of each pair, float64 ``[B, h, N, M]``."""
    (a, b, c), x = abc, q.double() @ k.double().mT
    return a * x * x + b * x + c


SIZES = [
    (1, 1, 1, 17, 8, 8),
    (2, 3, 17, 63, 16, 24),
    (1, 1, 64, 130, 32, 32),
    (1, 2, 65, 33, 24, 8),
    (1, 1, 35, 17, 64, 40),
    (1, 1, 17, 21, 48, 128),
]


@every_place
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_mean_and_every_gradient_are_those_of_the_definition(device, dtype, sizes):
    if dtype == torch.float32 and max(sizes[-2:]) > 32:
        pytest.skip("in float32 there are kernels up to a width of 32")
    tensors = inputs(device, dtype, *sizes)
    assert_within_budget(
        with_kernels(**tensors, abc=UNEQUAL), by_definition(**tensors, abc=UNEQUAL), dtype
    )


def of_any_length(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Queries and keys of lengths from 0.01 to 100, and a temperature of each head."""
    for i, name in enumerate("qk"):
        generator = torch.Generator().manual_seed(i)
        factors = 10 ** (4 * torch.rand(*tensors[name].shape[:3], 1, generator=generator) - 2)
        tensors[name].mul_(factors.to(tensors[name]))
    tensors["temperature"] = torch.linspace(
        4.0, -0.7, tensors["q"].shape[1], device=tensors["q"].device
    )
    return tensors


@every_place
@pytest.mark.parametrize(
    "sizes", [(2, 3, 17, 63, 16, 24), (1, 2, 65, 33, 24, 8), (1, 1, 35, 17, 64, 40)], ids=str
)
def test_vectors_of_any_length_are_brought_to_theirs_within_the_products(device, dtype, sizes):
    if dtype == torch.float32 and max(sizes[-2:]) > 32:
        pytest.skip("in float32 there are kernels up to a width of 32")
    tensors = of_any_length(inputs(device, dtype, *sizes))
    results, expected = with_kernels(**tensors, abc=UNEQUAL), by_definition(**tensors, abc=UNEQUAL)
    if dtype != torch.float32:
        # A sum of some tens of gradients that cancel: held to its budget over more queries
        # elsewhere.
        assert relative_error(results.pop("temperature"), expected.pop("temperature")) <= 1e-2
    assert_within_budget(results, expected, dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets kernels on a processor")
def test_gradients_of_rows_as_given_lose_nothing_to_the_products_of_features():
    # Of a row that is brought to a length the part along it is taken off; of one as given all
    # stays.
    given = {
        name: draw(1, 2, 150, 32, seed=i).half() for i, name in enumerate(("q", "k", "v", "grad"))
    }
    found, expected = with_kernels(**given), by_definition(**given)
    eps = torch.finfo(torch.float16).eps
    errors = {
        name: (x.double() - expected[name]).norm() / expected[name].norm() / eps
        for name, x in found.items()
    }
    assert errors["q"] < 0.41 and errors["k"] < 0.45, (
        errors
    )  # 0.44 and 0.47 with products of 11 bits


@every_place
def test_masked_keys_of_any_length_take_no_part(device, dtype):
    tensors = of_any_length(inputs(device, dtype, 2, 2, 33, 77, 24, 16))
    mask = torch.rand(2, 77, generator=torch.Generator().manual_seed(1)) < 0.5
    expected = by_definition(**tensors, key_mask=mask)
    for name in "kv":
        tensors[name].masked_fill_(~mask.to(device)[:, None, :, None], 3e4)
    assert_within_budget(with_kernels(**tensors, key_mask=mask.to(device)), expected, dtype)


@every_place
def test_a_zero_vector_has_the_weight_c_with_all_and_finite_gradients(device, dtype):
    tensors = inputs(device, dtype, 1, 2, 5, 33, 16, 8)
    tensors["q"][:, :, 2] = 0
    tensors["k"][:, :, 7] = 0
    tensors["grad"] *= 1e-3  # that of a zero vector is a million times as large
    tensors["temperature"] = torch.tensor([2.0, 0.0], device=device)
    results = with_kernels(**tensors, abc=UNEQUAL)
    expected = by_definition(**{name: x.double() for name, x in tensors.items()}, abc=UNEQUAL)
    assert all(x.isfinite().all() for x in results.values())
    mean = tensors["v"].double().mean(2).cpu()
    torch.testing.assert_close(results["out"][:, :, 2].double().cpu(), mean, rtol=1e-2, atol=1e-3)
    for name in ("out", "v", "temperature"):
        assert relative_error(results[name], expected[name]) <= 1e-2, name


@every_place
def test_a_temperature_of_zero_gives_the_mean_and_its_gradients(device, dtype):
    tensors = of_any_length(inputs(device, dtype, 1, 2, 19, 33, 16, 8))
    tensors["temperature"] = torch.zeros(2, device=device)
    assert_within_budget(with_kernels(**tensors), by_definition(**tensors), dtype)


@every_place
@pytest.mark.parametrize("factor", [64.0, 1e-3])
def test_gradients_of_any_size_pass(device, dtype, factor):
    tensors = inputs(device, dtype, 1, 2, 33, 257, 16, 16)
    tensors["grad"] = (tensors["grad"].double() * factor).to(dtype)
    scaled = []
    for results in (with_kernels(**tensors), by_definition(**tensors)):
        scaled.append(
            {name: x.double() / (1 if name == "out" else factor) for name, x in results.items()}
        )
    assert_within_budget(*scaled, dtype)


@every_place
def test_masked_keys_take_no_part_whatever_finite_numbers_they_hold(device, dtype):
    tensors = inputs(device, dtype, 3, 2, 33, 77, 24, 16)
    mask = torch.rand(3, 77, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[2] = False
    expected = by_definition(**tensors, key_mask=mask)
    for name in "kv":
        tensors[name].masked_fill_(~mask.to(device)[:, None, :, None], 3e4)
    results = with_kernels(**tensors, key_mask=mask.to(device))
    assert_within_budget(results, expected, dtype)
    assert not any(x[2].any() for x in results.values())
    assert not any(
        results[name].masked_select(~mask.to(device)[:, None, :, None]).any() for name in "kv"
    )


@every_place
def test_undivided_sums_and_masses_are_in_units_of_the_number_of_keys(device, dtype):
    from visionattn.ops.taylorshift.kernels import efficient

    q, k, v, _ = inputs(device, dtype, 2, 1, 19, 45, 32, 24).values()
    state = efficient.state_of_keys(k, v, None, UNEQUAL, normalised=False)
    values, mass = efficient.forward(q, None, state, UNEQUAL, divide=False)
    w = weights(q, k, UNEQUAL).cpu() / 45
    assert values.dtype == mass.dtype == torch.float32
    assert relative_error(mass, w.sum(3)) <= 2e-6, (
        "half precision too keeps 16 bits of the moments of the keys"
    )
    assert_within_budget({"out": values}, {"out": w @ v.double().cpu()}, dtype)


@every_place
def test_the_gradient_is_that_of_a_mean_to_which_another_term_adds(device, dtype):
    """Another term gives the mass a constant and the sums of values another, as relative position
    does.
    """
    from visionattn.ops.taylorshift.kernels import efficient, efficient_backward

    tensors = inputs(device, dtype, 1, 2, 37, 29, 16, 24)
    q, k, v, grad = tensors.values()
    extra, extra_mass = draw(1, 2, 37, 24, seed=9), 1.5
    leaves = [x.double().cpu().detach().requires_grad_() for x in (q, k, v)]
    w = weights(*leaves[:2], DEFAULT) / 29
    mass = w.sum(3) + extra_mass
    out = (w @ leaves[2] + extra) / mass[..., None]
    expected = dict(zip("qkv", torch.autograd.grad(out, leaves, grad.double().cpu()), strict=True))
    state = efficient.state_of_keys(k, v, None, DEFAULT, normalised=False)
    joint = out.detach().to(device, dtype), mass.detach().to(device, torch.float32)
    gradients = efficient_backward.backward(grad, *joint, q, k, v, None, None, state, DEFAULT)
    assert_within_budget(dict(zip("qkv", gradients[:3], strict=True)), expected, dtype)


@every_place
def test_many_segments_give_the_sums_of_one(device, dtype, monkeypatch):
    from visionattn.ops.gpu import launch

    tensors = inputs(device, dtype, 1, 1, 201, 263, 16, 16)
    monkeypatch.setattr(launch, "segments", lambda *args: 7)
    assert_within_budget(with_kernels(**tensors), by_definition(**tensors), dtype)


@pytest.mark.parametrize(("d", "e"), [(8, 24), (40, 8), (64, 128)])
def test_a_state_has_the_shapes_and_dtypes_that_are_declared(d, e):
    from visionattn.ops.taylorshift.kernels import efficient

    k = torch.randn(2, 1, 5, d, dtype=torch.float16)
    v = torch.randn(2, 1, 5, e, dtype=torch.float16)
    with torch.device("meta"):
        declared = efficient.state_shapes(2, 1, d, e, torch.float16)
    state = recorded_state(efficient, k.to("meta"), v.to("meta"))
    assert [(tuple(x.shape), x.dtype) for x in state] == [
        (tuple(shape), dtype) for shape, dtype in declared
    ]


def recorded_state(module, k: Tensor, v: Tensor):
    """The state that the host allocates, without running a kernel."""
    from tests.helpers.kernel_launches import recorded

    with recorded():
        return module.state_of_keys(k, v, None, DEFAULT, normalised=True)
