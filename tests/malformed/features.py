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
    replace_by_folder,
    write,
)
from tests.malformed.runner import Case
from tests.malformed.valid import EXTRACT, PROBE
from tests.malformed.weights import read_weights


def change_shard(change: Callable[[Any], Any], folder_name: str = "features"):
    """Return what changes what a shard says of itself."""

    def apply(folder: Path) -> None:
        path = folder / folder_name / "features-00000.safetensors"
        metadata, tensors = read_weights(path)
        content = change(json.loads(metadata["visionattn.features"]))
        text = content if isinstance(content, str) else json.dumps(content)
        save_file(tensors, path, metadata={"visionattn.features": text})

    return apply


def cases() -> Iterator[Case]:
    """Return cases of folders of features that are not as they were written."""
    for text in GARBLED_JSON:
        shown = text if len(text) < 20 else f"{text[:5]}...({len(text)})"
        yield Case(f"features {shown!r}", EXTRACT, change_shard(lambda _, text=text: text))
    for name, change in SHARDS.items():
        for reader in (EXTRACT, PROBE):
            yield Case(f"features {reader is PROBE} {name}", reader, change)
    for name, change in FOLDERS.items():
        yield Case(f"features folder {name}", EXTRACT, change)


SHARDS = {
    "rows of another image": change_shard(
        lambda c: c | {"rows": [row | {"path": "x"} for row in c["rows"]]}
    ),
    "version of text": change_shard(lambda c: c | {"version": "1"}),
    "version 2": change_shard(lambda c: c | {"version": 2}),
}
FOLDERS = {
    "of other things": both(
        lambda folder: (folder / "features" / "features-00000.safetensors").unlink(),
        write("features/letter.txt", "dear"),
    ),
    "with an index that is a folder": replace_by_folder("features/index.csv"),
    "with a shard that is a folder": replace_by_folder("features/features-00000.safetensors"),
    "with a shard of another project": lambda folder: save_file(
        {"a": torch.zeros(2)}, folder / "features" / "features-00000.safetensors"
    ),
}
