"""Every operation that has kernels, at sizes that are no multiples of any block."""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from tests.helpers.kernel_checks import both_passes
from tests.helpers.oracles import draw, draw_mask, draw_table
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Joint, kernelized_attention, reference, taylorshift_attention

TAU = torch.tensor([0.7, 4.0], dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """An operation at a size that is no multiple of any block; with a grid, queries and keys are
    its prefix and patches.
    """

    name: str
    options: dict = field(default_factory=dict)
    masked: bool = False
    d: int = 24
    e: int = 40
    queries: int = 67
    keys: int = 131
    batch: int = 2
    grid: tuple[int, int] | None = None
    horizons: tuple[int, int] = (2, 2)
    prefix: int = 2
    normalization: str = "mean"

    @property
    def tokens(self) -> tuple[int, int]:
        """Queries and keys."""
        if self.grid is None:
            return self.queries, self.keys
        return (self.prefix + self.grid[0] * self.grid[1],) * 2

    def tensors(self) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
        """Inputs by name in float64, an upstream gradient, and the key mask."""
        (n, m), heads = self.tokens, 2 if self.grid is None else 1
        widths = {"q": (n, self.d), "k": (m, self.d), "v": (m, self.e)}
        made = {
            x: draw(self.batch, heads, *shape, seed=i)
            for i, (x, shape) in enumerate(widths.items())
        }
        if self.name == "taylorshift" and "temperature" not in self.options:
            made["q"] /= 4
        if "temperature" in self.options:
            made["temperature"] = TAU[:heads]
        if self.grid is not None:
            made = {x: t[:1] if x in "qkv" else t for x, t in made.items()}
            sides = (2 * horizon + 1 for horizon in self.horizons)
            made["table"] = draw_table(heads, *sides, self.d, seed=5)
        mask = draw_mask(2, m) if self.masked else None
        return made, draw(*made["q"].shape[:3], self.e, seed=9), mask

    def call(self, function, mask: Tensor | None, **inputs: Tensor) -> Tensor:
        """The operation, or its definition."""
        options = {x: value for x, value in self.options.items() if x != "temperature"}
        if "table" in inputs:
            layout = TokenLayout(self.prefix, Grid(*self.grid))
            options["relative"] = Joint(inputs.pop("table"), layout, self.normalization)
        return function(**inputs, key_mask=mask, **options)

    def defined(self, tensors: dict[str, Tensor], grad: Tensor, mask) -> dict[str, Tensor]:
        """Both passes of the definition."""
        function = getattr(reference, f"{self.name}_attention")
        wide = {name: x.detach().double().cpu() for name, x in tensors.items()}
        call = partial(self.call, function, None if mask is None else mask.cpu())
        return both_passes(call, wide, grad.double().cpu())


FUNCTIONS = {"kernelized": kernelized_attention, "taylorshift": taylorshift_attention}
LEARNED, UNEQUAL = {"temperature": True}, {"coefficients": (0.7, -0.6, 1.3)}
CASES = {
    "kernelized, elu1": Case("kernelized"),
    "kernelized, relu, masked": Case("kernelized", {"feature_map": "relu"}, True),
    "direct, learned, masked": Case("taylorshift", LEARNED, True, e=24),
    "direct, plain": Case("taylorshift", UNEQUAL, d=32, e=16),
    "efficient, learned, masked": Case("taylorshift", LEARNED, True, 16, 24, queries=35, keys=67),
    "efficient, plain": Case("taylorshift", UNEQUAL, d=24, e=32, batch=1),
    # Three tiles of columns; more rows than a chunk of far queries; one patch.
    "kernelized, joint": Case("kernelized", grid=(3, 37), d=16, e=24),
    "kernelized, joint sum": Case(
        "kernelized", grid=(17, 9), d=8, e=8, horizons=(2, 1), prefix=0, normalization="sum"
    ),
    "kernelized, relu, joint": Case(
        "kernelized", {"feature_map": "relu"}, grid=(5, 9), d=8, e=16, horizons=(1, 8)
    ),
    "kernelized, joint, one patch": Case("kernelized", grid=(1, 1), d=8, e=8, prefix=5),
    "direct, joint": Case("taylorshift", LEARNED, grid=(4, 18), d=16, e=8, horizons=(4, 3)),
    "efficient, joint sum": Case("taylorshift", grid=(2, 35), d=8, e=16, normalization="sum"),
}
FORMS = ("direct", "efficient")


def with_kernels(name: str, tensors: dict[str, Tensor], grad: Tensor, mask) -> dict[str, Tensor]:
    """Both passes of the kernels."""
    form, options = name.split(",")[0], {"impl": "triton"}
    if form in FORMS:
        options["form"] = form
    function = partial(FUNCTIONS[CASES[name].name], **options)
    return both_passes(partial(CASES[name].call, function, mask), tensors, grad)
