"""Features in files: what of an earlier run stays, and what is refused."""

import os
import signal
import subprocess
import sys

import pytest
import torch

import visionattn.inference.features as features
from tests.helpers import inference_files
from tests.helpers.inference_files import ROOT, read_index, write_folder, write_image, write_weights
from tests.helpers.tools import assert_one_error, load_tool, written
from visionattn.cli.files import is_unfinished
from visionattn.inference import image_run
from visionattn.inference.work import briefly

extract = load_tool("extract_features")
SHAPES = [(16, 24), (16, 24), (40, 8), (16, 24), (20, 21), (16, 16), (16, 16)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with weights and images of several sizes, as the current folder."""
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    write_folder(tmp_path / "images", SHAPES)
    return tmp_path


def flags(*more: str, output: str = "out") -> list[str]:
    return inference_files.flags("--img_size", "native", *more, output=output)


KILLED = """
import os, signal, sys
import visionattn.inference.shards as shards
from tests.helpers.tools import load_tool
real, written = shards.save_file, []
def save_half(tensors, path, metadata):
    real(tensors, path, metadata=metadata)
    written.append(path)
    if len(written) == 2:
        os.truncate(path, 100)
        os.kill(os.getpid(), signal.SIGKILL)
shards.save_file = save_half
sys.exit(load_tool("extract_features")(sys.argv[1:]))
"""


def test_a_run_killed_while_it_writes_goes_on_and_ends_with_the_same_bytes(folder, capsys):
    command = flags("--shard_images", "2", "--batch_size", "2", "--dense")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *command], env=os.environ | {"PYTHONPATH": paths}
    )
    assert killed.returncode == -signal.SIGKILL
    left = sorted(written(folder / "out"))
    assert left[1:] == ["features-00000.safetensors", "features.lock"] and is_unfinished(left[0])
    kept = (folder / "out" / "features-00000.safetensors").stat().st_mtime_ns
    assert extract(command) == 0
    assert "2 of 7 images are done: going on after 1 file of features" in capsys.readouterr().out
    assert (folder / "out" / "features-00000.safetensors").stat().st_mtime_ns == kept
    resumed = written(folder / "out")
    assert extract([*command, "--overwrite"]) == 0
    assert written(folder / "out") == resumed and len(resumed) == 4


HELD = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_extraction_into_a_folder_is_one_line_until_the_first_has_ended(folder, capsys):
    (folder / "out").mkdir()
    command, pipe = [sys.executable, "-c", HELD, "out/features.lock"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as first:
        assert first.stdout.readline() == "held\n"
        unfinished = folder / "out" / ".index.csv.0123456789abcdef.visionattn.tmp"
        unfinished.write_text("of the first")
        for more in ([], ["--overwrite"]):
            assert extract(flags(*more)) == 2
            assert_one_error(
                capsys,
                "another extraction of features is at work in out; wait for it or end it",
            )
        assert sorted(written(folder / "out")) == [unfinished.name, "features.lock"]
        first.communicate("")
    assert extract(flags()) == 0
    assert sorted(written(folder / "out")) == ["features-00000.safetensors", "index.csv"]


def test_ctrl_c_says_that_the_same_command_goes_on_and_it_does(folder, capsys, monkeypatch):
    real = image_run.run_images

    def interrupted(*args, **options):
        for number, batch in enumerate(real(*args, **options)):
            if number == 5:
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(image_run, "run_images", interrupted)
        assert extract(flags("--shard_images", "2")) == 130
        assert (
            capsys.readouterr().err
            == "stopped; the files that are written stay in out, the same command goes on\n"
        )
        assert extract(flags("--shard_images", "2", "--overwrite")) == 130
        assert "the same command without --overwrite goes on" in capsys.readouterr().err
    assert len(written(folder / "out")) == 2
    assert extract(flags("--shard_images", "2")) == 0
    resumed = written(folder / "out")
    assert extract(flags("--shard_images", "2", "--overwrite")) == 0
    assert written(folder / "out") == resumed


def test_files_that_are_cut_off_or_missing_are_written_again_and_finished_ones_left_alone(
    folder, capsys
):
    command = flags("--shard_images", "2")
    assert extract(command) == 0
    whole = written(folder / "out")
    (folder / "out" / "features-00001.safetensors").write_bytes(
        whole["features-00001.safetensors"][:-5]
    )
    assert extract(command) == 0 and written(folder / "out") == whole
    (folder / "out" / "features-00000.safetensors").unlink()
    assert extract(command) == 0 and written(folder / "out") == whole
    (folder / "out" / "index.csv").unlink()
    times = [path.stat().st_mtime_ns for path in sorted((folder / "out").iterdir())]
    capsys.readouterr()
    assert extract(command) == 0 and written(folder / "out") == whole
    assert [path.stat().st_mtime_ns for path in sorted((folder / "out").iterdir())][:-1] == times
    assert "7 of 7 images are done" in capsys.readouterr().out


def test_other_features_are_not_mixed_nor_overwritten_unless_that_is_said(folder, capsys):
    assert extract(flags()) == 0
    before = written(folder / "out")
    write_weights(folder / "other.safetensors", seed=6)
    others = (
        (["--checkpoint", "other.safetensors"], "weights "),
        (["--img_size", "24"], "img_size native there, 24 x 24 px here"),
        (["--img_size", "null", "--fit", "native"], "img_size native there, 16 x 16 px here"),
        (
            ["--img_size", "null", "--fit", "native", "--max_patches", "5"],
            "max_patches None there, 5",
        ),
        (["--dense"], "kind pooled there, dense here"),
        (["--dtype", "float16"], "dtype float32 there, float16 here"),
        (["--amp", "bf16"], "amp none there, bf16 here"),
        (["--shard_images", "5"], "shard_images 4096 there, 5 here"),
        (["--images", "images/0.png", "images/1.png"], "images 7 there, 2 here"),
    )
    for more, part in others:
        assert extract(flags(*more)) == 2
        error = capsys.readouterr().err
        assert "out holds other features: " in error and part in error and error.count("\n") == 1, (
            more
        )
        assert "choose another --output, or replace them with --overwrite" in error
    write_image(folder / "images" / "1.png", 24, 24, 77)
    assert extract(flags()) == 2 and "list_of_images" in capsys.readouterr().err
    assert written(folder / "out") == before
    assert extract(flags("--img_size", "24", "--overwrite", "--shard_images", "2")) == 0
    assert len(read_index(folder / "out")) == 7 and written(folder / "out") != before
    capsys.readouterr()
    assert extract(flags("--img_size", "24", "--fit", "pad", "--shard_images", "2")) == 2
    assert "out holds other features: fit crop there, pad here" in capsys.readouterr().err
    assert extract(flags("--overwrite")) == 0 and len(written(folder / "out")) == 2


def test_files_of_others_are_neither_deleted_nor_replaced(folder, capsys):
    assert extract(flags(output="done")) == 0
    shard = (folder / "done" / "features-00000.safetensors").read_bytes()
    others = {
        "index": {"index.csv": b"mine"},
        "index_beside_ours": {"index.csv": b"mine", "features-00000.safetensors": shard},
        "year": {"features-2024.safetensors": b"mine"},
        "no_shard_of_ours": {
            "features-00000.safetensors": b"mine",
            "features-20240101.safetensors": b"mine",
        },
    }
    for name, files in others.items():
        (folder / name).mkdir()
        for file, content in files.items():
            (folder / name / file).write_bytes(content)
        assert extract(flags(output=name)) == 2, name
        error = capsys.readouterr().err
        assert error.startswith("error: ") and "choose another --output" in error
        assert error.count("\n") == 1
        assert written(folder / name) == files
    (folder / "done" / "features-2024.safetensors").write_bytes(b"mine")
    assert extract(flags("--overwrite", "--dense", output="done")) == 0
    assert (folder / "done" / "features-2024.safetensors").read_bytes() == b"mine"
    assert {row["status"] for row in read_index(folder / "done")} == {"ok"}


def test_with_overwrite_old_features_stay_until_there_are_new_ones(folder, capsys, monkeypatch):
    assert extract(flags("--shard_images", "2")) == 0
    before = written(folder / "out")

    def scarce(model, inputs, sizes):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def broken(model, inputs, sizes):
        raise RuntimeError("sizes of tensors must match")

    def interrupted(model, inputs, sizes):
        raise KeyboardInterrupt

    for compute, code, part in (
        (scarce, 3, "none of the first 2 images"),
        (broken, 2, "sizes"),
        (interrupted, 130, "stay"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(features, "pooled", compute)
            assert extract(flags("--shard_images", "2", "--overwrite")) == code
        assert part in capsys.readouterr().err and written(folder / "out") == before


def test_an_image_that_is_replaced_by_one_of_the_same_size_is_noticed(folder, capsys):
    image = folder / "images" / "0.bmp"
    write_image(image, 16, 16, 1)
    size = image.stat().st_size
    assert extract(flags()) == 0
    write_image(image, 16, 16, 2)
    assert image.stat().st_size == size
    capsys.readouterr()
    assert extract(flags()) == 2 and "list_of_images" in capsys.readouterr().err


BAD = {
    "--output null": "--output is missing",
    "--images nowhere": "no image, folder or list at nowhere",
    "--images empty": "no images in empty",
    "--data digits": "give either --images or --data digits",
    "--img_size 20": "is not a whole number of 8-pixel patches; the nearest that fit: 16 or 24",
    "--img_size big": "a list of whole numbers or one of native or null, got big",
    "--fit pad": "img_size native is each image at its own size, which fit pad contradicts",
    "--checkpoint nowhere": "no checkpoint at nowhere",
    "--checkpoint images/0.png": "is no whole safetensors file",
    "--shard_mib 0": "shard_mib must be above 0, got 0",
    "--neighbours 3": "neighbours is for --probe alone",
    "--val_fraction 1.5": "val_fraction must be in (0, 1), got 1.5",
    "--probe --dense": "leave --dense out",
    "--probe --images images/0.png": "probe needs one folder of class folders",
    "--probe": "has no class folders",
    "--output full": "full holds other things (notes.txt)",
    "--output full/notes.txt": "full/notes.txt is a file, so",
    "--output foreign": "is no file of features of this visionattn",
    "--outputs x": "unknown option --outputs; the nearest is --output",
}


@pytest.mark.parametrize("more", BAD)
def test_bad_input_ends_with_one_line_code_2_and_nothing_written(folder, capsys, more):
    (folder / "empty").mkdir()
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


def test_a_full_disk_ends_with_one_line_and_what_was_written_stays(folder, capsys, monkeypatch):
    real, calls = features.Pending.write, []

    def full(pending):
        calls.append(pending)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", str(pending.path))
        real(pending)

    monkeypatch.setattr(features.Pending, "write", full)
    assert extract(flags("--shard_images", "3")) == 2
    assert (
        capsys.readouterr().err
        == "error: out/features-00001.safetensors: No space left on device\n"
    )
    assert list(written(folder / "out")) == ["features-00000.safetensors"]


def test_long_values_that_differ_late_are_shown_where_they_differ():
    same = "native whole images " * 4
    assert briefly(same + "of 32 px", same + "of 48 px") == [
        "...e images of 32 px",
        "...e images of 48 px",
    ]
    assert briefly("crop", "a" * 64) == ["crop", "aaaaaaaaaaaa..."]
