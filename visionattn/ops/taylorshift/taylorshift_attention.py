"""TaylorShift: attention whose weights are a second-order polynomial of the scores.

``w_ij = a x_ij^2 + b x_ij + c`` with ``x_ij = q_i . k_j`` needs no exponential and no maximum. The
direct form computes all weights; the efficient form takes time linear in the number of tokens.

Source: Nauen, Palacio and Dengel 2024, "TaylorShift". Its scalings by d^(1/4) and 1/N only prevent
overflow, and sums in float32 do not need them.
"""

from functools import partial

import torch
from torch import Tensor

from visionattn.ops.all_pairs import mean_of_pairs, takes_pairs
from visionattn.ops.attention_sums import Sums, accumulation_dtype, drop_values, product_dtype
from visionattn.ops.checks import (
    check_attention,
    check_coefficients,
    check_options,
    check_temperature,
)
from visionattn.ops.form_choice import form_of_shapes
from visionattn.ops.gpu.gpu_requirements import takes_kernels
from visionattn.ops.operator import without_autocast
from visionattn.ops.position.position_triton import place_of
from visionattn.ops.position.relative_position import (
    Joint,
    RelativePosition,
    key_counts,
    mask_absent,
    mean_with_relative,
)
from visionattn.ops.taylorshift.taylorshift_eager import linear_form, taylor_sums
from visionattn.ops.taylorshift.taylorshift_triton import (
    takes_efficient_kernels,
    taylor_mean,
    why_not,
)


def taylorshift_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    temperature: Tensor | None = None,
    coefficients: tuple[float, float, float] = (0.5, 1.0, 1.0),
    relative: RelativePosition | None = None,
    key_mask: Tensor | None = None,
    output_scale: bool = False,
    value_drop: float = 0.0,
    generator: torch.Generator | None = None,
    form: str = "auto",
    impl: str = "auto",
) -> Tensor:
    """Return the weighted mean of the values under ``a x^2 + b x + c`` plus the relative term.

    Args:
        q, k, v: ``[B, h, N, d]``, ``[B, h, M, d]``, ``[B, h, M, e]``; sums are float32 (float64 for
            float64 inputs).
        temperature: tau, ``[h]``; q becomes ``tau q / |q|`` and k becomes ``k / |k|``. None: both
            are unchanged.
        coefficients: (a, b, c) with ``a > 0`` and ``c > b^2 / (4 a)``.
        relative: linear relative position; see ``position/relative_position.py``.
        key_mask: bool ``[B, M]``, True takes part. A query without keys gets 0. Contents of masked
            keys have no effect, NaN and inf included.
        output_scale: multiply the output by ``sqrt(keys / d)``, with ``keys`` the number of keys
            that take part.
        value_drop: drop whole rows of v with this probability and scale up the others; see
            ``drop_values``.
        generator: random generator for value_drop.
        form: "direct" is O(N M d), "efficient" O((N + M) d^2 e); "auto" chooses the form expected
            to be faster. They differ by rounding, which the efficient form may amplify; see below.
        impl: "triton" runs the GPU kernels or raises the reason why not, "eager" runs PyTorch
            operations; "auto" uses kernels on a GPU if available (``taylorshift_triton.py``). They
            agree within the precision of the inputs.

    Returns:
        ``[B, h, N, e]`` in the dtype of v.

    Raises:
        ValueError: shapes, dtypes, devices, coefficients or tables that do not fit.
        NotImplementedError: impl="triton" without a kernel for these inputs.

    The error of the efficient form, relative to the largest value, is up to ``eps / 4`` times
    ``(a |q|^2 |k|^2 + c) / w``, with w the mean weight of the query. The factor is at most
    ``tau^2 + 2`` with a temperature, and small if q points along the keys. If long q and k are
    orthogonal, results leave the range of the values: with the default coefficients by 1e-3 from
    ``|q| |k|`` = 250 on in float32, and from 6e6 on in float64. Therefore "auto" chooses the direct
    form if the expected error exceeds 2.5e-4 (float64: 1.5e-8). On an accelerator, where entries
    are not read, it chooses the direct form for all inputs without a temperature. An explicit form
    always runs.

    Source: TaylorShift, "How does TaylorShift work?"; for temperature and output scale
    "Normalization".
    """
    check_attention(q, k, v, key_mask, relative)
    check_coefficients(coefficients)
    check_temperature(temperature, q)
    check_options(form=form, impl=impl, value_drop=value_drop, generator=generator, device=q.device)
    if relative is not None:
        relative, key_mask = mask_absent(relative, key_mask)
    options = temperature, coefficients, relative, key_mask
    form = _form_taken(form, impl, q, k, v, *options)
    with_kernels = form.endswith("triton")
    dtype = torch.float32 if with_kernels else accumulation_dtype(q, k, v)
    with without_autocast(q):
        value = drop_values(v.to(dtype), value_drop, generator) if value_drop else v
        if with_kernels:
            table = None if relative is None else relative.table
            numbers = *coefficients, form.split()[0], place_of(relative)
            out, *_ = taylor_mean(q, k, value.to(v.dtype), temperature, key_mask, table, *numbers)
        else:
            out = _mean(form, q, k, value, *options, dtype)
        if output_scale:
            factor = (key_counts(k, key_mask, dtype=dtype) / q.shape[3]).sqrt()
            out = out.to(dtype) * factor.unsqueeze(-1)
        return out.to(v.dtype)


def _form_taken(
    form: str,
    impl: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    coefficients: tuple[float, float, float],
    relative: RelativePosition | None,
    key_mask: Tensor | None,
) -> str:
    """Return the code path to run: "pairs", "direct" or "efficient", or a form with the suffix
    " triton".

    In a compiled graph "auto" stays "auto": the operator chooses at run time, by the number of
    tokens.
    """
    auto, compiling = form == "auto", torch.compiler.is_compiling()
    reason = partial(why_not, q, k, v, key_mask=key_mask, relative=relative)
    if takes_kernels(impl, q, reason):
        # Without a temperature, the error of the efficient form depends on the entries, and reading
        # them would wait for the GPU.
        if auto and temperature is None:
            form = "direct"
        elif auto and not compiling:
            gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
            efficient = takes_efficient_kernels(form, q, k, v, gradients)
            form = "efficient" if efficient else "direct"
        return f"{form} triton"
    if not q.shape[2]:
        form = "direct"  # no query reads a state
    if compiling or form == "efficient":
        return form
    rows = relative.table.shape[1] if isinstance(relative, Joint) else 0
    prefers_direct = (
        form == "direct" or form_of_shapes("taylorshift", q.shape, v.shape, rows) == "direct"
    )
    if prefers_direct and takes_pairs(q, v, relative):
        return "pairs"
    return linear_form(form, q, k, v, temperature, key_mask, coefficients)


def _mean(
    form: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    coefficients: tuple[float, float, float],
    relative: RelativePosition | None,
    key_mask: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the weighted mean, computed by PyTorch operations."""
    if form == "pairs":
        options = dict(temperature=temperature, coefficients=coefficients)
        return mean_of_pairs(q, k, v, key_mask, relative, **options)[0]
    if relative is not None:  # gradients of both terms add in the dtype of products
        q, v = (x.to(product_dtype(q, k, v)) for x in (q, v))
    values, mass, *_ = taylor_sums(q, k, v, temperature, key_mask, *coefficients, form)
    if relative is None:
        return Sums(values, mass).divide()
    if key_mask is not None:
        v = v.masked_fill(~key_mask[:, None, :, None], 0)
    count = key_counts(k, key_mask, dtype=dtype)
    return mean_with_relative(Sums(values, mass), relative, q, v, count, key_mask)
