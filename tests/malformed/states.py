"""States of a training with one value of another type, absurd or missing."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.malformed.mutations import KINDS, broken_trees, few, graft, set_at
from tests.malformed.runner import Case
from tests.malformed.valid import RESUME


def change_state(change: Callable[[Any], Any], *, alone: bool = True) -> Callable[[Path], None]:
    """Return what changes the content of the last state, and deletes the one before it if it is
    to be alone.
    """

    def apply(folder: Path) -> None:
        path = folder / "run" / "last.pt"
        torch.save(change(torch.load(path, weights_only=True)), path)
        if alone:
            (folder / "run" / "previous.pt").unlink()

    return apply


STATE = {
    "name": "x",
    "args": {"depth": 1},
    "config": {
        "model": {"name": "x", "args": {}, "grad_checkpointing": False},
        "data": {"name": "folder", "root": "images", "img_size": 16, "val_fraction": 0.1},
        "optim": {"name": "adamw", "lr": 0.1, "layer_decay": None, "ema_decay": 0.9},
        "epochs": 1,
        "batch_size": 4,
        "seed": 0,
        "init_from": None,
    },
    "model": {"head.bias": torch.zeros(2)},
    "ema": {"head.bias": torch.zeros(2)},
    "optimizer": {
        "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(8)}},
        "param_groups": [{"params": [0], "lr": 0.1}],
    },
    "scaler": {},
    "position": {
        "epoch": 1,
        "batch": 0,
        "step": 2,
        "skipped": 0,
        "loss_sum": 0.0,
        "images": 0,
        "seconds": 1.0,
        "images_before": 8,
        "best": 0.5,
        "best_loss": 1.0,
        "best_epoch": 1,
    },
    "window": {"steps": 0, "loss": 0.0, "images": 0},
    "history": [{"epoch": 1, "train_loss": 0.5}],
    "images": [8, 4],
    "unreadable": [],
    "random": {
        "torch": torch.zeros(8, dtype=torch.uint8),
        "cuda": [],
        "numpy": ["MT19937", torch.zeros(8), 3, 0, 0.0],
        "python": [3, [1, 2], None],
    },
}
"""Which values of a state are tried, and their types."""
OPTIONAL = ("config", "images", "ema", "scaler", "window", "random.cuda", "history.0")
OPTIONAL += ("optimizer.state.0", "optimizer.param_groups.0.lr", "position")
"""What a state of an earlier version, or of other options, may lack."""
UNUSED = ("args", "random.cuda", "optimizer.param_groups.0.lr")
"""What nothing is done with; names of values within them count too."""
BOUNDED = ("position.epoch", "position.batch", "position.step", "position.skipped")


def cases() -> Iterator[Case]:
    """Return cases of a state that loads."""
    for name, tree in few(broken_trees(STATE), 4):
        place, _, kind = name.partition("=")
        missing = place.removesuffix(" missing")
        if place.startswith(UNUSED) or (missing != place and missing.startswith(OPTIONAL)):
            continue
        if kind in KINDS and place not in BOUNDED:
            continue
        if kind == "empty" and place in ("config", "position", "window", "history.0"):
            continue
        if (place, kind) in FINE_IN_STATES:
            continue
        yield Case(f"state {name}", RESUME, change_state(graft(place, tree)))
    for name, change in STATES.items():
        yield Case(f"state {name}", RESUME, change_state(change))
        if not name.startswith(FOUND_LATER):
            goes_on = dict(tolerated="goes on from run/previous.pt", writes=("run",))
            yield Case(f"state before {name}", RESUME, change_state(change, alone=False), **goes_on)


FOUND_LATER = ("of version", "of no version", "of another", "another", "average", "weights")
FOUND_LATER += ("complex", "moments", "steps", "no groups", "groups", "batch beyond")
"""What a state alone does not tell: it ends the run, also where there is a state before it."""
FINE_IN_STATES = {
    ("config.data.root", "null"),
    ("config.data.img_size", "null"),
    ("config.data.img_size", "list"),
    ("config.init_from", "text"),
    ("config.model", "nested"),
    ("config.data", "nested"),
    ("config.optim", "nested"),
    ("config.model", "empty"),
    ("config.data", "empty"),
    ("scaler", "nested"),
    ("scaler", "empty"),
}


STATES: dict[str, Callable[[Any], Any]] = {
    "is a list": lambda state: [state],
    "is a tensor": lambda state: torch.zeros(3),
    "is null": lambda state: None,
    "of another format": set_at("format", to="other"),
    "of a list as format": set_at("format", to=["visionattn.state"]),
    "of version 99": set_at("version", to=99),
    "of no version": lambda state: {k: v for k, v in state.items() if k != "version"},
    "of version null": set_at("version", to=None),
    "without optimizer": lambda state: {k: v for k, v in state.items() if k != "optimizer"},
    "weights of 5 x 5": set_at("model", "head.bias", to=torch.zeros(5, 5)),
    "weights of whole numbers": set_at("model", "head.bias", to=torch.zeros(2).long()),
    "complex weights": set_at("model", "head.bias", to=torch.zeros(2, dtype=torch.complex64)),
    "average of 5 x 5": set_at("ema", "head.bias", to=torch.zeros(5, 5)),
    "average without a tensor": lambda s: s | {"ema": dict(list(s["ema"].items())[1:])},
    "moments of 5 x 5": set_at("optimizer", "state", 0, "exp_avg", to=torch.zeros(5, 5)),
    "moments of whole numbers": set_at(
        "optimizer", "state", 0, "exp_avg_sq", to=torch.zeros(3, dtype=torch.int64)
    ),
    "moments without a name": set_at("optimizer", "state", 0, to={}),
    "moments of text": set_at("optimizer", "state", "x", to={"step": 1}),
    "moments of no weight": set_at("optimizer", "state", 999, to={"step": torch.tensor(1.0)}),
    "steps in a list": set_at("optimizer", "state", 0, "step", to=[1]),
    "no groups": set_at("optimizer", "param_groups", to=[]),
    "groups of null": set_at("optimizer", "param_groups", to=[None, None]),
    "step below 0": set_at("position", "step", to=-1),
    "epoch beyond all": set_at("position", "epoch", to=10**15),
    "batch beyond all": set_at("position", "batch", to=10**15),
    "unknown position": set_at("position", "colour", to=3),
    "unknown window": set_at("window", "colour", to=3),
    "images of text": set_at("images", to=["a", "b"]),
    "images of one": set_at("images", to=[8]),
    "unreadable numbers": set_at("unreadable", to=[1, 2]),
    "history of numbers": set_at("history", to=[1, 2]),
    "history of lists": set_at("history", to=[{"epoch": [1]}]),
    "torch's state of 3": set_at("random", "torch", to=torch.zeros(3, dtype=torch.uint8)),
    "torch's state of floats": set_at("random", "torch", to=torch.zeros(5056)),
    "numpy's keys of 3": set_at("random", "numpy", 1, to=torch.zeros(3, dtype=torch.int64)),
    "numpy's keys of floats": set_at("random", "numpy", 1, to=torch.zeros(624)),
    "numpy's place of 10**9": set_at("random", "numpy", 2, to=10**9),
    "numpy's place below 0": set_at("random", "numpy", 2, to=-5),
    "numpy's kind PCG64": set_at("random", "numpy", 0, to="PCG64"),
    "Python's version 9": set_at("random", "python", 0, to=9),
    "Python's numbers below 0": set_at("random", "python", 1, to=[-1] * 625),
    "Python's place of 10**9": set_at("random", "python", 1, to=[1] * 624 + [10**9]),
    "Python's cached text": set_at("random", "python", 2, to="x"),
    "another data set": set_at("config", "data", "name", to="digits"),
    "another optimiser": set_at("config", "optim", "name", to="lamb"),
}
