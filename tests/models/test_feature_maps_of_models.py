"""Feature maps as an argument of models: formulas, weights, precision."""

import copy
import pickle

import pytest
import torch
from timm.models import create_model

from visionattn.lab.measure import count_flops
from visionattn.models.state_dicts import checkpoint_filter_fn
from visionattn.models.weights import DataSpec, load_model, save_model
from visionattn.ops import RandomFeatures, reference

SMALL = dict(embed_dim=24, depth=2, num_heads=3, num_classes=7, img_size=64)
SPEC = DataSpec(3, 7, (), (0.5,) * 3, (0.2,) * 3, None, 64)


def make(feature_map, seed=0, **options):
    """A small model whose attention depends on q and k, as a trained one's does."""
    torch.manual_seed(seed)
    model = create_model("scaleformer_vit_t", feature_map=feature_map, **SMALL | options)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight *= 4
    return model


def draw_image(batch=2, height=80, width=48):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, height, width, generator=generator)


def defined(q, k, v, *, form, value_drop, **options):
    """The operation by its quadratic definition."""
    assert value_drop == 0
    return reference.kernelized_attention(q, k, v, **options)


@pytest.mark.parametrize(
    "name, relative, form",
    [
        ("relu", "axial", "efficient"),
        ("softmax", "joint", "efficient"),
        ("random", "flat", "direct"),
    ],
)
def test_a_model_computes_the_definition_of_its_map(name, relative, form):
    model = make(name, relative=relative, form=form).double()
    definition = copy.deepcopy(model)
    for block in definition.blocks:
        block.attn.operation = defined
    image = draw_image().double()
    torch.testing.assert_close(model(image), definition(image), rtol=1e-9, atol=1e-11)
    other = make("elu1", relative=relative, form=form).double()
    assert (other(image) - model(image)).abs().max() > 1e-6


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(feature_map="elu"), "feature_map 'elu': wanted one of elu1, relu, softmax, random"),
        (
            dict(attention="taylorshift", feature_map="relu"),
            "'relu' would do nothing: .*no feature",
        ),
        (dict(random_features=5), 'random_features=5 would do nothing: .*feature_map="random"'),
        (dict(feature_map="random", random_features=0), "num_features of 1 or more, got 8 and 0"),
    ],
)
def test_a_map_that_is_none_or_acts_on_nothing_is_refused_in_one_line(options, words):
    with pytest.raises(ValueError, match=words) as caught:
        create_model("scaleformer_vit_t", **SMALL, **options)
    assert "\n" not in str(caught.value)


def test_random_features_follow_the_seed_and_are_the_blocks_own():
    first, again, other = make("random"), make("random"), make("random", seed=1)
    rows = [model.blocks[0].attn.feature_map.projection for model in (first, again, other)]
    assert rows[0].shape == (8, 8) and torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], first.blocks[1].attn.feature_map.projection)


def test_random_features_travel_with_the_weights(tmp_path):
    model, image = make("random", random_features=21).eval(), draw_image()
    out = model(image)
    args = SMALL | dict(feature_map="random", random_features=21)
    del args["num_classes"]
    save_model(tmp_path / "model.safetensors", model, "scaleformer_vit_t", args, SPEC)
    state = torch.get_rng_state()
    loaded = load_model(tmp_path / "model.safetensors")
    assert torch.equal(loaded(image), out) and torch.equal(torch.get_rng_state(), state)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(image), out)


def test_weights_of_a_plain_vit_leave_random_features_as_they_are():
    vit, model = create_model("vit_tiny_patch16_224", **SMALL), make("random")
    rows = model.blocks[1].attn.feature_map.projection.clone()
    model.load_state_dict(checkpoint_filter_fn(vit.state_dict(), model))
    assert torch.equal(model.blocks[1].attn.feature_map.projection, rows)


def test_a_model_on_the_meta_device_draws_nothing_until_it_is_reset():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with torch.device("meta"):
        features = RandomFeatures(8, 21)
        model = create_model("scaleformer_vit_t", **SMALL, feature_map="random")
    assert features.projection.is_meta and all(x.is_meta for x in model.state_dict().values())
    assert torch.equal(torch.get_rng_state(), state)
    features.to_empty(device="cpu").reset_parameters()
    torch.manual_seed(0)
    assert torch.equal(features.projection, RandomFeatures(8, 21).projection)
    assert all(x.is_meta for x in copy.deepcopy(make("random")).to("meta").state_dict().values())
    assert count_flops(make("random"), 64, 64) > 0


@pytest.mark.parametrize("name, dtype", [("softmax", torch.float16), ("random", torch.bfloat16)])
def test_half_precision_stays_close_to_float64(name, dtype):
    model, image = make(name).eval(), draw_image()
    low = copy.deepcopy(model).to(dtype)
    wanted = copy.deepcopy(low).double()(image.to(dtype).double())
    out = low(image.to(dtype))
    assert out.dtype == dtype
    assert (out.double() - wanted).norm() <= 16 * torch.finfo(dtype).eps * wanted.norm()
    with torch.autocast("cpu", dtype=dtype):
        mixed = model(image)
    exact = copy.deepcopy(model).double()(image.double())
    assert (mixed.double() - exact).norm() <= 16 * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.slow
def test_one_graph_and_one_export_serve_all_sizes():
    model, sizes = make("random").eval(), [draw_image(), draw_image(3, 64, 96)]
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    sides = {i: 16 * torch.export.Dim(side, min=2, max=64) for i, side in ((2, "h"), (3, "w"))}
    shapes = {"x": {0: torch.export.Dim("b", min=1, max=8)} | sides}
    exported = torch.export.export(model, (sizes[0],), dynamic_shapes=shapes).module()
    with torch.no_grad():
        for image in sizes:
            for other in (compiled, exported):
                torch.testing.assert_close(other(image), model(image), rtol=1e-5, atol=1e-6)
