"""What the commands in pages need to run in seconds: small inputs under the names that the pages
use, flags that make the commands short, and the commands that do not run here, with the reason.
"""

import csv
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import albumentations as A
import numpy as np
import tifffile
import timm
from PIL import Image
from safetensors.torch import save_file

from tests.helpers.documented_commands import ROOT
from visionattn.cli.parsing import split_options
from visionattn.cli.shipped_configs import shipped

Run = Callable[[list[str]], None]
"""Run a subcommand of ``visionattn`` in the present folder, and raise if it fails."""

CLASSES = ("ash", "birch")
MASKED = ("ground", "building", "road", "tree", "water")

NOT_RUN = {
    r"make demo|\. \.venv": "installs an environment; `train --config digits` is the same run",
    r"make test|make lint|python -m tests\.": "are the tests themselves",
    r"make docs": "tests/test_api_reference.py builds the pages",
    r"make gpu|benchmark\.py gpu|gpu\.launch_tuning": "need a GPU; tests/lab/gpu rehearses them",
    r"pip install": "needs a package index",
    r"tensorboard": "a server that does not end",
    r"--log mlflow": "mlflow and wandb are not installed for the tests",
    r"--engine ray|ray start": "a cluster; tests/integrations has one of Ray",
    r"hf-hub:": "uploads",
    r"--nnodes": "several machines",
    r"cifar10_patch4|idrid": "need published data; tests/data reads small copies",
    r"benchmark targets|benchmark papers": "hours; tests/lab runs them at small sizes",
    r"rows\.py|docs/figures/|docs/examples/": "a script, not a command; its own tests run it",
}
"""Commands that do not run here, as regular expressions, and why."""

TRAIN = ["--epochs=1", "--optim.warmup_epochs=0.5", "--data.workers=0", "--threads=1"]
FEW = ["--data.args.train_images=16", "--data.args.eval_images=8"]
MASKS = ["--data.crop=64", "--data.crops=1"]


def short_flags(name: str, words: list[str]) -> list[str]:
    """Return flags to append to a subcommand, so that it ends in seconds. The last flag counts."""
    text = " ".join(words)
    drawn = re.search(r"canvas|documents|gated|--run mean", text) is not None
    masks = "segmentation" in text
    if name == "train":
        few = ["--data.img_size=64"] if "documents" in text else []
        batch = ["--batch_size=64" if "digits" in text else "--batch_size=8"]
        slow = "imagenet_s" in text or "pixel_decoder" in text
        small = ["--model.args.depth=1"] if slow else []
        # Commands of a page that train in the same folder are alternatives.
        small += [] if "--resume" in words else ["--overwrite"]
        crops = ["--data.crops=1"] if "--data.features" in words else MASKS
        return TRAIN + batch + (FEW + few if drawn else []) + (crops if masks else []) + small
    if name == "validate":
        sizes = ["--img_size=64"] if "documents" in text else []
        return ["--batch_size=4", *(FEW[1:] if drawn else []), *sizes]
    if name == "distil":
        of_stages = [f"--{stage}.epochs=1" for stage in "abc"]
        side = 112 if "s14" in text else 224
        size = ["--data.fit=stretch", f"--data.img_size={side}"] if "--data.root" in words else FEW
        return [*of_stages, *size, "--data.workers=0", "--batch_size=4"]
    if name == "features" and "--probe" in words and drawn:
        return ["--data_args.eval_images=64", "--img_size=64", "--workers=0"]
    if name == "generate":
        return ["--count=2"]
    if name == "sweep":
        settings = ["epochs=1", "optim.warmup_epochs=0.1", "data.workers=0"]
        settings += ["model.args.embed_dim=16", "model.args.depth=1"]
        return ["--heads", "2", "--attention=kernelized", "--seeds", "0", "--set", *settings]
    if name == "profile":
        return ["--img_size=64"]
    if name == "benchmark":
        size = ["--img_size=64"] if words[0] == "models" else ["--tokens=64"]
        return [*size, "--seconds=0.01", "--rounds=2"]
    if name == "predict" and "--outline" in words:
        return ["--outline=building"]
    return []


def write_classes(root: Path, bands: int = 3) -> None:
    """Write 12 images per class, named after patients; TIFF for more than three bands."""
    for label, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for number in range(12):
            pixels = np.random.default_rng((label, number)).integers(0, 99, (32, 32, bands))
            pixels = (pixels + 90 * label).astype(np.uint8)
            path = root / name / f"patient{number // 2}_{number}"
            if bands == 3:
                Image.fromarray(pixels).save(f"{path}.png")
            else:
                how = dict(photometric="minisblack", planarconfig="contig")
                tifffile.imwrite(f"{path}.tif", pixels, **how)


def write_masks(root: Path) -> None:
    """Write 8 images and masks of five classes, with their names."""
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    (root / "classes.yaml").write_text(f"classes: [{', '.join(MASKED)}]\n")
    for number in range(8):
        mask = np.random.default_rng(number).integers(0, 5, (8, 8)).repeat(8, 0).repeat(8, 1)
        Image.fromarray(mask.astype(np.uint8)).save(root / "masks" / f"{number}.png")
        pixels = np.stack([50 * mask] * 3, -1).astype(np.uint8)
        Image.fromarray(pixels).save(root / "images" / f"{number}.png")


def write_table(path: Path, root: Path, columns: list[str]) -> None:
    """Write a table of labels, or of the given columns, for the images below a folder."""
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", *(columns or ["label"])])
        for number, image in enumerate(sorted(root.rglob("*.png"))):
            values = [number / 7 + k for k in range(len(columns))] or [image.parent.name]
            rows.writerow([image.relative_to(root), *values])


def write_image(path: Path) -> None:
    """Write a picture of 96 x 64 px in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    if path.suffix in (".tif", ".svs"):
        tifffile.imwrite(path, pixels, tile=(32, 32), photometric="rgb")
    else:
        Image.fromarray(pixels).save(path)


class Inputs:
    """Makes the files that a command needs and that no earlier command of the page wrote."""

    def __init__(self, runs: Path, run: Run):
        self.runs, self.run = runs, run

    def provide(self, name: str, words: list[str]) -> list[str]:
        """Make the inputs in the present folder, and return the words with placeholders filled."""
        words = ["page.png" if word == "IMAGE..." else word for word in words]
        words = [re.sub(r"<run>|\bRUN\b", "finetune", word) for word in words]
        text = " ".join(words)
        flags = defaultdict(list)
        for flag, values in split_options(["--first", *words]):
            flags[flag.replace("-", "_")] = values
        for file in flags["teacher"] + (flags["checkpoint"] if flags["model"] else []):
            if file.endswith(".safetensors") and not Path(file).exists():
                vit = timm.create_model("vit_small_patch14_dinov2", num_classes=0)
                save_file(vit.state_dict(), file)
        for flag in ("first", "checkpoint", "config", "init_from", "runs"):
            for word in flags[flag]:
                self.provide_run(word, masks="segmentation" in word or "--save" in words)
        for root in map(Path, flags["data.root"]):
            if not root.exists() and "segmentation" in text:
                write_masks(root)
            elif not root.exists():
                write_classes(root, 4 if "--data.bands" in words else 3)
            for table in flags["data.labels"]:
                write_table(Path(table), root, flags["data.columns"])
        for path in map(Path, flags["images"] + flags["complete"] + flags["first"][1:]):
            if path.suffix in (".tif", ".svs", ".png") and not path.exists():
                write_image(path)
            elif path.name == "images" and not path.exists():
                write_masks(path.parent)
            elif not path.suffix and not path.exists() and name != "benchmark":
                for number in range(2):
                    write_image(path / f"{number}.png")
        for file in flags["data.augment"]:
            if file.endswith(".yaml"):
                A.save(A.Compose([A.HorizontalFlip()]), file, "yaml")
        return words

    def provide_run(self, word: str, *, masks: bool) -> None:
        """Make the checkpoint, or the folder of a run, of this name; other words are ignored. With
        ``masks`` it is of a segmentation.
        """
        path = Path(word)
        if path.exists():
            return
        if path.parts[:1] == ("checkpoints",):
            name = re.sub(r"_fold\dof\d$", "", path.parts[1])
            shutil.copytree(self.trained(name), Path(*path.parts[:2]))
        elif path.suffix == ".safetensors" or word == "CHECKPOINT":
            usual = "finetune_segmentation" if masks else "finetune"
            shutil.copyfile(self.trained(usual) / "best.safetensors", path)

    def trained(self, name: str) -> Path:
        """Return the folder of a short training of a configuration of the package."""
        folder = self.runs / "checkpoints" / name
        if not folder.exists():
            assert name in shipped(), f"no configuration {name}: let the page train it"
            words = ["--config", name, "--output", str(self.runs / "checkpoints")]
            if name.startswith("finetune"):
                words += ["--data.root", str(self.runs / name)]
            self.run(["train", *self.provide("train", words), *short_flags("train", words)])
        return folder


def reason_not_to_run(text: str) -> str | None:
    """Return why a command does not run here; None for all others."""
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, text)), None)


def link_repository(folder: Path) -> None:
    """Make the folders of a clone that commands name."""
    (folder / "docs").mkdir()
    for name in ("tools", "configs", "docs/figures"):
        (folder / name).symlink_to(ROOT / name)
