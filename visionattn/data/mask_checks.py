"""Whether masks in files have the classes that a training or an evaluation needs.

Masks are read until enough is seen, in most cases a few. Drawn images have all classes.
"""

import warnings

from torch.utils.data import Dataset

from visionattn.data.images import ImageDataset
from visionattn.data.mask_files import MaskFiles
from visionattn.data.splits import Splits
from visionattn.models.weights import DataSpec


def check_trained(splits: Splits, *, named: bool) -> None:
    """Check the masks of a training and of what judges it.

    Args:
        splits: the images.
        named: the user has named the classes; a warning tells which classes without names have no
            pixel to learn from.

    Raises:
        ValueError: one class alone counts, or a named class has no pixel; one line.
    """
    train, spec = splits.train, splits.spec
    if not isinstance(train, ImageDataset) or not isinstance(train.masks, MaskFiles):
        return
    found, ignored = train.masks.classes_in(train.indices, len(spec.class_names))
    if len(found) < 2 and (found or ignored):
        raise ValueError(
            f"{_counting(train, spec, 'training', found, ignored)}; there is nothing to learn"
        )
    missing = [name for number, name in enumerate(spec.class_names) if number not in found]
    if found and missing:
        text = f"no pixel of the {len(train)} training masks has the class {', '.join(missing)}"
        count = len(splits.validation) if getattr(splits.validation, "held_out", False) else 0
        apart = f"; --seed holds out {count} other masks" if count else ""
        if named:
            raise ValueError(
                f"{text}: add masks with it, or name only classes that masks have{apart}"
            )
        warnings.warn(text + apart, stacklevel=2)
    check_judged(splits.validation, spec, "validation")
    check_judged(splits.test, spec, "test")


def check_judged(dataset: Dataset | None, spec: DataSpec, split: str) -> None:
    """Warn where one class alone counts in the masks that judge weights, as their mean IoU then
    says little.

    Args:
        dataset: the images.
        spec: names the classes.
        split: what the images are called.

    Raises:
        ValueError: only one class counts and other pixels do not, which may well be another class,
            unless chance held the images out, which may have left a class out; one line.
    """
    if not isinstance(dataset, ImageDataset) or not isinstance(dataset.masks, MaskFiles):
        return
    found, ignored = dataset.masks.classes_in(dataset.indices, 2)
    if len(found) > 1 or not (found or ignored):  # or none can be read, which is said in its turn
        return
    text = f"{_counting(dataset, spec, split, found, ignored)}; their mean IoU says little"
    if ignored and not dataset.held_out:
        raise ValueError(text)
    warnings.warn(
        text + (", another --seed holds out others" if dataset.held_out else ""), stacklevel=2
    )


def _counting(
    dataset: ImageDataset, spec: DataSpec, split: str, found: set[int], ignored: bool
) -> str:
    """Say which class counts alone."""
    assert isinstance(dataset.masks, MaskFiles)
    names = spec.class_names or tuple(map(str, range(spec.num_classes)))
    what = f"class {names[min(found)]} alone counts" if found else "no pixel counts"
    count = len(dataset)
    text = f"{what} in {f'all {count}' if split == 'all' else f'the {count} {split}'} masks"
    classes = dataset.masks.classes
    if ignored and isinstance(classes.ignored, int):
        other = (
            "leave data.mask_ignored out" if classes.stated else "write the class's number there"
        )
        text += f", as the value {classes.ignored} does not count (if it is a class, {other})"
    return text
