"""Images to read, written by the tests: each is of one gray level, which tells its class and its
number.
"""

import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from tests.helpers.geometry import square
from visionattn.data.data_config import DataConfig
from visionattn.data.splits import build_splits, eval_batches

LEVELS = {"bird": 40, "cat": 120, "dog 2": 180, "dog 10": 220}
"""Gray level of the images of each class, in the order that the classes are to have."""


def encoded(level, shape=(20, 28), image_format="png"):
    stream = io.BytesIO()
    Image.fromarray(np.full((*shape, 3), level, np.uint8)).save(stream, image_format)
    return stream.getvalue()


def write_classes(folder, counts):
    """``counts`` images per class; image i of a class is i levels brighter."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            (folder / name / f"{index}.png").write_bytes(encoded(LEVELS.get(name, 0) + index))


def write_pair(folder, name, image, mask):
    """Write an image and its mask to the folders ``images`` and ``masks``."""
    for kind, pixels in (("images", image), ("masks", mask)):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / kind / f"{name}.png")


def config_of(root, **changes):
    return DataConfig(
        **(
            {"name": "folder", "root": str(root), "fit": "crop", "img_size": 16, "workers": 0}
            | changes
        )
    )


def levels_and_labels(split, config, batch_size=5):
    """The gray level and the label of each image, as evaluation gives them."""
    pairs = []
    for images, labels, *_ in eval_batches(
        split, config, batch_size=batch_size, geometry=square(config.img_size)
    ):
        assert images.shape[1:] == (3, config.img_size, config.img_size)
        pairs += zip(images[:, 0, 0, 0].tolist(), labels.tolist(), strict=True)
    return pairs


def expected(counts):
    """What ``levels_and_labels`` is to give, sorted."""
    names = list(LEVELS)
    return sorted(
        (LEVELS[name] + index, names.index(name))
        for name, count in counts.items()
        for index in range(count)
    )


COUNTS = {"bird": 7, "cat": 4, "dog 2": 11, "dog 10": 3}
VAL_COUNTS = {"bird": 2, "cat": 1, "dog 2": 3, "dog 10": 1}


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def members_of(counts, prefix=""):
    return [
        (f"{prefix}{name}/{index}.png", encoded(LEVELS[name] + index))
        for name, count in counts.items()
        for index in range(count)
    ]


def refused(error, config):
    """The line with which the data is refused."""
    with pytest.raises(error) as caught:
        build_splits(config, 3)
    assert "\n" not in str(caught.value)
    return str(caught.value)
