"""Kernels of bidirectional kernelized attention: right in the interpreter and on a GPU, fit for
three generations of GPUs.
"""

import pytest

from tests.helpers.tools import words

pytest.importorskip("triton", reason="GPU kernels need Triton")

import torch
from torch import Tensor

from tests.helpers.kernel_checks import (
    SHIFTS,
    assert_rows_within_budget,
    assert_within_budget,
    every_place,
    guarded,
    poisoned_memory,
)
from tests.helpers.oracles import draw
from visionattn.ops import reference

KERNELS = tuple(
    words(
        "_kernelized_state _sums_of_parts _kernelized_means _kernelized_queries_backward "
        "_kernelized_keys_backward"
    )
)
WITHOUT_PRODUCTS = ("_sums_of_parts",)
poisoned = pytest.fixture(autouse=True)(poisoned_memory)


def inputs(
    device: str, dtype: torch.dtype, batch: int, heads: int, n: int, m: int, d: int, e: int
) -> dict[str, Tensor]:
    """q, k, v and the gradient of the mean, between rows of NaN."""
    shapes = {"q": (n, d), "k": (m, d), "v": (m, e), "grad": (n, e)}
    drawn = {
        name: draw(batch, heads, *shape, seed=i).to(dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }
    return {name: guarded(x.to(device)) for name, x in drawn.items()}


def with_kernels(
    q, k, v, grad, key_mask: Tensor | None, feature_map: str, alone: bool = True
) -> dict[str, Tensor]:
    """The mean and its gradients by the functions of the modules, one after the other."""
    from visionattn.ops.gpu import launch
    from visionattn.ops.kernelized.kernels import bidirectional
    from visionattn.ops.kernelized.kernels.state import state_of_keys

    (batch, heads, n, _), e = q.shape, v.shape[3]
    out = launch.tokens_first(v, batch, heads, n, e)
    mass = q.new_empty(batch, heads, n, dtype=torch.float32)
    state = state_of_keys(k, v, key_mask, feature_map)
    bidirectional.means(q, state, feature_map, out, mass)
    dq, along, d_state = bidirectional.queries_backward(
        grad, out, mass, q, state, feature_map, k.shape[2], alone
    )
    if not alone:
        assert dq.dtype == torch.float32
        z = state[batch * heads * q.shape[3] * e :].view(batch, heads, q.shape[3])
        dq = (dq - (along / mass)[..., None] * z[:, :, None]) * q.float().clamp(max=0).exp()
    dk, dv = bidirectional.keys_backward(k, v, key_mask, d_state, feature_map)
    return {"out": out, "q": dq, "k": dk, "v": dv}


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, key_mask: Tensor | None, feature_map: str
) -> dict[str, Tensor]:
    """The same in float64 by the quadratic definition."""
    leaves = [x.double().cpu().detach().requires_grad_() for x in (q, k, v)]
    mask = None if key_mask is None else key_mask.cpu()
    out = reference.kernelized_attention(*leaves, key_mask=mask, feature_map=feature_map)
    return {"out": out} | dict(
        zip("qkv", torch.autograd.grad(out, leaves, grad.double().cpu()), strict=True)
    )


SIZES = [
    (1, 1, 1, 17, 8, 8),
    (2, 3, 17, 63, 16, 24),
    (1, 2, 64, 65, 24, 16),
    (1, 1, 130, 300, 32, 40),
    (1, 2, 65, 17, 64, 8),
]


@every_place
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_mean_and_every_gradient_are_those_of_the_definition(device, dtype, sizes):
    tensors = inputs(device, dtype, *sizes)
    options = dict(key_mask=None, feature_map="elu1")
    assert_within_budget(
        with_kernels(**tensors, **options), by_definition(**tensors, **options), dtype
    )


@every_place
def test_masked_keys_take_no_part_whatever_finite_numbers_they_hold(device, dtype):
    tensors = inputs(device, dtype, 3, 2, 33, 77, 16, 24)
    mask = torch.rand(3, 77, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[2] = False
    options = dict(key_mask=mask.to(device), feature_map="relu")
    expected = by_definition(**tensors, **options)
    for name in "kv":
        tensors[name].masked_fill_(~mask.to(device)[:, None, :, None], 3e4)
    assert_within_budget(with_kernels(**tensors, **options), expected, dtype)


@every_place
def test_queries_whose_features_meet_no_key_get_zero_and_pass_nothing_back(device, dtype):
    tensors = inputs(device, dtype, 1, 2, 20, 30, 8, 8)
    tensors["q"][:, :, 3:9] = -tensors["q"][:, :, 3:9].abs()
    results = with_kernels(**tensors, key_mask=None, feature_map="relu")
    assert not results["out"][:, :, 3:9].any() and not results["q"][:, :, 3:9].any()
    assert_within_budget(
        results, by_definition(**tensors, key_mask=None, feature_map="relu"), dtype
    )


@every_place
@pytest.mark.parametrize("factor", [64.0, 1e-2])
def test_gradients_of_any_size_pass_through_weights_of_any_size(device, dtype, factor):
    tensors = inputs(device, dtype, 1, 2, 130, 256, 16, 16)
    tensors["q"][:, :, 5] = -12  # a mass of some 1e-4
    tensors["grad"] = (tensors["grad"].double() * factor).to(dtype)
    options = dict(key_mask=None, feature_map="elu1")
    scaled = []
    for results in (with_kernels(**tensors, **options), by_definition(**tensors, **options)):
        scaled.append(
            {name: x.double() / (1 if name == "out" else factor) for name, x in results.items()}
        )
    assert_within_budget(*scaled, dtype)


@every_place
@pytest.mark.parametrize("shift", SHIFTS)
def test_features_near_the_end_of_float16_leave_each_query_its_digits(device, dtype, shift):
    """elu1(-12) is 6e-6 and elu1(-16) 1e-7: as float16 they have six and one bits. Each row for
    itself.
    """
    tensors = inputs(device, dtype, 1, 2, 128, 128, 16, 16)
    names, tokens, by = SHIFTS[shift]
    for name in names:
        tensors[name][:, :, tokens] += by
    options = dict(key_mask=None, feature_map="elu1")
    actual, expected = with_kernels(**tensors, **options), by_definition(**tensors, **options)
    assert_within_budget(actual, expected, dtype)
    assert_rows_within_budget(actual, expected, dtype, range(128))


@every_place
def test_gradients_of_queries_are_the_same_from_the_mean_that_was_kept(device, dtype):
    """As with relative position, where the mean is of more than the state."""
    tensors = inputs(device, dtype, 1, 2, 130, 100, 16, 24)
    options = dict(key_mask=None, feature_map="elu1")
    actual = with_kernels(**tensors, **options, alone=False)
    assert_within_budget(actual, by_definition(**tensors, **options), dtype)


@every_place
def test_many_segments_give_the_sums_of_one(device, dtype, monkeypatch):
    from visionattn.ops.gpu import launch

    tensors = inputs(device, dtype, 1, 1, 201, 263, 16, 16)
    monkeypatch.setattr(launch, "segments", lambda *args: 7)
    options = dict(key_mask=None, feature_map="elu1")
    assert_within_budget(
        with_kernels(**tensors, **options), by_definition(**tensors, **options), dtype
    )


def test_a_layer_launches_its_state_the_sum_and_the_means_once_each(monkeypatch):
    from visionattn.ops import kernelized_attention
    from visionattn.ops.gpu import launch

    names = []
    monkeypatch.setattr(launch, "segments", lambda *args: 4)
    monkeypatch.setattr(launch, "run", lambda kernel, *args, **meta: names.append(kernel.__name__))
    kernelized_attention(*(torch.empty(1, 2, 46, 16) for _ in range(3)), impl="triton")
    assert names == ["_kernelized_state", "_sums_of_parts", "_kernelized_means"]
