"""Operations beside their definitions, for the tests of memory and dtypes."""

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


def biased_softmax(**inputs: Tensor) -> Tensor:
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


TAU = {"temperature": torch.tensor([0.7, 1.9, 4.0], dtype=torch.float64)}
JOINT, ROWS = {"table": draw_table(3, 5, 5, 16, seed=21)}, draw_table(3, 3, 16, seed=22)
FLAT, AXIAL = {"table": ROWS}, {"rows": ROWS, "columns": draw_table(3, 7, 16, seed=23)}
SIGNED = {"table": draw(3, 5, 5, 16, seed=24)}
# Cast to the dtype of what it maps.
FEATURES = RandomFeatures(16, 20, torch.Generator().manual_seed(25)).double()
TAYLOR = taylorshift_attention, reference.taylorshift_attention
KERNEL = kernelized_attention, reference.kernelized_attention
SOFTMAX = softmax_attention, reference.softmax_attention
WINDOW = window_attention, reference.window_attention


def of(functions: tuple, learned: dict[str, Tensor], form: str | None = None, **options):
    """An operation without position, in a form if one is named."""
    fast, slow = (partial(function, **options) for function in functions)
    return Operation(partial(fast, form=form) if form else fast, slow, learned)


def at(functions: tuple, kind: type, normalization: str, learned, form=None, **options):
    """An operation with relative position, in a form if one is named."""
    fast, slow = functions
    return Operation(
        relative(fast, kind, normalization, **options, **({"form": form} if form else {})),
        relative(slow, kind, normalization, **options),
        learned,
    )


OPERATIONS = {
    "taylorshift direct": of(TAYLOR, TAU, "direct"),
    "taylorshift efficient": of(TAYLOR, TAU, "efficient"),
    "taylorshift efficient, plain": of(TAYLOR, {}, "efficient"),
    "kernelized efficient, elu1": of(KERNEL, {}, "efficient"),
    "kernelized direct, relu": of(KERNEL, {}, "direct", feature_map="relu"),
    "kernelized efficient, softmax": of(KERNEL, {}, "efficient", feature_map="softmax"),
    "kernelized causal efficient, relu": of(
        KERNEL, {}, "efficient", feature_map="relu", causal=True
    ),
    "kernelized causal direct, elu1": of(KERNEL, {}, "direct", causal=True),
    "kernelized random features": Operation(
        partial(kernelized_attention, feature_map=FEATURES),
        partial(reference.kernelized_attention, feature_map=InDtype(FEATURES)),
        {},
    ),
    "softmax causal": of(SOFTMAX, {}, causal=True),
    "taylorshift direct, joint mean": at(TAYLOR, Joint, "mean", TAU | JOINT, "direct"),
    "taylorshift efficient, joint sum": at(TAYLOR, Joint, "sum", TAU | JOINT, "efficient"),
    "kernelized efficient, joint mean": at(KERNEL, Joint, "mean", JOINT, "efficient"),
    "kernelized, axial sum": at(KERNEL, Axial, "sum", AXIAL),
    "taylorshift, flat mean": at(TAYLOR, Flat, "mean", TAU | FLAT),
    "kernelized causal, flat mean": at(KERNEL, Flat, "mean", FLAT, causal=True),
    "softmax, joint": Operation(relative(softmax_attention, Joint, "sum"), biased_softmax, SIGNED),
    "softmax in windows": at(WINDOW, Joint, "sum", SIGNED, window_size=4, shifted=True),
}
"""One for each way through the code."""
NOT_SOFTMAX = [name for name in OPERATIONS if not name.startswith("softmax")]
LINEAR = [name for name in NOT_SOFTMAX if " direct" not in name]
RELATIVE = [name for name in NOT_SOFTMAX if name.endswith((" sum", " mean"))]
every_operation = pytest.mark.parametrize("name", OPERATIONS)
every_linear_operation = pytest.mark.parametrize("name", LINEAR)
