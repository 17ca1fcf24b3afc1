"""Parts of a collection: disjoint, complete, resumed, and merged into what one run writes."""

import shutil

import numpy as np
import pytest
from PIL import Image

from tests.helpers import inference_files
from tests.helpers.inference_files import (
    feature_of,
    read_index,
    write_folder,
    write_image,
    write_weights,
)
from tests.helpers.tools import assert_one_error, load_tool, written
from visionattn.inference.shards import Part, read_features

extract = load_tool("extract_features")
SHAPES = [(16, 24), (16, 24), (40, 8), (16, 24), (20, 21), (16, 16), (16, 16), (24, 40), (8, 8)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with weights and nine images, one of which is broken, as the current folder."""
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    write_folder(tmp_path / "images", SHAPES)
    (tmp_path / "images" / "3.png").write_bytes(b"no image")
    return tmp_path


def flags(*more: str, output: str = "out") -> list[str]:
    return inference_files.flags(*more, output=output)


def run_parts(count: int, *more: str, order=None) -> None:
    for number in order or range(1, count + 1):
        assert extract(flags("--shard", f"{number}/{count}", *more)) == 0


MERGE = ["--merge", "--output", "out"]


@pytest.mark.parametrize("total", [1, 33])
def test_parts_are_disjoint_complete_and_in_order(total):
    for count in range(1, total + 1):
        parts = [Part(number, count).images(total) for number in range(1, count + 1)]
        assert [i for part in parts for i in part] == list(range(total))
        assert all(len(part) for part in parts)
    with pytest.raises(ValueError, match=f"{total + 1} parts of {total} images"):
        Part(1, total + 1).images(total)


def features_in(output):
    """Of each image of a folder, what its index says but where, and its features."""
    rows = read_index(output)
    return [
        (
            {key: row[key] for key in row if key not in ("shard", "key", "row")},
            feature_of(output, row).tolist() if row["shard"] else None,
        )
        for row in rows
    ]


@pytest.mark.parametrize(
    ("count", "more"),
    [
        (3, ("--batch_size", "1", "--shard_images", "2")),
        (9, ("--img_size", "native", "--dense", "--dtype", "float16")),
    ],
)
def test_merged_parts_are_the_features_of_one_run(folder, capsys, count, more):
    assert extract(flags(*more, output="whole")) == 0
    run_parts(count, *more, order=range(count, 0, -1))
    said = capsys.readouterr().out
    assert f"part 1/{count}: images 1 to " in said
    assert extract(MERGE) == 0
    assert f"9 images in {count} part" in (said := capsys.readouterr().out)
    assert "1 without features:\n  images/3.png: " in said
    assert features_in(folder / "out") == features_in(folder / "whole")
    read = dict(read_features(folder / "out"))
    assert list(read) == [row["path"] for row in read_index(folder / "out") if row["shard"]]
    # What is merged is a finished run like any other: nothing is computed again.
    before = written(folder / "out")
    assert extract(flags(*more)) == extract(MERGE) == 0
    assert "9 of 9 images are done" in capsys.readouterr().out
    assert written(folder / "out") == before


def test_a_whole_run_that_reads_a_range_off_its_files_lends_it_to_each_part(folder):
    """The range of values is found by looking at some files: each part looks at the same ones."""
    shutil.rmtree(folder / "images")
    (folder / "images").mkdir()
    for i in range(8):
        levels = np.random.default_rng(i).integers(0, 100 * (i + 1), (16, 16)).astype(np.uint16)
        Image.fromarray(levels).save(folder / "images" / f"{i}.png")
    with pytest.warns(UserWarning, match="range"):
        assert extract(flags("--batch_size", "2", output="whole")) == 0
        run_parts(4, "--batch_size", "2")
    assert extract(MERGE) == 0
    assert features_in(folder / "out") == features_in(folder / "whole")


def test_a_part_goes_on_where_it_was_stopped_with_the_same_bytes(folder, capsys):
    more = ("--shard_images", "1", "--batch_size", "1")
    run_parts(2, *more)
    before = written(folder / "out")
    part = folder / "out" / "parts" / "00002-of-00002"
    for name in ("features-00002.safetensors", "features-00003.safetensors", "index.csv"):
        (part / name).unlink()
    (part / "features-00001.safetensors").write_bytes(b"cut off")
    capsys.readouterr()
    assert extract(flags("--shard", "2/2", *more)) == 0
    assert "1 of 5 images are done" in capsys.readouterr().out
    assert written(folder / "out") == before
    assert [row["path"] for row in read_index(part)] == [f"images/{i}.png" for i in range(4, 9)]


BAD_SHARDS = {
    "0/4": "shard must be i/n with i from 1 to n",
    "1/10": "10 parts of 9 images would leave some empty; name at most 9",
    "1/2 --probe": "probe wants the features of all images: call the command without shard",
    "1/2 --merge": "merge takes everything from the parts in --output; leave ",
    "1/2 --parts 3": "parts is for --engine ray alone",
    "1/2 --engine ray --address local": "engine ray divides the images itself; leave shard out",
}


@pytest.mark.parametrize("given", BAD_SHARDS)
def test_shards_that_do_not_fit_are_one_line_and_write_nothing(folder, capsys, given):
    before = written(folder)
    assert extract(flags("--shard", *given.split())) == 2
    assert_one_error(capsys, BAD_SHARDS[given])
    assert written(folder) == before and not (folder / "out").exists()


def test_parts_that_do_not_make_a_whole_are_one_line_each_and_stay(folder, capsys):
    def refused(part: str, command=MERGE) -> None:
        before = written(folder)
        capsys.readouterr()
        assert extract(command) == 2
        assert_one_error(capsys, part)
        assert written(folder) == before

    refused("out holds no parts; --shard 1/n writes the first one")
    run_parts(3, order=(1, 3))
    refused("part 2/3 is missing or not finished in out; call --shard 2/3")
    refused("out holds parts of 3 (1/3), and this is 1/4", flags("--shard", "1/4"))
    refused("out holds parts, not merged; --merge", flags())
    assert extract(flags("--shard", "2/3", "--dense")) == 0
    refused("part 2/3 is of other features: kind dense there, pooled here")
    write_image(folder / "images" / "5.png", 16, 16, 3)
    assert extract(flags("--shard", "2/3", "--overwrite")) == 0
    refused("part 2/3 is of other features: list_of_images ")
    run_parts(3, "--overwrite", "--shard_images", "2", "--batch_size", "1")
    (folder / "out" / "parts" / "00002-of-00003" / "features-00001.safetensors").unlink()
    refused("features-00001.safetensors is missing; call --shard of this part again")
    refused("merge takes everything from the parts in --output; leave images out", flags("--merge"))
    assert extract(flags(output="whole")) == 0
    refused("whole holds features of all images", flags("--shard", "1/2", output="whole"))
