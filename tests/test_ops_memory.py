"""What every operation owes of memory: which it reads, which strides and masks it accepts, how much it takes, where."""

from functools import partial

import pytest
import torch
from operations import OPERATIONS, TOKENS, every_operation
from oracles import assert_agree, draw_mask, peak_bytes, run
from torch._subclasses import FakeTensorMode


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
    operation = OPERATIONS[name]
    tensors, mask = operation.tensors(), draw_mask(2, TOKENS)
    actual = run(partial(operation.fast, key_mask=mask), tensors)
    assert_agree(actual, run(partial(operation.slow, key_mask=mask), tensors))


@every_operation
def test_slices_of_one_projection_are_as_good_as_contiguous_tensors(name):
    operation = OPERATIONS[name]
    tensors = operation.tensors(e=16)
    stacked = {"qkv": torch.stack([tensors.pop(part) for part in "qkv"]).permute(1, 3, 0, 2, 4).contiguous()}

    def sliced(function):
        def call(qkv, **inputs):
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
            assert not (q.is_contiguous() or k.is_contiguous() or v.is_contiguous())
            # The gradient arrives transposed too, as from a model that puts the heads side by side.
            return function(q=q, k=k, v=v, **inputs).transpose(1, 2).flatten(2)

        return call

    assert_agree(run(sliced(operation.fast), stacked | tensors), run(sliced(operation.slow), stacked | tensors))


@every_operation
def test_values_that_broadcast_and_a_gradient_that_broadcasts_are_right(name):
    operation = OPERATIONS[name]
    tensors = operation.tensors(batch=1, e=5)

    def repeated(function):
        def call(q, k, v, **inputs):
            out = function(q=q.expand(2, -1, -1, -1), k=k.expand(2, -1, -1, -1), v=v.expand(2, -1, -1, -1), **inputs)
            return out.sum((0, 2, 3))

        return call

    actual, expected = run(repeated(operation.fast), tensors), run(repeated(operation.slow), tensors)
    assert_agree(actual, expected)


@every_operation
def test_an_image_whose_keys_are_all_masked_gives_zero_and_zero_gradient(name):
    operation = OPERATIONS[name]
    tensors, mask = operation.tensors(), draw_mask(2, TOKENS)
    mask[1] = False
    actual = run(partial(operation.fast, key_mask=mask), tensors)
    assert_agree(actual, run(partial(operation.slow, key_mask=mask), tensors))
    assert all(actual[part][1].eq(0).all() for part in ("out", "q", "k", "v"))


@every_operation
def test_masked_keys_may_hold_anything_finite(name):
    operation = OPERATIONS[name]
    tensors, mask = operation.tensors(torch.float16), draw_mask(2, TOKENS)
    huge = {part: tensors[part].masked_fill(~mask[:, None, :, None], 6e4) for part in "kv"}
    out = operation.fast(**tensors, key_mask=mask)
    assert torch.equal(operation.fast(**tensors | huge, key_mask=mask), out)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if not name.startswith("softmax")])
def test_no_pair_of_tokens_and_no_features_of_all_tokens_are_in_memory_at_once(name):
    operation = OPERATIONS[name]

    def peak(tokens: int) -> int:
        """Of one forward and backward pass."""
        inputs = operation.tensors(torch.float32, batch=1, heads=3, queries=tokens)
        inputs = {key: x.requires_grad_() for key, x in inputs.items()}
        return peak_bytes(lambda: operation.fast(**inputs).sum().backward())

    first, second = 49 * 40, 49 * 80
    floats = (peak(second) - peak(first)) / (second - first) / 4 / 3
    # A matrix of pairs would add 5,880 floats per token and head, packed features 136, a state per token 384.
    assert floats < (700 if any(kind in name for kind in ("flat", "axial", "joint")) else 260)


@every_operation
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_an_operation_makes_itself_is_on_the_device_of_its_inputs(name, dtype):
    operation = OPERATIONS[name]
    inputs = operation.tensors(dtype)
    with FakeTensorMode():  # shapes, dtypes and devices alone: no CUDA needed
        inputs = {key: torch.empty(x.shape, dtype=x.dtype, device="cuda") for key, x in inputs.items()}
        out = operation.fast(**inputs, key_mask=torch.ones(2, TOKENS, dtype=torch.bool, device="cuda"))
        assert (out.device.type, out.dtype, out.shape) == ("cuda", dtype, (2, 3, TOKENS, 24))


@every_operation
def test_shapes_can_be_asked_for_without_memory_on_the_meta_device(name):
    operation = OPERATIONS[name]
    inputs = {key: x.to("meta") for key, x in operation.tensors(torch.bfloat16).items()}
    out = operation.fast(**inputs)
    assert (out.device.type, out.dtype, out.shape) == ("meta", torch.bfloat16, (2, 3, TOKENS, 24))
