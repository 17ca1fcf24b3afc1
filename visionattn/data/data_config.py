"""Define the options of images: names, sizes, augmentation.

A docstring under each field is its help text. ``data_checks.py`` and ``training/config.py`` check
the values.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from visionattn.model_config import Fit, Task

PRESETS = ("none", "light", "crop_flip", "three", "rand", "documents", "aerial")
"""Names of augmentations."""


@dataclass
class DataConfig:
    """The images, their size and their augmentation."""

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
    """Dataset. ``digits``, ``canvas``, ``documents`` and ``copy`` are built in; the others read
    ``root``. ``*_pixel``: gray levels are one-hot. ``copy``, only for ``generate``: images of one
    row with a word and its repetition; only the repetition counts.
    """
    task: Task = "classification"
    """``classification``: one class per image. ``multilabel``: any number of classes per image.
    ``regression``: one or more numbers per image. ``segmentation``: one class per pixel, for
    ``canvas``, ``documents`` and a ``folder`` with masks. ``generate``: no classes; a
    ``pixel_decoder`` learns autoregressive image generation (``documents``: pieces of pages).
    """
    root: str | None = None
    """Folder with ``train/`` and ``val/`` (and optionally ``test/``), or with class folders; a tar
    file of such a folder; ``wds/...`` (webdataset); or ``hfds/...`` (Hugging Face datasets).
    """
    labels: str | None = None
    """Only for ``folder``: label table (CSV, TSV, JSON lines or Parquet) that replaces class
    folders. Columns: ``path`` (relative to ``root``), ``label``, and optionally ``split`` (train,
    val, test), ``group`` and ``weight`` (of the image in the training loss).
    """
    features: str | None = None
    """Only for ``visionattn train`` and ``folder``: folder of ``visionattn features --dense
    --blocks`` for the images. Trains only a head (``model.args.head_...``) on these feature maps;
    the folder sets model and preprocessing. The checkpoint has model and head, and accepts images.
    None: train on images.
    """
    columns: list[str] | None = None
    """Only for ``labels``: columns with the targets of ``multilabel`` (0, 1 or empty) and
    ``regression``. None: ``label``, which for ``multilabel`` lists classes like ``a;b``; without
    such a column, all others.
    """
    fit: Fit | None = None
    """Preprocessing of images of any size. ``native``: original size, shrunk if above ``img_size``
    or ``max_patches``. ``pad``: letterbox, scaled to fit into ``img_size``; padding is absent.
    ``stretch``: resized to ``img_size`` with any aspect ratio. ``crop``: shorter side resized to
    ``img_size``, then center crop. None: ``native`` for folders and documents, else ``crop``.
    """
    img_size: int | list[int] | None = None
    """Size in pixels: height and width, or one number for both. With ``native`` it is the maximum;
    one number limits the longer side. None: no limit for folders, 32 for digits and CIFAR-10, 128
    for canvas, 512 for documents, ``1 128`` for ``copy``.
    """
    img_size_choices: list[int] | None = None
    """Train each batch at a random one of these sizes; evaluation uses ``img_size``."""
    max_patches: int | None = None
    """Only for ``native``, instead of ``img_size``: maximum number of patches per image; larger
    images are shrunk and keep their aspect ratio.
    """
    crop: int | list[int] | None = None
    """Train on random crops of this size in pixels, one number or height and width. They are cut
    after ``fit``, so that objects have the same size as in evaluation, which uses whole images.
    Smaller images are padded. None: whole images.
    """
    crop_around: float = 0.0
    """Only for segmentation with ``crop``: share of the crops, in [0, 1], that contain a pixel of a
    class other than the first; the classes of an image are drawn equally often. Other crops are
    anywhere.
    """
    crops: int = 1
    """Only with ``crop`` or ``features``: crops per image and epoch; with ``features`` and masks,
    samples of patches.
    """
    batch_patches: int | None = None
    """Only for ``native``: maximum number of patches per batch, whose images have equal grids; a
    larger image forms its own batch. None: as many as ``batch_size`` images have on average. With
    ``crop`` it limits the batches of evaluation; None: as many as ``batch_size`` crops have.
    """
    augment: str = "none"
    """``none``, or a preset: ``light`` (shift, scale, rotation), ``crop_flip``, ``three`` (crop,
    flip, grayscale, solarize or blur, and color), ``rand`` (crop, flip and random color),
    ``documents`` (small moves, light, noise), ``aerial`` (quarter turns, flips, color); or a YAML
    file of ``albumentations.save``.
    """
    sampler: Literal["balanced"] | None = None
    """``balanced``: draw each class equally often; an epoch keeps its number of images. Images of
    rare classes recur with other augmentation, and some images of frequent classes wait for another
    epoch. Only for classification. None: each image once per epoch.
    """
    val_fraction: float = 0.1
    """Without a ``val`` split: share of the training images held out for validation, in (0, 1)."""
    group_from: str | None = None
    """Only for ``folder``: regular expression to search in the path of each image relative to
    ``root``. Its first group, or the whole match, names the image's group, e.g. a patient. All
    images of a group are in one split.
    """
    fold: str | None = None
    """Only for ``folder`` without a ``val`` split: fold of a cross-validation. ``1/5`` validates on
    the first of five parts of the training images, instead of ``val_fraction``. After all five runs
    there is a summary.
    """
    args: dict[str, Any] = field(default_factory=dict)
    """Options of some datasets, with defaults. ``canvas``, ``documents`` and ``copy``:
    ``train_images`` per epoch (20,000), and ``eval_images`` of the validation and of the test split
    (2,000). ``canvas`` also: ``distractors`` (fragments of digits; null: 4 per 128 x 128 pixels),
    ``digit_px`` (smallest and largest side of digits in pixels; [16, 40]) and ``whole_digits`` (1,
    or 2: the larger counts). ``cifar10``, ``cifar10_pixel``: ``download`` (true downloads missing
    data to ``root``). ``folder`` with root ``wds/...``: ``num_classes``, required.
    """
    masks: dict[str, Any] = field(default_factory=dict)
    """Only for ``folder`` with masks, a mapping. ``classes``: names in the order of their values.
    ``colours``: for color masks, red, green and blue of each class. ``ignored``: value or color of
    ignored pixels (255). Or, with one file per class, only ``layers``: path below ``root`` for each
    class from 1 on, such as ``masks/roof/{folder}/{name}.png`` (later classes cover earlier ones),
    and ``images``: folder of the images (images). None: ``classes.yaml`` or ``classes.json`` in
    ``root``; without such a file, classes are numbers up to the largest value.
    """
    on_error: Literal["fail", "skip"] = "fail"
    """Reaction to an unreadable image: ``fail`` ends the run with its path, ``skip`` skips it with
    a warning.
    """
    bands: list[int] | None = None
    """Only for ``folder``: bands of the files that become the model's channels, in this order,
    numbered from 1. None: red, green and blue.
    """
    value_range: list[float] | None = None
    """Only for ``folder``: values of black and white in files of more than 8 bits. None: as stated
    in the file, or 8 to 16 bits, by the largest value in a few files.
    """
    page: int | None = None
    """Only for ``folder``: page of multi-page files, from 1. None: the first."""
    max_pixels: int | None = None
    """Only for ``folder``: maximum number of pixels of a file to decode at once; a file that needs
    more is unreadable. None: 2^30, about 1.07 billion.
    """
    cache: str | None = None
    """Only for ``folder``: cache directory of decoded images and masks for later epochs and runs,
    at the model's input size, or at full size if training crops them. Results do not change. Runs
    may share it; delete it at any time. 2 GiB of its disk stay free. None: each epoch decodes the
    files.
    """
    mean: list[float] | None = None
    """Only for ``folder``: mean per channel of values in [0, 1]; ``visionattn stats`` measures it.
    None: ImageNet's.
    """
    std: list[float] | None = None
    """Only for ``folder``: standard deviation per channel, likewise."""
    workers: int = 2
    """Data loader processes; 0: load in the main process."""
