"""Images keep the geometry of training: in its batches, in its weights, and where it goes on."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.resumed_runs import assert_resumes
from tests.helpers.small_runs import rows, small_config
from tests.helpers.tools import assert_one_error, written
from visionattn.command import main
from visionattn.data.batches import Batch
from visionattn.model_config import ModelConfig
from visionattn.models.building import build_model
from visionattn.models.weights import DataSpec, load_model
from visionattn.training.evaluate import evaluate

MODEL = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "horizon": 1}
BEST = "--checkpoint=checkpoints/run/best.safetensors"
SHAPES = [(24, 40), (40, 24), (33, 47), (64, 16), (20, 20), (56, 56)]


@pytest.fixture(autouse=True)
def pages(tmp_path, monkeypatch):
    """Pages of many shapes whose class is their brightness."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(3)
    for split, number in [("train", i) for i in range(18)] + [("val", i) for i in range(8)]:
        folder = tmp_path / "pages" / split / ("dark", "light")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        levels = draw.integers(0, 90, (*SHAPES[number % 6], 3)) + 120 * (number % 2)
        Image.fromarray(levels.astype(np.uint8)).save(folder / f"{number:02}.png")


def train(*flags):
    options = "--data.name=folder --data.root=pages --data.workers=0 --run=run --epochs=2 "
    options += "--model.name=scaleformer_vit_t --optim.warmup_epochs=0.5 --batch_size=4 --threads=1"
    return main(["train", *options.split(), f"--model.args={json.dumps(MODEL)}", *flags])


def validate(capsys, *flags):
    capsys.readouterr()
    code = main(["validate", BEST, *flags])
    return code, capsys.readouterr()


def test_a_checkpoint_keeps_how_its_images_were_seen_and_validation_says_it(capsys):
    assert train("--data.max_patches=24") == 0
    spec = load_model("checkpoints/run/best.safetensors").data_spec
    assert (spec.fit, spec.img_size, spec.max_patches) == ("native", None, 24)
    code, printed = validate(capsys)
    first, _, row = printed.out.splitlines()
    assert code == 0 and row.split()[0] == "own"
    assert first.endswith("preprocessing: native size, at most 24 patches")
    best = max(float(row["val_accuracy"]) for row in rows(Path("checkpoints/run")))
    assert f"{100 * best:.2f}" == row.split()[2]
    code, printed = validate(capsys, "--fit=pad", "--img-size", "32", "48")
    assert code == 0 and "preprocessing: pad, at several sizes\n" in printed.out


CONTRADICTIONS = {
    "--data.fit=pad": "data.fit applies only to training; pass the resizing with --fit",
    "--fit=stretch": "fit stretch needs img_size",
    "--max-patches=9 --img-size=32": "both limit the image size",
    "--max-patches=0": "max_patches must be above 0, got 0",
    "--data.augment=light": "data.augment applies only to training; remove it",
    "--data.sampler=balanced": "data.sampler applies only to training; remove it",
    "--data.mean 0.5 0.5 0.5": "data.mean applies only to training; remove it",
    "--fit=crop --img-size=30": "is not a whole number of 8-pixel patches",
}


def test_validation_refuses_in_one_line_what_contradicts(capsys):
    assert train("--data.max_patches=24", "--epochs=1") == 0
    capsys.readouterr()
    for flags, line in CONTRADICTIONS.items():
        assert main(["validate", BEST, *flags.split()]) == 2
        assert_one_error(capsys, line)


def rename_a_class(root):
    for split in ("train", "val"):
        (root / split / "dark").rename(root / split / "dim")


def exchange_a_file(root):
    Image.fromarray(np.full((24, 40, 3), 77, np.uint8)).save(root / "train" / "dark" / "06.png")


def swap_labels(root):
    for name, other in (("dark/00", "kept"), ("light/01", "dark/00"), ("kept", "light/01")):
        (root / "train" / f"{name}.png").rename(root / "train" / f"{other}.png")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (rename_a_class, "missing classes: dark; new classes: dim"),
        (exchange_a_file, "1 of 18 train images differ (pages/train/dark/06.png)"),
        (swap_labels, "2 of 18 train images differ (pages/train/dark/00.png, pages/train/light/01"),
    ],
)
def test_a_run_does_not_go_on_with_other_images_of_equal_number(tmp_path, capsys, change, line):
    assert train("--data.max_patches=24", "--epochs=1") == 0
    before = written(tmp_path / "checkpoints")
    change(tmp_path / "pages")
    capsys.readouterr()
    assert train("--data.max_patches=24", "--resume", "--epochs=2") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: the images changed since the start of the run: {line}")
    assert error.count("\n") == 1
    assert written(tmp_path / "checkpoints") == before


def test_a_run_goes_on_with_its_images_elsewhere(tmp_path):
    assert train("--data.max_patches=24", "--epochs=1") == 0
    (tmp_path / "pages").rename(tmp_path / "moved")
    assert train("--data.max_patches=24", "--resume", "--epochs=2", "--data.root=./moved/") == 0


def test_a_run_on_images_of_many_sizes_goes_on_bit_for_bit(tmp_path):
    data = {"name": "folder", "root": "pages", "augment": "light", "batch_patches": 40}
    config = small_config(tmp_path, data=data | {"img_size": None}, epochs=3, save_every=2)
    config = replace(config, model=ModelConfig("scaleformer_vit_t", MODEL))
    assert_resumes(config, tmp_path, 10)


def test_padding_changes_no_evaluation():
    torch.manual_seed(0)
    spec = DataSpec(3, 2, (), (0.5,) * 3, (0.25,) * 3, None, 64, "pad")
    model, _ = build_model(ModelConfig("scaleformer_vit_t", MODEL), spec)
    images, labels = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8), torch.tensor([0, 1])
    sizes = torch.tensor([[64, 32], [24, 64]])
    alone = [
        Batch(images[i : i + 1, :, :height, :width], labels[i : i + 1])
        for i, (height, width) in enumerate(sizes.tolist())
    ]
    padded, single, whole = (
        evaluate(model, batches, spec, device=torch.device("cpu")).loss
        for batches in ([Batch(images, labels, sizes)], alone, [Batch(images, labels)])
    )
    assert padded == pytest.approx(single, rel=1e-5) and abs(whole - single) > 1e-4


def test_a_model_of_timm_sees_padding_as_black_and_the_run_says_so(capsys):
    flags = ["--model.name=vit_tiny_patch16_224", "--data.fit=pad", "--data.img_size=32"]
    small = {"embed_dim": 12, "depth": 1, "num_heads": 2, "dynamic_img_size": True}
    assert train(*flags, f"--model.args={json.dumps(small)}", "--epochs=1") == 0
    assert "vit_tiny_patch16_224 sees padding as black" in capsys.readouterr().out
    code, printed = validate(capsys)
    first = printed.out.splitlines()[0]
    assert code == 0 and first.endswith(
        "letterbox to 32 x 32 px; this model sees the padding as black"
    )


def test_a_size_of_two_sides_is_kept_in_what_a_run_says_to_try_next(capsys):
    assert train("--data.fit=stretch", "--data.img_size", "24", "40", "--epochs=1") == 0
    lines = capsys.readouterr().out.splitlines()
    [command] = [shlex.split(line) for line in lines if line.startswith("  ")]
    sizes = "[[24, 40], [40, 64], [48, 80]]"
    assert command[-2:] == ["--img-size", sizes]
    assert validate(capsys, "--img-size", sizes)[0] == 0
