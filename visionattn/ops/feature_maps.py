"""Feature maps of kernelized attention: ``w_ij = phi(q_i) . phi(k_j)``."""

from numbers import Integral
from typing import Protocol

import torch
from torch import Tensor, nn

from visionattn.ops.attention_sums import accumulation_dtype, product
from visionattn.ops.nonfinite import may_be_read

LOW = -10.0
"""Below this, ``elu1`` is less than 5e-5; below -87 it is 0 in float32."""


class FeatureMap(Protocol):
    """A map of queries and a map of keys from width d to the same width f, both non-negative.

    If the features of a key depend on other keys, the map declares ``per_token = False``. Its
    ``key`` then takes the key mask ``[B, M]`` or None as a second argument. Such a map has no
    states and cannot be causal.
    """

    def query(self, x: Tensor) -> Tensor:
        """Return the features of queries, ``[B, h, N, f]``."""

    def key(self, x: Tensor) -> Tensor:
        """Return the features of keys, ``[B, h, M, f]``."""


def elu1(x: Tensor) -> Tensor:
    """Return ``elu(x) + 1``, positive everywhere. Source: Katharopoulos et al. 2020, eq. 7.

    It is computed as ``exp(min(x, 0)) + max(x, 0)``: in float32, adding 1 to ``elu`` would give 0
    below -17.
    """
    return x.clamp(max=0).exp() + x.relu()


def is_tiny(mass: Tensor) -> bool:
    """Return whether any sum of weights is near the smallest number of its dtype; False if the
    entries may not be read.
    """
    least = 1e10 * torch.finfo(mass.dtype).tiny
    return may_be_read(mass) and mass.numel() > 0 and bool(mass.detach().amin() < least)


def raised(x: Tensor, dims: tuple[int, ...], key_mask: Tensor | None = None) -> Tensor:
    """Subtract from ``x [B, h, N, d]`` the largest entry along ``dims`` if it is below ``LOW``.

    This keeps the features of ``elu1`` from underflowing. All entries are negative there, so
    ``elu1`` of the result is ``elu1(x)`` times a constant. For a query (``dims`` (3,)) the constant
    multiplies all its weights; for the keys of a head (``dims`` (2, 3)) it multiplies all weights
    of the head. The division by the mass cancels it. If the entries may not be read, x is returned
    unchanged.

    Args:
        key_mask: bool ``[B, N]``, the keys that take part; None: all.
    """
    if not (may_be_read(x) and x.numel() and bool(x.amin() < LOW)):
        return x
    largest = x.detach().to(accumulation_dtype(x))
    if key_mask is not None:
        largest = largest.masked_fill(~key_mask[:, None, :, None], float("-inf"))
    largest = largest.amax(dims, keepdim=True)
    return x - torch.where((largest < LOW) & largest.isfinite(), largest, 0)


class Elu1:
    """``elu(x) + 1`` for queries and keys."""

    query = key = staticmethod(elu1)


class Relu:
    """``max(x, 0)`` for queries and keys; the output is 0 for a query whose weights are all 0."""

    query = key = staticmethod(torch.relu)


class PositionSoftmax:
    """Softmax over features for queries, over positions for keys. Source: Shen et al. 2021,
    "Efficient attention".

    Keys are multiplied by M, the number of keys present, so that the mass grows with M as for other
    maps. The features of a key depend on all other keys, so states of this map do not add, and it
    cannot be causal.
    """

    per_token = False

    @staticmethod
    def query(x: Tensor) -> Tensor:
        """Return the softmax over the last axis of ``[B, h, N, d]``."""
        return x.softmax(-1)

    @staticmethod
    def key(x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Return the softmax over the positions that ``key_mask [B, M]`` keeps, times their number;
        0 elsewhere.
        """
        if key_mask is None:
            return x.softmax(-2) * x.shape[-2]
        mask = key_mask[:, None, :, None]
        features = x.masked_fill(~mask, torch.finfo(x.dtype).min).softmax(-2)
        return (features * mask) * mask.sum(-2, keepdim=True)


class RandomFeatures(nn.Module):
    """FAVOR+: positive random features whose products approximate the softmax weights
    ``exp(q . k / sqrt(d))`` in expectation.

    ``phi(x)_r = exp(w_r . x' - |x'|^2 / 2) / sqrt(m)`` with ``x' = x / d^(1/4)`` and m rows
    ``w_r``, normal and orthogonal in groups of d. The module has one buffer, ``projection [m, d]``,
    which is saved and moved with the model.

    No maximum is subtracted from the exponent. If it depended on other tokens, states would not
    add, causal attention would see later tokens, and the balance with relative position would
    change. Inputs therefore have bounds in float32:

    - Above: a feature is at most ``exp(|w_r|^2 / 2)``, reached at ``x' = w_r``, so sums stay finite
      for any tokens while ``|w_r|^2 + log M < 88``. ``|w_r|^2`` has mean d and standard deviation
      ``sqrt(2 d)``. This leaves room at d = 32, and at d = 64 unless tokens coincide with rows.
    - Below: the weight of a pair scales as ``exp(-(|q'|^2 + |k'|^2) / 2)`` times a random factor.
      It becomes subnormal once ``|q'|^2 + |k'|^2`` exceeds about 150.

    Normalize q and k if they may be larger. The variance of the estimate grows as
    ``exp(|q' + k'|^2)`` in any case.

    Args:
        d: width of queries and keys.
        num_features: m.
        generator: for drawing the rows; None: torch's default.
        device, dtype: of the rows; None: torch's default device, and float32.

    Raises:
        ValueError: d or num_features is not a positive integer.

    Source: Choromanski et al. 2021, "Rethinking attention with performers", Lemma 1 and section
    2.4.
    """

    def __init__(
        self,
        d: int,
        num_features: int,
        generator: torch.Generator | None = None,
        *,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if not all(isinstance(size, Integral) and size >= 1 for size in (d, num_features)):
            raise ValueError(
                f"RandomFeatures: expected integers d and num_features of at least 1, got {d} and "
                f"{num_features}"
            )
        rows = torch.empty(num_features, d, device=device, dtype=dtype or torch.float32)
        self.register_buffer("projection", rows)
        self.redraw(generator)

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Replace all rows by newly drawn ones; do nothing on the meta device.

        An exponential moving average of weights (EMA) would mix the rows of several draws: redraw
        before it starts, or not at all.
        """
        num_features, d = self.projection.shape
        if not self.projection.is_meta:
            self.projection.copy_(orthogonal_rows(d, num_features, generator))

    def reset_parameters(self) -> None:
        """Draw new rows; initializes a module that was built on the meta device."""
        self.redraw()

    def query(self, x: Tensor) -> Tensor:
        """Return the features ``[B, h, N, m]`` of ``x [B, h, N, d]``, float32 (float64 for float64
        x).

        Raises:
            ValueError: the width of x is not d.
        """
        num_features, d = self.projection.shape
        if x.shape[-1] != d:
            raise ValueError(
                f"RandomFeatures: expected queries and keys of width {d}, got {x.shape[-1]}"
            )
        x = x.to(accumulation_dtype(x)) * d**-0.25
        exponent = product(x, self.projection.to(x).mT) - x.square().sum(-1, keepdim=True) / 2
        return exponent.exp() * num_features**-0.5

    key = query

    def extra_repr(self) -> str:
        """Return the sizes, for printing."""
        num_features, d = self.projection.shape
        return f"d={d}, num_features={num_features}"


def orthogonal_rows(d: int, rows: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw ``[rows, d]`` in float64, on the device of the generator (None: CPU).

    Each row is normally distributed, and consecutive groups of d rows are orthogonal.
    """
    options = dict(
        dtype=torch.float64,
        generator=generator,
        device="cpu" if generator is None else generator.device,
    )
    groups = -(-rows // d)
    basis, upper = torch.linalg.qr(torch.randn(groups, d, d, **options))
    basis = basis * upper.diagonal(dim1=1, dim2=2).sign().unsqueeze(1)  # makes the rotation uniform
    lengths = torch.randn(groups, d, d, **options).norm(dim=2, keepdim=True)
    return (basis.mT * lengths).flatten(0, 1)[:rows]


FEATURE_MAPS = {"elu1": Elu1, "relu": Relu, "softmax": PositionSoftmax}
"""Maps that operations accept by name. Layers and models accept these names and "random"."""
IN_OPERATORS = ("elu1", "relu")
"""Maps that operators and GPU kernels apply to q and k. Features of other maps are computed by
PyTorch operations first.
"""


def make_feature_map(
    name: str, d: int, num_features: int | None = None, *, device=None, dtype=None
) -> "str | RandomFeatures":
    """Return a layer's feature map as ``kernelized_attention`` takes it: a name or a
    ``RandomFeatures``.

    Args:
        name: a name of ``FEATURE_MAPS``, or "random".
        d: width of queries and keys.
        num_features: for "random"; None: d.
        device, dtype: of the rows of "random".

    Raises:
        ValueError: an unknown name, or an invalid number of features.
    """
    if name == "random":
        return RandomFeatures(
            d, d if num_features is None else num_features, device=device, dtype=dtype
        )
    if name not in FEATURE_MAPS:
        known = ", ".join((*FEATURE_MAPS, "random"))
        raise ValueError(f"feature_map {name!r}: expected one of {known}")
    return name


def get_feature_map(feature_map: str | FeatureMap) -> FeatureMap:
    """Return the map with this name, or the object itself.

    Raises:
        ValueError: an unknown name, or an object that is not a feature map.
    """
    if isinstance(feature_map, str) and feature_map in FEATURE_MAPS:
        return FEATURE_MAPS[feature_map]  # type: ignore[return-value]
    if isinstance(feature_map, str) or not all(
        callable(getattr(feature_map, name, None)) for name in ("query", "key")
    ):
        got = repr(feature_map) if isinstance(feature_map, str) else type(feature_map).__name__
        raise ValueError(
            f"feature_map {got}: expected one of {', '.join(FEATURE_MAPS)}, or an object with "
            f".query and .key"
        )
    return feature_map


def is_per_token(feature_map: FeatureMap) -> bool:
    """Return whether the features of a key depend on that key only."""
    return getattr(feature_map, "per_token", True)


def map_name(feature_map: FeatureMap) -> str:
    """Return the name of the map if it is in ``IN_OPERATORS``, else "given": operators then take
    features in place of q and k.
    """
    return next((name for name in IN_OPERATORS if FEATURE_MAPS[name] is feature_map), "given")


def query_features(feature_map: FeatureMap, q: Tensor, width: int | None = None) -> Tensor:
    """Return the features ``[B, h, N, f]`` of ``q [B, h, N, d]``.

    Raises:
        ValueError: features of another shape, or a number of features other than ``width``.
    """
    return _checked(feature_map.query(q), "query", q, width)


def key_features(
    feature_map: FeatureMap, k: Tensor, key_mask: Tensor | None, width: int | None = None
) -> Tensor:
    """Return the features ``[B, h, M, f]`` of ``k [B, h, M, d]``.

    Contents of keys that ``key_mask [B, M]`` excludes have no effect.

    Raises:
        ValueError: features of another shape, or a number of features other than ``width``.
    """
    if not is_per_token(feature_map):
        return _checked(feature_map.key(k, key_mask), "key", k, width)  # type: ignore[call-arg]
    k = k if key_mask is None else k.masked_fill(~key_mask[:, None, :, None], 0)
    return _checked(feature_map.key(k), "key", k, width)


def _checked(features: Tensor, name: str, x: Tensor, width: int | None) -> Tensor:
    got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
    if not isinstance(features, Tensor) or features.ndim != 4 or features.shape[:3] != x.shape[:3]:
        raise ValueError(
            f"feature_map.{name}: expected features [{', '.join(map(str, x.shape[:3]))}, f], got "
            f"{got}"
        )
    if width is not None and features.shape[3] != width:
        raise ValueError(
            f"feature_map.{name}: expected {width} features, as many as for the other operand, "
            f"got {features.shape[3]}"
        )
    return features
