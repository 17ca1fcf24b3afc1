"""``visionattn generate``: the files that it writes, and how it goes on."""

import json
import math
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import visionattn
from tests.helpers.inference_files import write_decoder
from tests.helpers.tools import assert_one_error, read_csv, written
from visionattn.command import run
from visionattn.models.pixel_decoder import PixelDecoder
from visionattn.models.weights import load_model

FILE = "best.safetensors"
SIZE = 6, 9


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a conditioned grey decoder, a coloured one, and images for both."""
    monkeypatch.chdir(tmp_path)
    write_decoder(FILE, conditioned=True)
    write_decoder("colour.safetensors", 3)
    drawn = np.random.default_rng(5)
    for name, shape in {"grey": SIZE, "colour": (*SIZE, 3)}.items():
        (tmp_path / name).mkdir()
        for number in range(2):
            pixels = drawn.integers(0, 256, shape, np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    return tmp_path


def generate(words):
    return run("generate", words)


def opened(path):
    with Image.open(path) as picture:
        return np.asarray(picture)


def tile(picture, row, column, size=SIZE, times=7, gap=6):
    """A picture of a sheet, of which each pixel is found to be a square of one value."""
    top = gap + row * (size[0] * times + gap)
    left = gap + column * (size[1] * times + gap)
    large = picture[top : top + size[0] * times, left : left + size[1] * times]
    small = large[::times, ::times]
    assert np.array_equal(large, small.repeat(times, 0).repeat(times, 1))
    return small


def test_the_grid_has_every_image_pixel_by_pixel_and_nothing_else(folder, capsys):
    assert generate([FILE, "--count", "8", "--seed", "4", "--output", "grid.png"]) == 0
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


def test_an_array_has_all_images_with_their_channels_last(folder):
    words = "--checkpoint colour.safetensors --count 5 --batch-size 2 --img-size 4 7"
    assert generate([*words.split(), "--output", "all.npy"]) == 0
    found = visionattn.generate("colour.safetensors", 5, img_size=(4, 7), batch_size=2)
    array = np.load("all.npy")
    assert array.dtype == np.uint8 and array.shape == (5, 4, 7, 3)
    assert np.array_equal(array, found.images.permute(0, 2, 3, 1))


def test_a_folder_has_a_png_of_each_image_and_their_index(folder):
    assert generate([FILE, "--count", "11", "--classes", "cedar", "0", "--output", "out"]) == 0
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


def test_completions_stand_behind_their_original_with_a_line_beside_what_was_given(folder):
    words = ["colour.safetensors", "--complete", "colour", "--count", "2", "--keep", "0.3"]
    assert generate([*words, "--output", "grid.png"]) == 0
    names = ["colour/0.png", "colour/1.png"]
    found = visionattn.generate("colour.safetensors", 2, complete=names, keep=0.3)
    picture = opened("grid.png")
    for row, name in enumerate(names):
        original = opened(name)
        assert np.array_equal(tile(picture, row, 0), original)
        for copy in (1, 2):
            small = tile(picture, row, copy)
            assert np.array_equal(small, found.images[2 * row + copy - 1].permute(1, 2, 0))
            assert np.array_equal(small[:2], original[:2])
            assert not np.array_equal(small[2:], original[2:])
            beside = picture[6 + row * 48 :, copy * 69 : copy * 69 + 6][:48]
            marked = (beside == (213, 94, 0)).all(2)
            assert marked[:14, 2:4].all() and marked.sum() == 14 * 2
    assert generate([*words, "--output", "out"]) == 0
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
    large = np.random.default_rng(1).integers(0, 256, (12, 18), np.uint8)
    Image.fromarray(large).save("large.png")
    assert generate([FILE, "--complete", "large.png", "--output", "a.npy"]) == 0
    means = large.reshape(6, 2, 9, 2).mean((1, 3))
    assert np.abs(np.load("a.npy")[0, :3, :, 0] - means[:3]).max() <= 0.5
    larger = ["--img-size", "12", "18", "--output", "b.npy"]
    assert generate([FILE, "--complete", "large.png", *larger]) == 0
    assert np.array_equal(np.load("b.npy")[0, :6, :, 0], large[:6])


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


def test_ctrl_c_leaves_nothing_where_nothing_is_worth_keeping(folder, monkeypatch, capsys):
    before = written(folder)
    stopped(monkeypatch, 20)
    assert generate([FILE, "--count", "3", "--output", "out"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert written(folder) == before and not (folder / "out").exists()


@pytest.mark.parametrize("output, after", [("grid.png", 54 + 31), ("out", 54)])
def test_the_same_command_goes_on_where_it_was_stopped(output, after, folder, monkeypatch, capsys):
    words = [FILE, "--count", "5", "--batch-size", "2", "--output", output]
    assert generate(words) == 0

    def made():
        return {name: data for name, data in written(folder).items() if "generate.json" not in name}

    wanted, done = made(), folder / output
    shutil.rmtree(done) if done.is_dir() else done.unlink()
    with monkeypatch.context() as patched:
        stopped(patched, after)
        assert generate(words) == 130
    assert not done.exists()
    # Other work is not mistaken for it.
    capsys.readouterr()
    assert generate([*words, "--seed", "1"]) == 2
    assert_one_error(capsys, "keeps other work that was to become")
    with monkeypatch.context() as patched:
        count = stopped(patched, -1)
        assert generate(words) == 0
        assert count[0] == 2 * 54  # of three batches one is there
    assert made() == wanted


def test_a_batch_that_does_not_fit_names_a_smaller_one(folder, monkeypatch, capsys):
    monkeypatch.setattr(PixelDecoder, "step", lambda *given: torch.ones(2**55))
    assert generate([FILE, "--count", "6", "--output", "a.npy"]) == 3
    error = capsys.readouterr().err
    assert "out of memory with 6 images of 6 x 9 px at once; try --batch-size 3" in error
