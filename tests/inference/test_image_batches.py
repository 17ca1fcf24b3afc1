"""Images in batches through a model: outputs of their own pixels, and what ends in a status."""

import os

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from tests.helpers.inference_files import COLOUR, direct, write_folder, write_weights
from visionattn.cli.ends import Failed
from visionattn.data.geometry import Geometry
from visionattn.inference.image_listing import ListedFiles, find_images
from visionattn.inference.image_reading import ReadImages
from visionattn.inference.image_run import ImageRun
from visionattn.inference.inference_options import InferenceOptions
from visionattn.inference.model_opening import open_model
from visionattn.models.patches import pooled

OWN_SIZES = Geometry("native", None, None, (8, 8))


def outcomes_of(opened, images, compute, batch_size=1, dtype=torch.float32, workers=0):
    options = InferenceOptions(workers=workers)
    batches = ImageRun(options, opened, images, compute).batches(batch_size, dtype)
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
        assert ("float32 may hold them" in outcomes[3].reason) == (dtype == torch.float16)


class Deadly(ListedFiles):
    """A process that loads its fourth image ends."""

    def open(self, index: int):
        if index == 3 and get_worker_info() is not None:
            os._exit(9)
        return super().open(index)


def test_a_process_that_ends_while_it_reads_ends_the_run_with_the_reason(two_shapes):
    _, model, images, _ = two_shapes
    deadly = ReadImages(Deadly(images.listing.paths), COLOUR, OWN_SIZES)
    said = r"^a process that reads images ended \(DataLoader worker .*\); try --workers 0$"
    with pytest.raises(Failed, match=said):
        outcomes_of(model, deadly, pooled, workers=1)
