"""A timm ViT as one of our models: its function, its weights, and one line where it cannot be."""

import copy
import json
from functools import partial

import pytest
import timm
import torch
from timm.layers import RmsNorm, SwiGLUPacked
from timm.models import VisionTransformer
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock
from torch import nn

from tests.helpers.changed_modules import adapt, hook, patch, prune_all
from visionattn.models import VisionAttnTransformer, from_softmax
from visionattn.models.conversion import ACCEPTED
from visionattn.models.weights import DataSpec, load_model, save_model

BODY = dict(img_size=(48, 32), patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=5)


def teacher(seed=0, **options):
    """timm's own model in float64, none of whose weights is zero or one."""
    torch.manual_seed(seed)
    vit = VisionTransformer(**(BODY | options)).double().eval()
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return vit


def image(vit, seed=1, size=None):
    generator = torch.Generator().manual_seed(seed)
    height, width = size or vit.patch_embed.img_size
    return torch.randn(2, vit.in_chans, height, width, generator=generator, dtype=torch.float64)


BODIES = {
    "plain": dict(),
    "no class token": dict(class_token=False, global_pool="avg"),
    "registers": dict(reg_tokens=4),
    "registers without position": dict(reg_tokens=3, no_embed_class=True),
    "no position": dict(pos_embed="none"),
    "norm of queries and keys": dict(qk_norm=True),
    "torch's LayerNorm": dict(norm_layer=partial(nn.LayerNorm, eps=1e-2)),
    "no final norm": dict(final_norm=False),
    "norm before pooling": dict(fc_norm=False, global_pool="avg"),
    "packed SwiGLU": dict(mlp_layer=SwiGLUPacked, act_layer=nn.SiLU, mlp_ratio=2.67 * 2),
    "no biases": dict(qkv_bias=False, proj_bias=False),
    "norms within": dict(scale_attn_norm=True, scale_mlp_norm=True),
    "pooling by attention, registers": dict(class_token=False, global_pool="map", reg_tokens=4),
    "pooling by refined tokens": dict(global_pool="prr"),
    "no pooling": dict(global_pool=""),
    "a ratio that rounds down": dict(embed_dim=57, mlp_ratio=173.5 / 57),
    "two channels, oblong patches": dict(in_chans=2, patch_size=(8, 4)),
}


@pytest.mark.parametrize("body", BODIES)
def test_where_all_blocks_stay_a_softmax_the_model_computes_what_timm_does(body):
    vit = teacher(**BODIES[body])
    converted = from_softmax(vit, softmax_blocks=range(len(vit.blocks)))
    x = image(vit)
    with torch.no_grad():
        torch.testing.assert_close(converted.model(x), vit(x), rtol=1e-12, atol=1e-12)
        features = vit.forward_features(x)
        torch.testing.assert_close(converted.model.forward_features(x), features)
    assert converted.new == converted.left_out == converted.resampled == []
    assert converted.taken == list(vit.state_dict())


@pytest.mark.parametrize(
    "body, attention",
    [("norm of queries and keys", "taylorshift"), ("packed SwiGLU", "window")],
)
def test_every_weight_of_the_teacher_is_copied_and_the_teacher_left_alone(body, attention):
    vit = teacher(**BODIES[body])
    before = copy.deepcopy(vit.state_dict())
    converted = from_softmax(vit, attention, softmax_blocks=(-2,))
    own = converted.model.state_dict()
    for name, value in before.items():
        assert torch.equal(vit.state_dict()[name], value)
        assert torch.equal(own[name], value) and own[name].data_ptr() != value.data_ptr()
    assert sorted(converted.taken + converted.new) == sorted(own)
    ours = {"relative.table", "value_conv.weight"}
    ours |= {"temperature"} if attention == "taylorshift" else set()
    assert set(converted.new) == {f"blocks.{i}.attn.{leaf}" for i in (0, 2) for leaf in ours}


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


def test_windows_of_the_whole_grid_see_what_a_softmax_sees():
    """Tables of windows start at zero, as any other start would change the scores."""
    vit = teacher(reg_tokens=2)
    model = from_softmax(vit, ["window", "softmax", "kernelized"], window_size=6).model
    assert [block.attn.attention for block in model.blocks] == ["window", "softmax", "kernelized"]
    assert model.blocks[1].attn.relative is None
    with torch.no_grad():
        tokens = vit._pos_embed(vit.patch_embed(image(vit)))
        torch.testing.assert_close(model.blocks[0](tokens), vit.blocks[0](tokens))


@pytest.mark.parametrize(
    "body, size", [("registers", (64, 24)), ("registers without position", (24, 40))]
)
def test_position_is_resampled_to_images_of_other_sizes_as_timm_does(body, size):
    vit = teacher(dynamic_img_size=True, **BODIES[body])
    model = from_softmax(vit, softmax_blocks=range(3)).model
    x = image(vit, size=size)
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
    assert converted.lines()[0] == "43 of 45 tensors are those of VisionTransformer"


def test_grey_images_see_the_sum_of_the_filters():
    vit = teacher()
    model = from_softmax(vit, softmax_blocks=range(3), in_chans=1).model
    x = image(vit)[:, :1]
    with torch.no_grad():
        torch.testing.assert_close(model(x), vit(x.expand(-1, 3, -1, -1)))


def test_colours_share_a_grey_filter():
    vit = teacher(in_chans=1)
    model = from_softmax(vit, softmax_blocks=range(3), in_chans=3).model
    x = image(vit)
    with torch.no_grad():
        torch.testing.assert_close(model(x.expand(-1, 3, -1, -1)), vit(x))


def test_images_are_padded_where_the_teacher_pads_them():
    vit = teacher(dynamic_img_size=True, dynamic_img_pad=True)
    x = image(vit, size=(45, 30))
    with torch.no_grad():
        torch.testing.assert_close(from_softmax(vit, softmax_blocks=range(3)).model(x), vit(x))


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


def named(name="vit_tiny_patch16_224", **options):
    torch.manual_seed(0)
    small = dict(depth=2, embed_dim=24, num_heads=3, img_size=32)
    return timm.create_model(name, **(small | options)).eval()


def test_a_file_of_it_gives_the_model_back(tmp_path):
    vit = named("vit_medium_patch16_clip_224", num_classes=7)
    converted = from_softmax(vit, ["taylorshift", "window"], softmax_blocks=[0])
    assert json.loads(json.dumps(converted.args)) == converted.args
    path = tmp_path / "converted.safetensors"
    save_model(path, converted.model, converted.name, converted.args, converted.spec)
    model, x = load_model(path), torch.randn(2, 3, 48, 32)
    assert torch.equal(model(x), converted.model(x))
    assert model.data_spec == converted.spec
    assert model.data_spec.mean == vit.pretrained_cfg["mean"] != (0.485, 0.456, 0.406)


def test_dtype_mode_and_device_are_the_teachers():
    vit = named().to(torch.bfloat16).train()
    model = from_softmax(vit).model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model.training
    assert not from_softmax(named()).model.training
    with torch.device("meta"):
        vit = timm.create_model("vit_base_patch16_224")
    assert all(p.is_meta for p in from_softmax(vit, "taylorshift").model.parameters())


# What is refused, in one line


class Changed(VisionTransformer):
    """A class that pools in a way of its own."""

    def pool(self, x, pool_type=None):
        return x[:, -1]


def with_another_eps(vit):
    vit.blocks[1].norm2.eps = 0.5
    return vit


REFUSED = {
    r"its blocks\.0 is ResPostBlock\(\)": dict(block_fn=ResPostBlock),
    r"it has no blocks\.0\.mlp\.fc1\.weight": dict(block_fn=ParallelScalingBlock),
    r"its patch_embed\.norm is LayerNorm": dict(embed_norm_layer="layernorm"),
    r"its blocks\.0\.mlp is GluMlp\(\)": dict(
        mlp_layer=partial(timm.layers.GluMlp, act_layer=nn.GELU)
    ),
    r"its blocks\.0\.norm1 is RmsNorm": dict(norm_layer=RmsNorm),
    r"its blocks\.0\.mlp\.act is ReLU": dict(act_layer="relu"),
    r"it has no blocks\.0\.": dict(depth=0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_parts_that_ours_have_not_are_named(message):
    with pytest.raises(
        ValueError, match=f"VisionTransformer cannot be converted: {message}"
    ) as error:
        from_softmax(VisionTransformer(**(BODY | REFUSED[message])))
    assert "\n" not in str(error.value) and str(error.value).endswith(f"; {ACCEPTED}")


def test_models_that_are_no_vision_transformer_of_timm_are_refused():
    for vit, message in {
        nn.Linear(2, 2): "Linear cannot be converted: its class is Linear",
        timm.create_model("test_efficientnet"): "test_efficientnet cannot be converted: its class",
        Changed(**BODY): "its class is Changed",
        VisionAttnTransformer(**BODY): "its class is VisionAttnTransformer",
        with_another_eps(teacher()): "its blocks.1.norm2 is LayerNorm.*eps=0.5",
    }.items():
        with pytest.raises(ValueError, match=message):
            from_softmax(vit)


@pytest.mark.parametrize(
    "change, message",
    [
        (adapt("blocks.1.attn.qkv"), r"its blocks\.1\.attn\.qkv is Adapted"),
        (hook("blocks.1", torch.sin), r"blocks\.1 has hooks or another forward"),
        (patch("blocks.1.mlp"), r"blocks\.1\.mlp has hooks or another forward"),
        (prune_all, r"it has no blocks\.0\.mlp\.fc1\.weight"),
    ],
    ids=["LoRA", "hook", "another forward", "pruned"],
)
def test_what_is_not_in_the_weights_is_not_left_out(change, message):
    vit = teacher()
    change(vit)
    with pytest.raises(ValueError, match=f"VisionTransformer cannot be converted: {message}"):
        from_softmax(vit)


WRONG = {
    "there is no block 3; the 3 blocks are 0 to 2": dict(softmax_blocks=[0, 3]),
    "softmax_blocks: wanted a list of indices of blocks, got 2": dict(softmax_blocks=2),
    "attention 'linear': wanted one of": dict(attention="linear"),
    "wanted a name, or 3, one for each block, got 2": dict(attention=["window", "softmax"]),
    "got embed_dim; the rest is the teacher's, 24": dict(embed_dim=48),
    "expected options among relative, horizon, .*, got layers": dict(layers=2),
    "horizon=2 would do nothing: all blocks": dict(horizon=2, softmax_blocks=range(3)),
    "num_heads 5 does not divide the width 24": dict(num_heads=5),
    "cannot be converted with these options: value_conv='wide'": dict(value_conv="wide"),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_one_line(message):
    with pytest.raises(ValueError, match=message) as error:
        from_softmax(teacher(), **WRONG[message])
    assert "\n" not in str(error.value)


def test_gates_and_narrow_heads_are_refused():
    vit = teacher()
    vit.blocks[1].attn.gate = nn.Linear(24, 24)
    with pytest.raises(ValueError, match=r"its blocks\.1\.attn\.gate is Linear"):
        from_softmax(vit)
    vit = teacher()
    vit.blocks[1].attn.head_dim = 4
    with pytest.raises(ValueError, match=r"its blocks\.1\.attn is Attention"):
        from_softmax(vit)


def test_heads_that_are_normalised_or_pool_are_not_regrouped():
    with pytest.raises(ValueError, match="its norms or its pooling have heads too"):
        from_softmax(teacher(qk_norm=True), num_heads=6)
    with pytest.raises(ValueError, match="its norms or its pooling have heads too"):
        from_softmax(teacher(class_token=False, global_pool="map"), num_heads=6)
