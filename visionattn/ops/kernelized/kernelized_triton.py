"""Kernelized attention as one operator of GPU kernels: content, joint relative position and
division, with its gradient.

It replaces the operators ``kernel_sums``, ``class_sums`` and ``weighted_mean`` of the eager code.
Autograd saves q, k, v, the mean, the mass and the state. ``why_not`` decides which inputs are
supported.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from visionattn.ops.attention_sums import tokens_first
from visionattn.ops.feature_maps import IN_OPERATORS
from visionattn.ops.gpu import gpu_requirements
from visionattn.ops.kernelized.kernelized_eager import flops
from visionattn.ops.operator import contiguous_like, differentiate, form_ran, operator
from visionattn.ops.position import position_triton as position
from visionattn.ops.position.relative_position import RelativePosition

WIDEST: gpu_requirements.Widest = {16: (128, 128), 32: (64, 64)}
"""The largest widths for which the kernels compile without spilled registers."""


def why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    relative: RelativePosition | None = None,
    feature_map: str = "elu1",
    causal: bool = False,
    form: str = "auto",
) -> str | None:
    """Return the reason why the kernels do not support these inputs, in one sentence; None if they
    do.

    Args:
        q, k, v, key_mask, relative, causal, form: arguments of the operation, already checked.
        feature_map: "elu1", "relu", or "given" for any other map.
    """
    return (
        gpu_requirements.why_not("kernelized", WIDEST, q, k, v)
        or _why_not_options(feature_map, causal, form)
        or position.why_not(relative, q, v, key_mask)
    )


def _why_not_options(feature_map: str, causal: bool, form: str) -> str | None:
    if causal:
        return 'causal attention has no kernel; impl="eager" runs it on a GPU too'
    if form == "direct":
        return 'form="direct" of kernelized attention has no kernel; "efficient" and "auto" have'
    if feature_map not in IN_OPERATORS:
        return (
            'the kernels know the feature maps "elu1" and "relu"; "softmax", random features and '
            "maps of your own have none"
        )
    return None


def _flops(q, v, table, grid: Sequence[int], *, backward: bool) -> int:
    content = flops(q, v, False, "efficient", backward=backward)
    return content + position.flops(q, v, table, grid, backward=backward)


def _empty_mean(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads, n, d), e = q.shape, v.shape[3]
    mass = q.new_empty(batch, heads, n, dtype=torch.float32)
    state = mass.new_empty(batch * heads * d * (e + 1))
    return tokens_first(v, batch, heads, n, e), mass, state


@operator(fake=_empty_mean, flops=partial(_flops, backward=False))
def kernel_mean(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    table: Tensor | None,
    feature_map: str,
    grid: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted mean under ``phi(q_i) . phi(k_j)`` and, with a table, the joint relative
    position.

    Args:
        q, k, v: ``[B, h, N, d]``, ``[B, h, M, d]``, ``[B, h, M, e]`` of one dtype and any strides.
        key_mask: bool ``[B, M]``, True takes part; not with a table.
        table: ``[h or 1, 2Ry+1, 2Rx+1, d]``.
        feature_map: "elu1" or "relu".
        grid: with a table, the result of ``place_of``; else empty.

    Returns:
        the mean ``[B, h, N, e]`` in the dtype of v, in the memory order of ``tokens_first``. For
        the gradient, also the mass ``[B, h, N]``, and the state as one axis: S ``[B, h, d, e]``
        followed by Z ``[B, h, d]``. Mass and state are float32 and divided by M.
    """
    (batch, heads, n, _), e = q.shape, v.shape[3]
    from visionattn.ops.kernelized.kernels.kernelized_bidirectional import means
    from visionattn.ops.kernelized.kernels.kernelized_states import state_of_keys

    out = tokens_first(v, batch, heads, n, e)
    mass = q.new_empty(batch, heads, n, dtype=torch.float32)
    classes = position.place_from(grid)
    # With relative position, only prefix tokens have the content term and no other.
    content_only = slice(0, n if classes is None else classes.prefix)
    with form_ran("kernelized", "efficient triton"):
        state = state_of_keys(k, v, key_mask, feature_map)
        means(q[:, :, content_only], state, feature_map, out[:, :, content_only], mass)
        if classes is not None:
            content = state, _z_of(state, q, v), feature_map
            position.write_means_from_state(q, table, v, content, classes, out, mass)
    return out, mass, state


def _z_of(state: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """Return Z, which is stored after S."""
    return state[q.shape[0] * q.shape[1] * q.shape[3] * v.shape[3] :]


def _empty_gradients(mass, q, k, v, table) -> tuple[Tensor, ...]:
    return *(tokens_first(x, *x.shape) for x in (q, k, v)), *contiguous_like(table, like=mass)


@operator(fake=_empty_gradients, flops=partial(_flops, backward=True))
def kernel_mean_backward(
    grad: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    table: Tensor | None,
    state: Tensor,
    feature_map: str,
    grid: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``kernel_mean`` with respect to q, k and v, in their dtypes, and to
    the table (empty if None).
    """
    from visionattn.ops.kernelized.kernels import kernelized_bidirectional

    classes = position.place_from(grid)
    dq, along, d_state = kernelized_bidirectional.queries_backward(
        grad, out, mass, q, state, feature_map, k.shape[2], content_only=classes is None
    )
    dk, dv = kernelized_bidirectional.keys_backward(k, v, key_mask, d_state, feature_map)
    if classes is None:
        return dq, dk, dv, mass.new_empty(0)
    content = dq, along, _z_of(state, q, v), feature_map
    dq, d_table = position.backward(grad, out, mass, q, table, v, classes, dv, *content)
    return dq, dk, dv, d_table


differentiate(kernel_mean, kernel_mean_backward, outputs="out mass state", gradients="q k v table")
