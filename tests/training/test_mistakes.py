"""What a run keeps of each class and of its worst mistakes: counts, pictures, and what no reader
takes.
"""

import base64
import io
import json
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.geometry import square
from tests.helpers.small_runs import (
    SPEC,
    Quadrants,
    lines_of,
    quadrants,
    small_config,
)
from visionattn.cli.files import write_json
from visionattn.data.batches import EvalBatches, SampleKey, Unreadable
from visionattn.data.data_config import DataConfig
from visionattn.models.weights import load_model
from visionattn.training import engine
from visionattn.training.evaluate import Tally
from visionattn.training.mistakes import (
    ADDRESS,
    MOST_BYTES,
    MOST_MISTAKES,
    MOST_PAIRS,
    address,
    by_class,
    read_by_class,
)


def kept_of(rows, images=None, *, spec=None, geometry=None):
    """What is kept of rows, of images without pictures unless some are given."""
    spec = spec or replace(SPEC, num_classes=7, class_names=None)
    about = dict(split="validation", epoch=1, root=None)
    return by_class(rows, images, spec, geometry or square(16), **about)


def said_of(logits):
    """Class and probabilities of each row, in float64 and without torch's softmax."""
    shares = np.exp(logits.astype(np.float64))
    return logits.argmax(1), shares / shares.sum(1, keepdims=True)


def tensors_in(thing):
    """The number of tensors that an object keeps."""
    if isinstance(thing, torch.Tensor):
        return 1
    kept = thing if isinstance(thing, list | tuple) else getattr(thing, "__dict__", {}).values()
    return sum(map(tensors_in, kept))


def test_pairs_are_counted_and_the_mistakes_of_the_largest_loss_are_kept():
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 7, 83)
    logits = draw.normal(size=(83, 7)).astype(np.float32)
    logits[np.arange(83), labels] += 1
    said, shares = said_of(logits)
    tally = Tally()
    for start in range(0, 83, 9):
        part = torch.from_numpy(logits[start : start + 9])
        tally.add(torch.from_numpy(labels[start : start + 9]), part.argmax(1), part)
    assert tensors_in(tally) == 3  # not some for each batch, which would fragment memory
    numbers = draw.permutation(1000)[:83]
    rows = tally.rows(numbers.tolist())
    np.testing.assert_array_equal(rows[:, [0, 1, 4]], np.stack([labels, said, numbers], 1))
    # Rows of several processes come in any order, and images without numbers have no pictures.
    found = kept_of(draw.permutation(tally.rows(None)))
    wrong = sorted(np.flatnonzero(said != labels), key=lambda i: shares[i, labels[i]])
    assert len(wrong) > MOST_MISTAKES == len(found.mistakes)
    for i, each in zip(wrong, found.mistakes, strict=False):
        assert (each.label, each.said, each.picture) == (labels[i], said[i], None)
        assert each.of_label == pytest.approx(shares[i, labels[i]], rel=1e-5)
        assert each.probability == pytest.approx(shares[i].max(), rel=1e-5)
    counted = Counter((labels[i], said[i]) for i in wrong)
    assert {(a, b): often for a, b, often in found.confusions} == counted
    oftens = [often for *_, often in found.confusions]
    assert oftens == sorted(oftens, reverse=True) and found.complete


def picture_of(source):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))))


def test_a_run_keeps_what_its_best_weights_say_of_each_class(tmp_path, monkeypatch):
    splits = quadrants(9)
    monkeypatch.setattr(engine, "build_splits", lambda config, seed: splits)
    lines_of(small_config(tmp_path, epochs=1, optim={"warmup_epochs": 0.2}))
    folder = tmp_path / "small"
    model = load_model(folder / "best.safetensors").eval()
    for name in ("validation", "test"):
        found, dataset = read_by_class(folder / f"{name}.json"), getattr(splits, name)
        items = [dataset[SampleKey(i, 0, square(16))] for i in range(len(dataset))]
        images = torch.stack([torch.from_numpy(item.pixels).permute(2, 0, 1) for item in items])
        with torch.no_grad():
            said, _ = said_of(model(SPEC.prepare(images)).numpy())
        labels = np.array([item.label for item in items])
        assert (found.split, found.epoch, found.images) == (name, 1, len(dataset))
        assert found.class_names == list(SPEC.class_names) and "16 x 16 px" in found.seen
        rights = np.bincount(labels[labels == said], minlength=4)
        assert [right for _, right, _ in found.classes] == rights.tolist()
        assert found.complete and found.mistakes
        seen = {item.pixels.tobytes(): i for i, item in enumerate(items)}
        for each in found.mistakes:
            i = seen[picture_of(each.picture).tobytes()]
            assert (each.label, each.said) == (labels[i], said[i]) and each.size == (16, 16)


class Marked(Quadrants):
    """Images two of which cannot be read."""

    def __getitem__(self, key):
        cut = key.index in (2, 11)
        return Unreadable(f"{key.index}.png", "cut off") if cut else super().__getitem__(key)


@pytest.mark.filterwarnings("ignore:skipped unreadable image")
def test_unreadable_images_do_not_shift_the_numbers_of_others():
    config = DataConfig(workers=0, on_error="skip")
    batches = EvalBatches(Marked(23, 2), config, batch_size=5, choices=(square(16),))
    for _ in range(2):
        labels = torch.cat([batch.labels for batch in batches])
        assert batches.numbers == [i for i in range(23) if i not in (2, 11)]
        assert labels.tolist() == [i % 4 for i in batches.numbers]


def test_the_names_of_files_are_told_below_the_root(tmp_path):
    root, shades = tmp_path / "mine", {"cat": 60, "dog": 200}
    for split, (kind, shade), i in product(("train", "val"), shades.items(), range(3)):
        (root / split / kind).mkdir(parents=True, exist_ok=True)
        pixels = np.full((132, 72, 3), shade + 9 * i, np.uint8)
        Image.fromarray(pixels).save(root / split / kind / f"{i}.png")
    data = {"name": "folder", "root": f"{root}/", "fit": "native", "img_size": None}
    lines_of(small_config(tmp_path, data=data, epochs=1, batch_size=3, optim={"warmup_epochs": 0}))
    found = read_by_class(tmp_path / "small" / "validation.json")
    assert found.mistakes
    for each in found.mistakes:
        assert each.name.startswith(f"val/{found.name(each.label)}/") and each.size == (132, 72)
        shown, kept = np.asarray(Image.open(root / each.name)), picture_of(each.picture)
        assert abs(kept.mean() - shown.mean()) < 3


def test_a_large_picture_is_bounded_and_keeps_its_shape():
    noise = np.random.default_rng(0).integers(0, 255, (2400, 1600, 3)).astype(np.uint8)
    small = address(noise)
    assert ADDRESS.fullmatch(small) and len(small) < MOST_BYTES * 4 / 3 + 100
    height, width = picture_of(small).shape[:2]
    assert abs(height / width - 1.5) < 0.02 and 300 < width <= 600
    smooth = np.full((3000, 3000, 1), 0.5, np.float32)
    assert picture_of(address(smooth)).shape[:2] == (600, 600)


def test_of_many_pairs_the_most_frequent_are_kept_and_the_file_stays_small(tmp_path):
    pairs = np.unique(np.random.default_rng(0).integers(0, 1000, (9000, 2)), axis=0)
    rows = np.zeros((len(pairs) + 3000, 5))
    rows[:, :2] = np.concatenate([pairs, pairs[:3000]])
    rows[:, 4] = -1
    found = kept_of(rows, spec=replace(SPEC, num_classes=1000, class_names=None))
    assert len(found.confusions) == MOST_PAIRS and not found.complete
    assert {often for *_, often in found.confusions} == {2}
    assert found.images == len(rows) and found.name(17) == "17"
    write_json(tmp_path / "test.json", found)
    assert (tmp_path / "test.json").stat().st_size < 100_000


MISTAKE = {"label": 0, "said": 1, "probability": 0.5, "of_label": 0.1, "name": None, "size": None}


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"images": 11},
        {"class_names": ["a"]},
        {"classes": [[6, 7, 5], [4, 1, 5]]},
        {"confusions": [[0, 2, 1]]},
        {"mistakes": [MISTAKE | {"said": 2, "picture": None}]},
        {"mistakes": [MISTAKE | {"picture": "http://example.org/a.png"}]},
        {"mistakes": [MISTAKE | {"picture": "data:image/svg+xml;base64,AAAA"}]},
        {"mistakes": [MISTAKE | {"picture": '"><script>'}]},
        {"mistakes": [MISTAKE | {"picture": "data:image/png;base64," + "A" * 400_000}]},
    ],
)
def test_a_file_that_no_page_can_show_is_refused(tmp_path, changes):
    rows = np.array([[0, 0, 0, 0, -1], [0, 1, 0, 0, -1], [1, 0, 0, 0, -1], [1, 1, 0, 0, -1]])
    found = kept_of(rows, spec=replace(SPEC, num_classes=2, class_names=("a", "b")))
    path = tmp_path / "test.json"
    write_json(path, found)
    assert read_by_class(path) == found
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match="test.json is damaged"):
        read_by_class(path)
