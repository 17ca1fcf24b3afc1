"""Means and spreads of one's own images equal numpy's over all pixels."""

import json
import warnings

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.helpers.tools import assert_one_error, load_tool, read_csv, words
from visionattn.command import main
from visionattn.models.weights import load_model
from visionattn.training.config import parse_train

tifffile = pytest.importorskip("tifffile")

measure = load_tool("stats")


@pytest.fixture
def pictures(tmp_path):
    """Six pictures to train on in two classes, of all sizes, and one to validate on in each."""
    rng = np.random.default_rng(1)
    kept = []
    for name, size in (("a", (30, 41)), ("b", (23, 57))):
        for split, count in (("train", 3), ("val", 1)):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                shape = (size[0] + index, size[1], 3)
                picture = rng.integers(20 * index, 200, shape, np.uint8, endpoint=True)
                Image.fromarray(picture).save(folder / f"{index}.png")
                if split == "train":
                    kept.append(picture)
    return tmp_path / "pictures", kept


def written(path):
    return yaml.safe_load(path.read_text())["data"]


@pytest.mark.parametrize("threads", [0, 3])
def test_mean_and_spread_equal_numpys_over_all_training_pixels(pictures, tmp_path, threads, capsys):
    root, kept = pictures
    output = tmp_path / "stats.yaml"
    flags = words("--data.root {} --output {} --data.workers {}", root, output, threads)
    assert measure(flags) == 0
    pixels = np.concatenate([picture.reshape(-1, 3) for picture in kept]).astype(np.float64) / 255
    found = written(output)
    np.testing.assert_allclose(found["mean"], pixels.mean(0), rtol=2e-9)
    np.testing.assert_allclose(found["std"], pixels.std(0), rtol=2e-9)
    assert set(found) == {"mean", "std"}
    rows = capsys.readouterr().out.splitlines()
    assert rows[0] == "| band | mean | std | smallest | largest | images | pixels |"
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| red", "| green", "| blue"]
    assert rows[2].endswith(f"| 0 | 200 | 6 | {len(pixels):,} |")


def write_bands(root, high=3900):
    """Two classes of four images of 5 bands; one is brighter in band 4. Return their pixels."""
    rng, kept = np.random.default_rng(0), []
    for label, name in enumerate(("bird", "cat")):
        (root / name).mkdir(parents=True)
        for index in range(4):
            pixels = rng.integers(100, high // 2, (24, 32, 5)).astype(np.uint16)
            pixels[..., 3] += np.uint16(label * high // 2)
            options = {"photometric": "minisblack", "planarconfig": "contig", "tile": (16, 16)}
            tifffile.imwrite(root / name / f"{index}.tif", pixels, **options)
            kept.append(pixels)
    return np.stack(kept)


def test_bands_of_16_bits_are_measured_in_the_range_that_is_found(tmp_path, capsys):
    write_bands(tmp_path / "val", 3000)
    pixels = write_bands(tmp_path / "train")[..., [3, 1]].astype(np.float64) / 4095
    output = tmp_path / "stats.yaml"
    flags = words("--data.root {} --output {} --data.bands 4 2", tmp_path, output)
    with pytest.warns(UserWarning, match="16-bit images hold values up to 3,8.*: read as 12 bits"):
        assert measure(flags) == 0
    found = written(output)
    np.testing.assert_allclose(found["mean"], pixels.mean((0, 1, 2)), rtol=1e-7)
    np.testing.assert_allclose(found["std"], pixels.std((0, 1, 2)), rtol=1e-6)
    assert found["bands"] == [4, 2] and "value_range" not in found  # training finds it again
    assert capsys.readouterr().out.splitlines()[2].startswith("| 4 | ")


def test_a_model_trained_on_bands_of_12_bits_reads_them_in_every_tool(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_bands(tmp_path / "five")
    write_bands(tmp_path / "bright", high=30_000)
    flags = "train --data.name folder --data.root five --data.img_size 16 --data.bands 4 2"
    flags += " --data.val_fraction 0.5 --data.workers 0 --optim.warmup_epochs 0 --batch_size 2"
    flags += " --model.args.patch_size 8 --model.args.embed_dim 24 --model.args.depth 1"
    with pytest.warns(UserWarning, match="16-bit images hold values up to 3,8.*read as 12 bits"):
        assert main([*flags.split(), "--model.args.num_heads", "3", "--epochs", "2"]) == 0
    (weights,) = tmp_path.rglob("best.safetensors")
    spec = load_model(weights).data_spec
    assert (spec.in_chans, spec.bands, spec.value_range) == (2, (4, 2), (0, 4095))
    # The range is not found anew where values are brighter than in training.
    for line in (
        f"validate --checkpoint {weights} --data.root bright --json a.json",
        f"predict --checkpoint {weights} --images five --workers 0 --output a.csv",
        f"features --checkpoint {weights} --images five --workers 0 --output features",
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert main(line.split()) == 0
    assert json.loads((tmp_path / "a.json").read_text())["rows"][0]["images"] == 8
    assert [row["status"] for row in read_csv(tmp_path / "a.csv")] == ["ok"] * 8


def test_training_takes_the_file_next_to_its_own_configuration(pictures, tmp_path):
    root, _ = pictures
    output = tmp_path / "stats.yaml"
    assert measure(words("--data.root {} --output {}", root, output)) == 0
    config = parse_train(words("--config finetune --config {} --data.root {}", output, root))
    assert (config.data.mean, config.data.std) == (written(output)["mean"], written(output)["std"])
    assert (config.data.name, config.run) == ("folder", "finetune")


def test_an_unreadable_image_stops_with_its_path_or_is_left_out(pictures, tmp_path, capsys):
    root, kept = pictures
    (root / "train" / "a" / "1.png").write_bytes(b"no image")
    output = tmp_path / "stats.yaml"
    flags = words("--data.root {} --output {}", root, output)
    assert measure(flags) == 2
    assert_one_error(capsys, "train/a/1.png: unknown image format")
    assert not output.exists()
    with pytest.warns(UserWarning, match="skipped unreadable image .*train/a/1.png"):
        assert measure([*flags, "--data.on_error", "skip"]) == 0
    pixels = np.concatenate([kept[i].reshape(-1, 3) for i in (0, 2, 3, 4, 5)]) / 255
    np.testing.assert_allclose(written(output)["mean"], pixels.mean(0), rtol=2e-9)


def test_a_band_of_one_value_and_flags_without_sense_are_one_line(pictures, tmp_path, capsys):
    root, _ = pictures
    (tmp_path / "there.yaml").write_text("")
    for path in root.rglob("*.png"):
        picture = np.array(Image.open(path))
        picture[..., 1] = 7
        Image.fromarray(picture).save(path)
    for line, part in (
        ("--data.root {} --output {}/new.yaml", "band green is constant"),
        ("--data.root {}", "expected --output: a YAML file"),
        ("--data.root {} --output {}/there.yaml", "--overwrite"),
        ("--data.root wds/x --output a.yaml", "stats measures images in folders"),
    ):
        assert measure(words(line, root, tmp_path)) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and part in error and error.count("\n") == 1
    assert not (tmp_path / "new.yaml").exists()
