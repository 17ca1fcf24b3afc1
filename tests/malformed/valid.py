"""A folder of valid files that the tools wrote and read back: what malformed input is made of.

``images`` (two classes), ``run`` (a training with averaged weights), ``base.yaml``, ``features``,
``profile``, ``weights.pth`` (of another project), a timm ViT in ``teacher.safetensors`` and
``teacher.pth``, ``converted.safetensors``, and ``student`` (its distillation in two stages, of
``distil.yaml``);
``photos`` (images with masks), and ``segmented`` (a training of ``masked.yaml`` on them);
``writer`` (a training of ``writing.yaml``, which writes the images of ``images``).
"""

import contextlib
import io
from pathlib import Path

import numpy as np
import torch
import yaml
from PIL import Image

from tests.helpers.report_folders import memory_rows, write_rows

MODEL = {"patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 2, "mlp_ratio": 1}
TRAINING = {
    "model": {"name": "taylorshift_vit_t", "args": MODEL},
    "data": {"name": "folder", "root": "images", "fit": "crop", "img_size": 16, "workers": 0},
    "optim": {"lr": 1e-3, "warmup_epochs": 0.5, "ema_decay": 0.9},
    "epochs": 1,
    "batch_size": 2,
    "threads": 1,
    "output": ".",
}
MASKED_TRAINING = TRAINING | {
    "model": {"name": "taylorshift_vit_t", "args": MODEL | {"head_stride": 4}},
    "data": TRAINING["data"]
    | {"root": "photos", "task": "segmentation", "masks": {"classes": ["a", "b", "c"]}},
}
WRITING_TRAINING = TRAINING | {
    "model": {
        "name": "pixel_decoder",
        "args": {"embed_dim": 8, "depth": 1, "num_heads": 2, "reach": 1, "conditioned": True},
    },
    "data": TRAINING["data"] | {"task": "generate", "img_size": 4},
}
WRITER = "writer/best.safetensors"
SEGMENTED = "segmented/best.safetensors"
DISTILLING = {
    "teacher": "teacher.safetensors",
    "data": {"name": "folder", "root": "images", "workers": 0},
    "a": {"epochs": 1},
    "b": {"epochs": 1},
    "batch_size": 2,
    "threads": 1,
    "output": ".",
}


def write(folder: Path) -> None:
    """Write everything into an empty folder; the tools print nothing."""
    write_images(folder / "images")
    configuration = TRAINING | {"optim": TRAINING["optim"] | {"ema_decay": None}}
    (folder / "base.yaml").write_text(yaml.safe_dump(configuration))
    (folder / "train.yaml").write_text(yaml.safe_dump(TRAINING))
    (folder / "masked.yaml").write_text(yaml.safe_dump(MASKED_TRAINING))
    (folder / "writing.yaml").write_text(yaml.safe_dump(WRITING_TRAINING))
    write_masks(folder / "photos")
    write_rows(folder / "profile" / "memory.csv", memory_rows())
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as said:
        run("train", "--config", "train.yaml", "--run", "run")
        run("train", "--config", "masked.yaml", "--run", "segmented")
        run("train", "--config", "writing.yaml", "--run", "writer")
        run(*FEATURES, "--output", "features")
        weights = torch.load("run/last.pt", weights_only=True)["model"]
        torch.save({"state_dict": weights, "epoch": 3}, "weights.pth")
        write_teacher()
    assert said.getvalue()


FEATURES = ("features", "--checkpoint", "run/best.safetensors", "--images", "images")
FEATURES += ("--workers", "0", "--threads", "1")


def run(*argv: str) -> None:
    """Run a command, which succeeds."""
    from visionattn.command import main

    code = main(argv)
    assert code == 0, f"visionattn {' '.join(argv)} ended with {code}"


def write_teacher() -> None:
    """Write a timm ViT as a training keeps it, its state dict, and the model that it becomes."""
    import timm

    from visionattn.models.weights import DataSpec, save_model

    body = {"img_size": 16, **MODEL, "depth": 2}
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=2, **body)
    spec = DataSpec(3, 2, ("cat", "dog"), (0.5,) * 3, (0.5,) * 3, None, 16)
    save_model(TEACHER, vit, "vit_tiny_patch16_224", body, spec)
    torch.save(vit.state_dict(), "teacher.pth")
    run("convert", TEACHER, "--output", "converted.safetensors")
    Path("distil.yaml").write_text(yaml.safe_dump(DISTILLING))
    run("distil", "--config", "distil.yaml", "--run", "student")


def write_images(folder: Path) -> None:
    """Write four images to train on and two to validate on, of each of two classes."""
    drawn = np.random.default_rng(5)
    for split, count in (("train", 4), ("val", 2)):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = drawn.integers(0, 256, (16, 16, 3), np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")


def write_masks(folder: Path) -> None:
    """Write eight images with masks of three classes to train on, and two to validate on."""
    drawn = np.random.default_rng(6)
    for split, count in (("train", 8), ("val", 2)):
        for kind, most, shape in (("images", 256, (16, 16, 3)), ("masks", 3, (16, 16))):
            (folder / split / kind).mkdir(parents=True)
            for number in range(count):
                pixels = drawn.integers(0, most, shape, np.uint8)
                Image.fromarray(pixels).save(folder / split / kind / f"{number}.png")


RESUME = ("train", "--config", "run/config.yaml", "--resume", "--epochs", "2")
PREDICT = ("predict", "--checkpoint", "run/best.safetensors", "--images", "images")
PREDICT += ("--workers", "0", "--threads", "1")
LOOK = ("look", "--checkpoint", "run/best.safetensors", "--images", "images/val/cat/0.png")
LOOK += ("--threads", "1", "--output", "out")
GENERATE = ("generate", WRITER, "--count", "2", "--threads", "1", "--output", "out")
VALIDATE = ("validate", "--checkpoint", "run/best.safetensors", "--threads", "1")
SHARE = ("share", "run/best.safetensors", "--to", "out")
START_MASKS = ("train", "--config", "masked.yaml", "--run", "out")
PREDICT_MASKS = ("predict", "--checkpoint", SEGMENTED, "--images", "photos/val/images")
PREDICT_MASKS += ("--output", "out", "--threads", "1", "--workers", "0")
EXPORT = ("export", "run/best.safetensors", "--format", "torch", "--output", "out.pt2")
START = ("train", "--config", "train.yaml", "--run", "out", "--init_from", "run/best.safetensors")
TEACHER = "teacher.safetensors"
DISTIL = ("distil", "--config", "distil.yaml", "--run", "out")
GO_ON = ("distil", "--config", "student/distil.yaml", "--resume", "--stages", "a", "b", "c")
CONVERT = ("convert", "--teacher", TEACHER, "--output", "out.safetensors")
EXTRACT = (*FEATURES, "--output", "features")
"""Commands as they are called on these files."""
