"""Masks that fit no image, options that fit no masks, and weights and runs of segmentations."""

import io
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from PIL import Image

from tests.malformed.images import WRONG_BYTES
from tests.malformed.mutations import BYTES, both, broken_trees, few, write
from tests.malformed.runner import Case
from tests.malformed.valid import MASKED_TRAINING, SEGMENTED
from tests.malformed.weights import SPEC, read_weights

TRAIN = ("train", "--config", "masked.yaml", "--run", "out")
GO_ON = ("train", "--config", "segmented/config.yaml", "--resume", "--epochs", "2")
VALIDATE = ("validate", "--checkpoint", SEGMENTED, "--threads", "1")
PREDICT = ("predict", "--checkpoint", SEGMENTED, "--images", "photos/val/images")
PREDICT += ("--output", "out", "--threads", "1", "--workers", "0")
EXPORT = ("export", SEGMENTED, "--format", "torch", "--output", "out.pt2")
REPORT = ("report", "segmented", "--output", "page.html", "--images", "2")
CONTROLS = {
    "train on masks": TRAIN,
    "resume masks": GO_ON,
    "validate masks": VALIDATE,
    "predict masks": PREDICT,
    "predict an array": (*PREDICT[:4], "photos/val/images/0.png", "--output", "out.npy"),
    "export masks": EXPORT,
    "report masks": REPORT,
}
MASK = "photos/train/masks/1.png"


def png(pixels: np.ndarray) -> bytes:
    """Return a picture."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def of(value: int, side: int = 16, dtype: Any = np.uint8) -> bytes:
    """Return a mask of one value."""
    return png(np.full((side, side), value, dtype))


def tiff(pixels: np.ndarray) -> bytes:
    """Return a TIFF of numbers that no index is."""
    stream = io.BytesIO()
    tifffile.imwrite(stream, pixels)
    return stream.getvalue()


def without(name: str) -> Callable[[Path], None]:
    """Return what deletes a file."""
    return lambda folder: (folder / name).unlink()


def moved(name: str) -> Callable[[Path], Any]:
    """Return what takes a folder away."""
    return lambda folder: (folder / name).rename(folder / "elsewhere")


def instead(name: str, content: bytes) -> Callable[[Path], None]:
    """Return what puts a file in the place of a mask."""
    return both(without(MASK), write(name, content))


COLOURS = np.random.default_rng(1).integers(0, 256, (16, 16, 3), np.uint8)
WRONG_MASKS: dict[str, Callable[[Path], Any]] = {
    "of another size": write(MASK, of(1, 17)),
    "turned": write(MASK, png(np.zeros((16, 24), np.uint8))),
    "of one pixel": write(MASK, of(0, 1)),
    "of a class beyond": write(MASK, of(3)),
    "of a class of 16 bits": write(MASK, of(300, dtype=np.uint16)),
    "of a class of 32 bits": instead("photos/train/masks/1.tif", tiff(np.full((16, 16), 70_000))),
    "of colours": write(MASK, png(COLOURS)),
    "of floats": instead("photos/train/masks/1.tif", tiff(np.full((16, 16), 0.5, np.float32))),
    "of floats not finite": instead(
        "photos/train/masks/1.tif", tiff(np.full((16, 16), np.nan, np.float32))
    ),
    "missing": without(MASK),
    "as JPEG": instead("photos/train/masks/1.jpg", of(1)),
    "twice": write("photos/train/masks/1.bmp", of(1)),
    "as a folder": both(without(MASK), lambda folder: (folder / MASK).mkdir()),
    "as a link to nowhere": both(
        without(MASK), lambda folder: (folder / MASK).symlink_to("nowhere.png")
    ),
    "of 2**31 pixels a side": write(
        MASK,
        of(1)[:16] + struct.pack(">II", 2**31 - 1, 2**31 - 1) + of(1)[24:],
    ),
    **{f"with {kind}": write(MASK, BYTES[kind](of(1))) for kind in WRONG_BYTES},
    "in no folder": moved("photos/train/masks"),
    "in a file": both(moved("photos/train/masks"), write("photos/train/masks", b"x")),
    "of no images": moved("photos/train/images"),
}
"""What is wrong with a mask, or where masks are."""
WRONG_OPTIONS = {
    "masks": ("{classes: []}", "{classes: [a]}", "{classes: [a, a, b]}", "{classes: ['', b, c]}")
    + ("{classes: [a, b]}", "{classes: x}", "{classes: 7}", "{classes: [[a], b, c]}", "x", "[1]")
    + ("{colours: [[1, 2]]}", "{colours: [[0, 0, 0], [0, 0, 300], [1, 1, 1]]}", "{colours: red}")
    + ("{colours: [[0, 0, 0], [0, 0, 0], [1, 1, 1]]}", "{ignored: 1, classes: [a, b, c]}")
    + ("{ignored: -1}", "{ignored: [1, 2]}", "{ignored: x}", "{names: [a, b, c]}"),
    "name": ("digits", "cifar10", "imagefolder", "imagenet"),
    "root": (
        "nowhere",
        "images",
        "photos/val/masks",
        "hfds/x",
        "wds/x",
        "photos/train/images/0.png",
    ),
    "task": ("masks", "null", "classification"),
}
"""Options of the data that do not fit masks of three classes."""
WRONG_HEADS = {
    "head_stride": (0, -1, 3, 16, 2.5, "x", [4]),
    "head_blocks": ([], [99], [-9], [0, 0], ["x"], 7.5, [[0]]),
    "num_classes": (7,),
    "global_pool": ("wrong",),
}
"""Arguments that no head has."""


def change_weights(change: Callable[[dict, dict], tuple[dict, dict]]) -> Callable[[Path], None]:
    """Return what changes metadata and tensors of the weights of a segmentation."""

    def apply(folder: Path) -> None:
        from safetensors.torch import save_file

        metadata, tensors = change(*read_weights(folder / SEGMENTED))
        save_file(tensors, folder / SEGMENTED, metadata=metadata)

    return apply


def with_json(key: str, **more: Any) -> Callable[[Path], None]:
    """Return what adds keys to one of the trees of the metadata."""
    return change_weights(
        lambda metadata, tensors: (
            metadata | {key: json.dumps(json.loads(metadata[key]) | more)},
            tensors,
        )
    )


MASKED_SPEC = SPEC | {"num_classes": 3, "class_names": ["a", "b", "c"], "task": "segmentation"}
MASKED_SPEC |= {"colours": [[0, 0, 0], [255, 0, 0], [0, 0, 255]], "img_size": 16}


def cases() -> Iterator[Case]:
    """Return cases of masks, of options of masks, and of weights and runs of segmentations."""
    for name, change in WRONG_MASKS.items():
        # A run that meets it after its first step keeps its state.
        yield Case(f"mask {name}", TRAIN, change, writes=("out",))
    for option, values in WRONG_OPTIONS.items():
        for value in values:
            yield Case(f"mask data.{option}={value}", (*TRAIN, f"--data.{option}={value}"), None)
    for name, args in ((name, value) for name, values in WRONG_HEADS.items() for value in values):
        model = MASKED_TRAINING["model"]["args"] | {name: args}
        words = (*TRAIN, "--model.args", json.dumps(model))
        yield Case(f"mask head {name}={args}", words)
        if name.startswith("head"):
            for reader in (PREDICT, EXPORT):
                changed = with_json("args", **{name: args})
                yield Case(f"mask weights {reader[0]} {name}={args}", reader, changed)
    for words in (
        ("--optim.mixup", "0.2"),
        ("--optim.cutmix", "1.0"),
        ("--model.name", "resnet18"),
        ("--model.name", "nothing"),
        ("--init_from", "nowhere.safetensors"),
    ):
        yield Case(f"mask train {' '.join(words)}", (*TRAIN, *words))
    for name, broken in few(broken_trees(MASKED_SPEC), 3):
        key = name.partition("=")[0].partition(" ")[0]
        if key.startswith(("task", "colours", "num_classes", "class_names")):
            if name in FINE_IN_WEIGHTS:
                continue
            text = broken if isinstance(broken, str) else json.dumps(broken)

            def put(metadata: dict, tensors: dict, text: str = text) -> tuple[dict, dict]:
                return metadata | {"data": text}, tensors

            yield Case(f"mask weights data.{name}", PREDICT, change_weights(put))
    yield from tool_cases()


FINE_IN_WEIGHTS = {"class_names=list", "colours=null", "colours missing"}


def tool_cases() -> Iterator[Case]:
    """Return cases of commands that do not fit weights of a segmentation, or not what is there."""
    images = ("--images", "photos/val/images")
    checkpoint = ("--checkpoint", SEGMENTED)
    taken = write("out/0.png", b"x")
    yield Case("mask predict where one is", PREDICT, taken)
    yield Case("mask predict into a file", PREDICT, write("out", b"x"))
    yield Case("mask predict top_k", (*PREDICT, "--top_k", "2"))
    array = ("predict", *checkpoint, *images, "--output", "out.npy")
    yield Case("mask predict many into an array", array)
    one = (*array[:4], "photos/val/images/0.png", "--output", "out.npy")
    yield Case("mask predict where an array is", one, write("out.npy", b"x"))
    damaged = write("photos/val/images/0.png", "x")
    said = dict(tolerated="1 of 2 images have masks", writes=("out",))
    yield Case("mask predict an image that is none", PREDICT, damaged, **said)
    yield Case("mask look", ("look", SEGMENTED, "photos/val/images/0.png", "--output", "out"))
    yield Case("mask share", ("share", SEGMENTED, "--to", "out"))
    yield Case("mask features", ("features", *checkpoint, *images, "--output", "out"))
    yield Case("mask convert", ("convert", SEGMENTED, "--output", "out.safetensors"))
    heads = ("--heads", "2", "4", "--output", "out")
    yield Case("mask sweep", ("sweep", "--base", "masked.yaml", *heads))
    yield Case("mask distil", ("distil", "--config", "distil.yaml", "--teacher", SEGMENTED))
    yield Case("mask validate classes", (*VALIDATE, "--data.root", "images"))
    words = ("--data.root", "images", "--data.task", "classification")
    yield Case("mask validate another task", (*VALIDATE, *words))
    yield Case("mask export where one is", EXPORT, write("out.pt2", b"x"))
    start = ("train", "--config", "train.yaml", "--run", "out", "--init_from", SEGMENTED)
    yield Case("mask weights into classes", start)
    goes_on = dict(tolerated="page.html: 1 run", writes=("page.html",))
    for name, line in METRICS.items():
        change = write("segmented/metrics.jsonl", json.dumps(line) + "\n")
        yield Case(f"mask report {name}", REPORT, change, **goes_on)
    yield Case("mask report without images", REPORT, moved("photos"), **goes_on)
    yield Case("mask report a wrong mask", REPORT, write("photos/val/masks/0.png", "x"), **goes_on)


TEST = {"kind": "test", "step": 2, "accuracy": 0.5, "top5": None, "loss": 1.0, "images": 2}
METRICS = {
    "no shares": TEST,
    "shares of text": TEST | {"mean_iou": "x", "ious": "x"},
    "shares nested": TEST | {"mean_iou": 0.5, "ious": [[0.5], {"a": 1}]},
    "shares of null": TEST | {"mean_iou": None, "ious": [None, None, None]},
    "shares beyond 1": TEST | {"mean_iou": 1e300, "ious": [1e300, -5, 2]},
    "shares of no number": TEST | {"mean_iou": float("nan"), "ious": [float("inf")] * 3},
    "too many shares": TEST | {"mean_iou": 0.5, "ious": [0.5] * 100_000},
}
"""Last lines of metrics whose intersections over unions are none."""
