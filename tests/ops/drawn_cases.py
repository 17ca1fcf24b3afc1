"""Sizes, layouts and flags that hypothesis draws for the tests of operations, their tensors, and
the comparison with a definition.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Axial, Flat, Joint, quadratic, sums, window
from visionattn.ops import pairs as pairs_of_tokens
from visionattn.ops.choice import choosing_as
from visionattn.ops.kernelized import eager as kernelized_eager
from visionattn.ops.kernelized import operands
from visionattn.ops.position import axial, scores, tiles
from visionattn.ops.taylorshift import features

TOLERANCE = 1e-12
SMALL = {
    (features, "BUFFER_BYTES"): 1 << 13,
    (features, "CHUNK_TOKENS"): (4, 8),
    (quadratic, "BLOCK_QUERIES"): 5,
    (quadratic, "BLOCK_ELEMENTS"): 90,
    (pairs_of_tokens, "BLOCK_QUERIES"): (5, 5),
    (pairs_of_tokens, "BLOCK_ELEMENTS"): 90,
    (kernelized_eager, "BLOCK_TOKENS"): 4,
    (axial, "BAND_ELEMENTS"): 700,
    (tiles, "BAND_ELEMENTS"): 1,
    (tiles, "TILE_ROWS"): 3,
    (tiles, "TILE_COLUMNS"): 4,
    (tiles, "TILE_OF_ONE_ROW"): 5,
    (tiles, "LONGEST_TILE"): 7,
    (scores, "BLOCK_QUERIES"): 3,
    (window, "CACHED_ELEMENTS"): 1,
    (sums, "CHUNK_ELEMENTS"): 64,
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

    def idle_queries(self) -> Tensor:
        """Which queries are absent tokens, whose results mean nothing, bool ``[B, N]``."""
        if not self.absent or self.lengths is not None:
            return torch.zeros(self.batch, self.tokens()[0], dtype=torch.bool)
        return ~self.layout().key_mask()

    @contextmanager
    def blocks(self) -> Iterator[None]:
        """Let operations go in blocks of few tokens, and as for many tokens."""
        with pytest.MonkeyPatch.context() as patch:
            for (module, name), value in SMALL.items() if self.small_blocks else ():
                patch.setattr(module, name, value)
            if self.small_blocks:
                patch.setitem(operands.CHUNK_ELEMENTS, "cpu", 300)
            if self.many_tokens:
                with choosing_as(tokens=1 << 20):
                    yield
            else:
                yield


def cases(*, kinds: tuple[str, ...], sequences: bool = True) -> st.SearchStrategy[Drawn]:
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
        seed=st.integers(0, 999),
    )


def differentiated(
    function: Callable[..., Tensor], tensors: dict[str, Tensor], counts: Tensor
) -> dict[str, Tensor]:
    """The result where queries ``counts [B, N]`` and, by name, the gradients for an upstream
    gradient that is 0 elsewhere.
    """
    inputs = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    out = function(**inputs)
    where = counts[:, None, :, None]
    upstream = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )
    grads = torch.autograd.grad(out, list(inputs.values()), upstream * where, allow_unused=True)
    found = {"out": out.detach().masked_fill(~where, 0)}
    for (name, x), grad in zip(inputs.items(), grads, strict=True):
        found[name] = torch.zeros_like(x) if grad is None else grad
    return found


def compare(case: Drawn, fast: Callable, slow: Callable, tensors: dict[str, Tensor]) -> None:
    """Compare values and all gradients of an operation, whose keys that take no part and queries
    that are idle hold NaN, with its definition, where they hold 0.
    """
    keys, queries = (x[:, None, :, None] for x in (case.absent_keys(), case.idle_queries()))
    where = {"q": queries, "k": keys, "v": keys}
    clean, spoilt = (
        tensors | {name: tensors[name].masked_fill(mask, value) for name, mask in where.items()}
        for value in (0.0, float("nan"))
    )
    counts = ~case.idle_queries()
    expected = differentiated(slow, clean, counts)
    with case.blocks():
        actual = differentiated(fast, spoilt, counts)
    for name, want in expected.items():
        got = actual[name]
        assert got.shape == want.shape and got.dtype == want.dtype, name
        if want.numel():
            error, scale = (got - want).abs().max().item(), max(want.abs().max().item(), 1.0)
            assert error <= TOLERANCE * scale, f"{name}: off by {error:.2e} of {scale:.2e}"
