"""Images from files to the outputs of a model: which are meant, how they are read, what fails."""

import os

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import get_worker_info

from tests.helpers.inference_files import (
    COLOUR,
    direct,
    write_folder,
    write_weights,
)
from visionattn.cli.exit_codes import Failed
from visionattn.data.geometry import Geometry
from visionattn.inference.image_listing import ListedFiles, find_images
from visionattn.inference.image_reading import ReadImages
from visionattn.inference.image_run import ImageRun
from visionattn.inference.inference_options import InferenceOptions, parse_options
from visionattn.inference.model_opening import open_model
from visionattn.models.patches import pooled

OWN_SIZES = Geometry("native", None, None, (8, 8))


def test_a_folder_is_searched_to_any_depth_in_natural_order(tmp_path):
    images = ("10.png", "9.JPG", "deep/er/2.tif", "deep/1.webp")
    for name in (*images, ".hidden.png", "notes.md", "b.heic", "deep/c.HEIC", "f.mp4", "IM01"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    said = "files of other kinds: 2 .heic, 1 without a suffix, 1 .mp4$"
    with pytest.warns(UserWarning, match=said):
        listing = find_images([str(tmp_path) + "/"])
    assert listing.paths == [
        str(tmp_path / name) for name in ("9.JPG", "10.png", "deep/1.webp", "deep/er/2.tif")
    ]


def test_files_and_lists_keep_the_order_given_and_lists_name_images_that_are_not_there(tmp_path):
    (tmp_path / "b.png").write_bytes(b"")
    (tmp_path / "odd.bin").write_bytes(b"")
    text = f"  {tmp_path}/b.png \r\n\nnowhere/é, b.png\n"
    (tmp_path / "list.txt").write_text(text, encoding="utf-8-sig")
    given = [str(tmp_path / name) for name in ("odd.bin", "list.txt", "b.png")]
    assert find_images(given).paths == [given[0], given[2], "nowhere/é, b.png", given[2]]


def test_what_holds_no_images_is_refused_in_one_line(tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"\xe9.png\n")
    (tmp_path / "table.CSV").write_text("path\na.png\n")
    (tmp_path / "phone").mkdir()
    (tmp_path / "phone" / "a.HEIC").write_bytes(b"")
    for name, error, part in (
        ("empty.txt", ValueError, "expected a path per line in"),
        ("latin.txt", ValueError, "not a UTF-8 text file"),
        ("table.CSV", ValueError, "or a .txt file with a path per line"),
        ("phone", ValueError, "phone; it holds 1 .heic; expected files that end"),
        ("x.png", FileNotFoundError, "no image, folder or list at "),
    ):
        with pytest.raises(error, match=part):
            find_images([str(tmp_path / name)])
    with pytest.raises(ValueError, match="expected --images: a folder"):
        find_images([])


def test_paths_on_the_command_line_mean_themselves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    about = {"command": "predict", "description": "x"}
    for path in ("a, b: c #1", "[2024]"):
        (tmp_path / path).mkdir()
        for given in (["--images", path, "y"], [f"--images={path}"]):
            options = parse_options(InferenceOptions, [*given, "--model", "m"], **about)
            assert options.images[0] == path


def test_what_cannot_be_read_is_a_sample_with_a_reason(tmp_path):
    Image.new("RGB", (1, 60000)).save(tmp_path / "thin.png")
    listing = ListedFiles([str(tmp_path / "thin.png")])
    thin = ReadImages(listing, COLOUR, OWN_SIZES)[0]
    assert "60000 x 1 pixels is smaller than a patch of 8 x 8; fit pad" in thin.reason
    assert (thin.height, thin.width, thin.pixels) == (60000, 1, None)
    huge = Geometry("stretch", (2**30, 2**30))  # no machine has the memory for it
    too_large = ReadImages(listing, COLOUR, huge)[0]
    assert too_large.pixels is None and too_large.reason and "\n" not in too_large.reason


def outcomes_of(opened, images, compute, batch_size=1, dtype=torch.float32, workers=0):
    options = InferenceOptions(workers=workers, batch_size=batch_size)
    batches = ImageRun(options, opened, images, compute).batches(dtype)
    return [outcome for batch in batches for outcome in batch]


@pytest.fixture
def two_shapes(tmp_path):
    """Weights, their model, readers of five images of two shapes, and the images' pixels."""
    weights = write_weights(tmp_path / "best.safetensors")
    pixels = write_folder(tmp_path / "images", [(16, 24), (16, 24), (16, 24), (40, 8), (16, 24)])
    options = InferenceOptions(checkpoint=str(weights), img_size="native")
    images = ReadImages(find_images([str(tmp_path / "images")]), COLOUR, OWN_SIZES)
    return weights, open_model(options, classifies=False), images, pixels


def test_too_little_memory_for_a_batch_halves_it_and_for_an_image_is_its_status(two_shapes):
    weights, model, images, pixels = two_shapes
    tried = []

    def scarce(module, inputs, sizes):
        tried.append(tuple(inputs.shape[:3]))
        if len(inputs) > 1 or inputs.shape[2] > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return pooled(module, inputs, sizes)

    outcomes = outcomes_of(model, images, scarce, 3)
    assert [x.status for x in outcomes] == ["ok", "ok", "ok", "oom", "ok"]
    assert tried[:5] == [(3, 3, 16), (1, 3, 16), (2, 3, 16), (1, 3, 16), (1, 3, 16)]
    assert outcomes[3].reason == "out of memory with one image of 40 x 8 pixels"
    assert outcomes[3].value is None
    for number in (0, 1, 2, 4):
        wanted = direct(weights, pixels[number])[0]
        assert np.abs(outcomes[number].value.numpy() - wanted).max() < 1e-5


def test_outputs_that_are_not_finite_are_a_status(two_shapes):
    _, model, images, _ = two_shapes

    def huge(module, inputs, sizes):
        return torch.full((len(inputs), 5), 1e5) * (float("nan") if inputs.shape[2] > 16 else 1)

    for dtype, wanted in (
        (torch.float32, ["ok"] * 3 + ["nan", "ok"]),
        (torch.float16, ["nan"] * 5),
    ):
        outcomes = outcomes_of(model, images, huge, 9, dtype)
        assert [x.status for x in outcomes] == wanted
        assert outcomes[3].reason == "outputs are not finite"
    assert outcomes[0].reason == "outputs are not finite; float32 may hold them"  # overflown


class Deadly(ListedFiles):
    """A process that loads its fourth image ends."""

    def open(self, index: int):
        if index == 3 and get_worker_info() is not None:
            os._exit(9)
        return super().open(index)


def test_a_process_that_ends_while_it_reads_ends_the_run_with_the_reason(two_shapes):
    _, model, images, _ = two_shapes
    deadly = ReadImages(Deadly(images.listing.paths), COLOUR, OWN_SIZES)
    said = r"^a data loader process died \(DataLoader worker .*\); try --workers 0$"
    with pytest.raises(Failed, match=said):
        outcomes_of(model, deadly, pooled, workers=1)
