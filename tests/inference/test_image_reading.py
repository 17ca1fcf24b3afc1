"""Images from files to the pixels of a model: which are meant, and how they are read."""

import numpy as np
import pytest
from PIL import Image

from tests.helpers.inference_files import COLOUR, GREY, write_image
from visionattn.data.geometry import Geometry
from visionattn.inference.image_listing import ListedFiles, find_images
from visionattn.inference.image_reading import ReadImages
from visionattn.inference.inference_options import InferenceOptions, parse_options
from visionattn.models.weights import DataSpec

ONE_HOT = DataSpec(256, 4, (), (), (), "grey_one_hot", 16)
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
        ("empty.txt", ValueError, "names no images"),
        ("latin.txt", ValueError, "no text file in UTF-8"),
        ("table.CSV", ValueError, "a list of images is a .txt file with a path"),
        ("phone", ValueError, "phone; it holds 1 .heic; wanted files that end"),
        ("x.png", FileNotFoundError, "no image, folder or list at "),
    ):
        with pytest.raises(error, match=part):
            find_images([str(tmp_path / name)])
    with pytest.raises(ValueError, match="--images is missing"):
        find_images([])


def test_paths_on_the_command_line_mean_themselves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    about = {"command": "predict", "description": "x"}
    for path in ("a, b: c #1", "[2024]", "null"):
        (tmp_path / path).mkdir()
        for given in (["--images", path, "y"], [f"--images={path}"]):
            options = parse_options(InferenceOptions, [*given, "--model", "m"], **about)
            assert options.images[0] == path


def test_files_become_grey_or_coloured_as_the_model_has_it(tmp_path):
    colour = write_image(tmp_path / "colour.png", 16, 24, 1)
    Image.fromarray(colour[..., 0]).save(tmp_path / "grey.png")
    listing, native = find_images([str(tmp_path)]), OWN_SIZES
    images = ReadImages(listing, COLOUR, native)
    assert (images[0].pixels.numpy() == colour.transpose(2, 0, 1)).all()
    assert (images[1].pixels.numpy() == colour[None, ..., 0]).all()
    assert images[1].pixels.shape == (3, 16, 24)
    luma = colour @ np.array([0.299, 0.587, 0.114])
    for spec in (GREY, ONE_HOT):
        images = ReadImages(listing, spec, native)
        assert images[0].pixels.shape == (1, 16, 24)
        assert np.abs(images[0].pixels[0].numpy() - luma).max() <= 1
        assert (images[1].pixels[0].numpy() == colour[..., 0]).all()


def test_what_cannot_be_read_is_a_sample_with_a_reason(tmp_path):
    Image.new("RGB", (1, 60000)).save(tmp_path / "thin.png")
    listing = ListedFiles([str(tmp_path / "thin.png")])
    thin = ReadImages(listing, COLOUR, OWN_SIZES)[0]
    assert "60000 x 1 pixels is smaller than a patch of 8 x 8; fit pad" in thin.reason
    assert (thin.height, thin.width, thin.pixels) == (60000, 1, None)
    huge = Geometry("stretch", (2**30, 2**30))  # no machine has the memory for it
    too_large = ReadImages(listing, COLOUR, huge)[0]
    assert too_large.pixels is None and too_large.reason and "\n" not in too_large.reason


def test_a_digest_tells_other_images_and_files_of_another_size(tmp_path):
    write_image(tmp_path / "a.png", 8, 8, 0)
    first = find_images([str(tmp_path)]).digest()
    assert first == find_images([str(tmp_path)]).digest()
    (tmp_path / "a.png").write_bytes(b"other")
    second = find_images([str(tmp_path)]).digest()
    (tmp_path / "a.png").rename(tmp_path / "b.png")
    assert len({first, second, find_images([str(tmp_path)]).digest()}) == 3
    assert ListedFiles(["nowhere.png"]).digest() != ListedFiles([]).digest()
