"""TaylorShift: attention whose weights are a second-order polynomial of the scores, in either of
two forms.

``w_ij = a x_ij^2 + b x_ij + c`` with ``x_ij = q_i . k_j`` needs no exponential and no maximum, and
its sums can be formed in time linear in the number of tokens. Source: Nauen, Palacio and Dengel
2024, "TaylorShift" (its d^(1/4) and 1/N steps guard against overflow only; sums in float32 do not
need them).
"""

from functools import partial

import torch
from torch import Tensor

from visionattn.ops.checks import (
    check_attention,
    check_coefficients,
    check_options,
    check_temperature,
)
from visionattn.ops.choice import form_of_shapes
from visionattn.ops.gpu.machine import takes_kernels
from visionattn.ops.operator import without_autocast
from visionattn.ops.pairs import mean_of_pairs, takes_pairs
from visionattn.ops.position.gpu import place_of
from visionattn.ops.position.kinds import (
    Joint,
    RelativePosition,
    key_counts,
    mask_absent,
    mean_with_relative,
)
from visionattn.ops.sums import Sums, accumulation_dtype, drop_values, product_dtype
from visionattn.ops.taylorshift.eager import linear_form, taylor_sums
from visionattn.ops.taylorshift.gpu import takes_efficient_kernels, taylor_mean, why_not


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
        temperature: tau, ``[h]``; q becomes ``tau q / |q|`` and k becomes ``k / |k|``. None takes
            them as they are.
        coefficients: (a, b, c) with ``a > 0`` and ``c > b^2 / (4 a)``.
        relative: linear relative position; see ``position/kinds.py``.
        key_mask: bool ``[B, M]``, True takes part. A query without any key gets 0. What masked keys
            hold plays no part, NaN and inf included.
        output_scale: multiply the output by ``sqrt(keys / d)``, keys being those that take part.
        value_drop: drop whole rows of v with this probability and scale up the others; see
            ``drop_values``.
        generator: of the draws of value_drop.
        form: "direct" is O(N M d), "efficient" O((N + M) d^2 e), "auto" the one expected to be
            faster. They agree to rounding, which the efficient form multiplies: a result errs by up
            to a quarter of eps times ``(a |q|^2 |k|^2 + c) / w`` of the largest value, w being the
            mean weight of the query. That is little with a temperature (``tau^2 + 2`` at most) and
            where q points along keys. Where long q and k are orthogonal, results leave the range
            of the values: with the default coefficients by 1e-3 from ``|q| |k|`` of 250 on in
            float32 and of 6e6 in float64. There "auto" takes the direct form, from 2.5e-4 and
            1.5e-8 on. It does so for all inputs without a temperature on an accelerator, whose
            entries nobody looks at; a form that is named runs as it is.
        impl: "triton" runs the GPU kernels or raises why not, "eager" PyTorch's own; "auto" takes
            kernels on a GPU where they exist (``gpu.py``). They agree within the precision of the
            inputs.

    Returns:
        ``[B, h, N, e]`` in the dtype of v.

    Raises:
        ValueError: shapes, dtypes, devices, coefficients or tables that do not fit.
        NotImplementedError: impl="triton" where there is no kernel for these inputs.

    Source: TaylorShift, "How does TaylorShift work?"; temperature and output factor its
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
    """Decide what runs: "pairs", "direct", "efficient", or "direct triton" and the like.

    "auto" is left to the operator by compilers, which see one operator for all numbers of tokens.
    """
    auto, compiling = form == "auto", torch.compiler.is_compiling()
    reason = partial(why_not, q, k, v, key_mask=key_mask, relative=relative)
    if takes_kernels(impl, "taylorshift", q, reason):
        # How far the efficient form would lose digits without a temperature depends on entries,
        # and to look at them would be to wait for the GPU.
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
    few = form == "direct" or form_of_shapes("taylorshift", q.shape, v.shape, rows) == "direct"
    if few and takes_pairs(q, v, relative):
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
    """Return the mean by PyTorch's own operations."""
    if form == "pairs":
        options = dict(temperature=temperature, coefficients=coefficients)
        return mean_of_pairs(q, k, v, key_mask, relative, **options)[0]
    if relative is not None:  # gradients of two terms add in the dtype of products
        q, v = (x.to(product_dtype(q, k, v)) for x in (q, v))
    values, mass, *_ = taylor_sums(q, k, v, temperature, key_mask, *coefficients, form)
    if relative is None:
        return Sums(values, mass).divide()
    if key_mask is not None:
        v = v.masked_fill(~key_mask[:, None, :, None], 0)
    count = key_counts(k, key_mask, dtype=dtype)
    return mean_with_relative(Sums(values, mass), relative, q, v, count, key_mask)
