"""Every operation against its definition in ``reference.py``, in float64: values and all gradients,
for drawn sizes, layouts, masks and flags. Masked keys, and what absent tokens hold, are NaN.
"""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.ops.drawn_cases import Drawn, cases, compare, drawn
from visionattn.ops import (
    centred_keys,
    kernelized_attention,
    reference,
    softmax_attention,
    taylorshift_attention,
    value_convolution,
    window_attention,
)
from visionattn.ops.rows import ROWS

KINDS = ("none", "flat", "axial", "joint")
FORMS = st.sampled_from(["auto", "direct", "efficient"])
COEFFICIENTS = st.sampled_from([(0.5, 1.0, 1.0), (1.3, -0.7, 0.4), (0.25, 0.0, 0.01)])
NAMED = {
    "whole grid": Drawn(prefix=0, shared=True),
    "one class": Drawn(horizons=(0, 0), masked=True),
    "beyond the grid": Drawn(horizons=(12, 9), missing=14, masked=True),
    "absent, missing and masked": Drawn(absent=True, missing=14, masked=True),
    "tiles": Drawn((13, 11), many_tokens=True, small_blocks=True, d=5, batch=1),
    "one row": Drawn((1, 7), horizons=(3, 2), prefix=0, absent=True),
    "one column": Drawn((7, 1), horizons=(1, 4), prefix=5, masked=True, many_tokens=True),
    "one patch": Drawn((1, 1), horizons=(2, 0)),
    "no keys": Drawn((2, 3), masked=True, seed=4, batch=1),
}
"""Layouts whose names are worth knowing; each operation sees all of them."""


def named(*extra: object):
    """Add the named layouts to a test, of each kind once, with fixed other arguments."""

    def decorate(test):
        for i, case in enumerate(NAMED.values()):
            kind = ("joint", "axial", "flat")[i % 3] if len(extra) else "joint"
            test = example(case.__class__(**{**case.__dict__, "kind": kind}), *extra)(test)
            if kind != "joint":
                test = example(case, *extra)(test)
        return test

    return decorate


def tables_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Take the tables out of the arguments of a call."""
    return {name: tensors.pop(name) for name in ("table", "rows", "columns") if name in tensors}


def with_position(case: Drawn, operation, *, signed: bool = False, **options):
    """An operation whose tables are among its tensors."""

    def call(**tensors):
        given_ = case.given(tables_of(tensors), signed=signed)
        return operation(**tensors, **given_, **options)

    return call


@drawn
@given(cases(kinds=KINDS), FORMS, st.booleans(), COEFFICIENTS, st.booleans())
@named("auto", True, (0.5, 1.0, 1.0), False)
@named("efficient", False, (1.3, -0.7, 0.4), True)
@example(Drawn(lengths=(300, 259), d=5, e=3), "direct", False, (0.5, 1.0, 1.0), False)
@example(Drawn(lengths=(1100, 513), batch=1, d=11, masked=True), "efficient", True, (1, 1, 1), True)
def test_taylorshift_is_its_definition(case, form, normalised, coefficients, scaled):
    options = {"coefficients": coefficients, "output_scale": scaled}
    tensors = case.tensors()
    if normalised:
        tensors["temperature"] = 0.5 + torch.rand(
            case.heads, generator=case.generator(3), dtype=torch.float64
        )
    fast = with_position(case, taylorshift_attention, form=form, **options)
    compare(case, fast, with_position(case, reference.taylorshift_attention, **options), tensors)


class SquareAndExp:
    """A feature map that is an object, another one for queries than for keys."""

    query = staticmethod(torch.square)
    key = staticmethod(torch.exp)


MAPS = {"elu1": "elu1", "relu": "relu", "softmax": "softmax", "object": SquareAndExp}


@drawn
@given(cases(kinds=KINDS), FORMS, st.sampled_from(list(MAPS)))
@named("auto", "elu1")
@named("efficient", "relu")
@named("direct", "softmax")
@example(Drawn(lengths=(1100, 1025), batch=1, heads=1, d=5, e=3), "efficient", "elu1")
def test_kernelized_attention_is_its_definition(case, form, feature_map):
    options = {"feature_map": MAPS[feature_map]}
    fast = with_position(case, kernelized_attention, form=form, **options)
    slow = with_position(case, reference.kernelized_attention, **options)
    compare(case, fast, slow, case.tensors())


@drawn
@given(cases(kinds=("none", "flat", "flat")), FORMS, st.sampled_from(["elu1", "relu", "object"]))
@example(Drawn(lengths=(300, 259), kind="none", d=5, e=3, masked=True), "efficient", "elu1")
@example(Drawn(lengths=(259, 400), kind="flat", d=5, e=3), "efficient", "object")
@example(
    Drawn(lengths=(65, 177), kind="flat", horizons=(80, 0), many_tokens=True), "direct", "relu"
)
@example(Drawn(kind="flat", absent=True, horizons=(0, 0)), "auto", "elu1")
def test_causal_kernelized_attention_is_its_definition(case, form, feature_map):
    case = Drawn(**{**case.__dict__, "missing": 0})
    options = {"feature_map": MAPS[feature_map], "causal": True}
    fast = with_position(case, kernelized_attention, form=form, **options)
    slow = with_position(case, reference.kernelized_attention, **options)
    compare(case, fast, slow, case.tensors())


@drawn
@given(cases(kinds=KINDS), st.booleans())
@named(False)
@named(True)
@example(Drawn((2, 133), kind="axial", d=3, e=2, heads=2), False)
@example(Drawn(lengths=(259, 53), kind="flat", horizons=(128, 0), d=3, e=2), False)
def test_softmax_attention_is_its_definition(case, causal):
    def slow(**tensors):
        given_ = case.given(tables_of(tensors), signed=True)
        bias, present = None, ~case.absent_keys()
        if given_["relative"] is not None:
            keys = tensors["k"].shape[2]
            bias = reference.relative_bias(given_["relative"], tensors["q"], keys)
        return reference.softmax_attention(**tensors, bias=bias, key_mask=present, causal=causal)

    fast = with_position(case, softmax_attention, signed=True, causal=causal)
    compare(case, fast, slow, case.tensors(signed=True))


@drawn
@given(cases(kinds=("none", "axial", "joint"), sequences=False), st.integers(1, 12), st.booleans())
@named(3, True)
@named(4, False)
@named(20, False)
def test_window_attention_is_its_definition(case, window_size, shifted):
    kind = "axial" if case.kind == "flat" else case.kind
    case = Drawn(**{**case.__dict__, "kind": kind})
    options = {"window_size": window_size, "shifted": shifted}
    if case.kind == "none":
        options |= {"layout": case.layout()}

    def of(operation):
        def call(**tensors):
            given_ = case.given(tables_of(tensors), signed=True)
            return operation(**tensors, **options, **given_ | {"key_mask": case.mask()})

        return call

    both = of(window_attention), of(reference.window_attention)
    compare(case, *both, case.tensors(signed=True))


@drawn
@given(cases(kinds=KINDS), st.sampled_from(list(ROWS)), st.booleans(), st.integers(1, 5))
@named("taylorshift", False, 3)
@named("kernelized", False, 3)
@named("softmax", False, 3)
@named("window", True, 3)
@example(Drawn(kind="flat", prefix=0), "kernelized", True, 3)
@example(Drawn(kind="joint", masked=True), "softmax", True, 3)
def test_rows_are_the_weights_of_the_definition(case, name, causal, window_size):
    """The means of unit vectors as values are the weights; those of places are in proportion."""
    signed = name in ("softmax", "window")
    if name == "window":
        case = Drawn(**{**case.__dict__, "lengths": None})
        case = Drawn(**{**case.__dict__, "kind": "axial" if case.kind == "flat" else case.kind})
    tensors = case.tensors(signed=signed)
    q, k, options = (
        tensors.pop("q"),
        tensors.pop("k"),
        case.given(tables_of(tensors), signed=signed),
    )
    k = k.masked_fill(case.absent_keys()[:, None, :, None], float("nan"))
    relative, present = options["relative"], ~case.absent_keys()
    chosen = torch.tensor([q.shape[2] - 1, 0, q.shape[2] // 3, 0])
    if name == "taylorshift":
        options["temperature"] = torch.linspace(0.7, 3.0, case.heads, dtype=torch.float64)
    if name == "kernelized" and case.kind in ("none", "flat") and not case.missing:
        options["causal"] = causal
    if name == "softmax":
        options["causal"] = causal
    if name == "window":
        options |= {"window_size": window_size, "shifted": causal, "key_mask": case.mask()}
        options |= {"layout": case.layout()} if relative is None else {}
    found = ROWS[name](q, k, chosen, **options)
    if name == "softmax":
        options.pop("relative")
        bias = None if relative is None else reference.relative_bias(relative, q, k.shape[2])
        options |= {"bias": bias, "key_mask": present}
    unit = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
    definition = getattr(reference, f"{name}_attention")
    wanted = definition(q, k.nan_to_num(), unit, **options)[:, :, chosen]
    counts = (~case.idle_queries())[:, None, chosen, None]
    torch.testing.assert_close(found.total * counts, wanted * counts, rtol=0, atol=1e-12)
    if found.relative is not None:
        of_places = reference.relative_weights(relative, q, present, options.get("causal", False))
        of_places = of_places[:, :, chosen].expand_as(found.relative)
        mine, own = (
            x / x.sum(-1, keepdim=True).clamp(min=1e-300) for x in (found.relative, of_places)
        )
        torch.testing.assert_close(mine * counts, own * counts, rtol=0, atol=1e-12)


@drawn
@given(cases(kinds=("none",), sequences=False), st.sampled_from([1, 3, 5]))
@named(3)
def test_the_convolution_of_values_and_centred_keys_are_their_definitions(case, side):
    case = Drawn(**{**case.__dict__, "kind": "none"})
    layout, mask, tensors = case.layout(), case.mask(), case.tensors()
    weight = torch.randn(
        case.heads * case.e, 1, side, side, generator=case.generator(4), dtype=torch.float64
    )

    def of(module):
        def call(q, k, v, weight):
            out = module.value_convolution(v, weight, layout, key_mask=mask)
            own = ~case.absent_keys()[:, None, :, None]
            keys = module.centred_keys(k, layout.key_mask(mask)).masked_fill(~own, 0)
            return torch.cat([out, keys], 3).masked_fill(case.idle_queries()[:, None, :, None], 0)

        return call

    fast = of(
        type(
            "Fast",
            (),
            {
                "value_convolution": staticmethod(value_convolution),
                "centred_keys": staticmethod(centred_keys),
            },
        )
    )
    compare(case, fast, of(reference), tensors | {"weight": weight})
