"""``visionattn.generate``: the command as a Python call, with its images in memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from visionattn.inference.generate.decoder import open_decoder, open_decoder_module
from visionattn.inference.generate.generation import Generation
from visionattn.inference.generate.options import GenerateOptions, check
from visionattn.inference.held import Images, listing_of
from visionattn.models.patches import in_eval

AMP = ("none", "bf16")


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


def generate(
    model: nn.Module | str | Path,
    count: int | None = None,
    *,
    img_size: int | tuple[int, int] | None = None,
    classes: Sequence[str | int] | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    complete: Images | None = None,
    keep: float | None = None,
    batch_size: int = 64,
    device: str | None = None,
    amp: Literal["none", "bf16"] = "none",
) -> Generated:
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
        img_size: height and width in pixels, or one number for both; None: as in training.
        classes: names or numbers of classes, which images take in turn, for a conditioned model.
            None: all in turn; with ``complete`` the one under which the given rows are the most
            likely.
        temperature: what log-probabilities are divided by before a level is drawn, 0 or above;
            0 takes the most probable one.
        seed: of the draws, a whole number from 0 on.
        complete: images whose lower part is written, as ``predict`` takes images; they are seen as
            in training.
        keep: the share of the rows that is given, from the top, above 0 and below 1; None: 0.5.
        batch_size: images that are written together.
        device: for checkpoints; None takes a GPU where there is one.
        amp: automatic mixed precision, "none" or "bf16".

    Raises:
        ValueError, FileNotFoundError: the model writes no images, or an option or an image is
            wrong, an image of another depth or a prompt larger than the image among them; one line.
        OutOfMemory: a batch does not fit into memory; it is defined in ``visionattn.cli.ends``.
    """
    if amp not in AMP:
        raise ValueError(f"amp must be one of {', '.join(AMP)}, got {amp!r}")
    options = GenerateOptions(
        count=count,
        img_size=list(img_size) if isinstance(img_size, tuple) else img_size,
        classes=None if classes is None else [str(each) for each in classes],
        temperature=temperature,
        seed=seed,
        complete=None if complete is None else ["images"],
        keep=keep,
        batch_size=batch_size,
        device=device or "auto",
        amp=amp,
    )
    check(options)
    listing = None if complete is None else listing_of(complete)
    if isinstance(model, nn.Module):
        if device is not None:
            raise ValueError("a module stays where it is; leave device out, or move the module")
        opened = open_decoder_module(model)
    else:
        opened = open_decoder(model, options.device)
    with in_eval(opened.model):
        generation = Generation(opened, options, listing)
        drawn = generation.run()
    names = opened.spec.class_names
    return Generated(
        torch.stack([each.pixels for each in drawn]),
        [
            names[each.label] if names else str(each.label)
            for each in drawn
            if each.label is not None
        ],
        torch.tensor([each.bits_per_dim for each in drawn], dtype=torch.float64),
        [generation.prompts[each.planned.image].path for each in drawn if generation.prompts],
    )
