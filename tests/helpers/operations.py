"""Every operation once, beside its definition, for the tests of what all of them owe."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.helpers.oracles import draw, draw_qkv, draw_table
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    Axial,
    Flat,
    Joint,
    RandomFeatures,
    kernelized_attention,
    reference,
    softmax_attention,
    taylorshift_attention,
    window_attention,
)

TOKENS = 47


def layout_of(tokens: int) -> TokenLayout:
    """Two prefix tokens and a grid of 5 x 9 for 47 tokens, otherwise a grid of 49 columns."""
    return (
        TokenLayout(2, Grid(5, 9)) if tokens == TOKENS else TokenLayout(0, Grid(tokens // 49, 49))
    )


@dataclass(frozen=True)
class Operation:
    """An operation and its definition, both called with the same tensors by name and a key mask."""

    fast: Callable[..., Tensor]
    slow: Callable[..., Tensor]
    learned: dict[str, Tensor]

    def tensors(
        self, dtype: torch.dtype = torch.float64, scale: float = 1.0, **sizes
    ) -> dict[str, Tensor]:
        """q, k, v of the dtype; what a model learns stays float32 unless the dtype is float64."""
        qkv = draw_qkv(**{"queries": TOKENS, "d": 16, "e": 24} | sizes)
        learned = torch.float64 if dtype == torch.float64 else torch.float32
        return {name: (scale * x).to(dtype) for name, x in qkv.items()} | {
            name: x.to(learned) for name, x in self.learned.items()
        }


def relative(
    function: Callable[..., Tensor], kind: type, normalization: str, **options
) -> Callable[..., Tensor]:
    """``function`` with the tables among its tensors."""

    def call(**inputs: Tensor) -> Tensor:
        tables = {name: inputs.pop(name) for name in ("table", "rows", "columns") if name in inputs}
        position = kind(
            **tables, layout=layout_of(inputs["q"].shape[2]), normalization=normalization
        )
        return function(**inputs, relative=position, **options)

    return call


def twin(**inputs: Tensor) -> Tensor:
    """Softmax with a signed joint table, by its definition."""
    table, mask = inputs.pop("table"), inputs.pop("key_mask", None)
    bias = reference.relative_bias(Joint(table, layout_of(inputs["q"].shape[2])), inputs["q"])
    return reference.softmax_attention(**inputs, key_mask=mask, bias=bias)


class InDtype:
    """A feature map whose features have the dtype of its input, as the definition computes."""

    def __init__(self, feature_map):
        self.feature_map = feature_map

    def query(self, x: Tensor) -> Tensor:
        return self.feature_map.query(x).to(x.dtype)

    key = query


def content_operations() -> dict[str, Operation]:
    """Every operation without relative position: each form and feature map, causal or not."""
    tau = {"temperature": torch.tensor([0.7, 1.9, 4.0], dtype=torch.float64)}
    taylor, kernel = taylorshift_attention, kernelized_attention
    slow_taylor, slow_kernel = reference.taylorshift_attention, reference.kernelized_attention
    named = {}
    for form in ("direct", "efficient"):
        named[f"taylorshift {form}"] = Operation(partial(taylor, form=form), slow_taylor, tau)
        named[f"taylorshift {form}, plain"] = Operation(partial(taylor, form=form), slow_taylor, {})
        for causal, maps in ((False, ("elu1", "relu", "softmax")), (True, ("elu1", "relu"))):
            for feature_map in maps:
                options = {"feature_map": feature_map, "causal": causal}
                named[f"kernelized {'causal ' * causal}{form}, {feature_map}"] = Operation(
                    partial(kernel, form=form, **options), partial(slow_kernel, **options), {}
                )
    features = RandomFeatures(
        16, 20, torch.Generator().manual_seed(25)
    ).double()  # cast to the dtype of what it maps
    named["kernelized random features"] = Operation(
        partial(kernel, feature_map=features),
        partial(slow_kernel, feature_map=InDtype(features)),
        {},
    )
    for causal in (False, True):
        named[f"softmax{' causal' * causal}"] = Operation(
            partial(softmax_attention, causal=causal),
            partial(reference.softmax_attention, causal=causal),
            {},
        )
    return named


def relative_operations() -> dict[str, Operation]:
    """Every operation with each kind of relative position."""
    tau = {"temperature": torch.tensor([0.7, 1.9, 4.0], dtype=torch.float64)}
    joint, rows = {"table": draw_table(3, 5, 5, 16, seed=21)}, draw_table(3, 3, 16, seed=22)
    axial = {"rows": rows, "columns": draw_table(3, 7, 16, seed=23)}
    taylor, kernel = taylorshift_attention, kernelized_attention
    slow_taylor, slow_kernel = reference.taylorshift_attention, reference.kernelized_attention
    named = {}
    for normalization in ("sum", "mean"):
        for kind, tables in ((Flat, {"table": rows}), (Axial, axial), (Joint, joint)):
            arguments, suffix = (kind, normalization), f"{kind.__name__.lower()} {normalization}"
            named[f"taylorshift, {suffix}"] = Operation(
                relative(taylor, *arguments), relative(slow_taylor, *arguments), tau | tables
            )
            named[f"kernelized, {suffix}"] = Operation(
                relative(kernel, *arguments), relative(slow_kernel, *arguments), tables
            )
            for form in (
                ("direct", "efficient") if kind is Joint else ()
            ):  # few tokens take the direct form by themselves
                fast = (
                    relative(taylor, *arguments, form=form),
                    relative(kernel, *arguments, form=form),
                )
                slow = relative(slow_taylor, *arguments), relative(slow_kernel, *arguments)
                named[f"taylorshift {form}, {suffix}"] = Operation(fast[0], slow[0], tau | tables)
                named[f"kernelized {form}, {suffix}"] = Operation(fast[1], slow[1], tables)
        arguments = (Flat, normalization)
        named[f"kernelized causal, flat {normalization}"] = Operation(
            relative(kernel, *arguments, causal=True),
            relative(slow_kernel, *arguments, causal=True),
            {"table": rows},
        )
    signed = {"table": draw(3, 5, 5, 16, seed=24)}
    named["softmax twin"] = Operation(relative(softmax_attention, Joint, "sum"), twin, signed)
    windows = (
        relative(function, Joint, "sum", window_size=4, shifted=True)
        for function in (window_attention, reference.window_attention)
    )
    named["softmax in windows"] = Operation(*windows, signed)
    return named


OPERATIONS = content_operations() | relative_operations()
NOT_SOFTMAX = [name for name in OPERATIONS if not name.startswith("softmax")]
LINEAR = [name for name in NOT_SOFTMAX if " direct" not in name]
RELATIVE = [name for name in NOT_SOFTMAX if name.endswith((" sum", " mean"))]
every_operation = pytest.mark.parametrize("name", OPERATIONS)
every_linear_operation = pytest.mark.parametrize("name", LINEAR)
every_relative_operation = pytest.mark.parametrize("name", RELATIVE)
SOME = (
    "taylorshift direct",
    "taylorshift efficient, plain",
    "kernelized efficient, elu1",
    "kernelized direct, softmax",
    "kernelized causal efficient, relu",
    "kernelized random features",
    "softmax causal",
    "taylorshift efficient, joint mean",
    "kernelized, axial sum",
    "kernelized causal, flat mean",
    "softmax twin",
    "softmax in windows",
)
"""One for each way through the code."""
some_operations = pytest.mark.parametrize("name", SOME)
