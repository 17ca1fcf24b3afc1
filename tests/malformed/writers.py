"""Weights that write no images or absurd ones, images that no model completes, and work that
another command left.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.malformed.images import PICTURES, WRONG_BYTES, encoded
from tests.malformed.mutations import BYTES, broken_trees, few, write
from tests.malformed.runner import Case
from tests.malformed.valid import GENERATE, SEGMENTED, WRITER
from tests.malformed.weights import read_weights

COMPLETE = (*GENERATE, "--complete")
ARGS = {
    "depth": (0, -1, 10**9, 2.5, None),
    "embed_dim": (0, 2**30, 7),
    "num_heads": (0, 3, 2**40),
    "levels": (1, 0, 300, 2**40),
    "rows": (-1, 2**40, 1.5),
    "reach": (-1, 2**30),
    "output": ("mixture", "wrong", 7),
    "mixtures": (3, -1),
    "attention": ("taylorshift", "wrong"),
    "relative": ("joint", 7),
    "normalization": ("wrong", 7),
    "feature_map": ("softmax", "wrong", 7),
    "conditioned": (False, "x", None),
    "in_chans": (1,),
    "no_such": (1,),
}
"""Arguments that are none of the model whose tensors are in the file."""
SPEC = {
    "in_chans": 3,
    "num_classes": 2,
    "class_names": ["cat", "dog"],
    "mean": [],
    "std": [],
    "img_size": [4, 4],
    "fit": "crop",
    "task": "generate",
}
FINE = ("class_names=nulls", "img_size=null", "img_size=number", "mean=nulls", "std=nulls")
SIZES = ("0", "-1", "4 4 4", "1048577", "2000000 1", "1048576 1048576", "100000 700", "x", "native")
WORDS = {
    "count of nothing": ("--count", "0"),
    "count below": ("--count", "-3"),
    "count beyond": ("--count", "99999999999"),
    "too many for a grid": ("--count", "1000000", "--output", "out.png"),
    "temperature below 0": ("--temperature", "-1e-9"),
    "temperature infinite": ("--temperature", "1e999"),
    "seed below 0": ("--seed", "-1"),
    "seed beyond": ("--seed", str(2**63)),
    "no class": ("--classes", "bird"),
    "a class beyond": ("--classes", "2"),
    "keep alone": ("--keep", "0.5"),
    "keep of nothing": ("--complete", "images/val", "--keep", "0"),
    "keep of all": ("--complete", "images/val", "--keep", "1"),
    "keep of more": ("--complete", "images/val", "--keep", "7"),
    "no images": ("--complete", "nowhere"),
    "no list": ("--complete", "train.yaml"),
    "device": ("--device", "wrong"),
    "precision": ("--amp", "fp16"),
    "ending": ("--output", "out.jpg"),
    "no folder": ("--output", "no/out.png"),
    "a folder of others": ("--output", "run", "--overwrite"),
    "a device as output": ("--output", "/dev/null"),
    "the checkpoint as output": ("--output", WRITER),
}
OTHERS = ("run/best.safetensors", SEGMENTED, "weights.pth", "images", "train.yaml", "teacher.pth")


def cases() -> Iterator[Case]:
    """Return cases of flags, weights, prompts and work."""
    for name, words in WORDS.items():
        yield Case(f"writer {name}", (*GENERATE, *words))
    for size in SIZES:
        yield Case(f"writer of {size}", (*GENERATE, "--img_size", *size.split()))
    for other in OTHERS:
        yield Case(f"writer as {other}", ("generate", other, *GENERATE[2:]))
    for output in ("out.png", "out.npy", "out"):
        words = (*GENERATE[:-1], output)
        yield Case(f"writer where {output} is", words, write(output, b"x"))
    yield from weight_cases()
    yield from prompt_cases()


def changed(change: Callable[[dict, dict], tuple[dict, dict]]) -> Callable[[Path], None]:
    """Return what changes metadata and tensors of the weights."""

    def apply(folder: Path) -> None:
        metadata, tensors = change(*read_weights(folder / WRITER))
        save_file(tensors, folder / WRITER, metadata=metadata)

    return apply


def with_args(**more: Any) -> Callable[[Path], None]:
    """Return what adds arguments to those that build the model."""
    return changed(
        lambda metadata, tensors: (
            metadata | {"args": json.dumps(json.loads(metadata["args"]) | more)},
            tensors,
        )
    )


def with_data(**more: Any) -> Callable[[Path], None]:
    """Return what adds to what the file says of images."""
    return changed(
        lambda metadata, tensors: (
            metadata | {"data": json.dumps(json.loads(metadata["data"]) | more)},
            tensors,
        )
    )


def weight_cases() -> Iterator[Case]:
    """Return cases of weights."""
    for name, values in ARGS.items():
        for value in values:
            yield Case(f"writer args {name}={value}", GENERATE, with_args(**{name: value}))
    for name, broken in few(broken_trees(SPEC), 4):
        if name in FINE or "missing" in name:
            continue
        more = broken if isinstance(broken, dict) else {"in_chans": broken}
        yield Case(f"writer data.{name}", GENERATE, with_data(**more))
    for value in (None, [2**20, 2**20], 2**40):
        yield Case(f"writer img_size {value}", GENERATE, with_data(img_size=value, fit="native"))
    yield Case("writer that classifies", GENERATE, with_data(task="classification"))
    for value in (float("nan"), float("inf")):

        def spoilt(metadata: dict, tensors: dict, value: float = value) -> tuple[dict, dict]:
            return metadata, tensors | {"head.bias": torch.full_like(tensors["head.bias"], value)}

        yield Case(f"writer of {value}", GENERATE, changed(spoilt))


def prompt_cases() -> Iterator[Case]:
    """Return cases of images to complete."""
    for kind in WRONG_BYTES:
        change = write("odd.png", BYTES[kind](encoded("png")))
        yield Case(f"writer prompt {kind}", (*COMPLETE, "odd.png"), change)
    for kind in (np.uint16, np.float32, np.int64):
        pixels = np.zeros((16, 16, 3), kind)

        def put(folder: Path, pixels: np.ndarray = pixels) -> None:
            np.save(folder / "odd.npy", pixels)

        yield Case(f"writer prompt of {np.dtype(kind)}", (*COMPLETE, "odd.npy"), put)
    for name, content in list(PICTURES.items())[::4]:
        yield Case(f"writer prompt {name}", (*COMPLETE, name), write(name, content))
