"""``visionattn.predict`` and ``visionattn.extract_features`` against models called by hand."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import visionattn
from tests.helpers.inference_files import COLOUR, write_image, write_weights

PX = COLOUR.img_size


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A checkpoint, and three images of its size, as files and as pixels ``[3, H, W, 3]``."""
    folder = tmp_path_factory.mktemp("calls")
    pixels = [write_image(folder / "images" / f"{i}.png", PX, PX, seed=i) for i in range(3)]
    return write_weights(folder / "best.safetensors"), folder / "images", np.stack(pixels)


def inputs_of(pixels, mean=COLOUR.mean, std=COLOUR.std):
    """Normalised ``[B, C, H, W]``, from the definition."""
    scaled = (pixels / 255.0 - np.array(mean)) / np.array(std)
    return torch.tensor(scaled.transpose(0, 3, 1, 2), dtype=torch.float32)


def test_classes_and_probabilities_are_those_of_the_model_whatever_the_images_are(given):
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
        (tmp_path / "plain.pt", folder, {}, "does not say whose weights these are; build the"),
        (linear, folder, {}, "set its data_spec to a visionattn.DataSpec"),
        (no_classes, folder, {}, "has no classes to predict"),
        (model, folder, {"device": "cpu"}, "leave device out"),
        (model, folder, {"img_size": "own"}, "img_size must be a whole number or a list"),
        (model, [], {}, "there are no images"),
        (model, [str(folder), pixels[0]], {}, "got both in one list"),
        (model, pixels[0].astype(str), {}, r"image 0: wanted numbers, \[H, W\]"),
        (model, torch.zeros(2, 5, 16, 16).byte(), {}, "image 0: the image has 5 bands"),
        (model, [pixels[0], 7], {}, "image 1: wanted a path, a picture of Pillow"),
    ):
        with pytest.raises(ValueError, match=part):
            visionattn.predict(asked, images, **options)
    with pytest.raises(TypeError, match="there is no option 'output'; the options are img"):
        visionattn.predict(model, folder, output="p.csv")
    linear.data_spec = COLOUR
    with pytest.raises(ValueError, match="gives no features of this kind"):
        visionattn.extract_features(linear, folder)


def test_grey_and_transparent_pictures_are_read_as_files_are(given):
    path, _, pixels = given
    grey = pixels[0][:, :, 0]
    as_colour = np.repeat(grey[:, :, None], 3, axis=2)
    opaque = np.concatenate([pixels[1], np.full((PX, PX, 1), 9, np.uint8)], axis=2)
    wanted = visionattn.predict(path, [as_colour, pixels[1]], device="cpu").probabilities
    for images in ([grey, opaque], [grey[:, :, None], Image.fromarray(opaque)]):
        assert torch.equal(visionattn.predict(path, images, device="cpu").probabilities, wanted)
