"""Configurations of runs with one wrong value, and files that are cut off or overwritten."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.malformed.mutations import (
    ABSURD,
    BYTES,
    at,
    both,
    broken_trees,
    few,
    put,
    replace_by_folder,
    rewrite,
)
from tests.malformed.runner import Case
from tests.malformed.valid import (
    CONVERT,
    DISTIL,
    EXTRACT,
    GENERATE,
    GO_ON,
    PREDICT,
    PREDICT_MASKS,
    RESUME,
    SEGMENTED,
    SHARE,
    START,
    START_MASKS,
    TEACHER,
    VALIDATE,
    WRITER,
)

CONFIG_KEYS = {
    "model": {"name": "x", "args": {"depth": 1}, "grad_checkpointing": False},
    "data": {
        "name": "folder",
        "root": "images",
        "img_size": 16,
        "val_fraction": 0.1,
        "workers": 0,
        "mean": [0.5, 0.5, 0.5],
    },
    "optim": {"name": "adamw", "lr": 0.1, "warmup_epochs": 0.5, "clip_grad": 1.0, "accumulate": 1},
    "epochs": 1,
    "batch_size": 4,
    "seed": 0,
    "device": "auto",
    "amp": "none",
    "threads": 1,
    "compile": False,
}
FINE_IN_CONFIGS = (
    "data.mean=null",
    "data.root=text",
    "optim.clip_grad=null",
    "threads=null",
    "data.img_size=null",
)


STATUS = {
    "status": "finished",
    "result": {
        "best_epoch": 1,
        "validation_accuracy": 0.5,
        "train_seconds": 2.0,
        "test_accuracy": 0.5,
        "test_images": 9,
    },
}
"""What a run says of its end."""


def cases() -> Iterator[Case]:
    """Return cases of a run's configuration, for the tools that read it."""
    yield from bytes_cases()
    readers = (("train", "--config", "run/config.yaml", "--run", "out"), VALIDATE)
    readers += (("sweep", "--base", "run/config.yaml", "--heads", "2", "--output", "out"),)
    number = 0
    for name, tree in few(broken_trees(CONFIG_KEYS), 6):
        place, _, kind = name.partition("=")
        if not kind or name in FINE_IN_CONFIGS or place == "all":
            continue
        number += 1
        reader = readers[number % 3]
        if reader is VALIDATE and (
            kind in ABSURD or place.startswith(("model", "optim", "device", "data.img_size"))
        ):
            reader = readers[0]
        change = change_yaml("run/config.yaml", graft_into(place, tree))
        yield Case(f"config {reader[0]} {name}", reader, change)


def graft_into(place: str, tree: Any) -> Callable[[Any], Any]:
    """Return what puts a wrong value into a configuration, of which each group is there."""
    path = tuple(int(key) if key.isdigit() else key for key in place.split("."))

    def change(config: Any) -> Any:
        if path[-1] == 0:
            return put(config, path[:-1], [at(tree, path), 1.0])
        return put(config, path, at(tree, path))

    return change


def change_yaml(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Return what changes the content of a YAML file."""

    def apply(folder: Path) -> None:
        path = folder / name
        content = change(yaml.safe_load(path.read_text()))
        path.write_text(yaml.safe_dump(content))

    return apply


READERS = {
    "run/best.safetensors": (PREDICT, VALIDATE, EXTRACT, START, SHARE),
    "weights.pth": (
        ("train", "--config", "train.yaml", "--run", "out", "--init_from", "weights.pth"),
        ("features", "--model", "taylorshift_vit_t", "--checkpoint", "weights.pth")
        + ("--images", "images", "--output", "out", "--workers", "0"),
    ),
    "train.yaml": (("train", "--config", "train.yaml", "--run", "out"),),
    "base.yaml": (("sweep", "--base", "base.yaml", "--heads", "2", "--output", "out"),),
    "photos/train/masks/1.png": (START_MASKS,),
    SEGMENTED: (PREDICT_MASKS,),
    WRITER: (GENERATE,),
    TEACHER: (CONVERT, DISTIL),
    "student/distil.yaml": (GO_ON,),
    "student/b/best.safetensors": (GO_ON,),
    "run/config.yaml": (VALIDATE, SHARE),
    "run/status.json": (SHARE,),
    "profile/memory.csv": (("report", "profile/memory.csv", "--output", "page.html"),),
}
HARMLESS = {
    ("photos/train/masks/1.png", "less one byte"),
    ("train.yaml", "less one byte"),
    ("base.yaml", "less one byte"),
    ("run/config.yaml", "less one byte"),
    ("profile/memory.csv", "less one byte"),
    ("profile/memory.csv", "half"),
    ("run/best.safetensors", "middle off"),
    ("student/b/best.safetensors", "middle off"),
    ("run/status.json", "less one byte"),
    ("student/distil.yaml", "less one byte"),
}


def bytes_cases() -> Iterator[Case]:
    """Return cases of files that are cut off, overwritten, or other files altogether."""
    for kind, change in BYTES.items():
        alone = both(rewrite("run/last.pt", change), lambda f: (f / "run/previous.pt").unlink())
        yield Case(f"bytes run/last.pt {kind}", RESUME, alone)
    for name, readers in READERS.items():
        for kind, change in BYTES.items():
            if (name, kind) in HARMLESS or (name.endswith("yaml") and kind in ("half", "empty")):
                continue
            for number, reader in enumerate(readers):
                told = dict(writes=kept(name))
                yield Case(f"bytes {name} {kind} {number}", reader, rewrite(name, change), **told)
        for number, reader in enumerate(readers):
            change, told = replace_by_folder(name), dict(writes=kept(name))
            yield Case(f"bytes {name} is a folder {number}", reader, change, **told)


def kept(name: str) -> tuple[str, ...]:
    """Return the files that a distillation writes anew before it goes on."""
    return ("student/distil.yaml",) if name.startswith("student") else ()
