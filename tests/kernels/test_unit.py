"""The normalising prologue on a GPU and in the interpreter: values and gradients against float64,
and what the compiler says.
"""

import pytest
import torch

from tests.helpers.kernel_checks import assert_within_budget, every_place, guarded, poisoned_memory

pytest.importorskip("triton", reason="GPU kernels need Triton")
from visionattn.ops.gpu import launch  # noqa: E402
from visionattn.ops.taylorshift.kernels import unit  # noqa: E402

poisoned = pytest.fixture(autouse=True)(poisoned_memory)


def drawn(batch, heads, tokens, d, device, dtype):
    """Vectors of very different lengths, lengths of heads, and a gradient."""
    generator = torch.Generator().manual_seed(tokens + d)
    x = (
        torch.randn(batch, heads, tokens, d, generator=generator)
        * torch.rand(batch, heads, tokens, 1, generator=generator)
        * 20
    )
    length = 1 + 9 * torch.rand(heads, generator=generator)
    grad = torch.randn(x.shape, generator=generator)
    return x.to(device, dtype), length.to(device), grad.to(device, dtype)


def expected(x, length, grad):
    """Values and gradients in float64, by autograd through the definition."""
    x = x.double().requires_grad_()
    length = length.double().requires_grad_()
    y = length[:, None, None] * x / x.norm(dim=-1, keepdim=True)
    dx, d_length = torch.autograd.grad(y, (x, length), grad.double())
    return {"out": y, "x": dx, "length": d_length}


@every_place
@pytest.mark.parametrize("tokens", [1, 17, 63, 64, 65, 130])
@pytest.mark.parametrize(
    ("batch", "heads", "d"), [(1, 1, 16), (2, 3, 24), (1, 5, 32), (1, 5, 64), (2, 1, 8)]
)
def test_vectors_are_brought_to_the_length_of_their_head(batch, heads, d, tokens, device, dtype):
    if dtype == torch.float32 and d > 32:
        pytest.skip("in float32 there are kernels up to a width of 32")
    x, length, grad = drawn(batch, heads, tokens, d, device, dtype)
    wanted = expected(x, length, grad)
    x, grad = guarded(x), guarded(grad)
    dx, d_length = unit.unit_backward(x, length, grad)
    y = unit.unit(x, length)
    assert (y.dtype, dx.dtype, d_length.dtype) == (dtype, dtype, torch.float32)
    assert_within_budget({"out": y, "x": dx, "length": d_length}, wanted, dtype)


@every_place
def test_without_lengths_vectors_are_of_length_one_and_gradients_may_be_wider(device, dtype):
    x, _, grad = drawn(2, 3, 77, 24, device, dtype)
    grad = torch.randn(grad.shape).to(device)
    wanted = expected(x, torch.ones(3, device=device), grad)
    dx, d_length = unit.unit_backward(guarded(x), None, grad)
    assert d_length is None
    del wanted["length"]
    assert_within_budget({"out": unit.unit(guarded(x), None), "x": dx}, wanted, dtype)


@every_place
def test_vectors_shorter_than_the_guard_are_multiplied_by_a_constant(device, dtype):
    length = torch.tensor([1e-4, 3e-4], device=device)
    grad = torch.randn(1, 2, 5, 16).to(device, dtype)
    x = torch.zeros_like(grad)
    x[:, :, 1:3], x[:, :, 3:] = 2**-23, 1
    dx, d_length = unit.unit_backward(x, length, grad)
    y, factor = unit.unit(x, length), length.double()[:, None, None] * 1e6
    assert (y[:, :, 0] == 0).all()
    close = dict(rtol=1e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-7)
    torch.testing.assert_close(y[:, :, :3].double(), (factor * x.double())[:, :, :3], **close)
    torch.testing.assert_close(dx[:, :, :3].double(), (factor * grad.double())[:, :, :3], **close)
    wanted = (
        grad[:, :, 3:].double().sum((0, 2, 3)) / 4
        + grad[:, :, 1:3].double().sum((0, 2, 3)) * 2**-23 * 1e6
    )
    torch.testing.assert_close(d_length.double(), wanted, rtol=1e-3, atol=1e-4)


@every_place
def test_nothing_comes_of_no_tokens(device, dtype):
    x, length = torch.empty(2, 3, 0, 16, device=device, dtype=dtype), torch.ones(3, device=device)
    dx, d_length = unit.unit_backward(x, length, x)
    assert unit.unit(x, length).shape == dx.shape == x.shape
    assert (d_length == 0).all()


@every_place
@pytest.mark.parametrize("d", [16, 32])
def test_results_lie_with_tokens_before_heads(d, device, dtype):
    y = unit.unit(torch.randn(2, 3, 33, d).to(device, dtype), None)
    assert y.transpose(1, 2).is_contiguous()


def test_grids_beyond_what_a_gpu_launches_are_refused():
    x = torch.empty(1, 1, 1, 16, device="meta").expand(2**16, 2**16, 1, 16)
    with pytest.raises(ValueError, match="a grid of"):
        unit.unit(x, None)


@pytest.mark.parametrize(
    ("dtype", "d"), [(torch.float16, 72), (torch.bfloat16, 72), (torch.float32, 40)]
)
def test_widths_beyond_the_table_are_refused(dtype, d):
    with pytest.raises(ValueError, match=f"no launch of d = {d}"):
        launch.launch_row("unit", d, d, dtype, torch.device("cpu"))
