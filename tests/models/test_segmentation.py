"""The head of pixels: its logits against loops, padding, strips, and what it refuses."""

from dataclasses import replace

import pytest
import timm
import torch
import torch.nn.functional as F

import visionattn  # noqa: F401  registers the models
from visionattn.models.patches import takes_sizes
from visionattn.models.registration import create
from visionattn.models.segmentation import IGNORED, Segmenter
from visionattn.models.weights import DataSpec, check_spec

BODY = dict(img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2)
CLASSES = 5


def made(name="scaleformer_vit_t", **args) -> Segmenter:
    torch.manual_seed(0)
    model = create(name, "segmentation", CLASSES, 3, BODY | args)
    torch.nn.init.normal_(model.head.weight)
    return model.eval()


def by_loops(model: Segmenter, images: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """Logits of an image ``[1, C, H, W]``, patch by patch and cell by cell."""
    maps = model.backbone.forward_intermediates(
        images, indices=blocks, norm=True, intermediates_only=True
    )
    features = torch.cat([norm(each) for norm, each in zip(model.norms, maps, strict=True)], 1)[0]
    down, across = model.cells
    rows, columns = features.shape[1:]
    cells = torch.zeros(CLASSES, rows * down, columns * across)
    weight = model.head.weight[:, :, 0, 0].view(CLASSES, down, across, -1)
    bias = model.head.bias.view(CLASSES, down, across)
    for i in range(rows * down):
        for j in range(columns * across):
            at = i % down, j % across
            cells[:, i, j] = weight[:, *at] @ features[:, i // down, j // across] + bias[:, *at]
    size = images.shape[2:]
    return F.interpolate(cells[None], size, mode="bilinear", align_corners=False)


@pytest.mark.parametrize(
    "name, blocks, stride",
    [
        ("scaleformer_vit_t", [0, 2], 1),
        ("taylorshift_vit_t", [1], 4),
        ("vit_tiny_patch16_224", [0, 2], 4),
    ],
)
@torch.no_grad()
def test_logits_are_those_of_loops(name, blocks, stride):
    more = {"dynamic_img_size": True} if name.startswith("vit") else {}
    model = made(name, head_blocks=blocks, head_stride=stride, **more)
    images = torch.randn(1, 3, 24, 40)
    torch.testing.assert_close(model(images), by_loops(model, images, blocks), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_bodies_of_ours_take_sizes_and_what_a_body_pads_is_cut_off():
    padding = made(dynamic_img_pad=True)
    assert takes_sizes(padding) and not takes_sizes(made("vit_tiny_patch16_224"))
    assert padding(torch.randn(1, 3, 20, 27)).shape == (1, CLASSES, 20, 27)


@pytest.mark.parametrize("stride, strip", [(1, 3), (8, 1)])
def test_masks_in_strips_are_the_largest_logits(strip, stride):
    model = made(head_stride=stride)
    images = torch.randn(2, 3, 40, 24)
    with torch.no_grad():
        logits = model(images)
    first, second = logits.topk(2, dim=1).values.unbind(1)
    found = model.masks(images, strip=strip)
    assert found.dtype == torch.uint8 and found.shape == (2, 40, 24)
    sure = first - second > 1e-4
    assert sure.float().mean() > 0.99
    assert torch.equal(found[sure].long(), logits.argmax(1)[sure])


def test_logits_that_are_not_finite_have_no_class():
    model = made(head_stride=1)
    model.head.bias.data[0] = torch.nan  # of the first class and the first cell of each patch
    found = model.masks(torch.randn(1, 3, 16, 16))[0]
    wanted = torch.zeros(16, 16, dtype=torch.bool)
    wanted[::8, ::8] = True
    assert torch.equal(found == IGNORED, wanted)


HEADS = [
    (dict(head_blocks=[3]), "head_blocks: expected blocks 0 to 2 of 3, got 3"),
    (dict(head_blocks=[]), "head_blocks: expected at least one block, got none"),
    (dict(head_stride=3), "expected a head_stride that divides a patch of 8 x 8 pixels, got 3"),
    (dict(head_blocks=7), "head_blocks: expected a list of indices of blocks, got 7"),
    (dict(head_stride="4"), "head_stride must be an integer, got '4'"),
    (dict(name="scaleformer_vit_t_pyramid"), "with patch features, got the pyramid"),
]
SPECS = [
    (dict(num_classes=0), "data.num_classes 0"),
    (dict(colours=((0, 0, 0),)), "data.colours "),
    (dict(colours=((0, 0, -1), (0, 0, 0))), "data.colours "),
]


def test_heads_and_files_of_pixels_that_cannot_be_are_one_line():
    for args, words in HEADS:
        with pytest.raises(ValueError) as caught:
            made(**args)
        assert words in str(caught.value) and "\n" not in str(caught.value)
    spec = DataSpec(3, 2, (), (0.5,) * 3, (0.2,) * 3, None, 32, task="segmentation")
    check_spec(spec)
    for wrong, words in SPECS:
        with pytest.raises(ValueError) as caught:
            check_spec(replace(spec, **wrong))
        assert words in str(caught.value)
    with pytest.raises(ValueError, match="with patch features, .* got ResNet"):
        Segmenter(timm.create_model("resnet10t", num_classes=0), 2)


def test_parameters_are_grouped_by_depth_and_positions_do_not_decay():
    from timm.optim import create_optimizer_v2

    model = made(pos_embed="learn")
    groups = create_optimizer_v2(
        model, opt="adamw", lr=1.0, weight_decay=0.1, layer_decay=0.5
    ).param_groups
    where = {
        id(weight): (group["lr_scale"], group["weight_decay"])
        for group in groups
        for weight in group["params"]
    }
    of = {name: where[id(weight)] for name, weight in model.named_parameters()}
    assert of["head.weight"] == (1.0, 0.1)
    assert of["backbone.blocks.2.attn.qkv.weight"][0] == 0.5
    assert of["backbone.blocks.0.attn.qkv.weight"] == (0.125, 0.1)
    assert of["backbone.patch_embed.proj.weight"] == (0.0625, 0.1)
    assert of["backbone.pos_embed"] == of["backbone.cls_token"] == (0.0625, 0.0)
    assert all(of[f"backbone.blocks.{i}.attn.relative.table"][1] == 0 for i in range(3))


def test_a_broad_patch_has_square_cells():
    model = made(patch_size=(8, 12), img_size=(32, 48))
    assert model.stride == 4 and model.cells == (2, 3)
    assert model(torch.randn(1, 3, 16, 36)).shape == (1, CLASSES, 16, 36)
