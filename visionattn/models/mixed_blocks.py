"""Models whose blocks attend in different ways: which options each block takes, and what a block of
quadratic softmax costs where there are many tokens.
"""

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from visionattn.cli.tables import lasting, sized
from visionattn.layers import Attention
from visionattn.layers.attention import idle_options
from visionattn.layers.position import RelativeTables
from visionattn.layout import Grid, TokenLayout
from visionattn.ops.attentions import get_attention

MANY_TOKENS = 16384
"""Above so many, a block of softmax attention says what it costs."""
TRIED_SIDE = {"cpu": 32}
"""Patches along a side of the grid on which that is measured; 64 elsewhere, as few tokens do not
fill an accelerator.
"""


def options_of_blocks(
    attention: str | Sequence[str],
    depth: int,
    options: dict[str, Any],
    softmax_blocks: Sequence[int] = (),
) -> Iterator[dict[str, Any]]:
    """Return the options of each block's ``Attention``, block by block: a depth that a file claims
    may be one that no machine could list.

    Of blocks of several kinds each takes those options that it has a use for; of windows every
    second block is shifted.

    Args:
        attention: one name for all blocks, or one for each.
        depth: the number of blocks.
        options: those of ``Attention`` that are given once for all blocks; None, False and
            "auto" are defaults.
        softmax_blocks: indices of blocks that are timm's own softmax, whatever ``attention`` says
            of them; they take no option.

    Raises:
        ValueError: not a name for each block, an unknown one, an option that no block can use, or
            a block that does not exist.
    """
    names: Iterable[str]
    exact = places_of_blocks(softmax_blocks, depth)
    if isinstance(attention, str):
        kinds, names = {attention: get_attention(attention)}, repeat(attention, depth)
    else:
        names = _names(attention, depth)
        kinds = {name: get_attention(name) for i, name in enumerate(names) if i not in exact}
    given = {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and value != "auto"
    }
    idle = {
        name: idle_options(kind, options.get("relative"), options.get("feature_map"))
        for name, kind in kinds.items()
    }
    useless = [name for name in given if name != "relative" and (given[name] or name == "horizon")]
    if 0 < depth == len(exact) and useless:
        option = useless[0]
        raise ValueError(
            f"{option}={given[option]!r} would do nothing: all blocks are in softmax_blocks"
        )
    for option, value in given.items():
        if kinds and all(option in of for of in idle.values()):
            reasons = "; ".join(dict.fromkeys(of[option] for of in idle.values()))
            raise ValueError(f"{option}={value!r} would do nothing: {reasons}")

    def of_each() -> Iterator[dict[str, Any]]:
        windows = 0
        for i, name in enumerate(names):
            if i in exact:
                yield dict(attention="softmax", relative="none")
                continue
            own = {option: value for option, value in given.items() if option not in idle[name]}
            own["attention"] = name
            if kinds[name].windows:
                own["shifted"] = windows % 2 == 1
                windows += 1
            yield own

    return of_each()


def places_of_blocks(indices: Sequence[int], depth: int) -> frozenset[int]:
    """Return the indices of blocks from 0, of indices that may count from the end as in Python.

    Raises:
        ValueError: what is no list of whole numbers, or a block that does not exist.
    """
    listed = isinstance(indices, list | tuple | range | set | frozenset)
    if not listed or not all(type(i) is int for i in indices):
        raise ValueError(f"softmax_blocks: wanted a list of indices of blocks, got {indices!r}")
    for i in indices:
        if not -depth <= i < depth:
            raise ValueError(
                f"softmax_blocks: there is no block {i}; the {depth} blocks are 0 to {depth - 1}"
            )
    return frozenset(i % depth for i in indices)


def _names(attention: Sequence[str], depth: int) -> list[str]:
    """Return the names of a list, checked but for what they name."""
    if not isinstance(attention, list | tuple) or not all(isinstance(x, str) for x in attention):
        raise ValueError(
            f"attention: wanted a name, or a list of names, one for each block, got {attention!r}"
        )
    if len(attention) != depth:
        raise ValueError(
            f"attention: wanted a name, or {depth}, one for each block, got {len(attention)}"
        )
    return list(attention)


def first_counted(blocks: Iterable[nn.Module]) -> RelativeTables | None:
    """Return the relative tables of the first block for which the keys of each class are counted;
    the others that are have the same horizon. None where there is none.
    """
    for block in blocks:
        tables: Any = block.attn.relative
        if tables is not None and tables.kind == "joint" and not tables.signed:
            return tables
    return None


def warn_of_softmax(blocks: nn.Sequential, x: Tensor) -> bool:
    """Warn where a block of softmax attention gets many tokens ``x [B, N, D]``, with the seconds
    that its attention takes on this device, measured on few tokens. Return whether it did.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.is_meta:
        return False
    if x.shape[1] <= MANY_TOKENS:
        return False
    places = [i for i, block in enumerate(blocks) if block.attn.attention == "softmax"]
    if not places:
        return False
    layer, (images, tokens) = blocks[places[0]].attn, x.shape[:2]
    memory = ""
    if layer.relative is not None:
        scores = images * layer.num_heads * tokens**2 * x.element_size()
        memory = f" and {sized(scores)} for relative position"
    several = f"each of the blocks {places}" if len(places) > 1 else f"block {places[0]}"
    warnings.warn(
        f"softmax over {tokens:,} tokens is expected to take "
        f"{lasting(expected_seconds(layer, x))}{memory} in a forward of {several} on "
        f'{x.device.type}; "window" and "kernelized" are linear in them',
        stacklevel=2,
    )
    return True


@torch.no_grad()
def expected_seconds(layer: Attention, x: Tensor) -> float:
    """Return the seconds that a layer's quadratic attention takes for ``x [B, N, D]``, without its
    projections: those of a grid of few patches of one image, times the square of how many more
    tokens there are.
    """
    side = TRIED_SIDE.get(x.device.type, 64)
    layout = TokenLayout(0, Grid(side, side))
    dtype = layer.qkv(x[:1, :1]).dtype
    q = torch.zeros(
        1, layer.num_heads, layout.num_tokens, layer.head_dim, dtype=dtype, device=x.device
    )
    relative = None if layer.relative is None else layer.relative(layout)
    taken = []
    for _ in range(3):
        begun = time.perf_counter()
        layer.operation(q, q, q, relative=relative)
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)
        taken.append(time.perf_counter() - begun)
    return min(taken) * x.shape[0] * (x.shape[1] / layout.num_tokens) ** 2
