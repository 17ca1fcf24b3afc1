"""Files of other formats than 8-bit colours are trained on; the weights know how to read them."""

import json
import warnings

import numpy as np
import pytest

from tests.helpers.tools import load_tool, read_csv
from visionattn.models.weights import load_model

tifffile = pytest.importorskip("tifffile")
FIVE = {"photometric": "minisblack", "planarconfig": "contig", "tile": (16, 16)}


def write_bands(root, low=100, high=3900, dtype=np.uint16):
    """Two classes of four images of 5 bands; those of one are brighter in band 4."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(("bird", "cat")):
        (root / name).mkdir(parents=True)
        for index in range(4):
            pixels = rng.integers(low, high // 2, (24, 32, 5)).astype(dtype)
            pixels[..., 3] += label * dtype(high // 2)
            tifffile.imwrite(root / name / f"{index}.tif", pixels, **FIVE)
    return root


def test_a_model_trained_on_bands_of_12_bits_reads_them_in_every_tool(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = write_bands(tmp_path / "five")
    model = "{patch_size: 8, embed_dim: 24, depth: 1, num_heads: 3}"
    flags = ["--data.name", "folder", "--data.root", str(root), "--data.img_size", "16"]
    flags += ["--data.bands", "4", "2", "--data.val_fraction", "0.5", "--data.workers", "0"]
    flags += ["--optim.warmup_epochs", "0", "--batch_size", "2", "--model.args", model]
    with pytest.warns(UserWarning, match="16-bit images hold values up to 3,8.*read as 12 bits"):
        assert load_tool("train")([*flags, "--epochs", "2", "--run", "run"]) == 0
    weights = "checkpoints/run/best.safetensors"
    spec = load_model(weights).data_spec
    assert (spec.in_chans, spec.bands, spec.value_range) == (2, (4, 2), (0, 4095))
    assert len(spec.mean) == len(spec.std) == 2
    # brighter than what was found for training, and not found anew
    bright = write_bands(tmp_path / "bright", high=30_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = ["--checkpoint", weights, "--json", "a.json"]
        assert load_tool("validate")([*given, "--data.root", str(bright)]) == 0
        given = ["--checkpoint", weights, "--images", str(root), "--workers", "0"]
        assert load_tool("predict")([*given, "--output", "a.csv"]) == 0
        assert load_tool("extract_features")([*given, "--output", "features"]) == 0
    assert json.loads((tmp_path / "a.json").read_text())["rows"][0]["images"] == 8
    rows = read_csv(tmp_path / "a.csv")
    assert [row["status"] for row in rows] == ["ok"] * 8
