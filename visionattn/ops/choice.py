"""Which form of an attention to take: the faster by prediction, or the smaller by the bytes it
holds.

Predictions are counts of work times seconds measured beforehand, ``calibration.json`` beside this
file, which ``python -m visionattn.lab.calibrate --write`` makes. Everything here is arithmetic on
sizes: no tensors, no measuring, and no operation is imported before a size of its buffers is asked
for, so that operations may import this module.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

from visionattn.ops.attentions import ATTENTIONS, FORMS, check_form

CALIBRATION = Path(__file__).with_name("calibration.json")
OPERATIONS = tuple(
    operation for kind in ATTENTIONS.values() if kind.forms for operation in kind.operations
)
LONGEST = 1 << 24


_asked: dict = {}
"""What ``choosing_as`` lays down in place of what choices are asked for."""


@contextmanager
def choosing_as(
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    tokens: int | None = None,
) -> Iterator[None]:
    """Make all choices by size in this process, within the context, as for other inputs.

    A check of few tokens, or a count of shapes alone, then follows the code that many tokens run on
    another machine.

    Args:
        device: the device that ``choose_form`` takes for given; None: that of the inputs.
        dtype: likewise.
        tokens: the number by which sums over classes of positions and weights of pairs are chosen;
            None: that of the inputs. The choice of forms goes by the inputs' own.
    """
    global _asked
    before = _asked
    given = dict(device=device, dtype=dtype, tokens=tokens)
    _asked = _asked | {name: value for name, value in given.items() if value is not None}
    try:
        yield
    finally:
        _asked = before


def tokens_asked(tokens: int) -> int:
    """Return the tokens by which a choice is made: these, unless ``choosing_as`` names others."""
    return _asked.get("tokens", tokens)


def check_sizes(least: int, **sizes: int) -> None:
    """Raise ValueError for a size that is no whole number from ``least`` on."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise ValueError(f"{name}={size!r}: wanted a whole number from {least}")


def packed_operations(n: int, m: int, d: int, e: int) -> int:
    """Count the operations of one head of TaylorShift's efficient form with packed features, a
    multiply and an add being two.

    ``F = d (d + 1) / 2`` features of each query and key, ``(2 F + 2 d) e`` to sum the values over
    them and over x itself and as many to use the sums, ``2 d^2`` to sum and to use ``K^T K`` for
    the mass. What grows neither with ``n`` nor with ``m`` is not counted.
    """
    features = d * (d + 1) // 2
    per_token = features + 2 * (features + d) * e + 2 * d * d
    return (n + m) * per_token + m * (d + e) + n * (4 * d + 3 * e + 4)


def direct_operations(n: int, m: int, d: int, e: int) -> int:
    """Count the operations of one head of TaylorShift's direct form as published:
    ``2 n m (d + e) + 6 n m``.
    """
    return 2 * n * m * (d + e) + 6 * n * m


def work(
    operation: str, form: str, n: int, m: int, d: int, e: int, *, heads: int = 1, batch: int = 1
) -> dict[str, int]:
    """Return what a form does, by kind of work. Predicted seconds are linear in it, with one
    coefficient for each kind.

    Returns:
        multiply_adds of the large products; elements that are squared or multiplied one by one
        (scores, or features of TaylorShift); values: entries of q, k, v and output, for everything
        else that passes over tokens; calls: 1; rows: one launch per row of features, efficient
        TaylorShift only.
    """
    groups = batch * heads
    values = groups * (n + m) * (d + e)
    if form == "direct":
        pairs = groups * (_visible_pairs(n, m) if operation == "kernelized causal" else n * m)
        return {"multiply_adds": pairs * (d + e), "elements": pairs, "values": values, "calls": 1}
    if operation != "taylorshift":
        return {"multiply_adds": groups * (n + m) * d * e, "values": values, "calls": 1}
    elements = groups * (n + m) * (d * (d + 1) // 2)
    return {
        "multiply_adds": elements * e,
        "elements": elements,
        "values": values,
        "calls": 1,
        "rows": d,
    }


def _visible_pairs(n: int, m: int) -> int:
    """Count the pairs of a query and a key that is not after it."""
    first = min(n, m)
    return first * (first + 1) // 2 + (n - first) * m


@lru_cache(maxsize=1)
def _calibration() -> dict:
    return json.loads(CALIBRATION.read_text())["devices"]


def _coefficients(operation: str, dtype: torch.dtype, device: str | torch.device) -> dict | None:
    """Return the seconds per unit of work, by form; None where nothing was measured."""
    name = "float64" if dtype == torch.float64 else "float32"
    measured = _calibration().get(torch.device(device).type)
    return None if measured is None else measured["seconds"].get(name, {}).get(operation)


def is_calibrated(
    operation: str, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> bool:
    """Tell whether ``calibration.json`` has measurements of the operation on such a device."""
    return _coefficients(operation, dtype, device) is not None


def predicted_seconds(
    operation: str,
    form: str,
    n: int,
    m: int,
    d: int,
    e: int,
    *,
    heads: int = 1,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> float:
    """Predict the seconds of one forward pass on the machine of ``calibration.json``.

    Args:
        operation: one of ``OPERATIONS``, such as "kernelized causal".
        form: "direct" or "efficient".
        n, m, d, e: queries, keys, width of q and k per head, width of v per head.
        dtype: of the inputs; sums of half precision are float32, and so are its predictions.
        device: a device or its type.

    Raises:
        ValueError: an unknown operation or form, a size that is no whole number from 0 (d: 1), or
            no measurement of it on this kind of device.
    """
    _check(operation, "speed", n=n, m=m, d=d, e=e, heads=heads, batch=batch)
    check_form(form, FORMS)
    seconds = _coefficients(operation, dtype, device)
    if seconds is None:
        raise ValueError(
            f"no measurement of {operation} in {dtype} on {device}: wanted one of "
            f"{sorted(_calibration())}"
        )
    return _dot(seconds[form], work(operation, form, n, m, d, e, heads=heads, batch=batch))


def _dot(seconds: dict[str, float], counts: dict[str, int]) -> float:
    return sum(seconds[kind] * count for kind, count in counts.items())


def held_elements(
    operation: str,
    form: str,
    n: int,
    m: int,
    d: int,
    e: int,
    *,
    heads: int = 1,
    batch: int = 1,
    device: str | torch.device = "cpu",
) -> int:
    """Count the entries of the buffers and states that a form holds above inputs and output.

    Direct: a block of scores and its product with the values. Efficient TaylorShift: sums over
    features and over x, and a chunk of tokens with its features, of as many heads at once as a CPU
    has threads for. Efficient kernelized: the sums alone. What costs both forms the same (the mass)
    or stays small at any size (chunks of kernelized attention) is left out.
    """
    groups = batch * heads
    if form == "direct":
        return _held_by_blocks(groups, n, m, e)
    if operation != "taylorshift":
        return groups * d * e
    return _held_by_features(groups, max(n, m), d, e, torch.device(device).type)


def _held_by_blocks(groups: int, n: int, m: int, e: int) -> int:
    from visionattn.ops import quadratic

    return _capped(groups, min(n, quadratic.BLOCK_QUERIES) * (m + e), quadratic.BLOCK_ELEMENTS)


def _held_by_features(groups: int, tokens: int, d: int, e: int, device: str) -> int:
    from visionattn.ops.taylorshift import features as taylor_features
    from visionattn.ops.taylorshift import passes as taylor_passes

    rows = taylor_features.num_features(d) + d + 1
    chunk = min(tokens, taylor_features.chunk_tokens(d))
    at_once = taylor_passes.heads_at_once(device)
    return groups * rows * e + _capped(
        groups, rows * chunk, taylor_features.BUFFER_ELEMENTS, at_once
    )


def _capped(groups: int, per_group: int, most: int, buffers: int = 1) -> int:
    """Return the entries of buffers, each of as many heads as fit ``most`` entries, and one at
    least.

    Parts of heads are counted too, so that the number never falls as sizes grow.
    """
    return min(groups * per_group, max(per_group, most) * buffers)


def _check(operation: str, by: str, d: int, **sizes: int) -> None:
    if operation not in OPERATIONS:
        raise ValueError(f"operation {operation!r}: wanted one of {', '.join(OPERATIONS)}")
    if by not in ("speed", "memory"):
        raise ValueError(f'by={by!r}: wanted "speed" or "memory"')
    check_sizes(1, d=d)
    check_sizes(0, **sizes)  # an operation may have no tokens, images or heads


def choose_form(
    operation: str,
    n: int,
    m: int,
    d: int,
    e: int,
    *,
    heads: int = 1,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    by: str = "speed",
) -> str:
    """Return the form that ``form="auto"`` stands for: "direct" or "efficient". A tie goes to the
    direct form.

    By speed the one of fewer ``predicted_seconds``. Where the kind of device was not measured (a
    GPU: its entry is missing from ``calibration.json``), the one of fewer operations, packed
    features counted. By memory the direct one while its ``held_elements`` are no more than those of
    the efficient one at any length, on as many threads as torch takes now. So an attention that
    takes the efficient form keeps it as its tokens grow. Deterministic; by speed also remembered,
    so that asking at each call costs about a microsecond. Sizes must be plain ints, never symbolic
    ones of a compiler.

    Args:
        operation: one of ``OPERATIONS``, such as "kernelized causal".
        n, m, d, e: queries, keys, width of q and k per head, width of v per head.
        dtype: of the inputs; half precision is summed in float32 and takes its measurements.
        device: a device or its type.
        by: "speed" or "memory".

    Raises:
        ValueError: an unknown operation or ``by``, or a size that is no whole number from 0 (d: 1).
    """
    device, dtype = _asked.get("device", device), _asked.get("dtype", dtype)
    if by == "speed":
        return _faster_form(operation, n, m, d, e, heads, batch, dtype, device)
    _check(operation, by, n=n, m=m, d=d, e=e, heads=heads, batch=batch)
    sizes = {"direct": (n, m), "efficient": (LONGEST, LONGEST)}
    options = dict(heads=heads, batch=batch, device=device)
    return _cheaper(
        [held_elements(operation, form, *sizes[form], d, e, **options) for form in FORMS]
    )


@lru_cache(maxsize=4096)
def _faster_form(operation, n, m, d, e, heads, batch, dtype, device) -> str:
    _check(operation, "speed", n=n, m=m, d=d, e=e, heads=heads, batch=batch)
    if (seconds := _coefficients(operation, dtype, device)) is not None:
        return _cheaper(
            [
                _dot(seconds[form], work(operation, form, n, m, d, e, heads=heads, batch=batch))
                for form in FORMS
            ]
        )
    if operation == "taylorshift":
        return _cheaper([direct_operations(n, m, d, e), packed_operations(n, m, d, e)])
    return _cheaper([work(operation, form, n, m, d, e)["multiply_adds"] for form in FORMS])


def _cheaper(costs: list[float]) -> str:
    return "direct" if costs[0] <= costs[1] else "efficient"


def crossover(operation: str, d: int, **options) -> int | None:
    """Return the smallest number of tokens N = M from which ``choose_form`` takes the efficient
    form, v being as wide as q.

    Args:
        options: those of ``choose_form``.

    Returns:
        None where the direct form is taken up to 2^24 tokens.
    """
    low, high = 0, 1
    while choose_form(operation, high, high, d, d, **options) == "direct":
        low, high = high, 2 * high
        if high > LONGEST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if choose_form(operation, middle, middle, d, d, **options) == "direct":
            low = middle
        else:
            high = middle
    return high
