"""``visionattn.predict``, ``segment``, ``extract_features`` and ``look``: commands as Python calls.

This module owns what a caller may pass as a model, and results in memory. Models, images and
batches are run as the commands run them.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import timm
import torch
from torch import Tensor, nn

from visionattn.cli.ends import OutOfMemory
from visionattn.inference.banded import Banding, banding_of
from visionattn.inference.forecast import batch_for
from visionattn.inference.held import Images, listing_of
from visionattn.inference.look.find import Look, asked_of, find, find_in_bands
from visionattn.inference.look.options import LookOptions, check_asked
from visionattn.inference.opening import Opened, description, open_model, open_module
from visionattn.inference.options import NATIVE, InferenceOptions, OpenOptions, Options, check
from visionattn.inference.predict import count_of_classes, most_probable
from visionattn.inference.reading import ReadImages
from visionattn.inference.running import Compute, Outcome, masks, run_images
from visionattn.inference.segment import judged
from visionattn.models.patches import call, in_eval, last_map, pooled, takes_sizes
from visionattn.models.weights import Fit

Size = int | list[int] | Literal["native"] | None
Amp = Literal["none", "bf16", "fp16", "auto"]
SEQUENCES = ("bands", "value_range", "show", "blocks")
"""Options whose values are lists, of which calls take any sequence."""
WORDS = {"fit": (None, *get_args(Fit)), "amp": get_args(Amp)}


class Predictions(NamedTuple):
    """The most probable classes of each image, in the order of the images."""

    classes: list[tuple[str, ...]]
    """Names of the ``top_k`` classes of each image, the most probable first; their numbers where
    the model has no names for them.
    """
    probabilities: Tensor
    """Of these classes, float32 ``[images, top_k]`` on the CPU."""
    paths: list[str]
    """Where each image was read; ``image 0`` and so on for images in memory."""


def predict(
    model: nn.Module | str | Path,
    images: Images,
    *,
    top_k: int | None = None,
    img_size: Size = None,
    fit: Fit | None = None,
    max_patches: int | None = None,
    bands: Sequence[int] | None = None,
    value_range: tuple[float, float] | None = None,
    page: int | None = None,
    batch_size: int | Literal["auto"] | None = None,
    workers: int = 0,
    device: str | None = None,
    amp: Amp = "none",
    memory_gib: float | None = None,
) -> Predictions:
    """Name the classes of images, as ``visionattn predict`` does.

    Args:
        model: a module of timm or ours, which stays where it is and as it is; a checkpoint of a
            run; or a timm name, for the weights that timm has of it.
        images: paths of files and folders; pictures of Pillow; arrays ``[H, W]``, ``[H, W, C]`` or
            ``[B, H, W, C]``; tensors ``[C, H, W]`` or ``[B, C, H, W]``: uint8, or other numbers
            with the range of values and the bands that the model knows, as in ``.npy`` files.
        top_k: classes per image; None: 5, or as many as there are.
        img_size: size in pixels: one number, or height and width; with ``fit="native"`` the most
            that they may be. ``"native"``: each image at its own size, without a limit. None: as in
            training.
        fit: how images of any size come to the model: ``"native"``, ``"pad"``, ``"stretch"`` or
            ``"crop"``. None: as in training.
        max_patches: with ``fit="native"``, instead of ``img_size``: the most patches of an image.
        bands: which bands of an image are the model's channels, counted from 1. None: as the model
            knows.
        value_range: the values that are black and white, where they have not 8 bits. None: as the
            model or the files know.
        page: which page of files with several, counted from 1. None: the first.
        batch_size: images at once; None: 16, with ``"native"`` 1; ``"auto"``: as many as fit into
            memory.
        workers: processes that read images; 0 reads in this one.
        device: for names and checkpoints; None takes a GPU where there is one.
        amp: automatic mixed precision; ``"auto"``: bf16 where the device multiplies it.
        memory_gib: GiB that a pass may take beside the model; None: the memory there is. An image
            that alone would take more, and that is seen at its own size, is computed band by band,
            with the same result up to rounding; a warning says so.

    Returns:
        For each image, in their order: ``classes``, names of classes; ``probabilities``, float32
        ``[images, top_k]``; ``paths``, where the image was read.

    Raises:
        ValueError, FileNotFoundError: model, images or options are wrong, or an image cannot be
            read or gives no finite result; one line with its name.
        OutOfMemory, Failed: one image does not fit into memory, or into ``memory_gib``, or a
            process that reads ended; they are defined in ``visionattn.cli.ends``.
    """
    options = _options(
        img_size=img_size,
        fit=fit,
        max_patches=max_patches,
        bands=bands,
        value_range=value_range,
        page=page,
        batch_size=batch_size,
        workers=workers,
        device=device,
        amp=amp,
        memory_gib=memory_gib,
    )
    found = Predictions([], torch.empty(0), [])
    probabilities = []
    with _opened(model, options, classifies=True) as opened:
        if opened.spec.task == "segmentation":
            raise ValueError(f"{opened.name} gives classes of pixels; use visionattn.segment")
        count = count_of_classes(opened, top_k, 5)
        for outcome in _outcomes(opened, images, call, options):
            classes, shares = most_probable(outcome.value, count, opened.spec.class_names)
            found.classes.append(classes)
            found.paths.append(outcome.path)
            probabilities.append(shares)
    return found._replace(probabilities=torch.stack(probabilities))


def segment(
    model: nn.Module | str | Path,
    images: Images,
    *,
    img_size: Size = None,
    fit: Fit | None = None,
    max_patches: int | None = None,
    bands: Sequence[int] | None = None,
    value_range: tuple[float, float] | None = None,
    page: int | None = None,
    batch_size: int | Literal["auto"] | None = None,
    workers: int = 0,
    device: str | None = None,
    amp: Amp = "none",
    memory_gib: float | None = None,
) -> list[Tensor]:
    """Give each pixel of images a class, as ``visionattn predict`` does with the weights of a
    segmentation.

    Args:
        model: a ``Segmenter`` with ``data_spec``, as ``load_model`` returns it, or a checkpoint.
        images: as for ``predict``, and likewise the arguments that are not named here.

    Returns:
        For each image, at its own size, the number of the class of each pixel: uint8
        ``[height, width]`` on the CPU; 255 for pixels that the model has not seen, as ``fit`` crop
        cuts them off.

    Raises:
        What ``predict`` raises, and ValueError for a model that gives classes of images.
    """
    options = _options(
        img_size=img_size,
        fit=fit,
        max_patches=max_patches,
        bands=bands,
        value_range=value_range,
        page=page,
        batch_size=batch_size,
        workers=workers,
        device=device,
        amp=amp,
        memory_gib=memory_gib,
    )
    with _opened(model, options, classifies=True) as opened:
        if opened.spec.task != "segmentation":
            raise ValueError(f"{opened.name} gives classes of images; use visionattn.predict")
        found = []
        for outcome in _outcomes(opened, images, masks, options, dtype=torch.uint8):
            outcome = judged(outcome, opened.geometry)
            if outcome.value is None:
                raise ValueError(f"{outcome.path}: {outcome.reason}")
            found.append(outcome.value)
    return found


def extract_features(
    model: nn.Module | str | Path,
    images: Images,
    *,
    dense: bool = False,
    img_size: Size = None,
    fit: Fit | None = None,
    max_patches: int | None = None,
    bands: Sequence[int] | None = None,
    value_range: tuple[float, float] | None = None,
    page: int | None = None,
    batch_size: int | Literal["auto"] | None = None,
    workers: int = 0,
    device: str | None = None,
    amp: Amp = "none",
    memory_gib: float | None = None,
) -> Tensor | list[Tensor]:
    """Compute features of images, as ``visionattn features`` does, in the order of the images.

    Args:
        model: as for ``predict``, and likewise the arguments that are not named here.
        images: as for ``predict``.
        dense: the last feature map, after the final norm, instead of one vector per image.

    Returns:
        Float32 ``[images, D]`` on the CPU; if ``dense``, ``[images, D, H, W]`` with the grid of
        patches ``H`` x ``W``, and where images are seen ``native`` a list of ``[D, H, W]``.

    Raises:
        What ``predict`` raises, and ValueError for a model without features of this kind.
    """
    options = _options(
        img_size=img_size,
        fit=fit,
        max_patches=max_patches,
        bands=bands,
        value_range=value_range,
        page=page,
        batch_size=batch_size,
        workers=workers,
        device=device,
        amp=amp,
        memory_gib=memory_gib,
    )
    with _opened(model, options, classifies=False) as opened:
        if not dense:
            opened.check_pooled()
        method = "forward_intermediates" if dense else "forward_head"
        if not hasattr(opened.model, method):
            raise ValueError(f"{opened.name} gives no features of this kind: it has no {method}")
        compute = last_map if dense else pooled
        values = [outcome.value for outcome in _outcomes(opened, images, compute, options)]
        native = opened.geometry.canvas is None
    if dense and native:
        return [value.clone() for value in values]
    return torch.stack(values)


def look(
    model: nn.Module | str | Path,
    images: Images,
    *,
    target: str | int | None = None,
    show: Sequence[str] = ("winners", "gradient", "rows", "features"),
    queries: Sequence[str | tuple[int, int]] | None = None,
    blocks: Sequence[int] = (-1,),
    head: int | None = None,
    features_block: int = -1,
    img_size: Size = None,
    fit: Fit | None = None,
    max_patches: int | None = None,
    bands: Sequence[int] | None = None,
    value_range: tuple[float, float] | None = None,
    page: int | None = None,
    device: str | None = None,
) -> list[Look]:
    """Find where the evidence for a class lies, as ``visionattn look`` does, and draw nothing.

    Args:
        model: a module of ours, a checkpoint or a name, as for ``predict``, and likewise the
            arguments that are not named here.
        images: as for ``predict``.
        target: the class, by its name or number; None: the most probable of each image.
        show: what is wanted, some of ``winners``, ``gradient``, ``rows`` and ``features``.
        queries: tokens whose rows of attention are wanted: places down and right in pixels of the
            image, ``"class"`` or ``"top"``. None: ``"top"``, the patch that adds most to the class,
            or ``"class"`` where the class token alone is pooled.
        blocks: whose rows are wanted, from 0, or from the end where negative.
        head: whose rows are wanted, from 0; None: the mean of all.
        features_block: the block whose features are wanted.

    Returns:
        A ``Look`` for each image, in their order, with tensors on the CPU.

    Raises:
        What ``predict`` raises, and ValueError for a model that is none of ours, or where there is
        no such class, block, head or token.
    """
    words = None
    if queries is not None:
        words = [each if isinstance(each, str) else ",".join(map(str, each)) for each in queries]
    options = _options(
        LookOptions,
        img_size=img_size,
        target=None if target is None else str(target),
        show=show,
        queries=words,
        blocks=blocks,
        head=head,
        features_block=features_block,
        fit=fit,
        max_patches=max_patches,
        bands=bands,
        value_range=value_range,
        page=page,
        device=device,
    )
    check_asked(options)
    found = []
    with _opened(model, options, classifies=True) as opened:
        asked = asked_of(options, opened)
        read = ReadImages(listing_of(images), opened.spec, opened.geometry)
        banding = Banding(opened, read, call, amp="none", workers=0, memory_gib=None)
        for line in banding.lines:
            warnings.warn(line, stacklevel=2)
        for index in range(len(read)):
            sample, path = read[index], read.listing.name(index)
            if sample.banded:
                found.append(find_in_bands(banding, index, sample, path, asked))
                continue
            if sample.pixels is None:
                raise ValueError(f"{path}: {sample.reason}")
            view = opened.geometry.view(sample.height, sample.width)
            found.append(find(opened, sample, path, view, asked))
    return found


def _options(kind: type[Options] = InferenceOptions, *, img_size: Size, **given) -> Options:
    """Return the options of a call, with lists for sequences and ``auto`` for no device; the words
    and the size are checked.
    """
    device = given.pop("device") or "auto"
    lists = {key: list(given.pop(key)) for key in SEQUENCES if given.get(key) is not None}
    size = list(img_size) if isinstance(img_size, tuple) else img_size
    options = kind(img_size=size, device=device, **lists, **given)
    for key, known in WORDS.items():
        if getattr(options, key, known[0]) not in known:
            wanted = ", ".join(map(str, known))
            raise ValueError(f"{key} must be one of {wanted}, got {getattr(options, key)!r}")
    known = img_size in (None, NATIVE) or isinstance(img_size, (int, list, tuple))
    if (
        not known
        or isinstance(img_size, (list, tuple))
        and not all(isinstance(side, int) for side in img_size)
    ):
        raise ValueError(
            "img_size must be a number of pixels, height and width, native or None, got "
            f"{img_size!r}"
        )
    return options


@contextmanager
def _opened(
    model: nn.Module | str | Path, options: OpenOptions, *, classifies: bool
) -> Iterator[Opened]:
    """Give the model, in eval mode within the context; the caller's module is left as it was."""
    if isinstance(model, nn.Module):
        if options.device != "auto":
            raise ValueError("a module stays where it is; leave device out, or move the module")
        options.model = type(model).__name__
        check(options)
        with in_eval(model):
            yield open_module(model, options, classifies=classifies)
        return
    # A path of a file, or the name of a model whose weights timm fetches.
    if os.path.isfile(model) or (os.path.isdir(model) and not timm.is_model(str(model))):
        options.checkpoint = os.fspath(model)
        if description(options.checkpoint) is None:
            raise ValueError(
                f"{model} does not say whose weights these are; build the model, load them and "
                f"pass the module"
            )
    elif timm.is_model(str(model)):
        options.model, options.pretrained = str(model), True
    else:
        raise ValueError(f"{model} is neither a checkpoint that is there nor a model of timm")
    check(options)
    yield open_model(options, classifies=classifies)


def _outcomes(
    opened: Opened,
    images: Images,
    compute: Compute,
    options: InferenceOptions,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Outcome]:
    """Yield the outcome of each image, and raise for the first one without a result."""
    if opened.geometry.fit == "pad" and not takes_sizes(opened.model):
        warnings.warn(f"{opened.name} sees what padding adds to images as black", stacklevel=2)
    read = ReadImages(listing_of(images), opened.spec, opened.geometry)
    banding = banding_of(opened, read, compute, options)
    for line in banding.lines:
        warnings.warn(line, stacklevel=4)
    batches = run_images(
        opened,
        read,
        compute,
        batch_size=batch_for(opened, read, options.batch_size or opened.usual_batch, banding),
        workers=options.workers,
        amp=options.amp,
        dtype=dtype,
        banded=banding.outcome,
    )
    for batch in batches:
        for outcome in batch:
            if outcome.value is None:
                error = OutOfMemory if outcome.status == "oom" else ValueError
                raise error(f"{outcome.path}: {outcome.reason}")
            yield outcome
