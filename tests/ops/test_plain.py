"""Operators in plain operations of tensors: each attention made of them is its definition, and what
is linear stays linear.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from tests.helpers.oracles import Largest, draw, draw_qkv, draw_table
from tests.ops.drawn_cases import Drawn, cases, drawn, map_of, paired
from visionattn import ops
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import plain_forms, reference
from visionattn.ops.attentions import ATTENTIONS
from visionattn.ops.position.relative_position import Axial, Flat, Joint, tables_of

B, HEADS, D, E, PREFIX, GRID = 2, 3, 8, 5, 2, Grid(5, 7)
HOMES = {
    "product": ("feature_maps",),
    "weighted_mean": ("attention_sums",),
    "kernel_sums": ("kernelized.kernelized_attention",),
    "taylor_sums": ("taylorshift.taylorshift_attention",),
    "class_sums": ("position.relative_position",),
    "axis_sums": ("position.relative_position",),
    "relative_scores": ("softmax",),
    "windows": ("window",),
}
"""Which modules call which operator."""


@contextmanager
def plain_operators():
    """Put the plain functions in place of the operators; the names of those that were called."""
    names = set()

    def recorded(name):
        function = getattr(plain_forms, f"plain_{name}")

        def call(*args, **kwargs):
            names.add(name)
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, homes in HOMES.items():
            for home in homes:
                patch.setattr(f"visionattn.ops.{home}.{name}", recorded(name))
        for home in ("taylorshift", "kernelized"):
            patch.setattr(
                f"visionattn.ops.{home}.{home}_attention.takes_pairs", lambda *args: False
            )
        yield names


def tokens(n=PREFIX + GRID.num_patches, m=None):
    return tuple(draw_qkv(queries=n, keys=m, d=D, e=E).values())


def relative_of(kind, normalization, horizon=3, layout=None):
    layout, side = layout or TokenLayout(PREFIX, GRID), 2 * horizon + 1
    if kind == "joint":
        return Joint(draw_table(HEADS, side, side, D, seed=3), layout, normalization)
    if kind == "axial":
        tables = (draw_table(HEADS, side, D, seed=i) for i in (3, 4))
        return Axial(*tables, layout, normalization)
    return Flat(draw_table(1, side, D, seed=3), layout, normalization)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


KINDS = ("none", "flat", "axial", "joint")
MAIN = {"taylorshift": "taylor_sums", "kernelized": "kernel_sums", "window": "windows"}
MAIN |= {"softmax": "relative_scores"}
"""The operator that each attention calls, softmax only with relative position."""


@drawn
@given(
    cases(kinds=KINDS),
    st.sampled_from(list(ATTENTIONS)),
    st.sampled_from(["efficient", "direct"]),
    st.booleans(),
    st.sampled_from(["elu1", "relu", "softmax", "random"]),
)
@example(
    Drawn(kind="joint", horizons=(9, 9), masked=True), "kernelized", "efficient", False, "elu1"
)
@example(Drawn(kind="flat", horizons=(0, 0), masked=True), "kernelized", "efficient", False, "elu1")
@example(Drawn(lengths=(17, 11), kind="flat"), "kernelized", "efficient", True, "relu")
@example(Drawn(lengths=(11, 17), kind="none", masked=True), "kernelized", "direct", True, "random")
@example(Drawn(kind="axial", masked=True), "taylorshift", "efficient", True, "elu1")
@example(Drawn(kind="joint", d=18, masked=True), "taylorshift", "direct", False, "elu1")
@example(Drawn(kind="axial", horizons=(9, 1)), "softmax", "direct", False, "elu1")
@example(Drawn(kind="joint", horizons=(2, 2), masked=True), "window", "direct", True, "elu1")
def test_attentions_made_of_them_are_their_definitions(case, name, form, flag, feature_map):
    """``flag`` stands for causal, with a temperature or shifted."""
    case = replace(case, missing=0)
    if name == "window":
        kind = "axial" if case.kind == "flat" else case.kind
        case = replace(case, lengths=None, kind=kind)
    options = {"softmax": {"causal": flag}, "window": {"window_size": 3, "shifted": flag}}
    if name == "kernelized":
        causal = flag and case.kind in ("none", "flat") and feature_map != "softmax"
        options["kernelized"] = {"causal": causal, "feature_map": map_of(case, feature_map)}
    fast, slow, tensors = paired(case, name, **options.get(name, {}))
    if name == "taylorshift" and flag:
        tensors["temperature"] = torch.linspace(0.7, 3.0, case.heads, dtype=torch.float64)
    form = {"form": form} if name in ("taylorshift", "kernelized") else {}
    with plain_operators() as called:
        found = fast(**tensors, **form)
    counts = ~case.idle(case.tokens()[0])[:, None, :, None]
    close(found * counts, slow(**tensors) * counts)
    if name != "softmax" or not case.without_position():
        assert MAIN[name] in called


def test_there_is_one_for_each_operator_of_a_forward_pass():
    """But those that no exported model calls: ``pair_mean`` is not seen by compilers, the means by
    kernels are for GPUs alone, and states are of callers who ask for them.
    """
    made = {made._qualname.split("::")[1] for made in ops.operator._FUNCTIONS}
    forward = {name for name in made if not name.endswith("_backward")}
    others = {"pair_mean", "kernel_mean", "taylor_mean", "feature_state", "expand_state"}
    assert forward - others == set(HOMES)
    names = {
        made._qualname.split("::")[1]: form.__name__ for made, form in plain_forms.PLAIN.items()
    }
    assert names == {name: f"plain_{name}" for name in HOMES}


class Attends(nn.Module):
    """Kernelized attention with a joint position, as a module for exporters."""

    relative = relative_of("joint", "mean", 1)

    def forward(self, q, k, v):
        return ops.kernelized_attention(q, k, v, relative=self.relative)


def operators_of(graph):
    return {str(n.target).split(".")[1] for n in graph.nodes if "visionattn" in str(n.target)}


def test_programs_keep_operators_until_they_are_decomposed_and_compilers_for_good(monkeypatch):
    monkeypatch.setenv("CI", "true")  # with it, inductor refuses operators of torch's own table
    made, model, given, compiled = {"kernel_sums", "class_sums", "weighted_mean"}, Attends(), [], []
    given = tokens()
    program = torch.export.export(model, given)
    assert operators_of(program.graph) == made
    plainly = program.run_decompositions()
    assert operators_of(plainly.graph) == set()
    close(plainly.module()(*given), model(*given))

    def record(graph, inputs):
        compiled.append(operators_of(graph.graph))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=record)
    close(torch.compile(model, backend=backend)(*given), model(*given))
    assert compiled == [made]


MANY = {
    "content": ("kernelized", "efficient", None),
    "joint": ("kernelized", "efficient", ("joint", "mean")),
    "axial": ("kernelized", "efficient", ("axial", "sum")),
    "flat": ("kernelized", "efficient", ("flat", "mean")),
    "taylorshift": ("taylorshift", "efficient", ("joint", "mean")),
    "taylorshift direct": ("taylorshift", "direct", None),
}


@pytest.mark.parametrize("name", MANY)
def test_many_tokens_do_not_overflow_float16(monkeypatch, name):
    """What a tool makes float16 of is all but the counting: here sums are of float16 too."""
    attention, form, place = MANY[name]
    layout = TokenLayout(1, Grid(48, 48) if form == "direct" else Grid(260, 260))
    relative, options = None, {"form": form}
    if attention == "taylorshift":
        options["temperature"] = torch.full((1,), 4.0)
    # As coarse as float16, so that the inputs are the same.
    given = draw_qkv(1, 1, layout.num_tokens, d=4, e=4)
    q, k, v = (x.half().double() for x in (given["q"], given["k"], given["v"] + 3))
    if place:
        relative = relative_of(*place, 1, layout=layout)
        tables = {n: x[:1, ..., :4].half().double() for n, x in tables_of(relative).items()}
        relative = replace(relative, **tables)
    attend = ops.OPERATIONS[attention]
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    with plain_operators():
        wanted = attend(q, k, v, relative=relative, **options)
        modules = ("plain_forms", "attention_sums", "position.relative_position", "feature_maps")
        operations = ("kernelized.kernelized_attention", "taylorshift.taylorshift_attention")
        for module in (*modules, *operations):
            place = f"visionattn.ops.{module}.accumulation_dtype"
            monkeypatch.setattr(place, lambda *x: torch.half)
        if relative:
            halves = {n: x.half() for n, x in tables_of(relative).items()}
            relative = replace(relative, **halves)
        q, k, v = (x.half() for x in (q, k, v))
        found = attend(q, k, v, relative=relative, **options)
    assert (found.double() - wanted).abs().max() < 2e-2


def test_without_a_name_the_form_is_the_one_that_keeps_its_digits():
    """Long orthogonal queries and keys in float32, where the linear form loses them."""
    q, k, v = (x.float() for x in tokens(12))
    turned = torch.linalg.qr(draw(D, D, seed=0))[0].float()
    q, k = 1000 * q[..., :3] @ turned[:3], 1000 * k[..., 3:] @ turned[3:]
    wanted = reference.taylorshift_attention(q.double(), k.double(), v.double())
    error = {}
    for form in ("auto", "efficient"):
        values, mass, *_ = plain_forms.plain_taylor_sums(q, k, v, None, None, 0.5, 1.0, 1.0, form)
        error[form] = float((values / mass.unsqueeze(3) - wanted).abs().max())
    assert 20 * error["auto"] < error["efficient"]


LINEAR = (("kernelized", "axial"), ("taylorshift", "joint"), ("window", "joint"))


@pytest.mark.parametrize("name, kind", LINEAR)
def test_what_is_linear_stays_linear(name, kind):
    most, options = [], {} if name == "window" else {"form": "efficient"}
    for height, width in ((24, 16), (24, 32)):
        layout = TokenLayout(0, Grid(height, width))
        relative = relative_of(kind, "sum", 3, layout=layout)
        with plain_operators(), Largest() as largest:
            ops.OPERATIONS[name](*tokens(layout.num_tokens), relative=relative, **options)
        most.append(largest.entries)
    assert most[1] <= 2.1 * most[0]
    assert most[0] < B * HEADS * (24 * 16) ** 2 // 4 or name == "window"
