"""Features of many images in a folder of shards: ``visionattn features``.

This module owns the files of a run, how it resumes after a kill, and its messages. A part of a
collection is such a run in its own folder.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from visionattn.cli.exit_codes import Stopped
from visionattn.cli.files import check_folder, locked, unfinished
from visionattn.data.kept_features import BACKBONE
from visionattn.inference.feature_options import ExtractOptions, check
from visionattn.inference.image_batches import check_any
from visionattn.inference.image_listing import Listing, find_images
from visionattn.inference.image_reading import ReadImages
from visionattn.inference.image_run import ImageRun, read_as_asked
from visionattn.inference.model_opening import Opened, open_model
from visionattn.inference.probes import divide_folder, fit_probes, probe_folder
from visionattn.inference.shards import (
    INDEX,
    LOCK,
    PARTS,
    CollectionPart,
    Pending,
    Shard,
    check_ours,
    delete_from,
    read_features,
    report_failed,
    rows_of,
    shard_paths,
    whole_shards,
    write_index,
)
from visionattn.inference.synthetic_sources import DigitSource, Division, Drawn
from visionattn.models.mixed_blocks import places_of_blocks
from visionattn.models.patch_heads import PatchModel
from visionattn.models.patches import last_map, pooled
from visionattn.models.registration import split_args, with_head
from visionattn.models.weights import save_model

AT_WORK = "another feature extraction is running"
MIB = 2**20
DECIDING = ("dtype", "amp", "shard_images", "shard_mib", "tiles", "overlap", "combine")
"""Options that determine the contents of the files, in addition to the model and the images."""


@dataclass(frozen=True)
class Collection:
    """All images of a command, and the model for them."""

    images: ReadImages
    opened: Opened
    division: Division | None
    """Split for a probe of pooled features."""
    identity: dict[str, Any]
    """Settings that determine the features, as JSON types."""


def collect(options: ExtractOptions) -> Collection:
    """Open the model and list the images.

    Raises:
        ValueError, FileNotFoundError: an option is wrong; one line.
    """
    listing: Any = None
    if not options.drawn:
        listing = find_images(options.images, options.labels) if options.images else None
        listing = listing or DigitSource(options.val_fraction, options.seed)
    opened = open_model(options, classifies=False)
    if options.blocks is not None:
        opened = with_blocks(opened, options.blocks)
    opened.check_features(dense=options.dense)
    if options.drawn:  # at the size that the model needs
        listing = Drawn(options.drawing(), options.seed, opened.geometry)
    division = _divide(options, listing) if options.probe and not options.dense else None
    kind = "dense" if options.dense else "pooled"
    identity = opened.identity() | {"kind": kind, "images": len(listing)}
    identity |= {key: getattr(options, key) for key in DECIDING}
    identity |= {"level": options.level} if options.level else {}  # older versions wrote no level
    identity |= {"list_of_images": listing.digest()}
    return Collection(read_as_asked(options, opened, listing), opened, division, identity)


def with_blocks(opened: Opened, blocks: list[int]) -> Opened:
    """Return an opened model whose map has the features of some blocks side by side.

    Raises:
        ValueError: it is no vision transformer, has no such block, or has a head with own blocks.
    """
    if isinstance(opened.model, PatchModel):
        raise ValueError(f"{opened.name} has a head that chooses the blocks; remove blocks")
    if hasattr(opened.model, "blocks"):  # name the option of this command, not of the head
        places_of_blocks(blocks, len(opened.model.blocks), "blocks")
    model = with_head(opened.model, "classification", 0, {"head_blocks": blocks})
    args = split_args(opened.args)[1] | {"head_blocks": model.taken}
    if getattr(opened.model, "dynamic_img_size", False):
        args["dynamic_img_size"] = True
    return replace(opened, model=model.to(opened.device).eval(), args=args)


def _divide(options: ExtractOptions, listing: Listing) -> Division:
    """Split the images for a probe of pooled features."""
    if isinstance(listing, (DigitSource, Drawn)):
        division = listing.divide()
    else:
        how = dict(val_fraction=options.val_fraction, seed=options.seed)
        division = divide_folder(options.images[0], options.labels, **how)
    if len(division.class_names) < 2:
        raise ValueError(
            f"expected at least two classes for probe, got only {division.class_names[0]} "
            f"({options.images[0]})"
        )
    if options.neighbours > len(division.fitted):
        raise ValueError(
            f"expected neighbours at most {len(division.fitted)}, the images to fit on, got "
            f"{options.neighbours}"
        )
    return division


class Extraction:
    """Model, images and folder, after all checks; nothing is written before ``run``.

    Args:
        options: result of ``parse_options``.
        collection: all images; the options may select a part of them. None: from the options.

    Raises:
        ValueError, FileNotFoundError: an option is wrong, or a file is in the way; one line.
    """

    def __init__(self, options: ExtractOptions, collection: Collection | None = None):
        check(options)
        self.options, output = options, Path(options.output or "")
        self.part = CollectionPart.parse(options.shard) if options.shard else None
        self.folder, place, self.backbone = output, output, output / BACKBONE
        if self.part is not None:
            self.part.check_division(output)
            self.folder = self.part.folder(output)
            place = Path(f"{output}.{self.part.number}-of-{self.part.of}")
        self.collection = collection or collect(options)
        self._check_folder()
        self.opened, images = self.collection.opened, self.collection.images
        self.numbers = range(len(images))
        if self.part is not None:
            self.numbers = self.part.images(len(images))
        compute, held_bytes = (last_map, options.shard_mib * MIB) if options.dense else (pooled, 0)
        how = dict(numbers=self.numbers, output=place, held_bytes=held_bytes)
        self.image_run = ImageRun(options, self.opened, images, compute, **how)
        self.kept = self._whole_shards()
        if not self.kept:
            images.check_asked(self.numbers)

    def _check_folder(self) -> None:
        """Raise ValueError if features cannot be written, or would be mixed with other files."""
        folder, overwrite = self.folder, self.options.overwrite
        check_folder(folder, "pass another --output")
        if (folder / PARTS).exists() and (overwrite or not (folder / INDEX).exists()):
            raise ValueError(f"{folder} holds unmerged parts; pass --merge, or another --output")
        if not overwrite:
            check_ours(folder, *([] if self.options.blocks is None else [BACKBONE]))

    def _whole_shards(self) -> list[Shard]:
        if self.options.overwrite:
            return []
        return whole_shards(self.folder, self.collection.identity, self.numbers.start)

    def run(self, say: Callable[[str], None]) -> None:
        """Write the missing features and the index, and report the result.

        Raises:
            Stopped: Ctrl-C; written files stay.
            ValueError: another extraction is running in the folder, or no image gives features.
            OutOfMemory: no image fits into memory.
            Failed: a process that reads images ended.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            taken = f"{AT_WORK} in {self.folder}; wait for it or end it"
            with locked(self.folder / LOCK, taken):
                for path in unfinished(self.folder):  # from a run that was killed while writing
                    path.unlink()
                self.kept = self._whole_shards()  # another run may have written since the check
                self._run(say)
        finally:
            with suppress(OSError):  # not empty
                self.folder.rmdir()

    def _keep_model(self) -> None:
        """Write the model of the maps, with its images as it sees them here, next to the index or
        to the parts.
        """
        opened, seen = self.opened, self.opened.geometry
        of_images = dict(img_size=seen.img_size, fit=seen.fit, max_patches=seen.max_patches)
        spec = replace(opened.spec, num_classes=0, class_names=(), **of_images)
        save_model(self.backbone, opened.model, opened.name, opened.args, spec)

    def _run(self, say: Callable[[str], None]) -> None:
        """Do the work of ``run`` in the locked folder."""
        done, total = sum(len(shard.rows) for shard in self.kept), len(self.numbers)
        listing, lines = self.collection.images.listing, self.image_run.lines
        if isinstance(listing, Drawn):
            lines.append(listing.describe())
        if self.part is not None:
            first, whole = self.numbers.start + 1, len(listing)
            lines.append(f"part {self.part}: images {first} to {self.numbers.stop} of {whole}")
        if done:
            kept = _files(len(self.kept))
            lines.append(f"{done} of {total} images are done; resuming after {kept}")
        start = time.perf_counter()
        with self.image_run.begun(say, done):
            try:
                self._write_shards(done)
            except KeyboardInterrupt as error:
                again = f"the same command{' without --overwrite' * self.options.overwrite}"
                stored = sum(1 for _ in rows_of(self.folder))
                raise Stopped(
                    f"stopped; the features of {stored} of {total} images are in {self.folder}; to "
                    f"resume, run {again}"
                ) from error
        cells, index = getattr(listing, "cells", {}), self.folder / INDEX
        rows = (row | cells.get(row["path"], {}) for row in rows_of(self.folder))
        failed, _ = write_index(index, rows)
        seconds = time.perf_counter() - start
        speed = f" in {seconds:.1f} s, {(total - done) / seconds:.3g} images/s"
        files = _files(len(shard_paths(self.folder)))
        say(f"{total} images{speed if done < total else ''}: {files} and {index}")
        if self.part is None:
            check_any(failed, total, "features")
        report_failed(failed, say)
        for text in self._probe():
            say(text)

    def _probe(self) -> Iterator[str]:
        """Fit and evaluate the requested probes, and yield the results as text."""
        listing, division = self.collection.images.listing, self.collection.division
        if division is not None:
            yield from fit_probes(read_features(self.folder), division, self.options.neighbours)
        elif self.options.probe and isinstance(listing, Drawn):
            yield from probe_folder(self.folder, self.image_run.images, listing, self.options.seed)

    def _write_shards(self, done: int) -> None:
        """Write the shards from image ``done`` on, and delete later shards of an earlier, longer
        run.
        """
        options, number = self.options, len(self.kept)
        if options.overwrite:
            (self.folder / INDEX).unlink(missing_ok=True)
            delete_from(self.folder, 0)
            self.backbone.unlink(missing_ok=True)
        if options.blocks is not None:
            self._keep_model()
        first = self.numbers.start + done
        pending = Pending(self.folder, number, first, self.collection.identity)
        dtype = getattr(torch, options.dtype)
        outcomes = self.image_run.outcomes(dtype, done)
        # A full shard is written at once, so a kill loses at most one shard.
        for batch in outcomes if done < len(self.numbers) else ():
            pending.add(batch)
            if pending.is_full(options.shard_images, options.shard_mib * MIB):
                pending = pending.write()
        if len(pending):
            pending = pending.write()
        delete_from(self.folder, pending.number)


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'} of features"
