"""``visionattn.generate``: the command as a Python call, with its images in memory."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from visionattn.inference.generate.decoder import open_decoder
from visionattn.inference.generate.generation import Generation
from visionattn.inference.generate.options import GenerateOptions, check
from visionattn.inference.held import listing_of
from visionattn.inference.options import options_of_call
from visionattn.models.patches import in_eval


class Generated(NamedTuple):
    """Images that were written, in order: of each completed image all completions."""

    images: Tensor
    """uint8 ``[images, C, H, W]`` on the CPU."""
    classes: list[str]
    """The class of each, numbers where the model has no names for them; empty for a model without
    classes.
    """
    bits_per_dim: Tensor
    """float64 ``[images]``: minus the binary logarithm of the probability that the model gives to
    the values that were written, over their number, whatever the temperature.
    """
    paths: list[str]
    """Where the image that each completes was read, as ``predict`` has it; empty where there are
    none.
    """


def generate(model: nn.Module | str | Path, count: int | None = None, **options: Any) -> Generated:
    """Write images with a pixel decoder, as ``visionattn generate`` does: value by value, by the
    recurrence, at the same time and memory for each value.

    Every value of an image is drawn with a random number that depends on the seed, on the number of
    the image and on nothing else: batches, other images and devices change an image only where
    rounding differs and the number falls that close to the border between two levels.

    Args:
        model: a ``PixelDecoder`` with ``data_spec``, as ``load_model`` returns it, which stays
            where it is and as it is; or a checkpoint of a training with ``data.task: generate``.
        count: images that are written, with ``complete`` for each image; None: 64, with
            ``complete`` 1.
        options: fields of ``GenerateOptions``: ``img_size``, ``classes`` (also numbers),
            ``temperature``, ``seed``, ``complete`` (images as ``predict`` takes them), ``keep``,
            ``batch_size``, ``device``, ``amp``.

    Raises:
        ValueError, FileNotFoundError: the model writes no images, or an option or an image is
            wrong, an image of another depth or a prompt larger than the image among them; one line.
        TypeError: there is no such option.
        OutOfMemory: a batch does not fit into memory; it is defined in ``visionattn.cli.ends``.
    """
    images, seed = options.pop("complete", None), options.pop("seed", 0)
    if options.get("classes") is not None:
        options["classes"] = [str(each) for each in options["classes"]]
    complete = None if images is None else ["images"]
    asked = options_of_call(GenerateOptions, options, count=count, seed=seed, complete=complete)
    check(asked)
    listing = None if images is None else listing_of(images)
    opened = open_decoder(model, asked.device)
    with in_eval(opened.model):
        generation = Generation(opened, asked, listing)
        drawn = generation.run()
    names, labels = opened.spec.class_names, [each.label for each in drawn]
    return Generated(
        torch.stack([each.pixels for each in drawn]),
        [names[label] if names else str(label) for label in labels if label is not None],
        torch.tensor([each.bits_per_dim for each in drawn], dtype=torch.float64),
        [generation.prompts[each.image].path for each in drawn if generation.prompts],
    )
