"""Options that no image fits: one line, exit code 2, and nothing written."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.inference_files import COLOUR, flags, write_image, write_weights
from tests.helpers.tools import assert_one_error, load_tool, written

REFUSED = {
    "--bands 4 5 6": " wanted band 6, the image has 3 bands",
    "--page 3": " wanted page 3, the image has 1 page",
    "--value_range 5 5": "value_range must be two finite numbers, the lower one first",
    "--images float": "and nothing says which of them are black and white; give --value_range LOW",
    "--images five": "the image has 5 bands; name those to read, in their order, as in --bands",
    "--images packed": "0.zarr: a zarr array needs zarr: pip install 'visionattn[arrays]'",
    "--images thin": "none of the 2 images can be read so; the first: thin/0.png: image of 40 x 7",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with images of many kinds, as the current folder."""
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors", replace(COLOUR, fit="native", img_size=None))
    for name in ("float", "five", "packed/0.zarr"):
        (tmp_path / name).mkdir(parents=True)
    for number in range(2):
        write_image(tmp_path / "images" / f"{number}.png", 21, 35, seed=number)
        write_image(tmp_path / "thin" / f"{number}.png", 40, 7, seed=0)
        np.save(tmp_path / "float" / f"{number}.npy", np.full((16, 24), 0.5, np.float32))
        np.save(tmp_path / "five" / f"{number}.npy", np.zeros((16, 24, 5), np.uint8))
    return tmp_path


@pytest.mark.parametrize("more", REFUSED)
def test_what_no_image_has_is_one_line_with_code_2_and_nothing_written(
    folder, capsys, monkeypatch, more
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == "zarr" else find(name)
    )
    before = written(folder)
    for tool, output in ((load_tool("predict"), "out.csv"), (load_tool("extract_features"), "out")):
        assert tool(flags(*more.split(), output=output)) == 2
        assert_one_error(capsys, REFUSED[more])
    assert written(folder) == before and not (folder / "out").exists()
