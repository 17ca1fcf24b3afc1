"""A whole distillation: every check first, then one training for each stage.

Each stage is a run of ``engine.train`` in a folder of its own, with states, figures and weights as
any other run has, and begins with the best weights of the stage before. ``distil.yaml`` beside
these folders says what the whole is.
"""

import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from visionattn.cli.commands import typed
from visionattn.cli.files import is_unfinished, target_of, unfinished, write_text
from visionattn.cli.parsing import parse, yaml_text
from visionattn.cli.untrusted import from_json
from visionattn.data.geometry import geometry_of
from visionattn.data.splits import check_root, eval_batches
from visionattn.models.building import patch_size
from visionattn.models.conversion import student_of
from visionattn.models.weights import load_model
from visionattn.training import engine
from visionattn.training.checkpoint import differences
from visionattn.training.config import TrainConfig
from visionattn.training.distil.config import (
    STAGES,
    DistilConfig,
    check_distil,
    stage_data,
    stage_run,
)
from visionattn.training.distil.search import BLOCKS, measure_blocks
from visionattn.training.distil.student import (
    Preparing,
    Taught,
    check_student,
    images_of,
    open_taught,
)
from visionattn.training.distributed import Processes
from visionattn.training.run_folder import (
    BEST,
    CONFIG,
    LOCK,
    NAMES,
    STATUS,
    can_go_on,
    clear,
    held,
    named_folder,
)
from visionattn.training.run_progress import reached

DISTIL = "distil.yaml"
"""The file that says what a distillation is."""
BINDING = ("teacher", "pretrained", "model", "args", "attention", "softmax_blocks")
BINDING += ("search_softmax_blocks", "num_heads", "options", "seed")
"""Options that stay when it goes on, as they make the student."""
SETTLED = ("epochs", "batch_size", "optim.", "data.")
"""The beginnings of options that no longer act on a stage that is done."""
WORDS = {
    "a": "each block imitates the teacher's attention, on the teacher's inputs",
    "b": "the whole net imitates the teacher's final features",
    "c": "the whole net imitates the teacher's final features, once more",
}
"""What the stages do."""


@dataclass(frozen=True)
class Distilled:
    """What a distillation came to."""

    folder: Path
    """Its folder."""
    checkpoint: Path
    """The best weights of the last stage."""
    line: str
    """How good they are, for people; empty where the stage was done before."""


def distil(
    config: DistilConfig, *, stream: TextIO | None = None, processes: Processes | None = None
) -> Distilled:
    """Distil as configured. Nothing is written before teacher, student and sizes are checked.

    Args:
        config: the distillation; ``config.run`` names its folder.
        stream: where to print; None: standard output.
        processes: what ``distributed.joined()`` gives, where ``torchrun`` has started several.

    Raises:
        ValueError, FileNotFoundError: the configuration, the teacher or the data are wrong; one
            line.
        OSError: a file cannot be read or written.
        NonFinite, OutOfMemory, Failed, Stopped: as ``engine.train`` raises them.
    """
    if processes is None and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            "torchrun has started several processes, which are to train together: with "
            "distributed.joined() as processes, call distil(config, processes=processes)"
        )
    processes = processes or Processes()
    processes.together(lambda: check_distil(config))
    processes.set_timeout(config.dist_timeout)
    processes.on_first(lambda: check_root(config.data))
    folder = processes.on_first(lambda: distil_folder(config))

    def ready() -> Taught:
        taught = open_taught(config)
        check_student(config, taught)
        if "a" in config.stages or not config.resume:
            images_of(stage_data(config, config.stages[0], taught.spec), config.seed, taught.spec)
        return taught

    taught = processes.together(ready)
    whole = Whole(config, folder, taught, processes, stream or sys.stdout)
    processes.on_first(whole.check_done)
    if not processes.first:
        return whole.run()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with held(folder):
            return whole.run()
    except (ValueError, OSError):
        whole.undo()
        raise


def distil_folder(config: DistilConfig) -> Path:
    """Return the folder of a distillation, after checking that it may have it; nothing is written.

    Raises:
        ValueError: no usable name; the folder is in use and neither ``resume`` nor ``overwrite`` is
            given; there is nothing to resume, or another distillation; or another process is at
            work there.
    """
    folder = named_folder(config.output, config.run, (DISTIL, BLOCKS))
    there, empty = (folder / DISTIL).is_file(), is_empty(folder)
    if config.resume:
        if there:
            check_same(config, folder / DISTIL)
        elif not empty:
            raise ValueError(
                f"nothing to resume: {folder / DISTIL} does not exist; leave out --resume"
            )
    elif folder.is_dir() and any(folder.iterdir()) and not config.overwrite:
        way_on = "--resume goes on with it, " if there or empty else ""
        raise ValueError(
            f"{folder} is not empty; {way_on}--overwrite deletes it, --run NAME writes elsewhere"
        )
    return folder


def is_empty(folder: Path) -> bool:
    """Tell whether a folder holds nothing, or what a distillation leaves that was killed before it
    had noted what it is, and that can begin anew.
    """
    return folder.is_dir() and all(
        path.name == LOCK or is_unfinished(path) for path in folder.iterdir()
    )


def check_same(config: DistilConfig, path: Path) -> None:
    """Raise ValueError where a distillation goes on with options of another student."""
    old, new = asdict(parse(DistilConfig, ["--config", str(path)])), asdict(config)
    for key in BINDING:
        if old[key] != new[key]:
            raise ValueError(
                f"the distillation has {key} {old[key]}, not {new[key]}; resume with the same, or "
                "--overwrite begins anew"
            )
    for letter in STAGES:
        key = "teacher_size"
        if old[letter][key] != new[letter][key] and (path.parent / letter).exists():
            raise ValueError(
                f"stage {letter} has {key} {old[letter][key]}, not {new[letter][key]}; resume with "
                "the same, or --overwrite begins anew"
            )


class Whole:
    """The stages of a distillation, one after another.

    Args:
        config: all of it.
        folder: where its stages have theirs.
        taught: the teacher.
        processes: those that train together.
        stream: where to print.
    """

    def __init__(
        self,
        config: DistilConfig,
        folder: Path,
        taught: Taught,
        processes: Processes,
        stream: TextIO,
    ):
        self.config, self.folder, self.taught = config, folder, taught
        self.processes, self.stream = processes, stream
        self.former: str | None = None
        self.begun: dict[str, str | None] = {}

    def say(self, line: str) -> None:
        """Print a line, on the first process alone."""
        if self.processes.first:
            print(line, file=self.stream, flush=True)

    def run(self) -> Distilled:
        """Do what is left to do."""
        self.processes.on_first(self.begin)
        for line in self.taught.lines:
            self.say(line)
        blocks, checkpoint, line = list(self.config.softmax_blocks), None, ""
        for letter in self.config.stages:
            line = self.stage(letter, blocks, checkpoint)
            checkpoint = self.folder / letter / BEST
            if letter == "a" and self.config.search_softmax_blocks:
                blocks = self.search(self.config.search_softmax_blocks)
        assert checkpoint is not None
        return Distilled(self.folder, checkpoint, line)

    def check_done(self) -> None:
        """Raise ValueError where a stage is done, with other options than those of now or with
        weights that cannot be read, or where its files are none; or another run is at work there.
        """
        for letter in self.config.stages:
            if (self.folder / letter / LOCK).exists():
                with held(self.folder / letter):  # or else what a killed process left goes
                    pass
            for name in NAMES:
                target_of(self.folder / letter / name)
            if self.config.resume and is_done(self.folder / letter):
                load_model(self.folder / letter / BEST)
                data = stage_data(self.config, letter, self.taught.spec)
                check_settled(self.folder / letter, stage_run(self.config, letter, data, {}))

    def begin(self) -> None:
        """Delete what is to be overwritten, and note what is distilled."""
        if self.config.resume:
            self.former, self.begun = text_of(self.folder / DISTIL), self.configurations()
        for path in unfinished(self.folder):  # of a process that was killed while it wrote
            path.unlink(missing_ok=True)
        if self.config.overwrite:
            # First, so that nothing goes on with what is half deleted where this is killed.
            (self.folder / DISTIL).unlink(missing_ok=True)
            for letter in STAGES:
                if (self.folder / letter).is_dir():
                    clear(self.folder / letter)
            (self.folder / BLOCKS).unlink(missing_ok=True)
        kept = asdict(self.config) | {"resume": False, "overwrite": False}
        write_text(self.folder / DISTIL, yaml_text(kept))

    def configurations(self) -> dict[str, str | None]:
        """Return what each stage says that it is; None where it has not begun."""
        return {letter: text_of(self.folder / letter / CONFIG) for letter in STAGES}

    def undo(self) -> None:
        """Take back the note of what is distilled where no stage has begun with it."""
        if self.former is not None and self.configurations() == self.begun:
            write_text(self.folder / DISTIL, self.former)
        elif not any(self.configurations().values()):
            (self.folder / DISTIL).unlink(missing_ok=True)
            for folder in (*(self.folder / letter for letter in STAGES), self.folder):
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()

    def stage(self, letter: str, blocks: list[int], former: Path | None) -> str:
        """Train a stage, or what is left of it, and return a line that says how good it is; empty
        where it was done before.
        """
        own, processes = self.folder / letter, self.processes
        args = student_of(self.config, self.taught.vit, blocks).args
        data = stage_data(self.config, letter, self.taught.spec)
        run = stage_run(self.config, letter, data, args)
        going = processes.on_first(lambda: own.is_dir() and any(own.iterdir()) and can_go_on(own))
        run = replace(run, resume=going, overwrite=False)
        if going and processes.on_first(lambda: is_done(own)):
            self.say(f"stage {letter} is done")
            return ""
        self.say(f"stage {letter}: {WORDS[letter]}")
        again = typed("distil", "--config", str(self.folder / DISTIL), "--resume")
        result = engine.train(
            run,
            stream=self.stream,
            processes=processes,
            prepare=Preparing(self.config, self.taught, blocks, former),
            again=lambda _: again,
        )
        return reached(result)

    def search(self, count: int) -> list[int]:
        """Return the blocks that stay softmax from here on, and write a table of all. A later stage
        that has begun says which they are.
        """
        processes, own = self.processes, self.folder / "a"
        run = processes.on_first(lambda: recorded(own))
        later = [letter for letter in self.config.stages if letter != "a"]
        if later:
            begun = processes.on_first(lambda: recorded_args(self.folder / later[0]))
            if begun is not None:
                return list(begun.get("softmax_blocks") or [])
        device = processes.device(run.device)
        if run.threads:  # also where stage a was done before
            torch.set_num_threads(run.threads)
        student = load_model(own / BEST).to(device)
        teacher = self.taught.model.to(device)
        splits, _ = images_of(run.data, run.seed, self.taught.spec)
        batches = eval_batches(
            splits.validation,
            run.data,
            batch_size=run.eval_batch_size or run.batch_size,
            geometry=geometry_of(splits.spec, patch_size(student)),
        )
        batches.divide(processes.rank, processes.size)
        table = measure_blocks(
            student,
            teacher,
            batches,
            splits.spec,
            device=device,
            amp=run.amp,
            processes=processes,
        )
        chosen = table.worst(count)
        processes.on_first(lambda: write_text(self.folder / BLOCKS, table.csv(chosen)))
        for line in table.lines(chosen):
            self.say(line)
        return chosen


def text_of(path: Path) -> str | None:
    """Return what a file says; None where there is none."""
    return path.read_text(encoding="utf-8") if path.is_file() else None


def recorded(folder: Path) -> TrainConfig:
    """Read what a stage was trained with."""
    return parse(TrainConfig, ["--config", str(folder / CONFIG)])


def recorded_args(folder: Path) -> dict[str, Any] | None:
    """Return the arguments of the student of a stage; None where it has not begun."""
    return recorded(folder).model.args if (folder / CONFIG).is_file() else None


def is_done(folder: Path) -> bool:
    """Tell whether a stage is finished."""
    try:
        status = from_json(dict[str, Any], (folder / STATUS).read_text(), STATUS)
    except (OSError, ValueError):
        return False
    return status.get("status") == "finished" and (folder / BEST).is_file()


def check_settled(folder: Path, run: TrainConfig) -> None:
    """Raise ValueError where a stage that is finished has had other options."""
    was = recorded(folder)
    if run.batch_size == "auto":
        run = replace(run, batch_size=was.batch_size)
    changed = [line.strip() for line in differences(asdict(was), asdict(run))]
    settled = [line for line in changed if line.startswith(SETTLED)]
    if settled:
        raise ValueError(
            f"stage {folder.name} is done, and {settled[0]}; resume with the same, or --overwrite "
            "begins anew"
        )
