"""The work of ``visionattn generate``: a picture of all images, an array, or a folder of them,
which appears whole or not at all.

What a run that was stopped has written is kept beside the output, and the same command goes on.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from safetensors.torch import load, save
from torch import Tensor

from visionattn.cli.files import printable, whole_folder, write_whole
from visionattn.cli.progress import Progress
from visionattn.cli.provenance import provenance
from visionattn.data.geometry import pixels
from visionattn.inference.generate.decoder import open_decoder
from visionattn.inference.generate.generation import Batch, Drawn, Generation
from visionattn.inference.generate.options import (
    ARRAY,
    PICTURE,
    SUMMARY,
    GenerateOptions,
    check_output,
)
from visionattn.inference.generate.sheet import columns_for, sheet, sheet_size
from visionattn.inference.listing import digest_of, find_images
from visionattn.inference.work import WorkFolder, in_the_way, write_array, write_table

INDEX = "index.csv"
FIELDS = ("file", "image", "completion", "path", "class", "given_rows", "bits_per_dim")
FIELDS += ("given_bits_per_dim",)
DIGITS = 4
"""Decimals of bits."""
MOST_COLUMNS = 24
"""Classes of a model at most for which each has a column of the picture."""


class Generating:
    """Model, prompts and output, after all checks; nothing is written before ``run``.

    Args:
        options: what ``parse_generate`` returned.

    Raises:
        ValueError, FileNotFoundError: something is wrong or in the way; one line.
        DoesNotFit: a batch clearly takes more memory than there is.
    """

    def __init__(self, options: GenerateOptions):
        self.options, self.output = options, Path(options.output or "")
        blocked = in_the_way(lambda: check_output(options), self.output)
        listing = None if options.complete is None else find_images(options.complete)
        if options.threads:
            torch.set_num_threads(options.threads)
        self.opened = open_decoder(options.checkpoint or "", options.device)
        self._check_channels()
        self.generation = Generation(self.opened, options, listing)
        if options.output and options.kind == PICTURE:
            tiles = self.generation.images + len(self.generation.prompts)
            sheet_size(tiles, self._columns(), *self.generation.size)
        self.work = WorkFolder(self.output, self._identity, overwrite=options.overwrite)
        self.finished = self.work.is_finished(blocked)
        self.work.check()
        self.work.check_writable()

    def _check_channels(self) -> None:
        channels = self.opened.spec.in_chans
        if channels not in (1, 3) and self.options.kind != ARRAY:
            raise ValueError(
                f"pictures have 1 or 3 channels, and the model writes {channels}; name an --output "
                f"that ends in {ARRAY}"
            )

    def _identity(self) -> dict[str, Any]:
        """Return what decides the output, as JSON types."""
        own, prompts = asdict(self.options), self.generation.prompts
        for key in ("checkpoint", "device", "threads", "overwrite"):  # weights and kind of device
            del own[key]
        own["img_size"] = pixels(self.generation.size)
        own["complete"] = prompts and digest_of(
            part for each in prompts for part in (each.path, each.pixels.numpy().tobytes())
        )
        return self.opened.identity() | own

    def run(self, say: Callable[[str], None]) -> None:
        """Write all images, and say what came of it.

        Raises:
            ValueError: outputs of the model are not finite; nothing is written.
            OutOfMemory: a batch does not fit into memory.
        """
        generation = self.generation
        if self.finished:
            with self.work:
                pass
            say(f"{self.output} was there already: the command was stopped as it ended")
            return
        of = f"{generation.images} of {pixels(generation.size)}"
        if generation.prompts:
            of += f", of which {generation.rows} rows are given"
        say(f"{self.opened.notes[0]}; images: {of}")
        with self.work:
            with Progress(generation.images * generation.values, unit="values") as progress:
                drawn = generation.run(progress, partial(self._kept, progress))
            self.work.finish()
            self._write(drawn)
        mean = sum(each.bits_per_dim for each in drawn) / len(drawn)
        count = "1 image" if len(drawn) == 1 else f"{len(drawn)} images"
        say(f"{self.output}: {count}, {mean:.3f} bits per written value")

    def _kept(self, progress: Progress, number: int, write: Callable[[], Batch]) -> Batch:
        """Return a batch that an earlier run has written, or write and keep it."""
        path = self.work.file(f"{number:06d}.safetensors")
        if path.exists():
            batch = load(path.read_bytes())
            progress.resume(batch["values"].numel())
            return batch
        self.work.describe()
        batch = write()
        write_whole(path, lambda place: place.write_bytes(save(batch)))
        return batch

    def _write(self, drawn: list[Drawn]) -> None:
        """Write the output."""
        if self.options.kind == ARRAY:
            write_array(self.output, np.stack([_array(each.pixels) for each in drawn]))
        elif self.options.kind == PICTURE:
            picture = self._picture(drawn)
            write_whole(self.output, lambda place: picture.save(place, format="PNG"))
        else:
            with whole_folder(
                self.output, replaces=SUMMARY if self.options.overwrite else None
            ) as place:
                self._write_folder(place, drawn)

    def _columns(self) -> int:
        """Return how many pictures a row of the picture has: completions stand behind their
        original, and classes in columns.
        """
        generation = self.generation
        tiles, group = generation.images, 1
        if generation.prompts:
            tiles, group = tiles + len(generation.prompts), generation.copies + 1
        elif len(generation.classes) <= MOST_COLUMNS:
            group = max(1, len(generation.classes))
        return columns_for(tiles, group)

    def _picture(self, drawn: list[Drawn]) -> Image.Image:
        """Return all images on one picture."""
        prompts, rows = self.generation.prompts, self.generation.rows
        if not prompts:
            return sheet([_array(each.pixels) for each in drawn], self._columns())
        tiles, given = [], []
        for each in drawn:
            if each.copy == 0:
                tiles.append(_array(prompts[each.image].pixels))
                given.append(0)
            tiles.append(_array(each.pixels))
            given.append(rows)
        return sheet(tiles, self._columns(), given)

    def _write_folder(self, folder: Path, drawn: list[Drawn]) -> None:
        """Write a PNG of each image, their table, and what they depend on."""
        digits, rows = len(str(len(drawn) - 1)), []
        for number, each in enumerate(drawn):
            name = f"{number:0{digits}d}.png"
            _picture_of(each.pixels).save(folder / name, format="PNG")
            rows.append(self._row(name, each))
        write_table(folder / INDEX, FIELDS, rows)
        about = provenance(self.opened.device) | {
            "model": self.opened.notes,
            "options": asdict(self.options),
        }
        text = json.dumps({"provenance": about, "images": len(drawn)}, indent=1)
        (folder / SUMMARY).write_bytes(printable(text).encode())

    def _row(self, name: str, drawn: Drawn) -> dict[str, Any]:
        """Return a row of the table."""
        names = self.opened.spec.class_names
        row: dict[str, Any] = dict.fromkeys(FIELDS)
        row |= {"file": name, "image": drawn.image}
        row["bits_per_dim"] = round(drawn.bits_per_dim, DIGITS)
        if drawn.label is not None:
            row["class"] = names[drawn.label] if names else drawn.label
        if drawn.given_bits_per_dim is not None:
            row |= {"completion": drawn.copy, "given_rows": self.generation.rows}
            row["path"] = self.generation.prompts[drawn.image].path
            row["given_bits_per_dim"] = round(drawn.given_bits_per_dim, DIGITS)
        return row


def _array(image: Tensor) -> np.ndarray:
    """Return ``[C, H, W]`` as an array ``[H, W, C]``."""
    return rearrange(image, "c h w -> h w c").numpy()


def _picture_of(image: Tensor) -> Image.Image:
    array = _array(image)
    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
