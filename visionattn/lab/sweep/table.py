"""A sweep as rows: Markdown in the shape of the published head-count table, and a list of every
cell. It measures nothing.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from visionattn.cli.provenance import summary
from visionattn.cli.tables import heading, line
from visionattn.lab.sweep.folder import Ending, SweepFolder
from visionattn.lab.sweep.grid import Network, Plan
from visionattn.lab.sweep.measurement import PASSES, images_per_second, times_faster

Measured = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Everything known of a sweep."""

    plan: Plan
    endings: dict[Any, Ending | None]
    """How the training of each cell ended."""
    measured: dict[Network, Measured | None]

    @classmethod
    def read(cls, plan: Plan, folder: SweepFolder) -> "Outcome":
        """Read it from the sweep's folder."""
        endings = {cell: folder.ending(cell) for cell in plan.grid.cells()}
        return cls(
            plan, endings, {network: folder.measurement(network) for network in plan.grid.networks}
        )

    @property
    def accuracy_key(self) -> str:
        """Return the name of the accuracy that counts."""
        return "test_accuracy" if self.plan.tested else "validation_accuracy"

    def entry(self, network: Network, name: str) -> Measured | None:
        """Return what was measured of a pass."""
        known = self.measured.get(network)
        return known and known[name]

    def accuracies(self, network: Network) -> list[float]:
        """Return the accuracies of the seeds whose trainings finished, in [0, 1]."""
        ended = [self.endings[self.plan.grid.cell(network, seed)] for seed in self.plan.grid.seeds]
        return [ending.result[self.accuracy_key] for ending in ended if ending and ending.result]


def accuracy_text(outcome: Outcome, network: Network) -> str | None:
    """Write the mean and standard deviation over the seeds in %, how many seeds where some are
    missing; a status where all are.
    """
    seeds, values = outcome.plan.grid.seeds, [100 * value for value in outcome.accuracies(network)]
    if not values:
        ended = [outcome.endings[outcome.plan.grid.cell(network, seed)] for seed in seeds]
        return ", ".join(dict.fromkeys(ending.status for ending in ended if ending)) or None
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    missing = f" ({len(values)} of {len(seeds)} seeds)" if len(values) < len(seeds) else ""
    return f"{statistics.mean(values):.1f}{spread}{missing}"


def tables(outcome: Outcome) -> str:
    """Write three Markdown tables per attention and image size: inference, training step, and how
    large the networks are.
    """
    networks = outcome.plan.grid.networks
    groups = dict.fromkeys((network.attention, network.img_size) for network in networks)
    parts = []
    for attention, size in groups:
        chosen = [
            network
            for network in networks
            if (network.attention, network.img_size) == (attention, size)
        ]
        for name in PASSES if any(outcome.measured[network] for network in chosen) else PASSES[:1]:
            parts += [f"{title(outcome, chosen[0], name)}\n", table(outcome, chosen, name), ""]
        parts += [
            f"**{attention}, {size} px, operations of the forward of one image**\n",
            size_table(outcome, chosen),
            "",
        ]
    return "\n".join(parts)


def title(outcome: Outcome, network: Network, name: str) -> str:
    """Return what a table shows."""
    plan, known = outcome.plan, outcome.measured[network]
    seeds = f"{len(plan.grid.seeds)} seed" + "s" * (len(plan.grid.seeds) > 1)
    what = f"{network.attention}, {network.img_size} px (N = {plan.facts[network].tokens}), {name}"
    batch = f" at batch {known['conditions']['batch']}" if known else ""
    trained = (
        f", trained in the {plan.grid.train_form} form"
        if network.form and plan.grid.train_form
        else ""
    )
    accuracy = "test" if plan.tested else "validation"
    spread = "mean ± standard deviation of " if len(plan.grid.seeds) > 1 else ""
    above = "; MiB above the level with weights, optimiser and images in place" if known else ""
    return f"**{what}{batch}**; {accuracy} accuracy in %, {spread}{seeds}{trained}{above}"


def table(outcome: Outcome, networks: Sequence[Network], name: str) -> str:
    """Return the head-count table of one attention and image size: a row per head count, the forms
    side by side.
    """
    forms = list(dict.fromkeys(network.form for network in networks))
    both = {"direct", "efficient"} <= set(forms)
    spoken = [f"{form} " if form else "" for form in forms]
    separate = len(forms) > 1 and not outcome.plan.grid.train_form
    columns = ["h", "d"] + ([f"{word}accuracy" for word in spoken] if separate else ["accuracy"])
    columns += [f"{word}{unit}" for word in spoken for unit in ("img/s", "MiB")]
    columns += ["efficient / direct img/s", "efficient / direct MiB"] if both else []
    rows = []
    for heads in dict.fromkeys(network.heads for network in networks):
        own = {network.form: network for network in networks if network.heads == heads}
        row = [heads, outcome.plan.facts[own[forms[0]]].head_dim]
        row += [accuracy_text(outcome, own[form]) for form in (forms if separate else forms[:1])]
        for form in forms:
            row += speed_and_memory(outcome.entry(own[form], name), outcome.measured[own[form]])
        rows.append(row + (ratios(outcome, own, name) if both else []))
    return "\n".join([heading(columns), *map(line, rows)])


def size_table(outcome: Outcome, networks: Sequence[Network]) -> str:
    """Write parameters and operations of one attention and image size."""
    forms = list(dict.fromkeys(network.form for network in networks))
    rows = []
    for heads in dict.fromkeys(network.heads for network in networks):
        facts = [outcome.plan.facts[network] for network in networks if network.heads == heads]
        rows.append(
            [
                heads,
                facts[0].head_dim,
                f"{facts[0].parameters:,}",
                *(f"{fact.flops / 1e9:.3g}" for fact in facts),
            ]
        )
    columns = ["h", "d", "parameters", *(f"{form} GFLOP" if form else "GFLOP" for form in forms)]
    return "\n".join([heading(columns), *map(line, rows)])


def speed_and_memory(entry: Measured | None, known: Measured | None) -> list[str | None]:
    """Return images per second and MiB, or why there are none."""
    if entry is None:
        return [None, None]
    if entry["status"] != "ok":
        words = {"oom": "out of memory"}.get(entry["status"], entry["status"])
        return [words, words]
    speed, peak = images_per_second(entry, known["conditions"]["batch"]), entry["peak_bytes"]
    return [speed and f"{speed:.4g}", None if peak is None else f"{peak / 2**20:.4g}"]


def ratios(outcome: Outcome, own: dict[str, Network], name: str) -> list[str | None]:
    """Return speed and memory of the efficient form over those of the direct one."""
    efficient, direct = (outcome.entry(own[form], name) for form in ("efficient", "direct"))
    speed = times_faster(efficient, direct)
    peaks = [
        entry and entry["status"] == "ok" and entry["peak_bytes"] for entry in (efficient, direct)
    ]
    return [speed and f"{speed:.3g}", f"{peaks[0] / peaks[1]:.3g}" if all(peaks) else None]


def backends(outcome: Outcome) -> list[str]:
    """Return which attention really ran, a line per network form and pass."""
    lines: dict[str, list[str]] = {}
    for network in outcome.plan.grid.networks:
        for name in PASSES:
            entry = outcome.entry(network, name)
            if entry and "backends" in entry:
                asked = " ".join([network.attention, *([network.form] if network.form else [])])
                ran = " and ".join(entry["backends"]) or "none that is known"
                lines.setdefault(f"{asked}, {name}: {ran} ran", []).append(f"{network.heads}")
    every = {str(network.heads) for network in outcome.plan.grid.networks}
    where = {
        text: "" if set(heads) == every else f" at {', '.join(dict.fromkeys(heads))} heads"
        for text, heads in lines.items()
    }
    return [text + where[text] for text in lines]


def measured_by(outcome: Outcome) -> list[str]:
    """Return where and when the measurements were made, each place once; empty where there are
    none.
    """
    sources = [(known or {}).get("provenance") for known in outcome.measured.values()]
    return list(dict.fromkeys(summary(source) for source in sources if source))


def records(outcome: Outcome) -> list[dict[str, Any]]:
    """Return a row per network and seed with everything known of it; None where nothing is."""
    return [
        record_of(outcome, network, seed)
        for network in outcome.plan.grid.networks
        for seed in outcome.plan.grid.seeds
    ]


def record_of(outcome: Outcome, network: Network, seed: int) -> dict[str, Any]:
    """Return one row; units stand in the names."""
    plan, cell = outcome.plan, outcome.plan.grid.cell(network, seed)
    facts, ending, known = plan.facts[network], outcome.endings[cell], outcome.measured[network]
    row = {
        "attention": network.attention,
        "heads": network.heads,
        "head_dim": facts.head_dim,
        "form": network.form,
    }
    row |= {
        "trained_form": cell.network.form,
        "img_size": network.img_size,
        "tokens": facts.tokens,
        "seed": seed,
    }
    row |= {
        "status": ending.status if ending else None,
        "reason": ending.reason if ending else None,
    }
    # What training found; empty where it has not finished.
    result = (ending.result if ending else None) or {}
    for key in (
        "best_epoch",
        "validation_accuracy",
        "test_accuracy",
        "test_loss",
        "test_images",
        "train_seconds",
    ):
        row[key] = result.get(key)
    row |= {
        "cell_seconds": ending.seconds if ending else None,
        "attempts": ending.attempts if ending else None,
    }
    row |= {"train_commit": ending.provenance.get("commit") if ending else None}
    row |= {"parameters": facts.parameters, "flops": facts.flops}
    # What was measured; empty where nothing was.
    conditions = known["conditions"] if known else {}
    for name in PASSES:
        entry = (known or {}).get(name) or {}
        row |= {f"{name}_status": entry.get("status"), f"{name}_reason": entry.get("reason")}
        row[f"{name}_images_per_second"] = images_per_second(entry, conditions.get("batch", 0))
        row[f"{name}_peak_bytes"] = entry.get("peak_bytes")
        row[f"{name}_backend"] = " + ".join(entry["backends"]) if "backends" in entry else None
    row |= {
        f"measure_{key}": conditions.get(key)
        for key in ("device", "amp", "threads", "batch", "rounds")
    }
    source = (known or {}).get("provenance") or {}
    row |= {f"measure_{key}": source.get(key) for key in ("commit", "torch", "processor", "load")}
    return row | {"run": cell.name, "measured": known["timed"] if known else None}
