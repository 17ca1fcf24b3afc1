"""What ``visionattn profile`` does: measures the cases that the flags name, prints the table,
writes files.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from visionattn.cli.ends import Failed, OutOfMemory, is_out_of_memory
from visionattn.cli.files import write_text, write_whole
from visionattn.cli.memory import free_of_machine
from visionattn.cli.parsing import parse
from visionattn.cli.progress import Progress
from visionattn.cli.provenance import provenance_of, summary
from visionattn.cli.tables import Record, csv_text, heading, lasting, line
from visionattn.lab.cases import Case, check_sizes
from visionattn.lab.charts import png
from visionattn.lab.figures import memory_of
from visionattn.lab.profile.config import ProfileConfig, check
from visionattn.lab.profile.expected import expected_seconds
from visionattn.lab.profile.largest import find_largest
from visionattn.lab.profile.process import Job, measure
from visionattn.lab.profile.rows import (
    COLUMNS,
    LARGEST_COLUMNS,
    Row,
    cells_of,
    columns_on,
    growths,
    largest_cells,
    largest_record,
    last_line,
    record_of,
)
from visionattn.lab.profile.shape import Shape
from visionattn.models.machine import pick_device
from visionattn.ops.published import N1

Print = Callable[[str], None]

EXAMPLE = "--models taylorshift_vit_t vit_tiny_patch16_224+eager"
EXAMPLE += " --img-size 256 384 --fit-from 256 --depth 1"
SHARE_OF_AVAILABLE = 0.8
"""The share of a CPU's memory that is taken where no budget is given."""


def profile(argv: Sequence[str], show: Print) -> None:
    """Do what the flags say; ``show`` gets the lines of the table.

    Raises:
        ValueError, OSError: a flag is wrong, or a file cannot be written; before anything is
            measured, where it can be known.
        Failed: a cell failed for another reason than memory; its row says why, and the others are
            written.
        OutOfMemory: there is no snapshot, since its cell does not fit.
    """
    about = (
        "Peak memory of models over image sizes, and what it consists of; each cell in a "
        "process of its own."
    )
    config = parse(ProfileConfig, argv, command="profile", description=about, example=EXAMPLE)
    check(config)
    device = str(pick_device(config.device))
    if device == "cpu" and not sys.platform.startswith("linux"):
        raise ValueError("peak memory of a CPU is measured under Linux only")
    shapes = shapes_of(config)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(config.threads or before)
        work = Profile(config, device, shapes, argv, show)
        work.list_cells() if config.dry_run else work.run()
    finally:
        torch.set_num_threads(before)


def shapes_of(config: ProfileConfig) -> dict[str, Shape]:
    """Return the shape of each model; raises ValueError where one cannot be built or a size is no
    whole number of its patches.
    """
    shapes = {}
    for case in config.cases():
        check_sizes(case)
        if case.name not in shapes:
            shapes[case.name] = Shape.of(case, config.sizes_px)
    return shapes


class Profile:
    """A profile under way.

    Args:
        config: checked options.
        device: "cpu" or a GPU.
        shapes: of each model.
        argv: the flags, for provenance.
        show: gets lines.
    """

    def __init__(
        self,
        config: ProfileConfig,
        device: str,
        shapes: dict[str, Shape],
        argv: Sequence[str],
        show: Print,
    ):
        self.config, self.device, self.shapes, self.show = config, device, shapes, show
        self.budget_bytes = budget_of(config, device)
        self.provenance = provenance_of(device, ["profile", *argv])
        self.provenance["budget_bytes"] = self.budget_bytes
        self.files = config.files()
        self.rows: list[Row] = []
        self.lines: list[str] = []

    def run(self) -> None:
        """Measure, print and write; what is measured is printed and written after each cell, so
        that no later end loses it.
        """
        if self.config.output:
            Path(self.config.output).mkdir(parents=True, exist_ok=True)
        self.tell(summary(self.provenance) + f"; budget {self.budget_text()}\n")
        self.tell(
            heading(
                LARGEST_COLUMNS
                if self.config.largest
                else [COLUMNS[i] for i in columns_on(self.device)]
            )
        )
        if self.config.largest:
            self.search()
        else:
            self.sweep()
        for text in self.footer():
            self.show(text)
        # Everything is written by now; failures and a lacking snapshot decide the exit code.
        failed = [row for row in self.rows if row.status.startswith("failed")]
        if failed:
            raise Failed(
                f"{len(failed)} of {len(self.rows)} cells failed; {failed[0].case.name}: "
                f"{failed[0].status}"
            )
        if "snapshot" in self.files:
            if not self.rows[0].bytes:
                raise OutOfMemory(
                    f"{self.files['snapshot']} is not written: the cell does not fit into memory"
                )
            self.show(
                f"snapshot: {self.files['snapshot']}; https://pytorch.org/memory_viz shows it"
            )

    def list_cells(self) -> None:
        """Print the cells with the time that they will take, and measure none."""
        cases, seconds = self.config.cases(), 0.0
        self.show(heading([*COLUMNS[:7], "expected"]))
        for case, expected in expected_seconds(cases, self.device, self.try_one):
            seconds += expected
            row = Row(case, self.shapes[case.name].tokens(case.size))
            self.show(line([*cells_of(row, None)[:7], lasting(expected)]))
        self.show(f"\n{len(cases)} cells, {lasting(seconds)} in all; nothing is measured yet")

    def try_one(self, case: Case) -> None:
        """Measure a small case for the time that it takes."""
        measure(Job(case, self.device, torch.get_num_threads(), self.budget_bytes))

    def sweep(self) -> None:
        """Measure the cases, those of one series together."""
        cases = self.config.cases()
        with Progress(len(cases), unit="cells") as progress:
            for series in dict.fromkeys(case.series for case in cases):
                for case in (case for case in cases if case.series == series):
                    self.rows.append(self.measure(case, self.shapes[case.name].tokens(case.size)))
                    row = last_line(self.rows, self.config.fit_from, self.device)
                    self.lines.append(row)
                    progress.say(row, self.show)
                    exponents = growths(self.rows, self.config.fit_from)
                    self.save(
                        [record_of(row, exponents[row.case.series]) for row in self.rows], exponents
                    )
                    progress.advance(1)

    def search(self) -> None:
        """Find the largest image of each series; the plot shows all that was measured."""
        records = []
        for case in self.config.cases():
            found, rows = find_largest(case, self.shapes[case.name], self.measure)
            self.rows += rows
            records.append(largest_record(found))
            self.tell(line(largest_cells(found)))
            self.save(records, {})

    def measure(self, case: Case, tokens: int) -> Row:
        """Measure the row of a case, in a fresh process."""
        snapshot = self.files.get("snapshot")
        job = Job(
            case,
            self.device,
            torch.get_num_threads(),
            self.budget_bytes,
            str(snapshot.absolute()) if snapshot else None,
        )
        try:
            return Row(case, tokens, measure(job))
        except (Failed, RuntimeError, MemoryError) as error:
            return Row(
                case,
                tokens,
                None,
                "out of memory" if is_out_of_memory(error) else f"failed: {error}",
            )

    def tell(self, *lines: str) -> None:
        """Print lines, and keep them for the file."""
        for text in lines:
            self.lines.append(text)
            self.show(text)

    def save(self, records: Sequence[Record], exponents: dict[Case, float | None]) -> None:
        """Write CSV, table and plot of what there is."""
        lines = [*self.lines, *self.footer()]
        texts = {
            "csv": lambda: csv_text(records, self.provenance),
            "table": lambda: "\n".join(lines) + "\n",
        }
        for kind, text in texts.items():
            if kind in self.files:
                write_text(self.files[kind], text())
        if "plot" in self.files:
            rows = [record_of(row, exponents.get(row.case.series)) for row in self.rows]
            write_whole(self.files["plot"], lambda path: self.draw(path, rows))

    def draw(self, path: Path, rows: Sequence[Record]) -> None:
        """Write the plot."""
        notes = [summary(self.provenance), self.config.settings, self.provenance["command"]]
        charts = memory_of(rows, n1=n1_of(self.shapes))
        png(path, charts, title="Peak memory of models", notes=notes)

    def footer(self) -> list[str]:
        """Return the lines under the table: why a growth is missing, the settings, the command."""
        found = {} if self.config.largest else growths(self.rows, self.config.fit_from)
        said = (
            f"growth -: fewer than two sizes from {self.config.fit_from} px (--fit-from) were "
            f"measured"
        )
        missing = [said] if None in found.values() else []
        return ["", *missing, self.config.settings, f"command: {self.provenance['command']}"]

    def budget_text(self) -> str:
        """Return the budget in words."""
        return (
            "the card's memory"
            if self.budget_bytes is None
            else f"{self.budget_bytes / 2**30:.2f} GiB"
        )


def n1_of(shapes: dict[str, Shape]) -> dict[float, str]:
    """Return N1 of each width of a head of TaylorShift, the tokens from which its efficient form
    holds no more entries than the direct one, as published: in words, by side of an image in
    pixels.
    """
    return {
        shape.px(N1(width)): f"N1 of TaylorShift, d = {width}: {N1(width):,} tokens"
        for shape in shapes.values()
        if (width := shape.taylor_width) is not None
    }


def budget_of(config: ProfileConfig, device: str) -> int | None:
    """Return bytes that a cell may take: those of the flag, on a CPU otherwise a share of what is
    available, on a GPU None.
    """
    if config.budget_gib is not None:
        return int(config.budget_gib * 2**30)
    if device != "cpu":
        return None
    return int(SHARE_OF_AVAILABLE * free_of_machine())
