"""The pair of sums that each term of an attention returns, with the helpers of all terms.

A term is the content or the relative position. The sums of all terms are added, and one division at
the end gives the output. The module also has attention dropout, the dtypes of sums and products,
and a matrix product that ignores autocast.
"""

from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor

from visionattn.ops.chunking import chunks
from visionattn.ops.nonfinite import skips_idle_rows
from visionattn.ops.operator import contiguous_like, differentiate, operator, without_autocast

CHUNK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class Sums:
    """Weighted sums of the values and the sums of the weights, before the division.

    Args:
        values: ``sum_j w_ij v_j``, ``[B, h, N, e]``, float32 (float64 for float64 inputs), or
            bfloat16 if products are in bfloat16.
        mass: ``sum_j w_ij``, ``[B, h, N]``, float32 (float64 for float64 inputs).
    """

    values: Tensor
    mass: Tensor

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.values + other.values, self.mass + other.mass)

    def divide(self) -> Tensor:
        """Return the weighted mean ``[B, h, N, e]``.

        It is 0, with zero gradient, for a query whose weights are all 0.
        """
        return weighted_mean(self.values, self.mass)[0]

    def divide_with(self, more: "Sums", skip: int) -> Tensor:
        """Return the weighted mean under these weights and the weights of ``more``, which holds
        sums for the tokens from ``skip`` on.
        """
        return weighted_mean(self.values, self.mass, more.values, more.mass, skip)[0]


def drop_values(v: Tensor, value_drop: float, generator: torch.Generator | None = None) -> Tensor:
    """Drop each row of ``v [B, h, M, e]`` with probability ``value_drop`` and scale the others by
    ``1 / (1 - value_drop)``.

    This replaces the dropout of single weights, which linear time does not allow, and means the
    same in every form of attention. A dropped row adds nothing to the sums of values. Mass and
    counts are unchanged, so the expected output is the output without dropout.
    """
    if value_drop == 0:
        return v
    shape, options = (*v.shape[:3], 1), dict(device=v.device, dtype=torch.float32)
    # With dynamic sizes, the compiler does not accept generator=None.
    uniform = (
        torch.rand(shape, **options)
        if generator is None
        else torch.rand(shape, generator=generator, **options)
    )
    return v * (uniform >= value_drop).to(v.dtype).div(1 - value_drop)


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of sums and mass: float64 if any tensor is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def counting_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for counts of tokens: float64 while ``torch.export`` traces, if ``dtype`` is
    floating point; else ``dtype``.

    Tools that convert an exported program to float16 leave float64 unchanged, and counts above
    65,504 overflow float16.
    """
    exporting = dtype.is_floating_point and torch.compiler.is_exporting()
    return torch.float64 if exporting else dtype


@cache
def has_bfloat16_products() -> bool:
    """Return whether this CPU multiplies bfloat16 matrices faster than float32 ones (AVX512-BF16 or
    AMX).
    """
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def product_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of the operands of matrix products inside an operator.

    It is bfloat16 if all tensors are bfloat16 on a CPU with fast bfloat16 products, else the dtype
    of the sums.
    """
    if all(t.dtype == torch.bfloat16 and t.device.type == "cpu" for t in tensors):
        return torch.bfloat16 if has_bfloat16_products() else torch.float32
    return accumulation_dtype(*tensors)


def add_product(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Add ``x y`` to ``out [g, n, m]`` in place.

    The product of bfloat16 operands is rounded to bfloat16, then added in the dtype of ``out``.
    """
    return out.baddbmm_(x, y) if x.dtype == out.dtype else out.add_(torch.bmm(x, y))


def write_product(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Write ``x y`` to ``out [g, n, m]``, in its dtype."""
    return torch.bmm(x, y, out=out) if x.dtype == out.dtype else out.copy_(torch.bmm(x, y))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the sums of products in ``dtype``: float32 for bfloat16."""
    return torch.promote_types(dtype, torch.float32)


@operator(
    fake=lambda x, y: x.new_empty(*x.shape[:-1], y.shape[-1]),
    flops=lambda x, y: 2 * prod(x) * y[-1],
)
def product(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x y`` for ``x [..., n, d]`` and ``y [..., d, m]`` or ``[d, m]``, in their own dtype,
    forward and backward.

    Disabling autocast around ``torch.matmul`` affects the forward pass only; its gradient would
    still use autocast.
    """
    with without_autocast(x):
        return torch.matmul(x, y)


def _product_gradients(
    grad: Tensor, x: Tensor, y: Tensor, needs: set[str]
) -> tuple[Tensor | None, Tensor | None]:
    dx = product(grad, y.mT) if "x" in needs else None
    if "y" not in needs:
        return dx, None
    if y.ndim == 2:
        x, grad = x.flatten(0, -2), grad.flatten(0, -2)
    return dx, product(x.mT, grad)


differentiate(product, _product_gradients, outputs="out", gradients="x y")


@operator(fake=lambda values, mass: (tokens_first(mass, *values.shape), mass.new_empty(mass.shape)))
def weighted_mean(
    values: Tensor,
    mass: Tensor,
    more_values: Tensor | None = None,
    more_mass: Tensor | None = None,
    skip: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the weighted mean ``[B, h, N, e]`` and the sum of all weights ``[B, h, N]``.

    The mean is 0 where the sum is 0. Autograd saves only the two results.

    Args:
        values, mass: sums of one term, ``[B, h, N, e]`` and ``[B, h, N]``.
        more_values, more_mass: sums of another term, for the tokens from ``skip`` on.
    """
    out, total = tokens_first(mass, *values.shape), mass.clone()
    if more_mass is not None:
        total[:, :, skip:] += more_mass
    (batch, heads, tokens), divisor = mass.shape, divisor_of(total)
    elements = CHUNK_ELEMENTS // max(1, heads * values.shape[3])
    for b in chunks(batch, max(1, elements // max(1, tokens))):
        for t in chunks(tokens, max(1, elements)):
            if more_values is None:
                torch.div(values[b, :, t], divisor[b, :, t], out=out[b, :, t])
                continue
            common = slice(max(t.start, skip), t.stop)
            out[b, :, t.start : common.start] = values[b, :, t.start : common.start]
            more = more_values[b, :, common.start - skip : max(t.stop - skip, 0)]
            torch.add(values[b, :, common], more, out=out[b, :, common])
            out[b, :, t].div_(divisor[b, :, t])
    return out, total


def tokens_first(
    like: Tensor, batch: int, heads: int, tokens: int, width: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Return uninitialized memory ``[B, h, N, e]`` stored as ``[B, N, h, e]``.

    In this order the output projection can flatten heads and width without a copy.
    """
    return like.new_empty(batch, tokens, heads, width, dtype=dtype).transpose(1, 2)


def divisor_of(mass: Tensor) -> Tensor:
    """Return ``mass [..., 1]`` with 1 in place of 0."""
    return torch.where(mass == 0, 1, mass).unsqueeze(-1)


@operator(fake=lambda out, mass: contiguous_like(out, mass))
@skips_idle_rows("grad", rows="out mass")
def weighted_mean_backward(grad: Tensor, out: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``weighted_mean``."""
    return weighted_mean_gradients(grad, out, mass)


def weighted_mean_gradients(grad: Tensor, out: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the sums of values, ``g = grad / mass`` (0 where the mass is 0), and
    the gradient of the mass, ``-<g, out>``.
    """
    d_values = torch.div(grad, divisor_of(mass), out=out.new_empty(out.shape)).masked_fill_(
        (mass == 0).unsqueeze(-1), 0
    )
    return d_values, (d_values * out).sum(-1).neg_()


def _mean_gradients(
    grad: Tensor, out: Tensor, total: Tensor, skip: int, needs: set[str]
) -> tuple[Tensor | None, ...]:
    d_values, d_mass = weighted_mean_backward(grad, out, total)
    if needs.isdisjoint(("more_values", "more_mass")):
        return d_values, d_mass, None, None
    return d_values, d_mass, d_values[:, :, skip:], d_mass[:, :, skip:]


differentiate(
    weighted_mean,
    _mean_gradients,
    outputs="out total",
    gradients="values mass more_values more_mass",
)
