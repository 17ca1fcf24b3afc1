"""Features of many images in a folder of shards: the work of ``visionattn features``.

This module owns what a run writes, how it goes on after it was killed, and what it says.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any

import torch

from visionattn.cli.ends import Stopped
from visionattn.cli.files import check_folder, locked, unfinished
from visionattn.inference.collection import Part, check_beside
from visionattn.inference.dense_probe import probe_folder
from visionattn.inference.drawn import Digits, Drawn
from visionattn.inference.feature_options import ExtractOptions, check
from visionattn.inference.image_run import ImageRun
from visionattn.inference.listing import Listing, find_images
from visionattn.inference.opening import Opened, open_model
from visionattn.inference.probe import Division, divide_folder, fit_probes
from visionattn.inference.shards import (
    INDEX,
    LOCK,
    PARTS,
    Pending,
    Shard,
    check_images,
    check_ours,
    delete_from,
    error_of,
    has_features,
    read_features,
    report_failures,
    shard_paths,
    whole_shards,
    write_index,
)
from visionattn.models.patches import last_map, pooled

DTYPES = {"float32": torch.float32, "float16": torch.float16}
AT_WORK = "another extraction of features is at work"
MIB = 2**20


class Extraction:
    """Model, images and folder, after all checks; nothing is written before ``run``.

    Args:
        options: what ``parse_options`` returned.

    Raises:
        ValueError, FileNotFoundError: something is wrong or in the way; one line.

    Attributes:
        part: which part of the images is taken; None: all of them are.
        numbers: those of the images that are taken, among all.
    """

    def __init__(self, options: ExtractOptions):
        check(options)
        self.options, self.folder = options, Path(options.output)
        self.part = Part.parse(options.shard) if options.shard else None
        self.listing: Listing
        self.division: Division | None = None
        # Images that are drawn wait for the model, which says their size.
        if not options.drawn:
            self._find_images()
        self._check_folder()
        self.opened: Opened = open_model(options, classifies=False)
        if not options.dense:
            self.opened.check_pooled()
        if options.dense and not hasattr(self.opened.model, "forward_intermediates"):
            raise ValueError(f"{self.opened.name} gives no feature maps; leave --dense out")
        if options.drawn:
            self._find_images()
        compute = last_map if options.dense else pooled
        self.image_run = ImageRun(options, self.opened, self.listing, compute)
        self.identity = self.opened.identity() | self._own_identity()
        if options.engine == "here":
            self._begin()

    def of_part(self, part: Part) -> "Extraction":
        """Return the same extraction of a part of the images alone, in the folder of the part;
        with another engine than this process, an extraction is of parts alone.

        Raises:
            ValueError: there are fewer images than parts, or something is in the way.
        """
        other = copy(self)
        other.image_run = copy(self.image_run)
        other.image_run.images = copy(self.image_run.images)
        other.part = part
        other._check_folder()
        other._begin()
        return other

    def _check_folder(self) -> None:
        """Check that the features may be written, and name their folder."""
        output = Path(self.options.output)
        if self.part is None:
            if self.options.engine == "here":
                _check_folder(output, self.options.overwrite)
            return
        check_folder(output, "choose another --output")
        check_beside(output, self.part)
        self.folder = self.part.folder(output)
        _check_folder(self.folder, self.options.overwrite)

    def _begin(self) -> None:
        """Find which images are to be done, and which of them are."""
        self.numbers = range(len(self.listing))
        if self.part is not None:
            self.numbers = self.part.images(len(self.listing))
        self.image_run.images.stop = self.numbers.stop
        self.kept = self._whole_shards()
        check_images(self.kept, self.listing.name, self.numbers)
        options = self.options
        held_bytes = options.shard_mib * MIB if options.dense else 0
        self.image_run.choose_banded(self._beside, held_bytes=held_bytes)
        if not self.kept:
            self.image_run.images.check_asked()
        self.begun = False

    @property
    def done(self) -> int:
        """Return how many images are done."""
        return sum(len(shard.rows) for shard in self.kept)

    @property
    def _beside(self) -> Path:
        """Return beside what the work of large images is kept: nothing else lies among parts."""
        output, part = Path(self.options.output or ""), self.part
        return output if part is None else Path(f"{output}.{part.number}-of-{part.of}")

    def _whole_shards(self) -> list[Shard]:
        if self.options.overwrite:
            return []
        try:
            return whole_shards(self.folder, self.identity, self.numbers.start)
        except ValueError:
            # Where no image gave features, as with a wrong option, there is nothing to keep.
            if has_features(self.folder):
                raise
            return []

    def _find_images(self) -> None:
        """List the images, and divide them for a probe of pooled features."""
        options = self.options
        if options.drawn:
            self.listing = Drawn(options.drawing(), options.seed, self.opened.geometry)
        elif options.data:
            self.listing = Digits(options.val_fraction, options.seed)
        else:
            self.listing = find_images(options.images)
        if options.probe and not options.dense:
            self.division = self._divide()

    def _divide(self) -> Division:
        options = self.options
        if isinstance(self.listing, (Digits, Drawn)):
            division = self.listing.divide()
        else:
            division = divide_folder(
                options.images[0], val_fraction=options.val_fraction, seed=options.seed
            )
        if len(division.class_names) < 2:
            raise ValueError(
                f"probe needs two classes or more; {options.images[0]} has "
                f"{division.class_names[0]} alone"
            )
        if options.neighbours > len(division.fitted):
            raise ValueError(
                f"neighbours {options.neighbours} of {len(division.fitted)} images to fit on; name "
                "fewer"
            )
        return division

    def _own_identity(self) -> dict[str, Any]:
        options = self.options
        own: dict[str, Any] = {
            "kind": "dense" if options.dense else "pooled",
            "images": len(self.listing),
        }
        own |= {key: getattr(options, key) for key in ("dtype", "amp", "shard_images", "shard_mib")}
        own |= {key: getattr(options, key) for key in ("tiles", "overlap", "combine")}
        # What earlier versions wrote has no level.
        own |= {"level": options.level} if options.level else {}
        return own | {"list_of_images": self.listing.digest()}

    def run(self, say: Callable[[str], None]) -> None:
        """Write the features that are missing and the index, and say what came of it.

        With ``overwrite`` earlier features are deleted once the first file of new ones is written.

        Raises:
            Stopped: Ctrl-C; the files that are written stay.
            ValueError: another extraction is at work in the folder; none of the images gives
                features, or with ``overwrite`` none of the first file.
            OutOfMemory: none of them fits into memory.
            Failed: a process that reads images ended.
        """
        made = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        with (
            emptied_at_end(self.folder, made),
            locked(self.folder / LOCK, f"{AT_WORK} in {self.folder}; wait for it or end it"),
        ):
            for path in unfinished(self.folder):  # of a run that was killed as it wrote
                path.unlink()
            self.kept = self._whole_shards()  # another run may have written since the check
            self._run(say)

    def _run(self, say: Callable[[str], None]) -> None:
        """Do the work of ``run`` in a folder that is locked."""
        for note in (*self.opened.notes, *self.image_run.work.lines):
            say(note)
        if isinstance(self.listing, Drawn):
            say(self.listing.describe())
        done, total = self.done, len(self.numbers)
        if self.part is not None:
            first, stop = self.numbers.start, self.numbers.stop
            say(f"part {self.part}: images {first + 1} to {stop} of {len(self.listing)}")
        if done:
            say(f"{done} of {total} images are done: going on after {count_files(len(self.kept))}")
        start = time.perf_counter()
        batch_size = 1
        if done < total:
            batch_size = self.image_run.announce(say, self.numbers.start + done)
        try:
            self.image_run.banding.say = say
            with self.image_run.banding.at_work():
                files = self._write_shards(done, batch_size)
        except KeyboardInterrupt as error:
            raise Stopped(self._stopped()) from error
        index = write_index(self.folder)
        seconds = time.perf_counter() - start
        speed = (
            f" in {seconds:.1f} s, {(total - done) / seconds:.3g} images/s" if done < total else ""
        )
        say(f"{total} images{speed}: {count_files(files)} and {index}")
        report_failures(self.folder, say, all_fail=self.part is None)
        for line in self._probe():
            say(line)

    def _probe(self) -> Iterator[str]:
        """Fit and judge the probes that are asked for, and say what came of them."""
        if self.division is not None:
            features = read_features(self.folder)
            yield from fit_probes(features, self.division, self.options.neighbours).lines()
        elif self.options.probe and isinstance(self.listing, Drawn):
            yield from probe_folder(
                self.folder, self.image_run.images, self.listing, self.options.seed
            )

    def _write_shards(self, done: int, batch_size: int) -> int:
        """Write the shards from image ``done`` on, and return how many there are then."""
        options, number = self.options, len(self.kept)
        total = len(self.numbers)
        # Nothing is left to compute; shards behind the last one are of an earlier, longer run.
        if done == total:
            delete_from(self.folder, number)
            return number
        dtype, first = DTYPES[options.dtype], self.numbers.start
        outcomes = self.image_run.outcomes(batch_size, dtype, first=first, done=done)
        # Batches fill a shard, which is written as soon as it is full: a kill loses one shard at
        # most.
        pending = Pending(self.folder, number, first + done, self.identity)
        for batch in outcomes:
            pending.add(batch)
            if pending.is_full(options.shard_images, options.shard_mib * MIB):
                self._write(pending)
                number += 1
                following = pending.first + len(pending)
                pending = Pending(self.folder, number, following, self.identity)
        if len(pending):
            self._write(pending)
            number += 1
        return number

    def _write(self, pending: Pending) -> None:
        """Write a shard; after the first one, delete the earlier ones that are not kept."""
        if self._keeps_old() and not pending.bytes:
            text = (
                f"none of the first {len(pending)} images gives features, so that those in "
                f"{self.folder} stay"
            )
            raise error_of(pending.rows[0], text)
        pending.write()
        if not self.begun:
            delete_from(self.folder, len(self.kept) + 1)
            self.begun = True

    def _keeps_old(self) -> bool:
        """Tell whether old features are still there that new ones are to replace."""
        return self.options.overwrite and not self.begun and bool(shard_paths(self.folder))

    def _stopped(self) -> str:
        if self._keeps_old():
            return f"stopped; the features in {self.folder} stay as they were"
        again = (
            "the same command without --overwrite" if self.options.overwrite else "the same command"
        )
        return f"stopped; the files that are written stay in {self.folder}, {again} goes on"


@contextmanager
def emptied_at_end(folder: Path, made: bool) -> Iterator[None]:
    """Delete a folder in the end that was made for what then was not begun."""
    try:
        yield
    finally:
        if made:
            with suppress(OSError):  # something is in it
                folder.rmdir()


def count_files(count: int) -> str:
    """Say how many files of features there are."""
    return f"{count} file{'' if count == 1 else 's'} of features"


def _check_folder(folder: Path, overwrite: bool) -> None:
    """Raise ValueError where features cannot be written, or would lie among other files."""
    check_folder(folder, "choose another --output")
    if (folder / PARTS).exists() and (overwrite or not (folder / INDEX).exists()):
        raise ValueError(f"{folder} holds parts, not merged; --merge, or choose another --output")
    if folder.exists() and not overwrite:
        check_ours(folder)
