"""Kernelized attention: with weights ``phi(q_i) . phi(k_j)``, a state of ``d x e`` numbers replaces
all keys and values.
"""

from functools import partial

import torch
from torch import Tensor

from visionattn.ops.all_pairs import mean_of_pairs, takes_pairs
from visionattn.ops.attention_sums import Sums, accumulation_dtype, drop_values, product_dtype
from visionattn.ops.checks import check_attention, check_options
from visionattn.ops.feature_maps import (
    FeatureMap,
    get_feature_map,
    is_per_token,
    is_tiny,
    key_features,
    map_name,
    query_features,
    raised,
)
from visionattn.ops.form_choice import form_of_shapes
from visionattn.ops.gpu.gpu_requirements import takes_kernels
from visionattn.ops.kernelized.kernelized_eager import form_taken, kernel_sums
from visionattn.ops.kernelized.kernelized_triton import kernel_mean, why_not
from visionattn.ops.nonfinite import finite, finite_inputs, masked
from visionattn.ops.operator import without_autocast
from visionattn.ops.position.position_triton import place_of
from visionattn.ops.position.relative_position import (
    Flat,
    Joint,
    RelativePosition,
    key_counts,
    mask_absent,
    mean_with_relative,
)


def _check_causal(feature_map: FeatureMap, relative: RelativePosition | None) -> None:
    if not is_per_token(feature_map):
        raise ValueError(
            'causal: keys of a feature_map such as "softmax" depend on those that follow; take '
            '"elu1" or "relu"'
        )
    if relative is not None and not isinstance(relative, Flat):
        kind = type(relative).__name__
        raise ValueError(
            f"causal: expected relative position Flat, along the sequence, got {kind} for a grid"
        )
    if relative is not None and relative.layout is not None and relative.layout.kept is not None:
        raise ValueError(
            "causal: expected a layout of all patches in row-major order, got one with kept"
        )


def kernelized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | FeatureMap = "elu1",
    causal: bool = False,
    relative: RelativePosition | None = None,
    key_mask: Tensor | None = None,
    value_drop: float = 0.0,
    generator: torch.Generator | None = None,
    form: str = "auto",
    impl: str = "auto",
) -> Tensor:
    """Return the weighted mean of the values under ``phi(q) . phi(k)`` plus the relative term.

    Args:
        q, k, v: ``[B, h, N, d]``, ``[B, h, M, d]``, ``[B, h, M, e]``; sums are float32 (float64 for
            float64 inputs).
        feature_map: "elu1", "relu", "softmax" (Shen: over features for q, over positions for k), or
            an object with ``.query(x)`` and ``.key(x)``, such as ``RandomFeatures``. With "elu1",
            the weight of a pair underflows to 0 if ``q_c + k_c`` is below -87 (float64: -745) for
            every column c; a query whose weights are all 0 gets 0. On a CPU, outside of compiled
            graphs, the largest entry of the query is subtracted first. Without ``causal`` and
            ``relative``, so is the largest entry of all keys of the head.
        causal: query i attends to keys ``j <= i``, queries from M on to all keys; not for
            "softmax", nor on a grid.
        relative: linear relative position; see ``position/relative_position.py``.
        key_mask: bool ``[B, M]``, True takes part. A query whose weights are all 0 gets 0. Contents
            of masked keys and, with ``causal``, of later tokens have no effect, NaN and inf
            included. One exception: on accelerators and in compiled graphs, later tokens need
            finite numbers for maps other than "elu1" and "relu".
        value_drop: drop whole rows of v with this probability and scale up the others; see
            ``drop_values``.
        generator: random generator for value_drop.
        form: "efficient" is O((N + M) d e), "direct" O(N M d); "auto" chooses the form that
            ``form_choice.py`` expects to be faster. They agree to rounding.
        impl: "triton" runs the GPU kernels or raises the reason why not, "eager" runs PyTorch
            operations; "auto" uses kernels on a GPU if available (``kernelized_triton.py``). They
            agree within the precision of the inputs.

    Returns:
        ``[B, h, N, e]`` in the dtype of v.

    Raises:
        ValueError: shapes, dtypes, devices, names or tables that do not fit; ``causal`` with an
            option that excludes it.
        NotImplementedError: impl="triton" without a kernel for these inputs.

    Source: Katharopoulos et al. 2020, eq. 4 to 6, causal eq. 8 to 12; with relative position
    Scaleformer, eq. 9 and 10.
    """
    check_attention(q, k, v, key_mask, relative)
    check_options(form=form, impl=impl, value_drop=value_drop, generator=generator, device=q.device)
    feature_map = get_feature_map(feature_map)
    if causal:
        _check_causal(feature_map, relative)
    if relative is not None:
        relative, key_mask = mask_absent(relative, key_mask)
    dtype, name = accumulation_dtype(q, k, v), map_name(feature_map)
    causal = causal and v.numel() > 0  # without values it makes no difference
    form = _form_taken(form, impl, q, k, v, key_mask, relative, name, causal)
    # The GPU kernels are one operator; the code below it uses PyTorch operations.
    if form == "triton":
        v = drop_values(v.float(), value_drop, generator).to(v.dtype) if value_drop else v
        table = None if relative is None else relative.table
        return kernel_mean(q, k, v, key_mask, table, name, place_of(relative))[0]
    nan_term = None
    if name == "given":  # the operations of the map do not keep NaN within its token
        k, v = (masked(x, key_mask) for x in (k, v))
        q, k, v, nan_term = finite_inputs(q, k, v, causal)
    with without_autocast(q):
        value = drop_values(v.to(dtype), value_drop, generator) if value_drop else v
        options = dict(key_mask=key_mask, relative=relative, causal=causal, form=form)
        out, mass = _mean(q, k, value, feature_map, **options)
        if name == "elu1" and is_tiny(mass):
            raised_q, raised_k = raised(q, (3,)), k
            # A factor of all keys cancels only if every query sees all keys and nothing else.
            if relative is None and not causal:
                raised_k = raised(k, (2, 3), key_mask)
            if raised_q is not q or raised_k is not k:
                out, _ = _mean(raised_q, raised_k, value, feature_map, **options)
        return (out if nan_term is None else out + nan_term).to(v.dtype)


def _form_taken(
    form: str,
    impl: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    relative: RelativePosition | None,
    name: str,
    causal: bool,
) -> str:
    """Return the code path to run: "triton", "pairs", "direct" or "efficient".

    In a compiled graph "auto" stays "auto": the operator chooses at run time, by the number of
    tokens.
    """
    options = dict(key_mask=key_mask, relative=relative, feature_map=name, causal=causal, form=form)
    if takes_kernels(impl, q, partial(why_not, q, k, v, **options)):
        return "triton"
    if torch.compiler.is_compiling() or form == "efficient":
        return form
    if not causal and name != "given":
        rows = relative.table.shape[1] if isinstance(relative, Joint) else 0
        prefers_direct = "direct" in (form, form_of_shapes("kernelized", q.shape, v.shape, rows))
        if prefers_direct and takes_pairs(q, v, relative):
            return "pairs"
    return form_taken(form, causal, q.shape, v.shape)


def _mean(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: FeatureMap,
    *,
    key_mask: Tensor | None,
    relative: RelativePosition | None,
    causal: bool,
    form: str,
) -> tuple[Tensor, Tensor]:
    """Return the weighted mean, computed by PyTorch operations, and a mass ``[B, h, N]``: for
    "pairs" of both terms, else of the content.
    """
    dtype, name = accumulation_dtype(q, k, v), map_name(feature_map)
    if form == "pairs":
        return mean_of_pairs(q, k, v, key_mask, relative, feature_map=name)
    narrow = not torch.is_grad_enabled() and product_dtype(q, k, v) == torch.bfloat16
    if relative is not None and not narrow:  # gradients of both terms add in this dtype
        q, v = q.to(dtype), v.to(dtype)
    features = q, k
    if name == "given":
        phi_q = query_features(feature_map, q.to(dtype))
        features = phi_q, key_features(feature_map, k.to(dtype), key_mask, phi_q.shape[3])
    values, mass, _, _ = kernel_sums(*features, v, key_mask, name, causal, form, narrow)
    if relative is None:
        return Sums(values, mass).divide(), mass
    if key_mask is not None:
        v = v.masked_fill(~key_mask[:, None, :, None], 0)
    if causal:  # the sums of the content already have NaN where a query sees a NaN or inf
        v = finite(v)
    count = key_counts(k, key_mask, causal, q.shape[2], dtype)
    return mean_with_relative(Sums(values, mass), relative, q, v, count, key_mask, causal), mass
