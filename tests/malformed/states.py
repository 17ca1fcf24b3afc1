"""States of a training that are none, or those of another format, model or run. A state with right
checksums and wrong content is made by hand only, and not looked for.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.malformed.mutations import set_at
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


def cases() -> Iterator[Case]:
    """Return cases of a state that loads."""
    for name, change in STATES.items():
        yield Case(f"state {name}", RESUME, change_state(change))
        if not name.startswith(FOUND_LATER):
            goes_on = dict(tolerated="resumes from run/previous.pt", writes=("run",))
            yield Case(f"state before {name}", RESUME, change_state(change, alone=False), **goes_on)


FOUND_LATER = ("another", "weights")
"""What a state alone does not tell: it ends the run, also where there is a state before it."""

STATES: dict[str, Callable[[Any], Any]] = {
    "is a list": lambda state: [state],
    "is a tensor": lambda state: torch.zeros(3),
    "is null": lambda state: None,
    "of another format": set_at("format", to="other"),
    "of version 99": set_at("version", to=99),
    "of no version": lambda state: {k: v for k, v in state.items() if k != "version"},
    "weights of 5 x 5": set_at("model", "head.bias", to=torch.zeros(5, 5)),
    "weights of whole numbers": set_at("model", "head.bias", to=torch.zeros(2).long()),
    "another dataset": set_at("config", "data", "name", to="digits"),
    "another optimizer": set_at("config", "optim", "name", to="lamb"),
}
