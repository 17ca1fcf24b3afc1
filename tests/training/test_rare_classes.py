"""Losses, class weights and the sampler for rare classes."""

from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from PIL import Image
from sklearn.utils.class_weight import compute_class_weight

from tests.helpers.image_files import config_of, write_classes
from tests.helpers.resumed_runs import assert_resumes
from tests.helpers.small_runs import small_config
from visionattn.data.data_config import DataConfig
from visionattn.data.splits import build_splits, train_batches
from visionattn.models.segmentation import IGNORED
from visionattn.training.config import LossConfig, OptimConfig
from visionattn.training.label_statistics import with_class_weights
from visionattn.training.losses import class_losses, dice_losses, pixel_losses
from visionattn.training.objectives import Objective, PixelClasses

COUNTS = {"bird": 21, "cat": 3, "dog 2": 11}
WEIGHTS = [0.3, 2.0, 1.0, 0.7]


@pytest.fixture
def images(tmp_path):
    write_classes(tmp_path / "data" / "train", COUNTS)
    write_classes(tmp_path / "data" / "val", dict.fromkeys(COUNTS, 2))
    return tmp_path / "data"


def logits_and_masks():
    """Logits of 4 classes; part of one mask and all of another are ignored, and one lacks a
    class.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(5, 4, 7, 3, generator=generator, dtype=torch.float64)
    masks = torch.randint(0, 4, (5, 7, 3), generator=generator, dtype=torch.uint8)
    masks[0, :2], masks[1][masks[1] == 2], masks[3] = IGNORED, 0, IGNORED
    return logits, masks


def test_dice_equals_segmentation_models_image_by_image():
    smp = pytest.importorskip("segmentation_models_pytorch")
    logits, masks = logits_and_masks()
    logits.requires_grad_()
    wanted = []
    for image, mask in zip(logits[:3], masks[:3], strict=True):
        there = [float((mask == each).any()) for each in range(4)]
        loss = smp.losses.DiceLoss("multiclass", ignore_index=IGNORED, class_weights=there)
        wanted.append(loss(image[None], mask[None].long()))
    found = dice_losses(logits, masks)
    torch.testing.assert_close(found[:3], torch.stack(wanted), rtol=1e-6, atol=0)
    assert found[3] == 0 and 0 < found[4] < 1
    [gradient] = torch.autograd.grad(found[:3].sum(), logits, retain_graph=True)
    [known] = torch.autograd.grad(sum(wanted), logits)
    torch.testing.assert_close(gradient, known, rtol=1e-6, atol=1e-9)


def test_focal_equals_segmentation_models_times_the_class_weights():
    functional = pytest.importorskip("segmentation_models_pytorch.losses._functional")
    logits, masks = logits_and_masks()
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    found = pixel_losses(logits, masks, weights, focal=True)
    for number in (0, 1, 2, 4):
        counted = masks[number] != IGNORED
        scores, classes = logits[number][:, counted].T, masks[number][counted].long()
        wanted = functional.softmax_focal_loss_with_logits(scores, classes, reduction="none")
        assert found[number].item() == pytest.approx((weights[classes] * wanted).mean().item())
        torch.testing.assert_close(class_losses(scores, classes, focal=True), wanted)
    assert found[3] == 0


@pytest.mark.parametrize(
    ("objective", "name", "weights"),
    [
        (Objective, "cross_entropy", WEIGHTS),
        (Objective, "focal", WEIGHTS),
        (PixelClasses, "cross_entropy", WEIGHTS),
        (PixelClasses, "dice", None),
        (PixelClasses, "cross_entropy_dice", WEIGHTS),
    ],
)
def test_the_loss_does_not_depend_on_the_division_into_batches(objective, name, weights):
    logits, targets = logits_and_masks()
    if objective is Objective:
        logits, targets = logits[..., 0, 0], targets[:, 3, 1].long() % 4
    loss = objective(OptimConfig(), LossConfig(name, weights)).loss
    parts = [slice(0, 2), slice(2, 5)]
    divided = sum(len(logits[part]) * loss(logits[part], targets[part]) for part in parts) / 5
    assert loss(logits, targets).item() == pytest.approx(divided.item(), rel=1e-12)


def test_class_weights_multiply_the_loss_of_each_image():
    logits, labels = torch.randn(3, 4), torch.tensor([1, 3, 1])
    found = Objective(OptimConfig(), LossConfig(class_weights=WEIGHTS)).loss(logits, labels)
    each = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(found, (2.0 * each[0] + 0.7 * each[1] + 2.0 * each[2]) / 3)


def test_balanced_weights_of_images_are_those_of_scikit_learn(images):
    splits = build_splits(config_of(images), 0)
    found = with_class_weights(LossConfig(class_weights="balanced"), splits)
    labels = splits.train.labels
    wanted = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    assert found.class_weights == pytest.approx(wanted)
    with pytest.raises(ValueError, match="^expected 3 loss.class_weights, one per class, got 2"):
        with_class_weights(LossConfig(class_weights=[1.0, 2.0]), splits)
    splits.train.labels = labels.clip(1)
    with pytest.raises(ValueError, match="balanced: no training image has class bird; add some"):
        with_class_weights(LossConfig(class_weights="balanced"), splits)


def test_balanced_weights_of_pixels_leave_ignored_ones_out(tmp_path):
    rng = np.random.default_rng(0)
    masks = [rng.choice([0, 1, 2, 255], (6, 9), p=[0.7, 0.1, 0.1, 0.1]) for _ in range(3)]
    for split, (number, mask) in product(("train", "val"), enumerate(masks)):
        image = Image.fromarray(mask.astype(np.uint8))
        for kind in ("masks", "images"):
            (tmp_path / kind / split).mkdir(parents=True, exist_ok=True)
            image.save(tmp_path / kind / split / f"{number}.png")
    masked = {"task": "segmentation", "masks": {"classes": ["a", "b", "c"]}}
    splits = build_splits(config_of(tmp_path, **masked), 0)
    found = with_class_weights(LossConfig(class_weights="balanced"), splits)
    pixels = np.concatenate([mask[mask != 255] for mask in masks])
    wanted = compute_class_weight("balanced", classes=np.arange(3), y=pixels)
    assert found.class_weights == pytest.approx(wanted)


def test_drawn_images_have_no_balanced_weights():
    splits = build_splits(DataConfig(name="canvas"), 0)
    with pytest.raises(ValueError, match="got streamed or drawn images; pass 10 numbers$"):
        with_class_weights(LossConfig(class_weights="balanced"), splits)


def keys_of(batches, epoch, start=0):
    batches._keys.epoch, batches._keys.start = epoch, start
    return list(batches._keys)


@pytest.mark.parametrize("fit", ["crop", "native"])
def test_the_balanced_sampler_draws_classes_and_their_images_equally_often(images, fit):
    for number in range(4):  # other sizes for `native`
        Image.new("RGB", (40, 28)).save(images / "train" / "bird" / f"{number}.png")
    config = config_of(images, fit=fit, img_size=None if fit == "native" else 16)
    config = replace(config, sampler="balanced")
    splits = build_splits(config, 0)
    labels = splits.train.labels
    made = [train_batches(splits, config, batch_size=4, seed=5) for _ in range(3)]
    for rank in (0, 1):
        made[1 + rank].divide(rank, 2)
    for epoch in (0, 1):
        parts, *shared = (keys_of(each, epoch) for each in made)
        keys = [key for part in parts for key in part]
        drawn = np.array([key.index for key in keys])
        assert len(parts) == len(made[0]) and len({key.draw for key in keys}) == 35
        assert sorted(np.bincount(labels[drawn])) == [11, 12, 12]
        times = np.bincount(drawn, minlength=35)
        assert all(np.ptp(times[labels == label]) <= 1 for label in range(3))
        for part in parts if fit == "native" else []:
            assert len({tuple(splits.train.sizes()[key.index]) for key in part}) == 1
        # Resume and several processes draw the same.
        assert keys_of(made[0], epoch, start=2) == parts[2:]
        assert [first + second for first, second in zip(*shared, strict=True)] == parts
    assert keys_of(made[0], 0) != keys_of(made[0], 1)


def test_a_recurring_image_gets_another_augmentation(images):
    ramp = np.arange(400, dtype=np.uint16).reshape(20, 20) // 2
    Image.fromarray(ramp.astype(np.uint8)).save(images / "train" / "cat" / "0.png")
    config = config_of(images, augment="light", sampler="balanced")
    splits = build_splits(config, 0)
    parts = keys_of(train_batches(splits, config, batch_size=4, seed=0), 0)
    recurring = [key for part in parts for key in part if key.index == 21]
    seen = {splits.train[key].pixels.tobytes() for key in recurring}
    assert len(seen) == len(recurring) > 2
    assert splits.train[recurring[0]].pixels.tobytes() in seen


def test_a_run_records_balanced_weights_and_resumes_with_the_same_flags(images, tmp_path):
    loss, data = LossConfig("focal", "balanced"), asdict(config_of(images, sampler="balanced"))
    config = small_config(tmp_path, data=data, loss=loss, save_every=1)
    assert "is now" not in assert_resumes(config, tmp_path, 7)
    written = yaml.safe_load((tmp_path / "whole" / "small" / "config.yaml").read_text())
    assert written["loss"]["class_weights"] == pytest.approx([35 / 63, 35 / 9, 35 / 33])


@pytest.mark.parametrize(
    "data",
    [
        {"name": "canvas"},
        {"name": "folder", "root": "wds/shards", "on_error": "skip"},
        {"name": "folder", "root": "photos", "task": "segmentation"},
        {"name": "digits", "task": "generate"},
    ],
)
def test_a_sampler_is_refused_where_classes_of_images_are_unknown(data):
    with pytest.raises(ValueError, match="^data.sampler needs data.task classification of"):
        build_splits(DataConfig(sampler="balanced", **data), 0)
