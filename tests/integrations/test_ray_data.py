"""Stages of Ray Data: as plain calls on batches of rows, and on a cluster."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.inference_files import write_folder, write_weights
from tests.helpers.ray_cluster import environment, two_nodes
from visionattn.inference.python_functions import extract_features
from visionattn.integrations.ray import SAMPLE, Decode, Embed

SHAPES = [(16, 24), (16, 24), (40, 8), (16, 24), (20, 21), (16, 16)]
SECONDS = 400


@pytest.fixture
def folder(tmp_path):
    write_weights(tmp_path / "best.safetensors")
    write_folder(tmp_path / "images", SHAPES)
    (tmp_path / "images" / "3.png").write_bytes(b"no image")
    return tmp_path


def rows_of(folder) -> dict[str, np.ndarray]:
    paths = [str(folder / "images" / f"{i}.png") for i in range(len(SHAPES))]
    return {"path": np.array(paths), "slide": np.arange(len(paths)) * 10}


@pytest.mark.parametrize("img_size, dense", [(16, False), ("native", True)])
def test_both_stages_or_the_second_alone_give_the_features_of_the_command(folder, img_size, dense):
    weights, rows = folder / "best.safetensors", rows_of(folder)
    good = [0, 1, 2, 4, 5]
    paths = [rows["path"][i] for i in good]
    wanted = extract_features(weights, paths, dense=dense, img_size=img_size)
    held = np.array([Path(path).read_bytes() for path in rows["path"]], object)
    of_bytes = {"content": held, "slide": rows["slide"]}
    options = {"column": "content", "img_size": img_size}
    embed = Embed(weights, img_size=img_size, dense=dense)
    embed_bytes = Embed(weights, dense=dense, **options)
    for found in (
        embed(rows),
        embed(Decode(weights, img_size=img_size)(rows)),
        embed_bytes(of_bytes),
        embed_bytes(Decode(weights, **options)(of_bytes)),
    ):
        assert not {SAMPLE, "content"} & set(found)
        assert found["slide"].tolist() == [0, 10, 20, 30, 40, 50]
        assert found["status"].tolist() == ["ok"] * 3 + ["unreadable"] + ["ok"] * 2
        assert found["reason"][3].startswith("unknown image format")
        assert "".join(found["reason"][good]) == ""
        assert (found["height"][good] == [SHAPES[i][0] for i in good]).all()
        assert (found["width"][3], found["input_width"][3]) == (0, 0)
        for number, i in enumerate(good):
            assert np.abs(found["features"][i] - wanted[number].numpy()).max() < 1e-5
        if dense:
            assert found["features"][3].shape == (24, 0, 0)
        else:
            assert np.isnan(found["features"][3]).all() and found["features"].shape == (6, 24)


def test_a_range_of_values_that_a_batch_alone_would_tell_fails_as_a_row(folder):
    levels = np.random.default_rng(0).integers(0, 900, (16, 16)).astype(np.uint16)
    path = folder / "images" / "grey.png"
    Image.fromarray(levels).save(path)
    rows, weights = {"path": np.array([str(path)])}, folder / "best.safetensors"
    found = Embed(weights)(rows)
    assert found["status"].tolist() == ["unreadable"]
    assert "value_range" in found["reason"][0]
    assert Embed(weights, value_range=(0, 1023))(rows)["status"].tolist() == ["ok"]
    with pytest.raises(ValueError, match="expected the column file, got path"):
        Embed(weights, column="file")(rows)


PIPELINE = """
import json, sys
import ray
from visionattn.integrations.ray import Decode, Embed

address, weights, *paths = sys.argv[1:]
ray.init(address, log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
how = {"model": weights, "img_size": "native"}
pool = ray.data.ActorPoolStrategy
rows = ray.data.from_items([{"path": path} for path in paths], override_num_blocks=len(paths) // 2)
rows = rows.map_batches(
    Decode, fn_constructor_kwargs=how, batch_size=2, num_cpus=0.3, compute=pool(size=1)
)
rows = rows.map_batches(
    Embed, fn_constructor_kwargs=how, batch_size=2, num_cpus=0.3,
    compute=pool(min_size=1, max_size=2),
)
for row in rows.iter_rows():
    values = [float(value) for value in row["features"]]
    print("row", json.dumps([row["path"], row["status"], row["reason"], values]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_pipeline_on_two_nodes_gives_every_row_once(folder):
    weights, paths = folder / "best.safetensors", rows_of(folder)["path"].tolist()
    good = [path for path in paths if not path.endswith("/3.png")]
    wanted = extract_features(weights, good, img_size="native").numpy()
    with two_nodes() as nodes:
        command = [sys.executable, "-c", PIPELINE, nodes.address, str(weights), *paths]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    # Ray prints to the same stream
    found = [json.loads(line) for line in re.findall(r"row (\[.*\])$", done.stdout, re.MULTILINE)]
    assert sorted(path for path, *_ in found) == sorted(paths)
    known = {path: (status, reason, values) for path, status, reason, values in found}
    status, reason, _ = known[paths[3]]
    assert status == "unreadable" and reason.startswith("unknown image format")
    for path, values in zip(good, wanted, strict=True):
        assert known[path][0] == "ok" and np.abs(known[path][2] - values).max() < 1e-5
