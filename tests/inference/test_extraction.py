"""Features in files: values, order, how much is in memory, and what of an earlier run stays."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock

import visionattn.inference.extraction as features
from tests.helpers import inference_files
from tests.helpers.inference_files import (
    direct,
    feature_of,
    read_index,
    write_folder,
    write_image,
    write_weights,
)
from tests.helpers.tools import assert_one_error, load_tool, written
from visionattn.cli.progress import Progress
from visionattn.inference.image_run import ImageRun

extract = load_tool("extract_features")
SHAPES = [(16, 24), (16, 24), (40, 8), (16, 24), (20, 21), (16, 16), (16, 16)]


@pytest.fixture
def case(tmp_path, monkeypatch):
    """The current folder, with weights and images of several sizes, and the images' pixels."""
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    return tmp_path, write_folder(tmp_path / "images", SHAPES)


def flags(*more: str, output: str = "out") -> list[str]:
    return inference_files.flags("--img_size", "native", *more, output=output)


def test_pooled_features_are_those_of_a_direct_forward_in_the_order_of_the_paths(case, capsys):
    folder, pixels = case
    assert extract(flags("--batch_size", "2", "--shard_images", "3")) == 0
    rows = read_index(folder / "out")
    assert [row["path"] for row in rows] == [f"images/{i}.png" for i in range(7)]
    assert [(int(row["height"]), int(row["width"])) for row in rows] == SHAPES
    for row, image in zip(rows, pixels, strict=True):
        if image.shape[:2] == (20, 21):
            image = np.pad(image, ((0, 4), (0, 3), (0, 0)), "edge")
        assert (int(row["input_height"]), int(row["input_width"])) == image.shape[:2]
        wanted = direct(folder / "best.safetensors", image)[0]
        assert np.abs(feature_of(folder / "out", row) - wanted).max() < 1e-5
    assert [row["shard"][9:14] for row in rows] == ["00000"] * 3 + ["00001"] * 4
    assert [row["row"] for row in rows] == list("0120123")
    printed = capsys.readouterr()
    assert printed.err == "" and "2 files of features and out/index.csv" in printed.out


def test_maps_have_the_shape_of_the_image_and_its_orientation(case):
    folder, pixels = case
    assert extract(flags("--dense")) == 0
    rows = read_index(folder / "out")
    shapes = [feature_of(folder / "out", row).shape for row in rows]
    assert shapes == [(24, -(-height // 8), -(-width // 8)) for height, width in SHAPES]
    wanted = direct(folder / "best.safetensors", pixels[2])[1]
    assert np.abs(feature_of(folder / "out", rows[2]) - wanted).max() < 1e-5
    assert extract(flags("--dense", "--dtype", "float16", output="half")) == 0
    for full, half in zip(rows, read_index(folder / "half"), strict=True):
        wanted, found = feature_of(folder / "out", full), feature_of(folder / "half", half)
        assert found.dtype == np.float16 and (found == wanted.astype(np.float16)).all()


def test_processes_that_read_change_nothing(case):
    folder, _ = case
    assert extract(flags("--shard_images", "3")) == 0
    assert extract([*flags("--shard_images", "3", output="two"), "--workers", "2"]) == 0
    assert written(folder / "out") == {
        name: content.replace(b"two", b"out") for name, content in written(folder / "two").items()
    }


def test_images_that_cannot_be_read_are_rows_with_the_reason_and_the_run_goes_on(case, capsys):
    folder, _ = case
    whole = (folder / "images" / "3.png").read_bytes()
    (folder / "images" / "3.png").write_bytes(whole[:200])
    os.rename(folder / "images" / "5.png", os.fsencode(folder / "images") + b"/5\xff.png")
    assert extract(flags("--batch_size", "4")) == 0
    rows = read_index(folder / "out")
    assert [row["status"] for row in rows] == ["ok"] * 3 + ["unreadable"] + ["ok"] * 3
    assert "truncated" in rows[3]["reason"]
    assert rows[3]["shard"] == rows[3]["key"] == rows[3]["row"] == ""
    assert rows[5]["path"] == "images/5\udcff.png" and Path(rows[5]["path"]).is_file()
    assert "1 without features:\n  images/3.png: " in capsys.readouterr().out


def test_no_features_at_all_are_an_exit_code_with_the_first_reason(case, capsys, monkeypatch):
    def scarce(model, inputs, sizes):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(features, "pooled", scarce)
    said = "none of the 7 images gives features; the first: images/0.png: "
    assert extract(flags()) == 3
    assert f"{said}out of memory" in capsys.readouterr().err
    assert {row["status"] for row in read_index(case[0] / "out")} == {"oom"}
    for image in (case[0] / "images").iterdir():
        image.write_bytes(b"no image")
    assert extract(flags(output="none")) == 2
    assert f"{said}cannot identify" in capsys.readouterr().err


def test_no_more_than_the_features_of_a_file_and_batches_are_in_memory(tmp_path, monkeypatch):
    write_weights(tmp_path / "best.safetensors")
    write_folder(tmp_path / "images", [(16, 16)] * 25)
    monkeypatch.chdir(tmp_path)
    real, features, images = Progress.advance, [], []

    def counted(progress, count, failed):
        shapes = [each.shape for each in gc.get_objects() if type(each) is torch.Tensor]
        features.append(shapes.count((24,)))
        images.append(shapes.count((3, 16, 16)))
        real(progress, count, failed)

    monkeypatch.setattr(Progress, "advance", counted)
    assert extract(flags("--shard_images", "6", "--batch_size", "4")) == 0
    assert 4 <= max(features) - min(features) <= 6 + 4 + 4
    assert max(images) <= 4 + 4, images


def test_files_are_bounded_in_bytes_too(case, monkeypatch):
    folder, _ = case
    monkeypatch.setattr(features, "MIB", 1000)
    assert extract(flags("--dense", "--shard_mib", "1", "--batch_size", "1")) == 0
    # Of 24 numbers of 4 bytes per patch, so that 11 patches are more than 1000 bytes.
    patches = [-(-height // 8) * -(-width // 8) for height, width in SHAPES]
    wanted, held, number = [], 0, 0
    for count in patches:
        wanted.append(f"features-{number:05d}.safetensors")
        held += count
        if held >= 11:
            held, number = 0, number + 1
    assert [row["shard"] for row in read_index(folder / "out")] == wanted


def test_a_second_extraction_into_a_folder_is_one_line_until_the_first_has_ended(case, capsys):
    folder, _ = case
    (folder / "out").mkdir()
    with FileLock("out/features.lock"):
        unfinished = folder / "out" / ".index.csv.0123456789abcdef.visionattn.tmp"
        unfinished.write_text("of the first")
        assert extract(flags("--overwrite")) == 2
        assert_one_error(capsys, "another extraction of features is at work in out; wait")
        assert sorted(written(folder / "out")) == [unfinished.name, "features.lock"]
    assert extract(flags()) == 0
    assert sorted(written(folder / "out")) == ["features-00000.safetensors", "index.csv"]


def test_ctrl_c_says_that_the_same_command_goes_on_and_it_does(case, capsys, monkeypatch):
    folder, _ = case
    real, stops = ImageRun.batches, [5, 3]
    other = ("--shard_images", "2", "--batch_size", "1", "--img_size", "16")

    def interrupted(*args, **options):
        stop = stops.pop(0)
        for number, batch in enumerate(real(*args, **options)):
            if number == stop:
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(ImageRun, "batches", interrupted)
        assert extract(flags("--shard_images", "2")) == 130
        assert (
            capsys.readouterr().err
            == "stopped; the files that are written stay in out, the same command goes on\n"
        )
        assert len(written(folder / "out")) == 2
        assert extract(flags(*other, "--overwrite")) == 130
        assert "the same command without --overwrite goes on" in capsys.readouterr().err
    assert len(written(folder / "out")) == 1
    assert extract(flags(*other)) == 0
    resumed = written(folder / "out")
    assert extract(flags(*other, "--overwrite")) == 0
    assert written(folder / "out") == resumed


def test_damaged_and_missing_files_are_written_again_and_others_left_alone(case, capsys):
    folder, _ = case
    command, out = flags("--shard_images", "2"), folder / "out"
    assert extract(command) == 0
    whole, second = written(out), out / "features-00001.safetensors"
    second.write_bytes(second.read_bytes()[:-5])
    assert extract(command) == 0 and written(out) == whole
    (out / "features-00000.safetensors").unlink()
    assert extract(command) == 0 and written(out) == whole
    (out / "index.csv").unlink()
    times = [path.stat().st_mtime_ns for path in sorted(out.iterdir())]
    capsys.readouterr()
    assert extract(command) == 0 and written(out) == whole
    assert [path.stat().st_mtime_ns for path in sorted(out.iterdir())][:-1] == times
    assert "7 of 7 images are done" in capsys.readouterr().out


def test_other_features_are_not_mixed_nor_overwritten_unless_that_is_said(case, capsys):
    folder, _ = case
    assert extract(flags()) == 0
    before = written(folder / "out")
    write_weights(folder / "other.safetensors", seed=6)
    capsys.readouterr()
    for more, part in (
        (["--checkpoint", "other.safetensors"], "weights "),
        (["--img_size", "24"], "img_size native there, 24 x 24 px here"),
        (["--tiles", "24", "--overlap", "8"], "tiles null there, 24 here"),
        (["--dense", "--dtype", "float16"], "kind pooled there, dense here"),
        (["--amp", "bf16"], "amp none there, bf16 here"),
        (["--images", "images/0.png", "images/1.png"], "images 7 there, 2 here"),
    ):
        assert extract(flags(*more)) == 2
        assert_one_error(capsys, f"out holds other features: {part}")
    write_image(folder / "images" / "1.png", 24, 24, 77)
    assert extract(flags()) == 2 and "list_of_images" in capsys.readouterr().err
    assert written(folder / "out") == before
    assert extract(flags("--img_size", "24", "--overwrite", "--shard_images", "2")) == 0
    assert extract(flags("--overwrite")) == 0 and len(written(folder / "out")) == 2


def test_files_of_others_are_neither_deleted_nor_replaced(case, capsys):
    folder, _ = case
    for name in ("index.csv", "features-2024.safetensors"):
        (folder / name[:5]).mkdir()
        (folder / name[:5] / name).write_bytes(b"mine")
        assert extract(flags(output=name[:5])) == 2
        assert_one_error(capsys, "choose another --output")
        assert written(folder / name[:5]) == {name: b"mine"}
    assert extract(flags(output="done")) == 0
    (folder / "done" / "features-2024.safetensors").write_bytes(b"mine")
    assert extract(flags("--overwrite", "--dense", output="done")) == 0
    assert (folder / "done" / "features-2024.safetensors").read_bytes() == b"mine"


BAD = {
    "--output null": "--output is missing",
    "--data digits": "give either --images or --data digits",
    "--shard_mib 0": "shard_mib must be above 0, got 0",
    "--probe --dense": "leave --dense out",
    "--probe": "images has images outside of class folders",
    "--output full": "full holds other things (notes.txt)",
    "--output full/notes.txt": "full/notes.txt is a file, so",
    "--output foreign": "is no file of features of this visionattn",
}


@pytest.mark.parametrize("more", BAD)
def test_bad_input_ends_with_one_line_code_2_and_nothing_written(case, capsys, more):
    folder, _ = case
    (folder / "full").mkdir()
    (folder / "full" / "notes.txt").write_text("mine")
    (folder / "foreign").mkdir()
    (folder / "foreign" / "features-00000.safetensors").write_bytes(
        (folder / "best.safetensors").read_bytes()
    )
    before = written(folder)
    assert extract(flags(*more.split())) == 2
    assert_one_error(capsys, BAD[more])
    assert written(folder) == before and not (folder / "out").exists()
