"""Models whose blocks use different attentions: the options of each block, and a warning if a
quadratic softmax gets many tokens.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from visionattn.layers.attention_layer import idle_options
from visionattn.layers.position_tables import RelativeTables
from visionattn.ops.attentions import get_attention

MANY_TOKENS = 16384
"""Above this number of tokens, softmax attention warns about its cost."""


def options_of_blocks(
    attention: str | Sequence[str],
    depth: int,
    options: dict[str, Any],
    softmax_blocks: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Return the options of each block's ``Attention``.

    With blocks of several kinds, each gets the options that it can use. Every second window block
    is shifted.

    Args:
        attention: one name for all blocks, or one per block.
        depth: the number of blocks.
        options: options of ``Attention``, given once for all blocks; None, False and "auto" are
            defaults.
        softmax_blocks: indices of blocks that use timm's own softmax, whatever ``attention`` says;
            they have no options.

    Raises:
        ValueError: a wrong number of names, an unknown name, an option that no block can use, or a
            block that does not exist.
    """
    exact, single = places_of_blocks(softmax_blocks, depth), isinstance(attention, str)
    names = [attention] * depth if single else list(attention)
    if len(names) != depth:
        raise ValueError(
            f"attention: expected a name, or {depth}, one for each block, got {len(names)}"
        )
    kinds = {name: get_attention(name) for i, name in enumerate(names) if single or i not in exact}
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
            f"{option}={given[option]!r} has no effect, because all blocks are in softmax_blocks; "
            "remove it"
        )
    for option, value in given.items():
        if kinds and all(option in of for of in idle.values()):
            reasons = "; ".join(dict.fromkeys(of[option] for of in idle.values()))
            raise ValueError(f"{option}={value!r} has no effect: {reasons}")
    blocks: list[dict[str, Any]] = []
    windows = 0
    for i, name in enumerate(names):
        if i in exact:
            blocks.append(dict(attention="softmax", relative="none"))
            continue
        own = {option: value for option, value in given.items() if option not in idle[name]}
        own["attention"] = name
        if kinds[name].windows:
            own["shifted"] = windows % 2 == 1
            windows += 1
        blocks.append(own)
    return blocks


def places_of_blocks(indices: Sequence[int], depth: int, name: str = "softmax_blocks") -> list[int]:
    """Return the indices of blocks from 0 on, sorted; given indices may count from the end as in
    Python.

    Raises:
        ValueError: not a list of integers, or a block that does not exist; one line that begins
            with ``name``, the option.
    """
    listed = isinstance(indices, list | tuple | range | set | frozenset)
    if not listed or not all(type(i) is int for i in indices):
        raise ValueError(f"{name}: expected a list of indices of blocks, got {indices!r:.80}")
    for i in indices:
        if not -depth <= i < depth:
            raise ValueError(f"{name}: expected blocks 0 to {depth - 1} of {depth}, got {i}")
    return sorted({i % depth for i in indices})


def first_counted(blocks: Iterable[nn.Module]) -> RelativeTables | None:
    """Return the relative tables of the first block that needs counts of keys per class; None if
    there is none.

    All other blocks that need counts have the same horizon.
    """
    for block in blocks:
        tables: Any = block.attn.relative
        if tables is not None and tables.kind == "joint" and not tables.signed:
            return tables
    return None


def warn_of_softmax(blocks: nn.Sequential, x: Tensor) -> None:
    """Warn if blocks of softmax attention get many tokens ``x [B, N, D]``; Python shows the same
    warning once.
    """
    plain = type(x) is Tensor and not x.is_meta and not torch.compiler.is_compiling()
    if not plain or x.shape[1] <= MANY_TOKENS:
        return
    places = [i for i, block in enumerate(blocks) if block.attn.attention == "softmax"]
    if places:
        warnings.warn(
            f"softmax over {x.shape[1]:,} tokens in blocks {places} takes quadratic time; "
            '"window" and "kernelized" are linear',
            stacklevel=2,
        )
