"""Images that do not fill their canvas: a model gives each what it gives the image alone."""

import copy
import itertools

import pytest
import torch
from timm.models import create_model
from timm.models._features_fx import create_feature_extractor
from torch import nn
from torch._dynamo.testing import CompileCounter

HEIGHT, WIDTH, PATCH = 80, 112, 16
SIZES = ((80, 48), (33, 112), (48, 65), (16, 16), (80, 112))
"""Pixels that images of a canvas of 5 x 7 patches hold; two are no whole number of patches."""
SMALL = dict(embed_dim=24, depth=2, num_heads=3, num_classes=5, img_size=64)
GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e30, 7.0)


def small(name="scaleformer_vit_t", dtype=torch.float64, **options):
    """A model whose parameters are all away from their start."""
    torch.manual_seed(0)
    model = create_model(name, **(SMALL | options)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def batch(sizes=SIZES, dtype=torch.float64, patch=PATCH, garbage=GARBAGE):
    """Images, their sizes, and each image alone; beyond its patches each holds other garbage."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(len(sizes), 3, HEIGHT, WIDTH, generator=generator, dtype=dtype)
    alone = []
    for i, (height, width) in enumerate(sizes):
        rows, columns = (-(-pixels // patch) * patch for pixels in (height, width))
        alone.append(x[i : i + 1, :, :rows, :columns].clone())
        outside = torch.ones(HEIGHT, WIDTH, dtype=torch.bool)
        outside[:rows, :columns] = False
        x[i, :, outside] = garbage[i % len(garbage)]
    return x, torch.tensor(sizes), alone


def close(actual, expected, tolerance):
    """Of one shape, and no further apart than ``tolerance`` times the largest entry, or 1."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    if actual.numel():
        error, largest = (actual - expected).abs().max().item(), expected.abs().max().item()
        assert error <= tolerance * max(1.0, largest), f"off by {error:.1e}"


def gradients(model, loss):
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, grads, strict=True))


def assert_as_alone(model, x, sizes, alone, tolerance=1e-11, **options):
    """Logits, tokens, maps and, of all images together, gradients are those of each image alone."""
    prefix, weights = model.num_prefix_tokens, torch.randn(len(x), 5, dtype=x.dtype)
    logits = model(x, sizes=sizes, **options)
    tokens, maps = model.forward_intermediates(x, sizes=sizes, **options)
    assert torch.equal(tokens, model.forward_features(x, sizes=sizes, **options))
    single = [model(image, **options) for image in alone]
    close(logits, torch.cat(single), tolerance)
    for i, image in enumerate(alone):
        own_tokens, own_maps = model.forward_intermediates(image, **options)
        rows, columns = own_maps[0].shape[2:]
        close(tokens[i : i + 1, :prefix], own_tokens[:, :prefix], tolerance)
        patches = tokens[i : i + 1, prefix:].mT.unflatten(2, maps[0].shape[2:])
        own_patches = own_tokens[:, prefix:].mT.unflatten(2, (rows, columns))
        all_maps = [patches, *(of[i : i + 1] for of in maps)]
        for got, wanted in zip(all_maps, [own_patches, *own_maps], strict=True):
            close(got[..., :rows, :columns], wanted, tolerance)
            assert got[..., rows:, :].eq(0).all() and got[..., columns:].eq(0).all()
    ours = gradients(model, (logits * weights).sum())
    theirs = gradients(model, (torch.cat(single) * weights).sum())
    for name, wanted in theirs.items():
        close(ours[name], wanted, tolerance * 10)


ROWS = (
    dict(attention="kernelized", relative="joint", reg_tokens=3, init_values=0.1),
    dict(attention="kernelized", relative="flat", normalization="sum", global_pool="avgmax"),
    dict(attention="taylorshift", relative="axial", global_pool="token", centre_keys=True),
    dict(attention="softmax", relative="joint", global_pool="avg", value_conv=3),
    dict(attention=["window", "kernelized", "window"], depth=3, window_size=3),
    dict(feature_map="softmax", class_token=False, pre_norm=True, final_norm=False),
    dict(feature_map="random", qk_norm=True, horizon=0),
    dict(global_pool="prr", class_token=False),
    dict(global_pool="max", pool_include_prefix=True, reg_tokens=2),
    dict(global_pool="map", pool_include_prefix=True, reg_tokens=2),
    dict(global_pool="map"),
)


CAUSAL = (
    dict(relative="flat", horizon=2, value_conv=0),
    dict(relative="none", value_conv=0),
    dict(attention="softmax", relative="joint", value_conv=0),
)
ABSOLUTE = dict(name="taylorshift_abs_vit_t", global_pool="avg")
CASES = (
    *((options, {}) for options in ROWS),
    *((options, dict(is_causal=True)) for options in CAUSAL),
    # timm resamples the absolute position in single precision whatever the model is.
    (ABSOLUTE, dict(tolerance=1e-6)),
    (ABSOLUTE | dict(no_embed_class=True), dict(tolerance=1e-6)),
    (ABSOLUTE | dict(pos_antialias=False), dict(tolerance=1e-6)),
)


@pytest.mark.parametrize("options, how", CASES, ids=str)
def test_an_image_among_larger_ones_gives_what_it_gives_alone(options, how):
    assert_as_alone(small(**options), *batch(), **how)


@pytest.mark.parametrize(
    "attention, form", [("kernelized", "efficient"), ("taylorshift", "direct")]
)
def test_absent_patches_are_absent_in_each_form_and_on_grids_that_go_in_tiles(attention, form):
    options = dict(attention=attention, form=form, horizon=1, patch_size=4, depth=1)
    assert_as_alone(small(**options), *batch(((80, 48), (33, 112)), patch=4))


def test_without_pooling_each_patch_that_is_there_has_the_logits_it_has_alone():
    model, (x, sizes, alone) = small(global_pool="", class_token=False), batch()
    for logits, there, image in zip(
        model(x, sizes=sizes), model.present_patches(x, sizes), alone, strict=True
    ):
        close(logits[there], model(image)[0], 1e-11)


def test_patches_that_are_not_square_are_counted_by_their_own_height_and_width():
    model = small(patch_size=(16, 8), img_size=64)
    x, _, _ = batch(garbage=(0.0,))
    x[0, :, 48:], x[0, :, :, 40:] = float("nan"), float("nan")
    sizes = torch.tensor([(33, 34)] + 4 * [(80, 112)])
    alone = [x[:1, :, :48, :40], *x[1:].split(1)]
    assert_as_alone(model, x, sizes, alone)


def test_images_that_a_model_pads_by_itself_keep_their_padding():
    """Of 70 x 100 pixels the model makes 5 x 7 patches; in a batch as large as they are."""
    model = small(dynamic_img_pad=True, pos_embed="learn")
    x, _, _ = batch(garbage=(0.0,))
    x = x[:3, :, :70, :100].contiguous()
    sizes = torch.tensor([(70, 100), (33, 100), (70, 47)])
    alone = [x[:1], x[1:2, :, :33], x[2:, :, :, :47]]
    x[1, :, 33:48], x[2, :, :, 47:48] = 0, 0
    x[1, :, 48:], x[2, :, :, 48:] = float("nan"), float("inf")
    assert_as_alone(model, x, sizes, alone, tolerance=1e-6)


def test_a_mask_of_keys_takes_more_away():
    model, (x, sizes, alone) = small(attention="taylorshift", relative="flat"), batch()
    mask = torch.rand(5, 36, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[:, :2] = True
    logits = model(x, sizes=sizes, attn_mask=mask)
    there = model.present_patches(x, sizes)
    assert there.shape == (5, 35) and there.sum(1).tolist() == [15, 21, 15, 1, 35]
    for i, image in enumerate(alone):
        own = torch.cat([mask[i, :1], mask[i, 1:][there[i]]])[None]
        close(logits[i : i + 1], model(image, attn_mask=own), 1e-11)


def test_all_that_sizes_need_is_made_on_the_device_of_the_images():
    """The meta device refuses tensors of others, as a GPU does."""
    options = dict(global_pool="map", pos_embed="learn", patch_drop_rate=0.4)
    model = small(relative="flat", **options).train().to("meta")
    x, sizes = (given.to("meta") for given in batch()[:2])
    assert model(x, sizes=sizes).is_meta and model.present_patches(x, sizes).is_meta


# Patches that are dropped


class Given(nn.Module):
    """In place of patch dropout: patches chosen beforehand."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def forward(self, x, present=None):
        index = (self.kept + 1).unsqueeze(-1).expand(-1, -1, x.shape[2])
        return torch.cat([x[:, :1], x.gather(1, index)], dim=1), self.kept


@pytest.mark.parametrize("attention, relative", [("kernelized", "joint"), ("softmax", "axial")])
def test_of_patches_kept_at_random_absent_ones_stay_absent(attention, relative):
    model = small(attention=attention, relative=relative, patch_drop_rate=0.4).train()
    x, sizes, alone = batch()
    torch.manual_seed(5)
    layout = model._embed(x, sizes)[1]
    torch.manual_seed(5)
    logits = model(x, sizes=sizes)
    torch.manual_seed(5)
    maps = model.forward_intermediates(x, sizes=sizes, intermediates_only=True)
    for i, image in enumerate(alone):
        places = layout.kept[i][layout.patch_mask()[i]]
        rows, columns = (pixels // PATCH for pixels in image.shape[2:])
        own = copy.deepcopy(model)
        own.patch_drop = Given((places // 7 * columns + places % 7)[None])
        close(logits[i : i + 1], own(image), 1e-11)
        own_maps = own.forward_intermediates(image, intermediates_only=True)
        for got, wanted in zip(maps, own_maps, strict=True):
            close(got[i : i + 1, :, :rows, :columns], wanted, 1e-11)
            assert got[i].ne(0).any(0).sum() == len(places)


def test_each_image_drops_its_share_of_its_own_patches():
    model, (x, sizes, _) = small(patch_drop_rate=0.4).train(), batch()
    for seed in range(20):
        torch.manual_seed(seed)
        layout = model._embed(x, sizes)[1]
        assert layout.kept.shape == (5, 21)
        assert all(len(kept.unique()) == 21 for kept in layout.kept)
        assert layout.patch_mask().sum(1).tolist() == [9, 12, 9, 1, 21]


# Wrappers and compilers


@pytest.mark.slow
def test_one_graph_and_one_export_serve_all_sizes_of_images_and_of_canvases():
    torch._dynamo.reset()
    model, graphs = small(dtype=torch.float32, depth=1).eval(), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    x, sizes, _ = batch(dtype=torch.float32)
    height, width = (torch.export.Dim(name, min=2, max=64) for name in ("height", "width"))
    shapes = {"x": {2: 16 * height, 3: 16 * width}, "sizes": None}
    program = torch.export.export(model, (x,), {"sizes": sizes}, dynamic_shapes=shapes)
    with torch.no_grad():
        for height, width in ((80, 112), (48, 80), (64, 48)):
            given, canvas = sizes.minimum(torch.tensor((height, width))), x[:, :, :height, :width]
            for other in (compiled, program.module()):
                close(other(canvas, sizes=given), model(canvas, sizes=given), 1e-5)
        compiled(canvas, sizes=given + 1000)  # a graph looks at no entry
    assert graphs.frame_count <= 2


def test_fx_traces_a_model_that_takes_sizes():
    model, (x, sizes, _) = small("taylorshift_abs_vit_t", global_pool="map").eval(), batch()
    traced = create_feature_extractor(model, ["blocks.0", "head"])
    with torch.no_grad():
        assert torch.equal(traced(x, sizes=sizes)["head"], model(x, sizes=sizes))


# Errors

SIZES_WANTED = "sizes: expected int64 [5, 2], height and width of each image in pixels"
WRONG_SIZES = [
    (torch.ones(5, 2), SIZES_WANTED),
    (torch.ones(4, 2, dtype=torch.int64), "got torch.int64 (4, 2)"),
    ([(80, 112)] * 5, "got list [(80, 112), (80, 112), (80, 112), (80, 112), (80, 112)]"),
    (torch.tensor([(80, 112)] * 4 + [(0, 9)]), "got 0 x 9 for image 4"),
    (torch.tensor([(80, 113)] * 5), "expected 1 to 80 x 1 to 112 pixels, as the images have"),
    (torch.ones(5, 2, dtype=torch.int64, device="meta"), "images is on cpu, sizes on meta"),
]
WRONG_MASKS = torch.ones(2, 15), torch.ones(2, 16, dtype=torch.bool), [[True] * 15] * 2


def test_wrong_sizes_and_masks_of_pooling_are_named_in_one_line():
    model, (x, _, _) = small(), batch()
    methods = model, model.forward_features, model.forward_intermediates, model.present_patches
    for method, (sizes, message) in itertools.product(methods, WRONG_SIZES):
        with pytest.raises(ValueError) as error:
            method(x, sizes=sizes)
        assert message in str(error.value) and "\n" not in str(error.value)
    features = torch.zeros(2, 16, 24, dtype=torch.float64)
    for pooling, wrong in itertools.product(("max", "token", "map", "prr"), WRONG_MASKS):
        with pytest.raises(ValueError, match=r"^present: expected bool \[2, 15\][^\n]*$"):
            small(global_pool=pooling).forward_head(features, present=wrong)
