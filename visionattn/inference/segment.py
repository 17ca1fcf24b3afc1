"""Masks, probabilities and outlines of many images: ``visionattn predict`` with a segmentation
model.

This module owns the files, and resizes masks to their images. Every file is written completely or
not at all, and their table last.
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image

from visionattn.cli.files import check_folder, check_free, write_whole
from visionattn.cli.untrusted import brief
from visionattn.data.formats.reader import Reader, require
from visionattn.data.geometry import Geometry
from visionattn.inference.image_batches import FIELDS, Outcome, check_any, say_failed
from visionattn.inference.image_listing import find_images
from visionattn.inference.image_run import ImageRun, read_as_asked
from visionattn.inference.inference_options import PredictOptions
from visionattn.inference.model_opening import Opened, description, of_no_model, open_model
from visionattn.inference.polygons import CocoFile, class_polygons, write_geojson
from visionattn.inference.result_files import write_array, write_table
from visionattn.models.pixel_classes import palette
from visionattn.models.segmentation import IGNORED, Segmenter, classes_of, probabilities_of
from visionattn.models.weights import described

TABLE = "masks.csv"
"""The table of the masks in a folder, a row per image."""
COCO = "coco.json"
ARRAY = ".npy"
"""Suffix of an output that holds the mask of one image as an array."""


def gives_masks(options: PredictOptions) -> bool:
    """Return, from the header of its file, whether the options name a segmentation model.

    Raises:
        FileNotFoundError, ValueError: there is no such file, it is malformed, its model is not
            stated, or an option is only for segmentation models; one line.
    """
    metadata = description(options.checkpoint) if options.checkpoint else None
    if options.checkpoint and not (metadata or options.model):
        raise of_no_model(options.checkpoint)
    if metadata and described(metadata, options.checkpoint)[2].task == "segmentation":
        return True
    if options.save is not None:
        raise ValueError("--save needs a segmentation model; remove it")
    return False


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
            raise ValueError(
                "top_k needs a model with classes of images, got a segmentation model; remove it"
            )
        if options.combine is not None:
            raise ValueError(
                "combine needs one vector per image, got masks, which are blended; remove it"
            )
        if options.output is None:
            raise ValueError(
                "expected --output: a folder for a PNG of each mask, or for one image a file "
                f"that ends in {ARRAY}"
            )
        self.output = Path(options.output)
        listing = self.listing = find_images(options.images or [], options.labels)
        paths = [listing.name(index) for index in range(len(listing))]
        self.saved, self.as_array = options.saved, self.output.suffix == ARRAY
        if self.as_array and len(paths) > 1:
            raise ValueError(
                f"expected one image for --output {self.output}, got {len(paths)}; pass a folder"
            )
        self.files = self._files_of(paths)
        self.coco_names = [path.as_posix() for path in below_common(paths)]
        self._check_output(paths)
        self.opened: Opened = open_model(options, classifies=True)
        self.names = self.opened.spec.output_names
        self.outlined = self._outlined()
        self.coco = CocoFile(self.names, self.outlined)
        self.images = images = read_as_asked(options, self.opened, listing)
        probable = "probabilities" in self.saved
        compute, convert, self.dtype = Segmenter.masks, classes_of, torch.uint8
        if probable:
            compute, convert = Segmenter.probabilities, probabilities_of
            self.dtype = torch.float16
        how = dict(convert=convert, output=self.output)
        self.image_run = ImageRun(options, self.opened, images, compute, **how)
        known = [path for files in self.files for path in files.values()]
        known += [self.output / COCO] if "coco" in self.saved else []
        there = [path for path in (*known, self.output / TABLE) if path.exists()]
        # A resumed command replaces the files of the stopped one.
        begun = self.image_run.banding.work.folder.exists()
        if there and not options.overwrite and not begun:
            raise ValueError(f"{there[0]} exists; pass --overwrite to replace it")
        images.check_asked()

    def _files_of(self, paths: list[str]) -> list[dict[str, Path]]:
        """Return the files of each image by their kind, one of ``Saved``."""
        if self.as_array:
            return [{"masks": self.output}]
        map_format = self.options.map_format or "npy"
        suffixes = {"masks": ".png", "probabilities": f".{map_format}", "geojson": ".geojson"}
        if "geojson" in self.saved or map_format == "tif":
            require("raster", "rasterio", what="writing GeoJSON and GeoTIFF")
        if map_format == "zarr":
            require("arrays", "zarr", what="a zarr array")
        return [
            {kind: file.with_suffix(suffixes[kind]) for kind in suffixes if kind in self.saved}
            for file in mask_files(self.output, paths)
        ]

    def _outlined(self) -> list[int]:
        """Return the classes that are outlined; raise ValueError for an unknown name."""
        wanted = self.names if self.options.outline is None else self.options.outline
        for name in wanted:
            if name not in self.names:
                known = ", ".join(self.names)
                raise ValueError(
                    f"outline: there is no class {brief(name)}; the classes are {known}"
                )
        return [number for number, name in enumerate(self.names) if name in wanted]

    def _check_output(self, paths: list[str]) -> None:
        images = {os.path.realpath(path): path for path in paths}
        for file in (path for files in self.files for path in files.values()):
            if (image := images.get(os.path.realpath(file))) is not None:
                raise ValueError(f"a result would replace the image {image}; pass another --output")
        if self.as_array:
            check_free(self.output, True)
        elif self.output.suffix.lower() in (".csv", ".json", ".geojson", ".png"):
            raise ValueError(
                "expected a folder as --output for masks, or for one image a file that ends in "
                f"{ARRAY}, got {self.output}"
            )
        else:
            check_folder(self.output, "pass another --output")

    def run(self, say: Callable[[str], None]) -> None:
        """Write the masks and their table, and report the result.

        Raises:
            ValueError: no image gives a mask.
            OutOfMemory: no image fits into memory.
            DoesNotFit: a batch clearly needs more than the available memory; nothing is written.
            Failed: a process that reads images ended.
        """
        run, numbers, rows = self.image_run, iter(range(len(self.files))), list[dict[str, Any]]()
        failed = list[Outcome]()
        with run.begun(say):
            for batch in run.outcomes(self.dtype):
                for found, number in zip(batch, numbers, strict=False):
                    outcome = judged(found, self.opened.geometry)
                    rows.append(self._written(outcome, number))
                    failed += [outcome] if outcome.value is None else []
            check_any(failed, len(rows), "a mask")
            if not self.as_array:
                self.output.mkdir(parents=True, exist_ok=True)
                columns = [*FIELDS, *self.listing.columns, *self._columns()]
                write_table(self.output / TABLE, columns, rows)
            if "coco" in self.saved:
                self.coco.write(self.output / COCO)
        say(f"{len(rows) - len(failed)} of {len(rows)} images have masks: {self.output}")
        say_failed(failed, say)

    def _columns(self) -> list[str]:
        """Return the last columns of the table: the file of each kind, and ``share_`` of each
        class, its share of the pixels.
        """
        kinds = ("mask" if kind == "masks" else kind for kind in self.files[0])
        return [*kinds, *(f"share_{name}" for name in self.names)]

    def _written(self, outcome: Outcome, number: int) -> dict[str, Any]:
        """Write the files of an image, if it has a mask; return its row of the table."""
        row = outcome.row() | self.listing.cells.get(outcome.path, {})
        columns = self._columns()
        if outcome.value is None:
            return row | dict.fromkeys(columns)
        probable = outcome.value.ndim == 3
        mask = (classes_of(outcome.value)[0] if probable else outcome.value).numpy()
        for kind, path in self.files[number].items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.as_array:
                write_array(path, mask)
            elif kind == "masks":
                picture = Image.fromarray(mask)
                picture.putpalette(palette(self.opened.spec))
                write_whole(path, partial(picture.save, format="PNG"))
            else:
                with self.images.opened(number) as reader:
                    self._write_placed(kind, path, reader, mask, outcome.value.numpy())
        if "coco" in self.saved:
            self.coco.add(self.coco_names[number], mask)
        shares = np.bincount(mask.ravel(), minlength=IGNORED + 1) / mask.size
        values = [*map(str, self.files[number].values())]
        values += [round(share, 6) for share in shares[: len(self.names)].tolist()]
        return row | dict(zip(columns, values, strict=True))

    def _write_placed(
        self, kind: str, path: Path, reader: Reader, mask: np.ndarray, maps: np.ndarray
    ) -> None:
        """Write polygons or probabilities ``maps`` with the georeference of an open image."""
        if kind == "geojson":
            colours = np.reshape(palette(self.opened.spec), (-1, 3)).tolist()
            place = reader.georeference
            found = class_polygons(mask, self.outlined, self.names, colours, place)
            return write_geojson(path, found, place)
        from visionattn.data.large import open_sink

        with open_sink(path, source=reader, overwrite=True) as sink:
            sink.begin(maps.shape, maps.dtype)
            sink.write(0, maps)
            sink.finish()


def judged(outcome: Outcome, geometry: Geometry) -> Outcome:
    """Return the outcome of an image with its mask, uint8 ``[height, width]``, or its probabilities
    ``[classes, height, width]``, at the size of the file. Probabilities of unseen pixels are NaN.

    The mask is removed if the logits of any pixel are not finite.
    """
    if outcome.value is None or outcome.height is None or outcome.width is None:
        return outcome
    view = geometry.view(outcome.height, outcome.width)
    rows, columns = view.content
    part = outcome.value[..., :rows, :columns].numpy()
    if part.dtype == np.uint8 and (part == IGNORED).any():
        return replace(outcome, status="nan", reason="outputs are not finite", value=None)
    top, left, height, width = view.box
    size = outcome.height, outcome.width
    if (*view.box, *part.shape[-2:]) == (0, 0, *size, *size):
        return replace(outcome, value=torch.from_numpy(part))
    down, across = nearest(part.shape[-2], height), nearest(part.shape[-1], width)
    unseen = np.nan if part.ndim == 3 else IGNORED
    whole = np.full((*part.shape[:-2], *size), unseen, part.dtype)
    whole[..., top : top + height, left : left + width] = part[..., down[:, None], across]
    return replace(outcome, value=torch.from_numpy(whole))


def nearest(have: int, wanted: int) -> np.ndarray:
    """Return for each of ``wanted`` places the index of the nearest of ``have`` places."""
    places = np.arange(have, dtype=np.int32)[:, None]
    return cv2.resize(places, (1, wanted), interpolation=cv2.INTER_NEAREST_EXACT)[:, 0]


def below_common(paths: list[str]) -> list[Path]:
    """Return the path of each image below the folder that all images share."""
    absolute = [os.path.abspath(path) for path in paths]
    shared = os.path.commonpath([os.path.dirname(path) for path in absolute])
    return [Path(os.path.relpath(path, shared)) for path in absolute]


def mask_files(folder: Path, paths: list[str]) -> list[Path]:
    """Return the file of each image's mask: its path below the common folder, ending in ``.png``.

    If two images would share a mask, the image's own suffix is kept before ``.png``.

    Raises:
        ValueError: two images are one file.
    """
    absolute = [os.path.abspath(path) for path in paths]
    if len(set(absolute)) < len(absolute):
        twice = next(path for path in paths if absolute.count(os.path.abspath(path)) > 1)
        raise ValueError(f"expected each image once, got {twice} twice")
    below = below_common(paths)
    names = [path.with_suffix(".png") for path in below]
    # The mask of a.jpg.png could be the mask of a.jpg: extend equal names until all differ.
    while len(counts := Counter(names)) < len(names):
        names = [
            path.with_name(f"{path.name}.png") if counts[name] > 1 else name
            for path, name in zip(below, names, strict=True)
        ]
    return [folder / name for name in names]
