"""Images that are computed band by band: rows, features, masks and maps as in one pass."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch

import visionattn
from tests.helpers.inference_files import (
    ARGS,
    COLOUR,
    MODEL,
    flags,
    read_index,
    read_map,
    write_segmenter,
    write_tiff,
    write_weights,
)
from tests.helpers.tiled import stop_at
from tests.helpers.tools import read_csv, written
from visionattn.cli.exit_codes import OutOfMemory
from visionattn.command import run
from visionattn.inference import attribution_folder as look
from visionattn.inference import banded_inference, image_reading, inference_estimate
from visionattn.inference.inference_options import InferenceOptions
from visionattn.inference.model_opening import open_model
from visionattn.models import cost
from visionattn.models.cost import Passes
from visionattn.models.large import band_plan as planning
from visionattn.models.large import forward_bands
from visionattn.models.large.token_store import PassFolder
from visionattn.models.weights import save_model

MAPS = ("--save", "probabilities", "geojson", "coco")
SHAPES = [(16, 24), (40, 120), (21, 35), (133, 64)]
FORWARD_BYTES = Passes.forward_bytes
BOUND = ("--memory_gib", "0.0005")
"""Below what any pass over a whole image takes, and above two rows of patches of these images."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with weights, four images and a slide, as the current folder."""
    monkeypatch.setattr(planning, "BAND_TOKENS", 16)
    # Counting the memory of a pass takes longer than the pass; see ``there``.
    monkeypatch.setattr(Passes, "forward_bytes", lambda passes, shape: 4000 * math.prod(shape))
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    write_segmenter(tmp_path / "painter.safetensors")
    (tmp_path / "images").mkdir()
    for number, shape in enumerate(SHAPES):
        write_tiff(tmp_path / "images" / f"{number}.tif", *shape, number)
    write_tiff(tmp_path / "slide.tif", 133, 104)
    return tmp_path


def native(*more: str, output: str = "out") -> list[str]:
    return flags("--img_size", "native", *more, output=output)


def map_of_slide(*more: str, output: str = "map.npy") -> list[str]:
    given = "--checkpoint best.safetensors --images slide.tif --img_size native --dense --output"
    return [*given.split(), output, *more]


def hidden(folder: Path) -> list[Path]:
    """What unfinished passes keep."""
    return [path for path in folder.iterdir() if path.name.startswith(".")]


def spoil_tile(path: Path, number: int) -> None:
    """Garble a tile of a compressed TIFF."""
    with tifffile.TiffFile(path) as file:
        place = file.pages[0].dataoffsets[number]
    data = bytearray(path.read_bytes())
    data[place : place + 8] = bytes(8)
    path.write_bytes(data)


def test_functions_give_what_one_pass_gives_and_say_so(folder):
    arrays = [tifffile.imread(f"images/{i}.tif") for i in range(4)]
    weights, bound = "best.safetensors", {"img_size": "native", "memory_gib": 0.0005}
    plain = visionattn.predict(weights, arrays, img_size="native")
    with pytest.warns(UserWarning, match="images, .* band by band"):
        bands = visionattn.predict(weights, arrays, **bound)
    assert plain.classes == bands.classes and plain.paths == bands.paths
    assert torch.allclose(plain.probabilities, bands.probabilities, atol=1e-5)
    for dense in (False, True):
        whole = visionattn.extract_features(weights, "images", dense=dense, img_size="native")
        with pytest.warns(UserWarning, match="band by band"):
            parts = visionattn.extract_features(weights, "images", dense=dense, **bound)
        for one, other in zip(whole, parts, strict=True):
            assert torch.allclose(one, other, atol=1e-4, rtol=1e-5)
    wanted = visionattn.segment("painter.safetensors", "images")
    with pytest.warns(UserWarning, match="4 of 4 images, .* band by band"):
        found = visionattn.segment("painter.safetensors", "images", memory_gib=0.0005)
    for one, other in zip(wanted, found, strict=True):
        assert one.shape == other.shape and (one == other).float().mean() > 0.999
        assert len(one.unique()) > 1


@pytest.fixture
def there(monkeypatch):
    """Sets the available memory; a process takes nothing before its first pass, and the memory of
    passes is counted.
    """
    monkeypatch.setattr(Passes, "forward_bytes", FORWARD_BYTES)
    monkeypatch.setattr(cost, "taken_bytes", lambda device: 0)
    monkeypatch.setattr(banded_inference, "taken_bytes", lambda device: 0)
    monkeypatch.setattr(cost, "LIBRARIES_BYTES", 0)
    monkeypatch.setattr(inference_estimate, "FEW_PIXELS", 0)
    monkeypatch.setattr(banded_inference, "FEW_PIXELS", 0)
    return lambda count: monkeypatch.setattr(cost, "memory_there_is", lambda *how: count)


def forward_bytes(*shape: int) -> int:
    opened = open_model(InferenceOptions(checkpoint="best.safetensors"), classifies=True)
    return Passes(opened.model, opened.spec, opened.device, "none").forward_bytes(shape)


def test_only_images_that_clearly_do_not_fit_are_computed_so_and_never_read(
    folder, capsys, monkeypatch, there
):
    """The smaller image takes no more than 1.2 times the memory there is, the larger one more."""
    for number in (0, 2):
        (folder / "images" / f"{number}.tif").unlink()
    smaller, larger = (forward_bytes(1, h, w) + 2 * 3 * h * w for h, w in ((40, 120), (136, 64)))
    there(int(smaller / 1.19))
    assert larger > smaller * 1.01
    read = []
    real = image_reading.read_image

    def noted(reader, view, options):
        read.append((reader.height, reader.width))
        return real(reader, view, options)

    monkeypatch.setattr(image_reading, "read_image", noted)
    assert run("predict", native(output="some.csv")) == 0
    said = capsys.readouterr().out
    assert re.search(r"1 of 2 images, of up to 133 x 64 px, do not fit .* MiB\), as ", said)
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
    assert "they cannot run band by band: " in capsys.readouterr().err
    assert written(folder) == before
    with pytest.raises(OutOfMemory, match="1 image of 136 x 64 pixels would need about "):
        visionattn.predict("best.safetensors", "images", img_size="native", memory_gib=0.0005)


def test_an_image_that_cannot_be_computed_is_a_row_or_ends_its_map(folder, capsys):
    write_tiff(folder / "images" / "3.tif", 133, 64, compression="zlib")
    spoil_tile(folder / "images" / "3.tif", 16)
    # A wide image takes more for a band than one that has more pixels.
    write_tiff(folder / "images" / "4.tif", 24, 320, 4)
    assert run("features", native("--dense", *BOUND)) == 0
    rows = read_index(folder / "out")
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "unreadable", "oom"]
    assert re.match(r"rows \d+ to \d+ of images/3.tif cannot be read", rows[3]["reason"])
    assert "is below one band: " in rows[4]["reason"]
    write_tiff(folder / "slide.tif", 133, 104, compression="zlib")
    spoil_tile(folder / "slide.tif", 16)
    before = written(folder)
    assert run("features", map_of_slide(*BOUND)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: rows ") and " of slide.tif cannot be read: " in error
    assert written(folder) == before


def test_another_bound_of_memory_goes_on_and_other_options_say_which_they_are(
    folder, capsys, monkeypatch
):
    with monkeypatch.context() as patch:
        stop_at(patch, {19})
        assert run("features", native("--dense", *BOUND)) == 130
    kept = written(folder)
    capsys.readouterr()
    assert run("features", native("--dense", *BOUND, "--dtype", "float16")) == 2
    assert (
        "unfinished work of another call for out: dtype float32 there, float16"
        in capsys.readouterr().err
    )
    assert written(folder) == kept
    assert run("features", native("--dense", "--memory_gib", "0.0007")) == 0
    assert "resuming at band" in capsys.readouterr().out
    assert [row["status"] for row in read_index(folder / "out")] == ["ok"] * 4
    assert not hidden(folder)
    painted = native("--checkpoint", "painter.safetensors", *BOUND, output="painted")
    with monkeypatch.context() as patch:
        stop_at(patch, {19})
        assert run("predict", painted) == 130
    assert run("predict", [*painted, *MAPS]) == 2
    said = "work of another call for painted: save null there, probabilities"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "made"),
    [
        (["predict", *native(*BOUND, output="out.csv")], "out.csv"),
        (["features", *native("--dense", *BOUND)], "out/*"),
        (["predict", *native("--checkpoint", "painter.safetensors", *BOUND)], "out/*.png"),
        (["predict", *native("--checkpoint", "painter.safetensors", *BOUND, *MAPS)], "out/*"),
    ],
)
def test_what_was_stopped_goes_on_to_the_same_bytes(folder, capsys, monkeypatch, command, made):
    """Of several images, those that are done are not computed again."""
    name, *words = command
    assert run(name, words) == 0
    wanted = {path: path.read_bytes() for path in folder.glob(made)}
    output = folder / words[words.index("--output") + 1]
    shutil.rmtree(output) if output.is_dir() else output.unlink()
    begun, real_tiled = [], forward_bands.forward_tiled

    def tiled(model, source, *more, **options):
        begun.append(source.name)
        return real_tiled(model, source, *more, **options)

    with monkeypatch.context() as patch:
        stop_at(patch, {19})
        patch.setattr(forward_bands, "forward_tiled", tiled)
        assert run(name, words) == 130
        assert capsys.readouterr().err.endswith("run the same command to resume\n")
        first = begun[:]
        assert run(name, words) == 0
    assert "resuming at band" in capsys.readouterr().out
    assert begun[len(first)] == first[-1] and len(begun) == 5
    assert {path: path.read_bytes() for path in folder.glob(made)} == wanted != {}
    assert not hidden(folder)


def test_look_draws_the_winners_of_one_pass_over_a_smaller_picture(
    folder, capsys, monkeypatch, there
):
    flags = ["best.safetensors", "images/3.tif", "--img_size", "native"]
    there(1 << 40)
    assert run("look", [*flags, "--output", "plain"]) == 0
    there(forward_bytes(1, 136, 64) // 2)
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
    assert run("look", [*flags, "--show", "boxes", "--output", "boxes"]) == 0
    boxes = json.loads((folder / "boxes" / "1-boxes.geojson").read_text())["features"]
    assert len(boxes) == len(bands["winners"])
    assert run("look", [*flags, "--show", "rows", "--output", "rows"]) == 2
    assert "band by band only --show winners and boxes work" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["map.npy", "map.zarr", "map.tif"])
def test_features_become_a_map_in_a_file_of_its_own(folder, capsys, output):
    assert run("features", map_of_slide(*BOUND, output=output)) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == f"{output}: 24 x 17 x 13 float32"
    assert "17 x 13 patches in " in said and " 1 bands" not in said
    options = dict(dense=True, img_size="native")
    whole = visionattn.extract_features("best.safetensors", "slide.tif", **options)[0].numpy()
    assert np.abs(read_map(output) - whole).max() < 1e-5 * np.abs(whole).max()
    assert not hidden(folder)


def test_classes_of_pixels_and_their_probabilities_become_maps_in_files_of_their_own(folder):
    given = ["--checkpoint", "painter.safetensors", "--images", "slide.tif"]
    assert run("predict", [*given, *BOUND, "--output", "mask.tif"]) == 0
    whole = visionattn.segment("painter.safetensors", "slide.tif")[0].numpy()
    found = tifffile.imread("mask.tif")
    assert found.dtype == np.uint8 and found.shape == whole.shape
    assert (found == whole).mean() > 0.999 and len(np.unique(whole)) > 1
    given += ["--save", "probabilities"]
    assert run("predict", [*given, "--output", "whole"]) == 0
    maps = np.load("whole/slide.npy")
    for output in ("map.npy", "map.zarr", "map.tif"):
        assert run("predict", [*given, *BOUND, "--output", output]) == 0
        bands = read_map(output)
        assert bands.dtype == np.float16 and np.array_equal(bands.argmax(0), found)
        assert np.abs(bands.astype(float) - maps).max() < 2**-9
    assert run("predict", [*given, *BOUND, "--output", "bands"]) == 0
    assert np.array_equal(np.load("bands/slide.npy"), bands)
    assert not hidden(folder)


def test_a_kill_once_the_map_has_its_name_leaves_a_whole_map(folder, monkeypatch):
    words = map_of_slide(*BOUND, output="map.zarr")
    assert run("features", words) == 0
    expected = read_map("map.zarr")
    shutil.rmtree("map.zarr")

    class Killed(BaseException):
        pass

    def finish(self):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(PassFolder, "finish", finish)
        with pytest.raises(Killed):
            run("features", words)
    assert (folder / "map.zarr").exists() and hidden(folder)
    assert run("features", words) == 0
    assert np.array_equal(read_map("map.zarr"), expected)
    assert not hidden(folder)


def test_numbers_that_are_not_finite_make_no_map(folder, capsys):
    model = visionattn.load_model("best.safetensors")
    model.blocks[1].mlp.fc2.bias.data[3] = float("nan")
    save_model(folder / "best.safetensors", model, MODEL, ARGS, COLOUR)
    assert run("features", map_of_slide()) == 2
    assert "error: slide.tif: outputs are not finite in rows 0 to " in capsys.readouterr().err
    assert not hidden(folder)


def test_a_map_lies_where_its_image_does_and_smaller_sizes_are_levels(folder):
    import rasterio
    from affine import Affine

    pixels = np.random.default_rng(0).integers(0, 256, (3, 128, 96)).astype(np.uint8)
    profile = dict(driver="GTiff", count=3, height=128, width=96, dtype="uint8", tiled=True)
    profile |= dict(blockxsize=32, blockysize=32, crs="EPSG:32633", photometric="rgb")
    profile["transform"] = Affine(10, 0, 5e5, 0, -10, 5e6)
    with rasterio.open("slide.tif", "w", **profile) as file:
        file.write(pixels)
        file.build_overviews([2])
    for level, side in ((0, 80), (1, 160)):
        output = f"map{level}.tif"
        assert run("features", map_of_slide("--level", str(level), output=output)) == 0
        with rasterio.open(output) as file:
            assert (file.height, file.width) == (16 >> level, 12 >> level)
            assert file.crs == profile["crs"] and file.count == 24
            wanted = Affine(side, 0, 5e5, 0, -side, 5e6)
            assert file.transform.almost_equals(wanted)
