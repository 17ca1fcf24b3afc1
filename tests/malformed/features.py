"""Folders of features that are not as they were written."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.malformed.mutations import (
    GARBLED_JSON,
    both,
    broken_trees,
    few,
    graft,
    replace_by_folder,
    write,
)
from tests.malformed.runner import Case
from tests.malformed.valid import EXTRACT, PROBE
from tests.malformed.weights import HEADS, read_weights


def change_shard(change: Callable[[Any], Any], folder_name: str = "features"):
    """Return what changes what a shard says of itself."""

    def apply(folder: Path) -> None:
        path = folder / folder_name / "features-00000.safetensors"
        metadata, tensors = read_weights(path)
        content = change(json.loads(metadata["visionattn.features"]))
        text = content if isinstance(content, str) else json.dumps(content)
        save_file(tensors, path, metadata={"visionattn.features": text})

    return apply


ROW = {
    "path": "images/a.png",
    "status": "ok",
    "reason": None,
    "height": 16,
    "width": 16,
    "input_height": 16,
    "input_width": 16,
    "shard": "features-00000.safetensors",
    "key": "features",
    "row": 0,
}
SHARD = {"format": "x", "version": 1, "identity": {"model": "x", "images": 12}, "first": 0}
SHARD |= {"rows": [ROW]}


def cases() -> Iterator[Case]:
    """Return cases of folders of features that are not as they were written."""
    for number, (name, tree) in enumerate(few(broken_trees(SHARD), 4)):
        place, _, kind = name.partition("=")
        if place.startswith("format") or (place, kind) in FINE_IN_SHARDS:
            continue
        reader = PROBE if number % 2 else EXTRACT
        yield Case(f"features {reader is PROBE} {name}", reader, change_shard(graft(place, tree)))
    for text in GARBLED_JSON:
        shown = text if len(text) < 20 else f"{text[:5]}...({len(text)})"
        yield Case(f"features {shown!r}", EXTRACT, change_shard(lambda _, text=text: text))
    for name, change in SHARDS.items():
        for reader in (EXTRACT, PROBE):
            yield Case(f"features {reader is PROBE} {name}", reader, change)
    for name, content in HEADS.items():
        change = write("features/features-00000.safetensors", content)
        yield Case(f"features head {name}", EXTRACT, change)
    for name, change in FOLDERS.items():
        yield Case(f"features folder {name}", EXTRACT, change)


FINE_IN_SHARDS = {
    ("rows.0.height", "null"),
    ("rows.0.width", "null"),
    ("rows.0.input_height", "null"),
    ("rows.0.input_width", "null"),
    ("rows.0.reason", "text"),
}


def put_rows(rows: Any) -> Callable[[Path], None]:
    """Return what replaces the rows of a shard."""
    return change_shard(lambda content: content | {"rows": rows})


SHARDS = {
    "rows of null": put_rows([None] * 12),
    "rows of numbers": put_rows([1] * 12),
    "more rows than images": change_shard(lambda c: c | {"rows": c["rows"] * 3}),
    "rows of another image": change_shard(
        lambda c: c | {"rows": [row | {"path": "x"} for row in c["rows"]]}
    ),
    "a row beyond the tensor": change_shard(
        lambda c: c | {"rows": [row | {"row": 10**6} for row in c["rows"]]}
    ),
    "a row below 0": change_shard(lambda c: c | {"rows": [r | {"row": -5} for r in c["rows"]]}),
    "a key of no tensor": change_shard(
        lambda c: c | {"rows": [r | {"key": "x"} for r in c["rows"]]}
    ),
    "a status of its own": change_shard(
        lambda c: c | {"rows": [r | {"status": "good"} for r in c["rows"]]}
    ),
    "a column more": change_shard(lambda c: c | {"rows": [r | {"z": 1} for r in c["rows"]]}),
    "first below 0": change_shard(lambda c: c | {"first": -4}),
    "identity null": change_shard(lambda c: c | {"identity": None}),
    "version of text": change_shard(lambda c: c | {"version": "1"}),
    "version true": change_shard(lambda c: c | {"version": True}),
}


def feature_tensors(change: Callable[[dict], dict]) -> Callable[[Path], None]:
    """Return what changes the tensors of a shard."""

    def apply(folder: Path) -> None:
        path = folder / "features" / "features-00000.safetensors"
        metadata, tensors = read_weights(path)
        save_file(change(tensors), path, metadata=metadata)

    return apply


SHARDS |= {
    "no tensor": feature_tensors(lambda t: {}),
    "a tensor of another name": feature_tensors(lambda t: {"x": t["features"]}),
    "a tensor of one row": feature_tensors(lambda t: {"features": t["features"][:1].clone()}),
    "a tensor of one axis": feature_tensors(lambda t: {"features": t["features"][0].clone()}),
    "a tensor of whole numbers": feature_tensors(lambda t: {"features": t["features"].long()}),
}


FOLDERS = {
    "of other things": both(
        lambda folder: (folder / "features" / "features-00000.safetensors").unlink(),
        write("features/letter.txt", "dear"),
    ),
    "with another's index": write("features/index.csv", "a,b\n1,2\n"),
    "with an index that is a folder": replace_by_folder("features/index.csv"),
    "with a shard that is a folder": replace_by_folder("features/features-00000.safetensors"),
    "with a shard of another project": lambda folder: save_file(
        {"a": torch.zeros(2)}, folder / "features" / "features-00000.safetensors"
    ),
    "with an index of no text": write("features/index.csv", b"\xff\xfe\0"),
}
