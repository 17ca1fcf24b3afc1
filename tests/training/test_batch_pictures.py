"""The sheet of first batches: it shows what a training computes with, how large each picture is and
what stands below it, and nothing else is written.
"""

import numpy as np
import pytest
import torch

from tests.helpers.image_files import write_classes, write_pair
from tests.helpers.resumed_runs import on_small_data
from tests.helpers.small_runs import SPEC, small_config
from tests.helpers.tools import assert_one_error
from visionattn.command import main
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.training.engine import first_batches, train
from visionattn.training.picture_sheet import (
    named,
    visible,
)


def seen_in_training(config):
    """The first input of the model in training and the first in evaluation, of a whole run."""
    seen = {}

    def keep(module, inputs):
        if isinstance(module, VisionAttnTransformer):
            seen.setdefault(module.training, inputs[0].clone())

    hook = torch.nn.modules.module.register_module_forward_pre_hook(keep)
    with hook, on_small_data():
        train(config)
    return seen[True], seen[False]


def test_the_pictures_are_what_the_model_gets_in_its_first_step_and_its_first_evaluation(
    tmp_path, small
):
    optim = {"mixup": 0.6, "cutmix": 0.7}
    config = small_config(tmp_path, optim=optim, epochs=1, seed=5, batch_size=23)
    parts = first_batches(config)
    assert list(tmp_path.iterdir()) == []
    for shown, inputs in zip(parts, seen_in_training(config), strict=True):
        assert len(shown.pictures) == 16
        for picture, image in zip(shown.pictures, inputs, strict=False):
            levels = 255 * (image * SPEC.std[0] + SPEC.mean[0])
            np.testing.assert_allclose(picture.pixels[..., 0], levels[0].numpy(), atol=0.51)
            assert picture.captions[1:] == ("16 x 16 px", "4 x 4 patches")


def test_labels_are_those_of_the_images_and_mixtures_say_their_shares(tmp_path, small):
    """Of a quadrant's image its brightest quarter is the label."""
    training, validation = first_batches(small_config(tmp_path, batch_size=23))
    for picture in (*training.pictures, *validation.pictures):
        quarters = picture.pixels[..., 0].reshape(2, 8, 2, 8).mean((1, 3)).ravel()
        assert picture.captions[0] == SPEC.class_names[quarters.argmax()]
    mixed, validation = first_batches(small_config(tmp_path, optim={"mixup": 1.0}))
    assert any(picture.captions[0].count("%") == 2 for picture in mixed.pictures)
    assert all("%" not in picture.captions[0] for picture in validation.pictures)
    assert "mixup 1.0" in mixed.note and "mixup" not in validation.note


def test_names_of_mixtures_have_the_larger_share_first_whatever_the_smoothing():
    smooth = torch.full((4,), 0.025)
    assert named(SPEC, smooth + torch.tensor([0, 0.9, 0, 0])) == "nw"
    assert named(SPEC, torch.tensor([0.23, 0.7, 0.045, 0.025])) == "70 % nw + 23 % ne"


@pytest.mark.parametrize(("bands", "shown"), [(1, [0, 0, 0]), (2, [0, 0, 0]), (5, [0, 1, 2])])
def test_images_of_any_bands_and_of_floats_are_visible(bands, shown):
    image = torch.randint(0, 256, (bands, 5, 7), dtype=torch.uint8)
    wanted = image[shown].permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(visible(image), wanted)
    np.testing.assert_array_equal(visible(image / 255), wanted)


def test_what_does_not_count_in_a_mask_is_striped(tmp_path):
    mask = np.full((32, 32), 1, np.uint8)
    mask[:8], mask[8:16] = 0, 255
    for number in range(2):
        write_pair(tmp_path, number, mask, mask)
    data = dict(name="folder", task="segmentation", root=str(tmp_path), img_size=32)
    data |= {"masks": {"classes": ["road", "roof"]}}
    picture = first_batches(small_config(tmp_path, data=data))[0].pictures[1]
    assert picture.captions == ("its mask", "roof, road", "striped: 25% ignored")
    stripes = {tuple(colour) for colour in picture.pixels[8:16].reshape(-1, 3).tolist()}
    classes = {tuple(picture.pixels[row, 0].tolist()) for row in (0, 20)}
    assert len(stripes) == 2 and not stripes & classes


def test_the_command_draws_one_file_says_one_line_and_trains_nothing(tmp_path, capsys):
    flags = f"train --config digits --output {tmp_path}/runs --show-batch {tmp_path}/seen.png"
    assert main(flags.split()) == 0
    said = capsys.readouterr()
    assert said.err == "" and said.out == (
        f"{tmp_path}/seen.png: 16 training and 16 validation images as the model sees them; "
        "nothing was trained\n"
    )
    assert main(flags.split()) == 2
    assert_one_error(capsys, "seen.png exists; pass --overwrite to replace it")
    with pytest.raises(ValueError, match="^show_batch does not train; use "):
        train(small_config(tmp_path, show_batch=str(tmp_path / "x.png")))
    assert [path.name for path in tmp_path.iterdir()] == ["seen.png"]


def test_captions_name_the_files(tmp_path):
    for split in ("train", "val"):
        write_classes(tmp_path / "pictures" / split, {"dark": 3, "light": 3})
    data = dict(name="folder", root=str(tmp_path / "pictures"), fit="crop")
    for part in first_batches(small_config(tmp_path, data=data)):
        assert "sizes: height x width" in part.note and len(part.pictures) == 6
        named = {picture.captions[:2] for picture in part.pictures}
        assert named == {(k, f"{n}.png") for k in ("dark", "light") for n in range(3)}
