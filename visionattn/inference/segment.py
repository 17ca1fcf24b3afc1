"""Masks of many images, as one PNG each or one array: ``visionattn predict`` with a segmentation
model.

This module owns the files, and resizes masks to their images. Every file is written completely or
not at all, and their table last.
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image

from visionattn.cli.files import check_folder, check_free, write_whole
from visionattn.data.geometry import Geometry
from visionattn.inference.image_batches import Outcome, masks
from visionattn.inference.image_listing import find_images
from visionattn.inference.image_run import ImageRun, read_as_asked
from visionattn.inference.inference_options import PredictOptions
from visionattn.inference.model_opening import Opened, description, of_no_model, open_model
from visionattn.inference.predict import FIELDS
from visionattn.inference.result_files import write_array, write_table
from visionattn.models.patches import call
from visionattn.models.pixel_classes import class_names, palette
from visionattn.models.segmentation import IGNORED
from visionattn.models.weights import described

TABLE = "masks.csv"
"""The table of the masks in a folder, a row per image."""
ARRAY = ".npy"
"""Suffix of an output that holds the mask of one image as an array."""


def gives_masks(options: PredictOptions) -> bool:
    """Return, from the header of its file, whether the options name a segmentation model.

    Raises:
        FileNotFoundError, ValueError: there is no such file, it is malformed, or its model is not
            stated; one line.
    """
    metadata = description(options.checkpoint) if options.checkpoint else None
    if options.checkpoint and not (metadata or options.model):
        raise of_no_model(options.checkpoint)
    return bool(metadata) and described(metadata, options.checkpoint)[2].task == "segmentation"


class MaskPredictor:
    """Model and images, after all checks; nothing is written before ``run``.

    Args:
        options: result of ``parse_options``.

    Raises:
        ValueError, FileNotFoundError: an option is wrong, or a file is in the way; one line.
    """

    def __init__(self, options: PredictOptions):
        self.options = options
        if options.top_k is not None:
            raise ValueError("top_k is for classes of images; this model gives classes of pixels")
        if options.combine is not None:
            raise ValueError("combine is for vectors; the masks of tiles are blended: leave it out")
        if options.output is None:
            raise ValueError(
                f"--output is missing: a folder for a PNG of each mask, or for one image a file "
                f"that ends in {ARRAY}"
            )
        self.output = Path(options.output)
        listing = self.listing = find_images(options.images or [], options.labels)
        paths = [listing.name(index) for index in range(len(listing))]
        self.as_array = self.output.suffix == ARRAY
        if self.as_array and len(paths) > 1:
            raise ValueError(
                f"{self.output} holds one mask, and there are {len(paths)} images; name a folder"
            )
        self.files = [self.output] if self.as_array else mask_files(self.output, paths)
        self._check_output(paths)
        self.opened: Opened = open_model(options, classifies=True)
        self.names = class_names(self.opened.spec)
        images = read_as_asked(options, self.opened, listing)
        how = dict(masks=call, output=self.output)
        self.image_run = ImageRun(options, self.opened, images, masks, **how)
        there = [path for path in (*self.files, self.output / TABLE) if path.exists()]
        # A resumed command replaces the files of the stopped one.
        begun = self.image_run.banding.work.folder.exists()
        if there and not options.overwrite and not begun:
            raise ValueError(f"{there[0]} exists; --overwrite replaces it")
        images.check_asked()

    def _check_output(self, paths: list[str]) -> None:
        images = {os.path.realpath(path): path for path in paths}
        for file in self.files:
            if (image := images.get(os.path.realpath(file))) is not None:
                raise ValueError(f"a mask would replace the image {image}; choose another output")
            if file.is_dir():
                raise ValueError(
                    f"{file} is a folder, where a mask would go; choose another output"
                )
        if self.as_array:
            check_free(self.output, True)
        elif self.output.suffix.lower() in (".csv", ".json", ".png"):
            raise ValueError(
                f"--output {self.output}: this model gives masks; name a folder for them, or for "
                f"one image a file that ends in {ARRAY}"
            )
        else:
            check_folder(self.output, "choose another output")

    def run(self, say: Callable[[str], None]) -> None:
        """Write the masks and their table, and report the result.

        Raises:
            ValueError: no image gives a mask.
            OutOfMemory: no image fits into memory.
            DoesNotFit: a batch clearly needs more than the available memory; nothing is written.
            Failed: a process that reads images ended.
        """
        run, files, rows = self.image_run, iter(self.files), list[dict[str, Any]]()
        for note in (*self.opened.notes, *run.lines):
            say(note)
        batch_size, failed = run.announce(say), list[Outcome]()
        run.banding.say = say
        with run.banding.at_work():
            for batch in run.outcomes(batch_size, torch.uint8):
                for found, file in zip(batch, files, strict=False):
                    outcome = judged(found, self.opened.geometry)
                    rows.append(self._written(outcome, file))
                    failed += [outcome] if outcome.value is None else []
            if len(failed) == len(rows):
                raise failed[0].error(f"none of the {len(rows)} images has a mask; the first: ")
            if not self.as_array:
                columns = [
                    *FIELDS,
                    *self.listing.columns,
                    "mask",
                    *(f"share_{name}" for name in self.names),
                ]
                write_table(self.output / TABLE, columns, rows)
        say(f"{len(rows) - len(failed)} of {len(rows)} images have masks: {self.output}")

    def _written(self, outcome: Outcome, path: Path) -> dict[str, Any]:
        """Write the mask of an image, if there is one; return its row of the table.

        A row has ``FIELDS``, cells of ``--labels``, ``mask``, and ``share_`` of each class, its
        share of the pixels.
        """
        row = {name: getattr(outcome, name) for name in FIELDS}
        row |= self.listing.cells.get(outcome.path, {})
        if outcome.value is None:
            return row | dict.fromkeys(("mask", *(f"share_{name}" for name in self.names)))
        mask = outcome.value.numpy()
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.as_array:
            write_array(path, mask)
        else:
            picture = Image.fromarray(mask)
            picture.putpalette(palette(self.opened.spec))
            write_whole(path, lambda place: picture.save(place, format="PNG"))
        shares = np.bincount(mask.ravel(), minlength=IGNORED + 1) / mask.size
        named = zip(self.names, shares.tolist(), strict=False)
        return row | {"mask": str(path)} | {f"share_{name}": round(x, 6) for name, x in named}


def judged(outcome: Outcome, geometry: Geometry) -> Outcome:
    """Return the outcome of an image with its mask at the size of the file, uint8
    ``[height, width]``.

    The mask is removed if the logits of any pixel are not finite.
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
    """Return the file of each image's mask: its path below the common folder, ending in ``.png``.

    If two images would share a mask, the image's own suffix is kept before ``.png``.

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
    # The mask of a.jpg.png could be the mask of a.jpg: extend equal names until all differ.
    while len(counts := Counter(names)) < len(names):
        names = [
            path.with_name(f"{path.name}.png") if counts[name] > 1 else name
            for path, name in zip(below, names, strict=True)
        ]
    return [folder / name for name in names]
