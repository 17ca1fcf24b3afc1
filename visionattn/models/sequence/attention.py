"""Attention of the rows of one rank, equal to that of the whole image.

The content needs one sum over the ranks, of states; ``Axial`` adds the sums of rows and columns to
it. ``Joint``, ``Flat`` and ``value_conv`` need one exchange of rows and sums of rows, and windows
one of the keys and values of windows that two ranks share.
"""

from dataclasses import replace

import torch
from torch import Tensor

from visionattn.layers import Attention
from visionattn.layout import Grid, TokenLayout
from visionattn.models.sequence.collectives import summed
from visionattn.models.sequence.rows import Halo, seen_rows, with_halo
from visionattn.models.sequence.share import Share
from visionattn.ops.operator import without_autocast
from visionattn.ops.position.kinds import Axial, RelativePosition
from visionattn.ops.states import State, attend
from visionattn.ops.strips import SeenLines, Strip, halo_of, strip_attention
from visionattn.ops.sums import accumulation_dtype, drop_values
from visionattn.ops.window import window_attention


def attention_of_rows(layer: Attention, x: Tensor, share: Share) -> Tensor:
    """Return what a layer gives the tokens of a rank, ``[B, P + rows * W, D]``, as ``Attention``
    gives it to those of the whole image.
    """
    batch, tokens, dim = x.shape
    q, k, v = layer.heads(x)
    if layer.centre_keys:
        k = _centred(k, share)
    dropped = _dropped(v, layer.attn_drop.p if layer.training else 0.0, share)
    attend_to = _in_windows if layer.kind.windows else _to_states
    out, halo = attend_to(layer, q, k, dropped, share)
    if layer.value_conv is not None:
        if halo is None or dropped is not v:
            halo = with_halo(_patches(v, share), share, _around(share, _side(layer)))
        out = _convolved(layer, halo, v, share) + out
    return layer.project(out.transpose(1, 2).reshape(batch, tokens, dim), x)


def _patches(x: Tensor, share: Share) -> Tensor:
    """Return the patches of tokens ``[B, h, P + rows * W, c]`` as ``[B, h, rows, W, c]``."""
    return x[:, :, share.num_prefix :].unflatten(2, (share.strip.rows, share.grid.width))


def _around(share: Share, rows: int) -> list[Strip]:
    """Return the rows of each rank with so many more on either side."""
    return [share.strip_of(rank).with_halo(rows) for rank in range(share.ranks)]


def _side(layer: Attention) -> int:
    """Return how many rows on either side the convolution of a layer reaches."""
    return 0 if layer.value_conv is None else layer.value_conv.reach


def _centred(k: Tensor, share: Share) -> Tensor:
    own = k[:, :, share.skipped :].sum(2, keepdim=True, dtype=accumulation_dtype(k))
    return k - (summed([own], share.group)[0] / share.tokens).to(k.dtype)


def _dropped(v: Tensor, value_drop: float, share: Share) -> Tensor:
    """Drop rows of values as ``drop_values`` does: of prefix tokens the same on all ranks, whose
    generators have to be in the same state, and of patches other ones on each.
    """
    if not value_drop:
        return v
    seed = int(torch.randint(2**62, ()))
    own = torch.Generator(v.device).manual_seed(seed + share.rank)
    prefix, patches = v[:, :, : share.num_prefix], v[:, :, share.num_prefix :]
    return torch.cat([drop_values(prefix, value_drop), drop_values(patches, value_drop, own)], 2)


def _to_states(
    layer: Attention, q: Tensor, k: Tensor, v: Tensor, share: Share
) -> tuple[Tensor, Halo | None]:
    """Attend to all tokens, and return the halo of values that were needed for it."""
    prefix, dtype = share.num_prefix, v.dtype
    relative: RelativePosition | None = None
    if layer.relative is not None:
        relative = layer.relative(TokenLayout(prefix, share.grid))
    # Prefix tokens are keys of one rank alone, so that they count once.
    own = layer.summarize(k[:, :, share.skipped :], v[:, :, share.skipped :])
    with without_autocast(q):
        patches = _patches(v, share).to(accumulation_dtype(q, k, v))
        state, lines = _whole(own, patches if isinstance(relative, Axial) else None, share)
        halo, reach = None, max(halo_of(relative), _side(layer))
        if lines is not None or relative is None:
            seen = lines
            if reach:
                halo = with_halo(patches, share, _around(share, reach))
        else:
            halo = with_halo(patches, share, _around(share, reach), relative)
            seen = seen_rows(halo, relative, share.strip)
    out = [
        attend(q[:, :, :prefix], state).divide(),
        strip_attention(q[:, :, prefix:], state, relative, share.strip, seen),
    ]
    return torch.cat(out, 2).to(dtype), halo


def _whole(state: State, patches: Tensor | None, share: Share) -> tuple[State, SeenLines | None]:
    """Return the state of all ranks' tokens, and the sums of all rows and columns of patches
    ``[B, h, rows, W, e]`` where they are given, by one sum over the ranks.
    """
    names = state.SUMS
    parts = [getattr(state, name) for name in names]
    if patches is not None:
        own, height = share.strip, share.grid.height
        around = (0, 0, own.first, height - own.last)
        parts += [torch.nn.functional.pad(patches.sum(3), around), patches.sum(2)]
    found = summed(parts, share.group)
    count = torch.full_like(state.count, share.tokens)
    lines = None if patches is None else SeenLines(*found[len(names) :])
    sums = dict(zip(names, found, strict=False))
    return replace(state, **sums, count=count), lines


def _convolved(layer: Attention, halo: Halo, v: Tensor, share: Share) -> Tensor:
    """Return the convolution of the values for the tokens of a rank, 0 for prefix tokens."""
    prefix, own = share.num_prefix, share.strip
    around = own.with_halo(_side(layer))
    rows = halo.rows_of(around)[..., -v.shape[3] :].to(v.dtype).flatten(2, 3)
    layout = TokenLayout(0, Grid(around.rows, share.grid.width))
    out = layer.value_conv(rows, layout)
    begin = (own.first - around.first) * share.grid.width
    out = out[:, :, begin : begin + own.rows * share.grid.width]
    return torch.nn.functional.pad(out, (0, 0, prefix, 0))


def window_rows(strip: Strip, window: int, shifted: bool) -> Strip:
    """Return the rows of all windows that a strip has a part in."""
    begin, height = window // 2 if shifted else 0, strip.grid.height

    def edge(row: int) -> int:
        """Return the last edge of a window at or above a row."""
        return 0 if row < begin else begin + (row - begin) // window * window

    last = edge(strip.last - 1)
    end = begin if last < begin else last + window
    return Strip(strip.grid, edge(strip.first), min(height, end))


def _in_windows(
    layer: Attention, q: Tensor, k: Tensor, v: Tensor, share: Share
) -> tuple[Tensor, Halo]:
    """Attend within windows, of which others may have rows too, and return keys and values of all
    rows that were needed for it, beside each other.
    """
    prefix, own, width = share.num_prefix, share.strip, share.grid.width
    size, shifted = layer.window_size, layer.shifted
    wanted = []
    for rank in range(share.ranks):
        rows, around = share.strip_of(rank), share.strip_of(rank).with_halo(_side(layer))
        seen = window_rows(rows, size, shifted)
        first, last = min(seen.first, around.first), max(seen.last, around.last)
        wanted.append(Strip(share.grid, first, last))
    halo = with_halo(_patches(torch.cat([k, v], 3), share), share, wanted)
    seen = window_rows(own, size, shifted)
    # Windows that are shifted begin with half a one: above other rows than the first, with nothing.
    top = size // 2 if shifted and seen.first else 0
    grid = Grid(top + seen.rows, width)
    begin, end = top + own.first - seen.first, top + own.last - seen.first

    def on_grid(x: Tensor, first: int, last: int) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, 0, first, grid.height - last)).flatten(2, 3)

    others = halo.rows_of(seen).split(k.shape[3], 4)
    tokens = [
        torch.cat([x[:, :, :prefix], on_grid(rows, first, last)], 2)
        for x, rows, first, last in (
            (q, _patches(q, share), begin, end),
            (k, others[0], top, grid.height),
            (v, others[1], top, grid.height),
        )
    ]
    layout = TokenLayout(prefix, grid)
    options = dict(window_size=size, shifted=shifted)
    if layer.relative is None:
        out = window_attention(*tokens, layout=layout, **options)
    else:
        out = window_attention(*tokens, relative=layer.relative(layout), **options)
    patches = out[:, :, prefix + begin * width : prefix + end * width]
    if not prefix:
        return patches, halo
    return torch.cat([_of_prefix(q, k, v, share), patches], 2), halo


def _of_prefix(q: Tensor, k: Tensor, v: Tensor, share: Share) -> Tensor:
    """Return the softmax of the prefix tokens over the tokens of all ranks, ``[B, h, P, e]``."""
    dtype = accumulation_dtype(q, k, v)
    with without_autocast(q):
        queries = q[:, :, : share.num_prefix].to(dtype) * q.shape[3] ** -0.5
        keys, values = (x[:, :, share.skipped :].to(dtype) for x in (k, v))
        scores = queries @ keys.mT
        mass = scores.logsumexp(3, keepdim=True)
        own = torch.cat([(scores - mass).exp() @ values, mass], 3)
        # A place for each rank, and one sum of all: each learns what the others have found.
        places = [
            own if rank == share.rank else torch.zeros_like(own) for rank in range(share.ranks)
        ]
        (found,) = summed([torch.stack(places)], share.group)
        means, masses = found[..., :-1], found[..., -1:]
        return (means * masses.softmax(0)).sum(0).to(v.dtype)
