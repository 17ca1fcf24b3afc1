"""Run a distillation: all checks first, then one training for each stage.

Each stage is a run of ``engine.train`` in its own folder, with states, metrics and weights like any
run. It starts from the best weights of the previous stage. ``distil.yaml`` in the parent folder is
the configuration of the distillation.
"""

import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
from typing_extensions import TypedDict

from visionattn.cli.commands import typed
from visionattn.cli.files import unfinished, write_text
from visionattn.cli.parsing import parse, yaml_text
from visionattn.cli.untrusted import checked, intact, read_csv
from visionattn.data.geometry import geometry_of
from visionattn.data.splits import check_root, eval_batches
from visionattn.models.building import patch_size
from visionattn.models.conversion import student_of
from visionattn.models.weights import load_model
from visionattn.training import engine
from visionattn.training.checkpoint import differences
from visionattn.training.config import parse_train
from visionattn.training.distil.distil_config import (
    STAGES,
    DistilConfig,
    check_distil,
    stage_data,
    stage_run,
)
from visionattn.training.distil.imitation import block_losses
from visionattn.training.distil.student import (
    Taught,
    check_student,
    images_of,
    open_taught,
    prepare_student,
)
from visionattn.training.distributed import Processes
from visionattn.training.run_folder import (
    BEST,
    CONFIG,
    LOCK,
    can_go_on,
    clear,
    held,
    named_folder,
    read_status,
)
from visionattn.training.run_progress import reached

DISTIL = "distil.yaml"
"""The configuration of a distillation, in its folder."""
BLOCKS = "blocks.csv"
"""The loss of each block after stage a, with ``search_softmax_blocks``."""
BINDING = ("teacher", "pretrained", "model", "args", "attention", "softmax_blocks")
BINDING += ("search_softmax_blocks", "num_heads", "options", "init_from", "seed")
"""Options that must not change on resume, because they define the student."""
SETTLED = ("batch_size", "optim.", "data.")
"""Prefixes of options that must not change once a stage is done."""
WORDS = {
    "a": "each block imitates the teacher's attention, on the teacher's inputs",
    "b": "the whole network imitates the teacher's final features",
    "c": "the whole network imitates the teacher's final features, at another image size",
}
"""The stages in words."""


@dataclass(frozen=True)
class Distilled:
    """The result of a distillation."""

    folder: Path
    """Its folder."""
    checkpoint: Path
    """The best weights of the last stage."""
    line: str
    """Their validation score in words; empty if the stage was already done."""

    def report(self) -> list[str]:
        """Return the final lines: the weights, the next commands, and the quality of weights."""
        best = str(self.checkpoint)
        lines = [
            f"best weights: {best}",
            "to evaluate on images with the teacher's classes:",
            f"  {typed('validate', '--checkpoint', best)}",
            "on other images:",
            f"  {typed('features', '--checkpoint', best, '--images', 'FOLDER')}",
        ]
        return [*lines, self.line] if self.line else lines


def distil(
    config: DistilConfig, *, stream: TextIO | None = None, processes: Processes | None = None
) -> Distilled:
    """Run a distillation. Nothing is written before teacher, student and sizes are checked.

    Args:
        config: the distillation; ``config.run`` names its folder.
        stream: where to print; None: standard output.
        processes: the result of ``distributed.joined()`` under ``torchrun``.

    Raises:
        ValueError, FileNotFoundError: wrong configuration, teacher or data; one line.
        OSError: a file cannot be read or written.
        NonFinite, OutOfMemory, Failed, Stopped: as ``engine.train`` raises them.
    """
    processes = processes or Processes()
    processes.together(lambda: check_distil(config))
    processes.set_timeout(config.dist_timeout)
    processes.on_first(lambda: check_root(config.data))
    folder = processes.on_first(lambda: distil_folder(config))
    taught = processes.together(lambda: checked_teacher(config))
    if processes.first:
        folder.mkdir(parents=True, exist_ok=True)
    with held(folder) if processes.first else nullcontext():
        processes.on_first(lambda: begin(config, folder))
        return Whole(config, folder, taught, processes, stream or sys.stdout).run()


def distil_folder(config: DistilConfig) -> Path:
    """Return the folder of a distillation after checking that it may be used; write nothing.

    Raises:
        ValueError: unusable name; the folder is not empty and neither ``resume`` nor ``overwrite``
            is given; nothing or another distillation to resume; or another process uses it.
    """
    folder = named_folder(config.output, config.run, (DISTIL, BLOCKS))
    # A distillation killed before it wrote its configuration leaves only these files.
    passing = {*unfinished(folder), folder / LOCK}
    filled = folder.is_dir() and not passing.issuperset(folder.iterdir())
    if (folder / DISTIL).is_file() and config.resume:
        check_same(config, folder)
    elif config.resume and (filled or not folder.is_dir()):
        raise ValueError(f"nothing to resume: {folder / DISTIL} does not exist; remove --resume")
    elif filled and not (config.resume or config.overwrite):
        way_on = "--resume continues it, " if (folder / DISTIL).is_file() else ""
        raise ValueError(
            f"{folder} is not empty; {way_on}--overwrite deletes it, --run NAME writes to another "
            "folder"
        )
    return folder


def check_same(config: DistilConfig, folder: Path) -> None:
    """Raise ValueError if a distillation resumes with another student, or with other options for
    finished stages.
    """
    done = [letter for letter in STAGES if is_done(folder / letter)]
    begun = [letter for letter in STAGES if (folder / letter).exists()]
    fixed = [*BINDING, *(f"{letter}.teacher_size" for letter in begun)]
    if done:
        fixed += [*SETTLED, *(f"{letter}." for letter in done)]
    old = parse(DistilConfig, ["--config", str(folder / DISTIL)])
    for line in differences(asdict(old), asdict(config)):
        if line.strip().startswith(tuple(fixed)):
            raise ValueError(
                f"{folder} has another distillation: {line.strip()}; resume with the same options, "
                "or pass --overwrite to start over"
            )


def checked_teacher(config: DistilConfig) -> Taught:
    """Open the teacher, and check that the student can be made of it and fits the images.

    Raises:
        ValueError, FileNotFoundError: wrong teacher, student or images; one line.
    """
    taught = open_taught(config)
    check_student(config, taught)
    images_of(stage_data(config, config.stages[0], taught.spec), config.seed, taught.spec)
    return taught


def begin(config: DistilConfig, folder: Path) -> None:
    """Delete the files to overwrite, and write the configuration."""
    for path in unfinished(folder):
        path.unlink(missing_ok=True)
    if config.overwrite:
        # The configuration first, so that a half-deleted distillation cannot be resumed.
        (folder / DISTIL).unlink(missing_ok=True)
        for letter in STAGES:
            if (folder / letter).is_dir():
                clear(folder / letter)
        (folder / BLOCKS).unlink(missing_ok=True)
    kept = asdict(config) | {"resume": False, "overwrite": False}
    write_text(folder / DISTIL, yaml_text(kept))


class Whole:
    """The stages of a distillation, in order.

    Args:
        config: the distillation.
        folder: the parent of the stages' folders.
        taught: the teacher.
        processes: the processes that train together.
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

    def say(self, line: str) -> None:
        """Print a line, on the first process only."""
        if self.processes.first:
            print(line, file=self.stream, flush=True)

    def run(self) -> Distilled:
        """Run the remaining stages."""
        for line in self.taught.lines:
            self.say(line)
        blocks, line = list(self.config.softmax_blocks), ""
        checkpoint = Path(self.config.init_from) if self.config.init_from else None
        for letter in self.config.stages:
            line = self.stage(letter, blocks, checkpoint)
            checkpoint = self.folder / letter / BEST
            if letter == "a" and self.config.search_softmax_blocks:
                blocks = self.search(self.config.search_softmax_blocks)
        assert checkpoint is not None
        return Distilled(self.folder, checkpoint, line)

    def stage(self, letter: str, blocks: list[int], former: Path | None) -> str:
        """Train a stage, or its remaining epochs, and return a line with its score; empty if it was
        already done.
        """
        own, processes = self.folder / letter, self.processes
        going = processes.on_first(lambda: own.is_dir() and any(own.iterdir()) and can_go_on(own))
        if going and processes.on_first(lambda: is_done(own)):
            self.say(f"stage {letter} is done")
            return ""
        self.say(f"stage {letter}: {WORDS[letter]}")
        if letter == "a":
            processes.on_first(lambda: (self.folder / BLOCKS).unlink(missing_ok=True))
        args = student_of(self.config, self.taught.vit, blocks).args
        data = stage_data(self.config, letter, self.taught.spec)
        run = stage_run(self.config, letter, data, args)
        again = typed("distil", "--config", str(self.folder / DISTIL), "--resume")
        result = engine.train(
            replace(run, resume=going, overwrite=False),
            stream=self.stream,
            processes=processes,
            prepare=partial(prepare_student, self.config, self.taught, blocks, former),
            again=lambda _: again,
        )
        return reached(result)

    def search(self, count: int) -> list[int]:
        """Return the blocks with the largest loss after stage a, which stay softmax, and write the
        losses of all blocks.

        In stage a each block imitates the teacher on the teacher's own inputs, so its loss does not
        depend on the other blocks.
        """
        processes, table = self.processes, self.folder / BLOCKS
        if processes.on_first(table.is_file):
            return processes.on_first(lambda: read_blocks(table))
        run = parse_train(["--config", str(self.folder / "a" / CONFIG)])
        device = processes.device(run.device)
        if run.threads:  # stage a, which sets them, may have been done before
            torch.set_num_threads(run.threads)
        student = load_model(self.folder / "a" / BEST).to(device)
        splits, _ = images_of(run.data, run.seed, self.taught.spec)
        batches = eval_batches(
            splits.validation,
            run.data,
            batch_size=run.batch_size,
            geometry=geometry_of(splits.spec, patch_size(student)),
        )
        batches.divide(processes.rank, processes.size)
        teacher = self.taught.model.to(device)
        losses = block_losses(student, teacher, batches, splits.spec, run.amp, processes)
        # Among equal losses the first block wins.
        chosen = sorted(sorted(range(len(losses)), key=lambda i: (-losses[i], i))[:count])
        rows = [f"{i},{loss},{int(i in chosen)}\n" for i, loss in enumerate(losses)]
        text = "".join(["block,loss,softmax\n", *rows])
        processes.on_first(lambda: write_text(table, text))
        self.say("attention loss of each block after stage a:")
        for i, loss in enumerate(losses):
            self.say(f"  block {i:>3}  loss {loss:.4f}{'  stays softmax' * (i in chosen)}")
        return chosen


class BlockRow(TypedDict):
    """A row of ``BLOCKS``."""

    block: int
    softmax: int


def read_blocks(path: Path) -> list[int]:
    """Return the blocks that stay softmax.

    Raises:
        ValueError: the file is damaged; one line.
    """
    with intact(path, "delete it to search again"):
        rows = checked(list[BlockRow], read_csv(path)[1], path.name)
    return [row["block"] for row in rows if row["softmax"]]


def is_done(folder: Path) -> bool:
    """Tell whether a stage is finished."""
    return read_status(folder).get("status") == "finished" and (folder / BEST).is_file()
