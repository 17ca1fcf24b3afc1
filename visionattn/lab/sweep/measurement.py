"""What each network costs: memory and backend in a fresh process each, time of all networks of one
image size in turns.

This module owns which measurements are still to be made. The measuring itself is in ``meter.py``,
in other processes.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import torch

from visionattn.cli.ends import Failed
from visionattn.cli.fresh_process import Forks, ask
from visionattn.cli.provenance import processor
from visionattn.lab.sweep import meter
from visionattn.lab.sweep.config import SweepConfig
from visionattn.lab.sweep.folder import SweepFolder
from visionattn.lab.sweep.grid import Network, Plan
from visionattn.models.machine import pick_device

PASSES = ("inference", "training")
LOG = "measurements.log"
Told = dict[str, Any]


@dataclass(frozen=True)
class Meter:
    """Asks for measurements in fresh processes.

    Args:
        plan: the sweep.
        conditions: device, precision, threads, batch and rounds; measurements under others are made
            again.
        run: runs the processes.
    """

    plan: Plan
    conditions: Told
    run: Forks

    def ask(self, function: Callable[[Told], Told], name: str, networks: Sequence[Network]) -> Told:
        """Return the answer of ``meter.py`` for a pass, with ``status`` "ok", "oom" or "failed" and
        a ``reason``, which is None for the first one.
        """
        told = self.conditions | {"pass": name, "spec": asdict(self.plan.spec)}
        told["optim"] = asdict(self.plan.base.optim)
        told["networks"] = [self._describe(network) for network in networks]
        try:
            return {"status": "ok", "reason": None} | ask(function, {"told": told}, name, self.run)
        except torch.OutOfMemoryError:
            return {"status": "oom", "reason": "out of memory"}
        except Failed as error:
            if self.run.ended:
                raise
            return {"status": "failed", "reason": str(error)}

    def _describe(self, network: Network) -> Told:
        return {
            "name": network.name,
            "model": asdict(self.plan.model(network)),
            "img_size": network.img_size,
        }


def conditions_of(config: SweepConfig, plan: Plan) -> Told:
    """Return what measurements depend on besides the network."""
    base = plan.base
    device = pick_device(base.device)
    return {
        "device": device.type if base.device == "auto" else base.device,
        "amp": base.amp,
        "compile": base.compile,
        "threads": base.threads,
        "batch": config.measure_batch,
        "rounds": config.measure_rounds,
        "torch": torch.__version__,
        "processor": processor(),
    }


def measure_networks(
    config: SweepConfig,
    plan: Plan,
    folder: SweepFolder,
    provenance: Told,
    say: Callable[[str], None],
    after: Callable[[], None] = lambda: None,
) -> None:
    """Measure what is not measured yet under the present conditions; all networks of one image size
    are timed together.

    Args:
        config: the options.
        plan: the sweep.
        folder: of the sweep, open; takes what is measured.
        provenance: of this call; kept with what it measures.
        say: takes a line at each start.
        after: called after the networks of each image size.
    """
    conditions = conditions_of(config, plan)
    for _, group in groupby(plan.grid.networks, key=lambda network: network.img_size):
        found: dict[Network, Told | None] = {}
        for network in group:
            known = folder.measurement(network)
            stale = known is None or known["conditions"] != conditions
            failed = known is not None and any(known[name]["status"] == "failed" for name in PASSES)
            found[network] = (
                None if stale or config.remeasure or (failed and config.retry) else known
            )
        if all(known and known["timed"] for known in found.values()):
            continue
        kept = dict(pass_fds=[folder.lock_number()])
        if unknown := [network for network, known in found.items() if known is None]:
            with Forks(folder.path / LOG, returning=True, **kept) as run:
                found |= measure_memory(unknown, Meter(plan, conditions, run), folder, say)
        with Forks(folder.path / LOG, **kept) as run:  # what is freed stays: returning costs time
            measure_time(found, Meter(plan, conditions, run), folder, provenance, say)
        after()


def measure_memory(
    networks: Sequence[Network], asking: Meter, folder: SweepFolder, say: Callable[[str], None]
) -> dict[Network, Told]:
    """Measure the memory of each network by itself."""
    found = {}
    for network in networks:
        say(f"{network.name}: memory")
        found[network] = {
            "network": asdict(network),
            "conditions": asking.conditions,
            "timed": None,
        }
        found[network] |= {
            name: asking.ask(meter.measure_memory, name, [network]) for name in PASSES
        }
        folder.keep_measurement(network, found[network])
    return found


def measure_time(
    found: dict[Network, Told],
    asking: Meter,
    folder: SweepFolder,
    provenance: Told,
    say: Callable[[str], None],
) -> None:
    """Measure the time of all networks that fit into memory, in turns."""
    for name in PASSES:
        timed = [network for network, known in found.items() if known[name]["status"] == "ok"]
        if timed:
            say(f"{timed[0].img_size} px, {name}: time of {len(timed)} networks in turns")
            keep_time(found, name, asking.ask(meter.measure_time, name, timed))
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    for network, known in found.items():
        folder.keep_measurement(network, known | {"timed": now, "provenance": provenance})


def keep_time(found: dict[Network, Told], name: str, answer: Told) -> None:
    """Put the seconds of a pass, or why there are none, to what is known of the networks."""
    for network, known in found.items():
        entry = known[name]
        if entry["status"] != "ok":
            continue
        entry.pop("seconds", None)
        if answer["status"] != "ok":
            entry |= {"status": answer["status"], "reason": answer["reason"]}
        elif (seconds := answer["seconds"][network.name]) is None:
            entry |= {
                "status": "oom",
                "reason": "out of memory beside the other networks; fewer heads per call need less",
            }
        else:
            entry["seconds"] = seconds


def images_per_second(entry: Told | None, batch: int) -> float | None:
    """Return the median over the rounds of a pass; None where it was not timed."""
    return batch / statistics.median(entry["seconds"]) if entry and entry.get("seconds") else None


def times_faster(entry: Told | None, than: Told | None) -> float | None:
    """Return how many times the images per second of another entry: the median over the rounds that
    they share.
    """
    if not (entry and than and entry.get("seconds") and than.get("seconds")):
        return None
    return statistics.median(b / a for a, b in zip(entry["seconds"], than["seconds"], strict=True))
