"""How long the trainings of a sweep will take, from a trial of each of its networks; nothing is
written.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from visionattn.cli.ends import OutOfMemory, in_one_line
from visionattn.cli.tables import heading, lasting, line
from visionattn.lab.sweep.cells import config_of
from visionattn.lab.sweep.grid import Cell, Network, Plan
from visionattn.training.checkpoint import States
from visionattn.training.config import TrainConfig
from visionattn.training.distributed import Processes
from visionattn.training.engine import build
from visionattn.training.training_cost import forecast

COLUMNS = ("cell", "expected", "note")


def list_cells(plan: Plan, cells: Sequence[Cell], jobs: int, say: Callable[[str], None]) -> None:
    """Print the cells that are to train, with the time that each is expected to take.

    Networks that differ in nothing but the seed take the same time, and one that does not fit into
    memory has the reason in place of a time.
    """
    say(heading(COLUMNS))
    known: dict[Network, float | str] = {}
    for cell in cells:
        if cell.network not in known:
            known[cell.network] = expected_seconds(config_of(plan, cell, Path()))
        found = known[cell.network]
        told = ["-", found] if isinstance(found, str) else [lasting(found), ""]
        say(line([cell.name, *told]))
    seconds = sum(each for cell in cells if not isinstance(each := known[cell.network], str))
    share = f", {jobs} at a time" if jobs > 1 else ""
    say(
        f"\n{len(cells)} trainings of together {lasting(seconds)}{share}, besides measurements; "
        "nothing is trained yet"
    )


def expected_seconds(config: TrainConfig) -> float | str:
    """Return the seconds of a training, or why it cannot be."""
    processes = Processes()
    try:
        trainer, memory, _ = build(
            config, States(Path()), False, processes, processes.device(config.device)
        )
    except OutOfMemory as error:
        return in_one_line(error)
    found = forecast(trainer, memory)
    if found is None:
        return "none of its images can be read"
    return "the first steps will tell" if found.seconds is None else found.seconds
