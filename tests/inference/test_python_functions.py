"""Functions of Python and flags: the same classes and features, of images of any kind and size."""

import math
from dataclasses import replace

import cv2
import numpy as np
import pytest
import tifffile
import timm
import torch
from PIL import Image
from timm.layers import PatchEmbed
from torch.nn.modules.module import register_module_forward_pre_hook

import visionattn
from tests.helpers.inference_files import (
    COLOUR,
    feature_of,
    flags,
    read_index,
    write_image,
    write_weights,
)
from tests.helpers.tools import read_csv
from visionattn.command import run
from visionattn.inference.image_listing import as_held
from visionattn.models.weights import DataSpec

PATCH_PX = 8
FOLDERS = {"ash/0": (21, 35), "birch/0": (64, 20), "cedar/0": (13, 90), "elm/0": (17, 30)}
FOLDERS |= {"elm/1": (11, 17)}
SHAPES = list(FOLDERS.values())
WHOLE = [(32, 48)] * 5
CASES = {
    "native": ({"fit": "native", "img_size": None}, SHAPES, "--img_size native"),
    "at most a size": (
        {"fit": "native", "img_size": 32},
        [(16, 32), (32, 8), (8, 32), (17, 30), (11, 17)],
        None,
    ),
    "max_patches": (
        {"fit": "native", "img_size": None, "max_patches": 6},
        [(16, 24), (32, 8), (8, 48), (16, 24), (11, 17)],
        "--fit native --max_patches 6",
    ),
    "pad": (
        {"fit": "pad", "img_size": (32, 48)},
        [(32, 48), (32, 8), (8, 48), (24, 48), (32, 48)],
        None,
    ),
    "stretch": (
        {"fit": "stretch", "img_size": (32, 48)},
        WHOLE,
        "--fit stretch --img_size 32 48",
    ),
}
"""Preprocessing; the height and width that each image has then, by hand; and the flags that
say so, None where the checkpoint says it.
"""


def by_hand(image: np.ndarray, content: tuple[int, int], fit: str) -> np.ndarray:
    """The model's input ``[H, W, C]``, from the definition: normalized, and 0 where absent."""
    if image.shape[:2] != content:
        shrinks = image.shape[0] >= content[0] and image.shape[1] >= content[1]
        way = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
        image = cv2.resize(image, content[::-1], interpolation=way)
    image = (image / 255 - np.array(COLOUR.mean)) / np.array(COLOUR.std)
    if fit != "native":
        canvas = np.zeros((*WHOLE[0], 3))
        canvas[: content[0], : content[1]] = image
        return canvas
    rows, columns = (math.ceil(px / PATCH_PX) * PATCH_PX for px in content)
    return image[np.arange(rows).clip(max=content[0] - 1)][
        :, np.arange(columns).clip(max=content[1] - 1)
    ]


@pytest.fixture
def take():
    """Takes what has reached the patch embedding of models, an array ``[H, W, C]`` per image."""
    pixels = []

    def keep(module, given):
        if isinstance(module, PatchEmbed):
            pixels.extend(image.numpy().transpose(1, 2, 0) for image in given[0])

    handle = register_module_forward_pre_hook(keep)
    yield lambda: [pixels.pop(0) for _ in range(len(pixels))]
    handle.remove()


@pytest.fixture
def images(tmp_path, monkeypatch):
    """A folder with class folders of images of odd sizes, as the current folder; their pixels."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("ash", "birch", "cedar", "elm")):
        write_image(tmp_path / "tree" / "train" / name / "0.png", 16, 16, number)
    (tmp_path / "images").symlink_to(tmp_path / "tree" / "val")
    return [
        write_image(tmp_path / "tree" / "val" / f"{name}.png", *shape, seed=50 + i)
        for i, (name, shape) in enumerate(FOLDERS.items())
    ]


def checkpoint(folder, **seen) -> str:
    return str(write_weights(folder / "best.safetensors", replace(COLOUR, **seen)))


def assert_same(got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    assert [image.shape for image in got] == [image.shape for image in wanted]
    for image, other in zip(got, wanted, strict=True):
        assert np.abs(image - other).max() < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_preprocessing_follows_the_checkpoint_or_flags_in_every_tool(images, tmp_path, take, case):
    seen, contents, more = CASES[case]
    path = checkpoint(tmp_path, **({} if more else seen))
    words = more.split() if more else []
    options = {} if not more else {"img_size": "native"} if case == "native" else seen
    wanted = [by_hand(i, c, seen["fit"]) for i, c in zip(images, contents, strict=True)]

    assert run("predict", flags("--batch_size", "3", *words, output="out.csv")) == 0
    assert_same(take(), wanted)
    for row, shape, image in zip(read_csv("out.csv"), SHAPES, wanted, strict=True):
        assert (row["status"], int(row["height"]), int(row["width"])) == ("ok", *shape)
        assert (int(row["input_height"]), int(row["input_width"])) == image.shape[:2]
    assert run("features", flags(*words)) == 0
    assert_same(take(), wanted)

    classes = visionattn.predict(path, "images", top_k=1, device="cpu", **options).classes
    assert_same(take(), wanted)
    assert [row["class_1"] for row in read_csv("out.csv")] == [first for (first,) in classes]
    features = visionattn.extract_features(path, images, batch_size=2, device="cpu", **options)
    assert_same(take(), wanted)
    for row, feature in zip(read_index(tmp_path / "out"), features.numpy(), strict=True):
        assert np.abs(feature_of(tmp_path / "out", row) - feature).max() < 1e-5

    if case in ("max_patches", "pad"):  # and as in validation, which orders images otherwise
        checkpoint(tmp_path, **seen)
        given = "--checkpoint best.safetensors --data.name folder --data.root tree --split=val"
        assert run("validate", [*given.split(), "--data.workers", "0", "--device", "cpu"]) == 0
        found = take()
        for image in wanted:
            alike = (other for other in found if other.shape == image.shape)
            assert min(np.abs(image - other).max() for other in alike) < 1e-5


def test_what_images_do_not_fill_takes_no_part_in_features(images, tmp_path):
    seen, contents, _ = CASES["pad"]
    path = checkpoint(tmp_path, **seen)
    ways = [cv2.INTER_LINEAR, cv2.INTER_AREA, cv2.INTER_AREA, cv2.INTER_LINEAR, cv2.INTER_LINEAR]
    alone = [
        cv2.resize(image, (width, height), interpolation=way)
        for image, (height, width), way in zip(images, contents, ways, strict=True)
    ]
    own = {"img_size": "native", "batch_size": 1, "device": "cpu"}
    wanted = visionattn.extract_features(path, alone, **own)
    padded = visionattn.extract_features(path, images, batch_size=5, device="cpu")
    torch.testing.assert_close(padded, wanted, rtol=0, atol=1e-5)


def test_a_model_of_timm_sees_what_is_padded_as_black(images):
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, embed_dim=24, num_classes=4
    ).eval()
    model.data_spec = replace(COLOUR, fit="pad", img_size=32)
    image = images[2]
    black = np.zeros((32, 32, 3), np.uint8)
    black[:8] = cv2.resize(image, (32, 8), interpolation=cv2.INTER_AREA)
    scaled = (black / 255 - np.array(COLOUR.mean)) / np.array(COLOUR.std)
    with torch.no_grad():
        wanted = model(torch.tensor(scaled.transpose(2, 0, 1)[None], dtype=torch.float32))
    with pytest.warns(UserWarning, match="sees padding as black pixels"):
        found = visionattn.predict(model, [Image.fromarray(image)], top_k=4)
    values = wanted[0].softmax(0).sort(descending=True)[0]
    torch.testing.assert_close(found.probabilities[0], values, rtol=0, atol=1e-5)


def test_a_picture_of_pillow_is_turned_as_its_file_would_be(tmp_path):
    turned, exif = Image.new("RGB", (6, 4)), Image.Exif()
    exif[0x112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    with Image.open(tmp_path / "turned.jpg") as picture:
        assert as_held(picture).size == (4, 6)


def test_arrays_of_bands_and_of_other_values_give_what_their_files_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": 16}
    model = timm.create_model("scaleformer_vit_t", num_classes=2, in_chans=2, **args)
    model.data_spec = DataSpec(
        2, 2, (), (0.5,) * 2, (0.2,) * 2, None, 16, bands=(5, 1), value_range=(0.0, 4095.0)
    )
    levels = np.random.default_rng(0).integers(0, 4096, (24, 16, 5)).astype(np.uint16)
    tifffile.imwrite("five.tif", levels, photometric="minisblack", planarconfig="contig")
    wanted = visionattn.predict(model, "five.tif").probabilities
    for held in (levels, torch.from_numpy(levels.astype(np.int32)).permute(2, 0, 1)):
        found = visionattn.predict(model, [held]).probabilities
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    other = visionattn.predict(model, [levels], bands=(1, 5)).probabilities
    assert (other - wanted).abs().max() > 1e-4
    with pytest.raises(ValueError, match=r"image 0: .*band"):
        visionattn.predict(model, [levels[..., :3]])


PX = COLOUR.img_size


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A checkpoint, and three images of its size, as files and as pixels ``[3, H, W, 3]``."""
    folder = tmp_path_factory.mktemp("calls")
    pixels = [write_image(folder / "images" / f"{i}.png", PX, PX, seed=i) for i in range(3)]
    return write_weights(folder / "best.safetensors"), folder / "images", np.stack(pixels)


def inputs_of(pixels, mean=COLOUR.mean, std=COLOUR.std):
    """Normalized ``[B, C, H, W]``, from the definition."""
    scaled = (pixels / 255.0 - np.array(mean)) / np.array(std)
    return torch.tensor(scaled.transpose(0, 3, 1, 2), dtype=torch.float32)


def test_classes_and_probabilities_equal_the_models_for_every_form_of_images(given):
    path, folder, pixels = given
    model = visionattn.load_model(path)
    with torch.no_grad():
        wanted = model(inputs_of(pixels)).softmax(1)
    tensor = torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())
    files = [str(folder / f"{i}.png") for i in range(3)]
    forms = [folder, files, [Image.open(file) for file in files], pixels, list(pixels)]
    forms += [tensor, list(tensor)]
    for images in forms:
        found = visionattn.predict(path, images, top_k=2, batch_size=2, device="cpu")
        for i in range(3):
            best = wanted[i].argsort(descending=True)[:2]
            assert found.classes[i] == tuple(COLOUR.class_names[j] for j in best)
            torch.testing.assert_close(found.probabilities[i], wanted[i][best], rtol=0, atol=1e-6)
        named = isinstance(images, list) and isinstance(images[0], str) or images is folder
        assert found.paths == (files if named else ["image 0", "image 1", "image 2"])
    one = visionattn.predict(path, pixels[1], device="cpu")
    torch.testing.assert_close(one.probabilities[0], wanted[1].sort(descending=True)[0])


def test_a_module_of_timm_is_run_as_its_configuration_says_and_given_back_as_it_was(given):
    _, _, pixels = given
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=PX, patch_size=8, depth=1, num_classes=5
    )
    model.train()
    model.blocks[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [part.training for part in model.modules()]
    found = visionattn.predict(model, pixels)
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    cfg = model.pretrained_cfg
    with torch.no_grad():
        wanted = model.eval()(inputs_of(pixels, cfg["mean"], cfg["std"])).softmax(1)
    values, places = wanted.sort(descending=True)
    torch.testing.assert_close(found.probabilities, values, rtol=0, atol=1e-6)
    assert found.classes == [tuple(map(str, row)) for row in places.tolist()]


def test_what_cannot_be_done_is_one_line(given, tmp_path):
    path, folder, pixels = given
    model, linear = visionattn.load_model(path), torch.nn.Linear(3, 3)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    no_classes = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0)
    for asked, images, options, part in (
        (tmp_path / "plain.pt", folder, {}, "does not state the model of its weights; build the"),
        (linear, folder, {}, "set its data_spec to a visionattn.DataSpec"),
        (no_classes, folder, {}, "expected a model with classes"),
        (model, folder, {"device": "cpu"}, "remove device"),
        (model, folder, {"img_size": "own"}, "img_size must be an integer or a list"),
        (model, [], {}, "pictures in memory, got none"),
        (model, [str(folder), pixels[0]], {}, "got both"),
        (model, pixels[0].astype(str), {}, r"image 0: expected numbers, \[H, W\]"),
        (model, torch.zeros(2, 5, 16, 16).byte(), {}, "image 0: the image has 5 bands"),
        (model, [pixels[0], 7], {}, "image 1: expected a path, a picture of Pillow"),
    ):
        with pytest.raises(ValueError, match=part):
            visionattn.predict(asked, images, **options)
    with pytest.raises(TypeError, match="there is no option 'output'; the options are img"):
        visionattn.predict(model, folder, output="p.csv")
    linear.data_spec = COLOUR
    with pytest.raises(ValueError, match="has no such features"):
        visionattn.extract_features(linear, folder)


def test_grey_and_transparent_pictures_equal_their_files(given):
    path, _, pixels = given
    grey = pixels[0][:, :, 0]
    as_colour = np.repeat(grey[:, :, None], 3, axis=2)
    opaque = np.concatenate([pixels[1], np.full((PX, PX, 1), 9, np.uint8)], axis=2)
    wanted = visionattn.predict(path, [as_colour, pixels[1]], device="cpu").probabilities
    for images in ([grey, opaque], [grey[:, :, None], Image.fromarray(opaque)]):
        assert torch.equal(visionattn.predict(path, images, device="cpu").probabilities, wanted)
    bfloat16 = torch.from_numpy(as_colour.transpose(2, 0, 1).copy()).bfloat16()
    found = visionattn.predict(path, [bfloat16], value_range=(0, 255), device="cpu")
    torch.testing.assert_close(found.probabilities, wanted[:1], rtol=0, atol=1e-6)
