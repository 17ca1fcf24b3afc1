"""What a user says of the images: names, sizes, augmentation.

A docstring under each field is its help text. ``data_checks.py`` and ``training/config.py`` check
the values.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from visionattn.model_config import Fit, Task

PRESETS = ("none", "light", "three", "rand", "documents", "aerial")
"""The augmentations that have a name."""


@dataclass
class DataConfig:
    """Which images, at which size, with which augmentation."""

    name: Literal[
        "digits",
        "digits_pixel",
        "canvas",
        "documents",
        "copy",
        "cifar10",
        "cifar10_pixel",
        "folder",
    ] = "digits"
    """``digits``, ``canvas``, ``documents`` and ``copy`` are embedded; the others read ``root``.
    Grey levels of ``*_pixel`` are one-hot. ``copy``, for ``generate`` alone, has sequences that say
    a word twice as images of one row, of which the second word counts.
    """
    task: Task = "classification"
    """What has a class: each image, or with ``segmentation`` each pixel, of ``canvas``,
    ``documents`` and of a ``folder`` with masks. ``generate``: nothing; the values of images are
    written one after the other by a ``pixel_decoder``, those of ``documents`` as pieces of pages.
    """
    root: str | None = None
    """Folder with ``train/`` and ``val/`` (and, if there is one, ``test/``) or with class folders;
    or a tar file of one, ``wds/...``, ``hfds/...``.
    """
    fit: Fit | None = None
    """How images of any size come to the model. ``native``: each at its own size, shrunk where it
    is above ``img_size`` or ``max_patches``. ``pad``: scaled to fit into ``img_size``, the rest
    absent. ``stretch``: to ``img_size``, whatever the aspect ratio. ``crop``: the shorter side to
    ``img_size``, the rest cut off. None: ``native`` for folders and documents, else ``crop``.
    """
    img_size: int | list[int] | None = None
    """Size in pixels: height and width, or one number for both; with ``native`` the most that they
    may be, one number being the longest side. None: no limit for folders, 32 for digits and
    CIFAR-10, 128 for canvas, 512 for documents, ``1 128`` for ``copy``.
    """
    img_size_choices: list[int] | None = None
    """Train each batch at one of these sizes, drawn at random; evaluation stays at ``img_size``."""
    max_patches: int | None = None
    """``native`` alone, instead of ``img_size``: the most patches of an image, which keeps its
    aspect ratio.
    """
    batch_patches: int | None = None
    """``native`` alone: the most patches of a batch, whose images have equal grids; a larger image
    is a batch by itself. None: as many as ``batch_size`` images have on average.
    """
    augment: str = "none"
    """``none``, or a preset: ``light`` (shift, scale, rotation), ``three`` (crop, flip, greyscale,
    solarise or blur, and colour), ``rand`` (crop, flip and random colour), ``documents`` (small
    moves, light, noise), ``aerial`` (quarter turns, flips, colour); or a YAML file of
    ``albumentations.save``.
    """
    val_fraction: float = 0.1
    """Share of the training images that is held out to choose the best weights, in (0, 1), where
    there is no ``val`` split.
    """
    args: dict[str, Any] = field(default_factory=dict)
    """What one data set alone takes. ``canvas``, ``documents`` and ``copy``: ``train_images`` per
    epoch (20,000) and ``eval_images`` of the validation and of the test split (2,000). ``canvas``
    also: ``distractors`` (fragments of digits; null: 4 per 128 x 128 pixels), ``digit_px``
    (smallest and largest side of digits in pixels; [16, 40]) and ``whole_digits`` (1, or 2, where
    the larger counts). ``cifar10``, ``cifar10_pixel``: ``download`` (true fetches the data into
    ``root`` where they are missing). ``folder`` with root ``wds/...``: ``num_classes``, required.
    """
    masks: dict[str, Any] = field(default_factory=dict)
    """``folder`` with masks alone: ``classes``, their names in the order of their values;
    ``colours``, red, green and blue of each, where masks have colours; ``ignored``, the value or
    colour of pixels that do not count (255). Without it, ``classes.yaml`` or ``classes.json`` in
    ``root`` says the same; without either, classes are numbers up to the largest value.
    """
    on_error: Literal["fail", "skip"] = "fail"
    """What an unreadable image does: stop the run with its path, or be left out with a warning."""
    bands: list[int] | None = None
    """``folder`` alone: which bands of the files become the model's channels, and in which order;
    numbers from 1. None: red, green and blue.
    """
    value_range: list[float] | None = None
    """``folder`` alone: the values that become black and white, in files of more than 8 bits. None:
    what a file states, or 8 to 16 bits by the largest value of a few files.
    """
    page: int | None = None
    """``folder`` alone: the page of files that have several, from 1. None: the first."""
    max_pixels: int | None = None
    """``folder`` alone: the most pixels of a file that are decoded at once; a file that would take
    more counts as unreadable. None: 2^30, about 1.07 billion.
    """
    mean: list[float] | None = None
    """``folder`` alone: mean of each channel, of values in [0, 1]; ``visionattn stats`` measures
    it. None: ImageNet's.
    """
    std: list[float] | None = None
    """``folder`` alone: standard deviation of each channel, likewise."""
    workers: int = 2
    """Processes that load data; 0 loads in the main process."""
