"""Sizes, layouts and flags that hypothesis draws for the tests of operations, their tensors, and
the comparison with a definition.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    OPERATIONS,
    Axial,
    Flat,
    Joint,
    RandomFeatures,
    attention_sums,
    count_classes,
    nonfinite,
    quadratic,
    reference,
    strips,
    window,
)
from visionattn.ops import all_pairs as pairs_of_tokens
from visionattn.ops.attentions import ATTENTIONS
from visionattn.ops.form_choice import choosing_as
from visionattn.ops.kernelized import kernelized_chunks
from visionattn.ops.kernelized import kernelized_eager as kernelized_eager
from visionattn.ops.position import axial_position, position_scores, tiled_position
from visionattn.ops.taylorshift import taylorshift_features

TOLERANCE = 1e-12
SMALL = {
    (taylorshift_features, "BUFFER_BYTES"): 1 << 13,
    (taylorshift_features, "CHUNK_TOKENS"): (4, 8),
    (quadratic, "BLOCK_QUERIES"): 5,
    (quadratic, "BLOCK_ELEMENTS"): 90,
    (pairs_of_tokens, "BLOCK_QUERIES"): (5, 5),
    (pairs_of_tokens, "BLOCK_ELEMENTS"): 90,
    (kernelized_eager, "BLOCK_TOKENS"): 4,
    (axial_position, "BAND_ELEMENTS"): 700,
    (tiled_position, "BAND_ELEMENTS"): 1,
    (tiled_position, "TILE_ROWS"): 3,
    (tiled_position, "TILE_COLUMNS"): 4,
    (tiled_position, "TILE_OF_ONE_ROW"): 5,
    (tiled_position, "LONGEST_TILE"): 7,
    (position_scores, "BLOCK_QUERIES"): 3,
    (window, "CACHED_ELEMENTS"): 1,
    (strips, "LINE_ELEMENTS"): 300,
    (attention_sums, "CHUNK_ELEMENTS"): 64,
}
"""Sizes of blocks, bands and chunks for which a few tokens make many of them."""

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=40)


@dataclass(frozen=True)
class Drawn:
    """Plain numbers: which sizes, which tokens, in which memory. Tensors come of the seed."""

    grid: tuple[int, int] = (5, 9)
    lengths: tuple[int, int] | None = None
    """Queries and keys of a sequence without a grid; None: the tokens of the grid."""
    prefix: int = 1
    kind: str = "joint"
    horizons: tuple[int, int] = (3, 2)
    mean: bool = True
    missing: int = 0
    absent: bool = False
    masked: bool = False
    shared: bool = False
    batch: int = 2
    heads: int = 3
    d: int = 7
    e: int = 5
    small_blocks: bool = False
    many_tokens: bool = False
    later: int = 0
    """In causal attention: tokens at the end whose queries do not count."""
    garbage: float = float("nan")
    """What tokens hold that play no part."""
    counted: bool = False
    """Whether a joint position comes with its number of keys of each class."""
    unread: bool = False
    """Whether operations may not look at numbers, as on a GPU."""
    seed: int = 0

    def generator(self, more: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + 1000 * more)

    def layout(self) -> TokenLayout | None:
        if self.lengths is not None:
            return None
        patches, g, kept, present = self.grid[0] * self.grid[1], self.generator(1), None, None
        if self.missing:
            most = max(1, patches - self.missing)
            kept = [torch.randperm(patches, generator=g)[:most] for _ in range(self.batch)]
            kept = torch.stack(kept)
        if self.absent:
            present = torch.zeros(self.batch, *self.grid, dtype=torch.bool)
            for i, image in enumerate(present):
                image[: self.grid[0] - i % 2, : max(1, self.grid[1] - 2 * i)] = True
            present = present.flatten(1)
        return TokenLayout(self.prefix, Grid(*self.grid), kept, present=present)

    def tokens(self) -> tuple[int, int]:
        layout = self.layout()
        return self.lengths or (layout.num_tokens, layout.num_tokens)

    def mask(self) -> Tensor | None:
        shape = self.batch, self.tokens()[1]
        return torch.rand(shape, generator=self.generator(2)) < 0.7 if self.masked else None

    def without_position(self) -> bool:
        return self.kind == "none" or (self.lengths is not None and self.kind != "flat")

    def given(self, tables: dict[str, Tensor], *, signed: bool = False) -> dict[str, object]:
        """``relative`` and ``key_mask`` for an operation without a layout of its own."""
        layout, mask = self.layout(), self.mask()
        if self.without_position():
            taken = mask if layout is None else layout.key_mask(mask)
            return {"relative": None, "key_mask": taken}
        kind = {"flat": Flat, "axial": Axial, "joint": Joint}[self.kind]
        normalization = "mean" if self.mean and not signed else "sum"
        if self.counted and kind is Joint:
            layout = layout._replace(counts=count_classes(layout, self.horizons))
        relative = kind(**tables, layout=layout, normalization=normalization)
        return {"relative": relative, "key_mask": mask}

    def tensors(self, *, signed: bool = False) -> dict[str, Tensor]:
        """q, k and v, whose heads lie after the tokens in memory, and the tables."""
        g, (n, m), sides = self.generator(), self.tokens(), [2 * r + 1 for r in self.horizons]

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        shapes = {"q": (n, self.d), "k": (m, self.d), "v": (m, self.e)}
        found = {
            name: normal(self.batch, tokens, self.heads, width).transpose(1, 2)
            for name, (tokens, width) in shapes.items()
        }
        of_kind = {
            "flat": {"table": sides[:1]},
            "axial": {"rows": sides[:1], "columns": sides[1:]},
            "joint": {"table": sides},
        }
        tables = {} if self.without_position() else of_kind[self.kind]
        for name, sides in tables.items():
            table = normal(1 if self.shared else self.heads, *sides, self.d)
            found[name] = table if signed else table.abs()
        return found

    def absent_keys(self) -> Tensor:
        """Which keys take no part, bool ``[B, M]``."""
        layout, mask = self.layout(), self.mask()
        taken = mask if layout is None else layout.key_mask(mask)
        shape = self.batch, self.tokens()[1]
        return torch.zeros(shape, dtype=torch.bool) if taken is None else ~taken

    def idle(self, tokens: int) -> Tensor:
        """Which of the first tokens have queries that do not count, bool ``[B, tokens]``: absent
        ones, whose results mean nothing, and later ones.
        """
        last = torch.arange(tokens) >= self.tokens()[0] - self.later
        if self.absent and self.lengths is None:
            return ~self.layout().key_mask() | last
        return last.expand(self.batch, -1)

    @contextmanager
    def circumstances(self) -> Iterator[None]:
        """Let operations go in blocks of few tokens, as for many tokens, or without a look at their
        numbers. Memory that nobody wrote holds NaN.
        """
        with pytest.MonkeyPatch.context() as patch, poisoned_memory():
            if self.unread:
                for module in (nonfinite, window):
                    patch.setattr(module, "is_known_finite", lambda *tensors: False)
            for (module, name), value in SMALL.items() if self.small_blocks else ():
                patch.setattr(module, name, value)
            if self.small_blocks:
                patch.setitem(kernelized_chunks.CHUNK_ELEMENTS, "cpu", 300)
            if self.many_tokens:
                with choosing_as(tokens=1 << 20):
                    yield
            else:
                yield


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let memory that ``torch.empty`` gives hold NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def cases(
    *, kinds: tuple[str, ...], sequences: bool = True, causal: bool = False
) -> st.SearchStrategy[Drawn]:
    """Draw cases: every axis has a size of its own most of the time."""
    length = st.integers(1, 70)
    return st.builds(
        Drawn,
        grid=st.tuples(st.integers(1, 7), st.integers(1, 11)),
        lengths=st.none() | st.tuples(length, length) if sequences else st.none(),
        prefix=st.integers(0, 5),
        kind=st.sampled_from(kinds),
        horizons=st.tuples(st.integers(0, 12), st.integers(0, 5)),
        mean=st.booleans(),
        missing=st.sampled_from([0, 0, 3, 17]),
        absent=st.booleans(),
        masked=st.booleans(),
        shared=st.booleans(),
        batch=st.integers(1, 3),
        heads=st.integers(1, 3),
        d=st.integers(1, 9),
        e=st.integers(1, 11),
        small_blocks=st.booleans(),
        many_tokens=st.booleans(),
        later=st.integers(0, 40) if causal else st.just(0),
        garbage=st.sampled_from([float("nan"), float("inf"), 1e30, -1e15]),
        counted=st.booleans(),
        unread=st.booleans(),
        seed=st.integers(0, 999),
    )


class SquareAndSoftplus:
    """A feature map that is an object, another one for queries than for keys."""

    query = staticmethod(torch.square)
    key = staticmethod(F.softplus)


def map_of(case: Drawn, name: str):
    """The feature map of that name, or an object."""
    if name == "random":
        return RandomFeatures(case.d, 6, case.generator(6), dtype=torch.float64)
    return SquareAndSoftplus if name == "object" else name


def softmax_definition(q, k, v, *, relative, key_mask, causal=False) -> Tensor:
    """``reference.softmax_attention`` with the arguments of the operation."""
    bias = None
    if relative is not None:
        bias = reference.relative_bias(relative, q, k.shape[2])
        key_mask = key_mask if relative.layout is None else relative.layout.key_mask(key_mask)
    options = dict(bias=bias, key_mask=key_mask, causal=causal)
    return reference.softmax_attention(q, k, v, **options)


DEFINITIONS = {name: getattr(reference, f"{name}_attention") for name in ATTENTIONS}
DEFINITIONS["softmax"] = softmax_definition


def tables_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take the tables out of the arguments of a call."""
    return {name: tensors.pop(name) for name in ("table", "rows", "columns") if name in tensors}


def paired(
    case: Drawn, name: str, operation: Callable | None = None, **options
) -> tuple[Callable[..., Tensor], Callable[..., Tensor], dict[str, Tensor]]:
    """An attention or another ``operation`` with its arguments, and the definition, as functions of
    tensors by name, tables among them; and the tensors.
    """
    kind = ATTENTIONS[name]

    def bound(function: Callable) -> Callable[..., Tensor]:
        def call(**tensors: Tensor) -> Tensor:
            given = case.given(tables_of(tensors), signed=kind.signed)
            if kind.windows:
                given["key_mask"] = case.mask()
                given |= {"layout": case.layout()} if given["relative"] is None else {}
            return function(**tensors, **given, **options)

        return call

    fast, slow = bound(operation or OPERATIONS[name]), bound(DEFINITIONS[name])
    return fast, slow, case.tensors(signed=kind.signed)


def differentiated(
    function: Callable[..., Tensor], tensors: dict[str, Tensor], counts: Tensor
) -> dict[str, Tensor]:
    """The result where queries ``counts [B, N]`` and, by name, the gradients for an upstream
    gradient that is 0 elsewhere and whose heads lie after the tokens in memory.
    """
    inputs = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    out = function(**inputs)
    where = counts[:, None, :, None]
    shape, generator = out.transpose(1, 2).shape, torch.Generator().manual_seed(9)
    upstream = torch.randn(shape, generator=generator, dtype=torch.float64).transpose(1, 2)
    grads = torch.autograd.grad(out, list(inputs.values()), upstream * where, allow_unused=True)
    found = {"out": out.detach().masked_fill(~where, 0)}
    for (name, x), grad in zip(inputs.items(), grads, strict=True):
        found[name] = torch.zeros_like(x) if grad is None else grad
    return found


def compare(case: Drawn, fast: Callable, slow: Callable, tensors: dict[str, Tensor]) -> None:
    """Compare values and all gradients of an operation with its definition. Keys that take no part
    and queries that are idle hold garbage for the operation and 0 for the definition.
    """
    n, m = case.tokens()
    queries, keys = case.idle(n), case.absent_keys()
    if case.later:
        keys = keys | case.idle(m)
    where = {name: x[:, None, :, None] for name, x in (("q", queries), ("k", keys), ("v", keys))}
    clean = tensors | {name: tensors[name].masked_fill(x, 0) for name, x in where.items()}
    spoilt = tensors | {
        name: tensors[name].masked_fill(x, case.garbage) for name, x in where.items()
    }
    expected = differentiated(slow, clean, ~queries)
    with case.circumstances():
        actual = differentiated(fast, spoilt, ~queries)
    for name, want in expected.items():
        got = actual[name]
        assert got.shape == want.shape and got.dtype == want.dtype, name
        if want.numel():
            error, scale = (got - want).abs().max().item(), max(want.abs().max().item(), 1.0)
            assert error <= TOLERANCE * scale, f"{name}: off by {error:.2e} of {scale:.2e}"
    for name, absent in where.items():
        assert not actual[name].masked_select(absent).any(), f"{name}: gradients of garbage"
