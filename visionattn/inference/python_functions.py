"""``visionattn.predict``, ``segment``, ``extract_features`` and ``look``: commands as Python calls.

Keyword arguments are the fields of the commands' options, documented in their docstrings:
``PredictOptions``, ``InferenceOptions``, ``DenseOptions`` and ``LookOptions``
(``visionattn predict --help`` and so on), except ``inference_options.OF_COMMANDS``. Images are read
in this process unless ``workers`` is given.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from visionattn.inference.image_batches import Outcome
from visionattn.inference.image_listing import Images, listing_of
from visionattn.inference.image_reading import ReadImages
from visionattn.inference.image_run import ImageRun, read_as_asked
from visionattn.inference.inference_options import (
    DenseOptions,
    InferenceOptions,
    OpenOptions,
    PredictOptions,
    check,
    options_of_call,
)
from visionattn.inference.model_opening import Opened, open_model, open_module, options_naming
from visionattn.inference.predict import all_outputs, count_of_classes, most_probable
from visionattn.model_config import VECTOR_TASKS
from visionattn.models.cost import Compute
from visionattn.models.patches import call, in_eval, last_map, pooled, takes_sizes
from visionattn.models.segmentation import Segmenter, classes_of

if TYPE_CHECKING:
    from visionattn.inference.image_attribution import ClassAttribution

Model = nn.Module | str | Path


class Predictions(NamedTuple):
    """The classes of each image, or its numbers, in the order of the images."""

    classes: list[tuple[str, ...]]
    """Names of the ``top_k`` classes of each image, the most probable first; numbers if the model
    has no names. For ``multilabel``, all classes above their thresholds; for ``regression``, all
    targets.
    """
    probabilities: Tensor
    """Probabilities of these classes, float32 ``[images, top_k]`` on the CPU. For ``multilabel``,
    probabilities of all classes; for ``regression``, values of all targets.
    """
    paths: list[str]
    """Path of each image; ``image 0`` and so on for images in memory."""


def predict(model: Model, images: Images, **options: Any) -> Predictions:
    """Predict the classes of images, as ``visionattn predict`` does.

    Args:
        model: a module of timm or ours, which stays on its device and unchanged; a checkpoint of a
            run; or a timm name, with its pretrained weights.
        images: paths of files and folders; Pillow pictures; arrays ``[H, W]``, ``[H, W, C]`` or
            ``[B, H, W, C]``; tensors ``[C, H, W]`` or ``[B, C, H, W]``. Values are uint8, or other
            numbers with the model's value range and bands, as in ``.npy`` files.
        options: fields of ``PredictOptions``: ``top_k``, ``img_size``, ``fit``, ``max_patches``,
            ``bands``, ``value_range``, ``page``, ``level``, ``batch_size``, ``workers``,
            ``device``, ``amp``, ``tiles``, ``overlap``, ``combine``, ``memory_gib``.

    Returns:
        For each image, in order: ``classes``, names of classes; ``probabilities``, float32
        ``[images, top_k]``; ``paths``, the path of the image.

    Raises:
        ValueError, FileNotFoundError: model, images or options are wrong, or an image cannot be
            read or gives no finite result; one line with its name.
        TypeError: there is no such option.
        OutOfMemory, Failed: one image does not fit into memory or ``memory_gib``, or a loading
            process ended; defined in ``visionattn.cli.exit_codes``.
    """
    asked = options_of_call(PredictOptions, {"workers": 0} | options)
    found = Predictions([], torch.empty(0), [])
    probabilities = []
    with _opened(model, asked, classifies=True) as opened:
        if opened.spec.task == "segmentation":
            raise ValueError(f"{opened.name} is a segmentation model; use visionattn.segment")
        count = count_of_classes(opened, asked.top_k)
        for outcome in _outcomes(opened, images, call, asked):
            if opened.spec.task in VECTOR_TASKS:
                classes, shares = all_outputs(opened.spec, outcome.value)
            else:
                classes, shares = most_probable(outcome.value, count, opened.spec.class_names)
            found.classes.append(classes)
            found.paths.append(outcome.path)
            probabilities.append(shares.float())
    return found._replace(probabilities=torch.stack(probabilities))


def segment(model: Model, images: Images, **options: Any) -> list[Tensor]:
    """Predict the class of each pixel of images, as ``visionattn predict`` does with a segmentation
    model.

    Args:
        model: a ``Segmenter`` with ``data_spec``, as ``load_model`` returns it, or a checkpoint.
        images: as for ``predict``.
        options: as for ``predict``, except ``top_k`` and ``combine``.

    Returns:
        For each image, at its own size, the index of the class of each pixel: uint8
        ``[height, width]`` on the CPU; 255 for pixels that the model has not seen, such as those
        cut off by ``fit`` crop.

    Raises:
        As ``predict``, and ValueError for a model that classifies images.
    """
    from visionattn.inference.segment import judged

    asked = options_of_call(InferenceOptions, {"workers": 0} | options)
    with _opened(model, asked, classifies=True) as opened:
        if opened.spec.task != "segmentation":
            raise ValueError(f"{opened.name} is a classification model; use visionattn.predict")
        found = []
        for outcome in _outcomes(opened, images, Segmenter.masks, asked, dtype=torch.uint8):
            found.append(_value(judged(outcome, opened.geometry)))
    return found


@overload
def extract_features(
    model: Model, images: Images, *, dense: Literal[False] = False, **options: Any
) -> Tensor: ...
@overload
def extract_features(
    model: Model, images: Images, *, dense: bool, **options: Any
) -> Tensor | list[Tensor]: ...
def extract_features(model: Model, images: Images, **options: Any) -> Tensor | list[Tensor]:
    """Compute features of images, as ``visionattn features`` does, in the order of the images.

    Args:
        model, images: as for ``predict``.
        options: as for ``predict``, except ``top_k``; and ``dense``: the last feature map, after
            the final norm, instead of one vector per image.

    Returns:
        Float32 ``[images, D]`` on the CPU; with ``dense``, ``[images, D, H, W]`` with the grid of
        patches ``H`` x ``W``, or for ``native`` images a list of ``[D, H, W]``.

    Raises:
        As ``predict``, and ValueError for a model without such features.
    """
    asked = options_of_call(DenseOptions, {"workers": 0} | options)
    with _opened(model, asked, classifies=False) as opened:
        opened.check_features(dense=asked.dense)
        compute = last_map if asked.dense else pooled
        values = [outcome.value for outcome in _outcomes(opened, images, compute, asked)]
        native = opened.geometry.canvas is None
    if asked.dense and native:
        return [value.clone() for value in values]
    return torch.stack(values)


def look(model: Model, images: Images, **options: Any) -> "list[ClassAttribution]":
    """Compute the attribution of a class in images, as ``visionattn look`` does, without drawing.

    Args:
        model: a module of ours, a checkpoint or a name, as for ``predict``.
        images: as for ``predict``.
        options: fields of ``visionattn.inference.look_options.LookOptions``; ``target`` may be a
            number, and places of ``queries`` pairs of numbers.

    Returns:
        A ``ClassAttribution`` for each image, in order, with tensors on the CPU.

    Raises:
        As ``predict``, and ValueError for a model that is not ours, or an unknown class, block,
            head or token.
    """
    from visionattn.inference.image_attribution import ImageAttribution
    from visionattn.inference.look_options import LookOptions

    if not isinstance(options.get("queries"), (str, NoneType)):
        options["queries"] = [
            each if isinstance(each, (str, int)) else ",".join(map(str, each))
            for each in options["queries"]
        ]
    if options.get("target") is not None:
        options["target"] = str(options["target"])
    asked = options_of_call(LookOptions, options)
    with _opened(model, asked, classifies=True) as opened:
        read = ReadImages(listing_of(images), opened.spec, opened.geometry)
        attribution = ImageAttribution(opened, read, asked)
        for line in attribution.banding.lines:
            warnings.warn(line, stacklevel=2)
        return [attribution.look(index)[0] for index in range(len(read))]


@contextmanager
def _opened(model: Model, options: OpenOptions, *, classifies: bool) -> Iterator[Opened]:
    """Yield the opened model, in eval mode within the context; the caller's module is restored."""
    if isinstance(model, nn.Module):
        if options.device != "auto":
            raise ValueError("a module keeps its device; remove device, or move the module")
        options.model = type(model).__name__
        check(options)
        with in_eval(model):
            yield open_module(model, options, classifies=classifies)
        return
    options = replace(options, **options_naming(model))
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
        warnings.warn(f"{opened.name} sees padding as black pixels", stacklevel=2)
    read = read_as_asked(options, opened, listing_of(images))
    convert = classes_of if compute is Segmenter.masks else None
    run = ImageRun(options, opened, read, compute, convert=convert)
    for line in run.banding.lines:
        warnings.warn(line, stacklevel=4)
    run.announce(lambda line: None, trial=False)
    for batch in run.batches(dtype):
        for outcome in batch:
            _value(outcome)
            yield outcome


def _value(outcome: Outcome) -> Tensor:
    if outcome.value is None:
        raise outcome.error("")
    return outcome.value
