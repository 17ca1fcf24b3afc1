"""Features on a cluster of Ray: those of one run, whatever dies; stages of Ray Data; and one line
where there is no cluster.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile
from filelock import FileLock
from PIL import Image

from tests.helpers import inference_files
from tests.helpers.inference_files import write_folder, write_weights
from tests.helpers.ray_cluster import environment, two_nodes
from tests.helpers.tools import assert_one_error, load_tool, written
from visionattn.cli.exit_codes import Failed
from visionattn.inference.extraction import collect
from visionattn.inference.feature_options import parse_extract
from visionattn.inference.python_functions import extract_features
from visionattn.inference.shards import read_features
from visionattn.integrations.ray import SAMPLE, Decode, Embed
from visionattn.integrations.ray_engine import check_nodes, connected, extract_part

extract = load_tool("extract_features")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
SECONDS = 600
"""Until a command counts as one that hangs: other tests may hold the machine."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with weights and images, as the current folder."""
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    write_folder(tmp_path / "images", [(16, 24)] * 5)
    return tmp_path


def flags(*more: str, output: str = "out") -> list[str]:
    return inference_files.flags(*more, output=output)


def on_ray(address: str, *more: str, output: str = "out") -> list[str]:
    return flags("--engine", "ray", "--address", address, *more, output=output)


def features_in(output: Path) -> list:
    """The features of a folder by image, in the order of its index."""
    return [(path, value.tolist()) for path, value in read_features(output)]


def start(folder: Path, words: list[str]) -> subprocess.Popen:
    """The command in a process of its own, as it is typed; a group of its own, as of a terminal."""
    command, pipe = [sys.executable, "-m", "visionattn", "features", *words], subprocess.PIPE
    where = {"cwd": folder, "env": environment(), "start_new_session": True}
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **where)


def besides_progress(errors: str) -> str:
    """What a command says on standard error but for lines of how far it is, on a busy machine."""
    return re.sub(r"^\d+ of \d+ images, .*images/s.*\n", "", errors, flags=re.MULTILINE)


def until_at_work(process: subprocess.Popen, out: Path, parts: int) -> None:
    """Wait until so many parts are being written at once."""
    until = time.monotonic() + SECONDS
    while len(list(out.glob("parts/*-of-*/features.lock"))) < parts:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.005)


@needs_ray
@pytest.mark.slow
def test_a_node_that_is_killed_amid_its_parts_loses_nothing_and_nothing_is_there_twice(folder):
    shutil.rmtree(folder / "images")
    write_folder(folder / "images", [(400, 600)] * 36)
    (folder / "images" / "7.png").write_bytes(b"no image")
    more = ("--img_size", "native", "--shard_images", "4")
    assert extract(flags(*more, output="whole")) == 0
    with two_nodes() as nodes:
        command = on_ray(nodes.address, *more, "--parts", "6")
        with start(folder, command) as process:
            until_at_work(process, folder / "out", 2)
            nodes.kill_second()
            said, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
        assert "36 images in 6 parts: out/index.csv" in said
        assert "1 without features:\n  images/7.png: unknown image" in said
        assert besides_progress(errors) == ""
        assert features_in(folder / "out") == features_in(folder / "whole")
        assert extract(command) == 0  # all is done, for which no cluster is needed


@needs_ray
@pytest.mark.slow
def test_ctrl_c_ends_a_cluster_of_this_machine_and_the_same_command_goes_on(folder):
    shutil.rmtree(folder / "images")
    write_folder(folder / "images", [(400, 600)] * 24)
    more = ("--img_size", "native", "--shard_images", "2")
    assert extract(flags(*more, output="whole")) == 0
    command = on_ray("local", *more, "--parts", "2")
    with start(folder, command) as process:
        until_at_work(process, folder / "out", 1)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert besides_progress(errors) == (
        "stopped; finished parts stay in out; run the same command to resume\n"
    )
    with start(folder, command) as process:
        said, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, besides_progress(errors)) == (0, "")
    assert features_in(folder / "out") == features_in(folder / "whole")


@pytest.mark.slow
def test_an_address_without_a_cluster_is_one_line_within_seconds(folder, capsys, monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setattr("visionattn.integrations.ray_engine.ANSWER_SECONDS", 3)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        begin = time.monotonic()
        assert extract(on_ray(f"127.0.0.1:{port}")) == 2
        assert time.monotonic() - begin < 60
        assert_one_error(capsys, f"no Ray cluster at 127.0.0.1:{port}: nothing answers within 3 s")
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    assert extract(on_ray("auto")) == 2
    assert_one_error(capsys, f"no Ray cluster at auto (RAY_ADDRESS 127.0.0.1:{port})")


BAD = {
    "--engine ray": "engine ray needs --address: local, auto, or host:port of a cluster",
    "--engine ray --address here": "expected --address local, auto or host:port, got here",
    "--engine ray --address local --overwrite": "engine ray does not overwrite",
    "--engine ray --address local --dense --output a.zarr": "a folder as --output, got the map a",
    "--address local": "address needs --engine ray; remove it",
    "--engine ray --address local": "engine ray needs ray: pip install 'visionattn[ray]'",
}


def test_what_does_not_go_together_or_is_not_installed_is_one_line(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    before = written(folder)
    for more, said in BAD.items():
        assert extract(flags(*more.split())) == 2
        assert_one_error(capsys, said)
        assert written(folder) == before and not (folder / "out").exists()


def given(*more: str):
    """What a worker is told."""
    options = parse_extract(flags(*more), command="features", description="x")
    return options, os.getcwd(), collect(options).identity


def test_a_worker_writes_the_part_that_it_is_told_once_another_has_left_it(folder):
    """A node that counts as lost may go on writing for a while."""
    alone = ("--batch_size", "1")
    assert extract(flags(*alone, output="whole")) == 0
    told, lock = given(*alone), folder / "out" / "parts" / "00002-of-00002" / "features.lock"
    lock.parent.mkdir(parents=True)
    first = FileLock(lock, thread_local=False)
    first.acquire()
    threading.Timer(1.5, first.release).start()
    begin = time.monotonic()
    assert extract_part(told, "2/2") == (0, "") and time.monotonic() - begin > 1
    assert extract_part(told, "1/2") == (0, "")
    assert extract_part(told, "2/2") == (0, "")  # again, as where Ray lost the answer
    assert extract(["--merge", "--output", "out"]) == 0
    assert features_in(folder / "out") == features_in(folder / "whole")


def test_a_worker_that_sees_other_files_says_so(folder):
    options, here, identity = given()
    code, reason = extract_part((options, str(folder / "nowhere"), identity), "1/2")
    assert code == 2 and reason.startswith(f"expected {folder}/nowhere on all nodes; put images")
    code, reason = extract_part((options, here, identity | {"weights": "others"}), "1/2")
    assert code == 2 and ": weights " in reason and " there, others here (on " in reason
    assert not (folder / "out").exists()


def test_more_than_any_node_has_is_refused_as_no_part_would_ever_begin():
    nodes = [{"Alive": True, "Resources": {"CPU": n}} for n in (2.0, 4.0)]
    nodes.append({"Alive": False, "Resources": {"CPU": 64.0}})
    ray = SimpleNamespace(nodes=lambda: nodes)
    check_nodes(ray, "CPU", 4, "threads")
    with pytest.raises(ValueError, match="no node of the cluster has 5 threads; the largest has 4"):
        check_nodes(ray, "CPU", 5, "threads")


def test_a_cluster_that_does_not_start_is_one_line():
    """Ray gives a node half a minute, which a busy machine exceeds."""

    def init(*given, **options):
        raise Exception("The current node timed out during startup.\nMore.")

    ray = SimpleNamespace(init=init, shutdown=list)
    with (
        pytest.raises(Failed, match="^Ray has not started at local: The current node timed out"),
        connected(ray, "local"),
    ):
        pass


SHAPES = [(16, 24), (16, 24), (40, 8), (16, 24), (20, 21), (16, 16)]


@pytest.fixture
def mixed(folder):
    """Images of several sizes, of which one cannot be read."""
    write_folder(folder / "images", SHAPES)
    (folder / "images" / "3.png").write_bytes(b"no image")
    return folder


def rows_of(folder) -> dict[str, np.ndarray]:
    paths = [str(folder / "images" / f"{i}.png") for i in range(len(SHAPES))]
    return {"path": np.array(paths), "slide": np.arange(len(paths)) * 10}


@pytest.mark.parametrize("img_size, dense", [(16, False), ("native", True)])
def test_both_stages_or_the_second_alone_give_the_features_of_the_command(mixed, img_size, dense):
    weights, rows = mixed / "best.safetensors", rows_of(mixed)
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


def test_a_range_of_values_that_a_batch_alone_would_tell_fails_as_a_row(mixed):
    levels = np.random.default_rng(0).integers(0, 900, (16, 16)).astype(np.uint16)
    path = mixed / "images" / "grey.png"
    Image.fromarray(levels).save(path)
    rows, weights = {"path": np.array([str(path)])}, mixed / "best.safetensors"
    found = Embed(weights)(rows)
    assert found["status"].tolist() == ["unreadable"]
    assert "value_range" in found["reason"][0]
    assert Embed(weights, value_range=(0, 1023))(rows)["status"].tolist() == ["ok"]
    with pytest.raises(ValueError, match="expected the column file, got path"):
        Embed(weights, column="file")(rows)


def test_stages_read_a_level_and_take_no_option_without_effect(folder):
    weights, path = folder / "best.safetensors", folder / "levels.tif"
    pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 3)).astype(np.uint8)
    with tifffile.TiffWriter(path) as file:
        file.write(pixels, subifds=1, tile=(16, 16), photometric="rgb")
        file.write(pixels[::2, ::2], subfiletype=1, tile=(16, 16), photometric="rgb")
    rows, how = {"path": np.array([str(path)])}, {"img_size": "native", "level": 1}
    (wanted,) = extract_features(weights, str(path), **how).numpy()
    for found in (Embed(weights, **how)(rows), Embed(weights)(Decode(weights, **how)(rows))):
        assert np.abs(found["features"][0] - wanted).max() < 1e-5
    for stage, option in ((Decode, "tiles"), (Decode, "device"), (Embed, "batch_size")):
        with pytest.raises(TypeError, match=f"no option '{option}'; the options are img_size"):
            stage(weights, **{option: 2})
    with pytest.raises(ValueError, match="expected an existing checkpoint or a timm model, got no"):
        Embed("nowhere.safetensors")


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


@needs_ray
@pytest.mark.slow
def test_a_pipeline_on_two_nodes_gives_every_row_once(mixed):
    weights, paths = mixed / "best.safetensors", rows_of(mixed)["path"].tolist()
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
