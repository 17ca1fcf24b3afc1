"""The attribution of an output, against the plainest computation of each part."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import timm
import torch

import visionattn  # noqa: F401  registers the models
from tests.helpers.changed_modules import adapt, put
from tests.helpers.oracles import peak_bytes
from tests.ops.drawn_cases import DEFINITIONS
from visionattn.models.attribution import (
    block_number,
    check_model,
    find_attribution,
    offset_weights,
    principal,
    watch,
)
from visionattn.models.registration import create
from visionattn.ops import reference
from visionattn.ops.position.relative_position import tables_of

SMALL = dict(patch_size=4, embed_dim=24, depth=3, num_heads=3, horizon=2, num_classes=5)
SMALL |= dict(class_token=False)


def build(name="scaleformer_vit_t", dtype=torch.float64, seed=0, **args):
    """A model of random weights of a size at which its parts differ."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **SMALL | args).to(dtype).eval()
    for key, value in model.named_parameters():
        if "relative" not in key:
            value.data += 0.3 * torch.randn_like(value)
    return model


def image(height=20, width=28, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 3, height, width, generator=generator, dtype=dtype)


PREFIXED = dict(class_token=True, reg_tokens=2)
MODELS = {
    "kernelized": dict(centre_keys=True, **PREFIXED),
    "taylorshift": dict(name="taylorshift_vit_t", relative="axial", qk_norm=True),
    "softmax": dict(attention="softmax", value_conv=0, output_gate=False),
    "windows": dict(attention="window", window_size=3, horizon=None),
    "flat": dict(relative="flat", normalization="sum", feature_map="softmax"),
    "no places": dict(relative="none", horizon=None, pos_embed="learn", img_size=20),
}


def dense_rows(model, inputs, sizes):
    """All weights of each block, ``[h, N, N]``, by the definition of its attention."""
    found = []

    def recording(block):
        operation, definition = block.attn.operation, DEFINITIONS[block.attn.attention]

        def call(q, k, v, **options):
            given = {key: value for key, value in options.items() if key not in LEFT_OUT}
            unit = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1)
            found.append(definition(q, k, unit, **given)[0])
            return operation(q, k, v, **options)

        block.attn.operation = call

    for block in model.blocks:
        recording(block)
    with torch.no_grad():
        model(inputs, sizes=sizes)
    return found


LEFT_OUT = ("form", "value_drop")


@pytest.mark.parametrize("kind", MODELS)
def test_rows_of_each_block_are_those_of_the_dense_attention(kind):
    for sizes in (None, torch.tensor([(15, 22)])):  # 4 rows of 6 patches
        model, inputs = build(**MODELS[kind]), image()
        prefix = model.num_prefix_tokens
        chosen = [*range(prefix), prefix, prefix + 9, prefix + 23]
        rows, _ = watch(model, inputs, dict.fromkeys(range(3), chosen), sizes=sizes)
        dense = dense_rows(model, inputs, sizes)
        for number in range(3):
            total = rows[number].total[0]
            torch.testing.assert_close(total, dense[number][:, chosen], rtol=0, atol=1e-10)
            if sizes is not None:
                absent = torch.ones(5, 7, dtype=torch.bool)
                absent[:4, :6] = False
                assert total[:, :, prefix:][..., absent.flatten()].eq(0).all()


def test_the_map_is_that_of_the_features_and_both_come_of_one_pass():
    model, inputs = build(), image()
    rows, found = watch(model, inputs, {2: [3], -3: [4, 5]}, features=1)
    with torch.no_grad():
        wanted = model.forward_intermediates(inputs, indices=[1], norm=True)[1][0][0]
    assert torch.equal(found, wanted) and list(rows) == [0, 2]
    assert rows[0].total.shape == (1, 3, 2, 35)
    assert watch(model, inputs, {}) == ({}, None)
    assert not any(block.attn._forward_pre_hooks for block in model.blocks)


def plain_margin(model, inputs, target, sizes=None):
    logits = model(inputs, sizes=sizes)[0]
    return logits[target] - logits.mean()


POOLS = {
    "avg": {},
    "avgmax": {},
    "max, norm before": dict(global_pool="max", fc_norm=False),
    "avg, rms norm": dict(global_pool="avg", norm_layer="rmsnorm"),
}


OTHER_NORM = put("fc_norm", lambda norm: torch.nn.Sequential(norm, torch.nn.Tanh()))
UNDIVIDED = {
    "LoRA": (dict(global_pool="max"), adapt("head"), "patches with pooling 'max'"),
    "another norm": (dict(global_pool="max"), OTHER_NORM, "patches with pooling 'max'"),
    "learned pooling": (dict(global_pool="map"), adapt(), "patches with pooling 'map'"),
    "class token": (
        dict(class_token=True, global_pool="token"),
        adapt(),
        "only the class token is pooled",
    ),
}


@pytest.mark.parametrize("args, change, said", UNDIVIDED.values(), ids=UNDIVIDED)
def test_what_is_not_in_the_weights_is_not_divided_among_patches(args, change, said):
    model = build(**args)
    change(model)
    found = find_attribution(model, image())
    assert found.patches is found.rest is found.channels is None and said in found.how
    assert found.gradient.shape == (20, 28)


@pytest.mark.parametrize("pool", POOLS)
def test_what_patches_add_does_not_depend_on_what_others_hold_but_for_the_norm(pool):
    """With the norm's numbers held, the margin is linear in the pooled features."""
    model = build(**{"global_pool": pool} | POOLS[pool])
    inputs, sizes = image(), torch.tensor([(13, 24)])
    found = find_attribution(model, inputs, sizes=sizes, target=2, gradient=False)
    with torch.no_grad():
        tokens = model.forward_features(inputs, sizes=sizes)[0]
        there = torch.zeros(5, 7, dtype=torch.bool)
        there[:4, :6] = True
        own, flat = torch.where(there.flatten()[:, None], tokens, -torch.inf), there.flatten()
        winner = torch.arange(35)[:, None] == own.argmax(0)
        pooled = model.pool(tokens[None], present=there.flatten()[None])[0]
        at_norm = torch.autograd.functional.jacobian(frozen_norm(model.fc_norm, pooled), pooled)
        weights = (model.head.weight[2] - model.head.weight.mean(0)) @ at_norm
        centre = pooled.mean() if isinstance(model.fc_norm, torch.nn.LayerNorm) else 0.0
        max_share = torch.where(winner, tokens - centre, 0.0)
        avg_share = torch.where(flat[:, None], tokens - centre, 0.0) / int(there.sum())
        shares = {"max": max_share, "avg": avg_share, "avgmax": (max_share + avg_share) / 2}
        added = (shares[pool.split(",")[0]] @ weights).view(5, 7)
        torch.testing.assert_close(found.patches, added, rtol=0, atol=1e-10)
        wanted = float(plain_margin(model, inputs, 2, sizes))
        # The rest is what of the margin comes of biases.
        bias = getattr(model.fc_norm, "bias", None)
        rest = model.head.bias[2] - model.head.bias.mean()
        if bias is not None:
            rest += (model.head.weight[2] - model.head.weight.mean(0)) @ bias
    assert found.rest == pytest.approx(float(rest), abs=1e-10)
    if found.channels is not None:
        assert torch.equal(found.channels.flatten(), winner.sum(1))
    torch.testing.assert_close(found.logits, model(inputs, sizes=sizes)[0].detach().float())
    assert found.margin == pytest.approx(wanted, abs=1e-12)
    assert found.gradient is None
    assert (found.channels is None) == (pool.split(",")[0] == "avg")


def frozen_norm(norm, pooled):
    """A norm with the mean and the spread of ``pooled``, as a function of something else."""
    if isinstance(norm, torch.nn.Identity):
        return lambda x: x
    centre = pooled.mean() if isinstance(norm, torch.nn.LayerNorm) else 0.0
    spread = ((pooled - centre).square().mean() + norm.eps).sqrt()
    return lambda x: (x - centre) / spread * norm.weight


def test_the_gradient_is_that_of_the_margin_and_the_model_is_left_as_it_is():
    model, inputs, sizes = build(), image(), torch.tensor([(15, 22)])
    model.blocks[1].attn.qkv.weight.requires_grad_(False)
    trained = [each.requires_grad for each in model.parameters()]
    with torch.inference_mode():
        found = find_attribution(model, image(), sizes=sizes)
    assert found.target == found.logits.argmax()
    own = inputs.clone().requires_grad_()
    (grad,) = torch.autograd.grad(plain_margin(model, own, found.target, sizes), own)
    wanted = (grad * inputs).sum(1)[0]
    torch.testing.assert_close(found.gradient, wanted, rtol=0, atol=1e-12)
    assert wanted.abs().max() > 1e-3
    assert found.gradient[16:].eq(0).all() and found.gradient[:, 24:].eq(0).all()
    assert [each.requires_grad for each in model.parameters()] == trained
    assert all(each.grad is None for each in model.parameters())
    assert not model.grad_checkpointing and inputs.grad is None and not inputs.requires_grad


def test_prefix_tokens_that_are_pooled_are_in_the_rest():
    args = dict(class_token=True, reg_tokens=1, pool_include_prefix=True)
    model, inputs = build(**args), image()
    with torch.no_grad():
        model.reg_token.fill_(40.0)  # it wins channels
    found = find_attribution(model, inputs)
    assert found.patches.shape == (5, 7) and int(found.channels.sum()) < 24
    assert float(found.patches.sum()) + found.rest == pytest.approx(found.margin)
    model = build(num_classes=1)  # whose output is the margin
    with torch.no_grad():
        assert find_attribution(model, inputs).margin == pytest.approx(float(model(inputs)[0, 0]))


def test_components_are_those_of_the_covariance():
    features = torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(0)).double()
    features[2] *= 5
    there = torch.ones(5, 7, dtype=torch.bool)
    there[4] = False
    found, shares = principal(features, there, 3)
    own = features[:, there].T
    left, spread, _ = torch.linalg.svd(own - own.mean(0), full_matrices=False)
    torch.testing.assert_close(shares, (spread**2 / (spread**2).sum())[:3])
    # The sign of a component is free, but for its largest entry, which is positive.
    wanted = (left * spread).T[:3]
    signs = (found[:, there] * wanted).sum(1, keepdim=True).sign()
    torch.testing.assert_close(found[:, there], signs * wanted)
    assert found[:, ~there].eq(0).all() and torch.dot(found[0, there], features[2, there]) > 0
    flat, none = principal(torch.ones(2, 3, 4))
    assert flat.shape == (2, 3, 4) and flat.eq(0).all() and none.eq(0).all()


@pytest.mark.parametrize("kind", ["joint", "axial", "flat"])
def test_offsets_have_the_weight_that_a_query_of_zeros_gives_them(kind):
    attention = build(relative=kind, img_size=(36, 44)).blocks[1].attn
    found, position = offset_weights(attention), attention.relative(attention.native_layout)
    tables = {name: table.detach().double() for name, table in tables_of(position).items()}
    zeros = torch.zeros(1, 3, attention.native_layout.num_tokens, 8, dtype=torch.float64)
    present = torch.ones(1, zeros.shape[2], dtype=torch.bool)
    position = replace(position, **tables, normalization="sum")
    dense = reference.relative_weights(position, zeros, present)[0]
    width, middle = 11, 4 * 11 + 5
    for dy, dx in itertools.product(range(-2, 3) if kind != "flat" else [0], range(-2, 3)):
        wanted = dense[:, middle, middle + dy * width + dx]
        row = 0 if kind == "flat" else dy + 2
        torch.testing.assert_close(found[:, row, dx + 2], wanted)


def test_offsets_under_a_softmax_have_lengths_and_without_tables_nothing():
    model = build(**MODELS["softmax"])
    attention = model.blocks[0].attn
    torch.testing.assert_close(offset_weights(attention), attention.relative.table.norm(dim=-1))
    assert offset_weights(build(**MODELS["no places"]).blocks[0].attn) is None


def test_memory_is_linear_in_the_patches_and_a_gradient_keeps_the_tokens_between_blocks():
    """One float for each pair of patches would be 16 times as many for four times the patches."""
    model = build("taylorshift_vit_t", dtype=torch.float32, patch_size=2)

    def rows(model, inputs):
        return watch(model, inputs, {0: [5], 2: [5]}, features=2)

    for work in (find_attribution, rows):
        small, large = (
            peak_bytes(partial(work, model, image(side, side, dtype=torch.float32)))
            for side in (64, 128)
        )
        assert large < min(4.4 * small, 4096**2 * 4)  # one matrix of all pairs
    inputs = image(64, 64, dtype=torch.float32)
    few, many = (
        peak_bytes(partial(find_attribution, build(dtype=torch.float32, depth=depth), inputs))
        for depth in (2, 12)
    )
    assert many < 2 * few


def test_what_cannot_be_looked_at_is_one_line():
    model, inputs = build(), image()
    assert check_model(model) is model and block_number(model, -1) == 2
    pixels = create("scaleformer_vit_t", "segmentation", 2, 3, dict(depth=1))
    for call, given, message in (
        (check_model, [timm.create_model("test_vit")], "visionattn for look, got VisionTransf"),
        (check_model, [pixels], "^expected an image classifier for look"),
        (
            check_model,
            [timm.create_model("scaleformer_vit_t", depth=1, num_classes=0)],
            "^expected a model with classes",
        ),
        (watch, [model, inputs, {3: [0]}], "expected blocks 0 to 2 of 3, got 3"),
        (watch, [model, inputs, {-4: [0]}], "expected blocks 0 to 2 of 3, got -4"),
        (partial(watch, features=3), [model, inputs, {}], "of 3, got 3"),
        (watch, [model, inputs, {0: [35]}], "from 0 to 34"),
        (partial(find_attribution, target=5), [model, inputs], "expected class 0 to .*, got 5"),
        (partial(find_attribution, target=-1), [model, inputs], "expected class 0 to .*, got -1"),
        (find_attribution, [model, inputs * float("nan")], "^the outputs are not finite; "),
    ):
        with pytest.raises(ValueError, match=message):
            call(*given)
