"""Operators in plain operations of tensors: each attention made of them is its definition, and what
is linear stays linear.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from visionattn import ops
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import plain, reference
from visionattn.ops.feature_maps import RandomFeatures
from visionattn.ops.position.kinds import Axial, Flat, Joint, tables_of

B, HEADS, D, E, PREFIX, GRID = 2, 3, 8, 5, 2, Grid(5, 7)
HOMES = {
    "product": ("feature_maps",),
    "weighted_mean": ("sums",),
    "kernel_sums": ("kernelized.attention",),
    "taylor_sums": ("taylorshift.attention",),
    "class_sums": ("position.kinds",),
    "axis_sums": ("position.kinds",),
    "relative_scores": ("softmax",),
    "windows": ("window",),
}
"""Which modules call which operator."""


@pytest.fixture
def called(monkeypatch):
    """Put the plain functions in place of the operators; the names of those that were called."""
    names = set()

    def recorded(name):
        function = getattr(plain, f"plain_{name}")

        def call(*args, **kwargs):
            names.add(name)
            return function(*args, **kwargs)

        return call

    for name, homes in HOMES.items():
        for home in homes:
            monkeypatch.setattr(f"visionattn.ops.{home}.{name}", recorded(name))
    return names


def drawn(*shape, seed=0, positive=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return x.abs() if positive else x


def tokens(n=PREFIX + GRID.num_patches, m=None):
    m = n if m is None else m
    sizes = (n, D), (m, D), (m, E)
    return tuple(drawn(B, HEADS, *size, seed=i) for i, size in enumerate(sizes))


def mask_of(m=PREFIX + GRID.num_patches):
    """A mask of keys, under which one image has none."""
    mask = torch.rand(B, m, generator=torch.Generator().manual_seed(9)) < 0.6
    mask[0] = False
    return mask


def relative_of(kind, normalization, horizon=3, positive=True, layout=None):
    layout = layout or TokenLayout(PREFIX, GRID)
    side = 2 * horizon + 1
    if kind == "joint":
        return Joint(drawn(HEADS, side, side, D, positive=positive), layout, normalization)
    if kind == "axial":
        tables = (drawn(HEADS, side, D, seed=i, positive=positive) for i in (3, 4))
        return Axial(*tables, layout, normalization)
    return Flat(drawn(1, side, D, positive=positive), layout, normalization)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def test_there_is_one_for_each_operator_of_a_forward_pass():
    """But those that no exported model calls: ``pair_mean`` is not seen by compilers, the means by
    kernels are for GPUs alone, and states are of callers who ask for them.
    """
    made = {made._qualname.split("::")[1] for made in ops.operator._FUNCTIONS}
    forward = {name for name in made if not name.endswith("_backward")}
    others = {"pair_mean", "kernel_mean", "taylor_mean", "feature_state", "expand_state"}
    assert forward - others == set(HOMES)
    names = {made._qualname.split("::")[1]: form.__name__ for made, form in plain.PLAIN.items()}
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


LARGE = {
    "kernelized": dict(),
    "relu": dict(feature_map="relu"),
    "tempered": dict(temperature=torch.full((1,), 4.0)),
    "direct": dict(form="direct", temperature=torch.full((1,), 4.0)),
}


PLACES = [None, *itertools.product(["joint", "axial", "flat"], ["mean", "sum"])]


@pytest.mark.parametrize(
    "name, place",
    [
        *itertools.product(["kernelized"], PLACES),
        *itertools.product(["tempered"], [None, ("joint", "mean")]),
        ("relu", None),
        ("direct", None),
    ],
    ids=str,
)
def test_many_tokens_do_not_overflow_float16(called, monkeypatch, name, place):
    """What a tool makes float16 of is all but the counting: here sums are of float16 too."""
    grid = Grid(48, 48) if name == "direct" else Grid(260, 260)
    layout, taylor = TokenLayout(1, grid), name in ("tempered", "direct")
    q, k, v = (drawn(1, 1, layout.num_tokens, 4, seed=i) for i in range(3))
    # As coarse as float16, so that the inputs are the same.
    q, k, v = (x.half().double() for x in (q, k, v + 3))
    relative, options = None, LARGE[name]
    if place:
        relative = relative_of(*place, 1, layout=layout)
        tables = {n: x[:1, ..., :4].half().double() for n, x in tables_of(relative).items()}
        relative = replace(relative, **tables)
    attend = ops.taylorshift_attention if taylor else ops.kernelized_attention
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    monkeypatch.setattr("visionattn.ops.taylorshift.attention.takes_pairs", lambda *args: False)
    form = options | {"form": options.get("form", "efficient")}
    wanted = attend(q, k, v, relative=relative, **form)
    for module in ("plain", "sums", "position.kinds", "kernelized.attention"):
        monkeypatch.setattr(f"visionattn.ops.{module}.accumulation_dtype", lambda *x: torch.half)
    for module in ("taylorshift.attention", "feature_maps"):
        monkeypatch.setattr(f"visionattn.ops.{module}.accumulation_dtype", lambda *x: torch.half)
    q, k, v = (x.half() for x in (q, k, v))
    if relative:
        relative = replace(relative, **{n: x.half() for n, x in tables_of(relative).items()})
    found = attend(q, k, v, relative=relative, **form)
    assert (found.double() - wanted).abs().max() < 2e-2


POSITIONS = [None, ("joint", "mean", 3), ("joint", "sum", 0), ("joint", "sum", 9)]
POSITIONS += [("axial", "mean", 9), ("axial", "sum", 1), ("flat", "mean", 0), ("flat", "sum", 3)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("position", POSITIONS, ids=str)
def test_kernelized_attention_of_them_is_its_definition(called, position, masked):
    q, k, v = tokens()
    relative = position and relative_of(*position)
    options = dict(relative=relative, key_mask=mask_of() if masked else None)
    found = ops.kernelized_attention(q, k, v, form="efficient", **options)
    close(found, reference.kernelized_attention(q, k, v, **options))
    sums = {"joint": "class_sums", "flat": "class_sums", "axial": "axis_sums"}
    assert called == {"kernel_sums", "weighted_mean", *([sums[position[0]]] if position else [])}


@pytest.mark.parametrize("feature_map", ["relu", "softmax", "random"])
def test_feature_maps_are_those_of_the_definition(called, feature_map):
    q, k, v = tokens(11, 17)
    if feature_map == "random":
        feature_map = RandomFeatures(D, 6, torch.Generator().manual_seed(0), dtype=torch.float64)
    options = dict(feature_map=feature_map, key_mask=mask_of(17))
    found = ops.kernelized_attention(q, k, v, form="efficient", **options)
    close(found, reference.kernelized_attention(q, k, v, **options))
    assert ("product" in called) == isinstance(feature_map, RandomFeatures)


@pytest.mark.parametrize("sizes", [(17, 17), (11, 17), (17, 11)])
@pytest.mark.parametrize("flat", [False, True])
def test_sequences_are_causal_and_of_other_numbers_of_keys(called, sizes, flat):
    q, k, v = tokens(*sizes)
    relative = Flat(drawn(HEADS, 7, D, positive=True), None, "mean") if flat else None
    for causal in (False, True):
        found = ops.kernelized_attention(q, k, v, relative=relative, causal=causal)
        wanted = reference.kernelized_attention(q, k, v, relative=relative, causal=causal)
        close(found, wanted)
    assert "kernel_sums" in called


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("form", ["efficient", "direct"])
@pytest.mark.parametrize("tempered", [False, True])
@pytest.mark.parametrize("position", [None, ("joint", "mean"), ("axial", "sum")], ids=str)
def test_taylorshift_of_them_is_its_definition(
    called, monkeypatch, position, tempered, form, masked
):
    monkeypatch.setattr("visionattn.ops.taylorshift.attention.takes_pairs", lambda *args: False)
    q, k, v = tokens()
    temperature = drawn(HEADS, seed=7, positive=True) + 0.5 if tempered else None
    options = dict(temperature=temperature, key_mask=mask_of() if masked else None)
    options |= dict(relative=position and relative_of(*position), coefficients=(0.7, 0.9, 1.3))
    found = ops.taylorshift_attention(q, k, v, form=form, **options)
    close(found, reference.taylorshift_attention(q, k, v, **options))
    assert "taylor_sums" in called


@pytest.mark.parametrize("d", [1, 3, 4, 16, 18])
def test_squares_of_scores_are_summed_at_any_width_of_a_head(d):
    q, k, v = (
        drawn(2, 3, n, width, seed=i) for i, (n, width) in enumerate([(9, d), (7, d), (7, 4)])
    )
    close(plain._sums_of_squares(q, k, v), (q @ k.mT).square() @ v)


def test_without_a_name_the_form_is_the_one_that_keeps_its_digits():
    """Long orthogonal queries and keys in float32, where the linear form loses them."""
    q, k, v = (x.float() for x in tokens(12))
    turned = torch.linalg.qr(drawn(D, D))[0].float()
    q, k = 1000 * q[..., :3] @ turned[:3], 1000 * k[..., 3:] @ turned[3:]
    wanted = reference.taylorshift_attention(q.double(), k.double(), v.double())
    error = {}
    for form in ("auto", "efficient"):
        values, mass, *_ = plain.plain_taylor_sums(q, k, v, None, None, 0.5, 1.0, 1.0, form)
        error[form] = float((values / mass.unsqueeze(3) - wanted).abs().max())
    assert 20 * error["auto"] < error["efficient"]


@pytest.mark.parametrize("kind", ["joint", "axial", "flat"])
@pytest.mark.parametrize("horizon", [1, 9])
def test_scores_of_relative_position_are_those_of_the_definition(called, kind, horizon):
    q, k, v = tokens()
    relative = relative_of(kind, "sum", horizon, positive=False)
    wanted = reference.softmax_attention(q, k, v, bias=reference.relative_bias(relative, q))
    close(ops.softmax_attention(q, k, v, relative=relative), wanted)
    assert called == {"relative_scores"}


@pytest.mark.parametrize(
    "window, kind, prefix, shifted, masked",
    [
        (1, "joint", 0, False, True),
        (2, None, 2, True, True),
        (2, "axial", 0, True, False),
        (3, "joint", 2, True, True),
        (3, None, 0, False, False),
        (3, "axial", 2, False, True),
        (9, "joint", 2, True, False),
        (9, "axial", 0, True, True),
    ],
)
def test_windows_are_those_of_the_definition(called, window, kind, prefix, shifted, masked):
    layout = TokenLayout(prefix, GRID)
    q, k, v = tokens(layout.num_tokens)
    relative = kind and relative_of(kind, "sum", 2, positive=False, layout=layout)
    where = dict(relative=relative) if relative else dict(layout=layout)
    options = dict(window_size=window, shifted=shifted, **where)
    options["key_mask"] = mask_of(layout.num_tokens) if masked else None
    found = ops.window_attention(q, k, v, **options)
    close(found, reference.window_attention(q, k, v, **options))
    assert "windows" in called


class Largest(TorchDispatchMode):
    """Keeps the most entries of any tensor that was made within."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else (found,):
            if isinstance(x, torch.Tensor):
                self.entries = max(self.entries, x.numel())
        return found


LINEAR = {
    "kernelized": dict(),
    "taylorshift": dict(temperature=torch.ones(HEADS)),
    "window": dict(),
}


@pytest.mark.parametrize("kind", ["joint", "axial"])
@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_stays_linear(called, name, kind):
    most = []
    for height, width in ((24, 16), (24, 32)):
        layout = TokenLayout(0, Grid(height, width))
        q, k, v = tokens(layout.num_tokens)
        # On meta: sizes alone.
        relative = relative_of(kind, "sum", 3, layout=layout)
        options = LINEAR[name] if name == "window" else LINEAR[name] | dict(form="efficient")
        with Largest() as largest:
            getattr(ops, f"{name}_attention")(q, k, v, relative=relative, **options)
        most.append(largest.entries)
    assert most[1] <= 2.1 * most[0]
    assert most[0] < B * HEADS * (24 * 16) ** 2 // 4 or name == "window"
