"""The map of one image in a file of its own: as in one pass, and whole or not at all."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch

import visionattn
from tests.helpers.inference_files import COLOUR, write_weights
from tests.helpers.tiled import stop_at
from tests.helpers.tools import written
from visionattn.command import run
from visionattn.models.large.token_store import PassFolder
from visionattn.models.registration import create
from visionattn.models.weights import DataSpec, save_model

PAINTED = DataSpec(3, 3, (), (0.5,) * 3, (0.25,) * 3, None, None, "native", task="segmentation")
ARGS = dict(patch_size=8, embed_dim=16, depth=2, num_heads=2, head_stride=2, horizon=1)
BOUND = ("--memory_gib", "0.0005")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    torch.manual_seed(0)
    model = create("scaleformer_vit_t", "segmentation", 3, 3, ARGS)
    torch.nn.init.normal_(model.head.weight)
    save_model(tmp_path / "painter.safetensors", model, "scaleformer_vit_t", ARGS, PAINTED)
    write_tiff(tmp_path / "slide.tif")
    return tmp_path


def write_tiff(path: Path, height: int = 133, width: int = 104, seed: int = 1, **how):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    tifffile.imwrite(path, pixels, tile=(32, 32), photometric="rgb", **how)
    return pixels


def words(*more: str, output: str, images=("slide.tif",)) -> list[str]:
    given = ["--checkpoint", "best.safetensors", "--images", *images, "--img_size", "native"]
    return [*given, *more, "--output", output]


def hidden(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".")]


def opened(path: str) -> np.ndarray:
    if path.endswith(".npy"):
        return np.load(path)
    if path.endswith(".zarr"):
        import zarr

        return zarr.open_array(path, mode="r")[:]
    found = tifffile.imread(path)
    return found if found.ndim == 3 else found[None]


@pytest.mark.parametrize("output", ["map.npy", "map.zarr", "map.tif"])
def test_features_become_a_map_band_by_band(folder, capsys, output):
    assert run("features", words("--dense", *BOUND, output=output)) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == f"{output}: 24 x 17 x 13 float32"
    assert "17 x 13 patches in " in said and " 1 bands" not in said
    whole = visionattn.extract_features(
        "best.safetensors", "slide.tif", dense=True, img_size="native"
    )[0].numpy()
    found = opened(output)
    assert found.shape == whole.shape and np.abs(found - whole).max() < 1e-5 * np.abs(whole).max()
    names = ["best.safetensors", output, "painter.safetensors", "slide.tif"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


@pytest.mark.parametrize("output", ["mask.npy", "mask.tif"])
def test_classes_of_pixels_become_a_map(folder, capsys, output):
    given = ["--checkpoint", "painter.safetensors", "--images", "slide.tif", *BOUND]
    assert run("predict", [*given, "--output", output]) == 0
    assert "band by band" in capsys.readouterr().out
    whole = visionattn.segment("painter.safetensors", "slide.tif")[0].numpy()
    found = opened(output).squeeze()
    assert found.dtype == np.uint8 and found.shape == whole.shape
    assert (found == whole).mean() > 0.999 and len(np.unique(whole)) > 1


BAD = {
    "--images own.npy --overwrite --output own.npy": "own.npy would replace the image own.npy",
    "--images slide.tif slide.tif": "map.npy holds the map of one image, and there are 2",
    "--img_size 64": "slide.tif of 133 x 104 px would be preprocessed (center crop to 64 x",
    "--memory_gib 1e-6": "memory 0 MiB is below one band",
    "--level 1": "wanted level 1, the image has 1, counted from 0: 133 x 104 pixels",
    "--batch_size 2": "batch_size does nothing for the map of one image",
    "--dense false": "add --dense, or name a folder",
    "--checkpoint other.safetensors": "is written band by band: ",
}


@pytest.mark.parametrize("more", BAD)
def test_bad_input_ends_with_one_line_code_2_and_nothing_written(folder, capsys, more):
    np.save(folder / "own.npy", np.zeros((40, 40, 3), np.uint8))
    args = dict(patch_size=8, embed_dim=24, depth=1, num_heads=3, attention="softmax")
    args |= dict(relative="none")
    write_weights(folder / "other.safetensors", args=args, name="scaleformer_vit_t")
    before = written(folder)
    assert run("features", words("--dense", output="map.npy") + more.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and BAD[more] in error and error.count("\n") == 1
    assert written(folder) == before


def test_with_overwrite_the_old_map_stays_until_there_is_a_new_one(folder, capsys, monkeypatch):
    assert run("features", words("--dense", *BOUND, output="map.npy")) == 0
    before = (folder / "map.npy").read_bytes()
    write_tiff(folder / "slide.tif", seed=3)
    again = words("--dense", "--overwrite", *BOUND, output="map.npy")
    with monkeypatch.context() as patch:
        stop_at(patch, {5})
        assert run("features", again) == 130
        assert (folder / "map.npy").read_bytes() == before
        assert run("features", again) == 0
    assert "going on with band " in capsys.readouterr().out
    assert (folder / "map.npy").read_bytes() != before
    assert not hidden(folder)


def test_a_damaged_tile_ends_it_with_its_rows_and_leaves_nothing(folder, capsys):
    write_tiff(folder / "slide.tif", compression="zlib")
    with tifffile.TiffFile(folder / "slide.tif") as file:
        place = file.pages[0].dataoffsets[8]  # of the third row of tiles
    data = bytearray((folder / "slide.tif").read_bytes())
    data[place : place + 64] = bytes(64)
    (folder / "slide.tif").write_bytes(data)
    before = written(folder)
    assert run("features", words("--dense", *BOUND, output="map.zarr")) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: rows ") and " of slide.tif cannot be read: " in error
    assert written(folder) == before


@pytest.mark.parametrize(
    ("output", "more"),
    [("map.npy", ("--overwrite", "true")), ("map.zarr", ())],
)
def test_a_kill_once_the_map_has_its_name_leaves_a_whole_map(
    folder, capsys, monkeypatch, output, more
):
    assert run("features", words("--dense", *BOUND, output=output)) == 0
    expected = opened(output)
    path = folder / output
    shutil.rmtree(path) if path.is_dir() else path.unlink()

    class Killed(BaseException):
        pass

    def finish(self):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(PassFolder, "finish", finish)
        with pytest.raises(Killed):
            run("features", words("--dense", *BOUND, *more, output=output))
    assert path.exists() and hidden(folder)
    assert run("features", words("--dense", *BOUND, *more, output=output)) == 0, capsys.readouterr()
    assert np.array_equal(opened(output), expected)
    assert not hidden(folder)


def test_numbers_that_are_not_finite_make_no_map(folder, capsys, monkeypatch):
    model = visionattn.load_model("best.safetensors")
    model.blocks[1].mlp.fc2.bias.data[3] = float("nan")
    args = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "horizon": 1}
    args |= {"global_pool": "avg"}
    save_model(folder / "nan.safetensors", model, "scaleformer_vit_t", args, COLOUR)
    command = words("--dense", output="map.npy") + ["--checkpoint", "nan.safetensors"]
    assert run("features", command) == 2
    assert "error: slide.tif: outputs are not finite in rows 0 to " in capsys.readouterr().err
    assert not hidden(folder)


def test_a_map_lies_where_its_image_does_and_smaller_sizes_are_levels(folder):
    import rasterio
    from affine import Affine

    pixels = np.random.default_rng(0).integers(0, 256, (3, 128, 96)).astype(np.uint8)
    profile = dict(driver="GTiff", count=3, height=128, width=96, dtype="uint8", tiled=True)
    profile |= dict(blockxsize=32, blockysize=32, crs="EPSG:32633", photometric="rgb")
    profile["transform"] = Affine(10, 0, 5e5, 0, -10, 5e6)
    with rasterio.open("land.tif", "w", **profile) as file:
        file.write(pixels)
        file.build_overviews([2])
    for level, side in ((0, 80), (1, 160)):
        output = f"map{level}.tif"
        given = ["--dense", "--level", str(level)]
        assert run("features", words(*given, output=output, images=("land.tif",))) == 0
        with rasterio.open(output) as file:
            assert (file.height, file.width) == (16 >> level, 12 >> level)
            assert file.crs == profile["crs"] and file.count == 24
            wanted = Affine(side, 0, 5e5, 0, -side, 5e6)
            assert file.transform.almost_equals(wanted)
