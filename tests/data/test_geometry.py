"""Which part of an image becomes how many pixels, and which images share a batch."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from visionattn.data.data_checks import resolved
from visionattn.data.data_config import DataConfig
from visionattn.data.geometry import Geometry
from visionattn.data.splits import build_splits, eval_batches, train_batches

PATCH = (16, 16)
SHAPES = [(3000, 2000), (333, 500), (40, 4000), (512, 512), (513, 100), (16, 16), (2999, 3001)]


@pytest.mark.parametrize("shape", SHAPES)
def test_each_fit_gives_its_box_and_sizes(shape):
    whole = Geometry("native", None, None, PATCH).view(*shape)
    assert whole.box == (0, 0, *shape) and whole.content == shape
    assert whole.canvas == whole.present == tuple(math.ceil(px / 16) * 16 for px in shape)

    shrunk = Geometry("native", (512, 400), None, PATCH).view(*shape)
    if shape[0] <= 512 and shape[1] <= 400:  # it is never enlarged
        assert shrunk == whole
    else:
        assert_scaled(shrunk, shape, min(512 / shape[0], 400 / shape[1]))
        assert shrunk.canvas == shrunk.present == shrunk.content

    padded = Geometry("pad", (512, 256), None, PATCH).view(*shape)
    assert_scaled(padded, shape, min(512 / shape[0], 256 / shape[1]))
    assert padded.canvas == (512, 256) and padded.present == padded.content

    stretched = Geometry("stretch", (512, 256), None, PATCH).view(*shape)
    assert stretched == ((0, 0, *shape), (512, 256), (512, 256), (512, 256))

    box, *sizes = Geometry("crop", (512, 256), None, PATCH).view(*shape)
    assert sizes == [(512, 256)] * 3
    assert box.height == shape[0] or box.width == shape[1]
    assert abs(box.height / box.width - 2) <= 2 / box.width
    assert abs(2 * box.top + box.height - shape[0]) <= 1
    assert abs(2 * box.left + box.width - shape[1]) <= 1


def assert_scaled(view, shape, scale):
    """All of an image is brought to whole patches, as near to the scale as these allow."""
    assert view.box == (0, 0, *shape)
    for px, got in zip(shape, view.content, strict=True):
        assert got % 16 == 0 and (abs(got - px * scale) <= 8 or got == 16)


@pytest.mark.parametrize("budget", [1, 7, 64, 1000])
def test_a_budget_of_patches_is_kept_with_the_aspect_ratio(budget):
    for shape in SHAPES:
        view = Geometry("native", None, budget, PATCH).view(*shape)
        rows, columns = (px // 16 for px in view.canvas)
        assert 1 <= rows * columns <= budget
        if math.ceil(shape[0] / 16) * math.ceil(shape[1] / 16) <= budget:
            assert view.content == shape
            continue
        assert view.content == view.canvas

        def worth(down, across, aspect=shape[0] / shape[1]):
            change = down / across / aspect
            return down * across * min(change, 1 / change)

        # No other grid within the budget has more patches at so true an aspect ratio.
        for down in range(1, budget + 1):
            most = budget // down
            near = max(1, min(most, round(down * shape[1] / shape[0])))
            assert worth(rows, columns) >= 0.9 * max(worth(down, most), worth(down, near))


def test_an_image_smaller_than_a_patch_is_one_line():
    with pytest.raises(ValueError, match="image of 15 x 40 pixels is smaller than a patch of 16"):
        Geometry("native", None, None, PATCH).view(15, 40)
    assert Geometry("pad", (64, 64), None, PATCH).view(15, 40).content == (32, 64)


def write_pages(root, shapes, classes=("a", "b")):
    """Pages whose gray level is their number."""
    for number, (height, width) in enumerate(shapes):
        folder = root / classes[number % len(classes)]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.full((height, width, 3), 10 + number, np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    return root


def many_shapes(count):
    draw = np.random.default_rng(5)
    return [tuple(map(int, shape)) for shape in draw.integers(20, 90, (count, 2))]


def folder(root, **options):
    usual = {"name": "folder", "root": str(root), "workers": 0, "val_fraction": 0.2}
    return DataConfig(**usual | options)


def levels(batch):
    return batch.images[:, 0, 0, 0].tolist()


def test_folders_have_native_sizes_by_default_and_a_budget_bounds_batches(tmp_path):
    config = folder(write_pages(tmp_path, many_shapes(40)), batch_patches=24)
    assert resolved(config).fit == "native"
    splits = build_splits(config, 3)
    batches = train_batches(splits, config, batch_size=99, seed=3, patch_px=PATCH)
    epochs = [list(batches.epoch(number)) for number in (0, 1)]
    for epoch in epochs:
        assert len(epoch) == len(batches)
        seen = sorted(level for batch in epoch for level in levels(batch))
        assert len(seen) == len(set(seen)) == len(splits.train)
        for batch in epoch:
            patches = batch.images.shape[2] // 16 * (batch.images.shape[3] // 16)
            assert batch.sizes is None
            assert patches * len(batch.labels) <= 24 or len(batch.labels) == 1
        # A grid has at most one batch that is not full.
        grids = [tuple(batch.images.shape[2:]) for batch in epoch]
        for grid in set(grids):
            room = max(1, 24 // (grid[0] // 16 * (grid[1] // 16)))
            counts = [len(b.labels) for b, own in zip(epoch, grids, strict=True) if own == grid]
            assert sorted(counts)[1:] == [room] * (len(counts) - 1)
    assert [levels(batch) for batch in epochs[0]] != [levels(batch) for batch in epochs[1]]


def test_buckets_are_the_same_for_any_workers_start_and_processes(tmp_path):
    config = folder(write_pages(tmp_path, many_shapes(30)), augment="light")
    splits = build_splits(config, 3)

    def batches(workers=0):
        own = folder(tmp_path, augment="light", workers=workers)
        return train_batches(splits, own, batch_size=4, seed=3, patch_px=PATCH)

    whole = list(batches().epoch(2))
    for others, start in ((batches(workers=2), 0), (batches(), 2)):
        for first, second in zip(whole[start:], others.epoch(2, start=start), strict=True):
            assert torch.equal(first.images, second.images)
    parts = [batches(), batches(), batches()]
    for rank, part in enumerate(parts):
        part.divide(rank, 3)
    for batch, *divided in zip(whole, *(part.epoch(2) for part in parts), strict=True):
        assert torch.equal(torch.cat([part.labels for part in divided]), batch.labels)


def test_padding_is_empty_and_told(tmp_path):
    shapes = [(40, 80), (80, 40), (64, 64)] * 6
    config = folder(write_pages(tmp_path, shapes), fit="pad", img_size=64)
    splits = build_splits(config, 3)
    geometry = Geometry("pad", (64, 64), None, PATCH)
    (batch,) = eval_batches(splits.train, config, batch_size=99, geometry=geometry)
    assert batch.images.shape[1:] == (3, 64, 64)
    assert {tuple(size) for size in batch.sizes.tolist()} == {(32, 64), (64, 32), (64, 64)}
    for image, (height, width) in zip(batch.images, batch.sizes.tolist(), strict=True):
        assert (image[:, :height, :width] > 0).all()
        assert not image[:, height:].any() and not image[:, :, width:].any()
