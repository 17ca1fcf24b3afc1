"""What ``visionattn sweep`` does: checks, trains, measures, prints tables, writes files.

This module owns the order of these, and how a sweep ends.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from visionattn.cli.ends import Failed, Stopped
from visionattn.cli.files import first_line, write_text, write_whole
from visionattn.cli.provenance import provenance_of, summary
from visionattn.cli.tables import csv_text
from visionattn.cli.untrusted import read_csv
from visionattn.data.splits import check_root
from visionattn.lab.charts import png
from visionattn.lab.figures import heads_of
from visionattn.lab.sweep.cells import to_train, train_cells
from visionattn.lab.sweep.config import SweepConfig, folder_of, parse_sweep, read_base
from visionattn.lab.sweep.expected import list_cells
from visionattn.lab.sweep.folder import HPARAMS, PLOT, ROWS, TABLE, SweepFolder
from visionattn.lab.sweep.grid import Cell, Network, Plan, make_plan
from visionattn.lab.sweep.hparams import write_hparams
from visionattn.lab.sweep.measurement import PASSES, conditions_of, measure_networks
from visionattn.lab.sweep.table import Outcome, backends, measured_by, records, tables


def sweep(argv: Sequence[str], say: Callable[[str], None], *, train: Sequence[str]) -> None:
    """Run a sweep, or what is left of it.

    Args:
        argv: the flags.
        say: takes lines for people.
        train: the command that trains one cell, to which ``--config FILE`` and the like are added.

    Raises:
        ValueError, FileNotFoundError: something is wrong with the flags, the training, the data or
            the folder, or every training failed; one line.
        Failed: some cells failed; the tables are printed and written before.
        Stopped: Ctrl-C; the trainings' states are saved.
    """
    begin, config = time.monotonic(), parse_sweep(argv)
    if not hasattr(os, "killpg"):
        raise ValueError("a sweep ends its trainings as Linux and macOS do; this system cannot")
    base = read_base(config)
    check_root(base.data)
    folder = SweepFolder(folder_of(config, base))
    folder.check(base, overwrite=config.overwrite)
    plan = make_plan(config, base)
    if not config.overwrite:
        check_wider(plan, folder)
    if config.dry_run:
        left = plan.grid.cells()
        if not config.overwrite:
            left = to_train(left, folder, retry=config.retry)
        list_cells(plan, left, config.jobs, say)
        return
    # Of trainings and measurements the threads, not of this process.
    provenance = provenance_of(
        conditions_of(config, plan)["device"],
        ["sweep", *argv],
        threads=base.threads,
    )
    folder.open(base, overwrite=config.overwrite)
    try:
        try:
            ended = work(config, plan, folder, provenance, say, train)
        finally:
            # Also after an error: what was spent is part of what the table says.
            call = {key: provenance[key] for key in ("command", "date", "commit")}
            calls = folder.keep_call(
                call | {"jobs": config.jobs, "seconds": round(time.monotonic() - begin, 1)}
            )
        if ended:
            report(plan, folder, provenance, calls, say)
            check_any_finished(config, plan, folder)
    finally:
        folder.close()
    if not ended:
        again = "the same command without --overwrite" if config.overwrite else "the same command"
        raise Stopped(f"stopped; {again} goes on with the trainings that are left")
    check_failures(config, plan, folder)


def work(
    config: SweepConfig,
    plan: Plan,
    folder: SweepFolder,
    provenance: dict[str, Any],
    say: Callable[[str], None],
    train: Sequence[str],
) -> bool:
    """Train and, where a training finished or none was asked for, measure what is left; False after
    Ctrl-C.
    """
    cells = plan.grid.cells()
    wanted = to_train(cells, folder, retry=config.retry) if config.train else []
    say(
        f"{len(cells)} trainings of {len(plan.grid.networks)} networks in {folder.path}; "
        f"{len(wanted)} to train"
    )

    def so_far() -> None:
        write(plan, folder, provenance, [])

    if wanted and not train_cells(
        plan, wanted, folder, jobs=config.jobs, command=train, say=say, after=so_far
    ):
        return False
    if config.measure and not (config.train and none_finished(plan, folder)):
        measure_networks(config, plan, folder, provenance, say, after=so_far)
    return True


def check_wider(plan: Plan, folder: SweepFolder) -> None:
    """Raise ValueError where the folder's table has networks that this call does not name: it would
    be replaced by less.
    """
    written = folder.path / ROWS
    if not written.is_file():
        return
    rows = {Cell(network, seed).name for network in plan.grid.networks for seed in plan.grid.seeds}
    try:
        missing = [name for row in read_csv(written)[1] if (name := row_name(row)) not in rows]
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{written} is no table of a sweep ({first_line(error)}); delete it to write it anew"
        ) from error
    if missing:
        raise ValueError(
            f"{written} has rows that this call does not name, e.g. {missing[0]}; name them too, "
            f"or choose another --output"
        )


def row_name(row: dict[str, str]) -> str:
    """Return the name of the network and seed of a row of the table."""
    network = Network(
        row["attention"], int(row["heads"]), row["form"] or None, int(row["img_size"])
    )
    return Cell(network, int(row["seed"])).name


def none_finished(plan: Plan, folder: SweepFolder) -> bool:
    """Tell whether every training ended, and none finished."""
    endings = [folder.ending(cell) for cell in plan.grid.cells()]
    return all(ending and ending.status != "finished" for ending in endings)


def check_any_finished(config: SweepConfig, plan: Plan, folder: SweepFolder) -> None:
    """Raise ValueError with the first reason where no training finished."""
    if config.train and none_finished(plan, folder):
        cells = plan.grid.cells()
        first = folder.ending(cells[0])
        raise ValueError(
            f"every one of the {len(cells)} trainings failed, the first with {first.status}: "
            f"{first.reason}; the logs are in "
            f"{folder.runs}, --retry repeats them"
        )


def report(
    plan: Plan,
    folder: SweepFolder,
    provenance: dict[str, Any],
    calls: Sequence[dict[str, Any]],
    say: Callable[[str], None],
) -> None:
    """Print the tables and write all files."""
    text, outcome = write(plan, folder, provenance, calls)
    say("\n" + text)
    write_hparams(folder.path / HPARAMS, outcome)
    say(f"- written: {', '.join(str(folder.path / name) for name in (TABLE, ROWS, PLOT, HPARAMS))}")


def write(
    plan: Plan, folder: SweepFolder, provenance: dict[str, Any], calls: Sequence[dict[str, Any]]
) -> tuple[str, Outcome]:
    """Write table, rows and plot of what there is, and return the table.

    Args:
        plan: the sweep.
        folder: of the sweep, open.
        provenance: of this call.
        calls: what each call of the sweep took; none while it is under way.
    """
    outcome = Outcome.read(plan, folder)
    trained = [ending for ending in outcome.endings.values() if ending]
    seconds = sum(ending.seconds for ending in trained)
    source = measured_by(outcome) or [summary(provenance)]
    took = sum(call["seconds"] for call in calls)
    whole = f"all of it took {took:.0f} s in {len(calls)} call(s)" if calls else "not at its end"
    notes = [*backends(outcome), *source]
    notes += [f"{len(trained)} trainings of together {seconds:.0f} s; {whole}"]
    text = "\n".join(
        [tables(outcome), *(f"- {note}" for note in notes), f"- `{provenance['command']}`"]
    )
    write_text(folder.path / TABLE, text + "\n")
    rows = records(outcome)
    write_text(folder.path / ROWS, csv_text(rows, provenance | {"sweep_seconds": took}))
    charts = [
        replace(chart, title=f"{chart.title}, images of {size} px")
        for size in dict.fromkeys(network.img_size for network in plan.grid.networks)
        for chart in heads_of(rows, size)
    ]
    title = f"Head counts on {plan.base.data.name}"
    write_whole(folder.path / PLOT, lambda path: png(path, charts, title=title, notes=source))
    return text, outcome


def check_failures(config: SweepConfig, plan: Plan, folder: SweepFolder) -> None:
    """Raise ``Failed`` with the first reason where some training or some measurement failed,
    ValueError where all did.

    Measurements that do not fit into memory are results, and no failures.
    """
    outcome = Outcome.read(plan, folder)
    failed = [
        f"{cell.name} ended with {ending.status}: {ending.reason}"
        for cell, ending in outcome.endings.items()
        if ending and ending.status != "finished"
    ]
    failed += [
        f"the {name} of {network.name} could not be measured: "
        f"{outcome.entry(network, name)['reason']}"
        for network in plan.grid.networks
        for name in PASSES
        if (outcome.entry(network, name) or {}).get("status") == "failed"
    ]
    if not config.train and all(
        outcome.entry(network, name)["status"] == "failed"
        for network in plan.grid.networks
        for name in PASSES
    ):
        raise ValueError(f"every measurement failed: {failed[0]}; --retry repeats them")
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise Failed(f"{failed[0]}{more}; --retry repeats what failed")
