"""What every operation owes whatever its formula: dtypes, precision, memory, strides, masks, errors, compilation."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch._dynamo.testing
from oracles import (
    assert_agree,
    draw,
    draw_kept,
    draw_mask,
    draw_qkv,
    draw_table,
    peak_bytes,
    relative_error,
    run,
)
from torch import Tensor

from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    Axial,
    Flat,
    Joint,
    kernelized_attention,
    reference,
    softmax_attention,
    taylorshift_attention,
)

FORMS = ("direct", "efficient")
TOKENS = 47
LOW = (torch.float16, torch.bfloat16)


def layout_of(tokens: int) -> TokenLayout:
    """Two prefix tokens and a grid of 5 x 9 for 47 tokens, otherwise a grid of 49 columns."""
    return TokenLayout(2, Grid(5, 9)) if tokens == TOKENS else TokenLayout(0, Grid(tokens // 49, 49))


@dataclass(frozen=True)
class Operation:
    """An operation and its definition, both called with the same tensors by name and a key mask."""

    fast: Callable[..., Tensor]
    slow: Callable[..., Tensor]
    learned: dict[str, Tensor]

    def tensors(self, dtype: torch.dtype = torch.float64, scale: float = 1.0, **sizes) -> dict[str, Tensor]:
        """q, k, v of the dtype; what a model learns stays float32 unless the dtype is float64."""
        qkv = draw_qkv(**{"queries": TOKENS, "d": 16, "e": 24} | sizes)
        learned = torch.float64 if dtype == torch.float64 else torch.float32
        return {name: (scale * x).to(dtype) for name, x in qkv.items()} | {
            name: x.to(learned) for name, x in self.learned.items()
        }


def relative(function: Callable[..., Tensor], kind: type, normalization: str, **options) -> Callable[..., Tensor]:
    """``function`` with the tables among its tensors."""

    def call(**inputs: Tensor) -> Tensor:
        tables = {name: inputs.pop(name) for name in ("table", "rows", "columns") if name in inputs}
        position = kind(**tables, layout=layout_of(inputs["q"].shape[2]), normalization=normalization)
        return function(**inputs, relative=position, **options)

    return call


def twin(**inputs: Tensor) -> Tensor:
    """Softmax with a signed joint table, by its definition."""
    table, mask = inputs.pop("table"), inputs.pop("key_mask", None)
    bias = reference.relative_bias(table, inputs["q"], layout_of(inputs["q"].shape[2]))
    return reference.softmax_attention(**inputs, key_mask=mask, bias=bias)


def operations() -> dict[str, Operation]:
    """Every operation, each form, feature map and kind of relative position once."""
    tau = {"temperature": torch.tensor([0.7, 1.9, 4.0], dtype=torch.float64)}
    joint, rows = {"table": draw_table(3, 5, 5, 16, seed=21)}, draw_table(3, 3, 16, seed=22)
    axial = {"rows": rows, "columns": draw_table(3, 7, 16, seed=23)}
    taylor, kernel = taylorshift_attention, kernelized_attention
    slow_taylor, slow_kernel = reference.taylorshift_attention, reference.kernelized_attention
    named = {}
    for form in FORMS:
        named[f"taylorshift {form}"] = Operation(partial(taylor, form=form), slow_taylor, tau)
        named[f"taylorshift {form}, plain"] = Operation(partial(taylor, form=form), slow_taylor, {})
        for feature_map in ("elu1", "relu", "softmax"):
            options = {"feature_map": feature_map}
            named[f"kernelized {form}, {feature_map}"] = Operation(
                partial(kernel, form=form, **options), partial(slow_kernel, **options), {}
            )
    for normalization in ("sum", "mean"):
        arguments = (Joint, normalization)
        named[f"taylorshift, joint {normalization}"] = Operation(
            relative(taylor, *arguments), relative(slow_taylor, *arguments), tau | joint
        )
        for kind, tables in ((Flat, {"table": rows}), (Axial, axial), (Joint, joint)):
            arguments = (kind, normalization)
            named[f"kernelized, {kind.__name__.lower()} {normalization}"] = Operation(
                relative(kernel, *arguments), relative(slow_kernel, *arguments), tables
            )
    named["softmax"] = Operation(softmax_attention, reference.softmax_attention, {})
    signed = {"table": draw(3, 5, 5, 16, seed=24)}
    named["softmax twin"] = Operation(relative(softmax_attention, Joint, "sum"), twin, signed)
    return named


OPERATIONS = operations()
LINEAR = [name for name in OPERATIONS if "softmax" not in name.split(",")[0] and "direct" not in name]
every_operation = pytest.mark.parametrize("name", OPERATIONS)
every_linear_operation = pytest.mark.parametrize("name", LINEAR)


# Memory, strides, masks


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


@every_linear_operation
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


# Dtypes


@every_operation
def test_float32_is_within_two_millionths_of_float64(name):
    operation = OPERATIONS[name]
    tensors = operation.tensors(torch.float32)
    actual = run(operation.fast, tensors)
    expected = run(operation.slow, {key: x.double() for key, x in tensors.items()})
    for key, x in actual.items():
        assert x.dtype == torch.float32
        assert relative_error(x, expected[key]) < 2e-6, key


@every_operation
@pytest.mark.parametrize("dtype", LOW)
def test_half_precision_errs_at_most_twice_as_much_as_the_definition_in_it(name, dtype):
    operation = OPERATIONS[name]
    tensors = operation.tensors(dtype)
    expected = run(operation.slow, {key: x.double() for key, x in tensors.items()})
    actual = run(operation.fast, tensors)
    in_dtype = run(operation.slow, {key: x.to(dtype) for key, x in tensors.items()})
    for key, x in actual.items():
        assert x.dtype == (tensors[key].dtype if key != "out" else dtype)
        # Rounding the result once is owed to nobody: without this a lucky definition would set no budget at all.
        budget = 2 * relative_error(in_dtype[key], expected[key]) + torch.finfo(dtype).eps / 2
        assert relative_error(x, expected[key]) < budget, key


@every_operation
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *LOW])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_result_has_the_dtype_of_v_and_gradients_that_of_their_inputs(name, dtype, autocast):
    operation = OPERATIONS[name]
    tensors = operation.tensors(dtype, batch=1)
    tensors["v"] = tensors["v"].to(torch.float32)
    inputs = {key: x.requires_grad_() for key, x in tensors.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
        out = operation.fast(**inputs)
    assert out.dtype == torch.float32
    gradients = torch.autograd.grad(out.sum(), list(inputs.values()))
    assert [g.dtype for g in gradients] == [x.dtype for x in inputs.values()]


@every_linear_operation
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_autocast_around_the_forward_pass_changes_nothing(name, dtype):
    operation = OPERATIONS[name]
    tensors = operation.tensors(dtype)

    def under_autocast(**inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return operation.fast(**inputs)

    expected, actual = run(operation.fast, tensors), run(under_autocast, tensors)
    for key, x in expected.items():
        assert torch.equal(actual[key], x), key


@every_linear_operation
def test_a_backward_pass_under_autocast_runs_and_loses_no_more_than_its_dtype(name):
    operation = OPERATIONS[name]
    tensors = operation.tensors(torch.float32)
    expected = run(operation.fast, tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(operation.fast, tensors)
    for key, x in expected.items():
        assert relative_error(actual[key], x) < 4 * torch.finfo(torch.bfloat16).eps, key


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("feature_map", ["elu1", "relu", "softmax"])
def test_sums_over_16384_tokens_do_not_overflow_in_half_precision(feature_map, dtype):
    # Summed in float16 the mass of elu1 overflows and every result is 0.
    tensors = {key: x.to(dtype) for key, x in draw_qkv(1, 1, 16384, d=16, e=4).items()}
    actual = run(partial(kernelized_attention, feature_map=feature_map), tensors)
    exact = run(
        partial(kernelized_attention, feature_map=feature_map), {key: x.double() for key, x in tensors.items()}
    )
    assert actual["out"].ne(0).float().mean() > 0.9
    for key, x in actual.items():
        assert relative_error(x, exact[key]) < torch.finfo(dtype).eps, key


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    "name",
    [name for name in OPERATIONS if "efficient" in name],
)
def test_65536_tokens_sixteen_times_too_large_stay_within_rounding_in_half_precision(name, dtype):
    operation = OPERATIONS[name]
    sizes = {"batch": 1, "heads": 1, "queries": 65536, "d": 8, "e": 4}
    tensors = operation.tensors(dtype, scale=16, **sizes)
    if "temperature" in tensors:
        tensors["temperature"] = tensors["temperature"][-1:]
    actual = run(operation.fast, tensors)
    expected = run(operation.fast, {key: x.double() for key, x in tensors.items()})
    for key, x in actual.items():
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        floor = smallest * expected[key].numel() ** 0.5 / expected[key].norm().item()  # a gradient of 1e-7 is subnormal
        assert relative_error(x, expected[key]) < torch.finfo(dtype).eps + floor, key


# Compilation


def compiled_and_eager(function: Callable[..., Tensor], inputs_of_each_call: list[dict[str, Tensor]]) -> int:
    """Check a function against its compiled self for inputs of several sizes; return the number of graphs."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for inputs in inputs_of_each_call:
        assert_agree(run(compiled, inputs), run(function, inputs), tolerance=1e-13)
    return counter.frame_count


@pytest.mark.parametrize(
    "name", ["taylorshift direct", "taylorshift efficient", "taylorshift auto", "kernelized efficient, elu1"]
)
def test_one_graph_serves_every_length(name):
    if name == "taylorshift auto":  # both of its forms are met: N0 of d = 5 is about 50
        operation, lengths = Operation(taylorshift_attention, reference.taylorshift_attention, {}), (13, 700, 64, 300)
    else:
        operation, lengths = OPERATIONS[name], (77, 300, 64, 513)
    inputs = [operation.tensors(batch=1, queries=n, d=5, e=3) for n in lengths]
    assert compiled_and_eager(operation.fast, inputs) <= 2


@pytest.mark.parametrize(("kind", "missing"), [(Flat, True), (Axial, False), (Joint, False), (Joint, True)])
def test_one_graph_serves_every_grid(kind, missing):
    side = {Flat: (3,), Axial: (3,), Joint: (3, 3)}[kind]
    names = ("rows", "columns") if kind is Axial else ("table",)

    def attend(image: Tensor, **tables: Tensor) -> Tensor:
        """A head of width 5 from an image ``[B, 15, H, W]``, as a model makes it, with a prefix token."""
        layout = TokenLayout(1, Grid(image.shape[2], image.shape[3]))
        tokens = torch.cat([image.mean((2, 3))[:, None], image.flatten(2).mT], dim=1)
        if missing:
            kept = image[:, 0].flatten(1).argsort(1)[:, : layout.grid.num_patches // 2]
            layout = TokenLayout(1, layout.grid, kept)
            tokens = torch.cat([tokens[:, :1], tokens[:, 1:].gather(1, kept[:, :, None].expand(-1, -1, 15))], dim=1)
        q, k, v = tokens.unflatten(2, (3, 1, 5)).permute(2, 0, 3, 1, 4)
        return kernelized_attention(q, k, v, relative=kind(**tables, layout=layout, normalization="mean"))

    inputs = [
        {"image": draw(2, 15, height, width, seed=height)} | {n: draw_table(1, *side, 5, seed=3) for n in names}
        for height, width in ((5, 9), (6, 8), (11, 4), (7, 7))
    ]
    assert compiled_and_eager(attend, inputs) <= 2


# Errors


def wrong(match: str, kind: type[Exception] = ValueError):
    """The error has one line, and all words of ``match`` are in it."""

    @contextlib.contextmanager
    def check():
        with pytest.raises(kind) as caught:
            yield
        message = str(caught.value)
        assert "\n" not in message
        assert all(word in message for word in match.split()), f"{message!r} lacks one of {match!r}"

    return check()


EVERY_ATTENTION = (taylorshift_attention, kernelized_attention, softmax_attention)


@pytest.mark.parametrize("function", EVERY_ATTENTION)
def test_shapes_that_do_not_fit_are_named_with_what_was_wanted(function):
    q, k, v = draw_qkv(queries=7, keys=11, d=5, e=4).values()
    with wrong("k 5 6"):
        function(q, draw(2, 3, 11, 6, seed=0), v)
    with wrong("k 3 4"):
        function(q, draw(2, 4, 11, 5, seed=0), draw(2, 4, 11, 4, seed=0))
    with wrong("v 11 12"):
        function(q, k, draw(2, 3, 12, 4, seed=0))
    with wrong("q (3, 7, 5)"):
        function(q[0], k, v)
    with wrong("key_mask 11 7"):
        function(q, k, v, key_mask=torch.ones(2, 7, dtype=torch.bool))
    with wrong("key_mask bool float32"):
        function(q, k, v, key_mask=torch.ones(2, 11))
    with wrong("q floating int64"):
        function(q.long(), k, v)


@pytest.mark.parametrize("function", EVERY_ATTENTION)
def test_tables_and_layouts_that_do_not_fit_are_named_with_what_was_wanted(function):
    layout, kept = TokenLayout(2, Grid(3, 5)), torch.arange(15).expand(3, 15)
    q, k, v = draw_qkv(queries=17, d=5, e=4).values()
    table = draw_table(3, 3, 3, 5, seed=0)
    with wrong("layout 17 16"):
        function(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], relative=Joint(table, layout))
    with wrong("layout 17 16"):
        function(q, k[:, :, 1:], v[:, :, 1:], relative=Joint(table, layout))
    with wrong("table 2R+1 (3, 4, 3, 5)"):
        function(q, k, v, relative=Joint(draw_table(3, 4, 3, 5, seed=0), layout))
    with wrong("table 5 (3, 3, 3, 6)"):
        function(q, k, v, relative=Joint(draw_table(3, 3, 3, 6, seed=0), layout))
    with wrong("table h 3 (2, 3, 3, 5)"):
        function(q, k, v, relative=Joint(table[:2], layout))
    with wrong("table (3, 3, 3, 5)"):
        function(q, k, v, relative=Flat(table, layout=layout))
    with wrong("rows (3, 4, 5)"):
        function(q, k, v, relative=Axial(draw_table(3, 4, 5, seed=0), table[:, 0], layout))
    with wrong("columns (3, 3, 6)"):
        function(q, k, v, relative=Axial(table[:, 0], draw_table(3, 3, 6, seed=0), layout))
    with wrong("normalization 'max' sum mean"):
        function(q, k, v, relative=Joint(table, layout, normalization="max"))
    with wrong("relative Flat Axial Joint Tensor"):
        function(q, k, v, relative=table)
    with wrong("kept 2 3"):
        function(q, k, v, relative=Joint(table, TokenLayout(2, Grid(3, 5), kept)))


@pytest.mark.parametrize("function", [taylorshift_attention, kernelized_attention])
def test_a_negative_table_is_refused_where_weights_must_be_positive(function):
    q, k, v = draw_qkv(queries=17, d=5, e=4).values()
    table = draw_table(3, 3, 3, 5, seed=0)
    table[1, 2, 0, 3] = -0.25
    layout = TokenLayout(2, Grid(3, 5))
    with wrong("table non-negative -0.25"):
        function(q, k, v, relative=Joint(table, layout))
    with wrong("columns non-negative -0.25"):
        function(q, k, v, relative=Axial(table[:, 0].abs(), table[:, 2], layout))
    assert softmax_attention(q, k, v, relative=Joint(table, layout)).isfinite().all()
    with wrong("mean softmax"):
        softmax_attention(q, k, v, relative=Joint(table, layout, normalization="mean"))


@pytest.mark.parametrize(
    "coefficients", [(0.5, 1.0, 0.5), (0.0, 1.0, 1.0), (-1.0, 0.0, 1.0), (0.5, 2.0, 1.0), (float("nan"), 1.0, 1.0)]
)
def test_coefficients_that_allow_a_weight_of_zero_are_refused(coefficients):
    with wrong(f"coefficients {coefficients[0]} b^2"):
        taylorshift_attention(*draw_qkv(queries=7).values(), coefficients=coefficients)


@pytest.mark.parametrize("function", [taylorshift_attention, kernelized_attention])
def test_names_that_do_not_exist_are_refused_and_what_is_not_built_says_so(function):
    q, k, v = draw_qkv(queries=7).values()
    with wrong("form 'linear' auto direct efficient"):
        function(q, k, v, form="linear")
    with wrong("impl 'cuda' auto eager triton"):
        function(q, k, v, impl="cuda")
    with wrong("triton", (NotImplementedError, ValueError)):
        function(q, k, v, impl="triton")
    with wrong("value_drop", NotImplementedError):
        function(q, k, v, value_drop=0.1)
    assert torch.equal(function(q, k, v, impl="eager"), function(q, k, v))


def test_options_of_one_operation_are_checked_too():
    q, k, v = draw_qkv(queries=7).values()
    with wrong("temperature 3 (2,)"):
        taylorshift_attention(q, k, v, temperature=torch.ones(2))
    with wrong("feature_map 'exp' elu1 relu softmax"):
        kernelized_attention(q, k, v, feature_map="exp")
    for function in (kernelized_attention, softmax_attention):
        with wrong("causal", NotImplementedError):
            function(q, k, v, causal=True)
    with wrong("value_drop", NotImplementedError):
        softmax_attention(q, k, v, value_drop=0.1)
