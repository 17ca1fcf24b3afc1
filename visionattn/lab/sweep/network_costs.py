"""Measure the memory and the time of each network of a sweep, and estimate both for the trainings
in advance.

Memory is measured in a fresh process, and time in one interleaved run over all networks of an image
size. Weights are untrained and images are random, which does not affect the cost.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from visionattn.cli.exit_codes import Failed, is_out_of_memory
from visionattn.cli.fresh_process import ask
from visionattn.cli.memory import check_fits, clearly_above, memory_there_is
from visionattn.cli.provenance import processor
from visionattn.cli.tables import Record, lasting, sized
from visionattn.lab.measure import attention_backends, interleaved_seconds, peak_bytes, warm_up
from visionattn.lab.model_step import ModelStep
from visionattn.lab.sweep.cell_trainings import MEASUREMENTS, SweepFolder
from visionattn.lab.sweep.head_grid import Network, SweepCell, SweepPlan
from visionattn.lab.sweep.sweep_flags import SweepConfig
from visionattn.model_config import ModelConfig
from visionattn.models.building import build_model
from visionattn.models.devices import pick_device
from visionattn.models.weights import DataSpec
from visionattn.training.config import OptimConfig
from visionattn.training.distributed import Processes
from visionattn.training.trainer import forward_share
from visionattn.training.training_cost import TrainingMemory

PASSES = ("inference", "training")
"""The measured passes of a network."""
NEEDS = ("device", "amp", "batch", "threads")
"""The conditions that a pass depends on, besides its network."""


def conditions_of(config: SweepConfig, plan: SweepPlan) -> Record:
    """Return the conditions of the measurements as columns of ``cells.csv``."""
    base = plan.base
    device = pick_device(base.device)
    return {
        "measure_device": device.type if base.device == "auto" else base.device,
        "measure_amp": base.amp,
        "measure_threads": base.threads,
        "measure_batch": config.measure_batch,
        "measure_rounds": config.measure_rounds,
        "measure_torch": torch.__version__,
        "measure_processor": processor(),
    }


def measure_networks(
    config: SweepConfig,
    plan: SweepPlan,
    folder: SweepFolder,
    provenance: Record,
    say: Callable[[str], None],
    after: Callable[[], object],
) -> None:
    """Measure all networks that have no measurements under the current conditions.

    The memory of each network is measured and recorded first. Then all networks of one image size
    are timed together.

    Args:
        config: the options.
        plan: the sweep.
        folder: the opened folder of the sweep, for the measurements.
        provenance: provenance of this call.
        say: gets a line at each start.
        after: called after the networks of each image size.
    """
    conditions, known = conditions_of(config, plan), folder.known(MEASUREMENTS)
    origin = {f"measure_{key}": provenance[key] for key in ("commit", "load")}
    for size, group in groupby(plan.networks, key=lambda network: network.img_size):
        found = {network: known.get(network.name, {}) for network in group}
        unknown = [each for each in found if not is_current(found[each], conditions, config)]
        if not unknown and all("measured" in columns for columns in found.values()):
            continue
        for network in unknown:
            say(f"{network.name}: memory")
            found[network] = conditions | origin
            for work in PASSES:
                columns = ask_status(measure_memory, pass_of(plan, network, work, conditions))
                found[network] |= {f"{work}_{key}": value for key, value in columns.items()}
            folder.keep(MEASUREMENTS, network.name, found[network])
        for work in PASSES:
            say(f"{size} px, {work}: time of {len(found)} networks")
            time_networks(plan, found, work, conditions)
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        for network, columns in found.items():
            folder.keep(MEASUREMENTS, network.name, columns | origin | {"measured": now})
        after()


def is_current(columns: Record, conditions: Record, config: SweepConfig) -> bool:
    """Tell whether a network has measurements under these conditions that need no retry."""
    failed = config.retry and "failed" in [columns.get(f"{work}_status") for work in PASSES]
    return conditions.items() <= columns.items() and not failed


def pass_of(plan: SweepPlan, network: Network, work: str, conditions: Record) -> Record:
    """Return the arguments of ``make_step`` for a pass of a network."""
    given = {"model": asdict(plan.model(network)), "spec": asdict(plan.data_spec(network))}
    given |= {"optim": asdict(plan.base.optim), "work": work}
    return given | {key: conditions[f"measure_{key}"] for key in NEEDS}


def ask_status(function: Callable[..., Record], given: Record, **how: Any) -> Record:
    """Run a measurement in a fresh process, and return its columns with status and reason."""
    try:
        return {"status": "ok", "reason": None} | ask(function, given, "the pass", **how)
    except torch.OutOfMemoryError:
        return {"status": "oom", "reason": "out of memory"}
    except Failed as error:
        return {"status": "failed", "reason": str(error)}


def time_networks(
    plan: SweepPlan, found: dict[Network, Record], work: str, conditions: Record
) -> None:
    """Time a pass of all networks in one interleaved run, in a fresh process.

    Add the images per second, and the ratio to the direct form, to the columns of the networks.
    Networks that do not fit into memory are skipped.
    """
    timed = [network for network in found if found[network][f"{work}_status"] == "ok"]
    passes = [pass_of(plan, network, work, conditions) for network in timed]
    given = {"passes": passes, "rounds": conditions["measure_rounds"]}
    answer = ask_status(measure_seconds, given, returning=False) if timed else {"seconds": []}
    seconds = dict(zip(timed, answer.get("seconds") or [None] * len(timed), strict=True))
    for network, samples in seconds.items():
        columns: Record = {"images_per_second": None, "times_direct": None}
        direct = seconds.get(replace(network, form="direct"))
        if samples:
            columns["images_per_second"] = conditions["measure_batch"] / statistics.median(samples)
        elif answer["status"] == "failed":
            columns |= {"status": "failed", "reason": answer["reason"]}
        else:
            reason = "out of memory together with the other networks; pass fewer --heads"
            columns |= {"status": "oom", "reason": reason}
        if samples and direct:
            # Ratios within a round, in which temporary slowdowns of the machine cancel out.
            ratios = [slow / fast for fast, slow in zip(samples, direct, strict=True)]
            columns["times_direct"] = statistics.median(ratios)
        found[network] |= {f"{work}_{key}": value for key, value in columns.items()}


def measure_seconds(passes: Sequence[Record], rounds: int) -> Record:
    """Measure the seconds of passes in one interleaved run, by pass and round. None for a pass that
    does not fit into memory together with the earlier ones.
    """
    works, warm, device = {}, [], passes[0]["device"]
    for number, given in enumerate(passes):
        try:
            step = make_step(**given)
            warm.append(warm_up(step.run, device=device))
            works[number] = step.run
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
    timing = dict(rounds=rounds, max_rounds=rounds, device=device)
    samples = interleaved_seconds(list(works.values()), warm, **timing) if works else []
    seconds = dict(zip(works, samples, strict=True))
    return {"seconds": [seconds.get(number) for number in range(len(passes))]}


def make_step(
    model: Record,
    spec: Record,
    optim: Record,
    device: str,
    amp: str,
    batch: int,
    threads: int | None,
    work: str,
) -> ModelStep:
    """Build a network and its pass from plain values, with weights and images in memory."""
    torch.manual_seed(0)
    torch.set_num_threads(threads or torch.get_num_threads())
    training, where, data = work == "training", torch.device(device), DataSpec(**spec)
    built = build_model(ModelConfig(**model), data)[0].to(where)
    how = dict(backward=training, update=training, optim=OptimConfig(**optim))
    step = ModelStep(built, where, amp, **how)
    channels = 1 if data.encoding else data.in_chans
    images = torch.randint(256, (batch, channels, data.img_size, data.img_size), dtype=torch.uint8)
    step.place(data.prepare(images.to(where)))
    return step


def measure_memory(**given: Any) -> Record:
    """Measure the peak memory of a pass above the level with weights, optimizer and images, and
    find the attention implementation that ran.
    """
    step = make_step(**given)
    step.run()  # allocates the optimizer's state and the buffers of libraries
    peak = peak_bytes(step.run, given["device"])
    return {"peak_bytes": peak, "backend": " + ".join(attention_backends(step.run)) or None}


def expect(plan: SweepPlan, network: Network) -> tuple[float | None, float | None]:
    """Estimate the bytes and the seconds of a training as ``visionattn train`` does, without data
    loading. None for unknown values.
    """
    config = plan.training(SweepCell(network, plan.seeds[0]), Path())
    device, spec = pick_device(config.device), plan.data_spec(network)
    model = build_model(config.model, spec)[0].to(device)
    splits = replace(plan.splits, spec=spec)
    memory = TrainingMemory(config, model, splits, device, Processes())
    batch = 1 if config.batch_size == "auto" else config.batch_size
    shape = (batch, network.img_size, network.img_size)
    seconds = memory.passes.forward_seconds(shape, memory.patch_px)
    if seconds is not None:
        share = forward_share(model, config.model.grad_checkpointing)
        seconds *= config.epochs * (len(splits.train) / share + len(splits.validation))
    return memory.bytes_of(shape), seconds


def tell_expected(
    plan: SweepPlan, cells: Sequence[SweepCell], jobs: int, say: Callable[[str], None]
) -> None:
    """Print the expected memory and time of the trainings.

    Raises:
        DoesNotFit: the parallel trainings do not fit into memory; one line. A training that does
            not fit even when it runs by itself ends with an error, which its row states.
    """
    known = {network: expect(plan, network) for network in {cell.network: cell for cell in cells}}
    seconds = sum(known[cell.network][1] or 0 for cell in cells)
    there, at_once = memory_there_is(pick_device(plan.base.device)), min(jobs, len(cells))
    needed = [each for each, _ in known.values() if each is not None]
    largest = max((each for each in needed if not clearly_above(each, there)), default=None)
    memory = "peak memory: unknown"
    if largest is not None:
        fit = f"--jobs {int((there or 0) // largest) or 1} would fit"
        check_fits(at_once * largest, there, f"{at_once} parallel trainings", lambda: fit)
        memory = f"peak memory: up to {sized(largest)} for each of {at_once} parallel trainings"
        memory += f", {sized(there)} available" if there else ""
    say(f"{len(cells)} trainings: {memory}; estimated time: {lasting(seconds)} in total")
