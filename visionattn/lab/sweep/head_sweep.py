"""Run ``visionattn sweep``: check, train, measure, and write the table, the rows and the figure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from visionattn.cli.exit_codes import Failed, Stopped
from visionattn.cli.files import write_text, write_whole
from visionattn.cli.provenance import provenance_of, summary
from visionattn.cli.tables import Record, csv_text, heading, line
from visionattn.data.splits import check_root
from visionattn.lab.charts import png
from visionattn.lab.figures import distinct, heads_of
from visionattn.lab.report.page_tables import rows_table, shared_words
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
from visionattn.lab.sweep.head_grid import SweepPlan, make_plan
from visionattn.lab.sweep.network_costs import (
    PASSES,
    conditions_of,
    measure_networks,
    tell_expected,
)
from visionattn.lab.sweep.sweep_flags import folder_of, parse_sweep, read_base

Say = Callable[[str], None]
SOURCES = ("device", "amp", "threads", "batch", "rounds", "commit", "torch", "processor", "load")
MEASURED = ("status", "reason", "images_per_second", "times_direct", "peak_bytes", "backend")
COLUMNS = (
    *("status", "reason", *RESULTS, "cell_seconds", "attempts", "train_commit"),
    *("parameters", "flops"),
    *(f"{work}_{key}" for work in PASSES for key in MEASURED),
    *(f"measure_{key}" for key in SOURCES),
    *("run", "measured"),
)
"""Columns of ``cells.csv`` after the columns that identify a row."""


def sweep(argv: Sequence[str], say: Say, *, train: Sequence[str]) -> None:
    """Run a sweep, or resume an earlier one.

    Args:
        argv: the flags.
        say: prints a line.
        train: the command that trains one cell; ``--config FILE`` and further flags are added.

    Raises:
        ValueError, FileNotFoundError: wrong flags, training, data or folder, or all trainings
            failed; one line.
        DoesNotFit: the parallel trainings do not fit into memory.
        Failed: some cells failed. The table is printed and written first.
        Stopped: Ctrl-C. The trainings have saved their states.
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

    with folder.opened(base, overwrite=config.overwrite):
        written = partial(write, plan, folder, provenance)
        how = dict(jobs=config.jobs, command=train, say=say, after=written)
        if not train_cells(plan, left, folder, **how):
            again = "the same command" + " without --overwrite" * config.overwrite
            raise Stopped(f"stopped; {again} resumes with the remaining trainings")
        ended = [ending["status"] for ending in folder.known(ENDINGS).values()]
        if config.measure and "finished" in ended:
            measure_networks(config, plan, folder, provenance, say, after=written)
        say("\n" + written())
    check_failures(plan, folder)


def write(plan: SweepPlan, folder: SweepFolder, provenance: dict[str, Any]) -> str:
    """Write the table, rows and figure of the results so far, and return the text of the table."""
    rows = records(plan, folder.known(ENDINGS), folder.known(MEASUREMENTS))
    table, source = rows_table("sweep", rows), summary(provenance)
    lines = [shared_words(rows), "", heading(table.columns)]
    lines += [line([cell.text for cell in cells]) for cells in table.rows]
    text = "\n".join([*lines, "", f"- {source}", f"- `{provenance['command']}`"])
    write_text(folder.path / TABLE, text + "\n")
    write_text(folder.path / ROWS, csv_text(rows, provenance))
    charts = [
        replace(chart, title=f"{chart.title}, images of {size} px")
        for (size,) in distinct(rows, "img_size")
        for chart in heads_of(rows, size)
    ]
    how = dict(title=f"Head counts on {plan.base.data.name}", notes=[source])
    write_whole(folder.path / PLOT, lambda path: png(path, charts, **how))
    return text


def check_failures(plan: SweepPlan, folder: SweepFolder) -> None:
    """Raise ``Failed`` with the first reason if a training or a measurement failed. Raise
    ValueError if all trainings failed.

    A measurement that runs out of memory is a result, not a failure.
    """
    known, measured = folder.known(ENDINGS), folder.known(MEASUREMENTS)
    endings = {cell.name: known[cell.name] for cell in plan.cells() if cell.name in known}
    failed = [
        f"{name} ended with {ending['status']}: {ending['reason']}"
        for name, ending in endings.items()
        if ending["status"] != "finished"
    ]
    if endings and len(failed) == len(endings):
        raise ValueError(
            f"every training failed: {failed[0]}; see the logs in {folder.runs}, and pass --retry "
            "to repeat them"
        )
    failed += [
        f"the {work} of {network.name} could not be measured: {columns[f'{work}_reason']}"
        for network in plan.networks
        for work in PASSES
        if (columns := measured.get(network.name, {})).get(f"{work}_status") == "failed"
    ]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise Failed(f"{failed[0]}{more}; pass --retry to repeat failed trainings")


def records(
    plan: SweepPlan, endings: Mapping[str, Record], measured: Mapping[str, Record]
) -> list[Record]:
    """Return a row for each network and seed; None for unknown values."""
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
