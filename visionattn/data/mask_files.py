"""Masks in files next to images, and the meaning of the values of all of them together.

``class_folders.py`` finds the masks, ``mask_values.py`` turns the values of one mask into classes,
and ``images.py`` fits masks to the model's input size.
"""

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset

from visionattn.cli.progress import Progress
from visionattn.data.formats import DAMAGED_IMAGE, LARGEST_IMAGE_PX, large_images_allowed
from visionattn.data.formats.reader import NotAsAsked, damage
from visionattn.data.geometry import Size
from visionattn.data.mask_values import (
    BLACK_AND_WHITE,
    GREY_STEP,
    NUMBERS,
    MaskClasses,
    Pairs,
    pairs_of,
    used_values,
)
from visionattn.data.sources import Files
from visionattn.models.segmentation import IGNORED
from visionattn.models.weights import DataSpec

READ_THREADS, READ_AHEAD = 4, 64
"""Number of threads that read masks, and number of masks read ahead."""
MOST_EMPTY = 0.5
"""A larger share of classes without a pixel indicates that values are not class numbers."""

Found = TypeVar("Found")


@dataclass(frozen=True)
class MaskFiles:
    """One mask per image, by the image's index in its source."""

    files: Files
    classes: MaskClasses
    max_pixels: int = LARGEST_IMAGE_PX

    def read(self, index: int, size: Size | None = None) -> np.ndarray:
        """Return the class of each pixel, uint8 ``[height, width]``.

        Args:
            index: index of the mask.
            size: height and width in pixels of its image; None: not compared.

        Raises:
            ValueError: one of ``DAMAGED_IMAGE``, whose text names the mask: it cannot be read, has
                another size, or has values without a class.
        """
        with self._open(self.files.name(index), size) as mask:
            return self.classes.classes(mask)

    def check_size(self, index: int, size: Size) -> None:
        """Raise ``NotAsAsked`` if a mask has another size by its header; errors as in ``read``."""
        with self._open(self.files.name(index), size):
            pass

    def pairs(self, index: int) -> Pairs:
        """Return the values of a mask with their colors; errors as in ``read``."""
        with self._open(self.files.name(index)) as mask:
            return pairs_of(mask)

    @contextmanager
    def _open(self, name: str, size: Size | None = None) -> Iterator[Image.Image]:
        try:
            with (
                damage("a file"),
                large_images_allowed(),
                open(name, "rb") as file,
                open_mask(file) as mask,
            ):
                if mask.height * mask.width > self.max_pixels:
                    raise NotAsAsked(
                        f"it has {mask.height} x {mask.width} pixels, more than data.max_pixels "
                        f"{self.max_pixels:,}"
                    )
                own = (mask.height, mask.width)
                if size is not None and own != size:
                    raise NotAsAsked(
                        f"it has {own[0]} x {own[1]} pixels, its image {size[0]} x {size[1]}"
                    )
                yield mask
        except NotAsAsked as error:
            raise NotAsAsked(f"the mask {name}: {error}") from error
        except DAMAGED_IMAGE as error:
            raise ValueError(f"the mask {name} cannot be read: {error}") from error

    def each(
        self, read: Callable[[int], Found], indices: Sequence[int]
    ) -> Iterator[tuple[int, Found]]:
        """Read some masks, and yield each index with the result of ``read``; unreadable masks are
        reported later.

        Raises:
            NotAsAsked: classes have no names yet, and a mask has values that cannot be classes.
        """

        def of(index: int) -> Found | None:
            try:
                return read(index)
            except ValueError as error:
                if isinstance(error, NotAsAsked) and not self.classes.names:
                    raise
                return None

        with (
            ThreadPoolExecutor(READ_THREADS) as pool,
            Progress(len(indices), what="masks: ", unit="masks") as progress,
        ):
            for start in range(0, len(indices), READ_AHEAD):
                some = indices[start : start + READ_AHEAD]
                for index, found in zip(some, pool.map(of, some), strict=True):
                    progress.advance(1)
                    if found is not None:
                        yield index, found

    def classes_in(self, indices: np.ndarray, enough: int) -> tuple[set[int], bool]:
        """Return classes of some masks, until ``enough`` are found, and whether some pixels are
        ignored.

        Masks are read in a random order that is the same each time.
        """
        classes: set[int] = set()
        order = np.random.default_rng(0).permutation(indices).tolist()
        for _, found in self.each(lambda index: set(used_values(self.read(index))), order):
            classes |= found
            if len(classes - {IGNORED}) >= enough:
                break
        return classes - {IGNORED}, IGNORED in classes

    def pixel_counts(self, indices: np.ndarray, classes: int) -> np.ndarray:
        """Return the number of pixels of each class in some masks, int64 ``[classes]``; ignored
        pixels and unreadable masks do not count.
        """

        def count(index: int) -> np.ndarray:
            return np.bincount(self.read(index).ravel(), minlength=IGNORED + 1)

        counts = np.zeros(IGNORED + 1, np.int64)
        for _, found in self.each(count, indices.tolist()):
            counts += found
        return counts[:classes]


def open_mask(file: BinaryIO) -> Image.Image:
    """Open a mask whose values, or palette indices, are class numbers."""
    try:
        return Image.open(file)
    except UnidentifiedImageError:
        file.seek(0)
        if file.read(2) not in (b"II", b"MM") or importlib.util.find_spec("tifffile") is None:
            raise
    from visionattn.data.formats import tiff

    file.seek(0)
    return tiff.open_mask(file)


def settle_classes(files: MaskFiles, root: str) -> MaskFiles:
    """Return masks with the meaning of their values settled, as far as options do not define it.

    Black and white masks have two classes, and white (255, or 65535 in 16 bits) is class 1. Other
    values are class numbers, up to the largest. All masks are read for this; if two classes have
    names, only until a mask has a value other than black and white.

    Raises:
        ValueError: a value cannot be a class, or most classes have no pixel; one line.
    """
    classes, kinds = files.classes, dict[Pairs, int]()
    numbered = classes.colours == BLACK_AND_WHITE
    if not numbered and (classes.colours is not None or len(classes.names) > 2):
        return files
    for index, found in files.each(files.pairs, range(len(files.files.paths))):
        kinds.setdefault(found, index)
        if not found <= NUMBERS if numbered else classes.names and not classes.may_be_binary(found):
            return files
    if numbered:  # they hold 0 and 1, shown almost black
        return replace(files, classes=replace(classes, colours=None))
    pairs = frozenset[tuple[int, int]]().union(*kinds)
    settled = classes.as_binary(pairs)
    if settled is not None:
        values = sorted({value for value, _ in pairs})
        name = f" ({settled.names[1]})" if settled.names[1] != "1" else ""
        rest = f", {classes.ignored} is ignored" if classes.stated else ""
        warnings.warn(
            f"the masks of {root} are black and white (values {', '.join(map(str, values))}); "
            f"white is class 1{name}{rest}",
            stacklevel=4,
        )
    elif not classes.names:
        settled = replace(classes, names=_numbers(files, kinds, root))
    return replace(files, classes=settled or classes)


def _numbers(files: MaskFiles, kinds: dict[Pairs, int], root: str) -> tuple[str, ...]:
    """Return the numbers of classes up to the largest value, as names.

    Args:
        files: the masks.
        kinds: all sets of values in masks, each with the index of one such mask.
        root: their folder.
    """
    ignored = files.classes.ignored
    found = {value for pairs in kinds for value, _ in pairs}
    for pairs, index in kinds.items():
        if not {value for value, _ in pairs} - {ignored} <= set(range(IGNORED)):
            files.read(index)  # raises the reason
    counted = found - {ignored}
    count = max(2, max(counted, default=0) + 1)
    empty = count - len(counted)
    if counted and empty > MOST_EMPTY * count:
        there = sorted(found)
        colours = (
            [[value] * 3 for value in there] if len(there) < 9 else "[[red, green, blue], ...]"
        )
        raise ValueError(
            f"the masks of {root} have the values {', '.join(map(str, there))}, so that {empty} "
            f"of {count} classes have no pixel; if values are colors, pass one color per class: "
            f"--data.masks '{{colours: {colours}}}'"
        )
    having = [pairs for pairs in kinds if (IGNORED, IGNORED * GREY_STEP) in pairs]
    binary = all({value for value, _ in pairs} <= {0, IGNORED} for pairs in having)
    if having and binary and ignored == IGNORED and not files.classes.stated:
        warnings.warn(
            f"255 is ignored in {files.files.name(kinds[having[0]])}, where all other pixels are "
            f"class 0, because other masks have values up to {max(counted)}; where it is an "
            "object, write its class number",
            stacklevel=5,
        )
    return tuple(map(str, range(count)))


def check_trained(splits: Any) -> None:
    """Check the masks of training, validation and test images.

    Args:
        splits: the images, a ``Splits``.

    Raises:
        ValueError: only one class counts, or a class that the user has named has no pixel; one
            line. Another class without training pixels is only a warning.
    """
    train, names = splits.train, splits.spec.class_names
    found, ignored = classes_of(train, len(names))
    if len(found) < 2 and (found or ignored):
        said = _counting(train, names, "training", found, ignored)
        raise ValueError(f"{said}; expected at least two classes")
    missing = [name for number, name in enumerate(names) if number not in found]
    if found and missing:
        text = f"the {len(train)} training masks have no pixel of class {', '.join(missing)}"
        count = len(splits.validation) if getattr(splits.validation, "held_out", False) else 0
        apart = f", or hold out {count} other masks with another --seed" if count else ""
        if train.masks.classes.named:
            raise ValueError(
                f"{text}; add masks with it, or name only classes that masks have{apart}"
            )
        warnings.warn(text + apart, stacklevel=2)
    check_judged(splits.validation, splits.spec, "validation")
    check_judged(splits.test, splits.spec, "test")


def check_mask_sizes(dataset: Any) -> None:
    """Check that the masks of a dataset have the size of their images, by the headers of the files.

    Raises:
        ValueError: a mask has another size; one line, with the number of such masks. Files that
            cannot be read are reported later.
    """
    masks = getattr(dataset, "masks", None)
    if masks is None:
        return
    wrong = []
    for index, size in zip(dataset.indices.tolist(), dataset.sizes().tolist(), strict=True):
        try:
            if any(size):
                masks.check_size(index, tuple(size))
        except NotAsAsked as error:
            wrong.append(str(error))
        except ValueError:
            continue
    if wrong:
        more = f"; {len(wrong) - 1} more like this" * (len(wrong) > 1)
        raise ValueError(f"{wrong[0]}{more}; correct them, or pass --data.on_error skip")


def check_judged(dataset: Dataset | None, spec: DataSpec, split: str) -> None:
    """Warn if only one class counts in the masks for evaluation, because their mean IoU is then not
    informative.

    Args:
        dataset: the images.
        spec: names the classes.
        split: name of the images in messages.

    Raises:
        ValueError: only one class counts and other pixels are ignored, which may well be another
            class; one line. Not raised for images split off at random, which may lack a class by
            chance.
    """
    found, ignored = classes_of(dataset, 2)
    if len(found) > 1 or not (found or ignored):  # unreadable masks are reported elsewhere
        return
    names = spec.class_names or tuple(map(str, range(spec.num_classes)))
    text = f"{_counting(dataset, names, split, found, ignored)}; their mean IoU is not informative"
    if ignored and not dataset.held_out:
        raise ValueError(text)
    more = ", or hold out others with another --seed" if dataset.held_out else ""
    warnings.warn(text + more, stacklevel=2)


def classes_of(dataset: Any, enough: int) -> tuple[set[int], bool]:
    """Return classes in the masks of a dataset, until ``enough`` are found, and whether some pixels
    are ignored; neither if it has no mask files.
    """
    masks = getattr(dataset, "masks", None)
    return (set(), False) if masks is None else masks.classes_in(dataset.indices, enough)


def _counting(
    dataset: Any, names: Sequence[str], split: str, found: set[int], ignored: bool
) -> str:
    """Return a message about the only class that counts."""
    what = f"only class {names[min(found)]} counts" if found else "no pixel counts"
    text = f"{what} in {'all' if split == 'all' else 'the'} {len(dataset)} "
    text += "masks" if split == "all" else f"{split} masks"
    classes = dataset.masks.classes
    if ignored and isinstance(classes.ignored, int):
        other = "remove data.masks.ignored" if classes.stated else "write its class number there"
        text += f", because the value {classes.ignored} is ignored (if it is a class, {other})"
    return text
