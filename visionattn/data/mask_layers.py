"""Masks with one file per class, such as the lesions of IDRiD; ``data.masks.layers`` names them."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from visionattn.data.class_folders import IMAGES, Placed, open_tree
from visionattn.data.geometry import Size
from visionattn.data.mask_files import MaskFiles
from visionattn.data.mask_values import MasksSaid
from visionattn.data.sources import Files


class LayerFiles(Files):
    """The mask files of each image, presented as one file."""

    def __init__(self, layers: list[dict[int, str]]):
        """Store the path of each class that has a mask, for each image."""
        super().__init__([next(iter(paths.values()), "") for paths in layers])
        self.layers = layers

    def open(self, index: int) -> io.BytesIO:
        """Return the class and the SHA-256 digest of each file of an image."""
        digests = (
            b"%d" % number + hashlib.sha256(Path(path).read_bytes()).digest()
            for number, path in self.layers[index].items()
        )
        return io.BytesIO(b"".join(digests))


@dataclass(frozen=True)
class MaskLayers(MaskFiles):
    """Masks whose classes have their own files: a pixel has the last class in whose file it is not
    black, and else class 0.
    """

    def check_size(self, index: int, size: Size) -> None:
        """Check the files of all classes, as ``MaskFiles.check_size``."""
        for path in self.files.layers[index].values():  # type: ignore[attr-defined]
            with self._open(path, size):
                pass

    def read(self, index: int, size: Size | None = None) -> np.ndarray:
        """Return the class of each pixel, as ``MaskFiles.read``."""
        classes = None
        for number, path in self.files.layers[index].items():  # type: ignore[attr-defined]
            with self._open(path, size) as mask:
                size = (mask.height, mask.width)
                classes = np.zeros(size, np.uint8) if classes is None else classes
                classes[np.asarray(mask.convert("L")) > 0] = number
        assert classes is not None, "open_layers has found a file of each image"
        return classes


def open_layers(root: str, said: MasksSaid) -> tuple[Placed, LayerFiles]:
    """Open a folder of images and the mask files of their classes.

    Args:
        root: the folder.
        said: ``layers`` has the path of each class's masks below ``root``.

    Raises:
        ValueError, FileNotFoundError: there are no images, or an image has no mask; one line.
    """
    folder = Path(root, said.images or IMAGES)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"expected the images in {folder}, which does not exist; check data.masks.images"
        )
    placed = open_tree(str(folder), False, None)
    layers = []
    for path in map(Path, placed.source.paths):  # type: ignore[attr-defined]
        inside = str(path.parent.relative_to(folder))
        wanted = {
            number: Path(root, layer.replace("{folder}", inside).replace("{name}", path.stem))
            for number, layer in enumerate((said.layers or {}).values(), 1)
        }
        layers.append({number: str(mask) for number, mask in wanted.items() if mask.is_file()})
        if not layers[-1]:
            raise FileNotFoundError(
                f"{path} has no mask of data.masks.layers; expected e.g. {wanted[1]}"
            )
    return placed, LayerFiles(layers)
