"""Masks of many images, a PNG for each or one array: the work of ``visionattn predict`` where a
model gives each pixel a class.

This module owns the files, and how a mask comes to the size of its image. Every file appears whole
or not at all, and the table of them last.
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image

from visionattn.cli.ends import OutOfMemory
from visionattn.cli.files import check_folder, check_free, write_whole
from visionattn.data.geometry import Geometry
from visionattn.inference.image_run import ImageRun
from visionattn.inference.listing import find_images
from visionattn.inference.opening import Opened, description, of_no_model, open_model
from visionattn.inference.predict import FIELDS, PredictOptions
from visionattn.inference.running import Outcome, masks
from visionattn.inference.work import is_begun, write_array, write_table
from visionattn.models.patches import call
from visionattn.models.pixel_classes import class_names, palette
from visionattn.models.segmentation import IGNORED
from visionattn.models.weights import described

TABLE = "masks.csv"
"""The table of the masks in a folder, a row per image."""
ARRAY = ".npy"
"""What a file ends in that is to hold the mask of one image as an array."""


def gives_masks(options: PredictOptions) -> bool:
    """Tell by the head of its file whether the model of the options gives each pixel a class.

    Raises:
        FileNotFoundError, ValueError: there is no such file, it is garbled, or nothing says which
            model it is for; one line.
    """
    metadata = description(options.checkpoint) if options.checkpoint else None
    if options.checkpoint and not (metadata or options.model):
        raise of_no_model(options.checkpoint)
    return bool(metadata) and described(metadata, options.checkpoint)[2].task == "segmentation"


@dataclass(frozen=True)
class Masked:
    """The mask of one image."""

    outcome: Outcome
    file: str | None
    """Where it is; None where there is none."""
    shares: tuple[float, ...]
    """The share of the image's pixels that each class has; empty where there is no mask."""

    def row(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Return a row of the table: ``FIELDS``, ``mask``, and ``share_`` of each class."""
        row = {name: getattr(self.outcome, name) for name in FIELDS} | {"mask": self.file}
        for number, name in enumerate(names):
            row[f"share_{name}"] = round(self.shares[number], 6) if self.shares else None
        return row


class MaskPredictor:
    """Model and images, after all checks; nothing is written before ``run``.

    Args:
        options: what ``parse_options`` returned.

    Raises:
        ValueError, FileNotFoundError: something is wrong or in the way; one line.
    """

    def __init__(self, options: PredictOptions):
        self.options = options
        if options.top_k is not None:
            raise ValueError("top_k is of classes of images, and this model has those of pixels")
        if options.combine is not None:
            raise ValueError("combine is of vectors; the masks of tiles are blended: leave it out")
        if options.output is None:
            raise ValueError(
                f"--output is missing: a folder for a PNG of each mask, or for one image a file "
                f"that ends in {ARRAY}"
            )
        self.output = Path(options.output)
        self.listing = find_images(options.images or [])
        self.as_array = self.output.suffix == ARRAY
        if self.as_array and len(self.listing) > 1:
            raise ValueError(
                f"{self.output} holds one mask, and there are {len(self.listing)} images; name a "
                "folder"
            )
        paths = [self.listing.name(index) for index in range(len(self.listing))]
        self.files = [self.output] if self.as_array else mask_files(self.output, paths)
        self._check_output(paths)
        self.opened: Opened = open_model(options, classifies=True)
        self.names = class_names(self.opened.spec)
        self.image_run = ImageRun(options, self.opened, self.listing, masks, masks=call)
        self.image_run.choose_banded(self.output)
        self.image_run.images.check_asked()

    def _check_output(self, paths: list[str]) -> None:
        images = {os.path.realpath(path): path for path in paths}
        for file in self.files:
            if (image := images.get(os.path.realpath(file))) is not None:
                raise ValueError(f"a mask would replace the image {image}; choose another output")
        if self.as_array:
            check_free(self.output, self.options.overwrite)
            return
        if self.output.suffix.lower() in (".csv", ".json", ".png"):
            raise ValueError(
                f"--output {self.output}: this model gives masks; name a folder for them, or for "
                f"one image a file that ends in {ARRAY}"
            )
        check_folder(self.output, "choose another output")
        there = [path for path in (*self.files, self.output / TABLE) if path.exists()]
        # What a command that was stopped has written goes on, once it is known to be this one.
        if there and not self.options.overwrite and not is_begun(self.output):
            raise ValueError(f"{there[0]} exists; --overwrite replaces it")
        folder = next((path for path in there if path.is_dir()), None)
        if folder is not None:
            raise ValueError(f"{folder} is a folder, where a mask would go; choose another output")

    def run(self, say: Callable[[str], None]) -> None:
        """Write the masks, and the table of them, and say what came of it.

        Raises:
            ValueError: none of the images gives a mask.
            OutOfMemory: none of them fits into memory.
            DoesNotFit: a batch clearly takes more memory than there is; nothing is written.
            Failed: a process that reads images ended.
        """
        for note in (*self.opened.notes, *self.image_run.work.lines):
            say(note)
        batch_size, files, rows = self.image_run.announce(say), iter(self.files), list[Masked]()
        self.image_run.banding.say = say
        with self.image_run.banding.at_work():
            for batch in self.image_run.outcomes(batch_size, torch.uint8):
                rows += [self._written(outcome, next(files)) for outcome in batch]
            self._end(say, rows)

    def _end(self, say: Callable[[str], None], rows: list[Masked]) -> None:
        """Write the table of the masks."""
        done = [row for row in rows if row.file is not None]
        if not done:
            first = rows[0].outcome
            raise (OutOfMemory if first.status == "oom" else ValueError)(
                f"none of the {len(rows)} images has a mask; the first: {first.path}: "
                f"{first.reason}"
            )
        if not self.as_array:
            columns = [*FIELDS, "mask", *(f"share_{name}" for name in self.names)]
            write_table(self.output / TABLE, columns, (row.row(self.names) for row in rows))
        say(f"{len(done)} of {len(rows)} images have masks: {self.output}")

    def _written(self, outcome: Outcome, path: Path) -> Masked:
        """Write the mask of an image, where there is one."""
        outcome = judged(outcome, self.opened.geometry)
        if outcome.value is None:
            return Masked(outcome, None, ())
        mask = outcome.value.numpy()
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.as_array:
            write_array(path, mask)
        else:
            picture = Image.fromarray(mask)
            picture.putpalette(palette(self.opened.spec))
            write_whole(path, lambda place: picture.save(place, format="PNG"))
        counts = np.bincount(mask.ravel(), minlength=IGNORED + 1)[: len(self.names)]
        shares = tuple((counts / mask.size).tolist())
        return Masked(replace(outcome, value=None), str(path), shares)


def judged(outcome: Outcome, geometry: Geometry) -> Outcome:
    """Return the outcome of an image with its mask at the size of the file, uint8
    ``[height, width]``; without one where the logits of a pixel are not finite.
    """
    if outcome.value is None or outcome.height is None or outcome.width is None:
        return outcome
    view = geometry.view(outcome.height, outcome.width)
    rows, columns = view.content
    part = outcome.value[:rows, :columns].numpy()
    if (part == IGNORED).any():
        return replace(outcome, status="nan", reason="outputs are not finite", value=None)
    top, left, height, width = view.box
    if part.shape != (height, width):
        part = cv2.resize(part, (width, height), interpolation=cv2.INTER_NEAREST_EXACT)
    whole = np.full((outcome.height, outcome.width), IGNORED, np.uint8)
    whole[top : top + height, left : left + width] = part
    return replace(outcome, value=torch.from_numpy(whole))


def mask_files(folder: Path, paths: list[str]) -> list[Path]:
    """Return where the mask of each image goes: its path below the folder that all share, ending in
    ``.png``; after the image's own ending where two images would have one mask.

    Raises:
        ValueError: two images are one file.
    """
    absolute = [os.path.abspath(path) for path in paths]
    if len(set(absolute)) < len(absolute):
        twice = next(path for path in paths if absolute.count(os.path.abspath(path)) > 1)
        raise ValueError(f"{twice} is named twice; each image has one mask")
    shared = os.path.commonpath([os.path.dirname(path) for path in absolute])
    below = [Path(os.path.relpath(path, shared)) for path in absolute]
    names = [path.with_suffix(".png") for path in below]
    # The mask of a.jpg.png could be that of a.jpg: until all differ, those that do not grow.
    while len(counts := Counter(names)) < len(names):
        names = [
            path.with_name(f"{path.name}.png") if counts[name] > 1 else name
            for path, name in zip(below, names, strict=True)
        ]
    return [folder / name for name in names]
