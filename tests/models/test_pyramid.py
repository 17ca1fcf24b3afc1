"""Models with maps at four strides: their maps, their weights, and the decoders that take them."""

import contextlib

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
from timm.models import create_model
from torch import nn

from visionattn.models.pyramid import SimplePyramid
from visionattn.models.registration import create
from visionattn.models.weights import DataSpec, load_model, save_model

FAMILIES = ("scaleformer_vit", "taylorshift_vit", "taylorshift_abs_vit")
NAMES = [f"{family}_{letter}_pyramid" for family in FAMILIES for letter in "tsbl"]
SMALL = dict(embed_dim=24, depth=2, num_heads=3, pyramid_channels=20)
STRIDES = [4, 8, 16, 32]


def image(height=96, width=160, batch=2):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, 3, height, width, generator=generator)


def shapes(maps):
    return [tuple(x.shape) for x in maps]


def test_every_size_of_every_family_has_a_pyramid():
    assert timm.list_models("*_pyramid") == sorted(NAMES)


def test_full_models_say_on_the_meta_device_what_their_maps_are_whatever_the_patch():
    with torch.device("meta"):
        model = create_model("taylorshift_vit_b_pyramid", features_only=True)
        maps = model(torch.empty(1, 3, 80, 112))
    assert model.feature_info.reduction() == STRIDES
    assert model.feature_info.channels() == [256] * 4
    assert shapes(maps) == [(1, 256, 20, 28), (1, 256, 10, 14), (1, 256, 5, 7), (1, 256, 3, 4)]
    for patch in (1, 64):
        options = SMALL | dict(patch_size=patch)
        model = create_model("scaleformer_vit_t_pyramid", features_only=True, **options)
        assert shapes(model(image(64, 128, 1))) == [(1, 20, 64 // s, 128 // s) for s in STRIDES]
        assert model.feature_info.reduction() == STRIDES


def test_maps_are_those_of_the_published_layers():
    """Written out here from section 3 of the paper and its code, for patches of 16 px."""
    torch.manual_seed(0)
    pyramid = SimplePyramid(12, 16, 7)
    for parameter in pyramid.parameters():
        nn.init.normal_(parameter)
    x, own = torch.randn(2, 12, 6, 8), [list(level.parameters()) for level in pyramid.levels]

    def norm(x, weight, bias):
        mean, variance = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
        scale, shift = weight[:, None, None], bias[:, None, None]
        return (x - mean) / (variance + 1e-6).sqrt() * scale + shift

    def output(x, one, norm_1, bias_1, three, norm_3, bias_3):
        x = norm(torch.einsum("oi,bihw->bohw", one[:, :, 0, 0], x), norm_1, bias_1)
        return norm(nn.functional.conv2d(x, three, padding=1), norm_3, bias_3)

    def doubled(x, weight, bias):
        parts = torch.einsum("bihw,iouv->bohuwv", x, weight)
        return parts.flatten(4, 5).flatten(2, 3) + bias[:, None, None]

    finest = nn.functional.gelu(norm(doubled(x, *own[0][:2]), *own[0][2:4]))
    coarsest = torch.stack([x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]).amax(0)
    expected = [
        output(doubled(finest, *own[0][4:6]), *own[0][6:]),
        output(doubled(x, *own[1][:2]), *own[1][2:]),
        output(x, *own[2]),
        output(coarsest, *own[3]),
    ]
    for level, (found, wanted) in enumerate(zip(pyramid(x, [0, 1, 2, 3]), expected, strict=True)):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, msg=f"level {level}")


def test_maps_are_of_the_last_block_and_those_asked_for():
    model = create_model("taylorshift_vit_t_pyramid", fc_norm=False, **SMALL).eval()
    nn.init.normal_(model.norm.weight)  # else the norms of the pyramid undo it
    x = image(64, 32)
    final, maps = model.forward_intermediates(x)
    plain = super(type(model), model).forward_intermediates(x, indices=1, intermediates_only=True)
    assert all(map(torch.equal, maps, model.pyramid(plain[0], [0, 1, 2, 3])))
    assert torch.equal(final, model.forward_features(x))
    two = model.forward_intermediates(x, indices=[2, 0], intermediates_only=True)
    assert all(map(torch.equal, two, (maps[2], maps[0])))
    normed = model.forward_intermediates(x, indices=1, norm=True, intermediates_only=True)
    grid = final[:, 1:].mT.unflatten(2, (4, 2))
    torch.testing.assert_close(normed[0], model.pyramid(grid, [3])[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(normed[0], maps[3], atol=1e-2)
    said = model.forward_intermediates(x, return_prefix_tokens=True, output_dict=True)
    assert all(map(torch.equal, said["image_intermediates"], maps))
    assert shapes(said["image_intermediates_prefix"]) == [(2, 1, 24)] * 4
    with pytest.raises(ValueError, match="output_fmt 'NHWC': expected NCHW or NLC"):
        model.forward_intermediates(x, output_fmt="NHWC")


def test_a_wrapper_of_features_has_no_parameter_that_receives_no_gradient():
    model = create_model(
        "scaleformer_vit_t_pyramid", features_only=True, out_indices=(1, 3), **SMALL
    )
    assert model.feature_info.reduction() == [8, 32]
    maps = model(image())
    assert shapes(maps) == [(2, 20, 12, 20), (2, 20, 3, 5)]
    sum(x.square().sum() for x in maps).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


FINETUNED = dict(embed_dim=24, depth=4, num_heads=4, global_pool="max", class_token=False)


@pytest.fixture
def finetuned(tmp_path):
    """A file as a run of ``configs/finetune.yaml`` writes it, and its model."""
    model = create_model("taylorshift_vit_t", num_classes=4, **FINETUNED).eval()
    spec = DataSpec(3, 4, tuple("abcd"), (0.5,) * 3, (0.5,) * 3, None, 64)
    save_model(tmp_path / "best.safetensors", model, "taylorshift_vit_t", FINETUNED, spec)
    return model, str(tmp_path / "best.safetensors")


@pytest.mark.filterwarnings("ignore:not in the weights", "ignore:Encoder does not have prefix")
def test_a_decoder_and_timm_build_the_model_that_a_file_of_a_run_states(finetuned):
    model, path = finetuned
    name, x = "taylorshift_vit_t", image(64, 32)
    options = dict(encoder_weights=None, classes=3, checkpoint_path=path)
    unet = smp.Unet(f"tu-{name}_pyramid", pyramid_channels=8, **options)
    dpt = smp.DPT(f"tu-{name}", decoder_fusion_channels=8, **options)
    assert dpt(x).shape == unet(x).shape == (2, 3, 64, 32)
    overlay = dict(pretrained=True, pretrained_cfg_overlay=dict(file=path))
    for given in (dict(checkpoint_path=path), overlay):
        assert torch.equal(create_model(name, drop_path_rate=0.1, **given).eval()(x), model(x))
        wrapper = create_model(name, features_only=True, out_indices=[3], **given).eval()
        kept = model.forward_intermediates(x, indices=[3], intermediates_only=True)
        assert torch.equal(wrapper(x)[0], kept[0])
        pyramid = create_model(f"{name}_pyramid", features_only=True, **given)
        bodies = (pyramid.model, unet.encoder.model.model, dpt.encoder.model)
        for body in bodies:
            assert torch.equal(body.blocks[3].mlp.fc1.weight, model.blocks[3].mlp.fc1.weight)
    assert create_model(name, **overlay).data_spec.class_names == tuple("abcd")
    assert create_model(name, num_classes=7, in_chans=1, **overlay)(x[:, :1]).shape == (2, 7)


def test_what_has_no_pyramid_or_contradicts_a_file_is_one_line(finetuned):
    scaleformer, taylorshift = "scaleformer_vit_t_pyramid", "taylorshift_vit_t_pyramid"
    file = dict(checkpoint_path=finetuned[1])
    for name, given, message in (
        (scaleformer, dict(patch_size=14), "expected a patch_size that is a power of two up to "),
        (
            scaleformer,
            dict(patch_size=(8, 16)),
            "expected square patches for a pyramid, got 8 x 16",
        ),
        (taylorshift, dict(depth=3) | file, "expected depth 4 as in .*, got 3"),
        (taylorshift, dict(num_heads=2) | file, "expected num_heads 4 as in .*, got 2"),
        ("scaleformer_vit_t", file, "got a taylorshift_vit_t with attention taylorshift"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            create_model(name, **given)
        assert "\n" not in str(error.value)


BODY = dict(embed_dim=24, depth=4, num_heads=3)
KINDS = {
    "classes": ("scaleformer_vit_t", "classification", BODY),
    "masks": ("taylorshift_vit_t", "segmentation", BODY | dict(head_blocks=[1, 3])),
    "a pyramid": ("scaleformer_vit_t_pyramid", "classification", BODY | dict(pyramid_channels=20)),
    "timm's": ("vit_tiny_patch16_224", "classification", BODY | dict(dynamic_img_size=True)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_checkpoint_is_an_encoder_of_features_and_ours_of_a_pyramid(kind, tmp_path):
    name, task, args = KINDS[kind]
    spec = DataSpec(3, 5, (), (0.5,) * 3, (0.5,) * 3, None, 224, task=task)
    model, path = create(name, task, 5, 3, args).eval(), tmp_path / "best.safetensors"
    save_model(path, model, name, args, spec)
    body, x = getattr(model, "backbone", model), image(64, 96)
    encoder = load_model(path, features_only=True)
    count = 4 if kind == "a pyramid" else 3
    with torch.inference_mode():
        wanted = body.forward_intermediates(x, indices=count, intermediates_only=True)
        found = encoder(x)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    assert encoder.feature_info.channels() == [y.shape[1] for y in found]
    assert encoder.data_spec.num_classes == 5 and not encoder.training
    if kind == "timm's":
        with pytest.raises(
            ValueError, match="a pyramid needs a model of visionattn, got a vit_tiny"
        ):
            load_model(path, pyramid=True)
        return
    fresh = (
        contextlib.nullcontext()
        if kind == "a pyramid"
        else pytest.warns(match="kept at their initial values")
    )
    with fresh:
        encoder = load_model(path, pyramid=True, features_only=True)
    own, given = encoder.model.blocks.state_dict(), body.blocks.state_dict()
    assert own.keys() == given.keys() and all(torch.equal(own[key], given[key]) for key in own)
    channels = 20 if kind == "a pyramid" else 256
    with torch.inference_mode():
        maps = encoder(x)
    assert shapes(maps) == [(2, channels, 64 // s, 96 // s) for s in STRIDES]
    assert encoder.feature_info.reduction() == STRIDES
