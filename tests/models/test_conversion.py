"""A timm ViT as one of our models: its function, its weights, and one line where it cannot be."""

import copy
import json
import re
from functools import cache, partial
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import RmsNorm
from timm.models import VisionTransformer
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock
from torch import nn

from tests.helpers.changed_modules import adapt, hook, patch, prune_all
from tests.helpers.timm_contract import keeps_contract
from visionattn.models import VisionAttnTransformer, from_softmax
from visionattn.models.conversion import ACCEPTED, body_of
from visionattn.models.weights import DataSpec

BODY = dict(img_size=(48, 32), patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=5)


def moved(vit, by):
    """The model, none of whose weights is zero or one then."""
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(torch.randn_like(parameter) * by)
    return vit


def teacher(seed=0, **options):
    """timm's own model in float64, with weights of its own."""
    torch.manual_seed(seed)
    return moved(VisionTransformer(**(BODY | options)).double().eval(), 0.3)


def image(vit, seed=1, size=None):
    generator = torch.Generator().manual_seed(seed)
    height, width = size or vit.patch_embed.img_size
    return torch.randn(2, vit.in_chans, height, width, generator=generator, dtype=torch.float64)


BODIES = {
    "norm before pooling, norms within": dict(
        fc_norm=False, global_pool="avg", scale_attn_norm=True, scale_mlp_norm=True
    ),
    "torch's LayerNorm, no biases": dict(
        norm_layer=partial(nn.LayerNorm, eps=1e-2), qkv_bias=False, proj_bias=False
    ),
    "no pooling": dict(global_pool=""),
    "a ratio that rounds down": dict(embed_dim=57, mlp_ratio=173.5 / 57),
    "two channels, oblong patches": dict(in_chans=2, patch_size=(8, 4)),
}
"""Bodies that no name of timm has."""


@pytest.mark.parametrize("body", BODIES)
def test_where_all_blocks_stay_a_softmax_the_model_computes_what_timm_does(body):
    vit = teacher(**BODIES[body])
    before = copy.deepcopy(vit.state_dict())
    converted = from_softmax(vit, softmax_blocks=range(len(vit.blocks)))
    x, own = image(vit), converted.model.state_dict()
    with torch.no_grad():
        torch.testing.assert_close(converted.model(x), vit(x), rtol=1e-12, atol=1e-12)
        features = vit.forward_features(x)
        torch.testing.assert_close(converted.model.forward_features(x), features)
    assert converted.new == converted.left_out == converted.resampled == []
    assert converted.taken == list(vit.state_dict())
    for name, value in before.items():  # the teacher is left alone
        assert torch.equal(vit.state_dict()[name], value)
        assert own[name].data_ptr() != vit.state_dict()[name].data_ptr()


def test_what_is_new_starts_so_that_it_changes_little():
    model = from_softmax(teacher(), "kernelized", softmax_blocks=[1]).model
    for block in (model.blocks[0], model.blocks[2]):
        assert block.attn.centre_keys and block.attn.output_gate is None
        assert block.attn.value_conv.weight.eq(0).all()
        assert block.attn.value_conv.weight.shape[-1] == 3
        peaks = block.attn.relative.table.mean(-1).flatten(1).argmax(1).tolist()
        assert peaks == [3 * 7 + 2, 3 * 7 + 4, 2 * 7 + 3]  # left, right, above
    exact = model.blocks[1].attn
    assert exact.relative is exact.value_conv is None and not exact.centre_keys


def test_images_of_other_sizes_are_resampled_and_padded_as_timm_does():
    vit = teacher(dynamic_img_size=True, dynamic_img_pad=True, reg_tokens=3, no_embed_class=True)
    model, x = from_softmax(vit, softmax_blocks=range(3)).model, image(vit, size=(61, 22))
    with torch.no_grad():
        torch.testing.assert_close(model(x), vit(x))


def test_another_native_size_and_patch_are_those_that_timm_resamples_to():
    vit = teacher(reg_tokens=1)
    converted = from_softmax(
        vit, softmax_blocks=range(3), img_size=(48, 60), patch_size=12, num_classes=7
    )
    vit.set_input_size(img_size=(48, 60), patch_size=(12, 12))
    vit.reset_classifier(0)
    x = image(vit, size=(48, 60))
    with torch.no_grad():
        torch.testing.assert_close(converted.model.forward_features(x), vit.forward_features(x))
    assert converted.resampled == [
        "pos_embed 1x26x24 -> 1x22x24",
        "patch_embed.proj.weight 24x3x8x8 -> 24x3x12x12",
    ]
    assert converted.new == converted.left_out == ["head.weight", "head.bias"]
    assert converted.model(x).shape == (2, 7)
    assert converted.spec.img_size == (48, 60) and converted.spec.num_classes == 7
    assert json.loads(json.dumps(converted.args)) == converted.args
    assert converted.lines()[0] == "43 of 45 tensors come from VisionTransformer"


def test_plain_bicubic_position_is_the_one_that_the_original_dinov2_computes():
    """Other image sizes and another native size, on grids of fewer and of more patches."""
    vit = teacher(dynamic_img_size=True)
    shared = dict(softmax_blocks=range(3), pos_antialias=False)
    model, (height, width) = from_softmax(vit, **shared).model, vit.patch_embed.grid_size
    other = from_softmax(vit, **shared, img_size=(24, 88)).model
    moved = from_softmax(vit, **shared).model
    moved.set_input_size(img_size=(24, 88))
    position, x = vit.pos_embed.detach().float(), image(vit, size=(24, 88))
    grid = position[:, 1:].unflatten(1, (height, width)).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(3, 11), mode="bicubic", antialias=False).flatten(2).mT
    vit.set_input_size(img_size=(24, 88))
    vit.pos_embed.data = torch.cat([position[:, :1], grid], 1).to(vit.pos_embed.dtype)
    with torch.no_grad():
        for each in (model, other, moved):
            torch.testing.assert_close(each(x), vit(x), rtol=1e-6, atol=1e-6)


def test_grey_images_see_the_sum_of_the_filters_and_colours_share_a_grey_one():
    for own, asked in ((3, 1), (1, 3)):
        vit = teacher(in_chans=own)
        model = from_softmax(vit, softmax_blocks=range(3), in_chans=asked).model
        grey = image(vit)[:, :1]
        with torch.no_grad():
            wanted = vit(grey.expand(-1, own, -1, -1))
            torch.testing.assert_close(model(grey.expand(-1, asked, -1, -1)), wanted)


def test_other_channels_classes_and_sizes_change_what_is_said_of_the_images():
    vit = teacher()
    grey = from_softmax(vit, in_chans=1).spec
    assert (*grey.mean, *grey.std) == pytest.approx((0.449, 0.226))  # those of ImageNet's three
    said = DataSpec(
        3, 5, tuple("abcde"), (0.2, 0.4, 0.9), (0.1, 0.2, 0.3), None, 48, bands=(3, 2, 1)
    )
    vit.data_spec = said
    assert from_softmax(vit).spec == said
    asked = from_softmax(vit, in_chans=2, num_classes=2, img_size=(24, 32)).spec
    assert asked.mean == pytest.approx((0.5, 0.5)) and asked.std == pytest.approx((0.2, 0.2))
    assert (asked.in_chans, asked.num_classes, asked.class_names) == (2, 2, ())
    assert (asked.img_size, asked.bands) == ((24, 32), None)


def test_heads_are_regrouped_at_the_same_weights():
    vit = teacher()
    converted = from_softmax(vit, softmax_blocks=range(3), num_heads=6)
    assert converted.new == [] and converted.args["num_heads"] == 6
    for block in vit.blocks:  # timm's attention with the same weights in other heads
        block.attn.num_heads, block.attn.head_dim, block.attn.scale = 6, 4, 0.5
    x = image(vit)
    with torch.no_grad():
        torch.testing.assert_close(converted.model(x), vit(x))


def test_temperatures_start_as_those_of_the_class_or_as_asked():
    for options, start in (({}, 4), (dict(temperature_init=2.0), 2)):
        model = from_softmax(teacher(), "taylorshift", **options).model
        assert all(block.attn.temperature.tolist() == [start] * 3 for block in model.blocks)


# What it carries


def test_dtype_mode_and_device_are_the_teachers():
    vit = tiny(PLAIN).to(torch.bfloat16).train()
    model = from_softmax(vit).model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model.training
    assert not from_softmax(tiny(PLAIN)).model.training
    with torch.device("meta"):
        vit = timm.create_model("vit_base_patch16_224")
    assert all(p.is_meta for p in from_softmax(vit, "taylorshift").model.parameters())


# What is refused, in one line


class Changed(VisionTransformer):
    """A class that pools in a way of its own."""

    def pool(self, x, pool_type=None):
        return x[:, -1]


GLU = partial(timm.layers.GluMlp, act_layer=nn.GELU)
PARTS = {
    r"its blocks\.0 is ResPostBlock\(\)": dict(block_fn=ResPostBlock),
    r"it has no blocks\.0\.mlp\.fc1\.weight": dict(block_fn=ParallelScalingBlock),
    r"its patch_embed\.norm is LayerNorm": dict(embed_norm_layer="layernorm"),
    r"its blocks\.0\.mlp is GluMlp\(\)": dict(mlp_layer=GLU),
    r"its blocks\.0\.norm1 is RmsNorm": dict(norm_layer=RmsNorm),
    r"its blocks\.0\.mlp\.act is ReLU": dict(act_layer="relu"),
    r"it has no blocks\.0\.": dict(depth=0),
}
CHANGES = {
    r"its blocks\.1\.attn\.qkv is Adapted": adapt("blocks.1.attn.qkv"),
    r"blocks\.1 has hooks or another forward": hook("blocks.1", torch.sin),
    r"blocks\.1\.mlp has hooks or another forward": patch("blocks.1.mlp"),
    r"it has no blocks\.0\.mlp\.fc1\.weight": prune_all,
    r"its blocks.1.norm2 is LayerNorm.*eps=0.5": lambda vit: setattr(
        vit.blocks[1].norm2, "eps", 0.5
    ),
    r"its blocks\.1\.attn\.gate is Linear": lambda vit: setattr(
        vit.blocks[1].attn, "gate", nn.Linear(24, 24)
    ),
    r"its blocks\.1\.attn is Attention": lambda vit: setattr(vit.blocks[1].attn, "head_dim", 4),
}


def refused(message, vit, **options):
    with pytest.raises(ValueError, match=f"cannot be converted: {message}") as error:
        from_softmax(vit, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_models_and_parts_that_ours_have_not_are_named():
    for message, options in PARTS.items():
        vit = VisionTransformer(**(BODY | options))
        assert refused(message, vit).endswith(f"; {ACCEPTED}")
    for message, change in CHANGES.items():
        vit = teacher()
        change(vit)
        refused(message, vit)
    for vit in (nn.Linear(2, 2), Changed(**BODY), VisionAttnTransformer(**BODY)):
        refused(f"its class is {type(vit).__name__}", vit)
    refused("its class", timm.create_model("test_efficientnet"))
    for options in (dict(qk_norm=True), dict(class_token=False, global_pool="map")):
        with pytest.raises(ValueError, match="its norms or its pooling have heads too"):
            from_softmax(teacher(**options), num_heads=6)


WRONG = {
    "expected blocks 0 to 2 of 3, got 3": dict(softmax_blocks=[0, 3]),
    "softmax_blocks: expected a list of indices of blocks, got 2": dict(softmax_blocks=2),
    "attention 'linear': expected one of": dict(attention="linear"),
    "expected a name, or 3, one for each block, got 2": dict(attention=["window", "softmax"]),
    "got embed_dim; others are the teacher's, 24": dict(embed_dim=48),
    "expected options among relative, horizon, .*, got layers": dict(layers=2),
    "horizon=2 has no effect, because all blocks": dict(horizon=2, softmax_blocks=range(3)),
    "expected num_heads that divides the width 24": dict(num_heads=5),
    "cannot be converted with these options: value_conv='wide'": dict(value_conv="wide"),
}


def test_wrong_arguments_are_one_line():
    for message, options in WRONG.items():
        with pytest.raises(ValueError, match=message) as error:
            from_softmax(teacher(), **options)
        assert "\n" not in str(error.value)


# Every ViT of timm

PAGE = Path(__file__).parents[2] / "docs" / "conversion.md"
NAMES = timm.list_models("vit_*")
TINY = dict(depth=2, embed_dim=24, num_heads=3, num_classes=5)
PLAIN = "vit_tiny_patch16_224"
OTHERS = {
    "_sapiens2": dict(num_kv_heads=[3, 3]),
    "vit_base_mci": dict(embed_dim=768, num_heads=12),
}
"""Arguments that make some of timm's names tiny; their number of blocks or width is in others."""


def tiny(name, **options):
    """timm's architecture, tiny."""
    own = next((own for part, own in OTHERS.items() if part in name), {})
    patch_size = next((int(n) for n in re.findall(r"patch(\d+)", name)), 16)
    sized = {} if "mci" in name else dict(img_size=4 * patch_size)
    return timm.create_model(name, **(TINY | sized | own | options)).eval()


def drawn(name, **options):
    """With weights of its own."""
    torch.manual_seed(0)
    return moved(tiny(name, **options), 0.2)


def structure(vit):
    """What tells bodies apart, whatever their size."""
    own = body_of(vit)
    sizes = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio")
    return tuple((key, value) for key, value in own.items() if key not in sizes)


@cache
def found_of(name):
    """The structure of a name, or why it is refused."""
    try:
        return structure(tiny(name))
    except ValueError as error:
        return str(error)


def one_of_each(names):
    """A name for each structure that there is."""
    found = {name: found_of(name) for name in reversed(names)}
    return tuple({of: name for name, of in found.items() if type(of) is tuple}.values())


def said_of(name):
    """What the page says of a name: why it is refused, or nothing."""
    table = PAGE.read_text().partition("## Which ViTs of timm can be converted?")[2]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        patterns = re.findall(r"`(vit_[\w*]+)`", cells[0]) if line.startswith("| `vit_") else []
        if any(re.fullmatch(of.replace("*", ".*"), name) for of in patterns):
            return cells[-1]
    return None


some_names = pytest.mark.parametrize(
    "names", [NAMES[::5], pytest.param(NAMES, marks=pytest.mark.slow)], ids=["some", "all"]
)


@some_names
def test_every_vit_of_timm_is_taken_or_refused_in_one_line_as_the_page_says(names):
    for name in names:
        refusal, found = said_of(name), found_of(name)
        wanted = refusal and f"{name} cannot be converted: {refusal}; {ACCEPTED}"
        assert wanted == (None if type(found) is tuple else found), name
    # So that the next test is of more than a few.
    assert len(one_of_each(names)) >= (20 if names is NAMES else 10)


@some_names
def test_each_structure_is_converted_with_all_its_weights_its_function_and_timm_s_contract(names):
    for number, name in enumerate(one_of_each(names)):
        vit = drawn(name).double()
        x = torch.randn(1, vit.in_chans, *vit.patch_embed.img_size, dtype=torch.float64)
        converted = from_softmax(vit, softmax_blocks=(0, 1))
        assert converted.taken == list(vit.state_dict()) and converted.new == []
        with torch.no_grad():
            torch.testing.assert_close(converted.model(x), vit(x), rtol=1e-10, atol=1e-10)
        converted = from_softmax(vit, "taylorshift", softmax_blocks=(0,))
        own = converted.model.state_dict()
        assert all(torch.equal(own[key], value) for key, value in vit.state_dict().items()), name
        ours = {"relative.table", "temperature", "value_conv.weight"}
        assert set(converted.new) == {f"blocks.1.attn.{part}" for part in ours}
        with torch.no_grad():
            assert converted.model(x).isfinite().all() and converted.left_out == []
        if number % 6 == 0:
            attention = ("kernelized", ["taylorshift", "window"])[number % 2]
            model = from_softmax(vit.float(), attention, softmax_blocks=()).model.train()
            assert model.default_cfg["architecture"] == "converted_vit"
            rows, columns = model.patch_embed.patch_size
            keeps_contract(model, torch.randn(2, 3, 5 * rows, 3 * columns), (5, 3), 5)
