"""What the models that come with weights can do and take: ``python -m visionattn.lab.pretrained``
measures the tables of ``docs/pretrained.md``.

Accuracy is that of ``visionattn validate`` on test images of the task, seconds and memory those of
a forward of one square image of the size.
"""

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from visionattn.cli.ends import run_tool
from visionattn.cli.files import check_free, write_text
from visionattn.cli.parsing import Parser, whole_from
from visionattn.cli.provenance import provenance_of, summary
from visionattn.cli.tables import Record, csv_text, duration, heading, line, mebibytes
from visionattn.data.config import DataConfig
from visionattn.lab.cases import Case
from visionattn.lab.compare import Plan, measure_together, spread
from visionattn.models.shipped import FILES
from visionattn.training.config import ValidateConfig
from visionattn.training.validate import Validation

LEAST_BYTES = 2**20
"""Less is not told exactly: the system counts memory in pages."""
COLUMNS = ("px", "accuracy", "time", "peak memory")


@dataclass(frozen=True)
class Task:
    """The data and the sizes at which a model is evaluated."""

    data: DataConfig
    sizes: tuple[int, ...]
    """In pixels; of documents the longest side."""


TASKS = {
    "digits": Task(DataConfig(name="digits", workers=1), (32, 48, 64)),
    "canvas": Task(
        DataConfig(name="canvas", args={"eval_images": 2000}, workers=1),
        (64, 96, 128, 192, 256, 384),
    ),
    "documents": Task(
        DataConfig(name="documents", args={"eval_images": 1000}, workers=1), (256, 512, 768, 1024)
    ),
}
"""By the last word of a model's name."""


def measure(name: str, task: Task, threads: int) -> Iterator[Record]:
    """Yield a row of plain values for each size: accuracy in [0, 1], seconds of a forward of one
    image, its peak memory in bytes; None where there was not enough memory.

    Args:
        name: a model that comes with weights.
        task: what it is evaluated on.
        threads: of torch; with one, seconds are those that a processor spent, so that other work
            does not count.
    """
    config = ValidateConfig(str(FILES[name]), [*task.sizes], data=task.data, threads=threads)
    plan = Plan(check=False, flops=False, kept=False, processor_time=threads == 1)
    for size, row in zip(task.sizes, Validation(config).rows(), strict=True):
        taken = measure_together([Case("model", name, size)], plan)[0]
        told = row.result and {"images": row.result.images, "accuracy": row.result.accuracy}
        record = {"model": name, "size": size} | (told or {"images": None, "accuracy": None})
        record |= spread("seconds", taken.seconds) | {"peak_bytes": taken.peak_bytes}
        yield record | {"status": taken.status if row.result else "out of memory"}


def cells(record: Record) -> list[str | None]:
    """Return a row for people, under ``COLUMNS``."""
    accuracy, seconds = record["accuracy"], record["seconds_median"]
    peak = mebibytes(record["peak_bytes"])
    return [
        str(record["size"]),
        "out of memory" if accuracy is None else f"{100 * accuracy:.1f} %",
        None if seconds is None else duration(seconds),
        peak if peak is None or record["peak_bytes"] >= LEAST_BYTES else "below 1 MiB",
    ]


def section(name: str, records: Sequence[Record]) -> str:
    """Return the name and the table of a model, in Markdown."""
    return "\n".join([f"`{name}`:", "", heading(COLUMNS), *(line(cells(r)) for r in records)])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a section for each model, and write the rows; return the exit code."""
    about = "Measure accuracy, seconds and memory of the models that come with weights."
    parser = Parser("python -m visionattn.lab.pretrained", description=about)
    parser.add_argument("names", nargs="*", help="models; none: all")
    parser.add_argument("--threads", type=whole_from(1, 1024), default=1, help="threads of torch")
    images = "fewer test images than in docs/pretrained.md, of canvas and documents"
    parser.add_argument("--eval-images", type=whole_from(1), help=images)
    parser.add_argument("--csv", help="file for the rows, which is replaced")
    flags = parser.parse_args(argv)

    def work() -> None:
        names = flags.names or [*FILES]
        if unknown := [name for name in names if name not in FILES]:
            raise ValueError(
                f"{unknown[0]} comes without weights; those with are {', '.join(FILES)}"
            )
        if flags.csv:
            check_free(Path(flags.csv), overwrite=True)
        words = ["python", "-m", "visionattn.lab.pretrained", *(argv or sys.argv[1:])]
        provenance = provenance_of("cpu", [], threads=flags.threads)
        provenance["command"] = shlex.join(words)
        print(summary(provenance), flush=True)
        before, records = torch.get_num_threads(), []
        try:
            for name in names:
                task = TASKS[name.rpartition("_")[2]]
                if flags.eval_images:
                    args = {"eval_images": flags.eval_images} if task.data.args else {}
                    task = replace(task, data=replace(task.data, args=args))
                found = list(measure(name, task, flags.threads))
                print(f"\n{section(name, found)}", flush=True)
                records += found
        finally:
            torch.set_num_threads(before)
        if flags.csv:
            write_text(flags.csv, csv_text(records, provenance))

    return run_tool(work)


if __name__ == "__main__":
    raise SystemExit(main())
