"""The sheet of first batches: it shows what a training computes with, how large each picture is and
what stands below it, and nothing else is written.
"""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.small_runs import SPEC, quadrants_for, small_config
from tests.helpers.tools import assert_one_error, load_tool
from visionattn.data.data_config import DataConfig
from visionattn.models.weights import DataSpec
from visionattn.training import checkpoint, engine
from visionattn.training.engine import first_batches, train
from visionattn.training.picture_sheet import (
    named,
    training_changes,
    visible,
)


def seen_in_training(config, monkeypatch):
    """The first input of the model in training and the first in evaluation, of a whole run."""
    seen = {}
    build_model = checkpoint.build_model

    def watched(*args):
        model, built = build_model(*args)
        model.register_forward_pre_hook(keep)
        return model, built

    def keep(module, inputs):
        seen.setdefault(module.training, inputs[0].clone())

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "build_model", watched)
        # Neither the count of memory nor the trial before the first step sees images.
        patch.setattr(engine, "check_memory", lambda trainer, memory: None)
        patch.setattr(engine, "forecast", lambda trainer, memory: None)
        train(config)
    return seen[True], seen[False]


@pytest.mark.parametrize("optim", [{"mixup": 0.6, "cutmix": 0.7}])
def test_the_pictures_are_what_the_model_gets_in_its_first_step_and_its_first_evaluation(
    tmp_path, monkeypatch, optim
):
    monkeypatch.setattr(engine, "build_splits", quadrants_for)
    config = small_config(tmp_path, optim=optim, epochs=1, seed=5, batch_size=23)
    parts = first_batches(config)
    assert list(tmp_path.iterdir()) == []
    for shown, inputs in zip(parts, seen_in_training(config, monkeypatch), strict=True):
        assert len(shown.pictures) == 16
        for picture, image in zip(shown.pictures, inputs, strict=False):
            levels = 255 * (image * SPEC.std[0] + SPEC.mean[0])
            np.testing.assert_allclose(picture.pixels[..., 0], levels[0].numpy(), atol=0.51)
            assert picture.captions[1:] == ("16 x 16 px", "4 x 4 patches")


def test_labels_are_those_of_the_images_and_mixtures_say_their_shares(tmp_path, monkeypatch):
    """Of a quadrant's image its brightest quarter is the label."""
    monkeypatch.setattr(engine, "build_splits", quadrants_for)
    training, validation = first_batches(small_config(tmp_path, batch_size=23))
    for picture in (*training.pictures, *validation.pictures):
        quarters = picture.pixels[..., 0].reshape(2, 8, 2, 8).mean((1, 3)).ravel()
        assert picture.captions[0] == SPEC.class_names[quarters.argmax()]
    mixed, validation = first_batches(small_config(tmp_path, optim={"mixup": 1.0}))
    names = [picture.captions[0] for picture in mixed.pictures]
    assert any(name.count("%") == 2 for name in names)
    assert all("%" not in picture.captions[0] for picture in validation.pictures)
    assert "mixup 1.0" in mixed.note and "mixup" not in validation.note
    config = small_config(tmp_path, optim={"cutmix": 0.5})
    config.data = DataConfig(augment="documents")
    assert training_changes(config) == "augment documents, cutmix 0.5"


def test_names_of_mixtures_have_the_larger_share_first_whatever_the_smoothing():
    smooth = torch.full((4,), 0.025)
    assert named(SPEC, smooth + torch.tensor([0, 0.9, 0, 0])) == "nw"
    assert named(SPEC, torch.tensor([0.23, 0.7, 0.045, 0.025])) == "70 % nw + 23 % ne"
    assert named(SPEC, torch.tensor([0.0004, 0, 0, 0.9996])) == "sw"
    plain = DataSpec(1, 4, (), (0.3,), (0.2,), None, 16)
    assert named(plain, torch.tensor([0.0, 0, 0.0, 1])) == "3"


@pytest.mark.parametrize(("bands", "shown"), [(1, [0, 0, 0]), (2, [0, 0, 0]), (5, [0, 1, 2])])
def test_images_of_any_bands_and_of_floats_are_visible(bands, shown):
    image = torch.randint(0, 256, (bands, 5, 7), dtype=torch.uint8)
    wanted = image[shown].permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(visible(image), wanted)
    np.testing.assert_array_equal(visible(image / 255), wanted)


def test_what_does_not_count_in_a_mask_is_striped(tmp_path):
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
        for number in range(2):
            mask = np.full((32, 32), 1, np.uint8)
            mask[:8], mask[8:16] = 0, 255
            Image.fromarray(mask).save(tmp_path / kind / f"{number}.png")
    data = dict(name="folder", task="segmentation", root=str(tmp_path), img_size=32)
    data |= {"masks": {"classes": ["road", "roof"]}}
    training, _ = first_batches(small_config(tmp_path, data=data))
    picture = training.pictures[1]
    assert picture.captions == ("its mask", "roof, road", "striped: 25% ignored")
    shown = {tuple(colour) for colour in picture.pixels[8:16].reshape(-1, 3).tolist()}
    classes = {tuple(picture.pixels[row, 0].tolist()) for row in (0, 20)}
    assert len(shown) == 2 and not shown & classes


def test_the_command_draws_one_file_says_one_line_and_trains_nothing(tmp_path, capsys):
    main = load_tool("train")
    flags = f"--config digits --output {tmp_path}/runs --show-batch {tmp_path}"
    assert main(f"{flags}/seen.png".split()) == 0
    said = capsys.readouterr()
    assert said.err == "" and said.out == (
        f"{tmp_path}/seen.png: 16 training and 16 validation images as the model sees them; "
        "nothing was trained\n"
    )
    before = (tmp_path / "seen.png").read_bytes()
    refused = {
        f"{flags}/seen.png": "seen.png exists; pass --overwrite to replace it",
        f"{flags}/x.png --data.img_size 33": "33",
    }
    for words, message in refused.items():
        assert main(words.split()) == 2
        assert_one_error(capsys, message)
    with pytest.raises(ValueError, match="^show_batch does not train; use "):
        train(small_config(tmp_path, show_batch=str(tmp_path / "x.png")))
    assert [path.name for path in tmp_path.iterdir()] == ["seen.png"]
    assert (tmp_path / "seen.png").read_bytes() == before


def test_captions_name_the_files(tmp_path):
    for split in ("train", "val"):
        for kind, value in (("dark", 20), ("light", 200)):
            folder = tmp_path / "pictures" / split / kind
            folder.mkdir(parents=True)
            for number in range(3):
                Image.new("L", (16, 16), value).save(folder / f"{kind}{number}.png")
    data = dict(name="folder", root=str(tmp_path / "pictures"), fit="crop")
    for part in first_batches(small_config(tmp_path, data=data)):
        assert "sizes: height x width" in part.note and len(part.pictures) == 6
        named = {picture.captions[:2] for picture in part.pictures}
        assert named == {(k, f"{k}{n}.png") for k in ("dark", "light") for n in range(3)}
