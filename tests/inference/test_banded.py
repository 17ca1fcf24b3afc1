"""Images that are computed band by band: the same rows, features and masks as in one pass."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch

import visionattn
from tests.helpers.inference_files import (
    feature_of,
    flags,
    read_index,
    write_weights,
)
from tests.helpers.tools import read_csv, written
from visionattn.command import run

SHAPES = [(16, 24), (40, 120), (21, 35), (133, 64)]
BOUND = ("--memory_gib", "0.0002")
"""Below what any pass over a whole image takes, and above two rows of patches of these images."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
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


def test_classes_are_those_of_one_pass(folder, capsys):
    assert run("predict", native("--top_k", "4", output="plain.csv")) == 0
    capsys.readouterr()
    assert run("predict", native("--top_k", "4", *BOUND, output="bands.csv")) == 0
    said = capsys.readouterr().out
    assert "4 images of up to 133 x 64 px would take up to " in said
    assert "memory_gib is 0.0002: they are computed band by band, with the same results" in said
    plain, bands = read_csv(folder / "plain.csv"), read_csv(folder / "bands.csv")
    for one, other in zip(plain, bands, strict=True):
        for key in one:
            if key.startswith("probability"):
                assert float(one[key]) == pytest.approx(float(other[key]), abs=2e-5)
            else:
                assert one[key] == other[key]
    assert sorted(written(folder)) == sorted(
        ["best.safetensors", "plain.csv", "bands.csv", *(f"images/{i}.tif" for i in range(4))]
    )


@pytest.mark.parametrize("kind", [[], ["--dense"]])
def test_features_are_those_of_one_pass(folder, kind):
    assert run("features", native(*kind, output="plain")) == 0
    assert run("features", native(*kind, *BOUND, output="bands")) == 0
    plain, bands = read_index(folder / "plain"), read_index(folder / "bands")
    assert plain == bands
    for row in plain:
        one, other = feature_of(folder / "plain", row), feature_of(folder / "bands", row)
        assert one.shape == other.shape and np.abs(one - other).max() < 1e-5 * np.abs(one).max()
    assert sorted(path.name for path in folder.iterdir()) == [
        "bands",
        "best.safetensors",
        "images",
        "plain",
    ]


def test_calls_are_those_of_one_pass_and_say_so(folder):
    paths = [f"images/{i}.tif" for i in range(4)]
    arrays = [tifffile.imread(path) for path in paths]
    for given in (paths, arrays):
        options = dict(img_size="native", memory_gib=0.0002)
        plain = visionattn.predict("best.safetensors", given, img_size="native")
        with pytest.warns(UserWarning, match=r"4 images of up to 133 x 64 px .* band by band"):
            bands = visionattn.predict("best.safetensors", given, **options)
        assert plain.classes == bands.classes and plain.names == bands.names
        assert torch.allclose(plain.probabilities, bands.probabilities, atol=1e-5)
        for dense in (False, True):
            whole = visionattn.extract_features(
                "best.safetensors", given, dense=dense, img_size="native"
            )
            with pytest.warns(UserWarning, match="band by band"):
                parts = visionattn.extract_features(
                    "best.safetensors", given, dense=dense, **options
                )
            for one, other in zip(whole, parts, strict=True):
                assert torch.allclose(one, other, atol=1e-4, rtol=1e-5)
