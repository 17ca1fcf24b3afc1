"""What ``visionattn sweep`` does: checks, trains, measures, writes the table, rows and picture.

This module owns the order of these, and how a sweep ends.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from visionattn.cli.ends import Failed, Stopped
from visionattn.cli.files import write_text, write_whole
from visionattn.cli.provenance import provenance_of, summary
from visionattn.cli.tables import Record, csv_text, markdown
from visionattn.data.splits import check_root
from visionattn.lab.charts import png
from visionattn.lab.figures import chosen, distinct, heads_of
from visionattn.lab.sweep.cell_trainings import (
    ENDINGS,
    MEASUREMENTS,
    PLOT,
    RESULTS,
    ROWS,
    TABLE,
    SweepFolder,
    left_to_train,
    train_cells,
)
from visionattn.lab.sweep.head_grid import Network, Plan, make_plan
from visionattn.lab.sweep.network_costs import (
    PASSES,
    conditions_of,
    measure_networks,
    tell_expected,
)
from visionattn.lab.sweep.sweep_flags import folder_of, parse_sweep, read_base

Say = Callable[[str], None]
SOURCES = ("device", "amp", "threads", "batch", "rounds", "commit", "torch", "processor", "load")
MEASURED = ("status", "reason", "images_per_second", "peak_bytes", "backend")
COLUMNS = (
    *("status", "reason", *RESULTS, "cell_seconds", "attempts", "train_commit"),
    *("parameters", "flops"),
    *(f"{work}_{key}" for work in PASSES for key in MEASURED),
    *(f"measure_{key}" for key in SOURCES),
    *("run", "measured"),
)
"""Columns of ``cells.csv`` behind those that name a row; units stand in the names."""


def sweep(argv: Sequence[str], say: Say, *, train: Sequence[str]) -> None:
    """Run a sweep, or what is left of it.

    Args:
        argv: the flags.
        say: takes lines for people.
        train: the command that trains one cell, to which ``--config FILE`` and the like are added.

    Raises:
        ValueError, FileNotFoundError: something is wrong with the flags, the training, the data or
            the folder, or everything failed; one line.
        DoesNotFit: not as many trainings fit into memory at a time.
        Failed: some cells failed; the table is printed and written before.
        Stopped: Ctrl-C; the trainings' states are saved.
    """
    config = parse_sweep(argv)
    base = read_base(config)
    check_root(base.data)
    folder = SweepFolder(folder_of(config, base))
    folder.check(base, overwrite=config.overwrite)
    plan = make_plan(config, base)
    torch.set_num_threads(base.threads or torch.get_num_threads())
    device = conditions_of(config, plan)["measure_device"]
    provenance = provenance_of(device, ["sweep", *argv], threads=base.threads)
    known = {} if config.overwrite else folder.known(ENDINGS)
    left = left_to_train(plan, known, retry=config.retry)
    say(
        f"{len(plan.cells())} trainings of {len(plan.networks)} networks in {folder.path}; "
        f"{len(left)} to train"
    )
    if left:
        tell_expected(plan, left, config.jobs, say)
    if config.dry_run:
        say("\n".join(cell.name for cell in left))
        return

    def written() -> str:
        return write(plan, folder, provenance)

    with folder.opened(base, overwrite=config.overwrite):
        how = dict(jobs=config.jobs, command=train, say=say, after=written)
        if not train_cells(plan, left, folder, **how):
            again = "the same command" + " without --overwrite" * config.overwrite
            raise Stopped(f"stopped; {again} goes on with the trainings that are left")
        ended = [ending["status"] for ending in folder.known(ENDINGS).values()]
        if config.measure and "finished" in ended:
            measure_networks(config, plan, folder, provenance, say, after=written)
        say("\n" + written())
    check_failures(plan, folder)


def write(plan: Plan, folder: SweepFolder, provenance: dict[str, Any]) -> str:
    """Write table, rows and picture of what there is, and return the table."""
    measured = folder.known(MEASUREMENTS)
    rows = records(plan, folder.known(ENDINGS), measured)
    notes = [summary(provenance)]
    lines = [tables(plan, rows, measured), "", *(f"- {note}" for note in notes)]
    text = "\n".join([*lines, f"- `{provenance['command']}`"])
    write_text(folder.path / TABLE, text + "\n")
    write_text(folder.path / ROWS, csv_text(rows, provenance))
    charts = [
        replace(chart, title=f"{chart.title}, images of {size} px")
        for size in dict.fromkeys(network.img_size for network in plan.networks)
        for chart in heads_of(rows, size)
    ]
    title = f"Head counts on {plan.base.data.name}"
    write_whole(folder.path / PLOT, lambda path: png(path, charts, title=title, notes=notes))
    return text


def check_failures(plan: Plan, folder: SweepFolder) -> None:
    """Raise ``Failed`` with the first reason where a training or a measurement failed, ValueError
    where all trainings did.

    Measurements that do not fit into memory are results, and no failures.
    """
    known, measured = folder.known(ENDINGS), folder.known(MEASUREMENTS)
    endings = {cell.name: known[cell.name] for cell in plan.cells() if cell.name in known}
    failed = [
        f"{name} ended with {ending['status']}: {ending['reason']}"
        for name, ending in endings.items()
        if ending["status"] != "finished"
    ]
    if len(failed) == len(endings):
        raise ValueError(
            f"every training failed: {failed[0]}; the logs are in {folder.runs}, --retry repeats"
        )
    failed += [
        f"the {work} of {network.name} could not be measured: {columns[f'{work}_reason']}"
        for network in plan.networks
        for work in PASSES
        if (columns := measured.get(network.name, {})).get(f"{work}_status") == "failed"
    ]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise Failed(f"{failed[0]}{more}; --retry repeats what failed")


def records(
    plan: Plan, endings: Mapping[str, Record], measured: Mapping[str, Record]
) -> list[Record]:
    """Return a row per network and seed with everything known of it; None where nothing is."""
    rows = []
    for network, seed in product(plan.networks, plan.seeds):
        cell, facts = plan.cell(network, seed), plan.facts[network]
        row: Record = {"attention": network.attention, "heads": network.heads}
        row |= {"head_dim": facts["head_dim"], "form": network.form}
        row |= {"trained_form": cell.network.form, "img_size": network.img_size}
        row |= {"tokens": facts["tokens"], "seed": seed}
        known = facts | endings.get(cell.name, {}) | measured.get(network.name, {})
        known["run"] = cell.name
        rows.append(row | {key: known.get(key) for key in COLUMNS})
    return rows


def tables(plan: Plan, rows: Sequence[Record], measured: Mapping[str, Record]) -> str:
    """Write a Markdown table per attention and image size, a row per head count."""
    accuracy = "test" if plan.splits.test is not None else "validation"
    parts = []
    for attention, size in distinct(rows, "attention", "img_size"):
        own = chosen(rows, ("attention", "img_size"), (attention, size))
        parts.append(
            f"**{attention}, {size} px (N = {own[0]['tokens']})**; {accuracy} accuracy in %, mean "
            f"± standard deviation of {len(plan.seeds)} seeds; GFLOP of one image; images per "
            f"second and MiB above weights, optimizer and images at batch {own[0]['measure_batch']}"
        )
        by_heads = [chosen(own, ("heads",), heads) for heads in distinct(own, "heads")]
        parts.append(markdown([head_row(plan, each, measured) for each in by_heads]))
    return "\n\n".join(parts)


def head_row(plan: Plan, rows: Sequence[Record], measured: Mapping[str, Record]) -> Record:
    """Return the line of one attention, size and head count, its forms side by side."""
    first = rows[0]
    cells: Record = {"h": first["heads"], "d": first["head_dim"]}
    cells["parameters"] = f"{first['parameters']:,}"
    by_form = {form: chosen(rows, ("form",), (form,)) for (form,) in distinct(rows, "form")}
    each_trained = len(distinct(rows, "trained_form")) > 1
    for form, own in by_form.items():
        word = f"{form} " if form else ""
        cells.setdefault(f"{word if each_trained else ''}accuracy", accuracy_text(plan, own))
        cells[f"{word}GFLOP"] = f"{own[0]['flops'] / 1e9:.3g}"
    for work in PASSES:
        for form, (row, *_) in by_form.items():
            title, status = f"{work} {form or ''}".strip(), row[f"{work}_status"]
            why = {None: None, "ok": None, "oom": "out of memory"}.get(status, status)
            speed, peak = row[f"{work}_images_per_second"], row[f"{work}_peak_bytes"]
            cells[f"{title} img/s"] = f"{speed:.4g}" if speed else why
            cells[f"{title} MiB"] = why if peak is None else f"{peak / 2**20:.4g}"
        if {"efficient", "direct"} <= by_form.keys():
            pair = [by_form[form][0] for form in ("efficient", "direct")]
            rounds = [measured.get(name_of(row), {}).get(f"{work}_seconds") for row in pair]
            peaks = [row[f"{work}_peak_bytes"] for row in pair]
            ratios = (
                [slow / fast for fast, slow in zip(*rounds, strict=True)] if all(rounds) else []
            )
            speed = f"{statistics.median(ratios):.3g}" if ratios else None
            cells[f"{work} efficient / direct img/s"] = speed
            memory = f"{peaks[0] / peaks[1]:.3g}" if all(peaks) else None
            cells[f"{work} efficient / direct MiB"] = memory
    return cells


def name_of(row: Record) -> str:
    """Return the name of a row's network."""
    return Network(row["attention"], row["heads"], row["form"], row["img_size"]).name


def accuracy_text(plan: Plan, rows: Sequence[Record]) -> str | None:
    """Write the mean and standard deviation over the seeds in %, how many seeds where some are
    missing; a status where all are.
    """
    key = "test_accuracy" if plan.splits.test is not None else "validation_accuracy"
    values = [100 * row[key] for row in rows if row[key] is not None]
    if not values:
        return ", ".join(dict.fromkeys(filter(None, (row["status"] for row in rows)))) or None
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    missing = f" ({len(values)} of {len(rows)} seeds)" if len(values) < len(rows) else ""
    return f"{statistics.mean(values):.1f}{spread}{missing}"
