"""A head trained on kept features: its checkpoint does the same with images."""

import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from tests.helpers.image_files import write_pair
from tests.helpers.resumed_runs import assert_resumes, run, stop
from tests.helpers.several_processes import train_on
from tests.helpers.small_runs import lines, same
from visionattn.cli.parsing import parse
from visionattn.data.batches import SampleKey
from visionattn.data.data_config import DataConfig
from visionattn.data.kept_features import FeatureFolder, patch_classes
from visionattn.data.splits import train_batches
from visionattn.inference.extraction import Extraction
from visionattn.inference.feature_options import parse_extract
from visionattn.model_config import ModelConfig
from visionattn.models.weights import load_model
from visionattn.training.config import LossConfig, OptimConfig, TrainConfig
from visionattn.training.engine import train
from visionattn.training.head_training import prepare_maps

BODY = dict(patch_size=8, embed_dim=24, depth=3, num_heads=3, dynamic_img_size=True)
BLOCKS = [0, 1]


def paint(number: int, label: int) -> tuple[np.ndarray, np.ndarray]:
    """A noisy image of a size of its own, with a square of one of two colors, and its mask."""
    draw = np.random.default_rng(number)
    height, width = [(40, 56), (56, 40), (48, 48)][number % 3]
    image = draw.integers(90, 160, (height, width, 3)).astype(np.uint8)
    mask = np.zeros((height, width), np.uint8)
    top, left = draw.integers(0, height - 16), draw.integers(0, width - 16)
    image[top : top + 16, left : left + 16] = ([255, 0, 0], [0, 0, 255])[label]
    mask[top : top + 16, left : left + 16] = label + 1
    return image, mask


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Pictures in class folders, beside masks, and in a table; and features of them."""
    folder = tmp_path_factory.mktemp("pictures")
    rows = ["path,red,blue,split"]
    for number in range(30):
        label, split = number % 2, ("train", "train", "train", "val", "test")[number % 5]
        image, mask = paint(number, label)
        path = f"{split}/{('red', 'blue')[label]}/{number}.png"
        (folder / "classes" / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / "classes" / path)
        write_pair(folder / "objects" / split, number, image, mask)
        rows.append(f"{path},{1 - label},{label},{split}")
    (folder / "labels.csv").write_text("\n".join(rows))
    extract(folder / "classes_features", [folder / "classes"])
    extract(folder / "objects_features", sorted(folder.glob("objects/*/images")))
    return folder


def extract(output: Path, images: list[Path], *more: str, blocks: Sequence[int] = BLOCKS) -> None:
    argv = ["--images", *map(str, images), "--output", str(output), "--workers", "0", "--dense"]
    argv += ["--model", "vit_tiny_patch16_224", "--args", json.dumps(BODY), "--dtype", "float16"]
    argv += ["--img-size", "native", "--fit", "native", *more]
    argv += ["--blocks", *map(str, blocks)] * bool(blocks)
    Extraction(parse_extract(argv)).run(lambda line: None)


def config_of(root: Path, output: Path, task: str, head: dict, **options) -> TrainConfig:
    kind = "objects" if task == "segmentation" else "classes"
    features = options.pop("features", root / f"{kind}_features")
    data = dict(root=str(root / kind), features=str(features), task=task)
    if task == "multilabel":
        data |= dict(labels=str(root / "labels.csv"), columns=["red", "blue"])
    config = TrainConfig(
        model=ModelConfig(args=head),
        data=DataConfig(name="folder", **data),
        optim=OptimConfig(lr=3e-3, warmup_epochs=0.5),
    )
    options = dict(epochs=2, batch_size=4, output=str(output), run="small") | options
    return replace(config, **options)


@pytest.mark.parametrize(
    ("task", "head"),
    [
        ("classification", dict(head_hidden=16, head_drop=0.2)),
        ("classification", dict(head_top=0)),
        ("multilabel", dict(head_hidden=16, head_depth=1, head_top=1)),
        ("segmentation", dict(head_hidden=16)),
        ("segmentation", dict()),
    ],
    ids=str,
)
def test_the_checkpoint_gives_for_images_the_loss_of_the_run_on_features(
    root, tmp_path, task, head
):
    config = config_of(root, tmp_path, task, head)
    best = train(config, stream=io.StringIO()).best_epoch
    # Of the run itself: the test images are evaluated with the checkpoint.
    [said] = [
        line["val_loss"]
        for line in lines(tmp_path / "small")
        if line["kind"] == "epoch" and line["epoch"] == best
    ]
    model, losses = load_model(tmp_path / "small" / "best.safetensors"), []
    for number in range(3, 30, 5):
        image, mask = paint(number, number % 2)
        x = model.data_spec.prepare(torch.from_numpy(image).permute(2, 0, 1)[None])
        with torch.no_grad():
            out = model(x)
        if task == "segmentation":
            loss = F.cross_entropy(out, torch.from_numpy(mask).long()[None])
        elif task == "multilabel":
            known = torch.tensor([[1.0 - number % 2, number % 2]])
            loss = F.binary_cross_entropy_with_logits(out, known)
        else:
            place = model.data_spec.class_names.index(("red", "blue")[number % 2])
            loss = F.cross_entropy(out, torch.tensor([place]))
        losses.append(float(loss))
    assert np.mean(losses) == pytest.approx(said, abs=2e-3)
    kept = load_model(Path(config.data.features) / "backbone.safetensors")
    same(model.backbone.state_dict(), kept.backbone.state_dict())


@pytest.mark.parametrize(("task", "crops"), [("classification", 1), ("segmentation", 3)])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(root, tmp_path, task, crops):
    head = dict(head_hidden=16, head_drop=0.2)
    config = config_of(root, tmp_path, task, head, save_every=2)
    assert_resumes(replace(config, data=replace(config.data, crops=crops)), tmp_path, 3)


def test_a_patch_has_the_class_of_most_of_its_pixels_or_is_ignored():
    mask = np.zeros((4, 20), np.uint8)
    mask[:3, :3] = 2  # 9 of 16 pixels
    mask[0, 4:7] = 1  # 3 of 16 pixels
    mask[0, 8] = 1  # 1 of 16 pixels
    mask[:, 12:14] = 255  # half is ignored
    mask[:2, 16:] = 1  # half, and the most of this class
    assert patch_classes(mask, (4, 4)).tolist() == [[2, 255, 0, 255, 1]]
    assert patch_classes(mask.T, (4, 4)).tolist() == [[2], [255], [0], [255], [1]]


def test_a_sample_has_patches_of_the_map_and_a_fifth_of_them_show_an_object(root, tmp_path):
    config = config_of(root, tmp_path, "segmentation", dict(head_hidden=16), epochs=1)
    config = replace(config, data=replace(config.data, crops=2, workers=0))
    with mock.patch("visionattn.training.engine.prepare_maps", wraps=prepare_maps) as prepared:
        run(config)
        splits, *_ = prepare_maps(*prepared.call_args.args)
    samples = splits.train
    batches = train_batches(splits, config.data, batch_size=4, seed=0, patch_px=(8, 8))
    assert len(batches) == len(list(batches.epoch(0))) == 9  # 18 images
    keys = [(1, 0), (1, 0), (1, 1), (2, 0)]
    items = [samples[SampleKey(4, epoch, samples.geometry, draw)] for epoch, draw in keys]
    assert items[0].pixels.tobytes() == items[1].pixels.tobytes()
    assert len({each.pixels.tobytes() for each in items}) == 3
    whole = samples.kept.read(samples.rows[4]).flatten(1).T
    colour = int(Path(samples.rows[4]["path"]).stem) % 2 + 1
    for item in items:
        assert item.pixels.shape == (1, 80, 48) and item.pixels.dtype == np.float16
        assert np.bincount(item.label.ravel(), minlength=3)[[0, colour]].tolist() == [64, 16]
        pixels = torch.from_numpy(item.pixels[0])
        assert (pixels[:, None] == whole).all(2).any(1).all()


def copied(folder: Path, output: Path) -> Path:
    """Return a copy of a folder of features, to change."""
    return Path(shutil.copytree(folder, output))


def test_a_run_is_not_resumed_on_other_features(root, tmp_path):
    kept = copied(root / "classes_features", tmp_path / "kept")
    config = config_of(root, tmp_path, "classification", {}, features=kept)
    stop(config, 3)
    extract(kept, [root / "classes"], "--seed", "5", "--overwrite")
    recorded = ["--config", str(tmp_path / "small" / "config.yaml"), "--resume"]
    with pytest.raises(ValueError, match="changed since the start of the run"):
        run(parse(TrainConfig, recorded))


def test_features_of_the_last_block_have_no_model_of_earlier_ones(root, tmp_path):
    kept = copied(root / "classes_features", tmp_path / "kept")
    extract(kept, [root / "classes"], "--overwrite", blocks=())
    line = "^no backbone.safetensors in data.features .*; write it with"
    with pytest.raises(FileNotFoundError, match=line):
        FeatureFolder(str(kept))


def test_a_damaged_file_of_features_is_named_in_one_line(root, tmp_path):
    kept = copied(root / "classes_features", tmp_path / "kept")
    shard = kept / "features-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"^{shard} is damaged: [^\n]*$"):
        run(config_of(root, tmp_path, "classification", {}, features=kept))


def test_a_channel_that_float16_makes_constant_gets_no_huge_weight(root, tmp_path):
    kept = copied(root / "classes_features", tmp_path / "kept")
    shard = kept / "features-00000.safetensors"
    maps = load_file(shard)
    for each in maps.values():
        each[3] = 0.3
    save_file(maps, shard)
    run(config_of(root, tmp_path, "classification", {}, features=kept))
    model = load_model(tmp_path / "small" / "best.safetensors")
    # Features of images differ from 0.3 by the rounding, 1e-4.
    assert 0 < model.head.weight[:, 3].abs().max() < 1e3


def test_features_of_no_readable_image_are_one_line(root, tmp_path):
    kept = copied(root / "classes_features", tmp_path / "kept")
    text = (kept / "index.csv").read_text()
    assert text.count(",ok,") == 30
    (kept / "index.csv").write_text(text.replace(",ok,", ",unreadable,"))
    with pytest.raises(ValueError, match="^expected feature maps of 48 channels in data.features"):
        run(config_of(root, tmp_path, "classification", {}, features=kept))


def test_features_are_found_by_the_end_of_their_paths(root, tmp_path):
    moved = copied(root / "classes_features", tmp_path / "moved")
    text = (moved / "index.csv").read_text().replace(str(root), "/elsewhere")
    (moved / "index.csv").write_text(text)
    run(config_of(root, tmp_path, "classification", {}, features=moved))
    assert (tmp_path / "small" / "best.safetensors").is_file()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            dict(data=dict(features="nowhere")),
            "no index.csv in data.features nowhere; write it with",
        ),
        (dict(data=dict(img_size=32)), "data.img_size changes images"),
        (dict(data=dict(augment="light")), "data.augment changes images"),
        (dict(model=ModelConfig("vit_small_patch16_224")), "vit_small_patch16_224 differs from"),
        (
            dict(model=ModelConfig(args=dict(head_blocks=[1]))),
            "model.args.head_blocks differs from",
        ),
        (dict(model=ModelConfig(args=dict(depth=2))), "model.args.depth differs from the model"),
        (dict(init_from="x"), "remove init_from$"),
        (dict(freeze="backbone"), "remove freeze$"),
        (dict(data=dict(cache="pixels")), "remove data.cache$"),
        (dict(data=dict(root="objects", task="segmentation")), "^no features of"),
        (
            dict(
                data=dict(root="objects", features="objects_features", task="segmentation"),
                loss=LossConfig(class_weights="balanced"),
            ),
            "samples a fixed share of patches with objects; remove it",
        ),
    ],
    ids=str,
)
def test_what_does_not_go_with_kept_features_is_refused_in_one_line(
    root, tmp_path, changes, words, monkeypatch
):
    monkeypatch.chdir(root)
    config = config_of(root, tmp_path, "classification", {})
    data = replace(config.data, **changes.get("data", {}))
    with pytest.raises((ValueError, FileNotFoundError), match=words) as caught:
        run(replace(config, **changes | {"data": data}))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(
    ("task", "head"),
    [
        ("classification", dict(head_hidden=16)),
        ("segmentation", dict()),
        ("segmentation", dict(head_hidden=16, head_depth=1)),
    ],
)
def test_two_processes_train_the_head_of_one(root, tmp_path, task, head):
    for size in (1, 2):
        train_on(size, config_of(root, tmp_path / str(size), task, head))
    one, two = (load_model(tmp_path / f"{size}/small/best.safetensors") for size in (1, 2))
    torch.testing.assert_close(dict(two.state_dict()), dict(one.state_dict()), rtol=1e-4, atol=1e-5)
