"""Images that are computed band by band: the same rows, features and masks as in one pass."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch

import visionattn
from tests.helpers.inference_files import (
    flags,
    read_index,
    write_weights,
)
from tests.helpers.tiled import stop_at
from tests.helpers.tools import read_csv, written
from visionattn.cli.ends import OutOfMemory
from visionattn.command import run
from visionattn.inference import attribution_folder as look
from visionattn.inference import banding, forecast, image_reading
from visionattn.inference.banding import WorkFolder
from visionattn.inference.inference_options import InferenceOptions
from visionattn.inference.model_opening import open_model
from visionattn.models import cost
from visionattn.models.cost import Passes
from visionattn.models.large import band_plan as planning
from visionattn.models.large import forward_bands
from visionattn.models.registration import create
from visionattn.models.weights import DataSpec, save_model

SHAPES = [(16, 24), (40, 120), (21, 35), (133, 64)]
BOUND = ("--memory_gib", "0.0005")
"""Below what any pass over a whole image takes, and above two rows of patches of these images."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "BAND_TOKENS", 16)
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    (tmp_path / "images").mkdir()
    for number, (height, width) in enumerate(SHAPES):
        write_tiff(tmp_path / "images" / f"{number}.tif", height, width, number)
    return tmp_path


def write_tiff(path: Path, height: int, width: int, seed: int) -> np.ndarray:
    """A noisy colour image in tiles; returns its pixels, ``[H, W, 3]``."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    tifffile.imwrite(path, pixels, tile=(16, 16), photometric="rgb")
    return pixels


def native(*more: str, output: str | None = "out") -> list[str]:
    return flags("--img_size", "native", *more, output=output)


def hidden(folder: Path) -> list[Path]:
    """What unfinished passes keep."""
    return [path for path in folder.iterdir() if path.name.startswith(".")]


def test_calls_are_those_of_one_pass_and_say_so(folder):
    paths = [f"images/{i}.tif" for i in range(4)]
    arrays = [tifffile.imread(path) for path in paths]
    weights, bound = "best.safetensors", {"img_size": "native", "memory_gib": 0.0005}
    for given in (paths[:1], arrays):
        plain = visionattn.predict(weights, given, img_size="native")
        with pytest.warns(UserWarning, match="images, .* band by band"):
            bands = visionattn.predict(weights, given, **bound)
        assert plain.classes == bands.classes and plain.paths == bands.paths
        assert torch.allclose(plain.probabilities, bands.probabilities, atol=1e-5)
    for dense in (False, True):
        whole = visionattn.extract_features(weights, arrays, dense=dense, img_size="native")
        with pytest.warns(UserWarning, match="band by band"):
            parts = visionattn.extract_features(weights, arrays, dense=dense, **bound)
        for one, other in zip(whole, parts, strict=True):
            assert torch.allclose(one, other, atol=1e-4, rtol=1e-5)


@pytest.fixture
def there(monkeypatch):
    """Sets the memory there is, of which a process takes nothing before its first pass."""
    monkeypatch.setattr(cost, "taken_bytes", lambda device: 0)
    monkeypatch.setattr(banding, "taken_bytes", lambda device: 0)
    monkeypatch.setattr(cost, "LIBRARIES_BYTES", 0)
    monkeypatch.setattr(forecast, "FEW_PIXELS", 0)
    monkeypatch.setattr(banding, "FEW_PIXELS", 0)
    return lambda count: monkeypatch.setattr(cost, "memory_there_is", lambda *how: count)


def test_only_images_that_clearly_do_not_fit_are_computed_so_and_never_read(
    folder, capsys, monkeypatch, there
):
    """The smaller image takes no more than 1.2 times the memory there is, the larger one more."""
    for number in (0, 2):
        (folder / "images" / f"{number}.tif").unlink()
    opened = open_model(InferenceOptions(checkpoint="best.safetensors"), classifies=True)
    needed = {
        pixels: Passes(opened.model, opened.spec, opened.device, "none").forward_bytes(pixels)
        for pixels in ((1, 40, 120), (1, 136, 64))
    }
    sums = [count + 2 * 3 * h * w for (_, h, w), count in needed.items()]
    there(int(sums[0] / 1.19))
    assert sums[1] > sums[0] * 1.01
    read = []
    real = image_reading.read_image

    def noted(reader, view, options):
        read.append((reader.height, reader.width))
        return real(reader, view, options)

    monkeypatch.setattr(image_reading, "read_image", noted)
    assert run("predict", native(output="some.csv")) == 0
    said = capsys.readouterr().out
    assert re.search(r"1 of 2 images, of up to 133 x 64 px, do not fit .* MiB\), as there", said)
    assert "images/3.tif: 17 x 8 patches in " in said and set(read) == {(40, 120)}
    there(1 << 40)
    assert run("predict", native(output="plain.csv")) == 0
    assert "band" not in capsys.readouterr().out
    some, plain = (read_csv(folder / name) for name in ("some.csv", "plain.csv"))
    assert [row["class_1"] for row in some] == [row["class_1"] for row in plain]


def test_a_model_that_cannot_be_computed_so_says_why(folder, capsys):
    args = dict(patch_size=8, embed_dim=24, depth=1, num_heads=3, attention="softmax")
    write_weights(folder / "best.safetensors", args=args | {"relative": "none"})
    before = written(folder)
    assert run("predict", native(*BOUND, output="out.csv")) == 3
    assert "it is not computed band by band: " in capsys.readouterr().err
    assert written(folder) == before
    with pytest.raises(OutOfMemory, match="1 image of 136 x 64 pixels would take about "):
        visionattn.predict("best.safetensors", "images", img_size="native", memory_gib=0.0005)


def test_an_image_that_cannot_be_read_to_its_end_is_a_row(folder):
    path = folder / "images" / "3.tif"
    pixels = np.zeros((133, 64, 3), np.uint8)
    tifffile.imwrite(path, pixels, tile=(16, 16), compression="zlib")
    with tifffile.TiffFile(path) as file:
        place = file.pages[0].dataoffsets[16]
    data = bytearray(path.read_bytes())
    data[place : place + 8] = bytes(8)
    path.write_bytes(data)
    assert run("features", native("--dense", *BOUND)) == 0
    rows = read_index(folder / "out")
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "unreadable"]
    assert re.match(r"rows \d+ to \d+ of images/3.tif cannot be read", rows[3]["reason"])
    assert not hidden(folder)


def test_an_image_of_which_one_band_is_above_the_bound_is_a_row(folder):
    # A wide image takes more for a band than one that has more pixels.
    write_tiff(folder / "images" / "4.tif", 24, 320, 4)
    assert run("features", native(*BOUND)) == 0
    rows = read_index(folder / "out")
    assert [row["status"] for row in rows] == ["ok"] * 4 + ["oom"]
    assert "is below one band: " in rows[4]["reason"]


def test_another_bound_of_memory_goes_on_and_other_options_say_which_they_are(
    folder, capsys, monkeypatch
):
    with monkeypatch.context() as patch:
        stop_at(patch, {19})
        assert run("features", native("--dense", *BOUND)) == 130
    kept = written(folder)
    capsys.readouterr()
    assert run("features", native("--dense", *BOUND, "--dtype", "float16")) == 2
    assert "that was to become out: dtype float32 there, float16" in capsys.readouterr().err
    assert written(folder) == kept
    assert run("features", native("--dense", "--memory_gib", "0.0007")) == 0
    assert "going on with band" in capsys.readouterr().out
    assert [row["status"] for row in read_index(folder / "out")] == ["ok"] * 4
    assert not hidden(folder)


def test_the_memory_of_the_first_pass_stays_unless_another_bound_is_asked_for(tmp_path):
    def work(bound_gib):
        return WorkFolder(tmp_path / "out", lambda: {"a": 1}, overwrite=False, bound_gib=bound_gib)

    with pytest.raises(KeyboardInterrupt), work(None) as first:
        assert [first.options(index, 100 - index)["memory"] for index in (0, 7)] == [100, 100]
        first.result(0).write_bytes(b"done")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), work(None) as same:
        assert same.options(8, 60)["memory"] == 100
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), work(0.5) as other:
        assert [other.options(index, 50 - index)["memory"] for index in (8, 9)] == [42, 42]
        raise KeyboardInterrupt
    with work(0.5) as last:
        assert last.options(9, 1)["memory"] == 42 and last.result(0).read_bytes() == b"done"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["classes", "maps", "masks"])
def test_what_was_stopped_goes_on_to_the_same_bytes(folder, capsys, monkeypatch, kind):
    """Of several images, those that are done are not computed again."""
    write_segmenter(folder / "painter.safetensors")
    command = native(*BOUND, output=None)
    tool, more = {
        "classes": ("predict", []),
        "maps": ("features", ["--dense"]),
        "masks": ("predict", ["--checkpoint", "painter.safetensors"]),
    }[kind]
    command += [*more, "--output"]
    end = ".csv" if kind == "classes" else ""
    assert run(tool, [*command, f"whole{end}"]) == 0
    begun, real_tiled = [], forward_bands.forward_tiled

    def tiled(model, source, *more, **options):
        begun.append(source.name)
        return real_tiled(model, source, *more, **options)

    with monkeypatch.context() as patch:
        stop_at(patch, {19})
        patch.setattr(forward_bands, "forward_tiled", tiled)
        assert run(tool, [*command, f"out{end}"]) == 130
        assert capsys.readouterr().err.endswith("the same command goes on\n")
        first = begun[:]
        assert run(tool, [*command, f"out{end}"]) == 0
    assert "going on with band" in capsys.readouterr().out
    assert begun[len(first)] == first[-1] and len(begun) == 5
    pattern = {"classes": "{}.csv", "maps": "{}/*", "masks": "{}/*.png"}[kind]
    found, wanted = (
        [path.read_bytes() for path in sorted(folder.glob(pattern.format(name)))]
        for name in ("out", "whole")
    )
    assert found == wanted != []
    assert not hidden(folder)


def write_segmenter(path: Path) -> None:
    args = dict(patch_size=8, embed_dim=16, depth=2, num_heads=2, head_stride=2, horizon=1)
    spec = DataSpec(3, 3, (), (0.5,) * 3, (0.25,) * 3, None, None, "native", task="segmentation")
    torch.manual_seed(0)
    model = create("scaleformer_vit_t", "segmentation", 3, 3, args)
    torch.nn.init.normal_(model.head.weight)
    save_model(path, model, "scaleformer_vit_t", args, spec)


def test_masks_are_those_of_one_pass(folder):
    write_segmenter(folder / "painter.safetensors")
    wanted = visionattn.segment("painter.safetensors", "images")
    with pytest.warns(UserWarning, match="4 of 4 images, .* band by band"):
        found = visionattn.segment("painter.safetensors", "images", memory_gib=0.0005)
    for one, other in zip(wanted, found, strict=True):
        assert one.shape == other.shape and (one == other).float().mean() > 0.999
        assert len(one.unique()) > 1


def test_look_draws_the_winners_of_one_pass_over_a_smaller_picture(
    folder, capsys, monkeypatch, there
):
    opened = open_model(InferenceOptions(checkpoint="best.safetensors"), classifies=True)
    forward_bytes = Passes(opened.model, opened.spec, opened.device, "none").forward_bytes
    flags = ["best.safetensors", "images/3.tif", "--img_size", "native"]
    there(1 << 40)
    assert run("look", [*flags, "--output", "plain"]) == 0
    there(int(forward_bytes((1, 136, 64)) / 2))
    monkeypatch.setattr(look, "REDUCED_PX", 133 * 64 // 4)
    assert run("look", [*flags, "--output", "bands"]) == 0
    plain, bands = (
        json.loads((folder / each / "look.json").read_text())["images"][0]
        for each in ("plain", "bands")
    )
    for key in ("class", "grid", "patch_px", "view"):
        assert plain[key] == bands[key]
    assert bands["margin"] == pytest.approx(plain["margin"], rel=1e-4)
    for one, other in zip(plain["winners"], bands["winners"], strict=True):
        assert other["box"] == one["box"]
        assert other["added"] == pytest.approx(one["added"], rel=1e-3)
    assert bands["rows"] == [] and "band by band" in (folder / "bands" / "index.html").read_text()
    with pytest.warns(UserWarning, match="band by band"):
        found = visionattn.look("best.safetensors", "images/3.tif", img_size="native")[0]
    assert found.in_bands and found.evidence.gradient is None
    assert [*found.box(*found.top)] == plain["winners"][0]["box"]
    capsys.readouterr()
    assert run("look", [*flags, "--show", "rows", "--output", "rows"]) == 2
    assert "band by band there are only winners" in capsys.readouterr().err
