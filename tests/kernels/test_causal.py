"""Causal kernelized attention on a GPU and in the interpreter: values and gradients against
float64, and the compiler's word.
"""

import pytest
import torch

from tests.helpers.kernel_checks import (
    BUDGET,
    SHIFTS,
    assert_rows_within_budget,
    assert_within_budget,
    every_place,
    guarded,
    poisoned_memory,
    relative_error,
)
from tests.helpers.tools import words
from visionattn.ops import reference

pytest.importorskip("triton", reason="GPU kernels need Triton")
from visionattn.ops.gpu import (
    launch,  # noqa: E402
    sums,  # noqa: E402
)
from visionattn.ops.kernelized.kernels import causal as kernelized_causal  # noqa: E402
from visionattn.ops.kernelized.kernels import causal_states  # noqa: E402

poisoned = pytest.fixture(autouse=True)(poisoned_memory)
KERNELS = tuple(
    words(
        "_kernelized_state _sums_of_parts _causal_means _causal_queries_backward "
        "_causal_keys_backward"
    )
)


def drawn(batch, heads, tokens, d, e, device, dtype):
    """q, k, v and a gradient."""
    generator = torch.Generator().manual_seed(1000 * tokens + d)
    widths = (d, d, e, e)
    return [
        torch.randn(batch, heads, tokens, width, generator=generator).to(device, dtype)
        for width in widths
    ]


def expected(q, k, v, grad, mask, feature_map):
    """The mean and its gradients, by autograd in float64 through the quadratic definition."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    out = reference.kernelized_attention(
        q, k, v, feature_map=feature_map, key_mask=mask, causal=True
    )
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad.double())
    return {"out": out, "q": dq, "k": dk, "v": dv}


def computed(q, k, v, grad, mask, feature_map):
    q, k, v, grad = (guarded(x) for x in (q, k, v, grad))
    out, mass = kernelized_causal.causal_means(q, k, v, mask, feature_map)
    dq, dk, dv = kernelized_causal.causal_backward(
        grad, guarded(out), mass, q, k, v, mask, feature_map
    )
    assert {x.dtype for x in (out, dq, dk, dv)} == {q.dtype}
    return {"out": out, "q": dq, "k": dk, "v": dv}, mass


@pytest.fixture
def in_segments(monkeypatch):
    """As many segments as tokens allow, or as asked for."""

    def cut(parts):
        monkeypatch.setattr(
            launch,
            "segments",
            lambda tokens, programs, block, resident: max(1, min(parts, tokens // block)),
        )

    return cut


@every_place
@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "d", "e", "parts"),
    [
        (1, 1, 7, 16, 16, 1),
        (2, 3, 17, 24, 40, 1),
        (1, 2, 63, 8, 24, 1),
        (1, 1, 64, 64, 32, 1),
        (2, 1, 65, 16, 8, 1),
        (1, 1, 130, 32, 16, 2),
        (1, 1, 257, 16, 24, 4),
        (2, 1, 129, 8, 8, 2),
        (1, 1, 70, 32, 64, 1),
    ],
)
def test_mean_and_gradients_are_those_of_the_definition(
    batch, heads, tokens, d, e, parts, in_segments, device, dtype
):
    in_segments(parts)
    tensors = drawn(batch, heads, tokens, d, e, device, dtype)
    actual, mass = computed(*tensors, None, "elu1")
    assert_within_budget(actual, expected(*tensors, None, "elu1"), dtype)
    weights = (reference.elu1(tensors[0].double()) @ reference.elu1(tensors[1].double()).mT).tril()
    assert_within_budget({"out": mass}, {"out": weights.sum(-1) / tokens}, dtype)


@every_place
def test_a_single_token_sees_itself_alone(device, dtype):
    tensors = drawn(2, 3, 1, 16, 24, device, dtype)
    actual, _ = computed(*tensors, None, "elu1")
    assert_within_budget(
        {"out": actual["out"], "v": actual["v"]}, {"out": tensors[2], "v": tensors[3]}, dtype
    )


@every_place
@pytest.mark.parametrize("feature_map", ["elu1", "relu"])
def test_masked_keys_take_no_part_and_queries_before_the_first_key_get_zero(
    feature_map, in_segments, device, dtype
):
    in_segments(2)
    q, k, v, grad = drawn(2, 2, 110, 16, 24, device, dtype)
    mask = torch.rand(2, 110, generator=torch.Generator().manual_seed(0)).to(device) < 0.6
    mask[1, :70] = False
    wanted = expected(q, k, v, grad, mask, feature_map)
    k, v = (
        torch.where(mask[:, None, :, None], x, min(1e15, torch.finfo(dtype).max)) for x in (k, v)
    )
    actual, mass = computed(q, k, v, grad, mask, feature_map)
    assert_within_budget(actual, wanted, dtype)
    assert all((x[1, :, :70] == 0).all() for x in (*actual.values(), mass))
    for name in ("k", "v"):
        assert (actual[name].transpose(1, 2)[~mask] == 0).all()


@every_place
def test_each_token_is_as_precise_as_the_last(in_segments, device, dtype):
    """Means of the first tokens are of few weights, whose share of all is small."""
    in_segments(2)
    tensors = drawn(1, 1, 200, 16, 16, device, dtype)
    actual, _ = computed(*tensors, None, "elu1")
    wanted = expected(*tensors, None, "elu1")
    for i in (1, 63, 64, 65, 128, 199):
        assert (
            relative_error(actual["out"][:, :, i], wanted["out"][:, :, i]) <= 2 * BUDGET[dtype][0]
        ), i


@every_place
@pytest.mark.parametrize("which", ["before", "after", "all"])
def test_sums_of_states_before_and_after_leave_out_their_own(which, device, dtype):
    x = torch.randn(37, 611, generator=torch.Generator().manual_seed(0)).to(device)
    wanted = x.double().sum(0, keepdim=True)
    if which != "all":
        wanted = torch.stack(
            [(x[:i] if which == "before" else x[i + 1 :]).double().sum(0) for i in range(37)]
        )
    assert relative_error(sums.sums_of_parts(x, which), wanted) < 1e-6


@every_place
@pytest.mark.parametrize("shift", SHIFTS)
def test_features_near_the_end_of_float16_leave_each_query_its_digits(
    device, dtype, shift, in_segments
):
    """elu1(-12) is 6e-6 and elu1(-16) 1e-7: as float16 they have six and one bits. Each row for
    itself.

    But the first query, which sees one key: the gradient of its features is 0, a difference of
    equal numbers.
    """
    in_segments(2)
    tensors = dict(
        zip(("q", "k", "v", "grad"), drawn(1, 2, 128, 16, 16, device, dtype), strict=True)
    )
    names, tokens, by = SHIFTS[shift]
    for name in names:
        tensors[name][:, :, tokens] += by
    actual = computed(*tensors.values(), None, "elu1")[0]
    wanted = expected(*tensors.values(), None, "elu1")
    assert_within_budget(actual, wanted, dtype)
    assert_rows_within_budget(actual, wanted, dtype, range(1, 128))


def test_chunks_that_leave_their_segment_are_refused(monkeypatch):
    q = torch.empty(1, 1, 64, 16)
    monkeypatch.setattr(launch, "options", lambda *args: {"BLOCK_N": 48})
    with pytest.raises(AssertionError, match="does not divide 64"):
        causal_states.options_of("causal means", q, q)


def test_nothing_comes_of_no_tokens():
    q, v = torch.empty(2, 3, 0, 16), torch.empty(2, 3, 0, 24)
    out, mass = kernelized_causal.causal_means(q, q, v, None, "elu1")
    gradients = kernelized_causal.causal_backward(v, out, mass, q, q, v, None, "elu1")
    assert [x.shape for x in (out, *gradients)] == [v.shape, q.shape, q.shape, v.shape]
