"""Provide ``visionattn.train``, the command ``train`` as a Python call."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from visionattn.cli.parsing import OWN_OPTIONS, field_types
from visionattn.training import engine
from visionattn.training.config import TrainConfig, parse_train
from visionattn.training.distributed import joined
from visionattn.training.run_progress import Result

Asked = TrainConfig | Mapping[str, Any] | str | Path


def train(
    config: Asked, overrides: Mapping[str, Any] | None = None, *, stream: TextIO | None = None
) -> Result:
    """Train a model as ``visionattn train`` does, and raise exceptions instead of exiting.

    In a script started by ``torchrun``, all processes train together. The global generators of
    torch, numpy and Python are seeded with ``seed``.

    Args:
        config: a ``TrainConfig``, which is not changed; or its keys and values, nested as in a YAML
            file; or the path of such a file; or the name of a configuration of the package.
        overrides: keys and values that replace values of ``config``, nested or dotted:
            ``{"epochs": 2, "optim.lr": 3e-4}``.
        stream: where the run prints; None: standard output.

    Returns:
        The result: ``checkpoint`` and ``folder`` (paths), ``validation`` (accuracy in [0, 1]),
        ``test`` (with ``accuracy``; None without a test split), ``best_epoch``, ``seconds``.

    Raises:
        ValueError, FileNotFoundError: wrong configuration, data or checkpoint, or the run folder is
            not empty; one line, and nothing is written.
        OSError: a file cannot be read or written.
        NonFinite, OutOfMemory, Failed, Stopped: the run ended for another reason than its input;
            defined in ``visionattn.cli.exit_codes``.
    """
    with joined() as processes:
        asked = processes.together(lambda: config_of(config, overrides))
        return engine.train(asked, stream=stream, processes=processes)


def config_of(config: Asked, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the checked configuration, with a name for the run folder.

    Raises:
        ValueError, FileNotFoundError: wrong key, value or file; one line.
    """
    if isinstance(config, TrainConfig):
        words = _words(asdict(config))
    elif isinstance(config, Mapping):
        words = _words(config)
    else:
        words = [f"--config={config}"]
    return parse_train([*words, *_words(overrides or {})])


def _words(values: Mapping[str, Any], group: str = "") -> list[str]:
    """Return keys and values as flags of the command: ``--optim.lr=0.0003``."""
    words = []
    for key, value in values.items():
        name = f"{group}{key}"
        if name in OWN_OPTIONS:
            raise ValueError(f"{name} is not a key of a run; remove it")
        if isinstance(value, Mapping) and name not in field_types(TrainConfig):
            words += _words(value, f"{name}.")
            continue
        try:
            text = str(value) if isinstance(value, (str, Path)) else json.dumps(value)
        except TypeError as error:
            raise ValueError(
                f"expected numbers, strings, lists and mappings for {name}, got {value!r}"
            ) from error
        words.append(f"--{name}={text}")
    return words
