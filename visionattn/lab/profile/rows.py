"""Rows: what came of cases, the exponents of their growth, and both as tables. It measures
nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from visionattn.cli.tables import Record, line, mebibytes
from visionattn.lab.cases import Case
from visionattn.lab.figures import slope
from visionattn.lab.networks import has_forms
from visionattn.lab.profile.process import Bytes

COLUMNS = (
    "model",
    "px",
    "tokens",
    "pass",
    "precision",
    "form",
    "checkpointing",
    "peak",
    "reserved",
    "peak above start",
)
COLUMNS += ("parameters", "gradients", "optimiser", "activations", "growth", "status")
LARGEST_COLUMNS = (
    "model",
    "pass",
    "precision",
    "form",
    "checkpointing",
    "largest px",
    "tokens",
    "peak",
)
LARGEST_COLUMNS += ("too large px", "status")


@dataclass(frozen=True)
class Row:
    """The result of a case."""

    case: Case
    tokens: int
    bytes: Bytes | None = None
    status: str = "ok"
    """"ok", "out of memory", "failed: ..."; only "ok" has bytes."""


@dataclass(frozen=True)
class Largest:
    """The largest image of a series that fits."""

    fits: Row | None
    """None where not even one patch fits, or a case failed before."""
    beyond: Row
    """The next size, one patch more a side, which does not."""

    @property
    def status(self) -> str:
        """The word "ok", "nothing fits", or how a case failed."""
        if self.beyond.status.startswith("failed"):
            return self.beyond.status
        return "ok" if self.fits else "nothing fits"


def growth(rows: Sequence[Row], fit_from_px: int) -> float | None:
    """Return the exponent p of ``above_bytes ~ tokens ** p``: the slope of the least-squares line
    through the logarithms.

    Args:
        rows: of one series.
        fit_from_px: smaller images are left out, where what does not grow outweighs what does.

    Returns:
        p; None for fewer than two sizes that were measured.
    """
    fitted = [
        (row.tokens, row.bytes.above_bytes)
        for row in rows
        if row.bytes and row.bytes.above_bytes > 0 and row.case.size >= fit_from_px
    ]
    return slope(fitted)


def growths(rows: Sequence[Row], fit_from_px: int) -> dict[Case, float | None]:
    """Return the exponent of each series."""
    return {
        key: growth([row for row in rows if row.case.series == key], fit_from_px)
        for key in {r.case.series for r in rows}
    }


def names_of(case: Case) -> Record:
    """Return what a series is, in words."""
    names = {"model": case.name, "pass": case.work, "precision": case.precision}
    names["form"] = case.form if has_forms(case.name) else None
    return names | {"checkpointing": "no" if not case.checkpointing else "yes"}


def record_of(row: Row, exponent: float | None) -> Record:
    """Return a row as plain values, bytes where the name says so; None where nothing
    was measured.
    """
    empty = dict.fromkeys(Bytes.__dataclass_fields__)
    record = names_of(row.case) | {
        "px": row.case.size,
        "tokens": row.tokens,
        "batch": row.case.batch,
        "depth": row.case.depth,
    }
    return (
        record
        | (asdict(row.bytes) if row.bytes else empty)
        | {"growth_exponent": exponent, "status": row.status}
    )


def cells_of(row: Row, exponent: float | None) -> list[str | int | None]:
    """Return a row for people, under ``COLUMNS``."""
    names, sizes = names_of(row.case), row.bytes
    cells = [
        names["model"],
        row.case.size,
        row.tokens,
        *(names[key] for key in ("pass", "precision", "form", "checkpointing")),
    ]
    parts = ("peak", "reserved", "above", "parameters", "gradients", "optimizer", "activations")
    cells += [mebibytes(getattr(sizes, f"{part}_bytes")) if sizes else None for part in parts]
    return [*cells, "-" if exponent is None else f"{exponent:.2f}", row.status]


def columns_on(device: str) -> list[int]:
    """Return the indices of the ``COLUMNS`` that this device has: a CPU reserves nothing."""
    return [i for i, name in enumerate(COLUMNS) if name != "reserved" or device != "cpu"]


def last_line(rows: Sequence[Row], fit_from_px: int, device: str) -> str:
    """Return the last row as a line of the table for people; its exponent is that of its series as
    far as that was measured.
    """
    cells = cells_of(rows[-1], growths(rows, fit_from_px)[rows[-1].case.series])
    return line([cells[i] for i in columns_on(device)])


def largest_record(found: Largest) -> Record:
    """Return the largest image as plain values."""
    case, fits = found.beyond.case, found.fits
    record = names_of(case) | {"batch": case.batch, "depth": case.depth}
    record |= {
        "largest_px": fits and fits.case.size,
        "tokens": fits and fits.tokens,
        "too_large_px": case.size,
    }
    sizes = asdict(fits.bytes) if fits else dict.fromkeys(Bytes.__dataclass_fields__)
    return record | sizes | {"status": found.status}


def largest_cells(found: Largest) -> list[str | int | None]:
    """Return the largest image for people, under ``LARGEST_COLUMNS``."""
    record = largest_record(found)
    names = [record[key] for key in ("model", "pass", "precision", "form", "checkpointing")]
    return [
        *names,
        record["largest_px"],
        record["tokens"],
        mebibytes(record["peak_bytes"]),
        record["too_large_px"],
        found.status,
    ]
