"""Sizes of 0 are no error: every operation gives an empty result, or zeros where there are no keys,
and so do its gradients.
"""

from functools import partial

import pytest
import torch

from tests.helpers.oracles import draw_qkv, draw_table
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    Axial,
    Flat,
    Joint,
    kernelized_attention,
    softmax_attention,
    taylorshift_attention,
)


def attentions():
    """Every operation by name, in each of its forms."""
    for form in ("direct", "efficient"):
        yield f"taylorshift {form}", partial(taylorshift_attention, form=form)
        yield f"kernelized {form}", partial(kernelized_attention, form=form)
        yield f"causal {form}", partial(kernelized_attention, form=form, causal=True)
        yield (
            f"temperature {form}",
            lambda *x, form=form, **o: taylorshift_attention(
                *x, form=form, temperature=torch.ones(x[0].shape[1], dtype=torch.float64), **o
            ),
        )
    yield "position softmax", partial(kernelized_attention, feature_map="softmax")
    yield "softmax", softmax_attention
    yield "softmax causal", partial(softmax_attention, causal=True)


ATTENTIONS = dict(attentions())
SIZES = {
    "q": (2, 3, 0, 11, 4),
    "k": (2, 3, 7, 0, 4),
    "B": (0, 3, 7, 11, 4),
    "h": (2, 0, 7, 11, 4),
    "e": (2, 3, 7, 11, 0),
}


def positions(heads: int, layout: TokenLayout | None, normalization: str):
    """Each kind of relative position that goes with the layout: a table of one head where there is
    none.
    """
    heads = heads or 1
    yield Flat(draw_table(heads, 5, 5, seed=0), layout, normalization)
    yield Flat(draw_table(heads, 1, 5, seed=0), layout, normalization)
    if layout is not None:
        yield Axial(
            draw_table(heads, 3, 5, seed=0), draw_table(heads, 5, 5, seed=1), layout, normalization
        )
        yield Joint(draw_table(heads, 3, 5, 5, seed=0), layout, normalization)


def takes(name: str, position) -> bool:
    """Whether the operation has such a relative position at all."""
    if name.startswith("causal") and not isinstance(position, Flat | None):
        return False
    return not name.startswith("softmax") or position is None or position.normalization == "sum"


def assert_empty(function, sizes: tuple[int, ...], relative) -> None:
    """Zeros of the right shape, and gradients of the right shapes, with and without a mask."""
    batch, heads, queries, keys, e = sizes
    for key_mask in (None, torch.ones(batch, keys, dtype=torch.bool)):
        inputs = [x.requires_grad_() for x in draw_qkv(batch, heads, queries, keys, 5, e).values()]
        out = function(*inputs, relative=relative, key_mask=key_mask)
        assert out.shape == (batch, heads, queries, e)
        if keys == 0:
            assert out.eq(0).all()
        for x, gradient in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
            assert gradient.shape == x.shape


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("empty", SIZES)
def test_no_tokens_are_no_error(name, empty):
    assert_empty(ATTENTIONS[name], SIZES[empty], None)
    for normalization in ("sum", "mean"):
        for position in positions(SIZES[empty][1], None, normalization):
            if takes(name, position):
                assert_empty(ATTENTIONS[name], SIZES[empty], position)


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("empty", ["B", "h", "e", "grid", "grid and prefix"])
def test_no_images_heads_widths_or_patches_are_no_error_on_a_grid(name, empty):
    layouts = {"grid": TokenLayout(2, Grid(0, 0)), "grid and prefix": TokenLayout(0, Grid(0, 5))}
    for layout in (
        [layouts[empty]]
        if empty in layouts
        else [TokenLayout(2, Grid(3, 5)), TokenLayout(2, Grid(17, 19))]
    ):
        batch, heads, _, _, e = SIZES.get(empty, (2, 3, 0, 0, 4))
        for normalization in ("sum", "mean"):
            for position in positions(heads, layout, normalization):
                if takes(name, position):
                    assert_empty(
                        ATTENTIONS[name],
                        (batch, heads, layout.num_tokens, layout.num_tokens, e),
                        position,
                    )
