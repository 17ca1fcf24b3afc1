"""Vision transformers whose cost grows with the number of patches and not with its square.

The models are registered with timm as soon as both are imported:
``import timm, visionattn; timm.create_model("scaleformer_vit_s")``. Importing this package alone
imports neither timm nor torch; its names do, when they are first used.
"""

import sys
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from visionattn.inference.calls import Predictions, extract_features, predict
    from visionattn.models.weights import DataSpec, load_model
    from visionattn.training.calls import train

__version__ = "0.1.0"
__all__ = ["DataSpec", "Predictions", "extract_features", "load_model", "predict", "train"]

_HOMES = {
    "DataSpec": "visionattn.models.weights",
    "Predictions": "visionattn.inference.calls",
    "extract_features": "visionattn.inference.calls",
    "load_model": "visionattn.models.weights",
    "predict": "visionattn.inference.calls",
    "train": "visionattn.training.calls",
}
_PARTS = ("layers", "layout", "models", "ops")


def __getattr__(name: str):
    if name in _PARTS:
        return import_module(f"visionattn.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'visionattn' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__():
    return sorted({*globals(), *__all__, *_PARTS})


class _WithTimm(MetaPathFinder):
    """Has the models imported, and thereby registered, as soon as timm is."""

    def __init__(self):
        self.at_work = set()

    def find_spec(self, name, path=None, target=None):
        """What the other finders find, to be followed by the models."""
        if name not in ("timm", "visionattn.layers") or name in self.at_work:
            return None
        self.at_work.add(name)  # the next line asks all finders, this one too
        try:
            spec = find_spec(name)
        finally:
            self.at_work.discard(name)
        if spec is not None:
            spec.loader.exec_module = partial(self.execute, spec.loader)
        return spec

    def execute(self, loader, module) -> None:
        """Run a module, then import the models. They need all of the layers, which import timm:
        where the layers come first, their end is waited for.
        """
        del loader.exec_module  # from here on it is again that of the loader's class
        self.at_work.add(module.__name__)
        try:
            loader.exec_module(module)
        finally:
            self.at_work.discard(module.__name__)
        if not self.at_work:
            import visionattn.models  # noqa: F401


if "timm" in sys.modules:
    import visionattn.models  # noqa: F401
else:
    sys.meta_path.insert(0, _WithTimm())
