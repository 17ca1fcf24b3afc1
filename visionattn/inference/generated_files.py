"""``visionattn generate``: a picture of all images, an array, or a folder, written completely or
not at all.

Finished batches of a stopped run are kept next to the output, and the same command resumes after
the last of them.
"""

import math
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

from visionattn.cli.files import whole_folder, write_whole
from visionattn.cli.progress import Progress
from visionattn.data.geometry import pixels
from visionattn.inference.attribution_pictures import grid, picture_of
from visionattn.inference.banded_inference import WorkFolder
from visionattn.inference.generate_options import (
    ARRAY,
    PICTURE,
    SUMMARY,
    GenerateOptions,
    check_output,
)
from visionattn.inference.image_generation import Batch, Generated, Generation, open_decoder
from visionattn.inference.image_listing import find_images
from visionattn.inference.picture_folder import write_summary
from visionattn.inference.result_files import write_array, write_table
from visionattn.models.weights import digest_of

FIELDS = ("file", "image", "completion", "path", "class", "given_rows", "bits_per_dim")
FIELDS += ("given_bits_per_dim",)
DIGITS = 4
"""Decimals of bits."""
MOST_COLUMNS = 24
"""Maximum number of classes for which the picture has one column per class."""
ELSEWHERE = {"checkpoint", "device", "threads", "overwrite", "output"}
"""Options that do not determine the images, or are covered by the weights and the kind of device.
"""


def write_generated(options: GenerateOptions, say: Callable[[str], None]) -> None:
    """Generate and write all images, and report the result; nothing is written before all options
    are checked.

    Args:
        options: result of ``parse_generate``.
        say: receives the lines of the report.

    Raises:
        ValueError, FileNotFoundError: an option is wrong, a file is in the way, or outputs of the
            model are not finite; nothing is written.
        OutOfMemory: a batch does not fit into memory.
    """
    check_output(options)
    output = Path(options.output or "")
    listing = None if options.complete is None else find_images(options.complete)
    if options.threads:
        torch.set_num_threads(options.threads)
    opened = open_decoder(options.checkpoint or "", options.device)
    channels = opened.spec.in_chans
    if channels not in (1, 3) and options.suffix != ARRAY:
        raise ValueError(
            f"expected 1 or 3 channels for pictures, got a model of {channels}; pass an "
            f"--output that ends in {ARRAY}"
        )
    generation = Generation(opened, options, listing)
    work = WorkFolder(output, partial(identity_of, generation), overwrite=options.overwrite)
    work.state()
    work.check_writable()
    images = f"{generation.images} of {pixels(generation.size)}"
    if generation.rows:
        images += f", {generation.rows} rows of each are given"
    say(f"{opened.notes[0]}; images: {images}")
    with work:
        with Progress(generation.images * generation.values, unit="values") as progress:
            found, given = generation.run(progress, partial(_kept, work, progress))
        arrays = rearrange(found.images, "b c h w -> b h w c").numpy()
        if options.suffix == ARRAY:
            write_array(output, arrays)
        elif options.suffix == PICTURE:
            picture = grid_of(generation, arrays)
            write_whole(output, lambda place: picture.save(place, format="PNG"))
        else:
            _write_folder(output, generation, arrays, found, given)
    count = "1 image" if len(arrays) == 1 else f"{len(arrays)} images"
    mean = float(found.bits_per_dim.mean())
    say(f"{output}: {count}, {mean:.3f} bits per generated value")


def identity_of(generation: Generation) -> dict[str, Any]:
    """Return the settings that determine the output, as JSON types."""
    own, prompts = asdict(generation.options), generation.prompts
    own |= {"img_size": pixels(generation.size)}
    if prompts is not None:
        own["complete"] = digest_of([generation.paths, prompts.numpy().tobytes()])
    own = {key: value for key, value in own.items() if key not in ELSEWHERE}
    return generation.opened.identity() | own


def _kept(work: WorkFolder, progress: Progress, number: int, make: Callable[[], Batch]) -> Batch:
    """Return a batch that an earlier run has stored, or make and store it."""
    path = work.folder / f"{number:06d}.safetensors"
    if path.exists():
        batch = load(path.read_bytes())
        progress.resume(batch["values"].numel())
        return batch
    work.note()
    batch = make()
    write_whole(path, lambda place: place.write_bytes(save(batch)))
    return batch


def grid_of(generation: Generation, arrays: np.ndarray) -> Image.Image:
    """Return all images in one picture that is about square.

    A row has complete groups: a prompt with its completions, or one image per class.
    """
    given, count = None, len(generation.classes)
    group = count if 0 < count <= MOST_COLUMNS else 1
    if generation.prompts is not None:
        whole = rearrange(generation.prompts, "p c h w -> p 1 h w c").numpy()
        completed = rearrange(arrays, "(p n) h w c -> p n h w c", n=generation.copies)
        tiles = np.concatenate([whole, completed], 1)
        group = tiles.shape[1]
        arrays = rearrange(tiles, "p n h w c -> (p n) h w c")
        given = ([0] + [generation.rows] * generation.copies) * len(whole)
    return grid(arrays, group * max(1, round(math.sqrt(len(arrays)) / group)), given)


def _write_folder(
    output: Path, generation: Generation, arrays: np.ndarray, found: Generated, given: Tensor
) -> None:
    """Write a PNG per image, the table, and the summary of settings."""
    digits, rows, options = len(str(len(arrays) - 1)), [], generation.options
    with whole_folder(output, replaces=SUMMARY if options.overwrite else None) as folder:
        for number, array in enumerate(arrays):
            name, (image, copy) = f"{number:0{digits}d}.png", divmod(number, generation.copies)
            picture_of(array).save(folder / name, format="PNG")
            bits = round(float(found.bits_per_dim[number]), DIGITS)
            row = {"file": name, "image": image, "bits_per_dim": bits}
            if found.classes:
                row["class"] = found.classes[number]
            if found.paths:
                row |= {
                    "completion": copy,
                    "path": found.paths[number],
                    "given_rows": generation.rows,
                    "given_bits_per_dim": round(float(given[number]), DIGITS),
                }
            rows.append(row)
        write_table(folder / "index.csv", FIELDS, rows)
        write_summary(folder / SUMMARY, generation.opened, options, len(arrays))
