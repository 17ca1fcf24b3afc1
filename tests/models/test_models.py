"""The contract that timm and its clients have with each name, and the geometry of models."""

import re
from functools import partial

import pytest
import timm
import torch
from timm.models import create_model
from torch._dynamo.testing import CompileCounter

from tests.helpers.timm_contract import keeps_contract
from visionattn.layout import Grid, TokenLayout
from visionattn.models import shipped

NAMES = sorted(
    name
    for name in timm.list_models()
    if name.startswith(("scaleformer_vit", "taylorshift")) and not name.endswith("_pyramid")
)
"""Those of pyramids are in ``test_pyramid.py``."""
CONTRACT = [
    *("scaleformer_vit_t", "taylorshift_vit_small_patch16_224", "taylorshift_abs_vit_t"),
    *(name for name in NAMES if name.endswith("pixel")),
    next(iter(shipped.FILES)),
]
"""A name of each family: its sizes differ in width and depth alone."""
SMALL = dict(embed_dim=24, depth=2, num_heads=3, patch_size=16, in_chans=3)


def is_pixel(name):
    return name.endswith("pixel")


def small(name, **kwargs):
    """The registered architecture in another width and depth."""
    if is_pixel(name):
        return create_model(name, **(dict(embed_dim=12, num_heads=3) | kwargs))
    return create_model(name, **(SMALL | dict(num_classes=11, img_size=64) | kwargs))


def image(name, batch=2, height=80, width=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if is_pixel(name):
        grey = torch.randint(256, (batch, 1, 32, 32), generator=generator)
        return torch.nn.functional.one_hot(grey[:, 0], 256).permute(0, 3, 1, 2).float()
    return torch.randn(batch, 3, height, width, generator=generator)


def test_every_size_of_every_family_is_registered_under_both_names():
    families = ("scaleformer_vit", "taylorshift_vit", "taylorshift_abs_vit")
    short = {f"{family}_{size}" for family in families for size in "tsbl"}
    long = {
        f"{family}_{size}_patch16_224"
        for family in families
        for size in ("tiny", "small", "base", "large")
    }
    pixel = {"scaleformer_vit_pixel", "taylorshift_vit_pixel"}
    assert set(NAMES) == short | long | pixel | set(shipped.FILES)


@pytest.mark.parametrize("name", CONTRACT)
def test_registered_name_keeps_the_contract_of_timm(name):
    """One walk through what clients do with a model, at the smallest size of the name."""
    model = small(name)
    assert model.default_cfg["architecture"] == name
    grid, classes = ((32, 32), 10) if is_pixel(name) else ((5, 3), 11)
    keeps_contract(model, image(name), grid, classes)


FULL = {
    "scaleformer_vit_t": 5.5e6,
    "scaleformer_vit_s": 22e6,
    "taylorshift_vit_b": 86e6,
    "taylorshift_abs_vit_l": 304e6,
}


def test_full_sizes_build_on_the_meta_device():
    for name, parameters in FULL.items():
        with torch.device("meta"):
            model = create_model(name)
        assert all(p.is_meta for p in model.parameters()) and not list(model.buffers())
        count = sum(p.numel() for p in model.parameters())
        if "abs" not in name:  # less the gate and the convolution
            own = model.blocks[0].attn.proj.weight.numel() + 9 * model.embed_dim
            count -= len(model.blocks) * own
        assert count == pytest.approx(parameters, rel=0.06)
        assert model.blocks[0].attn.head_dim == (32 if "taylorshift_vit" in name else 64)


def test_published_model_differs_from_ours_in_position_pooling_and_temperature():
    ours, published = small("taylorshift_vit_t"), small("taylorshift_abs_vit_t")
    assert ours.pos_embed is None and ours.blocks[0].attn.relative.kind == "joint"
    assert published.pos_embed is not None and published.blocks[0].attn.relative is None
    assert published.global_pool == "token"
    assert published.blocks[0].attn.temperature.tolist() == [1.0] * 3
    assert ours.blocks[1].attn.temperature.tolist() == [4.0] * 3
    assert ours.blocks[0].attn.value_conv.weight.shape[-1] == 3


def test_set_input_size_moves_the_native_grid():
    model = small("scaleformer_vit_t").eval()
    model.set_input_size(img_size=64, patch_size=8)
    assert [info["reduction"] for info in model.feature_info] == [8, 8]
    assert model(image("", height=40, width=24)).shape == (2, 11)
    model.set_input_size(img_size=(96, 48), patch_size=16)
    tokens = torch.randn(1, 1 + 6 * 3, 24)
    layout = TokenLayout(1, Grid(6, 3))
    assert torch.equal(
        model.blocks(tokens), model.blocks[1](model.blocks[0](tokens, layout), layout)
    )


def test_what_a_model_cannot_compute_is_one_line():
    model, sized = (small("scaleformer_vit_t", dynamic_img_size=any_) for any_ in (True, False))
    assert sized(torch.zeros(1, 3, 64, 64)).shape == (1, 11)
    pairs = torch.ones(17, 17, dtype=torch.bool)
    for call, size, message in (
        (lambda x: model(x[0]), (64, 64), "expected images [B, C, H_px, W_px], got [3, 64, 64]"),
        (
            model,
            (1000, 1024),
            "image of 1000 x 1024 pixels is not a whole number of 16-pixel patches; crop or pad it "
            "to 992 or 1008 x 1024",
        ),
        (sized, (64, 80), "image of 64 x 80 pixels, but dynamic_img_size=False"),
        (partial(model, attn_mask=pairs), (64, 64), "linear attention cannot mask single pairs"),
        (partial(torch.jit.trace, model), (64, 64), "torch.jit.trace is not supported"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            call(torch.zeros(1, 3, *size))
        assert "\n" not in str(error.value)


def test_a_frozen_head_is_replaced_by_a_frozen_head():
    model = small("scaleformer_vit_t").requires_grad_(False).eval()
    model.reset_classifier(3)
    assert not model.head.weight.requires_grad and not model.head.training
    model = small("scaleformer_vit_t")
    model.reset_classifier(3, "avg")
    assert model.head.weight.requires_grad and model.head.training and model.global_pool == "avg"


def test_one_graph_serves_several_image_sizes():
    """fullgraph, three sizes, at most two graphs (the first, and the one with symbolic sizes)."""
    name = "scaleformer_vit_t"
    torch._dynamo.reset()
    model, graphs = small(name, depth=1).eval(), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for height, width in ((64, 96), (80, 48), (48, 128)):
        x = image(name, height=height, width=width)
        with torch.no_grad():
            assert torch.allclose(compiled(x), model(x), atol=1e-5)
    assert graphs.frame_count <= 2
