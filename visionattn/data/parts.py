"""The images of a root, split by split, and which of them a training or an evaluation takes.

This module owns the numbers of classes, and the validation images that are held out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from visionattn.data.embedded import stratified_split
from visionattn.data.mask_files import MaskFiles
from visionattn.data.sources import Source
from visionattn.data.split_names import SPLIT_NAMES, LeftOut, listed
from visionattn.data.walk import composed, in_order

LAYOUT = "wanted train/<class>/* and val/<class>/*, or <class>/*"
MASKED_LAYOUT = (
    "wanted images/* and masks/*, or train/images/*, train/masks/*, val/images/* and val/masks/*"
)
Place = tuple[str, str]
"""The split and the class of an image; the class is an empty text where images have none."""


@dataclass(frozen=True)
class Part:
    """The images of one split: their numbers in ``source`` and their classes, ``[n]`` each; of all
    images of the source, the masks where there are some.
    """

    source: Source
    indices: np.ndarray
    labels: np.ndarray
    masks: MaskFiles | None = None
    held_out: bool = False
    """Chance took them from the training images."""

    def take(self, chosen: np.ndarray) -> "Part":
        """Return some of the images."""
        return replace(self, indices=self.indices[chosen], labels=self.labels[chosen])


@dataclass(frozen=True)
class Found:
    """What a root holds."""

    parts: dict[str, Part]
    """By split; all have one source. Images that are not divided are of ``train``."""
    names: tuple[str, ...]
    """Of the classes; none where images have no classes, whose labels are all 0."""
    left_out: LeftOut = field(default_factory=LeftOut)

    @classmethod
    def placed(
        cls,
        source: Source,
        places: Sequence[Place | None],
        left_out: LeftOut,
        masks: MaskFiles | None = None,
    ) -> "Found":
        """Number the classes of images in an order that depends on their names only.

        Args:
            source: the images.
            places: of each of them; None: left out.
            left_out: what the root holds besides.
            masks: of the images, where there are some.
        """
        known = [place and (place[0], composed(place[1])) for place in places]
        names = tuple(sorted({place[1] for place in known if place}, key=in_order))
        numbers = {name: number for number, name in enumerate(names)}
        parts = {}
        for split in SPLIT_NAMES:
            of_split = [i for i, place in enumerate(known) if place and place[0] == split]
            labels = [numbers[place[1]] for place in known if place and place[0] == split]
            if of_split:
                parts[split] = Part(source, np.array(of_split), np.array(labels), masks)
        return cls(parts, () if names == ("",) else names, left_out)

    def to_train(self, root: str, val_fraction: float, seed: int) -> dict[str, Part]:
        """Check that ``train`` has the classes of all splits, and hold out a validation split where
        there is none.
        """
        train = self.parts.get("train")
        if train is None:
            splits, masked = " and ".join(self.parts), any(x.masks for x in self.parts.values())
            raise ValueError(
                f"data root {root} has {splits} images but none to train on; "
                f"{MASKED_LAYOUT if masked else LAYOUT}"
            )
        for split, part in self.parts.items():
            strange = np.setdiff1d(part.labels, train.labels)
            if len(strange):
                names = listed(self.names[label] for label in strange)
                raise ValueError(f"classes of {root} that are in {split} but not in train: {names}")
        parts = self._with_held_out(val_fraction, seed)
        if "validation" not in parts:
            raise ValueError(
                f"too few images in {root} to hold some out for validation; wanted two of some "
                "class"
            )
        return parts

    def to_judge(
        self, root: str, names: Sequence[str], val_fraction: float, seed: int
    ) -> dict[str, Part]:
        """Return the images to judge weights on: ``all``, and each split.

        Args:
            root: what was opened.
            names: the classes of the weights, whose numbers labels become; empty: not known.
            val_fraction: with ``seed`` divides training images as a training would.
            seed: likewise.

        Raises:
            ValueError: the images have classes that the weights do not know.
        """
        if strange := [name for name in self.names if names and name not in names]:
            raise ValueError(
                f"{root} has classes that the weights do not know: {listed(strange)}; its classes: "
                f"{listed(self.names)}; the classes of the weights: {listed(names)}"
            )
        if not self.parts:
            raise ValueError(f"data root {root} holds no images{self.left_out.files_there()}")
        numbers = np.array([names.index(name) for name in self.names] if names else [])
        parts = self._with_held_out(val_fraction, seed)
        held = list(self.parts.values())
        parts = parts | {
            "all": replace(
                held[0],
                indices=np.concatenate([part.indices for part in held]),
                labels=np.concatenate([part.labels for part in held]),
            )
        }
        if not len(numbers):
            return parts
        return {split: replace(part, labels=numbers[part.labels]) for split, part in parts.items()}

    def _with_held_out(self, val_fraction: float, seed: int) -> dict[str, Part]:
        train = self.parts.get("train")
        if train is None or "validation" in self.parts:
            return self.parts
        kept, held_out = stratified_split(train.labels, val_fraction, seed)
        if not len(held_out):
            return self.parts
        validation = replace(train.take(held_out), held_out=True)
        return self.parts | {"train": train.take(kept), "validation": validation}
