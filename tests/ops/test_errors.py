"""What is wrong with the arguments is said in one line: what was wanted, and what came."""

import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.oracles import draw, draw_qkv, draw_table
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    Axial,
    Flat,
    Joint,
    RandomFeatures,
    attend,
    centred_keys,
    count_classes,
    kernelized_attention,
    softmax_attention,
    step,
    summarize,
    taylorshift_attention,
    value_convolution,
    window_attention,
)
from visionattn.ops.all_pairs import pair_mean
from visionattn.ops.attention_rows import ROWS
from visionattn.ops.attentions import get_attention
from visionattn.ops.checks import check_form
from visionattn.ops.feature_maps import PositionSoftmax
from visionattn.ops.softmax import relative_bias


@contextlib.contextmanager
def wrong(words: str, kind: type[Exception] = ValueError):
    """The error has one line, and all words are in it."""
    try:
        yield
    except kind as error:
        message = str(error)
        assert "\n" not in message
        assert all(word in message for word in words.split()), f"{message!r} lacks one of {words!r}"
    else:
        pytest.fail(f"no error with {words!r}")


def check_all(rows: list[tuple[str, dict]], function, given: dict) -> None:
    """Each row says which arguments to change, and words of the error."""
    for words, change in rows:
        with wrong(words):
            function(**given | change)


NAN, META = float("nan"), dict(device="meta")
QKV = draw_qkv(queries=17, d=5, e=4)
LAYOUT, KEPT = TokenLayout(2, Grid(3, 5)), torch.arange(15).expand(2, 15)
TABLE, LINE = draw_table(3, 3, 3, 5, seed=0), draw_table(3, 3, 5, seed=0)
SIGNED = TABLE.index_fill(2, torch.tensor(1), -0.25)
SHORT = {name: x[:, :, 1:] for name, x in QKV.items()}
MASK = torch.ones(2, 17, dtype=torch.bool)
OTHER_COUNTS = (
    count_classes(LAYOUT, (1, 2)),
    count_classes(TokenLayout(2, Grid(5, 3)), (1, 1)),
)


def joint(table=TABLE, layout=LAYOUT, **changed):
    """A relative position whose layout has other parts."""
    return {"relative": Joint(table, layout._replace(**changed) if changed else layout)}


EVERY = [
    ("k 5 6", {"k": draw(2, 3, 17, 6, seed=0)}),
    ("k 3 4", {"k": draw(2, 4, 17, 5, seed=0)}),
    ("v 17 12", {"v": draw(2, 3, 12, 4, seed=0)}),
    ("q (3, 17, 5)", {"q": QKV["q"][0]}),
    ("q floating int64", {"q": QKV["q"].long()}),
    ("width >= 1 (2, 3, 17, 0)", {"q": QKV["q"][..., :0], "k": QKV["k"][..., :0]}),
    ("key_mask 17 7", {"key_mask": MASK[:, :7]}),
    ("key_mask bool float32", {"key_mask": MASK.float()}),
    ("key_mask bool list [True", {"key_mask": [[True] * 17] * 2}),
    ("value_drop [0, 1) -0.1", {"value_drop": -0.1}),
    ("value_drop [0, 1) 1.0", {"value_drop": 1.0}),
    ("value_drop [0, 1) nan", {"value_drop": NAN}),
    ("value_drop [0, 1) 'a'", {"value_drop": "a"}),
    ("generator torch.Generator int", {"value_drop": 0.5, "generator": 3}),
    ("generator value_drop 0", {"generator": torch.Generator()}),
    ("layout 17 16", SHORT | joint()),
    ("layout 17 16", {"k": SHORT["k"], "v": SHORT["v"]} | joint()),
    ("layout 17 16", {"k": SHORT["k"], "v": SHORT["v"], "relative": Flat(LINE, LAYOUT)}),
    ("layout 17 16", {"k": SHORT["k"], "v": SHORT["v"], "relative": Axial(LINE, LINE, LAYOUT)}),
    ("table 2R+1 (3, 4, 3, 5)", joint(draw_table(3, 4, 3, 5, seed=0))),
    ("table 5 (3, 3, 3, 6)", joint(draw_table(3, 3, 3, 6, seed=0))),
    ("table h 3 (2, 3, 3, 5)", joint(TABLE[:2])),
    ("table (3, 3, 3, 5)", {"relative": Flat(TABLE, layout=LAYOUT)}),
    ("rows (3, 4, 5)", {"relative": Axial(draw_table(3, 4, 5, seed=0), LINE, LAYOUT)}),
    ("columns (3, 3, 6)", {"relative": Axial(LINE, draw_table(3, 3, 6, seed=0), LAYOUT)}),
    ("table floating int64", joint(TABLE.long())),
    ("table floating complex64", joint(TABLE.to(torch.complex64))),
    ("table floating list", joint(TABLE.tolist())),
    ("normalization 'max' sum mean", {"relative": Joint(TABLE, LAYOUT, normalization="max")}),
    ("relative Flat Axial Joint Tensor", {"relative": TABLE}),
    ("layout.kept 2 (3, 15)", joint(kept=torch.arange(15).expand(3, 15))),
    ("layout.kept int64 int32", joint(kept=KEPT.int())),
    ("layout.kept 0 to 14 1 to 15", joint(kept=KEPT + 1)),
    ("layout.kept 0 to 14 -1 to 13", joint(kept=KEPT - 1)),
    ("layout.kept each patch once twice", joint(kept=KEPT.clamp(min=1))),
    ("layout.present bool [2, 15] float32 (2, 15)", joint(present=torch.ones(2, 15))),
    ("layout.present bool [2, 15] bool (2, 14)", joint(present=MASK[:, :14])),
    ("layout.present bool [2, 15] list", joint(present=[[True] * 15] * 2)),
    *((f"layout.counts 3 5 9 {tuple(x.shape)}", joint(counts=x)) for x in OTHER_COUNTS),
    ("layout no negative number", joint(layout=TokenLayout(0, Grid(-3, -5)))),
    ("layout no negative number", joint(layout=TokenLayout(-15, Grid(5, 6)))),
    *(
        ("layout TokenLayout(num_prefix, Grid(height, width))", {"relative": Joint(TABLE, layout)})
        for layout in (None, (3, 5), TokenLayout(2, (3, 5)))
    ),
    ("q cpu k meta", {"k": QKV["k"].to("meta")}),
    ("q cpu v meta", {"v": QKV["v"].to("meta")}),
    ("q cpu key_mask meta", {"key_mask": MASK.to("meta")}),
    ("q cpu table meta", {"relative": Flat(LINE.to("meta"))}),
    ("q cpu columns meta", {"relative": Axial(LINE, LINE.to("meta"), LAYOUT)}),
    ("q cpu layout.kept meta", joint(kept=KEPT.to("meta"))),
    ("q cpu layout.present meta", joint(present=KEPT.to("meta", torch.bool))),
    ("q cpu layout.counts meta", joint(counts=count_classes(LAYOUT, (1, 1), device="meta"))),
    (
        "q meta generator cpu",
        {name: x.to("meta") for name, x in QKV.items()}
        | {"value_drop": 0.5, "generator": torch.Generator()},
    ),
]
UNSIGNED = [
    ("table non-negative nan", {"relative": Flat(LINE * NAN)}),
    ("table non-negative -0.25", joint(SIGNED)),
    ("columns non-negative -0.25", {"relative": Axial(LINE, SIGNED[:, 0], LAYOUT)}),
    ("form 'linear' auto direct efficient", {"form": "linear"}),
    ("impl 'cuda' auto eager triton", {"impl": "cuda"}),
]
TAYLORSHIFT = [
    ("temperature 3 (2,)", {"temperature": torch.ones(2)}),
    ("temperature floating tensor float 2.0", {"temperature": 2.0}),
    ("temperature floating int64", {"temperature": torch.ones(3, dtype=torch.int64)}),
    ("q cpu temperature meta", {"temperature": torch.ones(3, **META)}),
    *(
        (f"coefficients three finite numbers a > 0 b^2 got {x[0]}", {"coefficients": x})
        for x in ((0.5, 1.0, 0.5), (0.0, 1.0, 1.0), (-1.0, 0.0, 1.0), (0.5, 2.0, 1.0), (NAN, 1, 1))
    ),
    *(
        ("coefficients three finite numbers got", {"coefficients": x})
        for x in ((1, 1), None, "abc", (0.5, 1.0, "1"), (0.5, 1.0, float("inf")), (1, 2, 3, 4), 0.5)
    ),
]
KEPT_ALL = TokenLayout(2, Grid(3, 5), KEPT)
WIDER = SimpleNamespace(query=torch.relu, key=lambda x: x.repeat(1, 1, 1, 2))
FLATTENED = SimpleNamespace(query=lambda x: x.flatten(2), key=torch.relu)
LISTED = SimpleNamespace(query=torch.relu, key=lambda x: [x])
KERNELIZED = [
    ("feature_map 'exp' elu1 relu softmax", {"feature_map": "exp"}),
    *(
        (f"feature_map {type(x).__name__}: expected one of query and .key", {"feature_map": x})
        for x in (None, 3, torch.relu, SimpleNamespace(query=torch.relu))
    ),
    ("feature_map.key: expected 5 features got 10", {"feature_map": WIDER}),
    ("feature_map.query: expected [2, 3, 17, f], got (2, 3, 85)", {"feature_map": FLATTENED}),
    ("feature_map.key: expected [2, 3, 17, f], got list", {"feature_map": LISTED}),
    ("width 6", {"feature_map": RandomFeatures(6, 3)}),
    ("causal softmax", {"causal": True, "feature_map": "softmax"}),
    ("causal softmax", {"causal": True, "feature_map": PositionSoftmax()}),
    ("causal Flat Joint", {"causal": True} | joint()),
    ("causal Flat Axial", {"causal": True, "relative": Axial(LINE, LINE, LAYOUT)}),
    ("causal kept", {"causal": True, "relative": Flat(LINE, KEPT_ALL)}),
]
WINDOWS = [
    ("expected layout, or relative, which has its own, got neither", {"layout": None}),
    ("expected layout, or relative, which has its own, got both", joint()),
    (
        "expected Joint or Axial for windows on a grid, got Flat",
        {"layout": None, "relative": Flat(LINE, LAYOUT)},
    ),
    ("mean", {"layout": None, "relative": Axial(LINE, LINE, LAYOUT, normalization="mean")}),
    ("window_size: expected an integer of at least 1 patch, got 0", {"window_size": 0}),
    ("window_size got 2.5", {"window_size": 2.5}),
    ("layout has 18 tokens, got 17 queries", {"layout": LAYOUT._replace(num_prefix=3)}),
    ("value_drop 1.5", {"value_drop": 1.5}),
]
ATTENTIONS = {
    "taylorshift": (taylorshift_attention, [*EVERY, *UNSIGNED, *TAYLORSHIFT]),
    "kernelized": (kernelized_attention, [*EVERY, *UNSIGNED, *KERNELIZED]),
    "softmax": (
        softmax_attention,
        [*EVERY, ("mean", {"relative": Joint(TABLE, LAYOUT, normalization="mean")})],
    ),
    "window": (partial(window_attention, layout=LAYOUT), WINDOWS),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_arguments_of_an_attention_that_do_not_fit_are_one_line(name):
    function, rows = ATTENTIONS[name]
    check_all(rows, function, QKV)
    if name == "softmax":
        assert softmax_attention(**QKV, **joint(SIGNED)).isfinite().all()


CONVOLUTION = [
    ("weight: expected [12, 1, K, K] with K odd, got", {"weight": torch.ones(5, 1, 3, 3)}),
    ("with K odd", {"weight": torch.ones(12, 1, 2, 2)}),
    ("with K odd", {"weight": torch.ones(12, 1, 3, 5)}),
    ("v: expected [B, h, tokens, width]", {"v": torch.ones(2, 17, 4)}),
    ("layout has 15 tokens, got 17", {"layout": LAYOUT._replace(num_prefix=0)}),
    ("layout: expected TokenLayout", {"layout": None}),
    ("key_mask: expected bool [2, 17]", {"key_mask": MASK[:, 1:]}),
    ("key_mask: expected bool [2, 17]", {"key_mask": torch.ones(2, 17)}),
]


def test_arguments_of_the_convolution_that_do_not_fit_are_one_line():
    given = dict(v=QKV["v"], weight=torch.ones(12, 1, 3, 3), layout=LAYOUT, key_mask=None)
    check_all(CONVOLUTION, value_convolution, given)
    assert centred_keys(QKV["k"], ~MASK).isfinite().all()  # without keys there is nothing to center


NUMBERS = [
    ("expected indices of queries from 0 to 16, got 0 to 17", {"rows": torch.tensor([0, 17])}),
    ("from 0 to 16, got -1 to -1", {"rows": torch.tensor([-1])}),
    ("expected int64 [Q], indices of queries, got torch.float32", {"rows": torch.tensor([1.0])}),
    ("expected int64 [Q]", {"rows": torch.tensor(1)}),
]
ROW_OPTIONS = {
    "taylorshift": [*TAYLORSHIFT, ("q list", {"q": [1], "temperature": torch.ones(3)})],
    "kernelized": KERNELIZED[:1],
    "softmax": [],
    "window": WINDOWS[:6],
}


@pytest.mark.parametrize("name", ROWS)
def test_wrong_rows_and_their_options_are_one_line(name):
    given = {"q": QKV["q"], "k": QKV["k"], "rows": torch.tensor([3])}
    given |= {"layout": LAYOUT} if name == "window" else {}
    check_all([*NUMBERS, *ROW_OPTIONS[name]], ROWS[name], given)
    none = ROWS[name](**given | {"rows": torch.tensor([], dtype=torch.int64)})
    assert none.total.shape == (2, 3, 0, 17)


ONE = {name: x[:, :, :1] for name, x in QKV.items()}
ON_META = {name: x.to("meta") for name, x in QKV.items()}
SUMMARIES = [
    ("softmax no state", {"feature_map": "softmax"}),
    ("softmax depend", {"feature_map": PositionSoftmax()}),
    ("feature_map SimpleNamespace: expected one of", {"feature_map": SimpleNamespace()}),
    ("kind 'linear'", {"kind": "linear"}),
    ("feature_map belongs", {"kind": "taylorshift", "feature_map": "elu1"}),
    ("temperature and coefficients belong", {"temperature": torch.ones(3)}),
    *((words, {"kind": "taylorshift"} | change) for words, change in TAYLORSHIFT[:3]),
    ("a > 0", {"kind": "taylorshift", "coefficients": (0.5, 1.0, 0.5)}),
    ("key_mask", {"key_mask": MASK[:, :3]}),
    ("v: expected", {"v": ONE["v"]}),
    ("k: expected width >= 1", {"k": QKV["k"][..., :0]}),
    ("k is on cpu, v on meta", {"v": ON_META["v"]}),
    ("k is on cpu, key_mask on meta", {"key_mask": MASK.to("meta")}),
    ("k is on cpu temperature meta", {"kind": "taylorshift", "temperature": torch.ones(3, **META)}),
]
UNLIKE = [
    ("(2, 3, 5, 4) (1, 3, 5, 4)", lambda k, v: (k[:1], v[:1])),
    ("(2, 3, 5, 4) (2, 1, 5, 4)", lambda k, v: (k[:, :1], v[:, :1])),
    ("(2, 3, 5, 4) (2, 3, 5, 1)", lambda k, v: (k, v[..., :1])),
    ("(2, 3, 4)", lambda k, v: (k[..., :1], v)),
    ("float64 float32", lambda k, v: (k.float(), v.float())),
    ("cpu meta", lambda k, v: (k.to("meta"), v.to("meta"))),
]
QUERIES = [
    ("q: expected [2, 3, N", {"q": QKV["q"][:1]}),
    ("q: expected [2, 3, N", {"q": QKV["q"][:, :2]}),
    ("q: expected floating int64", {"q": QKV["q"].long()}),
    (
        "q: expected torch.float32 got torch.float64",
        {"state": summarize(QKV["k"].float(), QKV["v"].float())},
    ),
    ("q is on meta, the state on cpu", {"q": ON_META["q"]}),
    ("state: expected a KernelState got tuple", {"state": (QKV["k"], QKV["v"])}),
]
FEATURES = [
    ("expected 5 features", {"q": QKV["q"][..., :4]}),
    (
        "feature_map.query: expected 10 features got 5",
        {"state": summarize(QKV["k"], QKV["v"], feature_map=WIDER)},
    ),
]
STEPS = [
    ("q is on cpu, k on meta", {"k": ONE["k"].to("meta")}),
    ("one token", QKV),
    (
        "its own options; remove feature_map",
        {"state": summarize(QKV["k"], QKV["v"]), "feature_map": "relu"},
    ),
    ("state: expected a KernelState got tuple", {"state": (QKV["k"], QKV["v"])}),
]


@pytest.mark.parametrize("kind", ["kernelized", "taylorshift"])
def test_states_that_do_not_fit_each_other_or_their_queries_are_one_line(kind):
    state = summarize(ONE["k"], ONE["v"], kind)
    for words, change in UNLIKE:
        keys, values = change(ONE["k"], ONE["v"])
        with wrong(words):
            state + summarize(keys, values, kind)
        with wrong(words):
            step(keys, keys, values, state)
    check_all(QUERIES, attend, {"q": QKV["q"], "state": state})
    on_meta = attend(ON_META["q"], summarize(ON_META["k"], ON_META["v"], kind))
    assert on_meta.values.shape == (2, 3, 17, 4)


def test_options_of_states_that_do_not_fit_are_one_line():
    k, v, tau = QKV["k"], QKV["v"], torch.tensor([0.7, 1.9, 4.0])
    check_all(SUMMARIES, summarize, {"k": k, "v": v})
    kernel, taylor = summarize(k, v), summarize(k, v, "taylorshift")
    tempered = [summarize(k, v, "taylorshift", temperature=x) for x in (tau, tau + 1, tau.clone())]
    tempered[0] + tempered[2]
    for words, one, two in (
        ("KernelState TaylorState", kernel, taylor),
        ("feature_map elu1 relu", kernel, summarize(k, v, feature_map="relu")),
        ("coefficients", taylor, summarize(k, v, "taylorshift", coefficients=(0.7, 0.4, 1.3))),
        ("temperature", taylor, tempered[0]),
        ("temperature", tempered[0], tempered[1]),
    ):
        with wrong(words):
            one + two
    check_all(FEATURES, attend, {"q": QKV["q"], "state": kernel})
    check_all(STEPS, step, ONE)


SIZES = [(0, 3), (3, 0), (2.5, 3), (3, 2.5), ("3", 3), (-1, 3)]
NONE = [
    ("attention 'linear': expected one of taylorshift,", partial(get_attention, "linear")),
    ("form 'linear': expected one of auto, direct, efficient", partial(check_form, "linear")),
    *(
        (f"at least 1, got {size[0]} and {size[1]}", partial(RandomFeatures, *size))
        for size in SIZES
    ),
    ("layout no negative number", partial(count_classes, TokenLayout(16, Grid(-1, 1)), (1, 1))),
]


def test_names_and_sizes_that_are_none_are_one_line():
    for words, call in NONE:
        with wrong(words):
            call()
    with wrong("triton", NotImplementedError):
        kernelized_attention(**QKV, impl="triton")


PATCHES = TokenLayout(0, Grid(3, 5))
SQUARE = draw_table(3, 3, 5, 16, seed=0)


def with_table(function, kind):
    """The attention with its table as the last argument."""
    return lambda q, k, v, table: function(q, k, v, relative=kind(table))


SECOND = {
    "taylorshift": taylorshift_attention,
    "kernelized direct": partial(kernelized_attention, form="direct"),
    "kernelized causal": partial(kernelized_attention, form="efficient", causal=True),
    "random features": partial(kernelized_attention, feature_map=RandomFeatures(16, 5)),
    "pairs": lambda q, k, v: pair_mean(q, k, v, None, None, None, None, None, "elu1", ())[0],
    "state of kernels": lambda q, k, v: attend(q, summarize(k, v)).divide(),
    "state of TaylorShift": lambda q, k, v: attend(q, summarize(k, v, "taylorshift")).divide(),
    "joint": with_table(taylorshift_attention, lambda table: Joint(table, PATCHES)),
    "flat": with_table(kernelized_attention, lambda table: Flat(table[:, 0])),
    "axial": with_table(kernelized_attention, lambda t: Axial(t[:, 0], t[:, 1], PATCHES)),
    "bias": lambda q, k, v, table: relative_bias(q, Flat(table[:, 0]), 7),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_second_derivative_is_refused_in_words(name):
    inputs = list(draw_qkv(queries=15).values())
    inputs += [SQUARE.clone()] if name in ("joint", "flat", "axial", "bias") else []
    inputs = [x.requires_grad_() for x in inputs]
    out = SECOND[name](*inputs).square().sum()
    for gradient in torch.autograd.grad(out, inputs, create_graph=True, allow_unused=True):
        if gradient is not None:
            with wrong("second derivative create_graph", NotImplementedError):
                torch.autograd.grad(gradient.sum(), inputs, retain_graph=True, allow_unused=True)
