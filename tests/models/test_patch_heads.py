"""Heads on patch features: the mean of the largest outputs, absent patches, attention blocks."""

import pytest
import timm
import torch

import visionattn.models  # noqa: F401  registers the models
from visionattn.models.bag import BagEncoder
from visionattn.models.patch_heads import KeptMaps, PatchClassifier
from visionattn.models.patches import pool_present
from visionattn.models.registration import create
from visionattn.models.segmentation import Segmenter

TIMM = dict(patch_size=8, embed_dim=12, depth=4, num_heads=3, dynamic_img_size=True)
OURS = dict(patch_size=8, embed_dim=12, depth=4, num_heads=3, horizon=1)


def built(name: str, task: str, args: dict) -> torch.nn.Module:
    torch.manual_seed(0)
    model = create(name, task, 5, 3, args).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
    return model


@pytest.mark.parametrize("largest", [1, 3, 7, 99])
def test_the_largest_values_of_present_patches_count(largest):
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randn(3, 2 + 13, 4, generator=draw, dtype=torch.float64)
    present = torch.rand(3, 13, generator=draw) < 0.6
    present[0] = True
    present[2] = torch.arange(13) == 4  # a single patch
    tokens[:, 2:][~present] = float("nan")
    found = pool_present(tokens, present, f"top{largest}", 2, with_prefix=False)
    for image in range(3):
        own = tokens[image, 2:][present[image]]
        for channel in range(4):
            best = sorted(own[:, channel].tolist(), reverse=True)[:largest]
            assert found[image, channel].item() == pytest.approx(sum(best) / len(best), abs=1e-12)
    whole = pool_present(tokens[:1], None, f"top{largest}", 2, with_prefix=False)
    torch.testing.assert_close(whole, found[:1])


def test_a_classifier_is_a_linear_layer_on_the_maps_of_its_blocks():
    model = built("vit_tiny_patch16_224", "classification", TIMM | {"head_blocks": [1, -2]})
    body = timm.create_model("vit_tiny_patch16_224", num_classes=0, **TIMM).double().eval()
    body.load_state_dict(model.backbone.state_dict(), strict=False)
    x = torch.randn(2, 3, 40, 24, dtype=torch.float64)
    maps = torch.cat(body.forward_intermediates(x, indices=[1, 2], norm=True)[1], 1)
    assert model.forward_intermediates(x)[0].equal(maps)
    scores = torch.einsum("bdhw,cd->bchw", maps, model.head.weight[:, :, 0, 0])
    scores = (scores + model.head.bias[:, None, None]).flatten(2)
    best = scores.sort(2, descending=True).values[:, :, :5].mean(2)
    torch.testing.assert_close(model(x), best)
    assert len(model.blocks) == 3


@pytest.mark.parametrize("task", ["classification", "segmentation"])
@pytest.mark.parametrize("attention", ["kernelized", "taylorshift"])
def test_the_unfilled_part_of_a_canvas_has_no_effect(task, attention):
    head = dict(head_hidden=8, head_depth=2, head_attention=attention)
    head |= {"head_stride": 4} if task == "segmentation" else {}
    model = built("scaleformer_vit_t", task, OURS | head)
    x, sizes = torch.randn(1, 3, 24, 40, dtype=torch.float64), torch.tensor([[24, 40]])
    canvas = torch.full((1, 3, 48, 56), float("nan"), dtype=torch.float64)
    canvas[..., :24, :40] = x
    found = model(canvas, sizes=sizes)
    # Beyond the last cell, masks are interpolated with repeated cells, as at an image's edge.
    found = found[..., :24, :40] if task == "segmentation" else found
    torch.testing.assert_close(found, model(x))


def test_the_blocks_of_a_head_see_where_patches_are():
    head = dict(head_hidden=8, head_depth=1)
    model = built("vit_tiny_patch16_224", "classification", TIMM | head)
    assert isinstance(model.encoder, BagEncoder)
    model.backbone = KeptMaps(12, (8, 8))
    maps = torch.randn(1, 12, 5, 7, dtype=torch.float64)
    places = torch.cartesian_prod(torch.arange(5), torch.arange(7))
    mixed = torch.randperm(35)
    tokens = model.neck(maps).flatten(2).mT[:, mixed]
    model.encoder.global_pool = "max"
    wanted = model.encoder(tokens, places[mixed][None])
    torch.testing.assert_close(model.forward_patches(maps).flatten(2).amax(2), wanted)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (PatchClassifier, dict(head_top=-1), "expected head_top to be a number of patches"),
        (PatchClassifier, dict(head_depth=1), "head_depth needs a hidden layer"),
        (PatchClassifier, dict(head_drop=0.1), "head_drop needs a hidden layer"),
        (PatchClassifier, dict(head_blocks=[4]), "head_blocks"),
        (Segmenter, dict(head_drop=0.1), "head_drop needs a hidden layer"),
        (Segmenter, dict(head_attention="taylorshift"), "head_attention needs blocks in the head"),
        (Segmenter, dict(head_hidden=-3), "head_hidden must be an integer of at least 0, got -3"),
        (Segmenter, dict(head_hidden=8, head_depth="2"), "head_depth must be .*, got '2'"),
    ],
)
def test_heads_refuse_options_that_do_nothing(kind, options, words):
    body = timm.create_model("vit_tiny_patch16_224", num_classes=0, **TIMM)
    with pytest.raises(ValueError, match=words):
        kind(body, 3, **options)


def test_any_width_of_the_hidden_layer_has_attention_heads():
    body = timm.create_model("vit_tiny_patch16_224", num_classes=0, **TIMM)
    model = PatchClassifier(body, 3, head_hidden=200, head_depth=1)
    assert model.encoder.blocks[0].attn.num_heads == 2


VIT = "vit_tiny_patch16_224"
UNFIT = [
    (VIT, "classification", "head_stride", "head_stride has no effect for data.task classif"),
    (VIT, "segmentation", "head_top", "head_top has no effect for data.task segmentation"),
    ("resnet18", "classification", "head_top", "with patch features"),
]


def test_an_option_of_another_task_or_model_is_refused():
    for name, task, option, words in UNFIT:
        with pytest.raises(ValueError, match=words):
            create(name, task, 3, 3, {option: 4})


def test_a_segmentation_becomes_the_classifier_of_its_largest_patches(tmp_path):
    from visionattn.models.conversion import convert
    from visionattn.models.weights import DataSpec, load_model, save_model

    args = TIMM | dict(head_blocks=[1], head_hidden=8, head_depth=1)
    model, names = built("vit_tiny_patch16_224", "segmentation", args), tuple("abcde")
    half, task = (0.5,) * 3, "segmentation"
    spec = DataSpec(3, 5, names, half, half, None, None, "native", task=task)
    path, output = tmp_path / "masks.safetensors", tmp_path / "classes.safetensors"
    save_model(path, model, "vit_tiny_patch16_224", args, spec)
    convert([str(path), "--top-patches", "3", "--output", str(output)], lambda line: None)
    made = load_model(output)
    assert made.data_spec.class_names == names[1:]
    x = torch.randn(2, 3, 40, 24, dtype=torch.float64)
    logits = model.forward_cells(x).flatten(2)
    wanted = (logits[:, 1:] - logits[:, :1]).sort(2, descending=True).values[:, :, :3].mean(2)
    torch.testing.assert_close(made.double()(x), wanted)
    with pytest.raises(ValueError, match="remove seed"):
        argv = [str(path), "--top-patches", "3", "--seed", "1", "--output", f"{output}2"]
        convert(argv, lambda line: None)
    with pytest.raises(ValueError, match="needs a segmentation model"):
        convert([str(output), "--top-patches", "3", "--output", f"{output}2"], lambda line: None)


def test_the_attribution_of_a_class_is_its_largest_patches():
    from visionattn.models.attribution import find_attribution

    head = dict(head_blocks=[1], head_top=3)
    model = built("vit_tiny_patch16_224", "classification", TIMM | head)
    x = torch.randn(1, 3, 40, 24, dtype=torch.float64)
    found = find_attribution(model, x, target=2)
    maps = model.maps(x)[0]
    scores = torch.einsum("dhw,cd->chw", maps, model.head.weight[:, :, 0, 0]).detach()
    scores = scores + model.head.bias.detach()[:, None, None]
    wanted = torch.zeros(5, 3, dtype=torch.float64)
    for number, own in enumerate(scores):
        share = ((number == 2) - 1 / 5) / 3
        for place in own.flatten().argsort(descending=True)[:3].tolist():
            wanted[divmod(place, 3)] += share * own.flatten()[place]
    torch.testing.assert_close(found.patches, wanted)
    logits = model(x)[0].detach()
    assert found.margin == pytest.approx(float(logits[2] - logits.mean()), abs=1e-12)
