"""Which samples count as read as digits, what is no digit, and how far a sample is from a known
image.
"""

import csv

import numpy as np
import pytest
import torch

from visionattn.data.config import DataConfig
from visionattn.data.splits import build_splits
from visionattn.lab.samples import (
    above_zero,
    cells,
    digits_of,
    main,
    measure,
    nearest,
    open_classifier,
    read_images,
    spoiled,
    write_images,
)
from visionattn.models.pixel_decoder import PixelDecoder
from visionattn.models.registration import create
from visionattn.models.shipped import FILES
from visionattn.models.weights import save_model

SIZE = (6, 5)
NAME = "scaleformer_vit_digits"


class Remembering(PixelDecoder):
    """Write a known image of each class: its level is by far the most likely at each place."""

    def __init__(self, images):
        super().__init__(1, 10, embed_dim=8, depth=1, num_heads=1, conditioned=True)
        self.images = images.reshape(len(images), -1)

    def step(self, values, state):
        wanted = self.images[state.labels.numpy(), state.position]
        state.position += 1
        return torch.nn.functional.one_hot(torch.from_numpy(wanted).long(), 256) * 60.0


def decoder(**options):
    torch.manual_seed(0)
    return PixelDecoder(1, 10, embed_dim=16, depth=2, num_heads=2, **options).eval()


def saved(path, **options):
    args = dict(embed_dim=16, depth=1, num_heads=2) | options
    spec = build_splits(DataConfig(name="digits", img_size=6, task="generate"), 0).spec
    model = create("pixel_decoder", "generate", 10, 1, args)
    save_model(path, model, "pixel_decoder", args, spec)
    return str(path)


def test_samples_are_drawn_one_value_after_the_other_with_the_temperature():
    model, labels = decoder(conditioned=True), torch.tensor([3, 1, 4])
    found = write_images(model, SIZE, labels, temperature=0.5, seed=7)
    assert found.shape == (3, *SIZE, 1) and found.dtype == np.uint8
    # The parallel form gives the chances of every value given those before it.
    images = torch.from_numpy(found.transpose(0, 3, 1, 2).astype(np.int64))
    chances = (model.logits(images, labels).flatten(2).double() / 0.5).softmax(1)  # [B, 256, N]
    generator, drawn = torch.Generator().manual_seed(7), []
    for place in range(chances.shape[2]):
        drawn.append(torch.multinomial(chances[..., place].float(), 1, generator=generator)[:, 0])
    assert torch.equal(torch.stack(drawn, 1), images.flatten(1))
    other = write_images(model, SIZE, labels, temperature=0.5, seed=8)
    assert not np.array_equal(found, other)


def test_a_model_without_classes_is_asked_for_none():
    found = write_images(decoder(), SIZE, torch.zeros(2, dtype=torch.int64), temperature=1, seed=0)
    assert found.shape == (2, *SIZE, 1)


def test_images_are_read_as_the_classifier_sees_those_of_its_training():
    """At 8 pixels as they lie in memory, so that the data set itself enlarges them."""
    test, classifier = digits_of("test", (8, 8)), open_classifier(NAME)
    whole = build_splits(DataConfig(name="digits"), 0).test
    assert np.array_equal(test.images, whole.images) and np.array_equal(test.labels, whole.labels)
    found = read_images(classifier, test.images[:150])  # more than a batch
    assert (found.classes == test.labels[:150]).mean() > 0.97
    assert found.confidence.min() >= 0.1 and found.confidence.max() <= 1
    for index in (0, 120):
        alone = read_images(classifier, test.images[index : index + 1])
        assert alone.classes[0] == found.classes[index]
        assert alone.confidence[0] == pytest.approx(found.confidence[index], abs=1e-5)


def test_a_sample_counts_where_it_is_read_as_the_class_that_was_asked_for():
    """A model that writes a digit of the class asked for passes, one that writes the next class is
    as sure and never passes.
    """
    train = digits_of("train", (8, 8))
    one_each = np.stack([train.images[train.labels == digit][0] for digit in range(10)])
    classifier, how = open_classifier(NAME), dict(size=(8, 8), count=30, temperatures=[1.0], seed=0)
    right = measure(Remembering(one_each).eval(), classifier, **how)[1]
    wrong = measure(Remembering(np.roll(one_each, 1, 0)).eval(), classifier, **how)[1]
    assert right["read_as_asked"] >= 0.9 and wrong["read_as_asked"] <= 0.1
    assert right["sure"] == wrong["sure"] >= 0.5
    assert right["nearest"] == wrong["nearest"] == 0  # copies of training images


def test_test_images_pass_in_19_of_20_and_what_is_no_digit_less_often():
    model, classifier = decoder(conditioned=True), open_classifier(NAME)
    rows = measure(model, classifier, size=(8, 8), count=3, temperatures=[1.0, 0.5], seed=0)
    assert [row["images"] for row in rows] == [
        "test images",
        "samples, temperature 1",
        "samples, temperature 0.5",
        "halves of two",
        "pieces in wrong places",
        "noise",
    ]
    first, *_, halves, pieces, noise = rows
    assert first["number"] == 359 and first["read_as_asked"] > 0.97
    assert first["sure"] == pytest.approx(0.95, abs=1 / 359)
    assert halves["sure"] < 0.5 and pieces["sure"] < 0.1 and noise["sure"] < 0.1
    assert {row["read_as_asked"] for row in rows[3:]} == {None}
    assert cells(rows[1])[1:3] == ["3", f"{100 * rows[1]['read_as_asked']:.1f} %"]
    assert cells(noise)[2] is cells(noise)[5] is None


@pytest.mark.parametrize("shape", [(7, 9, 6, 1), (4, 8, 8, 1)])
def test_what_is_no_digit_is_made_of_the_images(shape):
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    found = spoiled(images, 3)
    half = shape[1] // 2
    assert all(made.shape == shape and made.dtype == np.uint8 for made in found.values())
    assert np.array_equal(found["halves of two"][:, :half], images[:, :half])
    below = {each.tobytes() for each in images[:, half:]}
    assert {each.tobytes() for each in found["halves of two"][:, half:]} == below
    moved = found["pieces in wrong places"]
    assert not np.array_equal(moved, images)
    if shape[1] % 4 == shape[2] % 4 == 0:  # every value is still there
        assert np.array_equal(
            np.sort(moved.reshape(len(images), -1)), np.sort(images.reshape(4, -1))
        )


def test_the_nearest_image_is_found_and_the_median_taken():
    known = np.zeros((2, 3, 2, 1), np.uint8)
    known[1] = 100
    images = np.stack([np.full((3, 2, 1), level, np.uint8) for level in (10, 97, 30)])
    assert nearest(images, known) == pytest.approx(10)  # of 10, 3 and 30


def test_the_command_prints_a_table_and_writes_its_rows(tmp_path, capsys):
    path = saved(tmp_path / "a.safetensors", conditioned=True)
    threads = torch.get_num_threads()
    flags = ["--count", "5", "--temperature", "1", "0.7", "--csv", str(tmp_path / "a.csv")]
    assert main([path, *flags]) == 0
    assert torch.get_num_threads() == threads
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert [row["number"] for row in rows] == ["359", "5", "5", "359", "359", "359"]
    assert "samples, temperature 0.7 | 5 |" in capsys.readouterr().out


def test_bad_input_is_one_line(tmp_path, capsys):
    path = saved(tmp_path / "a.safetensors")
    for words, line in (
        ([str(FILES[NAME])], "writes no images"),
        ([path, "--classifier", path], "reads no digits"),
        ([str(tmp_path / "b")], "b"),
        ([path, "--csv", str(tmp_path / "no" / "a.csv")], "no folder"),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert line in error and error.count("\n") == 1
    for wrong in ("0", "-1", "nan", "inf", "much"):
        with pytest.raises(SystemExit) as end:
            main([path, "--temperature", wrong])
        assert end.value.code == 2
    assert above_zero("0.25") == 0.25
