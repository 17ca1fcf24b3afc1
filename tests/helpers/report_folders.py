"""Folders of runs, sweeps and profiles as the tools leave them, written by hand, and the reading of
a page: no training.
"""

import csv
import json
from html.parser import HTMLParser

import timm
import torch
import yaml

import visionattn  # noqa: F401  registers the models
from visionattn.models.weights import DataSpec, save_model
from visionattn.training.mistakes import address

MODEL = {"patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": 32}
SPEC = DataSpec(1, 10, tuple(str(digit) for digit in range(10)), (0.306,), (0.324,), None, 32)
CONFIG = {
    "model": {"name": "scaleformer_vit_t", "args": MODEL},
    "data": {"name": "digits", "img_size": 32, "workers": 0, "val_fraction": 0.1},
    "optim": {"lr": 0.001, "warmup_epochs": 0.5},
    "epochs": 3,
    "batch_size": 32,
    "seed": 0,
}
RESULT = dict(
    best_epoch=2, validation_accuracy=0.625, test_accuracy=0.5625, test_loss=1.25, test_images=359
)
RESULT |= {"train_seconds": 7260.0, "images_per_second": 1234.5}


def lines_of(epochs, steps=4):
    """Lines of metrics: a line per step, accuracies 0.5, 0.625, 0.625 and so on."""
    for epoch in range(1, epochs + 1):
        for step in range((epoch - 1) * steps + 1, epoch * steps + 1):
            line = dict(
                kind="train", step=step, epoch=epoch, loss=2 / step, images_per_second=900.0 + step
            )
            yield line | {"wait_share": 0.05, "lr": 1e-3 / step, "grad_norm": 1.0, "skipped": 0}
        line = dict(
            kind="epoch", epoch=epoch, step=epoch * steps, train_loss=1.0, val_loss=2.0 - epoch / 8
        )
        yield line | {"val_accuracy": min(0.5 + (epoch - 1) / 8, 0.625), "seconds": 10.0}


def write_run(
    folder,
    *,
    epochs=3,
    status="finished",
    reason=None,
    result=RESULT,
    config=None,
    always=None,
    spec=SPEC,
):
    """A run. ``config``: groups with what differs from ``CONFIG``; ``always``: the class that its
    weights always name.
    """
    folder.mkdir(parents=True)
    changed = config or {}
    merged = CONFIG | {
        key: CONFIG[key] | value if isinstance(value, dict) else value
        for key, value in changed.items()
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(merged, sort_keys=False))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines_of(epochs))
    )
    if status:
        about = {"device": "a machine", "torch": "2.99", "visionattn": "0.1.0", "commit": "c0ffee"}
        told = dict(status=status, reason=reason, exit_code=0, provenance=about, result=result)
        (folder / "status.json").write_text(json.dumps(told))
    if always is not None:
        write_weights(folder, always, spec)
    return folder


def write_weights(folder, always, spec=SPEC):
    """Weights that name one class for every image: its output is 3, the others are 0."""
    model = timm.create_model(
        "scaleformer_vit_t", num_classes=spec.num_classes, in_chans=spec.in_chans, **MODEL
    )
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(3.0 * (torch.arange(spec.num_classes) == always))
    save_model(folder / "best.safetensors", model, "scaleformer_vit_t", MODEL, spec)
    return sum(parameter.numel() for parameter in model.parameters())


def write_classes(folder, counts, *, split="test", epoch=2, names=None, mistakes=()):
    """What best weights say of classes: ``counts[i][j]`` images of class i were taken for j.

    Args:
        names: of the classes; None: numbers.
        mistakes: class, what was said, the probabilities of both, name, and image or None.
    """
    number = len(counts)
    classes = [[sum(counts[i]), counts[i][i], sum(row[i] for row in counts)] for i in range(number)]
    pairs = [[i, j, counts[i][j]] for i in range(number) for j in range(number) if i != j]
    pairs = sorted((pair for pair in pairs if pair[2]), key=lambda pair: -pair[2])
    kept = [
        dict(label=label, said=said, of_label=own, probability=chance, name=name)
        | {"size": None if image is None else image.shape[:2]}
        | {"picture": None if image is None else address(image)}
        for label, said, own, chance, name, image in mistakes
    ]
    found = dict(version=1, split=split, epoch=epoch, images=sum(map(sum, counts)), seen="whole")
    found |= dict(class_names=names or [], classes=classes, confusions=pairs[:2000])
    (folder / f"{split}.json").write_text(json.dumps(found | {"mistakes": kept}))


def write_rows(path, rows):
    """A CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def sweep_rows():
    """Two head counts and two forms with two seeds each; one training without an end, one
    measurement without memory.
    """
    same = {"attention": "taylorshift", "img_size": 32, "tokens": 1024, "status": "finished"}
    same |= {"reason": "", "parameters": 123_456, "flops": 2.5e9, "device": "cpu"}
    same |= {"inference_status": "ok", "training_status": "ok"}
    rows = [
        same
        | {"form": form, "heads": heads, "head_dim": 256 // heads, "seed": seed}
        | {"test_accuracy": accuracy, "inference_images_per_second": speed * heads}
        | {"inference_peak_bytes": heads * 2**20, "training_images_per_second": speed}
        | {"training_peak_bytes": 3 * heads * 2**20, "inference_backend": f"taylorshift {form}"}
        for form, speed in (("direct", 100.0), ("efficient", 250.0))
        for heads in (4, 8)
        for seed, accuracy in ((0, 0.81), (1, 0.85))
    ]
    rows[3] |= {"status": "nan", "reason": "the loss was not finite", "test_accuracy": ""}
    for row in rows[2:4]:
        row |= dict(training_status="oom", training_images_per_second="", training_peak_bytes="")
    return rows


def memory_rows():
    """Two models at two sizes; the larger one of the second does not fit."""
    same = {"pass": "inference", "precision": "float32", "form": "auto", "checkpointing": "no"}
    same |= {"batch": 1, "depth": "", "reserved_bytes": "", "parameters_bytes": 22 * 2**20}
    rows = [
        {"model": model, "px": px, "tokens": tokens}
        | same
        | {"peak_bytes": (tokens + 300) * 2**20, "above_bytes": tokens * 2**20}
        | {"growth_exponent": exponent, "status": "ok"}
        for model, exponent in (("scaleformer_vit_t", 1.0), ("vit_tiny_patch16_224+eager", 1.97))
        for px, tokens in ((512, 1024), (1024, 4096))
    ]
    rows[3] |= dict(peak_bytes="", above_bytes="", parameters_bytes="", status="out of memory")
    return rows


class Page(HTMLParser):
    """The text of each cell, paragraph and heading of a page, the rows of its tables, and every
    attribute.
    """

    def __init__(self, text):
        super().__init__()
        self.rows = []
        self.attributes = []
        self.tags = []
        self.texts = []
        self._inside = []
        self.feed(text)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        self._inside.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data):
        if "style" in self._inside or not data.strip():
            return
        self.texts.append(data)
        if {"td", "th"} & set(self._inside):
            self.rows[-1][-1] = (self.rows[-1][-1] + " " + data.strip()).strip()

    def row(self, name):
        """The cells behind the first cell that begins so."""
        return next(row[1:] for row in self.rows if row and row[0] == name)
