"""Images from files to the pixels of a model: which are meant, how they are read, sized and
batched.
"""

import weakref

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.inference_files import COLOUR, GREY, write_image
from visionattn.data.geometry import Geometry
from visionattn.inference.image_batches import batch_samples, read_ahead
from visionattn.inference.image_listing import ListedFiles, find_images
from visionattn.inference.image_reading import ReadImages, Sample
from visionattn.inference.inference_options import InferenceOptions, parse_options
from visionattn.models.weights import DataSpec

ONE_HOT = DataSpec(256, 4, (), (), (), "grey_one_hot", 16)
OWN_SIZES = Geometry("native", None, None, (8, 8))


def test_a_folder_is_searched_to_any_depth_in_natural_order(tmp_path):
    for name in ("10.png", "9.JPG", "deep/er/2.tif", ".hidden.png", "notes.md", "deep/1.webp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
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


def test_files_that_are_left_out_of_a_folder_are_counted_by_suffix(tmp_path):
    names = ("a.png", "b.heic", "c.HEIC", "d.vsi", "e/f.mp4", "IM01", "notes.txt", ".DS_Store")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    with pytest.warns(UserWarning) as caught:
        assert len(find_images([str(tmp_path)])) == 1
    assert [str(each.message) for each in caught] == [
        f"left out of {tmp_path}: files of other kinds: 2 .heic, 1 without a suffix, 1 .mp4, 1 .vsi"
    ]


def test_what_holds_no_images_is_refused_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"\xe9.png\n")
    (tmp_path / "table.CSV").write_text("path\na.png\n")
    (tmp_path / "phone").mkdir()
    (tmp_path / "phone" / "a.HEIC").write_bytes(b"")
    for given, error, part in (
        ([], ValueError, "--images is missing"),
        ([str(tmp_path / "empty.txt")], ValueError, "names no images"),
        ([str(tmp_path / "latin.txt")], ValueError, "no text file in UTF-8"),
        ([str(tmp_path / "table.CSV")], ValueError, "a list of images is a .txt file with a path"),
        ([str(tmp_path / "phone")], ValueError, "phone; it holds 1 .heic; wanted files that end"),
        (["nowhere/x.png"], FileNotFoundError, "no image, folder or list at nowhere/x.png"),
    ):
        with pytest.raises(error) as caught:
            find_images(given)
        assert part in str(caught.value) and "\n" not in str(caught.value)


def test_a_digest_tells_other_images_and_files_of_another_size(tmp_path):
    write_image(tmp_path / "a.png", 8, 8, 0)
    first = find_images([str(tmp_path)]).digest()
    assert first == find_images([str(tmp_path)]).digest()
    (tmp_path / "a.png").write_bytes(b"other")
    second = find_images([str(tmp_path)]).digest()
    (tmp_path / "a.png").rename(tmp_path / "b.png")
    assert len({first, second, find_images([str(tmp_path)]).digest()}) == 3
    assert ListedFiles(["nowhere.png"]).digest() != ListedFiles([]).digest()


@pytest.mark.parametrize("path", ["a, b: c #1", "[2024]", "null"])
def test_paths_on_the_command_line_mean_themselves(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / path).mkdir()
    about = {"command": "predict", "description": "x"}
    for argv in (["--images", path, "y"], [f"--images={path}"]):
        options = parse_options(
            InferenceOptions, [*argv, "--model", "m", "--img-size", "native"], **about
        )
        assert options.images[0] == path and options.img_size == "native"


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
    with pytest.raises(ValueError, match="the model takes 4 channels"):
        ReadImages(listing, DataSpec(4, 2, (), (0.5,) * 4, (0.5,) * 4, None, 16), native)


def test_what_cannot_be_read_is_a_sample_with_a_reason_in_one_line(tmp_path):
    write_image(tmp_path / "whole.png", 40, 40, 0)
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:900])
    (tmp_path / "text.png").write_text("no image")
    Image.new("RGB", (1, 60000)).save(tmp_path / "thin.png")
    names = ["cut.png", "text.png", "missing.png"]
    images = ReadImages(
        ListedFiles([str(tmp_path / name) for name in names]), COLOUR, Geometry("crop", (512, 512))
    )
    for number, part in enumerate(("truncated", "cannot identify", "No such file")):
        sample = images[number]
        assert sample.pixels is None and sample.reason and part in sample.reason
        assert "\n" not in sample.reason
    thin = ReadImages(ListedFiles([str(tmp_path / "thin.png")]), COLOUR, OWN_SIZES)[0]
    huge = Geometry("stretch", (2**30, 2**30))  # no machine has the memory for it
    too_large = ReadImages(ListedFiles([str(tmp_path / "whole.png")]), COLOUR, huge)[0]
    assert too_large.pixels is None and too_large.reason and "\n" not in too_large.reason
    assert "60000 x 1 pixels is smaller than a patch of 8 x 8; fit pad" in thin.reason
    assert (thin.height, thin.width, thin.pixels) == (60000, 1, None)


def sample_of(shape: tuple[int, int] | None) -> Sample:
    return (
        Sample(reason="damaged")
        if shape is None
        else Sample(*shape, torch.zeros(3, *shape, dtype=torch.uint8))
    )


def test_batches_hold_images_of_one_size_that_follow_each_other():
    wide, tall = (8, 16), (16, 8)
    shapes = [wide, None, wide, wide, tall, None, None, None, wide, wide]
    batches = batch_samples(map(sample_of, shapes), 3)
    got = [[None if s.reason else (s.height, s.width) for s in batch] for batch in batches]
    assert got == [[wide, None, wide], [wide], [tall, None, None], [None, wide, wide]]
    assert list(batch_samples(iter(()), 3)) == []


class Counted(ReadImages):
    """Counts the images that are in memory."""

    alive = most = 0

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(sample.pixels, self.forget)
        return sample

    def forget(self) -> None:
        self.alive -= 1


def test_no_more_than_a_batch_of_images_is_in_memory(tmp_path):
    path = tmp_path / "a.png"
    write_image(path, 8, 16, 0)
    images = Counted(ListedFiles([str(path)] * 41), COLOUR, OWN_SIZES)
    seen = 0
    for batch in batch_samples(read_ahead(images, 0, batch_size=5, workers=0), 5):
        seen += len(batch)
        for sample in batch:
            sample.pixels = None
    assert seen == 41 and images.most <= 6
