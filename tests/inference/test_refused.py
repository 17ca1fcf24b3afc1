"""Options that no image fits: one line, exit code 2, and nothing written."""

import importlib.util
import re
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.inference_files import COLOUR, flags, write_image, write_weights
from tests.helpers.tools import assert_one_error, load_tool, written
from visionattn.data.geometry import Geometry
from visionattn.inference.listing import find_images
from visionattn.inference.reading import ReadImages

predict, extract = load_tool("predict"), load_tool("extract_features")


@pytest.fixture
def images(tmp_path, monkeypatch):
    """A folder with images of odd sizes, as the current folder."""
    monkeypatch.chdir(tmp_path)
    for name, shape in {"0": (21, 35), "1": (64, 20)}.items():
        write_image(tmp_path / "images" / f"{name}.png", *shape, seed=0)


def checkpoint(folder, **seen) -> None:
    write_weights(folder / "best.safetensors", replace(COLOUR, **seen))


REFUSED = {
    "--bands 4 5 6": r"\S+ wanted band 6, the image has 3 bands",
    "--page 3": r"\S+ wanted page 3, the image has 1 page",
    "--value_range 5 5": r"value_range must be two finite numbers, the lower one first",
}


@pytest.mark.parametrize("more", REFUSED)
def test_what_no_image_has_is_one_line_with_code_2_and_nothing_written(
    images, tmp_path, capsys, more
):
    checkpoint(tmp_path, fit="native", img_size=None)
    before = written(tmp_path)
    for tool, output in ((predict, "out.csv"), (extract, "out")):
        assert tool(flags(*more.split(), output=output)) == 2
        error = capsys.readouterr().err
        assert re.search(REFUSED[more], error) and error.count("\n") == 1
    assert written(tmp_path) == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize("names", [("a.png", "b.png"), ("a.png",)])
def test_images_that_are_all_smaller_than_a_patch_leave_nothing_behind(tmp_path, capsys, names):
    checkpoint(tmp_path, fit="native", img_size=None)
    for name in names:
        write_image(tmp_path / "thin" / name, 40, 7, seed=0)
    before = written(tmp_path)
    given = ["--checkpoint", str(tmp_path / "best.safetensors"), "--images", str(tmp_path / "thin")]
    for tool, output in ((predict, "out.csv"), (extract, "out")):
        assert tool([*given, "--workers", "0", "--output", str(tmp_path / output)]) == 2
        error = capsys.readouterr().err
        assert error.endswith(
            "7 pixels is smaller than a patch of 8 x 8; fit pad, stretch and crop enlarge it\n"
        )
        assert error.count("\n") == 1
        assert ("none of the 2 images can be read so; the first: " in error) == (len(names) == 2)
    assert written(tmp_path) == before and not (tmp_path / "out").exists()


def test_an_extra_that_is_missing_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    checkpoint(tmp_path, fit="native", img_size=None)
    write_image(tmp_path / "rasters" / "a.png", 40, 24, seed=0)
    (tmp_path / "rasters" / "a.png").rename(tmp_path / "rasters" / "a.img")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == "rasterio" else find(name)
    )
    before = written(tmp_path)
    given = [
        "--checkpoint",
        str(tmp_path / "best.safetensors"),
        "--images",
        str(tmp_path / "rasters"),
    ]
    for tool, output in ((predict, "out.csv"), (extract, "out")):
        assert tool([*given, "--workers", "0", "--output", str(tmp_path / output)]) == 2
        error = capsys.readouterr().err
        assert "pip install 'visionattn[raster]'" in error and error.count("\n") == 1
    assert written(tmp_path) == before and not (tmp_path / "out").exists()


UNFIT = {
    "--images float": "and nothing says which of them are black and white; give --value_range LOW",
    "--images five": "the image has 5 bands; name those to read, in their order, as in --bands",
    "--images packed": "0.zarr: a zarr array needs zarr: pip install 'visionattn[arrays]'",
}


@pytest.mark.parametrize("more", UNFIT)
def test_values_bands_and_extras_that_are_missing_are_one_line_with_code_2_and_nothing_written(
    images, tmp_path, capsys, monkeypatch, more
):
    checkpoint(tmp_path, fit="native", img_size=None)
    for name in ("float", "five", "packed/0.zarr"):
        (tmp_path / name).mkdir(parents=True)
    for number in range(2):
        np.save(tmp_path / "float" / f"{number}.npy", np.full((16, 24), 0.5, np.float32))
        np.save(tmp_path / "five" / f"{number}.npy", np.zeros((16, 24, 5), np.uint8))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == "zarr" else find(name)
    )
    before = written(tmp_path)
    for tool, output in ((predict, "out.csv"), (extract, "out")):
        assert tool(flags(*more.split(), output=output)) == 2
        assert_one_error(capsys, UNFIT[more])
    assert written(tmp_path) == before and not (tmp_path / "out").exists()


def test_the_image_that_was_looked_at_is_not_read_again(images, monkeypatch):
    listing = find_images(["images"])
    read = ReadImages(listing, COLOUR, Geometry("native", None, None, (8, 8)))
    plain, opened = [read[i].pixels for i in range(2)], []
    once = listing.open
    monkeypatch.setattr(listing, "open", lambda index: opened.append(index) or once(index))
    read.check_asked()
    assert opened == [0]
    assert all(read[i].pixels.equal(plain[i]) for i in range(2)) and opened == [0, 1]
    assert read[0].pixels.equal(plain[0]) and opened == [0, 1, 0]
