"""Bags of features: what the order, the place of the bag, absent tiles and empty rows mean."""

import pytest
import torch
from torch import Tensor

from visionattn.layout import Grid, TokenLayout
from visionattn.models.bag import BagEncoder

IN, D, HEADS, CLASSES = 11, 24, 3, 5
OPTIONS = [
    {"attention": "kernelized", "relative": "joint", "global_pool": "max"},
    {"attention": "taylorshift", "relative": "axial", "global_pool": "avg"},
    {"attention": "kernelized", "relative": "joint", "global_pool": "token"},
    {"attention": "softmax", "relative": "joint", "global_pool": "avg"},
    {"attention": "taylorshift", "relative": "none", "global_pool": "token"},
]


def encoder(horizon: int = 2, **options) -> BagEncoder:
    """An encoder in float64 whose attention matters."""
    torch.manual_seed(3)
    model = BagEncoder(IN, D, 2, HEADS, CLASSES, horizon=horizon, **options).double().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def bag(tiles: int = 29, height: int = 7, width: int = 9, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features ``[n, IN]`` and places ``[n, 2]`` of tiles on some of the places of a grid."""
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(height * width, generator=draw)[:tiles]
    places = torch.stack([chosen // width, chosen % width], dim=1)
    return torch.randn(tiles, IN, generator=draw, dtype=torch.float64), places


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_order_of_the_tiles_and_the_place_of_the_bag_change_nothing(options):
    model, (features, places) = encoder(**options), bag()
    wanted = model(features, places)
    assert wanted.shape == (CLASSES,)
    order = torch.randperm(len(features))
    torch.testing.assert_close(model(features[order], places[order]), wanted)
    torch.testing.assert_close(model(features, places + torch.tensor([-4, 1000])), wanted)
    if options["relative"] != "none":  # but which tile lies where does
        assert (model(features[order], places) - wanted).abs().max() > 1e-3
    else:  # nor do places farther apart than grids of relative position reach
        torch.testing.assert_close(model(features, places * 10**6), wanted)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_where_all_tiles_are_there_the_result_is_that_of_blocks_on_a_dense_grid(options):
    model, (features, places) = encoder(**options), bag(63)
    x = model.embed(features[(places[:, 0] * 9 + places[:, 1]).argsort()])[None]
    if model.cls_token is not None:
        x = torch.cat([model.cls_token, x], dim=1)
    for block in model.blocks:
        x = block(x, TokenLayout(model.num_prefix_tokens, Grid(7, 9)))
    x = model.norm(x)
    pool = options["global_pool"]
    pooled = x[:, 0] if pool == "token" else x.amax(1) if pool == "max" else x.mean(1)
    torch.testing.assert_close(model(features, places), model.head(pooled)[0])


@pytest.mark.parametrize("options", OPTIONS[:2] + OPTIONS[4:], ids=str)
def test_a_batch_of_bags_of_different_sizes_gives_each_what_it_gives_alone(options):
    model = encoder(**options)
    bags = [bag(29, 7, 9, 1), bag(4, 13, 3, 2), bag(1, 2, 2, 3)]
    most = max(len(features) for features, _ in bags)
    features = torch.full((3, most, IN), float("nan"), dtype=torch.float64)
    places = torch.full((3, most, 2), 10**9)
    present = torch.zeros(3, most, dtype=torch.bool)
    for i, (own, where) in enumerate(bags):  # the tiles that are there lie anywhere in the row
        at = torch.randperm(most)[: len(own)].sort().values
        features[i, at], places[i, at], present[i, at] = own, where, True
    features.requires_grad_(True)
    out = model(features, places, present)
    for i, (own, where) in enumerate(bags):
        torch.testing.assert_close(out[i], model(own, where))
    (out**2).sum().backward()
    assert features.grad.isfinite().all()
    assert (features.grad[~present] == 0).all()
    assert (features.grad[present].abs().sum(1) > 0).all()


BAD = {
    "features: expected [n, 11] or [B, n, 11] with a tile or more": lambda f, p: (f[:, :9], p),
    "with a tile or more, got": lambda f, p: (f[:0], p[:0]),
    "places: expected int64 [1, 29, 2]": lambda f, p: (f, p.float()),
    "[1, 29, 2], row and column of each tile": lambda f, p: (f, p[:5]),
    "present: expected bool [1, 29]": lambda f, p: (f, p, torch.ones(29)),
    "present: expected at least one tile per bag": lambda f, p: (
        f,
        p,
        torch.zeros(29, dtype=torch.bool),
    ),
    "two at row 77, column 78; remove one": lambda f, p: (
        f,
        torch.cat([p[:27], torch.tensor([[77, 78], [77, 78]])]),
    ),
    "pass each part of the slide as a separate bag": lambda f, p: (
        f[:1].expand(200, -1),
        torch.arange(200)[:, None].expand(-1, 2) * 7,
    ),
}


def test_bags_and_options_that_are_none_are_one_line():
    for said, change in BAD.items():
        with pytest.raises(ValueError) as error:
            encoder()(*change(*bag()))
        assert said in str(error.value) and "\n" not in str(error.value)
    for options in ({"attention": "window"}, {"relative": "flat"}, {"global_pool": "map"}):
        with pytest.raises(ValueError, match="expected one of"):
            BagEncoder(IN, D, 1, HEADS, **options)
