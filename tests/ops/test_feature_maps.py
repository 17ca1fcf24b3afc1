"""Positive random features: unbiased, the same for the same generator, local to their token."""

import math
from functools import partial

import pytest
import torch

from tests.helpers.oracles import draw, draw_qkv, relative_error, run
from visionattn.ops import RandomFeatures, kernelized_attention, reference
from visionattn.ops.feature_maps import orthogonal_rows


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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


@pytest.mark.parametrize("scale", [0.0, 1.4])
def test_tokens_on_the_rows_of_the_draw_stay_finite_and_right_in_float32(scale):
    features, tensors = RandomFeatures(32, 77, generator()), draw_qkv(queries=77, d=32, e=5)
    rows = features.projection.double() * 32**0.25 * scale
    tensors["q"] = tensors["k"] = rows.expand(2, 3, -1, -1)
    single = {name: x.float() for name, x in tensors.items()}
    actual = run(partial(kernelized_attention, feature_map=features), single)
    expected = run(partial(reference.kernelized_attention, feature_map=features), tensors)
    assert all(value.isfinite().all() for value in actual.values())
    assert relative_error(actual["out"], expected["out"]) < 1e-4  # an exponent of 100 has lost 1e-5
