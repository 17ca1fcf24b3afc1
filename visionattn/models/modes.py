"""Modes of modules: training or eval, of each part by itself."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode within the context; then each part has its own mode again, since
    a model may be partly in training mode.
    """
    training = [part for part in model.modules() if part.training]
    try:
        model.eval()
        yield
    finally:
        for part in training:
            part.training = True
