"""Weights whose description, tensors or head are wrong."""

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.malformed.mutations import GARBLED_JSON, shown
from tests.malformed.runner import Case
from tests.malformed.valid import EXPORT, EXTRACT, PREDICT, SHARE, VALIDATE
from visionattn.models.weights import read_safetensors


def change_metadata(change: Callable[[dict], Any]) -> Callable[[Path], None]:
    """Return what changes the metadata of the best weights."""

    def apply(folder: Path) -> None:
        path = folder / "run" / "best.safetensors"
        metadata, tensors = read_safetensors(path)
        save_file(tensors, path, metadata=change(metadata))

    return apply


NESTED, NAN, INF = {"a": {"b": [1]}}, float("nan"), float("inf")
WRONG = {
    "args": {
        "patch_size": ([], NESTED, -7, NAN),
        "embed_dim": ("x", [], 10**30, -7),
        "depth": (None, "x", 10**30, INF),
        "num_heads": (None, NESTED, NAN, INF),
        "mlp_ratio": ([], NESTED, -7, NAN),
        "img_size": ("x", []),
    },
    "data": {
        "in_chans": ([], NESTED, -7, NAN),
        "num_classes": ("x", [], 10**30, -7),
        "class_names": (None, "x", 7, [None, "dog"], [7, "dog"]),
        "mean": (NESTED, ["x", 0.4, 0.4], [[], 0.4, 0.4]),
        "std": (None, "x", 7, [None, 0.2, 0.2], [INF, 0.2, 0.2]),
        "encoding": (NESTED,),
        "img_size": ("x", NESTED, [None, 16], ["x", 16], [INF, 16]),
        "fit": (None, 7),
        "max_patches": (NESTED,),
        "bands": ([], NESTED),
        "value_range": ("x", [], 7),
        "range_found": (None, NESTED),
        "page": (NESTED,),
    },
}
"""Values that an entry of the description cannot have."""


def cases() -> Iterator[Case]:
    """Return cases of weights whose description or tensors are wrong."""
    readers = (PREDICT, VALIDATE, EXTRACT)
    turn = itertools.count()
    for key, entries in WRONG.items():
        for name, values in entries.items():
            for value in values:
                reader = readers[next(turn) % 2]
                change = change_metadata(functools.partial(changed, key=key, **{name: value}))
                yield Case(f"weights {key}.{name}={value!r}", reader, change)
        for text in GARBLED_JSON:
            reader = readers[next(turn) % 3]
            change = change_metadata(lambda m, key=key, text=text: m | {key: text})
            yield Case(f"weights {key}={shown(text)!r}", reader, change)
        for reader in readers:
            change = change_metadata(lambda m, key=key: {k: v for k, v in m.items() if k != key})
            yield Case(f"weights {reader[0]} without {key}", reader, change)
    for name, change in METADATA.items():
        for reader in (*readers[:2], SHARE, EXPORT):
            yield Case(f"weights {reader[0]} {name}", reader, change_metadata(change))
    for name, change in TENSORS.items():
        for reader in (*readers[:2], SHARE):
            yield Case(f"weights {reader[0]} {name}", reader, change_tensors(change))


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
    "of no heads": lambda metadata: changed(metadata, num_heads=0),
    "of patches of 0": lambda metadata: changed(metadata, patch_size=0),
    "of huge patches": lambda metadata: changed(metadata, patch_size=2**40),
    "of classes as argument": lambda metadata: changed(metadata, num_classes=7),
    "of an unknown argument": lambda metadata: changed(metadata, no_such_thing=1),
    "of features only": lambda metadata: changed(metadata, features_only=True),
}


def changed(metadata: dict, key: str = "args", **more: Any) -> dict:
    """Return metadata with further entries of the description."""
    return metadata | {key: json.dumps(json.loads(metadata[key]) | more)}


def change_tensors(change: Callable[[dict], dict]) -> Callable[[Path], None]:
    """Return what changes the tensors of the best weights."""

    def apply(folder: Path) -> None:
        path = folder / "run" / "best.safetensors"
        metadata, tensors = read_safetensors(path)
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
