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
from visionattn.cli.ends import run_tool
from visionattn.cli.files import write_whole
from visionattn.cli.tables import csv_text, json_text
from visionattn.command import main
from visionattn.inference.shards import Pending
from visionattn.lab.charts import Chart, png
from visionattn.models.weights import save_model

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


@pytest.mark.parametrize("name", COMMANDS)
def test_results_of_images_on_a_full_disk_are_one_line_and_nothing_is_left(
    folder, capsys, monkeypatch, name
):
    given = inference_files.flags("--img_size", "native", *COMMANDS[name], output=None)
    monkeypatch.setattr("visionattn.cli.progress.Progress.advance", lambda *count: None)
    with full_disk():
        assert main([name.split()[0], *given]) == 2
    error = capsys.readouterr().err
    written = "out/features-00000.safetensors" if name == "features" else COMMANDS[name][-1]
    assert error == f"error: {written}: File too large\n"
    assert not (folder / "out").exists() or os.listdir(folder / "out") == []
    assert sorted(set(os.listdir(folder)) - {"out"}) == ["best.safetensors", "images"]
    assert main([name.split()[0], *given]) == 0


def test_a_shared_model_on_a_full_disk_is_one_line_and_nothing_is_left(folder, capsys):
    given, before = ["share", "best.safetensors", "--to", "out"], sorted(os.listdir(folder))
    with full_disk():
        assert main(given) == 2
    assert capsys.readouterr().err == "error: out: File too large\n"
    assert sorted(os.listdir(folder)) == before
    assert main(given) == 0


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


def chart(path):
    png(path, [Chart("nothing", "x", "y")])


def torch_file(path):
    with open(path, "wb") as file:
        torch.save({"a": torch.zeros(5000)}, file)


WRITERS = {
    "picture of Pillow": lambda p: Image.fromarray(noise(50, 50, 3)).save(p, format="PNG"),
    "array of numpy": lambda p: noise(5000).tofile(p),
    "chart": chart,
    "mapped array": lambda p: np.lib.format.open_memmap(p, "w+", np.uint8, (5000,)).flush(),
    "file of torch": torch_file,
    "text": lambda p: p.write_text("x" * 5000),
    "CSV": lambda p: p.write_text(csv_text([{"a": "x" * 5000}], {"b": 1})),
    "JSON": lambda p: p.write_text(json_text([{"a": "x" * 5000}], {"b": 1})),
}


@pytest.mark.parametrize("name", WRITERS)
def test_whatever_library_writes_a_full_disk_is_one_line(tmp_path, capsys, name):
    path = tmp_path / "out"
    path.write_text("before")
    with full_disk():
        assert run_tool(lambda: write_whole(path, WRITERS[name])) == 2
    assert_one_error(capsys, str(path))
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["out"]


def test_weights_and_shards_on_a_full_disk_keep_what_was_there(tmp_path, capsys):
    pending = Pending(tmp_path, 0, 0, {"kind": "dense"})
    pending._maps = {"0": torch.zeros(5000)}
    writers = {
        "features-00000.safetensors": pending.write,
        "best.safetensors": lambda: save_model(
            tmp_path / "best.safetensors", torch.nn.Linear(50, 50), "a", {}, inference_files.GREY
        ),
    }
    for name, write in writers.items():
        (tmp_path / name).write_text("before")
        with full_disk():
            assert run_tool(write) == 2
        assert capsys.readouterr().err == f"error: {tmp_path / name}: File too large\n"
        assert (tmp_path / name).read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == sorted(writers)
