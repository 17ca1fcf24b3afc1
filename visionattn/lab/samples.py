"""How many digits that a model writes are read as digits: ``python -m visionattn.lab.samples
CHECKPOINT`` measures the tables of ``docs/generation.md``.

A conditioned ``PixelDecoder`` writes equally many images of each class, and a classifier that is no
part of it reads them. An image counts as read where the class is the one that was asked for, which
chance does in one of ten. Beside this, and for a model without classes, it is counted where the
classifier is at least as sure as it is of 19 in 20 test images. Images that are no digits should
not pass, so the same is counted of test images whose pieces changed places, of halves of two of
them, and of noise. How far images are from the nearest training image tells whether they are copies
of those.
"""

import argparse
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import timm
import torch
from einops import rearrange
from torch import Tensor, nn

from visionattn.cli.ends import run_tool
from visionattn.cli.files import check_free, write_text
from visionattn.cli.parsing import Parser, whole_from
from visionattn.cli.provenance import provenance_of, summary
from visionattn.cli.tables import Record, csv_text, heading, line
from visionattn.cli.untrusted import brief
from visionattn.data.batches import SampleKey
from visionattn.data.config import DataConfig
from visionattn.data.geometry import Size, geometry_of, sides
from visionattn.data.images import see_array
from visionattn.data.splits import build_splits
from visionattn.models.pixel_decoder import PixelDecoder
from visionattn.models.shipped import FILES
from visionattn.models.weights import DataSpec, load_model

COLUMNS = ("images", "number", "read as asked", "as sure as of test images", "nearest", "seconds")
SURE_SHARE = 0.95
"""Share of test images that are above the least confidence with which an image counts as read."""
DIGITS = 10
PIECES = 4
"""Pieces along each side of images whose pieces change places."""
BATCH = 100


class Reading(NamedTuple):
    """What a classifier reads in images."""

    classes: np.ndarray
    """int64 ``[n]``."""
    confidence: np.ndarray
    """Of the class that is read, in [0, 1], ``[n]``."""


class Digits(NamedTuple):
    """Images uint8 ``[n, H, W, 1]``, and their classes, int64 ``[n]``."""

    images: np.ndarray
    labels: np.ndarray


@torch.no_grad()
def write_images(
    model: PixelDecoder, size: Size, labels: Tensor, *, temperature: float, seed: int
) -> np.ndarray:
    """Return images that a model writes by its recurrence, uint8 ``[n, H, W, C]``.

    Args:
        model: in eval mode, of at most 256 levels.
        size: height and width in pixels.
        labels: int64 ``[n]``; of a model that is not conditioned their number alone counts.
        temperature: log-probabilities are divided by it, above 0.
        seed: of all draws.
    """
    generator = torch.Generator().manual_seed(seed)
    written = []
    for part in labels.split(BATCH):
        state = model.begin(len(part), size, part if model.conditioned else None)
        values: list[Tensor] = []
        for _ in range(state.values):
            logits = model.step(values[-1] if values else None, state).float()
            chances = (logits.log_softmax(-1) / temperature).softmax(-1)
            values.append(torch.multinomial(chances, 1, generator=generator)[:, 0])
        written.append(torch.stack(values, 1).to(torch.uint8))
    return torch.cat(written).view(len(labels), *size, model.in_chans).numpy()


@torch.no_grad()
def read_images(classifier: nn.Module, images: np.ndarray) -> Reading:
    """Return what a classifier with a ``data_spec`` reads in images uint8 ``[n, H, W, C]``, which
    are brought to its size first as those that it was trained on.
    """
    spec: DataSpec = classifier.data_spec
    geometry = geometry_of(spec, tuple(classifier.patch_embed.patch_size))
    found = []
    for start in range(0, len(images), BATCH):
        seen = [
            see_array(image, 0, SampleKey(0, 0, geometry), 0).pixels
            for image in images[start : start + BATCH]
        ]
        inputs = spec.prepare(torch.from_numpy(rearrange(np.stack(seen), "n h w c -> n c h w")))
        found.append(classifier(inputs).float().softmax(-1))
    confidence, classes = torch.cat(found).max(-1)
    return Reading(classes.numpy(), confidence.numpy())


def digits_of(split: str, size: Size) -> Digits:
    """Return the digits of a split, enlarged to height and width in pixels as for a training."""
    config = DataConfig(name="digits", img_size=list(size), workers=0)
    splits = build_splits(config, seed=0)
    dataset, geometry = getattr(splits, split), geometry_of(splits.spec, (1, 1))
    items = [dataset[SampleKey(index, 0, geometry)] for index in range(len(dataset))]
    return Digits(np.stack([item.pixels for item in items]), np.array([x.label for x in items]))


def spoiled(images: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Return what is made of images uint8 ``[n, H, W, C]`` and shows no class, by name."""
    rng = np.random.default_rng(seed)
    rows, columns = (-(-side // PIECES) * PIECES for side in images.shape[1:3])
    whole = np.pad(
        images, [(0, 0), (0, rows - images.shape[1]), (0, columns - images.shape[2]), (0, 0)]
    )
    pieces = rearrange(whole, "n (a h) (b w) c -> n (a b) h w c", a=PIECES, b=PIECES)
    moved = rng.permuted(np.tile(np.arange(PIECES**2), (len(images), 1)), axis=1)
    pieces = np.take_along_axis(pieces, moved[:, :, None, None, None], 1)
    pieces = rearrange(pieces, "n (a b) h w c -> n (a h) (b w) c", a=PIECES)
    half, other = images.shape[1] // 2, images[rng.permutation(len(images))]
    return {
        "halves of two": np.concatenate([images[:, :half], other[:, half:]], 1),
        "pieces in wrong places": pieces[:, : images.shape[1], : images.shape[2]],
        "noise": rng.integers(0, 256, images.shape, dtype=np.uint8),
    }


def nearest(images: np.ndarray, known: np.ndarray) -> float:
    """Return the median, over images ``[n, ...]``, of the distance to the nearest of those that are
    known, ``[m, ...]``: the root of the mean square of differences, in levels.
    """
    flat, others = (torch.from_numpy(x).flatten(1).double() for x in (images, known))
    return float(torch.cdist(flat, others).amin(1).median()) / flat.shape[1] ** 0.5


def above_zero(text: str) -> float:
    """Read a finite number above 0, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"wanted a number above 0, got {brief(text)!r}")
    return number


def open_classifier(name: str) -> nn.Module:
    """Return the classifier of a shipped name or of a file of weights, in eval mode.

    Raises:
        ValueError, FileNotFoundError: there is none, or it reads no digits.
    """
    if name in FILES:
        return timm.create_model(name, pretrained=True).eval()
    model = load_model(name)
    spec: DataSpec = model.data_spec
    if (spec.task, spec.num_classes, spec.in_chans) != ("classification", DIGITS, 1):
        raise ValueError(
            f"{name} reads no digits: wanted a model of {DIGITS} classes of grey images"
        )
    return model


def open_writer(path: str) -> PixelDecoder:
    """Return the decoder of a file of weights, in eval mode.

    Raises:
        ValueError, FileNotFoundError: there is none, or it writes no digits.
    """
    model = load_model(path)
    if not isinstance(model, PixelDecoder):
        raise ValueError(f"{path} writes no images; wanted weights of a pixel_decoder")
    classes = model.num_classes if model.conditioned else DIGITS
    if (model.in_chans, classes) != (1, DIGITS):
        raise ValueError(f"{path} writes no digits: {model.in_chans} channels, {classes} classes")
    return model


def measure(
    model: PixelDecoder,
    classifier: nn.Module,
    *,
    size: Size,
    count: int,
    temperatures: Sequence[float],
    seed: int,
) -> list[Record]:
    """Return a row of plain values for test images, for each temperature, and for what shows no
    class.

    Args:
        model, classifier: in eval mode.
        size: height and width of the images in pixels.
        count: samples of each temperature.
        temperatures: above 0.
        seed: of the samples.
    """
    test, train = (digits_of(split, size) for split in ("test", "train"))
    read = read_images(classifier, test.images)
    least = float(np.quantile(read.confidence, 1 - SURE_SHARE))

    def row(name: str, images: np.ndarray, labels: np.ndarray | None, reading: Reading) -> Record:
        asked = None if labels is None else float((reading.classes == labels).mean())
        sure = float((reading.confidence >= least).mean())
        near = nearest(images, train.images)
        record = {"images": name, "number": len(images), "read_as_asked": asked, "sure": sure}
        return record | {"least_confidence": least, "nearest": near, "seconds": None}

    rows = [row("test images", *test, read)]
    labels = torch.arange(count) % DIGITS
    for temperature in temperatures:
        start = time.process_time()
        images = write_images(model, size, labels, temperature=temperature, seed=seed)
        seconds = time.process_time() - start
        wanted = labels.numpy() if model.conditioned else None
        name = f"samples, temperature {temperature:g}"
        rows.append(row(name, images, wanted, read_images(classifier, images)))
        rows[-1]["seconds"] = seconds
    for name, images in spoiled(test.images, seed).items():
        rows.append(row(name, images, None, read_images(classifier, images)))
    return rows


def cells(record: Record) -> list[str | None]:
    """Return a row for people, under ``COLUMNS``."""
    asked, seconds = record["read_as_asked"], record["seconds"]
    return [
        record["images"],
        str(record["number"]),
        None if asked is None else f"{100 * asked:.1f} %",
        f"{100 * record['sure']:.1f} %",
        f"{record['nearest']:.1f}",
        None if seconds is None else f"{seconds:.1f}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write the rows; return the exit code."""
    about = "Count how many images that a model writes a classifier reads as it should."
    parser = Parser("python -m visionattn.lab.samples", description=about)
    parser.add_argument("checkpoint", help="weights of a pixel_decoder")
    kinds = "a model that comes with weights, or a file of weights (%(default)s)"
    parser.add_argument("--classifier", default="scaleformer_vit_digits", help=kinds)
    parser.add_argument("--img-size", type=whole_from(1), help="height and width, if not its own")
    parser.add_argument("--count", type=whole_from(1), default=500, help="samples (%(default)s)")
    parser.add_argument("--temperature", type=above_zero, nargs="+", default=[1.0])
    parser.add_argument("--seed", type=whole_from(0), default=0, help="of the samples")
    parser.add_argument("--threads", type=whole_from(1, 1024), default=1, help="threads of torch")
    parser.add_argument("--csv", help="file for the rows, which is replaced")
    flags = parser.parse_args(argv)

    def work() -> None:
        if flags.csv:
            check_free(Path(flags.csv), overwrite=True)
        model, classifier = open_writer(flags.checkpoint), open_classifier(flags.classifier)
        words = ["python", "-m", "visionattn.lab.samples", *(argv or sys.argv[1:])]
        provenance = provenance_of("cpu", [], threads=flags.threads)
        provenance["command"] = shlex.join(words)
        print(summary(provenance), flush=True)
        before = torch.get_num_threads()
        torch.set_num_threads(flags.threads)
        try:
            rows = measure(
                model,
                classifier,
                size=sides(flags.img_size or model.data_spec.img_size),
                count=flags.count,
                temperatures=flags.temperature,
                seed=flags.seed,
            )
        finally:
            torch.set_num_threads(before)
        print("\n".join(["", heading(COLUMNS), *(line(cells(row)) for row in rows)]))
        if flags.csv:
            write_text(flags.csv, csv_text(rows, provenance))

    return run_tool(work)


if __name__ == "__main__":
    raise SystemExit(main())
