"""Images keep the geometry of training: in its batches, in its weights, and where it goes on."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.tools import load_tool
from visionattn.data.batches import Batch
from visionattn.models.weights import load_model
from visionattn.training.evaluate import evaluate

MODEL = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "horizon": 1}
SHAPES = [(24, 40), (40, 24), (33, 47), (64, 16), (20, 20), (56, 56)]


@pytest.fixture(autouse=True)
def pages(tmp_path, monkeypatch):
    """Pages of many shapes whose class is their brightness."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(3)
    for split, count in (("train", 18), ("val", 8)):
        for number in range(count):
            folder = tmp_path / "pages" / split / ("dark", "light")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            shape = SHAPES[number % len(SHAPES)]
            levels = draw.integers(0, 90, (*shape, 3)) + 120 * (number % 2)
            Image.fromarray(levels.astype(np.uint8)).save(folder / f"{number:02}.png")


def train(*flags):
    options = ["--data.name=folder", "--data.root=pages", "--data.workers=0", "--run=run"]
    options += ["--model.name=scaleformer_vit_t", f"--model.args={json.dumps(MODEL)}"]
    options += ["--epochs=2", "--optim.warmup_epochs=0.5", "--batch_size=4", "--threads=1"]
    return load_tool("train")([*options, *flags])


def validate(capsys, *flags):
    capsys.readouterr()
    code = load_tool("validate")(["--checkpoint=checkpoints/run/best.safetensors", *flags])
    return code, capsys.readouterr()


def test_a_checkpoint_keeps_how_its_images_were_seen_and_validation_says_it(capsys):
    assert train("--data.max_patches=24") == 0
    spec = load_model("checkpoints/run/best.safetensors").data_spec
    assert (spec.fit, spec.img_size, spec.max_patches) == ("native", None, 24)
    code, printed = validate(capsys)
    first, _, row = printed.out.splitlines()
    assert code == 0 and row.split()[0] == "own"
    assert first.endswith("preprocessing: native size, at most 24 patches")
    kept = json.loads(Path("checkpoints/run/metrics.jsonl").read_text().splitlines()[-1])
    assert f"{100 * kept['val_accuracy']:.2f}" == row.split()[2]

    code, printed = validate(capsys, "--fit=pad", "--img-size", "32", "48")
    assert code == 0 and "preprocessing: pad, at several sizes\n" in printed.out


CONTRADICTIONS = {
    "--data.fit=pad": "data.fit applies only to training; pass the resizing with --fit",
    "--fit=stretch": "fit stretch needs img_size",
    "--max-patches=9 --img-size=32": "both limit the image size",
    "--max-patches=0": "max_patches must be above 0, got 0",
    "--data.augment=light": "data.augment applies only to training; remove it",
    "--fit=crop --img-size=30": "is not a whole number of 8-pixel patches",
}


def test_validation_refuses_in_one_line_what_contradicts(capsys):
    assert train("--data.max_patches=24", "--epochs=1") == 0
    for flags, line in CONTRADICTIONS.items():
        code, printed = validate(capsys, *flags.split())
        assert code == 2 and printed.err.count("\n") == 1 and line in printed.err, printed.err


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
    folder = tmp_path / "checkpoints" / "run"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    change(tmp_path / "pages")
    capsys.readouterr()
    assert train("--data.max_patches=24", "--resume", "--epochs=2") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the images changed since the start of the run: ")
    assert line in error and error.count("\n") == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_run_goes_on_with_its_images_elsewhere(tmp_path):
    assert train("--data.max_patches=24", "--epochs=1") == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "pages").rename(tmp_path / "elsewhere" / "moved")
    moved = "--data.root=elsewhere/moved"
    assert train("--data.max_patches=24", "--resume", "--epochs=2", moved) == 0


def test_a_run_on_images_of_many_sizes_goes_on_bit_for_bit(capsys):
    flags = ("--data.augment=light", "--data.batch_patches=40", "--epochs=3", "--save_every=2")
    assert train(*flags, "--run=whole") == 0
    # Ended amid its second epoch.
    from visionattn.training.trainer import Trainer

    real, calls = Trainer.step, iter(range(100))

    def killed(self, group, *more):
        if next(calls) == 9:
            raise KeyboardInterrupt
        return real(self, group, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", killed)
        assert train(*flags, "--run=cut") != 0
    assert train(*flags, "--run=cut", "--resume") == 0
    states = [
        torch.load(f"checkpoints/{run}/last.pt", weights_only=True) for run in ("whole", "cut")
    ]
    for key, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][key]), key
    assert states[0]["position"]["step"] == states[1]["position"]["step"]


def test_padding_changes_no_evaluation(capsys):
    torch.manual_seed(0)
    assert train("--data.fit=pad", "--data.img_size=64", "--epochs=1") == 0
    model = load_model("checkpoints/run/best.safetensors")
    draw = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (2, 3, 64, 64), generator=draw, dtype=torch.uint8)
    labels = torch.tensor([0, 1])
    sizes = torch.tensor([[64, 32], [24, 64]])
    cpu = torch.device("cpu")
    padded = evaluate(model, [Batch(images, labels, sizes)], model.data_spec, device=cpu)
    alone = [
        Batch(images[i : i + 1, :, :height, :width], labels[i : i + 1])
        for i, (height, width) in enumerate(sizes.tolist())
    ]
    single = evaluate(model, alone, model.data_spec, device=cpu)
    assert padded.loss == pytest.approx(single.loss, rel=1e-5)
    whole = evaluate(model, [Batch(images, labels)], model.data_spec, device=cpu)
    assert abs(whole.loss - single.loss) > 1e-4


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
    commands = [shlex.split(line) for line in lines if line.startswith("  ")]
    [validation] = (words[words.index("visionattn") + 1 :] for words in commands)
    assert validation[-2:] == ["--img-size", "[[24, 40], [40, 64], [48, 80]]"]
    assert load_tool("validate")(validation[1:]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["24x40", "40x64", "48x80"]
