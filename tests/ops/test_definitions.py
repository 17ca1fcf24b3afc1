"""Every operation against its definition in ``reference.py``, in float64: values and all gradients,
for drawn sizes, layouts, masks and flags. Memory that nobody wrote is NaN; tokens that play no part
hold NaN, infinity or huge numbers.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.ops.drawn_cases import (
    Drawn,
    cases,
    compare,
    drawn,
    map_of,
    paired,
    tables_of,
)
from visionattn.ops import centred_keys, reference, value_convolution
from visionattn.ops.attention_rows import ROWS

KINDS = ("none", "flat", "axial", "joint")
FORMS = st.sampled_from(["auto", "direct", "efficient"])
COEFFICIENTS = st.sampled_from([(0.5, 1.0, 1.0), (1.3, -0.7, 0.4), (0.25, 0.0, 0.01)])
NAMED = {
    "whole grid": Drawn(prefix=0, shared=True),
    "one class": Drawn(horizons=(0, 0), masked=True),
    "beyond the grid": Drawn(horizons=(12, 9), missing=14, masked=True),
    "absent, missing and masked": Drawn(absent=True, missing=14, masked=True, unread=True),
    "tiles": Drawn((13, 11), many_tokens=True, small_blocks=True, d=5, batch=1),
    "one row": Drawn((1, 7), horizons=(3, 2), prefix=0, absent=True),
    "one column": Drawn((7, 1), horizons=(1, 4), prefix=5, masked=True, many_tokens=True),
    "one patch": Drawn((1, 1), horizons=(2, 0)),
    "no keys that take part": Drawn((2, 3), masked=True, seed=4, batch=1),
}
EMPTY = {
    "no images": Drawn(batch=0, masked=True),
    "no heads": Drawn(heads=0, shared=True),
    "values without width": Drawn(e=0, masked=True),
    "no patches": Drawn((0, 5), prefix=2),
    "no tokens": Drawn((0, 5), prefix=0),
}
"""Layouts whose names are worth knowing; each attention sees all of them."""
NO_KEYS = Drawn(lengths=(7, 0), kind="flat")
NO_QUERIES = Drawn(lengths=(0, 11), kind="flat", masked=True)


def named(*more: object, layouts: dict[str, Drawn] = NAMED | EMPTY):
    """Add the named layouts to a test, with each kind of position in turn, with fixed other
    arguments.
    """

    def decorate(test):
        for i, case in enumerate(layouts.values()):
            test = example(replace(case, kind=("joint", "axial", "flat")[i % 3]), *more)(test)
            test = example(case, *more)(test) if i % 3 else test
        return test

    return decorate


@drawn
@given(cases(kinds=KINDS), FORMS, st.booleans(), COEFFICIENTS, st.booleans())
@named("auto", True, (0.5, 1.0, 1.0), False)
@named("efficient", False, (1.3, -0.7, 0.4), True)
@example(Drawn(lengths=(300, 259), d=5, e=3), "direct", False, (0.5, 1.0, 1.0), False)
@example(Drawn(lengths=(1100, 513), batch=1, d=11, masked=True), "efficient", True, (1, 1, 1), True)
@example(NO_KEYS, "direct", True, (0.5, 1.0, 1.0), False)
@example(NO_QUERIES, "efficient", True, (0.5, 1.0, 1.0), False)
def test_taylorshift_is_its_definition(case, form, normalised, coefficients, scaled):
    options = {"coefficients": coefficients, "output_scale": scaled}
    fast, slow, tensors = paired(case, "taylorshift", **options)
    if normalised:
        drawn_ = torch.rand(case.heads, generator=case.generator(3), dtype=torch.float64)
        tensors["temperature"] = 0.5 + drawn_
    compare(case, partial(fast, form=form), slow, tensors)


MAPS = ("elu1", "relu", "softmax", "object", "random")


@drawn
@given(cases(kinds=KINDS), FORMS, st.sampled_from(MAPS))
@named("auto", "elu1")
@named("efficient", "relu")
@named("direct", "softmax")
@example(Drawn(lengths=(1100, 1025), batch=1, heads=1, d=5, e=3), "efficient", "elu1")
@example(NO_KEYS, "direct", "elu1")
@example(NO_QUERIES, "efficient", "random")
def test_kernelized_attention_is_its_definition(case, form, feature_map):
    fast, slow, tensors = paired(case, "kernelized", feature_map=map_of(case, feature_map))
    compare(case, partial(fast, form=form), slow, tensors)


@drawn
@given(
    cases(kinds=("none", "flat", "flat"), causal=True),
    FORMS,
    st.sampled_from(["elu1", "relu", "object", "random"]),
)
@example(Drawn(lengths=(300, 259), kind="none", d=5, e=3, masked=True), "efficient", "elu1")
@example(Drawn(lengths=(259, 400), kind="flat", d=5, e=3), "efficient", "object")
@example(
    Drawn(lengths=(65, 177), kind="flat", horizons=(80, 0), many_tokens=True), "direct", "relu"
)
@example(Drawn(kind="flat", absent=True, horizons=(0, 0)), "auto", "elu1")
@example(Drawn(lengths=(260, 260), kind="flat", later=60, small_blocks=True), "efficient", "elu1")
@example(Drawn(lengths=(45, 38), kind="none", later=16, masked=True), "direct", "object")
@example(NO_KEYS, "direct", "elu1")
@example(NO_QUERIES, "efficient", "elu1")
def test_causal_kernelized_attention_is_its_definition(case, form, feature_map):
    """Tokens after those that count hold anything."""
    case = replace(case, missing=0)
    options = {"feature_map": map_of(case, feature_map), "causal": True}
    fast, slow, tensors = paired(case, "kernelized", **options)
    compare(case, partial(fast, form=form), slow, tensors)


@drawn
@given(cases(kinds=KINDS, causal=True), st.booleans())
@named(False)
@named(True)
@example(Drawn((2, 133), kind="axial", d=3, e=2, heads=2), False)
@example(Drawn(lengths=(259, 53), kind="flat", horizons=(128, 0), d=3, e=2), False)
@example(Drawn(lengths=(45, 38), kind="flat", later=16), True)
@example(NO_KEYS, False)
@example(NO_QUERIES, True)
def test_softmax_attention_is_its_definition(case, causal):
    case = case if causal else replace(case, later=0)
    compare(case, *paired(case, "softmax", causal=causal))


@drawn
@given(cases(kinds=("none", "axial", "joint"), sequences=False), st.integers(1, 12), st.booleans())
@named(3, True)
@named(4, False)
@named(20, False)
def test_window_attention_is_its_definition(case, window_size, shifted):
    case = replace(case, kind="axial" if case.kind == "flat" else case.kind)
    compare(case, *paired(case, "window", window_size=window_size, shifted=shifted))


@drawn
@given(cases(kinds=KINDS), st.sampled_from(list(ROWS)), st.booleans(), st.sampled_from(MAPS))
@named("taylorshift", False, "elu1")
@named("kernelized", False, "random")
@named("softmax", False, "elu1")
@named("window", True, "elu1")
@example(Drawn(kind="flat", prefix=0), "kernelized", True, "elu1")
@example(Drawn(kind="joint", masked=True), "softmax", True, "elu1")
def test_rows_are_the_weights_of_the_definition(case, name, causal, feature_map):
    """The means of unit vectors as values are the weights; those of places are in proportion."""
    if name == "window":
        case = replace(case, lengths=None, kind="axial" if case.kind == "flat" else case.kind)
    options = {"window": {"window_size": 3, "shifted": causal}, "softmax": {"causal": causal}}
    options = options.get(name, {})
    if name == "kernelized":
        causal = causal and case.kind in ("none", "flat") and not case.missing
        causal = causal and feature_map != "softmax"
        options = {"causal": causal, "feature_map": map_of(case, feature_map)}
    n, m = case.tokens()
    if not n or not case.heads:
        return  # there are no rows to ask for
    chosen = torch.tensor([n - 1, 0, n // 3, 0])
    rows, definition, tensors = paired(case, name, partial(ROWS[name], rows=chosen), **options)
    if name == "taylorshift":
        tensors["temperature"] = torch.linspace(0.7, 3.0, case.heads, dtype=torch.float64)
    tensors.pop("v")
    absent = case.absent_keys()[:, None, :, None]
    found = rows(**tensors | {"k": tensors["k"].masked_fill(absent, case.garbage)})
    unit = torch.eye(m, dtype=torch.float64).expand(case.batch, case.heads, -1, -1)
    wanted = definition(**tensors, v=unit)[:, :, chosen]
    counts = (~case.idle(n))[:, None, chosen, None]
    torch.testing.assert_close(found.total * counts, wanted * counts, rtol=0, atol=1e-12)
    if found.relative is not None:
        relative, q = case.given(tables_of(tensors))["relative"], tensors["q"]
        of_places = reference.relative_weights(
            relative, q, ~case.absent_keys(), options.get("causal", False)
        )
        shares = found.relative, of_places[:, :, chosen].expand_as(found.relative)
        mine, own = (x / x.sum(-1, keepdim=True).clamp(min=1e-300) for x in shares)
        torch.testing.assert_close(mine * counts, own * counts, rtol=0, atol=1e-12)


FAST = SimpleNamespace(value_convolution=value_convolution, centred_keys=centred_keys)


@drawn
@given(cases(kinds=("none",), sequences=False), st.sampled_from([1, 3, 5]))
@named(3, layouts=NAMED)
def test_the_convolution_of_values_and_centred_keys_are_their_definitions(case, side):
    case = replace(case, kind="none")
    layout, mask = case.layout(), case.mask()
    idle, shape = case.idle(layout.num_tokens)[:, None, :, None], (case.heads * case.e, 1)
    weight = torch.randn(*shape, side, side, generator=case.generator(4), dtype=torch.float64)

    def of(module):
        def call(q, k, v, weight):
            out = module.value_convolution(v, weight, layout, key_mask=mask)
            own = ~case.absent_keys()[:, None, :, None]
            keys = module.centred_keys(k, layout.key_mask(mask)).masked_fill(~own, 0)
            return torch.cat([out, keys], 3).masked_fill(idle, 0)

        return call

    compare(case, of(FAST), of(reference), case.tensors() | {"weight": weight})
