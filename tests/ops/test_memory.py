"""What every operation owes of memory: which it reads, which strides and masks it accepts, how much
it takes, where.
"""

from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.helpers.operations import (
    NOT_SOFTMAX,
    OPERATIONS,
    RELATIVE,
    TOKENS,
    every_linear_operation,
    every_operation,
)
from tests.helpers.oracles import assert_agree, draw_mask, peak_bytes, run
from visionattn.ops import pairs
from visionattn.ops.position import tiles


@pytest.fixture
def poisoned_memory():
    """Every uninitialised tensor is filled with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@every_operation
def test_memory_that_nobody_wrote_is_never_read(name, poisoned_memory):
    """And an image whose keys are all masked gives zero and zero gradients."""
    operation = OPERATIONS[name]
    tensors, mask = operation.tensors(), draw_mask(2, TOKENS)
    mask[1] = False
    actual = run(partial(operation.fast, key_mask=mask), tensors)
    assert_agree(actual, run(partial(operation.slow, key_mask=mask), tensors))
    assert all(actual[part][1].eq(0).all() for part in ("out", "q", "k", "v"))


@every_operation
def test_slices_of_one_projection_are_as_good_as_contiguous_tensors(name):
    operation = OPERATIONS[name]
    tensors = operation.tensors(e=16)
    stacked = {
        "qkv": torch.stack([tensors.pop(part) for part in "qkv"])
        .permute(1, 3, 0, 2, 4)
        .contiguous()
    }

    def sliced(function):
        def call(qkv, **inputs):
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
            assert not (q.is_contiguous() or k.is_contiguous() or v.is_contiguous())
            # The gradient arrives transposed too, as from a model that puts the heads side by side.
            return function(q=q, k=k, v=v, **inputs).transpose(1, 2).flatten(2)

        return call

    assert_agree(
        run(sliced(operation.fast), stacked | tensors),
        run(sliced(operation.slow), stacked | tensors),
    )


@every_operation
def test_values_that_broadcast_and_a_gradient_that_broadcasts_are_right(name):
    operation = OPERATIONS[name]
    tensors = operation.tensors(batch=1, e=5)

    def repeated(function):
        def call(q, k, v, **inputs):
            out = function(
                q=q.expand(2, -1, -1, -1),
                k=k.expand(2, -1, -1, -1),
                v=v.expand(2, -1, -1, -1),
                **inputs,
            )
            return out.sum((0, 2, 3))

        return call

    actual = run(repeated(operation.fast), tensors)
    expected = run(repeated(operation.slow), tensors)
    assert_agree(actual, expected)


@pytest.mark.parametrize("name", [name for name in NOT_SOFTMAX if not name.endswith(" sum")])
def test_no_pair_of_tokens_and_no_features_of_all_tokens_are_in_memory_at_once(name, monkeypatch):
    monkeypatch.setattr(pairs, "MOST_PAIRS", 0)  # test_pairs.py is about its memory
    monkeypatch.setattr(
        tiles, "BAND_ELEMENTS", 1 << 13
    )  # weights of a band do not grow beyond its size: make that small
    operation = OPERATIONS[name]

    def peak(tokens: int) -> int:
        """Of one forward and backward pass."""
        inputs = operation.tensors(torch.float32, batch=1, heads=3, queries=tokens)
        inputs = {key: x.requires_grad_() for key, x in inputs.items()}
        return peak_bytes(lambda: operation.fast(**inputs).sum().backward())

    first, second = 49 * 40, 49 * 80
    floats = (peak(second) - peak(first)) / (second - first) / 4 / 3
    # A matrix of pairs would add 5,880 floats per token and head, packed features 136, a state per
    # token 384. A joint table lays out values with their sums of rows, for several heads as long as
    # these are few elements.
    assert floats < (450 if "joint" in name else 180 if " efficient" in name else 320)


D, E, HEADS = 16, 24, 3
MAPPED_OUTSIDE = {
    "kernelized efficient, softmax": D,
    "kernelized random features": 2 * 2 * 20,
}  # floats per token and head more


def kept_storages(name: str, tokens: int, masked: bool) -> tuple[int, dict[str, int]]:
    """Bytes of the storages that autograd keeps and that are no input, and bytes of the inputs
    among them, by name.
    """
    inputs = OPERATIONS[name].tensors(torch.float32, batch=1, heads=HEADS, queries=tokens, d=D, e=E)
    inputs = {key: x.requires_grad_() for key, x in inputs.items()}
    mask, kept = draw_mask(1, tokens) if masked else None, {}

    def remember(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x):
        out = OPERATIONS[name].fast(**inputs, key_mask=mask)
    assert out.requires_grad
    pointers = {key: x.untyped_storage().data_ptr() for key, x in inputs.items()}
    own = {key: kept.pop(pointer) for key, pointer in pointers.items() if pointer in kept}
    return sum(kept.values()), own


@every_linear_operation
@pytest.mark.parametrize("masked", [False, True])
def test_what_autograd_keeps_is_the_inputs_themselves_output_mass_counts_and_a_state(name, masked):
    once, twice = 49 * 11, 49 * 22
    others, own = kept_storages(name, once, masked)
    more_others, more_own = kept_storages(name, twice, masked)
    per_token = (more_others - others) / (twice - once) / HEADS / 4
    counts = (
        3 if "flat" in name else 25 if "joint" in name else 0
    )  # keys of each class, and causal of all
    counts += "kernelized causal, flat" in name
    bound = E + 1 + counts / HEADS + 0.05  # axial keeps a number for each row and column
    if masked:
        bound += 2 / 4 / HEADS  # a byte for each key in the mask, and in its negative
        bound += E if name in RELATIVE else 0  # values that are 0 where masked are others than v
    if name in MAPPED_OUTSIDE:
        assert own.keys() >= {"v"}
        assert per_token <= bound + 2 * D + MAPPED_OUTSIDE[name]
    else:
        assert own.keys() >= {"q", "k", "v"}
        assert per_token <= bound
    assert 1.8 < (more_others + sum(more_own.values())) / (others + sum(own.values())) < 2.1


@every_operation
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_an_operation_makes_itself_is_on_the_device_of_its_inputs(name, dtype):
    operation = OPERATIONS[name]
    inputs = operation.tensors(dtype)
    # Shapes, dtypes and devices alone: no CUDA needed. The rows of random features are numbers, and
    # cast as they are.
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = {
            key: torch.empty(x.shape, dtype=x.dtype, device="cuda") for key, x in inputs.items()
        }
        out = operation.fast(
            **inputs, key_mask=torch.ones(2, TOKENS, dtype=torch.bool, device="cuda")
        )
        assert (out.device.type, out.dtype, out.shape) == ("cuda", dtype, (2, 3, TOKENS, 24))


@every_operation
def test_shapes_can_be_asked_for_without_memory_on_the_meta_device(name):
    operation = OPERATIONS[name]
    inputs = {key: x.to("meta") for key, x in operation.tensors(torch.bfloat16).items()}
    out = operation.fast(**inputs)
    assert (out.device.type, out.dtype, out.shape) == ("meta", torch.bfloat16, (2, 3, TOKENS, 24))
