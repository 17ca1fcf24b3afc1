"""Models with a convolution of values and with centred keys."""

import pytest
import torch
from timm import create_model

from tests.helpers.oracles import draw
from tests.models.test_absent import assert_as_alone, batch, close, small
from visionattn.layers import Attention
from visionattn.layout import Grid, TokenLayout
from visionattn.models.state_dicts import checkpoint_filter_fn

BOTH = dict(value_conv=3, centre_keys=True)
SMALL = dict(embed_dim=24, depth=2, num_heads=3, num_classes=5, img_size=64)


def test_an_image_among_larger_ones_gives_what_it_gives_alone():
    model = small(reg_tokens=2, **BOTH)
    assert model.blocks[1].attn.value_conv.weight.abs().min() > 0
    assert_as_alone(model, *batch())


def test_a_convolution_needs_a_grid():
    layer = Attention(24, 3, relative="joint", **BOTH).double()
    layout, x = TokenLayout(1, Grid(4, 5)), draw(2, 21, 24, seed=1)
    with pytest.raises(ValueError, match="without a grid"):
        layer(x)
    layer.native_layout = layout
    assert torch.equal(layer(x), layer(x, layout))


def test_a_model_starts_as_the_one_without_a_convolution():
    """Of all of timm's starts: some draw the weights of every convolution."""
    for start in ("", "jax", "moco"):
        torch.manual_seed(0)
        model = create_model("scaleformer_vit_t", weight_init=start, value_conv=3, **SMALL)
        assert all(not block.attn.value_conv.weight.any() for block in model.blocks)


def test_weights_that_lack_a_convolution_leave_it_as_it_is():
    source = create_model("scaleformer_vit_t", **SMALL)
    model = create_model("scaleformer_vit_t", **SMALL, value_conv=3)
    model.load_state_dict(checkpoint_filter_fn(source.state_dict(), model))
    image = torch.randn(1, 3, 48, 64)
    close(model.eval()(image), source.eval()(image), 1e-6)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (dict(value_conv=4), "value_conv: wanted an odd side of 1 patch or more, got 4"),
        (dict(attention="softmax", centre_keys=True), "centre_keys=True would do nothing"),
    ],
)
def test_options_that_cannot_act_are_refused_in_one_line(options, line):
    with pytest.raises(ValueError, match=line):
        create_model("scaleformer_vit_t", **SMALL, **options)


@pytest.mark.parametrize("options", [dict(value_conv=3), dict(centre_keys=True)])
def test_causal_attention_has_neither(options):
    layer = Attention(24, 3, relative="flat", **options)
    with pytest.raises(ValueError, match="let tokens see later ones"):
        layer(torch.randn(1, 12, 24), TokenLayout(0, Grid(3, 4)), is_causal=True)
