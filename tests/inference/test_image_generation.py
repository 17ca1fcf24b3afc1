"""Images generated value by value equal what the parallel form gives with the same numbers."""

import math

import numpy as np
import pytest
import timm
import torch

import visionattn
from visionattn.inference import value_sampling
from visionattn.inference.value_sampling import choose
from visionattn.models.pixel_decoder import PixelDecoder
from visionattn.models.weights import DataSpec

SMALL = {"embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0}
KINDS = {
    "kernelized": {},
    "softmax": {"attention": "softmax"},
    "colour": {"in_chans": 3, "reach": 1},
    "mixture": {"output": "mixture", "mixtures": 3, "rows": 1},
    "conditioned": {"conditioned": True, "num_classes": 3, "in_chans": 2},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
SIZE = 5, 7
NAMES = ("ash", "birch", "cedar")


def make(kind="kernelized", dtype=torch.float64, spread=0.4, **more):
    """A decoder of random weights whose levels differ in probability, and what its images are."""
    torch.manual_seed(0)
    model = PixelDecoder(**SMALL | KINDS[kind] | more)
    if model.output == "categorical":
        torch.nn.init.normal_(model.head.weight, std=spread)
    names = NAMES if model.conditioned else ()
    channels = model.in_chans
    half = (0.5,) * channels
    model.data_spec = DataSpec(channels, len(names), names, half, half, None, SIZE)
    return model.to(dtype).eval()


def numbers_of(seed, image, copy, count):
    """The random numbers of an image, by numpy's own means."""
    source = np.random.Philox(key=np.array([seed, image], np.uint64), counter=[0, 0, 0, copy])
    return np.random.Generator(source).random(count)


def by_the_parallel_form(model, count, labels, seed, temperature=1.0, size=SIZE):
    """Images ``[B, C, H, W]`` of which each value is drawn from the probabilities that a pass over
    all values before it gives.
    """
    values = torch.zeros(count, 0, dtype=torch.int64)
    total = math.prod(size) * model.in_chans
    drawn = [numbers_of(seed, i, 0, total) for i in range(count)]
    for place in range(total):
        with torch.no_grad():
            logits = model.predict(values, size, labels)[:, -1].double().numpy()
        found = []
        for i in range(count):
            odds = np.exp((logits[i] - logits[i].max()) / temperature)
            below = np.cumsum(odds / odds.sum()) <= drawn[i][place]
            found.append(int(below.sum()))
        values = torch.cat([values, torch.tensor(found)[:, None]], 1)
    return values.unflatten(1, (*size, model.in_chans)).permute(0, 3, 1, 2).to(torch.uint8)


@every_kind
def test_the_recurrence_generates_what_the_parallel_form_generates(kind, monkeypatch):
    model = make(kind)
    monkeypatch.setattr(value_sampling, "BLOCK", 8)  # random numbers are drawn in several blocks
    labels = torch.arange(4) % 3 if model.conditioned else None
    wanted = by_the_parallel_form(model, 4, labels, 11, temperature=0.7)
    found = visionattn.generate(model, 4, seed=11, temperature=0.7)
    assert torch.equal(found.images, wanted)
    assert found.classes == ([NAMES[i] for i in (0, 1, 2, 0)] if model.conditioned else [])
    assert len(wanted.unique()) > (1 if kind == "mixture" else 10)
    # Bits are the model's own, whatever the temperature.
    with torch.no_grad():
        nats = -model(found.images, labels).mean((1, 2, 3))
    torch.testing.assert_close(found.bits_per_dim, nats / math.log(2), rtol=1e-12, atol=0)


def test_an_image_depends_on_the_seed_and_its_number_alone():
    model = make("conditioned")
    before = torch.random.get_rng_state()
    seven = visionattn.generate(model, 7, seed=3, batch_size=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    four = visionattn.generate(model, 4, seed=3, batch_size=1)
    assert torch.equal(seven.images[:4], four.images)
    torch.testing.assert_close(seven.bits_per_dim[:4], four.bits_per_dim, rtol=1e-12, atol=0)
    assert not torch.equal(visionattn.generate(model, 1, seed=4).images[0], four.images[0])
    named = visionattn.generate(model, 5, seed=3, classes=["birch", 2])
    assert named.classes == ["birch", "cedar", "birch", "cedar", "birch"]
    assert torch.equal(named.images[4], seven.images[4])
    assert not torch.equal(named.images[0], seven.images[0])


def test_temperature_0_takes_the_most_probable_level_whatever_the_seed():
    model = make()
    one, other = (visionattn.generate(model, 2, temperature=0, seed=seed) for seed in (1, 2))
    assert torch.equal(one.images, other.images)
    with torch.no_grad():
        assert torch.equal(model.logits(one.images).argmax(1).to(torch.uint8), one.images)
    found = visionattn.generate(model, 2, temperature=1e-300)
    assert torch.equal(found.images, one.images)


def test_levels_without_probability_are_never_chosen():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]], dtype=torch.float64)
    numbers = torch.tensor([0.0, 0.25, 0.5 - 2**-53, 0.5, 1 - 2**-53], dtype=torch.float64)
    found = choose(logits.expand(5, -1), 1.0, numbers)
    assert found.tolist() == [1, 1, 1, 3, 3]


def prompts_of(model, count=3, seed=2):
    shape = count, *SIZE, model.in_chans
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_completions_keep_the_given_rows_and_see_no_others():
    model = make("colour")
    prompts = prompts_of(model)
    found = visionattn.generate(model, 2, complete=prompts, keep=0.4, batch_size=4)
    rows = torch.from_numpy(prompts).permute(0, 3, 1, 2).repeat_interleave(2, 0)
    assert torch.equal(found.images[:, :, :2], rows[:, :, :2])
    assert not torch.equal(found.images[:, :, 2:], rows[:, :, 2:])
    assert not torch.equal(found.images[0], found.images[1])
    assert found.paths == [f"image {i}" for i in (0, 0, 1, 1, 2, 2)]
    prompts[:, 2:] = 9
    again = visionattn.generate(model, 2, complete=prompts, keep=0.4)
    assert torch.equal(again.images, found.images)
    with torch.no_grad():
        nats = -model(found.images)[:, :, 2:].mean((1, 2, 3))
    torch.testing.assert_close(found.bits_per_dim, nats / math.log(2), rtol=1e-12, atol=0)
    # Other completions and other prompts change none, and an image goes on as it was generated.
    alone = visionattn.generate(model, 1, complete=prompts[:2], keep=0.4)
    assert torch.equal(alone.images, found.images[[0, 2]])
    whole = visionattn.generate(model, 3, seed=6).images
    given = whole.permute(0, 2, 3, 1).numpy()
    again = visionattn.generate(model, 1, complete=given, keep=0.6, seed=6)
    assert torch.equal(again.images, whole)


def test_prompts_have_the_class_under_which_their_rows_are_the_most_likely():
    model = make("conditioned", in_chans=1)
    torch.nn.init.normal_(model.class_embed.weight, std=2)
    prompts = prompts_of(model, 8)
    images = torch.from_numpy(prompts).permute(0, 3, 1, 2)
    with torch.no_grad():
        nats = [model(images, torch.full((8,), label))[:, :, :2] for label in range(3)]
    wanted = torch.stack(nats).sum((2, 3, 4)).argmax(0)
    assert len(wanted.unique()) > 1
    found = visionattn.generate(model, 1, complete=prompts, keep=0.4)
    assert found.classes == [NAMES[i] for i in wanted]
    named = visionattn.generate(model, 3, complete=prompts[:2], classes=["cedar", 0])
    assert named.classes == ["cedar", "ash", "cedar"] * 2


PICTURE = np.zeros((5, 7), np.uint8)
WRONG = [
    ({"count": 0}, "count must be at least 1, got 0"),
    ({"temperature": -1.0}, "temperature must be 0 or above, and finite, got -1.0"),
    ({"seed": -1}, "seed must be at least 0"),
    ({"img_size": 0}, "img_size must be above 0"),
    ({"keep": 0.5}, "keep is a share of the images of --complete, which is missing"),
    ({"classes": ["ash"]}, "classes do nothing"),
    ({"img_size": (2**12, 2**13)}, "got 64 of 4096 x 8192 px; lower count or img_size"),
    ({"count": 2**24 + 1}, "expected at most 16,777,216 images"),
    ({"complete": PICTURE, "keep": 1.0}, "keep must be above 0 and below 1, got 1.0"),
    ({"complete": PICTURE.astype(np.float32)}, "image 0: float32 values from 0 to 0, and nothing"),
    ({"complete": np.full(SIZE, 300, np.uint16)}, "image 0 is of another depth: it has no bytes"),
    ({"amp": "fp16"}, "amp must be one of none, bf16"),
    ({"device": "cpu"}, "a module stays where it is"),
]


CONDITIONED_WRONG = [
    ({"classes": ["oak"]}, "no class oak; the classes are ash, birch"),
    ({"classes": [3]}, "no class 3; the classes are ash, birch"),
    ({"classes": []}, "classes is empty"),
]


@pytest.mark.parametrize(
    "kind, options, said",
    [("kernelized", *row) for row in WRONG] + [("conditioned", *row) for row in CONDITIONED_WRONG],
)
def test_options_that_cannot_be_are_refused(kind, options, said):
    with pytest.raises(ValueError, match=said):
        visionattn.generate(make(kind), **options)


def test_a_model_of_few_levels_generates_them_and_takes_no_others():
    model = make(levels=16)
    assert visionattn.generate(model, 4).images.max() == 15
    prompts = np.full((1, *SIZE), 15, np.uint8)
    assert visionattn.generate(model, complete=prompts[0]).images.shape == (1, 1, *SIZE)
    prompts[0, 4, 6] = 16
    with pytest.raises(ValueError, match="values up to 16, and the model knows levels 0 to 15"):
        visionattn.generate(model, complete=prompts[0])


def test_models_that_generate_no_images_say_why():
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
    wrong, silent = make(), make()
    wrong.head.bias.data[3] = math.nan
    del silent.data_spec
    for model, said in (
        (vit, "is no pixel decoder and generates no images"),
        (make(levels=300), "has values of 300 levels, and images at most 256"),
        (silent, "PixelDecoder does not say what its images are"),
        (wrong, "the outputs of the model are not finite by value 1"),
    ):
        with pytest.raises(ValueError, match=said):
            visionattn.generate(model, 1)
