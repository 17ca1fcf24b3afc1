"""Sequences to copy: what they say, which values count, and what decides each of them."""

import numpy as np
import pytest
import torch

from visionattn.data.data_config import DataConfig
from visionattn.data.drawn_images import CopyingDataset, draw_sequence
from visionattn.data.geometry import Geometry
from visionattn.data.splits import SampleKey, build_splits, train_batches

TASK = {"name": "copy", "task": "generate", "workers": 0}


def item(split="train", index=0, epoch=0, seed=3, length=41):
    geometry = Geometry("crop", (1, length))
    return CopyingDataset(split, 100, seed)[SampleKey(index, epoch, geometry)]


def words(values):
    """Read ``0 w 0 w 0 ...`` back from the separators alone: w, w again, and what follows."""
    text = "".join(chr(ord("a") + value) for value in values.tolist())
    before, first, second, *rest = text.split("a")
    return before, first, second, "".join(rest)


@pytest.mark.parametrize("length", [4, 31])
def test_a_sequence_says_its_word_twice_and_the_second_one_counts(length):
    sizes = set()
    for seed in range(600):
        values, counted = draw_sequence(np.random.default_rng(seed), length)
        assert values.shape == counted.shape == (length,)
        assert values.dtype == counted.dtype == np.uint8 and values.max() <= 10
        before, first, second, rest = words(np.append(values, 0))
        assert before == rest == "" and first == second != ""
        size = len(first)
        sizes.add(size)
        # The second word lies behind the first one and two separators.
        assert np.flatnonzero(counted).tolist() == list(range(size + 2, 2 * size + 2))
    # From a quarter of the sequence on, as long as both words and separators find room.
    assert sizes == {size for size in range(length // 4, length) if 2 * size + 2 <= length}


def test_seed_split_epoch_and_index_decide_a_sequence():
    def told(**how):
        found = item(**how)
        return found.pixels.tobytes(), found.label.tobytes()

    assert told() == told()
    changed = [{"index": 1}, {"epoch": 1}, {"seed": 4}, {"split": "validation"}, {"split": "test"}]
    assert len({told(), *(told(**how) for how in changed)}) == 1 + len(changed)
    # The test is the same for everyone.
    assert told(split="test", seed=4) == told(split="test")
    assert told(split="validation", seed=4) != told(split="validation")


def test_batches_have_one_row_of_levels_and_the_mask_of_those_that_count():
    config = DataConfig(**TASK, args={"train_images": 5, "eval_images": 3})
    splits = build_splits(config, seed=1)
    spec = splits.spec
    assert (spec.in_chans, spec.num_classes, spec.img_size) == (1, 0, (1, 128))
    assert (spec.task, spec.mean, spec.std) == ("generate", (), ())
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [5, 3, 3]
    batches = train_batches(splits, config, batch_size=4, seed=1)
    found = list(batches.epoch(0))
    assert [tuple(batch.images.shape) for batch in found] == [(4, 1, 1, 128), (1, 1, 1, 128)]
    for batch in found:
        assert batch.images.dtype == batch.labels.dtype == torch.uint8 and batch.sizes is None
        assert batch.labels.shape == (len(batch.images), 1, 128)
        assert (spec.prepare(batch.images) == batch.images).all()
