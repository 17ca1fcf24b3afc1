"""Weights whose description, tensors or head are wrong."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.malformed.mutations import GARBLED_JSON, broken_trees, few, shown
from tests.malformed.runner import Case
from tests.malformed.valid import EXPORT, EXTRACT, PREDICT, SHARE, VALIDATE


def change_metadata(change: Callable[[dict], Any]) -> Callable[[Path], None]:
    """Return what changes the metadata of the best weights."""

    def apply(folder: Path) -> None:
        path = folder / "run" / "best.safetensors"
        metadata, tensors = read_weights(path)
        save_file(tensors, path, metadata=change(metadata))

    return apply


def change_json(key: str, tree: Any) -> Callable[[Path], None]:
    """Return what writes a tree as one text of the metadata."""
    text = tree if isinstance(tree, str) else json.dumps(tree)
    return change_metadata(lambda metadata: metadata | {key: text})


def read_weights(path: Path) -> tuple[dict, dict]:
    """Return the metadata and the tensors of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


ARGS = {"patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 2, "mlp_ratio": 1, "img_size": 16}
SPEC = {
    "in_chans": 3,
    "num_classes": 2,
    "class_names": ["cat", "dog"],
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "encoding": None,
    "img_size": [16, 16],
    "fit": "crop",
    "max_patches": None,
    "bands": None,
    "value_range": None,
    "range_found": False,
    "page": None,
}
LATER = ("fit", "max_patches", "bands", "value_range", "range_found", "page")
"""What files of format 1 do not say."""


def cases() -> Iterator[Case]:
    """Return cases of weights whose description or tensors are wrong."""
    readers = (PREDICT, VALIDATE, EXTRACT)
    number = 0
    for key, tree in (("args", ARGS), ("data", SPEC)):
        for name, broken in few(broken_trees(tree), 4):
            place, _, kind = name.partition("=")
            if place.removesuffix(" missing") in LATER and " missing" in place:
                continue
            if (key, name) in FINE_IN_WEIGHTS:
                continue
            number += 1
            reader = readers[number % 2]
            yield Case(f"weights {key}.{name}", reader, change_json(key, broken))
        for text in GARBLED_JSON:
            number += 1
            yield Case(
                f"weights {key}={shown(text)!r}", readers[number % 3], change_json(key, text)
            )
        for reader in readers:
            change = change_metadata(lambda m, key=key: {k: v for k, v in m.items() if k != key})
            yield Case(f"weights {reader[0]} without {key}", reader, change)
    for name, change in METADATA.items():
        for reader in (*readers[:2], SHARE, EXPORT):
            yield Case(f"weights {reader[0]} {name}", reader, change_metadata(change))
    for name, change in TENSORS.items():
        for reader in (*readers[:2], SHARE):
            yield Case(f"weights {reader[0]} {name}", reader, change_tensors(change))


FINE_IN_WEIGHTS = {
    ("args", "all={}"),
    ("data", "img_size=number"),
    ("data", "max_patches=number"),
    ("data", "page=number"),
    ("data", "class_names=list"),
    ("args", "mlp_ratio=true"),
    ("args", "img_size=true"),
    ("args", "img_size missing"),
    ("args", "img_size=huge"),
    ("args", "img_size=negative"),
    ("args", "num_heads missing"),
    ("data", "img_size=nan"),
    ("data", "mean.0=huge"),
    ("data", "mean.0=negative"),
}
METADATA: dict[str, Callable[[dict], Any]] = {
    "of no metadata": lambda metadata: None,
    "of another format": lambda metadata: metadata | {"format": "pt"},
    "of version 99": lambda metadata: metadata | {"version": "99"},
    "of version text": lambda metadata: metadata | {"version": "x" * 3000},
    "of no model": lambda metadata: metadata | {"model": ""},
    "of an unknown model": lambda metadata: metadata | {"model": "x" * 5000},
    "of a model of the hub": lambda metadata: metadata | {"model": "hf-hub:a/b"},
    "of a model on the disk": lambda metadata: metadata | {"model": "local-dir:/"},
    "of another model": lambda metadata: metadata | {"model": "resnet18"},
    "that load others": lambda metadata: metadata | {"args": '{"checkpoint_path": "x"}'},
    "that fetch others": lambda metadata: metadata | {"args": '{"pretrained": true}'},
    "of no heads": lambda metadata: args_with(metadata, num_heads=0),
    "of patches of 0": lambda metadata: args_with(metadata, patch_size=0),
    "of huge patches": lambda metadata: args_with(metadata, patch_size=2**40),
    "of classes as argument": lambda metadata: args_with(metadata, num_classes=7),
    "of an unknown argument": lambda metadata: args_with(metadata, no_such_thing=1),
    "of features only": lambda metadata: args_with(metadata, features_only=True),
}


def args_with(metadata: dict, **more: Any) -> dict:
    """Return metadata with further arguments of the model."""
    return metadata | {"args": json.dumps(json.loads(metadata["args"]) | more)}


def change_tensors(change: Callable[[dict], dict]) -> Callable[[Path], None]:
    """Return what changes the tensors of the best weights."""

    def apply(folder: Path) -> None:
        path = folder / "run" / "best.safetensors"
        metadata, tensors = read_weights(path)
        save_file(change(tensors), path, metadata=metadata)

    return apply


def with_first(tensors: dict, tensor: torch.Tensor) -> dict:
    """Return tensors of which the last bias is another one."""
    return tensors | {"head.bias": tensor}


TENSORS: dict[str, Callable[[dict], dict]] = {
    "no tensors": lambda tensors: {},
    "less one tensor": lambda tensors: dict(list(tensors.items())[1:]),
    "one tensor more": lambda tensors: tensors | {"more": torch.zeros(3)},
    "a tensor of 5 x 5": lambda tensors: with_first(tensors, torch.zeros(5, 5)),
    "an empty tensor": lambda tensors: with_first(tensors, torch.zeros(0)),
    "a tensor of whole numbers": lambda t: with_first(t, torch.zeros(2, dtype=torch.int64)),
    "a tensor of truths": lambda t: with_first(t, torch.zeros(2, dtype=torch.bool)),
    "a tensor of bytes": lambda t: with_first(t, torch.zeros(2, dtype=torch.uint8)),
}
