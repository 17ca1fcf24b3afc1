"""Positive random features: unbiased, better with more of them, the same for the same generator,
local to their token.
"""

import contextlib
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.oracles import assert_agree, draw, draw_mask, draw_qkv, relative_error, run
from visionattn.ops import RandomFeatures, attend, kernelized_attention, reference, summarize
from visionattn.ops.feature_maps import Elu1, PositionSoftmax, Relu, orthogonal_rows


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_feature_is_the_formula_worked_out_by_hand():
    features = RandomFeatures(4, 6, generator())
    x = draw(4, seed=1)
    for phi in (features.query, features.key):
        for row, got in zip(
            features.projection.double(), phi(x[None, None, None])[0, 0, 0], strict=True
        ):
            scaled = x / math.sqrt(2)  # 4 ** (1/4)
            exponent = (
                sum(w * s for w, s in zip(row.tolist(), scaled.tolist(), strict=True))
                - scaled.dot(scaled).item() / 2
            )
            assert got.item() == pytest.approx(math.exp(exponent) / math.sqrt(6), rel=1e-12)


def test_products_of_features_are_the_weights_of_softmax_on_average():
    q, k = draw(1, 1, 5, 8, seed=1) / 2, draw(1, 1, 7, 8, seed=2) / 2
    exact = (q @ k.mT / math.sqrt(8)).exp()
    seeded = generator()
    features = RandomFeatures(8, 12, generator(1))
    draws = []
    for _ in range(3000):
        features.redraw(seeded)
        draws.append(features.query(q) @ features.key(k).mT)
    draws = torch.stack(draws)
    z_scores = (draws.mean(0) - exact) / (draws.std(0) / math.sqrt(len(draws)))
    assert z_scores.abs().max() < 4.5  # of 35 entries
    assert (draws.mean(0) / exact - 1).abs().max() < 0.05


def test_the_error_against_softmax_attention_falls_with_the_number_of_features():
    tensors = draw_qkv(batch=1, heads=1, queries=37, keys=41, d=16, e=8)
    tensors |= {name: tensors[name] / 2 for name in "qk"}
    exact, seeded = reference.softmax_attention(**tensors), generator()

    def error(num_features: int) -> float:
        errors = [
            relative_error(
                kernelized_attention(
                    **tensors, feature_map=RandomFeatures(16, num_features, seeded)
                ),
                exact,
            )
            for _ in range(10)
        ]
        return sum(errors) / len(errors)

    errors = [error(num_features) for num_features in (16, 64, 256, 1024, 4096)]
    assert all(later < 0.8 * earlier for earlier, later in zip(errors, errors[1:], strict=False)), (
        errors
    )
    assert errors[-1] < 0.15


def test_rows_of_a_group_are_orthogonal_and_their_lengths_those_of_normal_vectors():
    rows = orthogonal_rows(16, 39, generator())
    for group in rows.split(16):
        products = group @ group.mT
        assert (products - products.diagonal().diag()).abs().max() < 1e-12 * products.max()
    many = orthogonal_rows(16, 16 * 400, generator())
    assert many.square().sum(1).mean().item() == pytest.approx(16, rel=0.03)
    assert many.square().sum(1).var().item() == pytest.approx(32, rel=0.1)
    assert many.mean(0).abs().max() < 0.06  # of 6,400 rows, deviation 1/80


def test_the_same_seed_draws_the_same_features_and_another_draw_others():
    first, second = RandomFeatures(5, 7, generator(3)), RandomFeatures(5, 7, generator(3))
    assert torch.equal(first.projection, second.projection)
    seeded = generator(4)
    first.redraw(seeded)
    assert not torch.equal(first.projection, second.projection)
    kept = first.projection.clone()
    first.redraw(seeded)
    assert not torch.equal(first.projection, kept)
    second.redraw(generator(4))
    assert torch.equal(second.projection, kept)


def test_a_model_saves_and_loads_its_features():
    first, second = RandomFeatures(5, 7, generator(3)), RandomFeatures(5, 7, generator(4))
    assert list(first.state_dict()) == ["projection"] and not list(first.parameters())
    second.load_state_dict(first.state_dict())
    x = draw(2, 3, 11, 5, seed=1)
    assert torch.equal(second.query(x), first.query(x))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", ["direct", "efficient"])
def test_attention_with_random_features_agrees_with_the_reference(form, causal):
    tensors = draw_qkv(queries=37, keys=41, d=7, e=5)
    mask = draw_mask(2, 41)
    features = RandomFeatures(7, 19, generator())
    options = {"feature_map": features, "causal": causal, "key_mask": mask}
    actual = run(partial(kernelized_attention, form=form, **options), tensors)
    assert_agree(actual, run(partial(reference.kernelized_attention, **options), tensors))


def test_features_of_a_token_do_not_depend_on_the_others():
    features, x = RandomFeatures(7, 19, generator()), draw(2, 3, 23, 7, seed=1)
    whole = features.key(x)
    one_by_one = torch.cat([features.key(x[:, :, i : i + 1]) for i in range(23)], 2)
    torch.testing.assert_close(one_by_one, whole, rtol=1e-12, atol=0)
    huge = x.clone()
    huge[:, :, 11:] *= 1000
    torch.testing.assert_close(features.key(huge)[:, :, :11], whole[:, :, :11], rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_features_are_computed_in_float32_at_least(dtype):
    features, x = RandomFeatures(32, 64, generator()), draw(2, 3, 23, 32, seed=1).to(dtype)
    assert features.query(x).dtype == torch.float32
    assert features.query(x.double()).dtype == torch.float64
    assert relative_error(features.query(x), features.query(x.double())) < 2e-6
    tensors = {name: x.to(dtype) for name, x in draw_qkv(queries=77, d=16).items()}
    actual = run(
        partial(kernelized_attention, feature_map=RandomFeatures(16, 32, generator())), tensors
    )
    assert all(value.dtype == dtype and value.isfinite().all() for value in actual.values())


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 1.4])
def test_tokens_on_the_rows_of_the_draw_stay_finite_and_right_in_float32(scale):
    features, tensors = RandomFeatures(32, 77, generator()), draw_qkv(queries=77, d=32, e=5)
    tensors["q"] = tensors["k"] = (features.projection.double() * 32**0.25).expand(
        2, 3, -1, -1
    ) * scale
    actual = run(
        partial(kernelized_attention, feature_map=features),
        {name: x.float() for name, x in tensors.items()},
    )
    expected = run(partial(reference.kernelized_attention, feature_map=features), tensors)
    assert all(value.isfinite().all() for value in actual.values())
    assert relative_error(actual["out"], expected["out"]) < 1e-4  # an exponent of 100 has lost 1e-5


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (2.5, 3), (3, 2.5), ("3", 3), (-1, 3)])
def test_sizes_that_make_no_sense_are_refused(sizes):
    with refused(f"1 or more, got {sizes[0]} and {sizes[1]}"):
        RandomFeatures(*sizes)


def test_a_width_other_than_that_of_the_draw_is_refused():
    with refused("width 5"):
        kernelized_attention(*draw_qkv(queries=7, d=4).values(), feature_map=RandomFeatures(5, 3))


@contextlib.contextmanager
def refused(match: str):
    """A ValueError of one line."""
    with pytest.raises(ValueError, match=match) as caught:
        yield
    assert "\n" not in str(caught.value)


def two_maps(query, key):
    """A feature map of two functions."""
    return SimpleNamespace(query=query, key=key)


def test_objects_that_are_no_feature_maps_are_refused():
    q, k, v = draw_qkv(queries=7, d=5, e=4).values()
    for wrong in (
        None,
        3,
        torch.relu,
        SimpleNamespace(query=torch.relu),
        two_maps(torch.relu, "relu"),
    ):
        with refused(f"feature_map {type(wrong).__name__}: wanted one of.*query and .key"):
            kernelized_attention(q, k, v, feature_map=wrong)
    with refused("feature_map SimpleNamespace: wanted one of"):
        summarize(k, v, feature_map=SimpleNamespace())


def test_features_that_do_not_fit_each_other_or_their_tokens_are_refused():
    q, k, v = draw_qkv(queries=7, keys=11, d=5, e=4).values()
    wider = two_maps(torch.relu, lambda x: x.repeat(1, 1, 1, 2))
    flat = two_maps(lambda x: x.flatten(2), torch.relu)
    with refused("feature_map.key: wanted 5 features.*got 10"):
        kernelized_attention(q, k, v, feature_map=wider)
    with refused("feature_map.query: wanted 10 features.*got 5"):
        attend(q, summarize(k, v, feature_map=wider))
    with refused(r"feature_map.query: wanted features \[2, 3, 7, f\], got \(2, 3, 35\)"):
        kernelized_attention(q, k, v, feature_map=flat)
    with refused(r"feature_map.query: wanted features \[2, 3, 7, f\], got \(2, 3, 35\)"):
        attend(q, summarize(k, v, feature_map=flat))
    with refused(r"feature_map.key: wanted features \[2, 3, 11, f\], got list"):
        summarize(k, v, feature_map=two_maps(torch.relu, lambda x: [x]))


def test_an_instance_of_the_softmax_map_is_the_softmax_map():
    q, k, v = draw_qkv(queries=17, d=5, e=4).values()
    mask = draw_mask(2, 17)
    by_name = kernelized_attention(q, k, v, feature_map="softmax", key_mask=mask)
    assert torch.equal(
        kernelized_attention(q, k, v, feature_map=PositionSoftmax(), key_mask=mask), by_name
    )
    with refused("causal.*softmax"):
        kernelized_attention(q, k, v, feature_map=PositionSoftmax(), causal=True)
    with refused("softmax.*no state"):
        summarize(k, v, feature_map=PositionSoftmax())


def test_instances_of_maps_per_token_are_those_maps():
    q, k, v = draw_qkv(queries=17, d=5, e=4).values()
    for name, instance in (("elu1", Elu1()), ("relu", Relu())):
        expected = kernelized_attention(q, k, v, feature_map=name, causal=True)
        actual = kernelized_attention(q, k, v, feature_map=instance, causal=True)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
