"""A pass over bands that ends anywhere goes on and ends with the same bits."""

import os
import signal

import pytest
import torch

from tests.helpers.tiled import Array, Rows, draw_image, least_memory, make, stop_at
from visionattn.cli.exit_codes import Stopped
from visionattn.models.large import band_plan as planning
from visionattn.models.large import forward_bands, token_store
from visionattn.models.large.forward_bands import forward_tiled
from visionattn.models.segmentation import Segmenter


def segmenter(**head):
    torch.manual_seed(1)
    model = Segmenter(make(num_classes=0), 5, **head).double().eval()
    torch.nn.init.normal_(model.head.weight)
    return model


PASSES = {
    "taylorshift": (
        dict(attention="taylorshift", centre_keys=True, relative="axial", depth=2),
        "logits",
    ),
    "windows": (
        dict(attention=["window", "kernelized", "window"], window_size=3, value_conv=3),
        "dense",
    ),
    "flat": (
        dict(relative="flat", horizon=9, pos_embed="learn", depth=2, global_pool="map"),
        "pooled",
    ),
}
FILES = ["progress.json", "tokens.0", "tokens.1"]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Bands of five rows in pieces of two, of an image of 16 x 9 patches."""
    monkeypatch.setattr(planning, "BAND_TOKENS", 5 * 9)
    monkeypatch.setattr(token_store, "PIECE_TOKENS", 2 * 9)


def run(model, want, sink=None, work=None, **options):
    """What comes of a pass, as a tensor; of a sink, its map."""
    image = Array(draw_image(61, 35))
    found = forward_tiled(model, image, sink, want=want, work=work, **options)
    return found if sink is None else torch.from_numpy(sink.map.copy())


class Killed(BaseException):
    pass


@pytest.mark.parametrize("name", [*PASSES, "masks"])
def test_a_pass_that_is_killed_in_any_band_goes_on(name, tmp_path, monkeypatch):
    if name == "masks":
        model, want = segmenter(head_blocks=[0, 1, -1], head_stride=2), "masks"
    else:
        model, want = make(**PASSES[name][0]), PASSES[name][1]
    expected, work = run(model, want), tmp_path / "work"
    sunk, write, count = want in ("dense", "masks"), token_store.TokenStore.write, [0, 0]

    def writing(self, first, x):
        """Die amid a write; logits of cells are not counted."""
        count[0] += x.shape[2] == 24
        if count[0] == count[1]:
            write(self, first, torch.full_like(x[:, :1], torch.nan))
            raise Killed
        write(self, first, x)

    monkeypatch.setattr(token_store.TokenStore, "write", writing)
    for kill in range(1, 60):
        count[:] = 0, 4  # amid the second band that this start computes
        sink = Rows() if sunk and kill % 3 else None  # what was written before is lost
        try:
            found = run(model, want, sink, work)
            break
        except Killed:
            assert {*FILES} <= {path.name for path in work.iterdir()}
    assert kill > 8
    assert torch.equal(found, expected[0] if want == "dense" and sink else expected)
    assert not work.exists()


def test_a_stop_without_a_folder_is_an_interruption(monkeypatch):
    real = forward_bands.BandBlock.sum_over

    def sum_over(self, *given):
        os.kill(os.getpid(), signal.SIGINT)
        return real(self, *given)

    monkeypatch.setattr(forward_bands.BandBlock, "sum_over", sum_over)
    # What runs in the background of a shell would not hear of the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(make(depth=2), "logits")
    finally:
        signal.signal(signal.SIGINT, before)


def test_less_memory_goes_on_with_the_same_bands(tmp_path, monkeypatch):
    model, work, image = make(depth=2), tmp_path / "work", Array(draw_image(160, 90))
    work.mkdir()
    (work / "notes.txt").write_text("mine")
    expected = forward_tiled(model, image, memory=2_000_000)
    stop_at(monkeypatch, {9})
    with pytest.raises(Stopped):
        forward_tiled(model, image, memory=2_000_000, work=work)
    less = least_memory(model, 160, 90)
    assert torch.equal(forward_tiled(model, image, memory=less, work=work), expected)
    assert [path.name for path in tmp_path.rglob("*")] == ["work", "notes.txt"]


@pytest.mark.parametrize("change", [dict(want="pooled"), dict(model=make(depth=2, horizon=2))])
def test_the_work_of_another_pass_is_not_gone_on_with(change, tmp_path, monkeypatch):
    given = dict(model=make(depth=2), source=Array(draw_image(61, 35)), work=tmp_path / "work")
    stop_at(monkeypatch, {3})
    with pytest.raises(Stopped):
        forward_tiled(**given)
    kept = {path: path.read_bytes() for path in given["work"].iterdir()}
    with pytest.raises(ValueError, match="has the work of another image, model or options"):
        forward_tiled(**given | change)
    assert {path: path.read_bytes() for path in given["work"].iterdir()} == kept
    expected = forward_tiled(given["model"], given["source"])
    assert torch.equal(forward_tiled(**given), expected)


def test_tokens_that_have_no_room_are_said_before_the_first_band(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device", "a")

    monkeypatch.setattr(os, "posix_fallocate", full)
    source = Array(draw_image(160, 90))
    source.read = None
    for options in (dict(work=tmp_path / "work"), dict(memory=least_memory(make(), 160, 90))):
        with pytest.raises(OSError, match="no space for .* of tokens: No space left on device"):
            forward_tiled(make(), source, **options)
    assert not (tmp_path / "work").exists()
