"""Generation: images equal the parallel form; files, and how a stopped run goes on."""

import json
import math
import os
import shutil

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import visionattn
from tests.helpers.inference_files import write_decoder
from tests.helpers.tools import assert_one_error, read_csv, written
from visionattn.command import run
from visionattn.inference.value_sampling import choose
from visionattn.models.pixel_decoder import PixelDecoder
from visionattn.models.weights import DataSpec, load_model

FILE = "best.safetensors"
FILE_SIZE = 6, 9


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a conditioned grey decoder, a coloured one, and images for both."""
    monkeypatch.chdir(tmp_path)
    write_decoder(FILE, conditioned=True)
    write_decoder("colour.safetensors", 3)
    drawn = np.random.default_rng(5)
    for name, shape in {"grey": FILE_SIZE, "colour": (*FILE_SIZE, 3)}.items():
        (tmp_path / name).mkdir()
        for number in range(2):
            pixels = drawn.integers(0, 256, shape, np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    return tmp_path


def opened(path):
    with Image.open(path) as picture:
        return np.asarray(picture)


def tile(picture, row, column, size=FILE_SIZE, times=7, gap=6):
    """A picture of a sheet; each of its pixels is checked to be a square of one value."""
    top = gap + row * (size[0] * times + gap)
    left = gap + column * (size[1] * times + gap)
    large = picture[top : top + size[0] * times, left : left + size[1] * times]
    small = large[::times, ::times]
    assert np.array_equal(large, small.repeat(times, 0).repeat(times, 1))
    return small


def test_the_grid_has_every_image_pixel_by_pixel_and_nothing_else(folder, capsys):
    assert run("generate", [FILE, "--count", "8", "--seed", "4", "--output", "grid.png"]) == 0
    printed = capsys.readouterr()
    found = visionattn.generate(FILE, 8, seed=4)
    picture = opened("grid.png")
    # Three classes: a column for each.
    assert picture.shape == (3 * (6 * 7 + 6) + 6, 3 * (9 * 7 + 6) + 6) and picture.dtype == np.uint8
    for number in range(8):
        assert np.array_equal(tile(picture, *divmod(number, 3)), found.images[number, 0])
    assert (tile(picture, 2, 2) == 200).all()  # the ground
    first, last = printed.out.splitlines()
    assert first == f"pixel_decoder of {FILE}; images: 8 of 6 x 9 px"
    mean = float(found.bits_per_dim.mean())
    assert last == f"grid.png: 8 images, {mean:.3f} bits per generated value" and not printed.err


def test_a_folder_has_a_png_of_each_image_and_their_index(folder):
    assert (
        run("generate", [FILE, "--count", "11", "--classes", "cedar", "0", "--output", "out"]) == 0
    )
    found = visionattn.generate(FILE, 11, classes=["cedar", 0])
    rows = read_csv(folder / "out" / "index.csv")
    assert set(os.listdir("out")) == {*(row["file"] for row in rows), "index.csv", "generate.json"}
    assert [row["file"] for row in rows] == [f"{i:02d}.png" for i in range(11)]
    for number, row in enumerate(rows):
        assert np.array_equal(opened(folder / "out" / row["file"]), found.images[number, 0])
        assert row["class"] == ("ash" if number % 2 else "cedar")
        assert abs(float(row["bits_per_dim"]) - found.bits_per_dim[number]) < 6e-5
        assert (row["image"], row["path"], row["given_rows"]) == (str(number), "", "")
    about = json.loads((folder / "out" / "generate.json").read_text())
    assert about["images"] == 11 and about["provenance"]["options"]["classes"] == ["cedar", "0"]
    assert about["provenance"]["torch"] == torch.__version__


def test_completions_follow_their_original_with_a_line_at_the_given_rows(folder):
    words = ["colour.safetensors", "--complete", "colour", "--count", "2", "--keep", "0.3"]
    assert run("generate", [*words, "--output", "grid.png"]) == 0
    names = ["colour/0.png", "colour/1.png"]
    found = visionattn.generate("colour.safetensors", 2, complete=names, keep=0.3)
    picture = opened("grid.png")
    for row, name in enumerate(names):
        original = opened(name)
        assert np.array_equal(tile(picture, row, 0), original)
        for copy in (1, 2):
            small = tile(picture, row, copy)
            assert np.array_equal(small, found.images[2 * row + copy - 1].permute(1, 2, 0))
            beside = picture[6 + row * 48 :, copy * 69 : copy * 69 + 6][:48]
            marked = (beside == (213, 94, 0)).all(2)
            assert marked[:14, 2:4].all() and marked.sum() == 14 * 2
    assert run("generate", [*words, "--output", "out"]) == 0
    rows = read_csv(folder / "out" / "index.csv")
    assert [row["image"] + row["completion"] for row in rows] == ["00", "01", "10", "11"]
    assert [row["path"] for row in rows] == [names[0], names[0], names[1], names[1]]
    assert {row["given_rows"] for row in rows} == {"2"}
    with torch.no_grad():
        bits = -load_model("colour.safetensors")(found.images)[:, :, :2].mean((1, 2, 3))
    given = [float(row["given_bits_per_dim"]) * math.log(2) for row in rows]
    assert given == pytest.approx(bits.tolist(), abs=1e-4)


def test_images_are_completed_as_training_saw_them(folder):
    """A larger image is brought to the size of the training, unless a size is named."""
    large = np.random.default_rng(1).integers(0, 256, (12, 18, 3), np.uint8)
    Image.fromarray(large).save("large.png")
    words = ["colour.safetensors", "--complete", "large.png", "--output"]
    assert run("generate", [*words, "a.npy"]) == 0
    found = np.load("a.npy")
    assert found.dtype == np.uint8 and found.shape == (1, 6, 9, 3)
    means = large.reshape(6, 2, 9, 2, 3).mean((1, 3))
    assert np.abs(found[0, :3] - means[:3]).max() <= 0.5
    assert run("generate", [*words, "b.npy", "--img-size", "12", "18"]) == 0
    assert np.array_equal(np.load("b.npy")[0, :6], large[:6])


def stopped(monkeypatch, after):
    """Let Ctrl-C come once ``after`` values of all batches are there; return the count."""
    step, count = PixelDecoder.step, [0]

    def counted(*given):
        if count[0] == after:
            raise KeyboardInterrupt
        count[0] += 1
        return step(*given)

    monkeypatch.setattr(PixelDecoder, "step", counted)
    return count


@pytest.mark.parametrize("output, after", [("grid.png", 54 + 31), ("out", 54)])
def test_the_same_command_goes_on_where_it_was_stopped(output, after, folder, monkeypatch, capsys):
    words = [FILE, "--count", "5", "--batch-size", "2", "--output", output]
    assert run("generate", words) == 0

    def made():
        return {name: data for name, data in written(folder).items() if "generate.json" not in name}

    wanted, done = made(), folder / output
    shutil.rmtree(done) if done.is_dir() else done.unlink()
    with monkeypatch.context() as patched:
        stopped(patched, after)
        assert run("generate", words) == 130
    assert not done.exists()
    # Other work is not mistaken for it.
    capsys.readouterr()
    assert run("generate", [*words, "--seed", "1"]) == 2
    assert_one_error(capsys, "has unfinished work of another call for")
    with monkeypatch.context() as patched:
        count = stopped(patched, -1)
        assert run("generate", words) == 0
        assert count[0] == 2 * 54  # of three batches one is there
    assert made() == wanted


def test_a_batch_that_does_not_fit_names_a_smaller_one(folder, monkeypatch, capsys):
    monkeypatch.setattr(PixelDecoder, "step", lambda *given: torch.ones(2**55))
    assert run("generate", [FILE, "--count", "6", "--output", "a.npy"]) == 3
    error = capsys.readouterr().err
    assert "out of memory with 6 images of 6 x 9 px at once; try --batch-size 3" in error


SMALL = {"embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0}
KINDS = {
    "kernelized": {},
    "softmax": {"attention": "softmax"},
    "colour": {"in_chans": 3, "reach": 1},
    "mixture": {"output": "mixture", "mixtures": 3, "rows": 1},
    "conditioned": {"conditioned": True, "num_classes": 3, "in_chans": 2},
}
SIZE = 5, 7
NAMES = ("ash", "birch", "cedar")


def make(kind="kernelized", **more):
    """A decoder of random weights whose levels differ in probability, and what its images are."""
    torch.manual_seed(0)
    model = PixelDecoder(**SMALL | KINDS[kind] | more)
    if model.output == "categorical":
        torch.nn.init.normal_(model.head.weight, std=0.4)
    names = NAMES if model.conditioned else ()
    half = (0.5,) * model.in_chans
    model.data_spec = DataSpec(model.in_chans, len(names), names, half, half, None, SIZE)
    return model.double().eval()


def by_the_parallel_form(model, count, labels, seed, temperature):
    """Images ``[B, C, H, W]``: each value is drawn from the probabilities of a pass over all values
    before it, with random numbers by numpy's own means.
    """
    values = torch.zeros(count, 0, dtype=torch.int64)
    total = math.prod(SIZE) * model.in_chans
    keys = [np.array([seed, image], np.uint64) for image in range(count)]
    numbers = [np.random.Generator(np.random.Philox(key=key)).random(total) for key in keys]
    for place in range(total):
        with torch.no_grad():
            logits = model.predict(values, SIZE, labels)[:, -1].double().numpy()
        odds = np.exp((logits - logits.max(1, keepdims=True)) / temperature)
        shares = np.cumsum(odds / odds.sum(1, keepdims=True), 1)
        found = (shares <= np.stack(numbers)[:, place, None]).sum(1)
        values = torch.cat([values, torch.from_numpy(found)[:, None]], 1)
    return values.unflatten(1, (*SIZE, model.in_chans)).permute(0, 3, 1, 2).to(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_recurrence_generates_what_the_parallel_form_generates(kind):
    model = make(kind)
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


def test_an_image_depends_only_on_the_seed_and_its_number():
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
    # An image goes on as it was generated.
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
    ({"temperature": -1.0}, "temperature must be finite and at least 0, got -1.0"),
    ({"seed": -1}, "seed must be at least 0"),
    ({"img_size": 0}, "img_size must be above 0"),
    ({"keep": 0.5}, "keep needs --complete"),
    ({"classes": ["ash"]}, "classes need a model trained with classes"),
    ({"classes": "ash"}, "classes must be a list, got ash"),
    ({"img_size": (2**12, 2**13)}, "got 64 of 4096 x 8192 px; lower count or img_size"),
    ({"count": 2**24 + 1}, "expected at most 16,777,216 images"),
    ({"complete": PICTURE, "keep": 1.0}, "keep must be above 0 and below 1, got 1.0"),
    ({"complete": PICTURE.astype(np.float32)}, "image 0: unknown value range of float32 values"),
    (
        {"complete": np.full(SIZE, 300, np.uint16)},
        "got no bytes \\(image 0\\); convert its bit depth",
    ),
    ({"amp": "fp16"}, "amp must be one of none, bf16"),
    ({"device": "cpu"}, "a module keeps its device"),
]


CONDITIONED_WRONG = [
    ({"classes": []}, "classes is empty"),
    ({"classes": ["oak"]}, "no class oak; the classes are ash, birch"),
    ({"classes": [3]}, "no class 3; the classes are ash, birch"),
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
    with pytest.raises(ValueError, match="expected levels 0 to 15, got values up to 16"):
        visionattn.generate(model, complete=prompts[0])


def test_models_that_generate_no_images_say_why():
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
    wrong, silent = make(), make()
    wrong.head.bias.data[3] = math.nan
    del silent.data_spec
    for model, said in (
        (vit, "is not a pixel decoder"),
        (make(levels=300), "expected at most 256 levels for images, got 300"),
        (silent, "the preprocessing of PixelDecoder is unknown"),
        (wrong, "the outputs of the model are not finite at value 1"),
    ):
        with pytest.raises(ValueError, match=said):
            visionattn.generate(model, 1)
