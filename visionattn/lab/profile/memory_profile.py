"""Run ``visionattn profile``: measure the selected cases, print the table and write files."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from visionattn.cli.exit_codes import Failed, OutOfMemory, is_out_of_memory
from visionattn.cli.files import write_text, write_whole
from visionattn.cli.fresh_process import ask
from visionattn.cli.memory import free_of_machine, largest_fit
from visionattn.cli.parsing import parse
from visionattn.cli.provenance import provenance_of, summary
from visionattn.cli.tables import Record, csv_text, heading, line, mebibytes
from visionattn.lab.cases import Case, check_sizes
from visionattn.lab.charts import png
from visionattn.lab.compared_models import build_model, has_forms
from visionattn.lab.figures import memory_of, slope
from visionattn.lab.profile.memory_cells import PARTS, measure, snapshot_here
from visionattn.lab.profile.profile_flags import FILES, ProfileConfig, check_options
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.building import check_img_size
from visionattn.models.devices import pick_device
from visionattn.ops.published_costs import N1

EXAMPLE = "--models taylorshift_vit_t vit_tiny_patch16_224+eager"
EXAMPLE += " --img-size 256 384 --fit-from 256 --depth 1"
SHARE_OF_AVAILABLE = 0.8
"""The default budget on a CPU, as a share of the available memory."""
SERIES = ("model", "pass", "precision", "form", "checkpointing")
"""Columns that identify a line of the plot."""
NAMES = (*SERIES, "px", "tokens")


def profile(argv: Sequence[str], show: Callable[[str], None]) -> None:
    """Measure the cases that the flags select; ``show`` gets the lines of the table.

    Raises:
        ValueError, OSError: a wrong flag or an unwritable file; raised before measuring if
            possible.
        Failed: a cell failed for another reason than memory. Its row says why, and the other rows
            are written.
        OutOfMemory: the cell of the snapshot does not fit into memory.
    """
    about = (
        "Measure the peak memory of models over image sizes, and its parts. Each cell runs in its "
        "own process."
    )
    config = parse(ProfileConfig, argv, command="profile", description=about, example=EXAMPLE)
    check_options(config)
    device = str(pick_device(config.device))
    if config.snapshot and device == "cpu":
        raise ValueError("snapshot is for a GPU, whose allocations PyTorch records; remove it")
    shapes = shapes_of(config)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(config.threads or before)
        budget_bytes = budget_of(config, device)
        provenance = provenance_of(device, ["profile", *argv]) | {"budget_bytes": budget_bytes}
        table = MemoryTable(config, device, shapes, provenance, show)
        for series in config.series():
            if config.largest:
                patch = math.lcm(*shapes[series.name].patch)
                count = largest_fit(partial(table.fits_patches, series, patch))
                show(f"largest image of {series.label} that fits: {count * patch} px")
            for px in config.sizes_px:
                table.fits(replace(series, size=px))
        show("\n".join(table.footer))
    finally:
        torch.set_num_threads(before)
    rows = table.rows
    failed = [row for row in rows if row["status"].startswith("failed")]
    if failed:
        raise Failed(
            f"{len(failed)} of {len(rows)} cells failed; {failed[0]['model']}: "
            f"{failed[0]['status']}"
        )
    if config.snapshot:
        if rows[0]["status"] != "ok":
            raise OutOfMemory(
                f"{config.snapshot} is not written: the cell does not fit into memory"
            )
        case = replace(config.series()[0], size=rows[0]["px"])
        given = {"case": asdict(case), "device": device, "threads": config.threads or before}
        given["path"] = str(Path(config.snapshot).absolute())
        ask(snapshot_here, given, "the snapshot")
        show(f"snapshot: {config.snapshot}; https://pytorch.org/memory_viz shows it")


def budget_of(config: ProfileConfig, device: str) -> int | None:
    """Return the budget of a cell in bytes. Without the flag it is a share of the available memory
    on a CPU, and None on a GPU.
    """
    if config.budget_gib is not None:
        return int(config.budget_gib * 2**30)
    return int(SHARE_OF_AVAILABLE * free_of_machine()) if device == "cpu" else None


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that determine its number of tokens."""

    patch: tuple[int, int]
    """Height and width of a patch in pixels."""
    prefix: int
    """Number of prefix tokens, such as the class token."""
    taylor_width: int | None = None
    """Head dimension d of TaylorShift; None for another attention."""

    def tokens(self, px: int) -> int:
        """Return the number of tokens of a square image."""
        return px * px // math.prod(self.patch) + self.prefix


def shapes_of(config: ProfileConfig) -> dict[str, Shape]:
    """Return the shape of each model.

    Raises:
        ValueError: a model cannot be built or is not a vision transformer, or an image size is not
            a multiple of its patch size.
    """
    shapes = {}
    for case in config.series():
        for px in config.sizes_px:
            check_sizes(replace(case, size=px))
        model = build_model(case, "meta")
        check_img_size(model, config.sizes_px)
        attention, width = model.blocks[0].attn, None
        if isinstance(model, VisionAttnTransformer) and "identity" not in case.options:
            width = attention.head_dim if attention.attention == "taylorshift" else None
        shapes[case.name] = Shape(model.patch_embed.patch_size, model.num_prefix_tokens, width)
    return shapes


def n1_of(shapes: Iterable[Shape]) -> dict[float, str]:
    """Return texts about N1 of TaylorShift by image side in pixels, one for each head dimension.

    N1 is the published number of tokens from which the efficient form holds no more entries than
    the direct form.
    """
    return {
        math.sqrt((N1(width) - shape.prefix) * math.prod(shape.patch)): (
            f"N1 of TaylorShift, d = {width}: {N1(width):,} tokens"
        )
        for shape in shapes
        if (width := shape.taylor_width) is not None
    }


class MemoryTable:
    """The rows of a profile. Each is printed and written when ready, so that a failure loses none.

    Args:
        config: checked flags.
        device: "cpu" or a GPU.
        shapes: the shape of each model.
        provenance: provenance of the numbers, with ``budget_bytes``.
        show: gets the lines of the table.
    """

    def __init__(
        self,
        config: ProfileConfig,
        device: str,
        shapes: dict[str, Shape],
        provenance: Record,
        show: Callable[[str], None],
    ):
        self.config, self.device, self.shapes = config, device, shapes
        self.provenance, self.show = provenance, show
        self.rows: list[Record] = []
        self.parts = [part for part in PARTS if part != "reserved" or device != "cpu"]
        self.footer = ["", config.settings, f"command: {provenance['command']}"]
        columns = heading([*NAMES, *self.parts, "growth", "status"])
        self.lines = [summary(provenance), "", columns]
        show("\n".join(self.lines))

    def fits(self, case: Case) -> bool:
        """Measure a case, and return whether it fits into the budget.

        The growth exponent of a series is the slope of the least-squares line of
        ``log above_bytes`` over the logarithm of tokens.
        """
        budget = self.provenance["budget_bytes"]
        row = measure_row(case, self.shapes[case.name], self.device, budget)
        self.rows.append(row)
        own = [each for each in self.rows if all(each[key] == row[key] for key in SERIES)]
        large = [each for each in own if each["px"] >= self.config.fit_from]
        points = [(each["tokens"], each["above_bytes"]) for each in large if each["above_bytes"]]
        for each in own:
            each["growth_exponent"] = slope(points)
        growth = row["growth_exponent"]
        cells = [row[name] for name in NAMES]
        cells += [mebibytes(row[f"{part}_bytes"]) for part in self.parts]
        self.lines.append(line([*cells, "-" if growth is None else f"{growth:.2f}", row["status"]]))
        self.show(self.lines[-1])
        if self.config.output:
            self.write(Path(self.config.output))
        return row["status"] == "ok"

    def fits_patches(self, series: Case, patch_px: int, count: int) -> bool:
        """Measure a series at ``count`` patches per side, and return whether it fits."""
        return self.fits(replace(series, size=count * patch_px))

    def write(self, folder: Path) -> None:
        """Write the CSV, the plot and the table of the rows so far."""
        folder.mkdir(parents=True, exist_ok=True)
        table, plot, text = (folder / name for name in FILES)
        write_text(table, csv_text(self.rows, self.provenance))
        write_text(text, "\n".join([*self.lines, *self.footer]) + "\n")
        charts = memory_of(self.rows, n1=n1_of(self.shapes.values()))
        notes = [summary(self.provenance), *self.footer[1:]]
        how = dict(title="Peak memory of models", notes=notes)
        write_whole(plot, lambda path: png(path, charts, **how))


def measure_row(case: Case, shape: Shape, device: str, budget_bytes: int | None) -> Record:
    """Measure a case in a fresh process. Return a row with units in the names; None for a missing
    measurement.
    """
    row: Record = {
        "model": case.name,
        "pass": case.work,
        "precision": case.precision,
        "form": case.form if has_forms(case.name) else None,
        "checkpointing": "yes" if case.checkpointing else "no",
        "px": case.size,
        "tokens": shape.tokens(case.size),
        "batch": case.batch,
        "depth": case.depth,
        **{f"{part}_bytes": None for part in PARTS},
        "growth_exponent": None,
        "status": "ok",
    }
    try:
        return row | measure(case, device, budget_bytes)
    except (Failed, RuntimeError, MemoryError) as error:
        status = "out of memory" if is_out_of_memory(error) else f"failed: {error}"
        return row | {"status": status}
