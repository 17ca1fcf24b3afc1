"""Every operation once, beside its definition, for the tests of what all of them owe."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from oracles import draw, draw_qkv, draw_table
from torch import Tensor

from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Axial, Flat, Joint, kernelized_attention, reference, softmax_attention, taylorshift_attention

TOKENS = 47


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
    bias = reference.relative_bias(Joint(table, layout_of(inputs["q"].shape[2])), inputs["q"])
    return reference.softmax_attention(**inputs, key_mask=mask, bias=bias)


def operations() -> dict[str, Operation]:
    """Every operation, each form, feature map and kind of relative position once."""
    tau = {"temperature": torch.tensor([0.7, 1.9, 4.0], dtype=torch.float64)}
    joint, rows = {"table": draw_table(3, 5, 5, 16, seed=21)}, draw_table(3, 3, 16, seed=22)
    axial = {"rows": rows, "columns": draw_table(3, 7, 16, seed=23)}
    taylor, kernel = taylorshift_attention, kernelized_attention
    slow_taylor, slow_kernel = reference.taylorshift_attention, reference.kernelized_attention
    named = {}
    for form in ("direct", "efficient"):
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
