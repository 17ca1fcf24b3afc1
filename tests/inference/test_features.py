"""Features in files: their values, their order, how much is in memory, and how far a run says it
is.
"""

import gc
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import visionattn.inference.features as features
import visionattn.inference.shards as shards
from tests.helpers import inference_files
from tests.helpers.inference_files import (
    direct,
    feature_of,
    read_index,
    write_folder,
    write_weights,
)
from tests.helpers.tools import load_tool, written
from visionattn.cli.progress import Progress
from visionattn.inference import image_run

extract = load_tool("extract_features")
SHAPES = [(16, 24), (16, 24), (40, 8), (16, 24), (20, 21), (16, 16), (16, 16)]


@pytest.fixture
def case(tmp_path, monkeypatch):
    """A folder with weights and images of several sizes, as the current folder, and the images'
    pixels.
    """
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
    assert printed.err == ""
    assert printed.out.splitlines()[0] == (
        "scaleformer_vit_t of best.safetensors; images are seen native: whole images at their own "
        "sizes"
    )
    assert "7 images in" in printed.out and "2 files of features and out/index.csv" in printed.out


def test_maps_have_the_shape_of_the_image_and_its_orientation(case):
    folder, pixels = case
    assert extract(flags("--dense")) == 0
    rows = read_index(folder / "out")
    shapes = [feature_of(folder / "out", row).shape for row in rows]
    assert shapes == [(24, -(-height // 8), -(-width // 8)) for height, width in SHAPES]
    wanted = direct(folder / "best.safetensors", pixels[2])[1]
    assert np.abs(feature_of(folder / "out", rows[2]) - wanted).max() < 1e-5
    distance = corner_distance(folder, flags("--dense", "--images", "corner", output="corner_out"))
    assert distance.shape == (5, 3)
    assert np.unravel_index(distance.argmax(), distance.shape) == (0, 2)


def corner_distance(folder: Path, command: list[str]) -> np.ndarray:
    """How much each place ``[H, W]`` of the map of a dark image with one bright corner, at the
    upper right, stands out.
    """
    dark = np.zeros((40, 24, 3), np.uint8)
    dark[:8, 16:] = 255
    (folder / "corner").mkdir()
    Image.fromarray(dark).save(folder / "corner" / "a.png")
    assert extract(command) == 0
    found = feature_of(folder / "corner_out", read_index(folder / "corner_out")[0])
    return np.abs(found - np.median(found, axis=(1, 2), keepdims=True)).sum(0)


def test_maps_that_lie_otherwise_in_memory_are_the_same_in_files(case, monkeypatch):
    folder, _ = case
    assert extract(flags("--dense")) == 0
    real = features.last_map
    monkeypatch.setattr(
        features,
        "last_map",
        lambda *given: real(*given).contiguous(memory_format=torch.channels_last),
    )
    assert extract(flags("--dense", output="two")) == 0
    assert written(folder / "out") == {
        name: content.replace(b"two", b"out") for name, content in written(folder / "two").items()
    }


def test_a_model_without_maps_is_refused_for_maps_alone(case, capsys, monkeypatch):
    real = features.open_model

    def without(*args, **options):
        opened = real(*args, **options)
        return replace(opened, model=torch.nn.Identity())

    monkeypatch.setattr(features, "open_model", without)
    assert extract(flags("--dense")) == 2
    assert "scaleformer_vit_t gives no feature maps; leave --dense out" in capsys.readouterr().err


def test_half_precision_in_files_is_that_of_the_numbers(case):
    folder, _ = case
    assert extract(flags("--dense")) == 0
    assert extract(flags("--dense", "--dtype", "float16", output="half")) == 0
    for full, half in zip(read_index(folder / "out"), read_index(folder / "half"), strict=True):
        assert feature_of(folder / "half", half).dtype == np.float16
        assert (
            feature_of(folder / "half", half) == feature_of(folder / "out", full).astype(np.float16)
        ).all()


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
    printed = capsys.readouterr().out
    assert "1 without features:\n  images/3.png: " in printed
    for image in (folder / "images").iterdir():
        image.write_bytes(b"no image")
    assert extract(flags(output="none")) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(
        "error: none of the 7 images gives features; the first: images/0.png: cannot identify"
    )
    assert printed.err.count("\n") == 1
    assert {row["status"] for row in read_index(folder / "none")} == {"unreadable"}


def test_too_little_memory_for_every_image_is_an_exit_code_of_its_own(case, capsys, monkeypatch):
    def scarce(model, inputs, sizes):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(features, "pooled", scarce)
    assert extract(flags()) == 3
    assert (
        "none of the 7 images gives features; the first: images/0.png: out of memory"
        in capsys.readouterr().err
    )
    assert {row["status"] for row in read_index(case[0] / "out")} == {"oom"}


def vectors_alive(length: int) -> int:
    """Tensors in memory that are features of one image."""
    return sum(
        1 for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.shape == (length,)
    )


def test_no_more_features_than_those_of_a_file_and_a_batch_are_in_memory(tmp_path, monkeypatch):
    write_weights(tmp_path / "best.safetensors")
    write_folder(tmp_path / "images", [(16, 16)] * 25)
    monkeypatch.chdir(tmp_path)
    before, most = None, 0
    real = Progress.advance

    def counted(progress, images, failed):
        nonlocal before, most
        if before is not None:
            most = max(most, vectors_alive(24) - before)
        real(progress, images, failed)

    real_run = image_run.run_images

    def run(*args, **options):
        nonlocal before
        before = vectors_alive(24)
        return real_run(*args, **options)

    monkeypatch.setattr(image_run, "run_images", run)
    monkeypatch.setattr(Progress, "advance", counted)
    assert extract(flags("--shard_images", "6", "--batch_size", "4")) == 0
    assert 8 <= most <= 6 + 4 + 4


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


def test_the_head_of_a_file_is_bounded_too(case, monkeypatch):
    folder, _ = case
    monkeypatch.setattr(shards, "HEAD_BYTES", 2000)
    heads = {}
    for kind, more in (("pooled", []), ("dense", ["--dense"])):
        assert extract(flags("--batch_size", "1", *more, output=kind)) == 0
        assert [row["path"] for row in read_index(folder / kind)] == [
            f"images/{i}.png" for i in range(7)
        ]
        files = sorted((folder / kind).glob("features-*"))
        # The first 8 bytes of a safetensors file are the length of its head.
        heads[kind] = [int.from_bytes(file.read_bytes()[:8], "little") for file in files]
    for lengths in heads.values():
        assert (
            len(lengths) > 1 and max(lengths) < 2000 + 2000
        )  # the rows, then what the features are


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(case, capsys, monkeypatch):
    monkeypatch.setattr("visionattn.cli.progress.SECONDS_PER_LINE", 0.0)
    monkeypatch.setattr("visionattn.cli.progress.QUIET_SECONDS", 0.0)
    assert extract(flags("--batch_size", "7", "--img_size", "16")) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("0 of 7 images, ") and " of the next" in lines[0]
    assert lines[-1].startswith("7 of 7 images, ")
