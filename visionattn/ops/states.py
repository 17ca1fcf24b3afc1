"""Keys and values reduced to a state of constant size.

States of disjoint keys add, so a sequence may arrive in pieces, from several devices, or token by
token. Attention with a state covers every key in it. A state has no relative term, which would need
the positions of the keys.

Sources: Katharopoulos et al. 2020, eq. 16 to 20 (the recurrence); TaylorShift (Nauen et al. 2024),
"Efficient TaylorShift"; adding is ours.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from visionattn.ops.attention_sums import Sums, accumulation_dtype, product
from visionattn.ops.attentions import ATTENTIONS
from visionattn.ops.checks import (
    check_coefficients,
    check_temperature,
    check_tensors,
    check_token_tensor,
)
from visionattn.ops.feature_maps import (
    FeatureMap,
    get_feature_map,
    is_per_token,
    key_features,
    map_name,
    query_features,
)
from visionattn.ops.kernelized.kernelized_eager import kernel_sums
from visionattn.ops.operator import without_autocast
from visionattn.ops.position.relative_position import key_counts
from visionattn.ops.taylorshift.taylorshift_features import feature_weights, unit
from visionattn.ops.taylorshift.taylorshift_state import expand_state, feature_state

Coefficients = tuple[float, float, float]
COEFFICIENTS: Coefficients = (0.5, 1.0, 1.0)
"""Default coefficients of TaylorShift."""


class _Additive:
    """A state: sums over keys, and the options used to compute them."""

    SUMS: ClassVar[tuple[str, ...]]
    """Names of the fields that ``+`` adds; it also adds ``count``."""

    def __add__(self, other: Self) -> Self:
        """Return the state of the keys of both states.

        Raises:
            ValueError: the states differ in kind, shape, dtype, device, feature map, temperature or
                coefficients.
        """
        if type(other) is not type(self):
            raise ValueError(f"expected a {type(self).__name__} to add, got {type(other).__name__}")
        for name in self.SUMS:
            a, b = (
                f"{tuple(x.shape)} in {x.dtype} on {x.device}"
                for x in (getattr(self, name), getattr(other, name))
            )
            if a != b:
                raise ValueError(
                    f"expected states with equal shape, dtype and device of {name}, got {a} and {b}"
                )
        added = (*self.SUMS, "count")
        for name in vars(self).keys() - added:
            a, b = getattr(self, name), getattr(other, name)
            if not _same(a, b):
                described = " and ".join(" ".join(str(x).split()) for x in (a, b))
                raise ValueError(f"expected states with the same {name}, got {described}")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in added})


def _same(a: object, b: object) -> bool:
    """Return whether two options are equal.

    ``torch.compile`` cannot compare entries: in compiled graphs, tensors of equal shape, dtype and
    device count as equal.
    """
    if a is b or not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a is b or a == b
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return torch.compiler.is_compiling() or torch.equal(a, b)


@dataclass(frozen=True)
class KernelState(_Additive):
    """The state of kernelized attention; float32 (float64 for float64 inputs).

    Args:
        S: ``sum_j phi(k_j) v_j^T``, ``[B, h, f, e]``.
        Z: ``sum_j phi(k_j)``, ``[B, h, f]``.
        count: number of keys that take part, int64 ``[B or 1, 1, 1]``; float32 is exact only up to
            2^24.
        feature_map: name or object, as given to ``summarize``.
    """

    S: Tensor
    Z: Tensor
    count: Tensor
    feature_map: str | FeatureMap
    SUMS: ClassVar = ("S", "Z")


@dataclass(frozen=True)
class TaylorState(_Additive):
    """The state of TaylorShift; float32 (float64 for float64 inputs).

    Args:
        S2: ``sum_j phi2(k_j) v_j^T``, ``[B, h, F, e]``, with phi2 the packed products of
            ``taylorshift_features.py``, not yet weighted.
        KV: ``sum_j k_j v_j^T``, ``[B, h, d, e]``.
        KK: ``sum_j k_j k_j^T``, ``[B, h, d, d]``.
        k_sum, v_sum: ``[B, h, d]`` and ``[B, h, e]``.
        count: number of keys that take part, int64 ``[B or 1, 1, 1]``.
        temperature: ``[h]``, the length to which later queries are scaled; keys have length 1.
            None: queries and keys are unchanged.
        coefficients: (a, b, c).
    """

    S2: Tensor
    KV: Tensor
    KK: Tensor
    k_sum: Tensor
    v_sum: Tensor
    count: Tensor
    temperature: Tensor | None
    coefficients: Coefficients
    SUMS: ClassVar = ("KV", "S2", "KK", "k_sum", "v_sum")


State = KernelState | TaylorState


def summarize(
    k: Tensor,
    v: Tensor,
    kind: str = "kernelized",
    *,
    feature_map: str | FeatureMap | None = None,
    temperature: Tensor | None = None,
    coefficients: Coefficients | None = None,
    key_mask: Tensor | None = None,
) -> State:
    """Reduce keys and values to a state. States of disjoint keys add.

    Args:
        k, v: ``[B, h, M, d]`` and ``[B, h, M, e]``, as passed to the attention; this function
            applies the feature map or the normalization.
        kind: "kernelized" or "taylorshift".
        feature_map: only for "kernelized"; None: "elu1". Not "softmax": its keys depend on each
            other.
        temperature: only for "taylorshift", ``[h]``; keys are normalized here, queries in
            ``attend``. None: both are unchanged.
        coefficients: only for "taylorshift"; None: (0.5, 1, 1).
        key_mask: bool ``[B, M]``, True takes part.

    A state of TaylorShift has the precision of the efficient form: without a temperature, long
    queries orthogonal to long keys lose precision (see ``taylorshift_attention``).

    Raises:
        ValueError: shapes, dtypes, devices or names that do not fit, or an option of the other
            kind.
    """
    check_tensors(None, k, v, key_mask)
    _check_options(k, kind, feature_map, temperature, coefficients)
    with without_autocast(k):
        if kind == "kernelized":
            return _kernel_state(k, v, "elu1" if feature_map is None else feature_map, key_mask)
        return _taylor_state(
            k,
            v,
            temperature,
            COEFFICIENTS if coefficients is None else tuple(coefficients),
            key_mask,
        )


def _check_options(
    k: Tensor, kind: str, feature_map, temperature: Tensor | None, coefficients: Coefficients | None
) -> None:
    with_states = [name for name, attention in ATTENTIONS.items() if attention.states]
    if kind not in with_states:
        raise ValueError(f"kind {kind!r}: expected {' or '.join(with_states)}")
    if kind == "kernelized" and not (temperature is None and coefficients is None):
        raise ValueError(
            'temperature and coefficients belong to kind="taylorshift", got kind="kernelized"'
        )
    if kind == "taylorshift" and feature_map is not None:
        raise ValueError('feature_map belongs to kind="kernelized", got kind="taylorshift"')
    if feature_map is not None and not is_per_token(get_feature_map(feature_map)):
        raise ValueError(
            'a feature_map such as "softmax" has no state: its keys depend on each other; take '
            '"elu1" or "relu"'
        )
    if coefficients is not None:
        check_coefficients(coefficients)
    check_temperature(temperature, k, "k")


def _kernel_state(
    k: Tensor, v: Tensor, feature_map: str | FeatureMap, key_mask: Tensor | None
) -> KernelState:
    phi, dtype = get_feature_map(feature_map), accumulation_dtype(k, v)
    if map_name(phi) == "given":
        k = key_features(phi, k.to(dtype), key_mask)
    _, _, s, z = kernel_sums(k[:, :, :0], k, v, key_mask, map_name(phi), False, "efficient")
    return KernelState(s, z, key_counts(k, key_mask, dtype=torch.int64), feature_map)


def _taylor_state(
    k: Tensor, v: Tensor, temperature, coefficients: Coefficients, key_mask: Tensor | None
) -> TaylorState:
    dtype = accumulation_dtype(k, v)
    k, v = k.to(dtype), v.to(dtype)
    if key_mask is not None:
        absent = ~key_mask[:, None, :, None]
        k, v = k.masked_fill(absent, 0), v.masked_fill(absent, 0)
    if temperature is not None:
        k = unit(k)
    # ``attend`` applies the coefficients, so these sums are unweighted.
    s2 = feature_state(k.flatten(0, 1), v.flatten(0, 1)).unflatten(0, k.shape[:2])
    sums = s2, product(k.mT, v), product(k.mT, k), k.sum(2), v.sum(2)
    return TaylorState(*sums, key_counts(k, key_mask, dtype=torch.int64), temperature, coefficients)


def attend(q: Tensor, state: State) -> Sums:
    """Return the weighted sums over all keys of the state for each query; ``.divide()`` gives the
    output ``[B, h, N, e]``.

    Args:
        q: ``[B, h, N, d]``, as passed to the attention.
        state: the result of ``summarize`` or ``step``.

    Raises:
        ValueError: q does not fit the state in shape, dtype or device, or ``state`` is not a state.
    """
    _check_query(q, state)
    with without_autocast(q):
        if isinstance(state, TaylorState):
            return _taylor_sums(q, state)
        phi_q = query_features(
            get_feature_map(state.feature_map), q.to(state.S.dtype), state.S.shape[2]
        )
        return Sums(product(phi_q, state.S), product(phi_q, state.Z.unsqueeze(3)).squeeze(3))


def _check_query(q: Tensor, state: State) -> None:
    if not isinstance(state, State):
        raise ValueError(
            f"state: expected a KernelState or a TaylorState, got {type(state).__name__}"
        )
    check_token_tensor("q", q)
    sums, width = (
        (state.KV, state.KV.shape[2]) if isinstance(state, TaylorState) else (state.S, None)
    )
    if q.shape[:2] != sums.shape[:2] or (width is not None and q.shape[3] != width):
        expected = f"[{sums.shape[0]}, {sums.shape[1]}, N, {'d' if width is None else width}]"
        raise ValueError(f"q: expected {expected} of the state, got {tuple(q.shape)}")
    if q.dtype == torch.float64 and sums.dtype != q.dtype:
        raise ValueError(f"q: expected {sums.dtype} like the state, or less, got {q.dtype}")
    if q.device != sums.device:
        raise ValueError(f"q is on {q.device}, the state on {sums.device}; move them to one device")


def _taylor_sums(q: Tensor, state: TaylorState) -> Sums:
    a, b, c = state.coefficients
    q = q.to(state.KV.dtype)
    if state.temperature is not None:
        q = state.temperature.to(q.dtype)[:, None, None] * unit(q)
    weighted = state.S2 * feature_weights(q.shape[3], a, q)
    second = expand_state(q.flatten(0, 1), weighted.flatten(0, 1)).unflatten(0, q.shape[:2])
    values = second + b * product(q, state.KV) + c * state.v_sum.unsqueeze(2)
    # The mass is a quadratic form of q, without features.
    mass = a * (product(q, state.KK) * q).sum(3) + b * product(q, state.k_sum.unsqueeze(3)).squeeze(
        3
    )
    return Sums(values, mass + c * state.count.to(mass.dtype))


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State | None = None,
    *,
    kind: str | None = None,
    feature_map: str | FeatureMap | None = None,
    temperature: Tensor | None = None,
    coefficients: Coefficients | None = None,
) -> tuple[Tensor, State]:
    """Process one token of causal attention at constant cost: add its key to the state, then attend
    with its query.

    Args:
        q, k, v: ``[B, h, 1, d]``, ``[B, h, 1, d]``, ``[B, h, 1, e]``.
        state: state of the earlier tokens; None: this is the first token.
        kind, feature_map, temperature, coefficients: as in ``summarize``, only for the first token.
            The state keeps them.

    Returns:
        out ``[B, h, 1, e]`` in the dtype of v, and the state with this token.

    Raises:
        ValueError: q or k has more than one token, an option is given together with a state, or as
            ``summarize``, ``+`` and ``attend``.

    Source: Katharopoulos et al. 2020, eq. 16 to 20.
    """
    check_tensors(q, k, v, None)
    if q.shape[2] != 1 or k.shape[2] != 1:
        raise ValueError(
            f"step: expected one token, got {q.shape[2]} queries and {k.shape[2]} keys; use "
            "summarize and attend"
        )
    options = dict(
        kind=kind, feature_map=feature_map, temperature=temperature, coefficients=coefficients
    )
    given_options = [name for name, option in options.items() if option is not None]
    if state is None:
        state = summarize(k, v, **options | {"kind": kind or "kernelized"})
    elif not isinstance(state, State):
        raise ValueError(
            f"state: expected a KernelState, a TaylorState or None, got {type(state).__name__}"
        )
    elif given_options:
        raise ValueError(f"step: a state has its own options; remove {', '.join(given_options)}")
    elif isinstance(state, KernelState):
        state = state + summarize(k, v, feature_map=state.feature_map)
    else:
        options = dict(temperature=state.temperature, coefficients=state.coefficients)
        state = state + summarize(k, v, "taylorshift", **options)
    return attend(q, state).divide().to(v.dtype), state
