"""Run a training: all checks, training with a validation after each epoch, and the test of the best
weights.

``train`` has the order of a run and its possible ends; ``trainer.py`` has the loop over epochs and
steps.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from timm.utils import random_seed
from torch import nn

from visionattn.cli.exit_codes import (
    DoesNotFit,
    Failed,
    OutOfMemory,
    Stopped,
    in_one_line,
    is_out_of_memory,
    tell,
)
from visionattn.cli.files import check_free, first_line, write_whole
from visionattn.cli.interruption import GRACE, Interrupted, Interruption
from visionattn.cli.provenance import provenance
from visionattn.data.batches import seed_batch
from visionattn.data.geometry import geometry_of
from visionattn.data.kept_features import PatchSamples
from visionattn.data.mask_files import check_mask_sizes, check_trained
from visionattn.data.splits import (
    Splits,
    build_splits,
    check_root,
    geometry_choices,
    training_geometry,
)
from visionattn.model_config import VECTOR_TASKS, ModelConfig
from visionattn.models.building import check_geometries, patch_size
from visionattn.models.conversion import NAME as CONVERTED
from visionattn.models.cost import Expected
from visionattn.training.checkpoint import States, recall_best, started_model
from visionattn.training.config import TrainConfig, check
from visionattn.training.distributed import (
    Processes,
    check_model,
    choose_kind,
    place_of,
    ranks_per_image,
)
from visionattn.training.fold_summary import summarise_folds
from visionattn.training.freezing import freeze
from visionattn.training.head_training import HeadFiles, PatchClasses, prepare_maps
from visionattn.training.label_statistics import with_class_weights, with_targets
from visionattn.training.objectives import Objective
from visionattn.training.optimize import mix_batch
from visionattn.training.picture_sheet import (
    SheetPart,
    draw_sheet,
    first_of,
    sheet_part,
    training_changes,
    truth_of,
)
from visionattn.training.run_folder import (
    BEST,
    LAST,
    Record,
    Status,
    clear,
    how_to_resume,
    run_folder,
)
from visionattn.training.run_progress import Result
from visionattn.training.trainer import Trainer
from visionattn.training.training_cost import TrainingMemory, check_memory, forecast, with_batch


@dataclass(frozen=True)
class Prepared:
    """A model to train, with its images."""

    splits: Splits
    model: nn.Module
    built: ModelConfig
    """The configuration of the model: ``converted_vit`` with all arguments for the body of a
    teacher.
    """
    args: dict[str, Any]
    """The arguments that rebuild the model, without ``num_classes`` and ``in_chans``."""
    lines: list[str]
    """Lines about its weights, to print."""
    objective: Objective | None = None
    """The training objective; None: set by the task of the data."""
    files: HeadFiles | None = None
    """Writes and reads the best weights; None: as the model is."""


def prepare_classes(
    config: TrainConfig, device: torch.device, *, resumed: bool, first: bool
) -> Prepared:
    """Build the model of ``visionattn train``, and open its images.

    Args:
        config: the run.
        device: device of the training.
        resumed: the model will get the weights of a state.
        first: this process gives the others its weights.

    Raises:
        ValueError, FileNotFoundError: wrong data, model or weights; one line.
    """
    of_maps = config.data.features is not None
    data = replace(config.data, features=None, crops=1) if of_maps else config.data
    splits = with_targets(build_splits(data, config.seed))
    if splits.spec.num_classes == 1 and splits.spec.task not in VECTOR_TASKS:
        raise ValueError(
            f"expected at least two classes, got only {''.join(splits.spec.class_names) or 0} "
            f"({config.data.root or config.data.name})"
        )
    check_trained(splits)
    if config.data.on_error == "fail":
        for dataset in (splits.train, splits.validation, splits.test):
            check_mask_sizes(dataset)
    if of_maps:
        splits, model, built, files, lines = prepare_maps(
            config.data, config.model, splits, config.seed
        )
        return Prepared(splits, model, built, built.args, lines, files=files)
    started = replace(config, init_from=None) if resumed else config
    return Prepared(splits, *started_model(started, config.model, splits.spec, first=first))


Prepare = Callable[..., Prepared]
"""A function with the arguments of ``prepare_classes``; distillation has its own."""


def train(
    config: TrainConfig,
    *,
    stream: TextIO | None = None,
    processes: Processes | None = None,
    prepare: Prepare = prepare_classes,
    again: Callable[[TrainConfig], str] = how_to_resume,
) -> Result:
    """Run a training. Nothing is written before data, model, sizes and initial weights are checked.

    Args:
        config: the run; ``config.run`` names its folder.
        stream: where to print; None: standard output.
        processes: the result of ``distributed.joined()`` under ``torchrun``; the first one prints
            and writes.
        prepare: builds the model, opens its images and sets its objective.
        again: returns the command that resumes the run.

    Raises:
        ValueError, FileNotFoundError: wrong configuration, data or checkpoint; one line.
        OSError: a file or a folder cannot be read or written.
        NonFinite: the loss or the gradient was not finite for several steps in a row.
        OutOfMemory: a step or an evaluation ran out of memory.
        Failed: a data loader process or another training process ended.
        Stopped: Ctrl-C or SIGTERM; the state is saved.
    """
    processes = processes or Processes()
    # Checks, the cheapest first and the reading of data last; each raises on all processes or none.
    processes.together(lambda: check(config))
    processes.set_timeout(config.dist_timeout)
    if config.show_batch is not None:
        raise ValueError(
            "show_batch does not train; use `visionattn train --show-batch`, or "
            "visionattn.training.engine.show_batch(config)"
        )
    processes.together(lambda: choose_kind(config, processes.size))
    processes.per_image = ranks_per_image(config, processes.size)
    processes.on_first(lambda: check_root(config.data))
    folder = processes.on_first(lambda: run_folder(config))
    states = States(folder)
    resumed = processes.on_first(lambda: config.resume and states.exist())
    if config.data.args.get("download"):  # once per machine, while the others wait
        processes.together(
            lambda: processes.local_rank == 0 and build_splits(config.data, config.seed)
        )
    device = processes.together(lambda: processes.device(config.device))
    about = provenance(device, threads=config.threads) | {"processes": processes.size}
    status = Status(folder, about, writes=processes.first)
    # Nothing has been written so far; this run may delete a folder only if it creates it.
    fresh = not folder.exists()
    with setting_up(status, processes, replaces=not (fresh or resumed)):
        trainer, memory, lines = build(
            config, states, resumed, processes, device, stream or sys.stdout, prepare
        )
        if resumed:
            lines = go_on(trainer, states)
        elif config.resume:
            lines.insert(0, "no state was saved yet; starting from the beginning")
    if processes.first and not (fresh or resumed):
        clear(folder)
    try:
        with status:
            status.result = run(trainer, states, status, memory, lines, stream, again)
        if config.data.fold and processes.first:
            lines = summarise_folds(folder, config, status.result.measure)
            print("\n".join(lines), file=stream or sys.stdout, flush=True)
        return status.result
    except (ValueError, FileNotFoundError):
        # Bad input found before the first step leaves no files.
        if processes.first and not trainer.position.step and not states.exist():
            clear(folder)
            if fresh:
                folder.rmdir()
        raise


def show_batch(config: TrainConfig) -> str:
    """Draw the first batches of a run to the file ``config.show_batch``, and return its summary
    line. The batches are made as in a run, but no file of a run is written.

    Raises:
        ValueError, FileNotFoundError: wrong configuration, data or file. One line; nothing is
            written.
        OSError: the file cannot be written.
    """
    check(config)
    check_root(config.data)
    path = Path(config.show_batch or "")
    check_free(path, config.overwrite)
    parts = first_batches(config)
    sheet = draw_sheet(parts)
    write_whole(path, lambda place: sheet.save(place, format="PNG"))
    masked = config.data.task == "segmentation"
    what = " and ".join(f"{len(part.pictures) // (1 + masked)} {part.title}" for part in parts)
    seen = "images with their masks" if masked else "images"
    return f"{path}: {what} {seen} as the model sees them; nothing was trained"


def first_batches(config: TrainConfig) -> list[SheetPart]:
    """Return the first pictures of training, augmented and mixed as configured, and of validation.

    Raises:
        ValueError, FileNotFoundError: the configuration or the data are wrong.
    """
    data = config.data
    # Images do not depend on the number of loader processes, except in a stream.
    if not (data.root or "").startswith("wds/"):
        data = replace(data, workers=0)
    config = replace(config, data=data, parallel=None)
    trainer, *_ = build(config, None, False, Processes(), torch.device("cpu"))
    training = []
    for number, batch, names in first_of(trainer.batches, "training"):
        images, classes = batch.images, truth_of(trainer.spec, batch)
        if trainer.mix is not None:
            seed_batch(config.seed, 0, number)
            # Values are prepared linearly, so mixing them before gives the mixed input.
            images = images / 255 if images.dtype == torch.uint8 else images.clone()
            images, classes = mix_batch(trainer.mix, images, batch.labels)
        training.append((images, classes, batch.sizes, names))
    validation = [
        (batch.images, truth_of(trainer.spec, batch), batch.sizes, names)
        for _, batch, names in first_of(trainer.validation, "validation")
    ]
    seen, whole = training_geometry(trainer.spec, data), trainer.geometry
    of = trainer.model, trainer.splits
    return [
        sheet_part("training", *of, training, seen, changes=training_changes(config)),
        sheet_part("validation", *of, validation, whole, changes="not augmented"),
    ]


@contextmanager
def setting_up(status: Status, processes: Processes, *, replaces: bool) -> Iterator[None]:
    """Write a status if the run ends before the first step for lack of memory; bad input leaves no
    files.

    Args:
        status: the run's status.
        processes: the processes of the run.
        replaces: this run overwrites an earlier run in the folder.
    """
    try:
        with processes.guard():
            try:
                yield
            except DoesNotFit:
                raise
            except (RuntimeError, MemoryError, OutOfMemory) as error:
                if not (isinstance(error, OutOfMemory) or is_out_of_memory(error)):
                    raise
                raise OutOfMemory(
                    f"out of memory before the first step{place_of(error)}; use a smaller model, "
                    "or remove optim.ema_decay"
                ) from error
    except (OutOfMemory, Failed) as error:
        if processes.first:
            status.folder.mkdir(parents=True, exist_ok=True)
            if replaces:
                clear(status.folder)
            status.end(error)
        raise


def build(
    config: TrainConfig,
    states: States,
    resumed: bool,
    processes: Processes,
    device: torch.device,
    stream: TextIO | None = None,
    prepare: Prepare = prepare_classes,
) -> tuple[Trainer, Expected, list[str]]:
    """Check data, model, sizes and memory; return the trainer, its expected memory, and lines about
    its batches and initial weights.
    """
    if resumed:
        config = replace(config, model=processes.on_first(lambda: states.started_as(config)))

    def prepared() -> Prepared:
        if config.threads:
            torch.set_num_threads(config.threads)
        random_seed(config.seed % 2**32)  # numpy takes 32 bits
        made = prepare(config, device, resumed=resumed, first=processes.first)
        kind = choose_kind(replace(config, batch_size="auto"), processes.size)
        check_model(made.model, made.built.name, processes.size, kind)
        patch_px, spec = patch_size(made.model), made.splits.spec
        geometries = geometry_choices(spec, config.data, patch_px)
        check_geometries(made.model, [geometry_of(spec, patch_px), *geometries])
        if config.freeze is not None:
            freeze(made.model, config.freeze)
        return replace(made, model=made.model.to(device))

    with warnings.catch_warnings():
        if not processes.first:  # all processes give the same warnings
            warnings.simplefilter("ignore", UserWarning)
        made = processes.together(prepared)
    splits, model = made.splits, made.model
    if processes.size > 1:
        processes.check_same(splits.lists())
    loss = processes.on_first(lambda: with_class_weights(config.loss, splits))
    config = replace(config, loss=loss)
    if isinstance(splits.train, PatchSamples):
        made = replace(made, objective=PatchClasses(config.optim, loss, splits.spec))
    # config.yaml and states record the body of a teacher, and the model of features.
    if made.built.name == CONVERTED or made.files is not None:
        config = replace(config, model=made.built)
    if made.files is not None:  # feature maps are read without preprocessing
        config = replace(config, data=replace(config.data, workers=0))
    if processes.first and stream:  # reading sizes and estimating memory may take long
        counts = f"{len(splits.train)} training and {len(splits.validation)} validation images"
        print(f"{config.run}: {counts}; reading image sizes", file=stream, flush=True)
    memory = TrainingMemory(config, model, splits, device, processes, made.objective)
    if resumed and config.batch_size == "auto":
        config = replace(config, **processes.on_first(lambda: states.batches(config)))
    config, lines = with_batch(config, splits, memory)
    trainer = Trainer(
        config, splits, model, made.args, device, states, processes, made.objective, made.files
    )
    processes.together(trainer.check_rows)
    return trainer, check_memory(trainer, memory), [*lines, *made.lines]


def go_on(trainer: Trainer, states: States) -> list[str]:
    """Restore the newest readable state, and return lines about it."""
    processes, name = trainer.processes, trainer.config.model.name
    state, lines = processes.on_first(lambda: states.load(trainer.model, name))
    states.step = state["position"]["step"]
    lines += trainer.restore(state)
    recalled, trainer.position = processes.on_first(
        lambda: (recall_best(trainer.position, states.folder / BEST), trainer.position)
    )
    return lines + recalled


def run(
    trainer: Trainer,
    states: States,
    status: Status,
    memory: Expected,
    lines: list[str],
    stream: TextIO | None,
    again: Callable[[TrainConfig], str],
) -> Result:
    """Train and test, and record the run; the error of an early end names the saved state."""
    position, processes = trainer.position, trainer.processes

    def give_up() -> int:
        """Report, from another thread, that the current operation takes too long."""
        kept, command = states.kept(), again(trainer.config)
        ended = Stopped(f"stopped amid an operation of over {GRACE:.0f} s; {kept}: {command}")
        status.end(ended)
        return tell(ended)

    with (
        Interruption(give_up if processes.size == 1 else None) as interruption,
        processes.guard(),
        early_ends(trainer, states),
        Record(
            states.folder,
            trainer.config,
            step=position.step,
            history=trainer.history,
            stream=stream,
            writes=processes.first,
        ) as record,
    ):
        for line in [*trainer.describe(), *lines]:
            record.say(line)
        if not trainer.done and (expected := forecast(trainer, memory)):
            record.say(expected)
        trainer.warm_up()
        try:
            trainer.fit(record, interruption)
            return trainer.finish(record, interruption)
        except Interrupted as error:
            trainer.save(record)
            where = f"stopped after step {position.step} ({trainer.where()})"
            raise Stopped(f"{where}; the state is in {states.folder / LAST}") from error
        except ValueError as error:  # e.g. an image that cannot be read
            if not position.step:
                raise
            if not processes.agreed(error):  # the other processes are elsewhere
                raise ValueError(f"{error}; {states.kept()}") from error
            trainer.save(record)
            raise processes.agree(ValueError(f"{error}; {states.kept()}")) from error


@contextmanager
def early_ends(trainer: Trainer, states: States) -> Iterator[None]:
    """Add the saved state and a remedy to the error if the disk is full, memory runs out, or a data
    loader process has ended.
    """
    try:
        yield
    except OSError as error:
        raise OSError(f"{in_one_line(error)}; {states.kept()}") from error
    except (RuntimeError, MemoryError, OutOfMemory) as error:
        if isinstance(error, OutOfMemory) or is_out_of_memory(error):
            images, _, height, width = trainer.input_shape
            raise OutOfMemory(
                f"out of memory at batches of {images} images of {height} x {width} "
                f"pixels{place_of(error)}; use a smaller batch_size with a larger "
                "optim.accumulate, or gradient checkpointing (model.grad_checkpointing); "
                f"{states.kept()}"
            ) from error
        if "DataLoader worker" in str(error):
            said = first_line(error).removesuffix(place_of(error))
            raise Failed(
                f"a data loader process died{place_of(error)}: {said}; {states.kept()}"
            ) from error
        raise
