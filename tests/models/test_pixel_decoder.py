"""A pixel decoder gives each value its likelihood under those before it, at once or in steps."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.changed_modules import adapt, hook
from visionattn.models import PixelDecoder
from visionattn.models.pixel_decoder import log_mixture

SMALL = {"embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0}
KINDS = {
    "kernelized": {},
    "softmax, colour": {"attention": "softmax", "in_chans": 3, "reach": 1},
    "mixture, relu": {"output": "mixture", "mixtures": 3, "rows": 1, "feature_map": "relu"},
    "conditioned, no position": {
        "conditioned": True,
        "num_classes": 5,
        "in_chans": 2,
        "relative": "none",
        "feature_map": "random",
    },
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind="kernelized", dtype=torch.float64, **more):
    torch.manual_seed(0)
    return PixelDecoder(**SMALL | KINDS[kind] | more).to(dtype).eval()


def draw(model, batch=3, size=(5, 7), seed=1):
    generator = torch.Generator().manual_seed(seed)
    shape = batch, model.in_chans, *size
    images = torch.randint(model.levels, shape, generator=generator, dtype=torch.int64)
    labels = torch.arange(batch) % 5 if model.conditioned else None
    return images.to(torch.uint8), labels


def in_order(images):
    return images.permute(0, 2, 3, 1).flatten(1).long()


def stepped(model, images, labels, state=None):
    values = in_order(images)
    state = state or model.begin(len(images), tuple(images.shape[2:]), labels)
    logits = [
        model.step(values[:, i - 1] if i else None, state)
        for i in range(state.position, values.shape[1])
    ]
    return torch.stack(logits, 1)


def test_steps_call_changed_modules_and_refuse_what_they_would_leave_out():
    model = make("softmax, colour")
    for name in ("value_embed", "channel_embed"):
        hook(name, lambda out: 1.5 * out)(model)
    adapt("blocks.0.attn.qkv", "blocks.1.mlp.fc2", "row_embed", "head")(model)
    images, _ = draw(model)
    with torch.inference_mode():
        at_once = model.logits(images).permute(0, 3, 4, 2, 1).flatten(1, 3)
    torch.testing.assert_close(stepped(model, images, None), at_once, rtol=1e-12, atol=1e-12)
    hook("blocks.1", torch.sin)(model)
    with pytest.raises(ValueError, match=r"^blocks\.1 has hooks, which would be bypassed"):
        model.begin(1, (5, 7))


def in_raster_order(logits):
    return logits.permute(0, 3, 4, 2, 1).flatten(1, 3).double()


@every_kind
def test_steps_give_what_the_whole_image_gives(kind):
    exact, model = make(kind), make(kind, torch.float32)
    images, labels = draw(exact)
    with torch.inference_mode():
        logits = exact.logits(images, labels)
        wanted = in_raster_order(logits)
        assert (stepped(exact, images, labels) - wanted).abs().max() < 1e-12
        at_once = in_raster_order(model.logits(images, labels))
        assert (stepped(model, images, labels) - at_once).abs().max() < 1e-5
        with torch.autocast("cpu", torch.bfloat16):
            error = (in_raster_order(model.logits(images, labels)) - wanted).abs().max()
            assert (stepped(model, images, labels).double() - wanted).abs().max() < 2 * error
    levels = -F.cross_entropy(logits, images.long(), reduction="none")
    torch.testing.assert_close(exact(images, labels), levels)


def test_a_mixture_has_the_mass_of_logistic_distributions_over_each_level():
    out = torch.randn(11, 9, dtype=torch.float64) * 2
    found = log_mixture(out, torch.arange(8), 8).exp()
    weights, means, scales = out.chunk(3, 1)
    inner, ends = torch.arange(7, dtype=torch.float64) / 3.5 - 6 / 7, torch.tensor([math.inf])
    edges = torch.cat([-ends, inner, ends])
    below = torch.sigmoid((edges[:, None, None] - means) / scales.exp())
    wanted = ((below[1:] - below[:-1]) * weights.softmax(1)).sum(2).T
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    torch.testing.assert_close(found.sum(1), torch.ones(11, dtype=torch.float64))


def test_a_mixture_keeps_gradients_where_it_is_sure_and_wrong():
    out = torch.tensor([[0.0, 0.0, 0.0, -0.9, -0.9, -0.9, -9.0, -9.0, -9.0]], requires_grad=True)
    loss = -log_mixture(out, torch.tensor([[250]]), 256).sum()
    loss.backward()
    assert loss.isfinite() and out.grad.isfinite().all() and (out.grad[:, 3:6] < 0).all()


def test_a_state_has_the_same_size_from_the_first_value_to_the_last():
    def held(state):
        parts = [vars(past).values() for past, _ in state.blocks]
        return sum(x.nbytes for part in parts for x in part if isinstance(x, torch.Tensor))

    model = make()
    state = model.begin(2, (6, 6))
    size = held(state)
    for i in range(36):
        model.step(torch.zeros(2, dtype=torch.int64) if i else None, state)
        assert held(state) == size
    # Of larger images only the rows above that are told apart grow.
    assert held(model.begin(2, (100, 6))) == size


@every_kind
def test_every_parameter_learns_and_checkpointing_changes_nothing(kind):
    model = make(kind).train()
    images, labels = draw(model, size=(6, 9))
    gradients = []
    for enabled in (False, True):
        model.set_grad_checkpointing(enabled)
        model.zero_grad()
        (-model(images, labels).mean()).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(gradients[1][name], gradient)


WRONG = [
    ({"attention": "taylorshift"}, "has no causal form .its linear form"),
    ({"output": "gauss"}, "output 'gauss': expected categorical or mixture"),
    ({"mixtures": 3}, "mixtures need output"),
    ({"output": "mixture", "mixtures": 0}, "mixtures: expected an integer of at least 1, got 0"),
    ({"levels": 1}, "levels: expected an integer of at least 2, got 1"),
    ({"conditioned": True}, "conditioned needs classes"),
    ({"relative": "none", "rows": 2}, "rows and reach need relative"),
    ({"conditioned": "x", "num_classes": 2}, "conditioned: expected true or false, got 'x'"),
    ({"depth": 0}, "depth: expected an integer of at least 1, got 0"),
]


def test_options_and_calls_that_do_not_fit_are_refused():
    for wrong, said in WRONG:
        with pytest.raises(ValueError, match=said):
            PixelDecoder(**SMALL | wrong)
    model, named = make(), make("conditioned, no position")
    (images, _), zero = draw(model), torch.zeros(1, dtype=torch.int64)
    state, ended = model.begin(1, (1, 1)), model.begin(1, (1, 1))
    model.step(None, ended)
    for call, given, said in (
        (model, (images.expand(-1, 3, -1, -1),), r"integers \[B, 1, H, W\], got torch.uint8"),
        (model, (images.float(),), "got torch.float32"),
        (model, (images.long() - 300,), "expected values 0 to 255 for levels 256, got -"),
        (model, (images, zero.expand(3)), "labels need a conditioned model"),
        (
            named,
            (images.expand(-1, 2, -1, -1),),
            r"expected \[3\] for a conditioned model, got none",
        ),
        (model.predict, (in_order(images), (5, 7)), "expected fewer than the 35 values of the ima"),
        (model.step, (zero, state), "values: expected none before the first one"),
        (model.step, (zero, ended), "the images are complete: all 1 values"),
    ):
        with pytest.raises(ValueError, match=said):
            call(*given)
