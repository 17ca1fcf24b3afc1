"""How wrong kernels may be: one rule, for Triton's interpreter and GPUs, and inputs to ask it with.

The mean and each gradient are compared with the definition in float64, in units of eps, the
distance from 1 to the next number:

- "whole": the norm of the error over the norm of the tensor, at most eps/2. Rounding to nearest
  leaves 0.21 eps (root mean square over a binade), k independent roundings leave sqrt(k) times as
  much, and eps/2 is the error of five to six: operands of two products, the result of the pass
  before, the result itself. What PyTorch gives in the same dtype has one, 0.21 eps. Of fewer than
  16 rows it is not asked: that is no mean of errors yet.
- "row": the largest error of one row (a token, or a class of a table), over the norm of that row
  and of a usual row together, at most 2 eps: four times as much as the whole, since it is the
  worst of thousands, and some rows are differences of larger ones. A learned temperature has one
  number for each head, and is held to this alone.

Float32 has 1e-5 and 4e-5 instead: on a GPU its products are three of tf32, which leave about 1e-6.
And where the definition itself, rounded to the dtype, loses more than half of what is allowed, as
float16 does below 6e-5, twice that is allowed.

So small an error is asked for two kinds of inputs, in which a fault of one token or one class is
larger:

- "noise": all tokens alike. Of a row that is lost, or is that of another token, all is wrong. One
  of M keys that is lost changes every mean by 1/sqrt(M) of itself, as values have no common mean:
  at M = 70,001 by more than float16 may err.
- "spots": as many tokens as there are features, at the ends, on both sides of the edges of blocks
  and elsewhere, that each have a feature of their own. Every query looks at one of them, and at
  all other keys no more than at that one, whatever M is; every class of a table that a feature
  lights up is looked at in the same way. The upstream gradients of the spots outweigh those of all
  others. So what one spot adds to the sums over keys, and over queries, is of the size of the
  sums.

The interpreter is wrong in bfloat16. Kernels have the same roundings in bfloat16 as in float16, so
in units of eps their errors are the same, but where float16 leaves its range; the faults are held
against what bfloat16 may err too.

The numbers and the measures are in ``visionattn/lab/accuracy.py``; here are the inputs.
``tests/kernels/test_accuracy.py`` holds the kernels to the rule and plants the faults. As a
program, this prints the errors of kernels beside those of PyTorch in the same dtype:
``python -m tests.helpers.accuracy_rule [OPERATION ...]``, on a GPU or in the interpreter.
"""

import os
import sys

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable
from functools import partial

from torch import Tensor

from tests.helpers.operations import OPERATIONS, layout_of
from tests.helpers.oracles import draw
from visionattn.lab.accuracy import Judged, judge

HEADS = 3


def both_passes(
    function: Callable[..., Tensor], tensors: dict[str, Tensor], grad: Tensor
) -> dict[str, Tensor]:
    """The mean under "out", and the gradient of every tensor under its name."""
    inputs = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    out = function(**inputs)
    gradients = torch.autograd.grad(out, list(inputs.values()), grad.to(out))
    return {"out": out.detach()} | dict(zip(inputs, gradients, strict=True))


def places_of_spots(tokens: int, count: int) -> list[int]:
    """At most ``count`` tokens: both ends, both sides of edges of blocks, and others."""
    wanted = [0, tokens - 1]
    for block in (64, 128, 32, 49, 16, 256):  # 49 is the width of a grid
        last = (tokens - 1) // block * block
        wanted += [block - 1, block, last - 1, last]
    wanted += torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens)).tolist()
    return list(dict.fromkeys(i for i in wanted if 0 <= i < tokens))[:count]


def noise(
    name: str, tokens: int, d: int, e: int, heads: int = HEADS
) -> tuple[dict[str, Tensor], Tensor]:
    """Normal numbers, float64, and the upstream gradient."""
    drawn = {
        x: draw(1, heads, tokens, width, seed=i)
        for i, (x, width) in enumerate((("q", d), ("k", d), ("v", e)))
    }
    learned = {x: t[:heads] for x, t in OPERATIONS[name].learned.items()}
    return drawn | learned, draw(1, heads, tokens, e, seed=99)


def spots(
    name: str, tokens: int, d: int, e: int, heads: int = HEADS
) -> tuple[dict[str, Tensor], Tensor]:
    """Tokens with a feature of their own, float64, and the upstream gradient; see the module."""
    taylor, learned = name.startswith("taylor"), OPERATIONS[name].learned
    places = torch.tensor(places_of_spots(tokens, d // 2 if taylor else d))
    feature = torch.arange(len(places))
    looks_at = torch.arange(tokens) % len(places)
    looks_at[places] = feature
    q, k = (0.1 * draw(1, heads, tokens, d, seed=seed) - 3 for seed in (50, 51))  # elu1(-3) is 0.05
    made = {"q": q, "k": k, "v": draw(1, heads, tokens, e, seed=52)}
    if taylor:
        # A query points at its spot; all other keys lie across, in the other half of the features.
        q[:, :, torch.arange(tokens), looks_at] = 60 + draw(1, heads, tokens, seed=53)
        k[..., : d // 2] = 0
        k[..., d // 2 :] = draw(1, heads, tokens, d - d // 2, seed=54)
        k[:, :, places] = 0
        k[:, :, places, feature] = 3
        if "temperature" in learned:
            made["temperature"] = torch.full(
                (heads,), min(64, (2 * tokens) ** 0.5), dtype=torch.float64
            )
    else:
        q[:, :, torch.arange(tokens), looks_at] = 2 + 0.1 * draw(1, heads, tokens, seed=53)
        k[:, :, places, feature] = max(1, 0.05 * tokens)
    if "table" in learned:
        keys = _keys_of_classes(tokens, *learned["table"].shape[1:3])
        share = tokens / keys if name.endswith("sum") else torch.ones_like(keys)
        made["table"] = _lit_classes(share, d, len(places), heads) / (20 if taylor else 1)
    grad = draw(1, heads, tokens, e, seed=55)
    grad[:, :, places] *= 2 ** round(tokens.bit_length() / 2)
    return made, grad


def _keys_of_classes(tokens: int, rows: int, columns: int) -> Tensor:
    """About how many keys of each class a query in the middle sees, ``[rows, columns]``."""
    grid = layout_of(tokens).grid
    axes = []
    for length, classes in ((grid.height, rows), (grid.width, columns)):
        axes.append(torch.ones(classes, dtype=torch.float64))
        axes[-1][[0, -1]] = max(1, (length - classes + 2) // 2)
    return axes[0][:, None] * axes[1]


def _lit_classes(share: Tensor, d: int, features: int, heads: int) -> Tensor:
    """A table in which each feature of each head lights up one class, all in turn, by its share."""
    table = 0.02 * (1 + 0.2 * draw(heads, share.numel(), d, seed=56).abs())
    for lit in range(heads * features):
        i_class = lit % share.numel()
        table[lit // features, i_class, lit % features] = 0.2 * share.flatten()[i_class]
    return table.unflatten(1, tuple(share.shape))


INPUTS = {"noise": noise, "spots": spots}


def inputs_of(
    name: str, inputs: str, tokens: int, dtype: torch.dtype, device: str = "cpu", heads: int = HEADS
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors and the upstream gradient, all rounded once: what is learned is float32."""
    d = 16 if "joint" in name or ("causal" in name and dtype == torch.float32) else 32
    e = 16 if "causal" in name and dtype == torch.float32 else 32
    tensors, grad = INPUTS[inputs](name, tokens, d, e, heads)
    if "temperature" in tensors:
        grad = leaning(partial(OPERATIONS[name].fast, impl="eager"), tensors, grad)
    tensors = {x: t.to(device, dtype if x in "qkv" else torch.float32) for x, t in tensors.items()}
    return tensors, grad.to(device, dtype)


def leaning(function: Callable[..., Tensor], tensors: dict[str, Tensor], grad: Tensor) -> Tensor:
    """``grad`` and an eighth more, along what the temperature does to each mean.

    So the gradient of the temperature, a sum over all queries, is no small difference of large
    numbers, whose error would say nothing.
    """
    more, less = (
        function(**tensors | {"temperature": tensors["temperature"] * x}) for x in (1.001, 0.999)
    )
    along = (more - less) / (more - less).norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return grad + grad.norm(dim=-1, keepdim=True) / 8 * along


def by_definition(name: str, tensors: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """In float64: by the quadratic definition, or for many tokens by PyTorch, as exact as that."""
    wide, operation = {x: t.double() for x, t in tensors.items()}, OPERATIONS[name]
    few = tensors["q"].shape[2] <= 10_000
    return both_passes(
        operation.slow if few else partial(operation.fast, impl="eager"), wide, grad.double()
    )


def judged_with(
    name: str, inputs: str, tokens: int, dtype: torch.dtype, device: str, heads: int, impl: str
) -> list[Judged]:
    """An operation run and judged with one kind of inputs."""
    tensors, grad = inputs_of(name, inputs, tokens, dtype, device, heads)
    actual = both_passes(partial(OPERATIONS[name].fast, impl=impl), tensors, grad)
    return judge(actual, by_definition(name, tensors, grad), dtype)


CONTENT = [
    "kernelized efficient, elu1",
    "kernelized causal efficient, elu1",
    "taylorshift efficient",
    "taylorshift direct",
]
POSITION = ["kernelized, joint mean", "kernelized, joint sum", "taylorshift, joint mean"]


def print_errors(name: str, device: str) -> None:
    """Errors of every quantity in eps, of kernels and of PyTorch, and the margin of the kernels."""
    for dtype in (torch.float16, torch.float32) + (torch.bfloat16,) * (device == "cuda"):
        eps = torch.finfo(dtype).eps
        for tokens in (98, 245) if name in POSITION else (17, 150):
            for inputs in INPUTS:
                asked = name, inputs, tokens, dtype, device, HEADS
                for kernels, eager in zip(
                    judged_with(*asked, "triton"), judged_with(*asked, "eager"), strict=True
                ):
                    case = f"{name:33}{str(dtype)[6:]:9}{tokens:6} {inputs:6}"
                    found = (
                        f"{kernels.error / eps:7.2f}{eager.error / eps:7.2f}{kernels.margin:9.2f}"
                    )
                    print(f"{case}{kernels.quantity:12}{kernels.measure:6}{found}", flush=True)


if __name__ == "__main__":
    print("Errors of kernels and of PyTorch in eps, and the margin of the kernels:")
    for name in sys.argv[1:] or CONTENT + POSITION:
        print_errors(name, "cuda" if torch.cuda.is_available() else "cpu")
