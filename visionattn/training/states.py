"""The states of a run in its folder: the last one, the one before it, and which of the two a
resumed run goes on from.

This module decides when a file may be replaced. ``checkpoint.py`` has the format, and the trainer
knows what a state means.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from visionattn.cli.untrusted import brief, from_json
from visionattn.data.data_checks import WHOLE
from visionattn.data.splits import Splits
from visionattn.data.walk import composed, listed
from visionattn.models.building import ModelConfig
from visionattn.models.conversion import NAME as CONVERTED
from visionattn.models.mixed_blocks import places_of_blocks
from visionattn.models.registration import FORMER, complete
from visionattn.models.weights import read_metadata
from visionattn.training.checkpoint import check_state, read_state, save_state
from visionattn.training.config import TrainConfig
from visionattn.training.progress import Position
from visionattn.training.record import LAST, PREVIOUS
from visionattn.training.start import given_to_teacher

QUIET = frozenset(
    {
        "resume",
        "overwrite",
        "output",
        "run",
        "show_batch",
        "log_every",
        "save_every",
        "init_from",
        "init_model",
        "parallel",
        "sequence_ranks",
        "dist_timeout",
    }
)
"""Options that say where and how often to write."""

BINDING = ("seed", "optim.name", "optim.layer_decay")
BINDING += ("data.name", "data.task", "data.val_fraction", "data.args", "data.fit")
BINDING += ("data.mask_classes", "data.mask_colours", "data.mask_ignored")
"""Options that stay, as they say which images are trained and validated on, and what the optimiser
keeps of each weight.
"""
COUNTED = ("batch_size", "optim.accumulate", "data.batch_patches", "data.max_patches")
"""Options that stay until the epoch is over."""
SIZES = ("data.img_size", "data.img_size_choices")
"""Options that do so too where images of many sizes make the batches."""
TRAINED = ("optim.", "data.aug", "data.img_size_choices", "batch_size")
"""The beginnings of options that act on training steps only."""


PARTS = ("train", "validation", "test")
"""The splits of a data set, by the names of ``Splits``."""


class States:
    """``last.pt`` and ``previous.pt`` of a run folder.

    Attributes:
        step: the step of the newest state on the disk; None before the first one.
    """

    def __init__(self, folder: Path):
        self.folder, self.step = folder, None
        self._spoilt = False

    def exist(self) -> bool:
        """Tell whether there is a file of a state, readable or not; that of a run at its start,
        which holds nothing yet, does not count.
        """
        return self.step != 0 and any((self.folder / name).is_file() for name in (LAST, PREVIOUS))

    def save(self, state: dict[str, Any]) -> None:
        """Make a state the last one, and the last one, unless it could not be read, the previous
        one.

        Raises:
            OSError: it cannot be written; both files are as they were.
        """
        save_state(
            self.folder / LAST, state, previous=None if self._spoilt else self.folder / PREVIOUS
        )
        self._spoilt, self.step = False, state["position"]["step"]

    def load(self, model: nn.Module, name: str) -> tuple[dict[str, Any], list[str]]:
        """Return the newest state that can be read, and a line where that is not the last one;
        nothing is deleted.

        Raises:
            ValueError: neither of the two can be read, or it is the state of another model; one
                line.
        """
        last, previous = self.folder / LAST, self.folder / PREVIOUS
        state, reason = attempt(last)
        lines, path = [], last
        if state is None:
            state, other = attempt(previous)
            if state is None:
                raise ValueError(
                    f"nothing to resume from: {reason}; {other}; --overwrite starts the run anew"
                )
            self._spoilt, path = last.exists(), previous
            lines = [f"{reason}; goes on from {previous}, step {state['position']['step']}"]
        check_state(state, path, model, name)
        self.step = state["position"]["step"]
        return state, lines

    def started_as(self, config: TrainConfig) -> ModelConfig:
        """Return the model of a run that goes on: that which a teacher in ``init_from`` has become,
        where the flags name the teacher again, and otherwise what the flags say.

        Raises:
            ValueError: the flags would make another model of the teacher; one line.
        """
        model, state = config.model, self.newest[0]
        if state is None or state["name"] != CONVERTED or not config.init_from:
            return model
        was, args = state["config"], state["args"]
        if was.get("init_from") != config.init_from:
            return model
        for key, value in given_to_teacher(model).items():
            if key == "softmax_blocks":
                value = places_of_blocks(value, args["depth"])
            if args.get(key) != value:
                raise ValueError(
                    f"the run has model.args.{key} {brief(args.get(key))}, not {brief(value)}; "
                    "resume with the same"
                )
        return replace(model, name=CONVERTED, args=was["model"]["args"])

    def former_defaults(self, name: str) -> dict[str, Any]:
        """Return those arguments of the model that nobody gave and whose defaults have changed
        since the newest state that can be read, as they were then.
        """
        state, _ = self.newest
        return former_defaults(state) if state and state["name"] == name else {}

    def batches(self, config: TrainConfig) -> dict[str, Any]:
        """Return the batch size, and the data with the patches of a batch, that the newest state
        that can be read was saved with.

        Raises:
            ValueError: none can be read.
        """
        state, reason = self.newest
        if state is None:
            raise ValueError(f"nothing to resume from: {reason}; --overwrite starts the run anew")
        was = state["config"]
        data = replace(config.data, batch_patches=was["data"].get("batch_patches"))
        return {"batch_size": was["batch_size"], "data": data}

    @cached_property
    def newest(self) -> tuple[dict[str, Any] | None, str]:
        """Return what the newest state that could be read when this was first asked says of the
        run, without tensors, or None and why none can be.
        """
        reason = ""
        for file in (LAST, PREVIOUS):
            state, reason = attempt(self.folder / file)
            if state is not None:
                return {key: state[key] for key in ("name", "args", "config", "version")}, ""
        return None, reason

    def kept(self) -> str:
        """Say what of the run is on the disk, for the end of an error's line."""
        if self.step is None:
            return "no state was saved yet"
        return f"the state of step {self.step} is kept, --resume goes on from it"

    def explain(self, error: OSError) -> OSError:
        """Return the same error, with what is kept at its end."""
        if error.errno is None:
            return OSError(f"{error}; {self.kept()}")
        name = error.filename or str(self.folder)
        return OSError(error.errno, f"{error.strerror}; {self.kept()}", str(name))


def attempt(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the state of a file, or None and why it cannot be read.

    Raises:
        ValueError: there is something else than a file, which no state could replace.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file; move it out of the way")
    try:
        return read_state(path), ""
    except FileNotFoundError:
        return None, f"{path} is missing"
    except OSError as error:
        return None, f"{path}: {error.strerror or error}"
    except ValueError as error:
        return None, str(error)


def former_defaults(state: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the model of a state took by default, where the default is another
    one now.
    """
    name, given = state["name"], state["config"]["model"].get("args", {})
    held = complete(name, given, FORMER) if state["version"] == 2 else state["args"]
    return {
        key: held[key]
        for key, value in complete(name, {}).items()
        if key not in given and key in held and held[key] != value
    }


@dataclass(frozen=True)
class BestFigures:
    """What the file of the best weights says about them."""

    epoch: int
    """Counted from 1."""
    score: float | None
    """``Evaluation.score`` on the validation images, in [0, 1]; None where these have no classes.
    """
    loss: float
    """On the validation images."""

    @property
    def rank(self) -> tuple[float, float]:
        """Return what ``Position`` keeps of them as ``best`` and ``best_loss``."""
        return -1.0 if self.score is None else self.score, self.loss

    def notes(self) -> dict[str, str]:
        """Return the figures for the metadata of the file."""
        return {"validation": json.dumps([self.epoch, self.score, self.loss])}


def best_figures(path: Path) -> BestFigures | None:
    """Read the figures from a file; None where it holds none.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it cannot be read.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    notes = read_metadata(path).get("validation")
    if not notes:
        return None
    epoch, score, loss = from_json(tuple[int, float | None, float], notes, f"validation of {path}")
    if epoch < 1 or not 0 <= (score or 0) <= 1:
        raise ValueError(f"validation of {path} is {brief(notes)}, which cannot be")
    return BestFigures(epoch, score, loss)


def recall_best(position: Position, path: Path) -> list[str]:
    """Let the file of the best weights say how good they are: it may be newer than the state of
    ``position``.

    Returns:
        A line where the file is missing or garbled; the weights of a further epoch then take its
        place.
    """
    if not position.best_epoch and not path.exists():
        return []
    try:
        found = best_figures(path)
    except (FileNotFoundError, ValueError) as error:
        position.best, position.best_loss = -1.0, math.inf
        position.best_epoch = 0
        return [f"{error}; the weights of a further epoch take its place"]
    if found:
        position.best, position.best_loss = found.rank
        position.best_epoch = found.epoch
    return []


def completed(old: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a state with those that the version that saved it did not have, as they
    are by default: without them a run did the same.
    """
    defaults = asdict(TrainConfig())
    groups = {key: value | old[key] for key, value in defaults.items() if isinstance(value, dict)}
    if "fit" not in old["data"]:  # whose default has changed
        del groups["data"]["fit"]
    return defaults | old | groups


def check_options(
    old: dict[str, Any], new: dict[str, Any], *, amid_epoch: bool, done: bool
) -> None:
    """Check the options that a state binds.

    Args:
        old: the configuration that the state was saved with, as a dict.
        new: that of the resumed run.
        amid_epoch: the state is from the middle of an epoch, and counts its batches.
        done: there is no epoch left to train.

    Raises:
        ValueError: one of them has changed, or acts on training where none is left.
    """
    # Options of training steps act on nothing where no step is left.
    if done:
        changed = [
            line.split()[0] for line in differences(old, new) if line.split()[0].startswith(TRAINED)
        ]
        if changed:
            raise ValueError(
                f"all {new['epochs']} epochs are done, so that another {changed[0]} would change "
                f"nothing; --epochs {new['epochs'] + 1} trains on, or leave it out"
            )
    # Options that the state was made with.
    native = new["data"]["fit"] == "native" or (
        new["data"]["fit"] is None and new["data"]["name"] in WHOLE
    )
    if "fit" not in old["data"]:  # a state of before cropped, whatever the data
        old = old | {"data": old["data"] | {"fit": "crop" if native else new["data"]["fit"]}}
    counted = COUNTED + (SIZES if native else ())
    for key in BINDING + (counted if amid_epoch else ()):
        group, _, name = key.rpartition(".")
        was, is_now = ((options[group] if group else options).get(name) for options in (old, new))
        if was != is_now:
            until = " until the epoch is over" if key in counted else ""
            raise ValueError(f"the run has {key} {was}, not {is_now}; resume with the same{until}")
    if new["init_from"] not in (None, old.get("init_from")):
        raise ValueError(
            f"init_from {new['init_from']} is for a run at its start, and this one goes on with "
            "its own weights; leave it out"
        )
    if bool(old["optim"].get("ema_decay")) != bool(new["optim"]["ema_decay"]):
        raise ValueError(
            f"the run has optim.ema_decay {old['optim'].get('ema_decay')}; it cannot be switched "
            "on or off halfway"
        )


def changes(old: dict[str, Any] | None, new: dict[str, Any] | None, splits: Splits) -> str:
    """Say in words how the images of a state differ from those that are there.

    Args:
        old: ``Trainer.listing()`` of the state; None where it has none.
        new: that of the run.
        splits: the images that are there, for their names.
    """
    if old is None or new is None:
        return ""
    names = [list(map(composed, listing["class_names"])) for listing in (old, new)]
    was, now = map(set, names)
    if was != now:
        gone, come = (", ".join(sorted(each)[:3]) for each in (was - now, now - was))
        return f"classes that are gone: {gone or 'none'}; new ones: {come or 'none'}"
    if names[0] != names[1]:
        return f"the classes were in the order {listed(names[0])}, and are {listed(names[1])}"
    words = []
    for part in PARTS:
        held = [listing.get(part, torch.empty(0)) for listing in (old, new)]
        if len(held[0]) != len(held[1]):
            words.append(f"{len(held[1])} {part} images, where there were {len(held[0])}")
        elif places := (held[0] != held[1]).nonzero().flatten().tolist():
            names = ", ".join(getattr(splits, part).name(place) for place in places[:3])
            more = ", ..." if len(places) > 3 else ""
            words.append(f"{len(places)} of {len(held[0])} {part} images differ ({names}{more})")
    return "; ".join(words)


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Return a line for each option whose value changed, except those that say where and how often
    to write.
    """
    lines = []
    for key in new:
        if isinstance(new[key], dict) and isinstance(old.get(key, {}), dict):
            lines += differences(old.get(key, {}), new[key], f"{prefix}{key}.")
        elif key not in QUIET and old.get(key) != new[key]:
            lines.append(f"  {prefix}{key} is now {new[key]}, was {old.get(key)}")
    return lines
