"""A pass over bands that is stopped anywhere goes on and ends with the same bits."""

import os
import signal

import numpy as np
import pytest
import torch

from tests.helpers.tiled import Array, Rows, draw_image, least_memory, make
from visionattn.cli.ends import Stopped
from visionattn.models.segmentation import Segmenter
from visionattn.models.tiled import forward, forward_tiled
from visionattn.models.tiled import plan as planning
from visionattn.models.tiled import snapshot as snapshots

MODELS = {
    "kernelized": dict(value_conv=3, depth=2),
    "taylorshift": dict(attention="taylorshift", centre_keys=True, relative="axial", depth=2),
    "windows": dict(attention=["window", "kernelized", "window"], window_size=3, value_conv=3),
    "flat": dict(relative="flat", horizon=9, pos_embed="learn", depth=2, global_pool="map"),
}


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(planning, "BAND_TOKENS", 5 * 9)


@pytest.fixture
def stopping(monkeypatch):
    """Send this process a signal in the middle of the n-th band of each pass."""
    count = {"at": 0, "done": 0}
    advance = forward.Progress.advance

    def counted(self, number, *args):
        count["done"] += 1
        if count["done"] == count["at"]:
            os.kill(os.getpid(), signal.SIGINT)
        advance(self, number, *args)

    monkeypatch.setattr(forward.Progress, "advance", counted)
    return count


def run(model, sink, work, want):
    return forward_tiled(model, Array(draw_image(61, 35)), sink, want=want, work=work)


def result_of(model, want, work=None, sink=None):
    found = run(model, sink, work, want)
    return torch.from_numpy(sink.map.copy()) if sink is not None else found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("want", ["logits", "dense"])
def test_a_pass_that_is_stopped_at_any_band_goes_on(name, want, tmp_path, stopping):
    model, work = make(**MODELS[name]), tmp_path / "work"
    expected = result_of(model, want, sink=Rows() if want == "dense" else None)
    bands, stopped = stopping["done"], 0
    for at in range(1, bands):
        stopping["at"], stopping["done"] = at, 0
        sink = Rows() if want == "dense" else None
        with pytest.raises(Stopped, match="the same command goes on"):
            run(model, sink, work, want)
        assert [path.name for path in work.iterdir()] == [snapshots.NAME]
        assert sink is None or not sink.finished
        stopping["at"] = 0
        # Every second time what was written is lost.
        sink = Rows() if sink is not None and at % 2 else sink
        assert torch.equal(result_of(model, want, work, sink), expected)
        assert not work.exists()
        stopped += 1
    assert stopped > 8


def test_a_pass_that_is_stopped_again_and_again_ends(tmp_path, stopping):
    head = dict(head_blocks=[0, 1], head_stride=2)
    model = Segmenter(make(num_classes=0, depth=2), 5, **head).double().eval()
    torch.nn.init.normal_(model.head.weight)
    expected = run(model, None, None, "masks")
    bands = stopping["done"]
    stopping["at"] = 1
    for _ in range(bands - 1):
        stopping["done"] = 0
        with pytest.raises(Stopped):
            run(model, Rows(), tmp_path / "work", "masks")
    stopping["done"], sink = 0, Rows()
    assert run(model, sink, tmp_path / "work", "masks") is None
    assert stopping["done"] == 1  # band
    assert torch.equal(torch.from_numpy(sink.map), expected)


def test_a_map_in_memory_goes_on_too(tmp_path, stopping):
    model = make(depth=2)
    expected = run(model, None, None, "dense")
    stopping["at"], stopping["done"] = stopping["done"] - 1, 0
    with pytest.raises(Stopped):
        run(model, None, tmp_path, "dense")
    stopping["at"] = 0
    assert torch.equal(run(model, None, tmp_path, "dense"), expected)


@pytest.mark.parametrize("there", [False, True])
def test_less_memory_goes_on_with_the_same_bands(there, tmp_path, stopping, monkeypatch):
    model, work, image = make(depth=2), tmp_path / "work", Array(draw_image(160, 90))
    if there:  # a folder of the user's stays
        work.mkdir()
    expected = forward_tiled(model, image, memory=2_000_000)
    stopping["at"], stopping["done"] = 9, 0
    with pytest.raises(Stopped):
        forward_tiled(model, image, memory=2_000_000, work=work)
    stopping["at"], less = 0, least_memory(model, 160, 90)
    assert torch.equal(forward_tiled(model, image, memory=less, work=work), expected)
    assert work.exists() == there


def test_a_pass_that_is_killed_goes_on_from_the_last_snapshot(tmp_path, monkeypatch):
    model, work = make(depth=2), tmp_path / "work"
    expected = result_of(model, "dense", sink=Rows())
    monkeypatch.setattr(snapshots, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(snapshots, "MOST_SHARE", float("inf"))
    write, done = snapshots.Snapshots.write, []

    class Killed(BaseException):
        pass

    def writing(self, *args, **options):
        done.append(args[0])
        if len(done) % 3 == 0:
            raise Killed
        write(self, *args, **options)

    monkeypatch.setattr(snapshots.Snapshots, "write", writing)
    sink, kills = Rows(), 0
    while not sink.finished:
        try:
            run(model, sink, work, "dense")
        except Killed:
            kills += 1
    assert kills > 2 and np.array_equal(sink.map, expected)


def test_a_stop_without_a_folder_is_an_interruption(stopping):
    stopping["at"] = 2
    # What runs in the background of a shell would not hear of the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(make(depth=2), None, None, "logits")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "change", [dict(want="pooled"), dict(model=make(depth=2, horizon=2)), dict(identity={"n": 2})]
)
def test_the_work_of_another_pass_is_not_gone_on_with(change, tmp_path, stopping):
    given = dict(model=make(depth=2), source=Array(draw_image(61, 35)), work=tmp_path / "work")
    stopping["at"] = 3
    with pytest.raises(Stopped):
        forward_tiled(**given)
    kept = (tmp_path / "work" / snapshots.NAME).read_bytes()
    stopping["at"] = 0
    with pytest.raises(ValueError, match="keeps the work of another image, model or options"):
        forward_tiled(**given | change)
    assert (tmp_path / "work" / snapshots.NAME).read_bytes() == kept
    expected = forward_tiled(given["model"], given["source"])
    assert torch.equal(forward_tiled(**given), expected)


def test_a_damaged_snapshot_is_said(tmp_path, stopping):
    stopping["at"] = 3
    with pytest.raises(Stopped):
        run(make(depth=2), None, tmp_path, "logits")
    path = tmp_path / snapshots.NAME
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"progress.safetensors is damaged; delete it"):
        run(make(depth=2), None, tmp_path, "logits")


def test_other_files_of_the_folder_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    run(make(depth=2), None, tmp_path, "logits")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def full(*args):
    raise OSError(28, "No space left on device", "a")


def test_a_snapshot_that_has_no_room_does_not_end_the_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(snapshots, "save_file", full)
    expected = result_of(make(depth=2), "logits")
    with pytest.warns(UserWarning, match="cannot be written"):
        assert torch.equal(result_of(make(depth=2), "logits", tmp_path), expected)


def test_tokens_that_have_no_room_are_said_before_the_first_band(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", full)
    source = Array(draw_image(160, 90))
    source.read = None
    with pytest.raises(OSError, match="no room for .* of tokens: No space left on device"):
        forward_tiled(make(), source, memory=least_memory(make(), 160, 90), work=tmp_path / "work")
    assert not (tmp_path / "work").exists()
