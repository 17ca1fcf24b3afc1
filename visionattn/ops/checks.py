"""Argument checks of every attention. Each raises one ValueError with the expected and the given
value.
"""

import torch
from torch import Tensor

from visionattn.layout import Grid, TokenLayout
from visionattn.ops.attentions import FORM_CHOICES
from visionattn.ops.nonfinite import is_readable
from visionattn.ops.position.relative_position import Flat, Joint, RelativePosition, tables_of


def refuse_tracing() -> None:
    """Raise ValueError under ``torch.jit.trace``, which would fix all sizes and every choice that
    depends on them.
    """
    if torch.jit.is_tracing():
        raise ValueError(
            "torch.jit.trace is not supported, because it fixes the image size; use "
            "torch.export.export(model, (image,)) or the command visionattn export"
        )


def check_form(form: str) -> None:
    """Raise ValueError for an unknown form."""
    if form not in FORM_CHOICES:
        raise ValueError(f"form {form!r}: expected one of {', '.join(FORM_CHOICES)}")


def check_device(name: str, x: Tensor, device: torch.device, reference: str = "q") -> None:
    """Raise ValueError if a tensor is on another device than the tensor named ``reference``."""
    if x.device != device:
        raise ValueError(
            f"{reference} is on {device}, {name} on {x.device}; move them to one device"
        )


def described(x: object) -> str:
    """Return the dtype and shape of a tensor as text; for another object its type and value."""
    if isinstance(x, Tensor):
        return f"{x.dtype} {tuple(x.shape)}"
    return f"{type(x).__name__} {' '.join(repr(x).split())[:60]}"


def check_token_tensor(name: str, x: Tensor) -> None:
    """Check that x is a floating point tensor ``[B, h, tokens, width]``."""
    if not isinstance(x, Tensor) or x.ndim != 4:
        raise ValueError(f"{name}: expected [B, h, tokens, width], got {described(x)}")
    if not x.dtype.is_floating_point:
        raise ValueError(f"{name}: expected a floating point dtype, got {x.dtype}")


def check_tensors(q: Tensor | None, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    """Check shapes, dtypes and devices of ``q [B, h, N, d]``, ``k [B, h, M, d]``,
    ``v [B, h, M, e]`` and ``key_mask [B, M]``.

    If q is None, check the other tensors only.
    """
    refuse_tracing()
    named = {"k": k, "v": v} if q is None else {"q": q, "k": k, "v": v}
    first = next(iter(named))
    for name, x in named.items():
        check_token_tensor(name, x)
        check_device(name, x, named[first].device, first)
    if k.shape[3] < 1:
        raise ValueError(f"k: expected width >= 1, got {tuple(k.shape)}")
    # q and k agree in images, heads and width; k and v in images, heads and number of keys.
    if q is not None and (q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]):
        raise ValueError(
            f"k: expected [{q.shape[0]}, {q.shape[1]}, M, {q.shape[3]}] like q, got "
            f"{tuple(k.shape)}"
        )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"v: expected [{k.shape[0]}, {k.shape[1]}, {k.shape[2]}, e] like k, got "
            f"{tuple(v.shape)}"
        )
    check_key_mask(key_mask, k, first)


def check_key_mask(key_mask: Tensor | None, k: Tensor, reference: str = "the keys") -> None:
    """Check that a mask is bool ``[B, M]`` for keys ``k [B, h, M, d]``, on the device of the tensor
    named ``reference``.
    """
    if key_mask is None:
        return
    if (
        not isinstance(key_mask, Tensor)
        or key_mask.dtype != torch.bool
        or key_mask.shape != (k.shape[0], k.shape[2])
    ):
        raise ValueError(
            f"key_mask: expected bool [{k.shape[0]}, {k.shape[2]}], got {described(key_mask)}"
        )
    check_device("key_mask", key_mask, k.device, reference)


def _check_value_drop(value_drop: float, generator: torch.Generator | None) -> None:
    """Check that ``0 <= value_drop < 1``, and that a generator is torch's and ``value_drop`` uses
    it.
    """
    if not isinstance(value_drop, int | float) or not 0 <= value_drop < 1:
        raise ValueError(f"value_drop: expected a probability in [0, 1), got {value_drop!r}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator: expected a torch.Generator, got {type(generator).__name__}")
    if generator is not None and value_drop == 0:
        raise ValueError("generator needs value_drop above 0, got 0; remove it, or set value_drop")


def check_options(
    *,
    form: str = "auto",
    impl: str = "eager",
    value_drop: float = 0.0,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> None:
    """Check the options that are not tensors.

    A generator must be on ``device``, the device of the tensors.
    """
    check_form(form)
    if impl not in ("auto", "eager", "triton"):
        raise ValueError(f"impl {impl!r}: expected one of auto, eager, triton")
    _check_value_drop(value_drop, generator)
    if generator is not None and device is not None and generator.device.type != device.type:
        raise ValueError(f"expected a generator on {device}, like q, got one on {generator.device}")


def check_coefficients(coefficients: tuple[float, float, float]) -> None:
    """Raise ValueError unless ``a x^2 + b x + c`` is positive everywhere: finite, ``a > 0`` and
    ``c > b^2 / (4 a)``.
    """
    if isinstance(coefficients, tuple | list) and len(coefficients) == 3:
        finite = all(
            isinstance(x, int | float) and -float("inf") < x < float("inf") for x in coefficients
        )
        if (
            finite
            and coefficients[0] > 0
            and coefficients[2] > coefficients[1] * coefficients[1] / (4 * coefficients[0])
        ):
            return
    raise ValueError(
        "coefficients (a, b, c): expected three finite numbers with a > 0 and c > b^2 / (4 a), so "
        "that weights are positive, "
        f"got {described(coefficients)}"
    )


def check_temperature(temperature: Tensor | None, x: Tensor, name: str = "q") -> None:
    """Check that the temperature is a floating point tensor ``[h]`` on the device of
    ``x [B, h, tokens, d]``, the tensor called ``name``.
    """
    if temperature is None:
        return
    if (
        not isinstance(temperature, Tensor)
        or temperature.shape != (x.shape[1],)
        or not temperature.dtype.is_floating_point
    ):
        raise ValueError(
            f"temperature: expected a floating tensor [{x.shape[1]}], one per head, got "
            f"{described(temperature)}"
        )
    check_device("temperature", temperature, x.device, name)


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    relative: RelativePosition | None,
    *,
    signed: bool = False,
) -> None:
    """Check all tensors, including the tables of the relative position."""
    check_tensors(q, k, v, key_mask)
    if relative is not None:
        check_relative(relative, q, k, signed=signed)


def check_relative(
    relative: RelativePosition, q: Tensor, k: Tensor, *, signed: bool = False
) -> None:
    """Check that tables and layout fit ``q [B, h, N, d]`` and ``k [B, h, M, d]``.

    Unless ``signed``, entries of tables must be 0 or more and not NaN; this is checked only if
    reading them is cheap (``is_readable``).
    """
    if not isinstance(relative, RelativePosition):
        raise ValueError(f"relative: expected Flat, Axial or Joint, got {type(relative).__name__}")
    if relative.normalization not in ("sum", "mean"):
        raise ValueError(f'normalization {relative.normalization!r}: expected "sum" or "mean"')
    for name, table in tables_of(relative).items():
        _check_table(name, table, q, sides=2 if isinstance(relative, Joint) else 1, signed=signed)
    if relative.layout is not None or not isinstance(relative, Flat):
        check_layout(relative.layout, q, k)
        if isinstance(relative, Joint) and relative.layout.counts is not None:
            _check_counts(relative, q)


def _check_table(name: str, table: Tensor, q: Tensor, *, sides: int, signed: bool) -> None:
    heads, d = q.shape[1], q.shape[3]
    if not isinstance(table, Tensor) or not table.dtype.is_floating_point:
        raise ValueError(
            f"{name}: expected a tensor of a real floating point dtype, got {described(table)}"
        )
    fits = table.ndim == sides + 2 and table.shape[0] in (1, heads) and table.shape[-1] == d
    if not fits or any(side % 2 == 0 for side in table.shape[1:-1]):
        shape = ", ".join(["h or 1"] + ["2R+1"] * sides + ["d"])
        raise ValueError(
            f"{name}: expected [{shape}] with h = {heads}, d = {d}, got {tuple(table.shape)}"
        )
    check_device(name, table, q.device)
    if (
        not signed
        and table.numel()
        and is_readable(table)
        and not (lowest := table.min().item()) >= 0
    ):
        raise ValueError(
            f"{name}: relative position needs non-negative entries, got {lowest:.3g}; pass it "
            f"through elu1"
        )


def check_layout(layout: TokenLayout, q: Tensor, k: Tensor) -> None:
    """Check that a layout has as many tokens as ``q [B, h, N, d]`` and ``k [B, h, M, d]``, and that
    its tensors have the right shape, dtype, range and device.
    """
    if not isinstance(layout, TokenLayout) or not isinstance(layout.grid, Grid):
        raise ValueError(
            "layout: expected TokenLayout(num_prefix, Grid(height, width)), got "
            f"{described(layout)}"
        )
    layout.check_sizes()
    kept, patches = layout.kept, layout.grid.num_patches
    if kept is not None:
        if (
            not isinstance(kept, Tensor)
            or kept.dtype != torch.int64
            or kept.ndim != 2
            or kept.shape[0] != q.shape[0]
        ):
            raise ValueError(
                f"layout.kept: expected int64 [{q.shape[0]}, n], a row for each image, got "
                f"{described(kept)}"
            )
        check_device("layout.kept", kept, q.device)
        if is_readable(kept) and bool(((kept < 0) | (kept >= patches)).any()):
            raise ValueError(
                f"layout.kept: expected 0 to {patches - 1}, got {kept.min().item()} to "
                f"{kept.max().item()}"
            )
        if is_readable(kept):
            occurs = kept.new_zeros(len(kept), patches, dtype=torch.bool).scatter_(1, kept, True)
            if int(occurs.sum()) < kept.numel():
                raise ValueError("layout.kept: expected each patch once, got one twice in an image")
    _check_present(layout, q)
    tokens = layout.num_tokens
    if q.shape[2] != tokens or k.shape[2] != tokens:
        raise ValueError(
            f"layout has {tokens} tokens, got {q.shape[2]} queries and {k.shape[2]} keys"
        )


def _check_present(layout: TokenLayout, q: Tensor) -> None:
    present, shape = layout.present, (q.shape[0], layout.grid.num_patches)
    if present is None:
        return
    if (
        not isinstance(present, Tensor)
        or present.dtype != torch.bool
        or tuple(present.shape) != shape
    ):
        raise ValueError(
            f"layout.present: expected bool {list(shape)}, a row for each image and a column for "
            f"each grid position, got {described(present)}"
        )
    check_device("layout.present", present, q.device)


def _check_counts(relative: Joint, q: Tensor) -> None:
    counts, grid = relative.layout.counts, relative.layout.grid
    expected = grid.height, grid.width, relative.table.shape[1] * relative.table.shape[2]
    if (
        not isinstance(counts, Tensor)
        or counts.ndim != 4
        or counts.shape[0] not in (1, q.shape[0])
        or counts.shape[1:] != expected
    ):
        shape = ", ".join(map(str, ("1 or B", *expected)))
        raise ValueError(
            f"layout.counts: expected [{shape}] for this grid and table, got {described(counts)}; "
            f"see count_classes"
        )
    check_device("layout.counts", counts, q.device)
