"""Runs on training crops: resume, validation on whole images, and refused options."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.image_files import refused, write_pair
from tests.helpers.resumed_runs import assert_resumes, state_of, stop
from tests.helpers.small_runs import lines_of, small_config
from visionattn.cli.exit_codes import DoesNotFit
from visionattn.data.data_config import DataConfig
from visionattn.data.geometry import geometry_of
from visionattn.data.splits import build_splits, eval_batches
from visionattn.models import cost
from visionattn.training.training_cost import TrainingMemory
from visionattn.training.validate import parse_validate

SIZES = [(40, 52), (33, 90), (14, 70)]


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """Images of three sizes, one lower than the crops, with a small object in most masks."""
    root, rng = tmp_path_factory.mktemp("crops") / "data", np.random.default_rng(0)
    for split, count in (("train", 7), ("val", 3)):
        for number in range(count):
            height, width = SIZES[number % 3]
            mask = np.zeros((height, width), np.uint8)
            if number != 2:
                top, left = rng.integers(0, (height - 4, width - 4))
                mask[top : top + 4, left : left + 4] = 1
            write_pair(root / split, number, rng.integers(0, 255, (*mask.shape, 3), np.uint8), mask)
    return root


def data_of(root, **changes):
    given = {"name": "folder", "task": "segmentation", "root": str(root), "workers": 0}
    given |= {"masks": {"classes": ["ground", "car"]}, "fit": "native", "augment": "light"}
    return given | {"crop": [16, 20], "crop_around": 0.7, "crops": 3, "img_size": None} | changes


def config_of(output, root, **options):
    model = {"class_token": False, "global_pool": "avg"}
    options = dict(data=data_of(root), batch_size=4, model=model) | options
    return small_config(output, **options)


def test_a_run_on_crops_counts_them_resumes_and_validates_whole_images(masked, tmp_path):
    config = config_of(tmp_path, masked, save_every=1)
    assert_resumes(config, tmp_path, 9)
    whole = tmp_path / "whole" / "small"
    state = state_of(whole)
    assert state["position"]["images"] == 2 * 21 and state["images"] == [7, 3]
    stop(config, 9)
    other = replace(config, data=replace(config.data, crops=2), resume=True)
    with pytest.raises(ValueError, match="^the run has data.crops 3, not 2; .* until the epoch"):
        lines_of(other)
    # Evaluation ignores the crops of the run, and chooses its own batches.
    best = str(whole / "best.safetensors")
    config = parse_validate(["--checkpoint", best])
    assert (config.data.crop, config.data.crops, config.batch_size) == (None, 1, "auto")
    with pytest.raises(ValueError, match="^data.crop applies only to training; remove it"):
        parse_validate(["--checkpoint", best, "--data.crop", "8"])


def test_the_first_lines_of_a_run_on_crops_tell_them(masked, tmp_path):
    text = "\n".join(lines_of(config_of(tmp_path, masked)))
    for part in (
        "7 training and 3 validation images, 2 epochs of 6 steps",
        "native size; training on crops of 16 x 20 px, 70% of them around objects",
        "21 images of 16 x 20 px, 20 patches",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        # 16 crops have 320 patches of 4 x 4 px, an image of 40 x 52 px has 130.
        ({}, [(1, 36, 92), (1, 36, 92), (1, 40, 52), (2, 16, 72), (2, 40, 52)]),
        ({"batch_patches": 144}, [(1, 36, 92)] * 2 + [(1, 40, 52)] * 3 + [(2, 16, 72)]),
        ({"fit": "pad", "img_size": 32}, [(2, 32, 32), (5, 32, 32)]),
        ({"fit": "pad", "img_size": 64}, [(1, 64, 64)] * 7),
    ],
)
def test_whole_images_are_evaluated_in_batches_of_as_many_pixels(masked, changes, wanted):
    config = DataConfig(**data_of(masked, **changes))
    splits = build_splits(config, 0)
    geometry = geometry_of(splits.spec, (4, 4))
    batches = eval_batches(splits.train, config, batch_size=16, geometry=geometry)
    assert sorted(map(tuple, batches.shapes().tolist())) == wanted


@pytest.mark.parametrize(
    ("crop", "there", "line"),
    [
        (16, 10_000, "an evaluation of 1 image of 128 x 128 pixels .*would fit: --data.img_size 6"),
        (112, 50_000, "a step on 1 image of 112 x 112 pixels .*would fit: --data.crop 6"),
    ],
)
def test_too_large_images_and_crops_are_refused_with_their_options(
    tmp_path, monkeypatch, crop, there, line
):
    """A step takes 10 bytes of a pixel, an evaluation 1, and loading another one."""
    monkeypatch.setattr(cost, "memory_there_is", lambda *how: there)
    monkeypatch.setattr(cost, "taken_bytes", lambda *how: 0)
    monkeypatch.setattr(TrainingMemory, "step_bytes", lambda self, shape: 10 * math.prod(shape))
    monkeypatch.setattr(TrainingMemory, "forward_bytes", lambda self, shape: math.prod(shape))
    args = {"train_images": 4, "eval_images": 2}
    data = {"name": "canvas", "img_size": 128, "crop": crop, "args": args}
    with pytest.raises(DoesNotFit, match=line):
        lines_of(config_of(tmp_path, None, data=data, batch_size=1))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (dict(crops=2), "data.crop_around and data.crops need --data.crop"),
        (dict(crop_around=0.5), "data.crop_around and data.crops need --data.crop"),
        (dict(crop=16, crops=0), "data.crops must be above 0, got 0"),
        (dict(crop=16, crop_around=1.5), "data.crop_around must be in [0, 1], got 1.5"),
        (
            dict(crop=[16]),
            "data.crop: expected one number of pixels, or height and width, got [16]",
        ),
        (dict(crop=0), "data.crop must be above 0, got 0"),
        (dict(crop=32), "expected data.crop below data.img_size 32 x 32 px, got 32 x 32 px"),
        (dict(crop=16, crop_around=0.5), "data.crop_around needs data.task segmentation"),
        (dict(crop=16, task="generate"), "data.crop needs images that are neither stream"),
        (
            dict(crop=16, name="folder", root="wds/x", img_size=32, fit="crop", on_error="skip"),
            "data.crop needs images that are neither streamed nor generated",
        ),
    ],
)
def test_crops_that_cannot_be_are_refused(given, line):
    assert refused(ValueError, DataConfig(**given)).startswith(line)


def test_crops_are_whole_patches(masked, tmp_path):
    config = config_of(tmp_path, masked, data=data_of(masked, crop=18))
    with pytest.raises(ValueError, match="^image of 18 x 18 pixels is not .*: 16 or 20"):
        lines_of(replace(config, epochs=1))
