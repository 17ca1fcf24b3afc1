"""What came of the figures to reach on a GPU: the columns of its table, for people and as values.
It measures nothing.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from visionattn.cli.tables import Record
from visionattn.lab.compare import spread
from visionattn.lab.targets import Result

if TYPE_CHECKING:
    from visionattn.lab.gpu.expected import Expected

COLUMNS = ("what", "size", "dtype", "time", "floor", "of floor", "SDPA", "Flash", "flex", "eager")
COLUMNS += ("reach", "expected", "measured", "reached", "error", "note")


@dataclass
class GpuResult(Result):
    """The result of a target on a GPU."""

    floor_seconds: float | None = None
    sdpa: float | str | None = None
    """Seconds of ``scaled_dot_product_attention``, or of the model with it; or why there are none.
    """
    flash: float | str | None = None
    """Seconds of FlashAttention, as ``scaled_dot_product_attention`` has it; or why there are none.
    """
    flex: float | str | None = None
    """Seconds of ``flex_attention``, compiled; or why there are none."""
    eager: float | str | None = None
    """Seconds of the same form in PyTorch's own operations; or why there are none."""
    error: float | None = None
    """Largest relative error of an output or a gradient."""
    notes: list[str] = field(default_factory=list)

    @property
    def expected(self) -> "Expected | None":
        """What the counts of machine code let expect; None where they say nothing."""
        from visionattn.lab.gpu.expected import expected_on

        return expected_on(self.gpu, self.target)

    def record(self) -> Record:
        """Return the result as plain values."""
        figure, seconds = self.target, self.seconds
        record = {
            "what": figure.what,
            "size": figure.at,
            "dtype": figure.case.precision,
            "status": self.status,
        }
        record |= spread("seconds", seconds)
        fraction = self.floor_seconds / seconds.median if seconds and self.floor_seconds else None
        record |= {
            "floor_seconds": self.floor_seconds,
            "of_floor": fraction,
            "sdpa_seconds": self.sdpa,
        }
        record |= {
            "flash_seconds": self.flash,
            "flex_seconds": self.flex,
            "eager_seconds": self.eager,
        }
        expected = self.expected
        record |= {"expected_seconds": expected and expected.seconds}
        record |= {"reach": figure.reach, "expected": expected and expected.text(figure)}
        record["measured"] = [
            value if math.isfinite(value) else None for value in self.values
        ] or None
        record |= {"shown": self.shown, "reached": self.reached, "error": self.error}
        return record | {"note": "; ".join(self.notes) or None}

    def cells(self) -> list[str | None]:
        """Return the result for people, under ``COLUMNS``."""
        record = self.record()
        times = [milliseconds(record[name]) for name in COLUMNS_OF_TIME]
        fraction = None if record["of_floor"] is None else f"{100 * record['of_floor']:.0f} %"
        error = None if self.error is None else f"{self.error:.1e}"
        named = [record[name] for name in ("what", "size", "dtype")]
        marks = [record[name] for name in ("reach", "expected", "shown", "reached")]
        return [*named, *times[:2], fraction, *times[2:], *marks, error, record["note"]]


COLUMNS_OF_TIME = (
    "seconds_median",
    "floor_seconds",
    "sdpa_seconds",
    "flash_seconds",
    "flex_seconds",
    "eager_seconds",
)


def milliseconds(seconds: float | str | None) -> str | None:
    """Write three digits, in milliseconds; a reason as it is."""
    return seconds if seconds is None or isinstance(seconds, str) else f"{1e3 * seconds:.3g} ms"
