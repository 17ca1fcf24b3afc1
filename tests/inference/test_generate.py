"""``visionattn generate``: the files that it writes, how it goes on, and what it refuses."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

import visionattn
from tests.helpers.inference_files import write_decoder, write_weights
from tests.helpers.tools import ROOT, assert_one_error, load_tool, written
from visionattn.cli import progress
from visionattn.inference import work
from visionattn.inference.generate.sheet import sheet_size
from visionattn.models.pixel_decoder import PixelDecoder
from visionattn.models.weights import load_model

generate = load_tool("generate")
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
    rest = picture.copy()
    for number in range(8):
        top, left = (6 + i * side for i, side in zip(divmod(number, 3), (48, 69), strict=True))
        rest[top : top + 42, left : left + 63] = 200
    assert (rest == 200).all()
    first, last = printed.out.splitlines()
    assert first == f"pixel_decoder of {FILE}; images: 8 of 6 x 9 px"
    mean = float(found.bits_per_dim.mean())
    assert last == f"grid.png: 8 images, {mean:.3f} bits per written value" and not printed.err
    assert os.listdir(folder).count("grid.png") == 1
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_an_array_has_all_images_with_their_channels_last(folder):
    words = ["--checkpoint", "colour.safetensors", "--count", "5", "--batch-size", "2"]
    assert generate([*words, "--img-size", "4", "7", "--output", "all.npy"]) == 0
    found = visionattn.generate("colour.safetensors", 5, img_size=(4, 7), batch_size=2)
    array = np.load("all.npy")
    assert array.dtype == np.uint8 and array.shape == (5, 4, 7, 3)
    assert np.array_equal(array, found.images.permute(0, 2, 3, 1))


def rows_of(folder):
    with open(folder / "index.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_folder_has_a_png_of_each_image_and_their_index(folder):
    assert generate([FILE, "--count", "11", "--classes", "cedar", "0", "--output", "out"]) == 0
    found = visionattn.generate(FILE, 11, classes=["cedar", 0])
    rows = rows_of(folder / "out")
    assert set(os.listdir("out")) == {*(row["file"] for row in rows), "index.csv", "generate.json"}
    assert [row["file"] for row in rows] == [f"{i:02d}.png" for i in range(11)]
    for number, row in enumerate(rows):
        assert np.array_equal(opened(folder / "out" / row["file"]), found.images[number, 0])
        assert row["class"] == ("ash" if number % 2 else "cedar")
        assert float(row["bits_per_dim"]) == pytest.approx(
            float(found.bits_per_dim[number]), abs=6e-5
        )
        assert row["image"] == str(number)
        assert {row[key] for key in ("path", "given_rows", "completion")} == {""}
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
            beside = picture[6 + row * 48 :, 6 + copy * 69 - 6 : 6 + copy * 69][: 42 + 6]
            marked = (beside == (213, 94, 0)).all(2)
            assert marked[: 2 * 7, 2:4].all() and marked.sum() == 2 * 7 * 2
    assert generate([*words, "--output", "out"]) == 0
    rows = rows_of(folder / "out")
    assert [(row["image"], row["completion"]) for row in rows] == [
        ("0", "0"),
        ("0", "1"),
        ("1", "0"),
        ("1", "1"),
    ]
    assert [row["path"] for row in rows] == [names[0], names[0], names[1], names[1]]
    assert {row["given_rows"] for row in rows} == {"2"}
    with torch.no_grad():
        nats = -load_model("colour.safetensors")(found.images)
    for row, each in zip(rows, nats / math.log(2), strict=True):
        assert float(row["bits_per_dim"]) == pytest.approx(float(each[:, 2:].mean()), abs=1e-4)
        given = float(row["given_bits_per_dim"])
        assert given == pytest.approx(float(each[:, :2].mean()), abs=1e-4)


def test_images_are_completed_as_training_saw_them(folder):
    """A larger image is brought to the size of the training, unless a size is named."""
    large = np.random.default_rng(1).integers(0, 256, (24, 36), np.uint8)
    Image.fromarray(large).save("large.png")
    assert generate([FILE, "--complete", "large.png", "--output", "a.npy"]) == 0
    means = large.reshape(6, 4, 9, 4).mean((1, 3))
    assert np.abs(np.load("a.npy")[0, :3, :, 0] - means[:3]).max() <= 0.5
    larger = ["--img-size", "24", "36", "--output", "b.npy"]
    assert generate([FILE, "--complete", "large.png", *larger]) == 0
    assert np.array_equal(np.load("b.npy")[0, :12, :, 0], large[:12])


def test_images_of_their_own_size_are_completed_at_it(folder):
    write_decoder("native.safetensors", size=None, fit="native")
    words = ["native.safetensors", "--complete", "grey", "--output"]
    assert generate([*words, "own.npy"]) == 0
    assert np.load("own.npy").shape == (2, *SIZE, 1)
    assert (
        generate(["native.safetensors", "--img-size", "3", "--count", "1", "--output", "a.npy"])
        == 0
    )


def change_bias(model):
    model.blocks[1].mlp.fc1.bias.data[2] = math.nan


REFUSED = {
    "no weights": ([], "name the weights first"),
    "no output": ([FILE], "--output is missing: a .png"),
    "no such weights": (["nowhere.safetensors", "--output", "a.png"], "no checkpoint at nowhere"),
    "an ending": ([FILE, "--output", "a.jpg"], "--output a.jpg must end in .png or .npy, or be a"),
    "no folder": ([FILE, "--output", "no/a.png"], "no folder"),
    "there": ([FILE, "--output", "there.png"], "there.png exists; --overwrite replaces it"),
    "a folder there": ([FILE, "--output", "grey"], "grey exists; name a folder that does not"),
    "a folder of others": (
        [FILE, "--output", "grey", "--overwrite"],
        "grey is no folder of visionattn generate, which --overwrite replaces; name another",
    ),
    "no images": ([FILE, "--count", "0", "--output", "a.png"], "count must be at least 1, got 0"),
    "too many": (
        [FILE, "--count", "1000000", "--output", "a.png"],
        "name a folder as --output, or fewer images",
    ),
    "another class": (
        [FILE, "--classes", "ash", "oak", "--output", "a.png"],
        "there is no class oak; the classes are ash, birch, cedar",
    ),
    "classes of none": (
        ["colour.safetensors", "--classes", "ash", "--output", "a.png"],
        "classes do nothing: pixel_decoder was trained without",
    ),
    "below 0": ([FILE, "--temperature", "-0.5", "--output", "a.png"], "temperature must be 0 or"),
    "too large": (
        [FILE, "--complete", "grey", "--img-size", "5", "9", "--output", "a.png"],
        "grey/0.png of 6 x 9 px is larger than the image of 5 x 9 px that it is to be part of",
    ),
    "all rows": (
        [FILE, "--complete", "grey", "--keep", "1", "--output", "a.png"],
        "keep must be above 0 and below 1, got 1.0, which is the whole image",
    ),
    "keep alone": ([FILE, "--keep", "0.5", "--output", "a.png"], "keep is a share of the images"),
    "colours": (
        [FILE, "--complete", "colour", "--output", "a.png"],
        "colour/0.png is of another depth: it has 3 channels, and the model writes 1",
    ),
    "no colours": (
        ["colour.safetensors", "--complete", "grey", "--output", "a.png"],
        "grey/0.png is of another depth: it has 1 channel, and the model writes 3",
    ),
    "16 bits": (
        [FILE, "--complete", "deep.png", "--output", "a.png"],
        "deep.png is of another depth: it has uint16 values, and the model writes 8 bits",
    ),
    "no image": ([FILE, "--complete", "text.png", "--output", "a.png"], "text.png: "),
    "two sizes": (
        ["native.safetensors", "--complete", "grey", "other.png", "--output", "a.png"],
        "other.png is seen as 4 x 9 px, and images of 6 x 9 px are written",
    ),
    "no size": (["native.safetensors", "--output", "a.png"], "img_size is missing: the model was"),
    "not finite": (
        ["nan.safetensors", "--output", "a.png"],
        "nan.safetensors is no use as weights: its blocks.1.mlp.fc1.bias has NaN or infinity",
    ),
    "five channels": (["five.safetensors", "--output", "a.png"], "pictures have 1 or 3 channels"),
    "taylorshift": (
        ["shifted.safetensors", "--output", "a.png"],
        "cannot write images: attention='taylorshift' has no causal form (its linear form",
    ),
    "scaleformer": (
        ["scaleformer.safetensors", "--output", "a.png"],
        "scaleformer_vit_t of scaleformer.safetensors is no pixel decoder and writes no images",
    ),
    "an option of others": ([FILE, "--top-k", "3", "--output", "a.png"], "unknown option --top-k"),
    "another precision": (
        [FILE, "--amp", "fp16", "--output", "a.png"],
        "amp must be one of none, bf16, got fp16",
    ),
}


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Weights of models that do not write, and images that are not for them."""
    place = tmp_path_factory.mktemp("others")
    write_weights(place / "scaleformer.safetensors")
    small = dict(patch_size=8, embed_dim=24, depth=1, num_heads=3)
    write_weights(place / "shifted.safetensors", name="taylorshift_vit_t", args=small)
    write_decoder(place / "nan.safetensors", change=change_bias)
    write_decoder(place / "five.safetensors", 5)
    write_decoder(place / "native.safetensors", size=None, fit="native")
    Image.fromarray(np.zeros(SIZE, np.uint16)).save(place / "deep.png")
    Image.fromarray(np.zeros((4, 9), np.uint8)).save(place / "other.png")
    (place / "text.png").write_text("no image")
    (place / "there.png").write_bytes(b"x")
    return place


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_one_line_and_exit_code_2_and_leaves_nothing(
    case, folder, others, capsys
):
    for path in others.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "there.png").unlink()
    (folder / "there.png").write_bytes(b"x")
    before = written(folder)
    words, said = REFUSED[case]
    assert generate(words) == 2
    assert_one_error(capsys, said)
    assert written(folder) == before


def test_outputs_are_replaced_only_when_asked(folder, capsys):
    for output in ("grid.png", "all.npy", "out"):
        words = [FILE, "--count", "2", "--output", output]
        assert generate(words) == 0
        before = written(folder)
        capsys.readouterr()
        assert generate([*words, "--seed", "1"]) == 2
        assert_one_error(capsys, f"{output} exists; --overwrite replaces it")
        assert written(folder) == before
        assert generate([*words, "--seed", "1", "--overwrite"]) == 0
        assert written(folder) != before


def stopped(monkeypatch, after, error=KeyboardInterrupt):
    """Let writing be stopped once so many values of all batches are there."""
    step, count = PixelDecoder.step, [0]

    def counted(*given):
        if count[0] == after:
            raise error
        count[0] += 1
        return step(*given)

    monkeypatch.setattr(PixelDecoder, "step", counted)
    return count


def test_ctrl_c_leaves_nothing_where_nothing_is_worth_keeping(folder, monkeypatch, capsys):
    before = written(folder)
    for output in ("grid.png", "all.npy", "out"):
        with monkeypatch.context() as patched:
            stopped(patched, 20)
            assert generate([FILE, "--count", "3", "--output", output]) == 130
        assert capsys.readouterr().err == "interrupted\n"
        assert written(folder) == before and not (folder / output).exists()


@pytest.mark.parametrize("output", ["grid.png", "all.npy", "out"])
@pytest.mark.parametrize("after", [54, 54 + 31])
def test_the_same_command_goes_on_where_it_was_stopped(output, after, folder, monkeypatch, capsys):
    words = [FILE, "--count", "5", "--batch-size", "2", "--output", output]
    assert generate(words) == 0
    wanted = {name: data for name, data in written(folder).items() if "generate.json" not in name}
    removed = folder / "removed"
    os.rename(folder / output, removed)
    with monkeypatch.context() as patched:
        stopped(patched, after)
        assert generate(words) == 130
    assert not (folder / output).exists()
    # Other work is not mistaken for it.
    capsys.readouterr()
    assert generate([*words, "--seed", "1"]) == 2
    assert_one_error(capsys, "keeps other work that was to become")
    with monkeypatch.context() as patched:
        count = stopped(patched, -1)
        assert generate(words) == 0
        assert count[0] == 2 * 54  # of three batches one is there
    names = set(os.listdir(folder))
    assert not [name for name in names if name.startswith(".")]
    found = {name: data for name, data in written(folder).items() if "generate.json" not in name}
    kept = {name: data for name, data in found.items() if not name.startswith("removed")}
    assert kept == wanted


def test_a_command_that_was_killed_as_it_ended_tidies_up(folder, monkeypatch, capsys):
    words = [FILE, "--count", "2", "--output", "all.npy"]
    with monkeypatch.context() as patched:
        write = work.write_whole

        def killed(path, *args, **options):
            write(path, *args, **options)
            if str(path).endswith(".npy"):
                raise KeyboardInterrupt

        patched.setattr(work, "write_whole", killed)
        assert generate(words) == 130
    before = (folder / "all.npy").read_bytes()
    assert [name for name in os.listdir(folder) if name.startswith(".")]
    assert generate(words) == 0
    assert "all.npy was there already" in capsys.readouterr().out
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    assert (folder / "all.npy").read_bytes() == before
    assert generate(words) == 2


def test_a_process_that_is_terminated_ends_with_one_line_and_no_output(folder):
    write_decoder("slow.safetensors", size=128)
    command = [sys.executable, "-m", "visionattn", "generate", "slow.safetensors"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    before = written(folder)
    given = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    with subprocess.Popen([*command, "--output", "grid.png"], **given) as process:
        assert process.stdout.readline().startswith("pixel_decoder of slow.safetensors; ")
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "interrupted\n")
    assert written(folder) == before


def test_progress_tells_how_many_values_there_are_and_the_time_left(folder, monkeypatch, capsys):
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0.0)
    assert generate([FILE, "--count", "3", "--batch-size", "2", "--output", "all.npy"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("2 of 162 values, ") and lines[0].endswith(" left")
    assert lines[-1].startswith("162 of 162 values, ") and len(lines) == 2 * 54


def test_pictures_are_enlarged_by_whole_numbers_and_grids_have_a_limit():
    assert sheet_size(4, 2, 16, 16) == (2 * 70 + 6, 2 * 70 + 6)
    assert sheet_size(3, 8, 100, 30) == (112, 3 * 36 + 6)
    with pytest.raises(ValueError, match="a grid of 100,000 images of 128 x 128 pixels would have"):
        sheet_size(100_000, 300, 128, 128)


def test_a_batch_beyond_memory_is_refused_with_one_that_fits(folder, monkeypatch, capsys):
    from visionattn.inference.generate import generation

    words = [FILE, "--count", "500", "--batch-size", "400", "--output", "a.npy"]
    with monkeypatch.context() as patched:
        patched.setattr(generation, "taken_bytes", lambda device: 2**20)
        patched.setattr(generation, "memory_there_is", lambda device: 2**21)
        assert generate(words) == 3
    error = capsys.readouterr().err
    assert "400 images of 6 x 9 px at once would take about" in error
    fits = int(error.split("--batch-size ")[1].split()[0])
    assert 1 < fits < 400
    monkeypatch.setattr(PixelDecoder, "step", lambda *given: torch.ones(2**55))
    assert generate([FILE, "--count", "6", "--output", "a.npy"]) == 3
    error = capsys.readouterr().err
    assert "out of memory with 6 images of 6 x 9 px at once; try --batch-size 3" in error
