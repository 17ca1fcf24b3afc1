"""What a user says of the images: names, sizes, augmentation.

A docstring under each field is its help text. ``splits.py`` and ``training/config.py`` check the
values.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass
class DataConfig:
    """Which images, at which size, with which augmentation."""

    name: Literal["digits", "digits_pixel", "canvas", "cifar10", "cifar10_pixel", "folder"] = (
        "digits"
    )
    """``digits`` and ``canvas`` are embedded; the others read ``root``. Grey levels of ``*_pixel``
    are one-hot.
    """
    root: str | None = None
    """Folder with ``train/`` and ``val/`` (and, if there is one, ``test/``) or with class folders;
    or ``wds/...``, ``hfds/...``, a tar file.
    """
    img_size: int = 32
    """Height and width of training and evaluation images in pixels."""
    img_size_choices: list[int] | None = None
    """Train each batch at one of these sizes, drawn at random; evaluation stays at ``img_size``."""
    augment: Literal["none", "light", "three", "rand"] = "none"
    """``light``: shift, scale, rotation. ``three``: greyscale, solarise or blur, with colour jitter
    and flip. ``rand``: crop, flip and random colour.
    """
    val_fraction: float = 0.1
    """Share of the training images that is held out to choose the best weights, in (0, 1), where
    there is no ``val`` split.
    """
    train_images: int = 20_000
    """``canvas`` alone: images drawn per epoch."""
    eval_images: int = 2_000
    """``canvas`` alone: images of the validation split and of the test split, each."""
    num_classes: int | None = None
    """``wds/...`` alone, and required there: how many classes there are."""
    download: bool = False
    """``cifar10`` and ``cifar10_pixel`` alone: fetch the data into ``root`` where it is missing."""
    on_error: Literal["fail", "skip"] = "fail"
    """What an unreadable image does: stop the run with its path, or be left out with a warning."""
    bands: list[int] | None = None
    """``folder`` alone: which bands of the files become the model's channels, and in which order;
    numbers from 1. None: red, green and blue.
    """
    value_range: list[float] | None = None
    """``folder`` alone: the values that become black and white, in files of more than 8 bits. None:
    what a file states, or 12, 14 or 16 bits by the largest value of a few files.
    """
    page: int | None = None
    """``folder`` alone: the page of files that have several, from 1. None: the first."""
    mean: list[float] | None = None
    """``folder`` alone: mean of each channel, of values in [0, 1]; ``visionattn stats`` measures
    it. None: ImageNet's.
    """
    std: list[float] | None = None
    """``folder`` alone: standard deviation of each channel, likewise."""
    workers: int = 2
    """Processes that load data; 0 loads in the main process."""
