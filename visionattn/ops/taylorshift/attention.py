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
from visionattn.ops.gpu.machine import takes_kernels
from visionattn.ops.operator import without_autocast
from visionattn.ops.pairs.mean import mean_of_pairs, takes_pairs
from visionattn.ops.position.gpu import place_of
from visionattn.ops.position.kinds import (
    RelativePosition,
    key_counts,
    mask_absent,
    mean_with_relative,
)
from visionattn.ops.sums import Sums, accumulation_dtype, drop_values, product_dtype
from visionattn.ops.taylorshift.eager import takes_efficient, taylor_sums
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
    relative, key_mask = mask_absent(relative, key_mask)
    reason = partial(why_not, q, k, v, key_mask=key_mask, relative=relative)
    if takes_kernels(impl, "taylorshift", q, reason):
        return _with_kernels(
            q,
            k,
            v,
            temperature,
            coefficients,
            relative,
            key_mask,
            output_scale,
            value_drop,
            generator,
            form,
        )
    dtype = accumulation_dtype(q, k, v)
    if not q.shape[2]:
        form = "direct"  # no query reads a state
    pairs = takes_pairs("taylorshift", form, q, v, relative)
    # The state of a named form is kept. A compiler sees one operator, which chooses within itself.
    if form == "auto" and not torch.compiler.is_compiling():
        asked = form, q, k, v, temperature, key_mask, coefficients
        form = "efficient" if takes_efficient(*asked) else "direct"
    with without_autocast(q):
        value = drop_values(v.to(dtype), value_drop, generator) if value_drop else v
        count = key_counts(k, key_mask, dtype=dtype)
        if pairs:
            options = dict(temperature=temperature, coefficients=coefficients)
            out, _ = mean_of_pairs(q, k, value, key_mask, relative, count, **options)
        else:
            query = q
            if relative is not None:  # gradients of two terms add in the dtype of products
                query, value = (x.to(product_dtype(q, k, value)) for x in (q, value))
            values, mass, *_ = taylor_sums(
                query, k, value, temperature, key_mask, *coefficients, form
            )
            if relative is not None and key_mask is not None:
                value = value.masked_fill(~key_mask[:, None, :, None], 0)
            out = mean_with_relative(Sums(values, mass), relative, query, value, count, key_mask)
        if output_scale:
            out = out * (count / q.shape[3]).sqrt().unsqueeze(-1)
        return out.to(v.dtype)


def _with_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    coefficients: tuple[float, float, float],
    relative: RelativePosition | None,
    key_mask: Tensor | None,
    output_scale: bool,
    value_drop: float,
    generator: torch.Generator | None,
    form: str,
) -> Tensor:
    """Return what ``taylorshift_attention`` does, by one operator of GPU kernels."""
    # How far the efficient form would lose digits without a temperature depends on entries, and to
    # look at them would be to wait for the GPU.
    if form == "auto" and temperature is None:
        form = "direct"
    # The state of a named form is kept. A compiler sees one operator, which chooses within itself.
    if form == "auto" and not torch.compiler.is_compiling():
        gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        form = "efficient" if takes_efficient_kernels(form, q, k, v, gradients) else "direct"
    value = drop_values(v.float(), value_drop, generator).to(v.dtype) if value_drop else v
    table = None if relative is None else relative.table
    out = taylor_mean(
        q, k, value, temperature, key_mask, table, *coefficients, form, place_of(relative)
    )[0]
    if not output_scale:
        return out
    factor = (key_counts(k, key_mask, dtype=torch.float32) / q.shape[3]).sqrt().unsqueeze(-1)
    return (out.float() * factor).to(v.dtype)
