"""Features in files: values, memory, what of an earlier run stays, and parts of a collection."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image

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
from tests.helpers.tools import assert_one_error, written
from visionattn.cli.progress import Progress
from visionattn.command import run
from visionattn.inference.image_run import ImageRun
from visionattn.inference.shards import CollectionPart

SHAPES = [(16, 24), (16, 24), (40, 8), (16, 24), (20, 21), (16, 16), (16, 16)]
MERGE = ["--merge", "--output", "out"]


@pytest.fixture
def case(tmp_path, monkeypatch):
    """The current folder, with weights and images of several sizes, and the images' pixels."""
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    return tmp_path, write_folder(tmp_path / "images", SHAPES)


@pytest.fixture
def folder(case):
    return case[0]


def extract(*more: str, output: str = "out") -> int:
    return run("features", inference_files.flags("--img_size", "native", *more, output=output))


def refused(capsys, said: str, *more: str, output: str = "out") -> None:
    capsys.readouterr()
    assert extract(*more, output=output) == 2
    assert_one_error(capsys, said)


def assert_same_files(one: Path, other: Path) -> None:
    """Two folders are equal to the byte but for their own names, which are of one length."""
    names = [os.fsencode(folder.name) for folder in (other, one)]
    assert written(one) == {
        name: content.replace(*names) for name, content in written(other).items()
    }


def test_pooled_features_equal_a_direct_forward_in_the_order_of_the_paths(case, capsys):
    folder, pixels = case
    assert extract("--batch_size", "2", "--shard_images", "3") == 0
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
    more = ("--batch_size", "2", "--shard_images", "3", "--workers", "2")
    assert extract(*more, output="two") == 0
    assert_same_files(folder / "out", folder / "two")


def test_maps_have_the_shape_of_the_image_and_its_orientation(case):
    folder, pixels = case
    assert extract("--dense") == 0
    rows = read_index(folder / "out")
    shapes = [feature_of(folder / "out", row).shape for row in rows]
    assert shapes == [(24, -(-height // 8), -(-width // 8)) for height, width in SHAPES]
    wanted = direct(folder / "best.safetensors", pixels[2])[1]
    assert np.abs(feature_of(folder / "out", rows[2]) - wanted).max() < 1e-5
    assert extract("--dense", "--dtype", "float16", output="half") == 0
    for full, half in zip(rows, read_index(folder / "half"), strict=True):
        wanted, found = feature_of(folder / "out", full), feature_of(folder / "half", half)
        assert found.dtype == np.float16 and (found == wanted.astype(np.float16)).all()


def test_images_that_cannot_be_read_are_rows_with_the_reason_and_the_run_goes_on(folder, capsys):
    whole = (folder / "images" / "3.png").read_bytes()
    (folder / "images" / "3.png").write_bytes(whole[:200])
    os.rename(folder / "images" / "5.png", os.fsencode(folder / "images") + b"/5\xff.png")
    assert extract("--batch_size", "4") == 0
    rows = read_index(folder / "out")
    assert [row["status"] for row in rows] == ["ok"] * 3 + ["unreadable"] + ["ok"] * 3
    assert "truncated" in rows[3]["reason"]
    assert rows[3]["shard"] == rows[3]["key"] == rows[3]["row"] == ""
    assert rows[5]["path"] == "images/5\udcff.png" and Path(rows[5]["path"]).is_file()
    assert "1 without features:\n  images/3.png: " in capsys.readouterr().out


def test_no_features_at_all_are_an_exit_code_with_the_first_reason(folder, capsys, monkeypatch):
    def scarce(model, inputs, sizes):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(features, "pooled", scarce)
    said = "none of the 7 images has features; first: images/0.png: "
    assert extract() == 3
    assert f"{said}out of memory" in capsys.readouterr().err
    assert {row["status"] for row in read_index(folder / "out")} == {"oom"}
    for image in (folder / "images").iterdir():
        image.write_bytes(b"no image")
    assert extract(output="none") == 2
    assert f"{said}unknown image format" in capsys.readouterr().err


def test_no_more_than_the_features_of_a_file_and_batches_are_in_memory(folder, monkeypatch):
    write_folder(folder / "images", [(16, 16)] * 16)
    real, features, images = Progress.advance, [], []

    def counted(progress, count, failed):
        shapes = [each.shape for each in gc.get_objects() if type(each) is torch.Tensor]
        features.append(shapes.count((24,)))
        images.append(shapes.count((3, 16, 16)))
        real(progress, count, failed)

    monkeypatch.setattr(Progress, "advance", counted)
    assert extract("--shard_images", "4", "--batch_size", "3") == 0
    assert 3 <= max(features) - min(features) <= 4 + 3 + 3
    assert max(images) <= 3 + 3, images


def test_files_are_bounded_in_bytes_too(folder, monkeypatch):
    monkeypatch.setattr(features, "MIB", 1000)
    assert extract("--dense", "--shard_mib", "1", "--batch_size", "1") == 0
    # A patch has 24 numbers of 4 bytes: 11 patches are above 1000 bytes.
    shards = [int(row["shard"][9:14]) for row in read_index(folder / "out")]
    assert shards == [0, 0, 1, 1, 2, 2, 3]  # 6 + 6, 5 + 6, 9 + 4 and 4 patches


def test_a_second_extraction_into_a_folder_is_one_line_until_the_first_has_ended(folder, capsys):
    (folder / "out").mkdir()
    with FileLock("out/features.lock"):
        unfinished = folder / "out" / ".index.csv.0123456789abcdef.visionattn.tmp"
        unfinished.write_text("of the first")
        refused(capsys, "another feature extraction is running in out; wait", "--overwrite")
        assert sorted(written(folder / "out")) == [unfinished.name, "features.lock"]
    assert extract() == 0
    assert sorted(written(folder / "out")) == ["features-00000.safetensors", "index.csv"]


def test_ctrl_c_says_that_the_same_command_goes_on_and_it_does(folder, capsys, monkeypatch):
    real, stops = ImageRun.batches, [5, 3]
    more = ("--shard_images", "2", "--batch_size", "1", "--img_size", "16")

    def interrupted(*args, **options):
        stop = stops.pop(0)
        for number, batch in enumerate(real(*args, **options)):
            if number == stop:
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(ImageRun, "batches", interrupted)
        assert extract("--shard_images", "2") == 130
        said = (
            "stopped; the features of 4 of 7 images are in out; to resume, run the same command\n"
        )
        assert capsys.readouterr().err == said and len(written(folder / "out")) == 2
        assert extract(*more, "--overwrite") == 130
        assert "to resume, run the same command without --overwrite" in capsys.readouterr().err
    assert len(written(folder / "out")) == 1
    assert extract(*more) == extract(*more, output="all") == 0
    assert_same_files(folder / "out", folder / "all")


def test_damaged_and_missing_files_are_written_again_and_others_left_alone(folder, capsys):
    out = folder / "out"
    assert extract("--shard_images", "2") == 0
    whole, second = written(out), out / "features-00001.safetensors"
    second.write_bytes(second.read_bytes()[:-5])
    (out / "features-00000.safetensors").unlink()
    assert extract("--shard_images", "2") == 0 and written(out) == whole
    (out / "index.csv").unlink()
    times = [path.stat().st_mtime_ns for path in sorted(out.iterdir())]
    assert extract("--shard_images", "2") == 0 and written(out) == whole
    assert [path.stat().st_mtime_ns for path in sorted(out.iterdir())][:-1] == times
    assert "7 of 7 images are done" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:this CPU has no bf16 units")
def test_other_features_are_not_mixed_nor_overwritten_unless_that_is_said(folder, capsys):
    assert extract() == 0
    before = written(folder / "out")
    write_weights(folder / "other.safetensors", seed=6)
    for more, part in (
        ("--checkpoint other.safetensors", "weights "),
        ("--img_size 24", "img_size native there, 24 x 24 px here"),
        ("--tiles 24 --overlap 8", "tiles null there, 24 here"),
        ("--dense --dtype float16", "kind pooled there, dense here"),
        ("--amp bf16", "amp none there, bf16 here"),
        ("--images images/0.png images/1.png", "images 7 there, 2 here"),
    ):
        refused(capsys, f"out holds features of another call: {part}", *more.split())
    assert written(folder / "out") == before
    assert extract("--img_size", "24", "--overwrite", "--shard_images", "2") == 0
    assert extract("--overwrite") == 0 and len(written(folder / "out")) == 2


def test_files_of_others_are_neither_deleted_nor_replaced(folder, capsys):
    mine = folder / "out" / "features-2024.safetensors"
    mine.parent.mkdir()
    mine.write_bytes(b"mine")
    refused(capsys, "pass another --output")
    assert written(folder / "out") == {mine.name: b"mine"}
    mine.unlink()
    assert extract() == 0
    mine.write_bytes(b"mine")
    assert extract("--overwrite", "--dense") == 0
    assert mine.read_bytes() == b"mine"


@pytest.mark.parametrize("total", [1, 33])
def test_parts_are_disjoint_complete_and_in_order(total):
    for count in range(1, total + 1):
        parts = [CollectionPart(number, count).images(total) for number in range(1, count + 1)]
        assert [i for part in parts for i in part] == list(range(total))
        assert all(len(part) for part in parts)


def run_parts(*numbers: int, count: int = 3, more: tuple[str, ...] = ()) -> None:
    for number in numbers:
        assert extract("--shard", f"{number}/{count}", *more) == 0


def features_in(output: Path) -> list:
    """What the index of a folder says of each image but where, and the image's features."""
    places = ("shard", "key", "row")
    return [
        (
            {key: value for key, value in row.items() if key not in places},
            feature_of(output, row).tolist() if row["shard"] else None,
        )
        for row in read_index(output)
    ]


def test_merged_parts_are_the_features_of_one_run(folder, capsys):
    (folder / "images" / "3.png").write_bytes(b"no image")
    more = ("--dense", "--dtype", "float16", "--shard_images", "2", "--batch_size", "1")
    assert extract(*more, output="whole") == 0
    run_parts(3, 1, 2, more=more)
    assert "part 1/3: images 1 to " in capsys.readouterr().out
    assert run("features", MERGE) == 0
    said = capsys.readouterr().out
    assert "7 images in 3 part" in said and "1 without features:\n  images/3.png: " in said
    assert features_in(folder / "out") == features_in(folder / "whole")
    # Merged parts are a finished run like any other: nothing is computed again.
    before = written(folder / "out")
    assert extract(*more) == run("features", MERGE) == 0
    assert "7 of 7 images are done" in capsys.readouterr().out
    assert written(folder / "out") == before


def test_a_range_of_values_that_is_read_off_files_is_the_same_in_each_part(folder):
    for path in (folder / "images").iterdir():
        most = 100 * (int(path.stem) + 1)
        levels = np.random.default_rng(most).integers(0, most, (16, 16)).astype(np.uint16)
        Image.fromarray(levels).save(path)
    with pytest.warns(UserWarning, match="range"):
        assert extract("--batch_size", "2", output="whole") == 0
        run_parts(1, 2, 3, more=("--batch_size", "2"))
    assert run("features", MERGE) == 0
    assert features_in(folder / "out") == features_in(folder / "whole")


def test_parts_that_do_not_make_a_whole_are_one_line_each_and_stay(folder, capsys):
    def unmerged(said: str) -> None:
        before = written(folder)
        capsys.readouterr()
        assert run("features", MERGE) == 2
        assert_one_error(capsys, said)
        assert written(folder) == before

    unmerged("out holds no parts; write the first one with --shard 1/n")
    run_parts(1, 3)
    unmerged("part 2/3 is missing or unfinished in out; run --shard 2/3")
    refused(capsys, "out holds 1/3 of a division into 3, got 1/4", "--shard", "1/4")
    refused(capsys, "out holds unmerged parts; pass --merge")
    run_parts(2, more=("--dense",))
    unmerged("part 2/3 has other features: kind dense there, pooled here")
    write_image(folder / "images" / "4.png", 16, 16, 3)
    run_parts(2, more=("--overwrite",))
    unmerged("part 2/3 has other features: list_of_images ")
    run_parts(1, 2, 3, more=("--overwrite", "--shard_images", "1", "--batch_size", "1"))
    (folder / "out" / "parts" / "00002-of-00003" / "features-00001.safetensors").unlink()
    unmerged("features-00001.safetensors is missing; run --shard of this part again")
    assert extract(output="whole") == 0
    refused(capsys, "whole holds features of all images", "--shard", "1/2", output="whole")
