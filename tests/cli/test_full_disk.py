"""On a full disk every writer ends with one line and exit code 2, and leaves nothing behind."""

import contextlib
import errno
import os
import resource
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers import inference_files
from tests.helpers.inference_files import write_folder, write_weights
from tests.helpers.tools import assert_one_error
from visionattn.cli.exit_codes import run_tool
from visionattn.cli.files import write_whole
from visionattn.command import main
from visionattn.lab.charts import Chart, png

ROOM = 2000
"""Bytes that a file may have."""


@contextlib.contextmanager
def full_disk():
    """Files may grow no further: Python ignores the signal, so writing fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    write_folder(tmp_path / "images", [(16, 24)] * 24)
    return tmp_path


COMMANDS = {
    "features": ["--dense", "--output", "out"],
    "predict csv": ["--top_k", "4", "--output", "out.csv"],
    "predict json": ["--top_k", "4", "--output", "out.json"],
}


def test_results_of_images_on_a_full_disk_are_one_line_and_nothing_is_left(
    folder, capsys, monkeypatch
):
    monkeypatch.setattr("visionattn.cli.progress.Progress.advance", lambda *count: None)
    for name, (*words, output) in COMMANDS.items():
        given = inference_files.flags("--img_size", "native", *words, output, output=None)
        with full_disk():
            assert main([name.split()[0], *given]) == 2
        written = f"{output}/features-00000.safetensors" if name == "features" else output
        assert capsys.readouterr().err == f"error: {written}: File too large\n"
        assert not (folder / "out").exists() or os.listdir(folder / "out") == []
        assert sorted(set(os.listdir(folder)) - {"out"}) == ["best.safetensors", "images"]
    assert main([name.split()[0], *given]) == 0


def test_a_disk_that_fills_under_events_is_told_once(tmp_path, capsys, monkeypatch):
    """TensorBoard writes in a thread, whose error Python would print with a traceback."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    threads = []
    monkeypatch.setattr(threading, "excepthook", threads.append)
    monkeypatch.setattr(RecordWriter, "write", write)
    small = ["--data.workers=0", "--optim.warmup_epochs=0", "--epochs=1"]
    small += ['--model.args={"embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 16}']
    assert main(["train", "--config=digits", f"--output={tmp_path}", "--run=a", *small]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "No space left on device" in error
    assert error.count("\n") == 1 and threads == []


def noise(*shape):
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def torch_file(place):
    with open(place, "wb") as file:
        torch.save({"a": torch.zeros(5000)}, file)


WRITERS = (
    lambda place: Image.fromarray(noise(50, 50, 3)).save(place, format="PNG"),
    lambda place: noise(5000).tofile(place),
    lambda place: png(place, [Chart("nothing", "x", "y")]),
    lambda place: np.lib.format.open_memmap(place, "w+", np.uint8, (5000,)).flush(),
    torch_file,
    lambda place: place.write_text("x" * 5000),
)


def test_whatever_library_writes_a_full_disk_is_one_line(tmp_path, capsys):
    path = tmp_path / "out"
    path.write_text("before")
    for write in WRITERS:
        with full_disk():
            assert run_tool(lambda write=write: write_whole(path, write)) == 2
        assert_one_error(capsys, str(path))
        assert path.read_text() == "before" and os.listdir(tmp_path) == ["out"]
