"""``visionattn.train``: the command ``train`` as a Python call."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from visionattn.cli.parsing import OWN_OPTIONS, field_types
from visionattn.training import engine
from visionattn.training.config import TrainConfig
from visionattn.training.distributed import joined
from visionattn.training.options import parse_train
from visionattn.training.run_progress import Result

Asked = TrainConfig | Mapping[str, Any] | str | Path


def train(
    config: Asked, overrides: Mapping[str, Any] | None = None, *, stream: TextIO | None = None
) -> Result:
    """Train as configured, as ``visionattn train`` does, and raise where that would exit.

    In a script that ``torchrun`` has started, its processes train together. Torch's, numpy's and
    Python's global generators are seeded with ``seed``.

    Args:
        config: a ``TrainConfig``, which stays as it is; or its keys and values, nested as in a YAML
            file; or the path of such a file, or the name of one that comes with the package.
        overrides: keys with values that replace those of ``config``, nested or dotted:
            ``{"epochs": 2, "optim.lr": 3e-4}``.
        stream: where the run prints; None: standard output.

    Returns:
        What the run came to: ``checkpoint`` and ``folder`` (paths), ``validation`` (accuracy in
        [0, 1]), ``test`` (with ``accuracy``; None without a test split), ``best_epoch``,
        ``seconds``.

    Raises:
        ValueError, FileNotFoundError: the configuration, the data or a checkpoint is wrong, or the
            run's folder is not empty; one line, and nothing is written.
        OSError: a file cannot be read or written.
        NonFinite, OutOfMemory, Failed, Stopped: how a run can end through no fault of its input;
            they are defined in ``visionattn.cli.ends``.
    """
    with joined() as processes:
        asked = processes.together(lambda: config_of(config, overrides))
        return engine.train(asked, stream=stream, processes=processes)


def config_of(config: Asked, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the run that is meant, with a name for its folder, checked like the command's flags.

    Raises:
        ValueError, FileNotFoundError: a key, a value or a file is wrong; one line.
    """
    if isinstance(config, TrainConfig):
        words = _words(asdict(config))
    elif isinstance(config, Mapping):
        words = _words(config)
    else:
        words = [f"--config={config}"]
    return parse_train([*words, *_words(overrides or {})])


def _words(values: Mapping[str, Any], group: str = "") -> list[str]:
    """Return keys and values as the command takes them: ``--optim.lr=0.0003``."""
    words = []
    for key, value in values.items():
        name = f"{group}{key}"
        if name in OWN_OPTIONS:
            raise ValueError(f"{name} is no key of a run; leave it out")
        if isinstance(value, Mapping) and name not in field_types(TrainConfig):
            words += _words(value, f"{name}.")
            continue
        try:
            text = str(value) if isinstance(value, (str, Path)) else json.dumps(value)
        except TypeError as error:
            raise ValueError(
                f"{name} must be of numbers, texts, lists and mappings, got {value!r}"
            ) from error
        words.append(f"--{name}={text}")
    return words
