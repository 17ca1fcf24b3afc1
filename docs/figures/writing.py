"""Images per second and memory of autoregressive generation: ``writing.csv`` and ``writing.png``.

    python docs/figures/writing.py           # draws the figure from the CSV
    python docs/figures/writing.py measure   # measures first, an hour

Three ways generate images of the same sizes with models of the same width and depth: the recurrence
of kernelized attention, softmax with a cache of keys and values, and softmax without one. The
sequence has 12 segments. In every round each way is timed on some steps in the middle of each
segment, interleaved; the time of an image is the sum over segments. Seconds are processor time of
one thread. Peak memory is the last step's, state included, weights not.
"""

import csv
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from visionattn.cli.files import write_text
from visionattn.cli.fresh_process import ask
from visionattn.cli.provenance import provenance_of
from visionattn.cli.tables import csv_text
from visionattn.lab.charts import Chart, Series, SeriesStyle
from visionattn.lab.measure import peak_bytes
from visionattn.lab.papers import draw
from visionattn.models import PixelDecoder

WAYS = ("recurrence", "softmax, cache", "softmax, no cache")
SIDES, BATCHES, RELATIVE = (16, 32, 64, 128), (1, 16), ("flat", "none")
ROUNDS, STEPS, SEGMENTS = 5, 8, 12
FOLDER = Path(__file__).parent


class Writer:
    """A model in the middle of generating a batch of square images."""

    def __init__(self, way: str, relative: str, side: int, batch: int):
        torch.manual_seed(0)
        attention = "kernelized" if way == WAYS[0] else "softmax"
        self.model = PixelDecoder(
            embed_dim=128, depth=4, num_heads=4, attention=attention, relative=relative
        ).eval()
        self.size, self.values = (side, side), torch.randint(256, (batch, side**2))
        self.state = None if way == WAYS[2] else self.model.begin(batch, self.size)
        self.state_bytes = 0
        for past, _ in self.state.blocks if self.state else ():
            for held in vars(past).values():
                if isinstance(held, Tensor):
                    self.state_bytes += held.uniform_(0.5, 1.5).nbytes

    def step(self, position: int) -> Tensor:
        """Return log-probabilities ``[B, levels]`` of a value, wherever the state is."""
        if self.state is None:
            return self.model.predict(self.values[:, :position], self.size)[:, -1]
        self.state.position = position
        for past, _ in self.state.blocks:
            past.count = position
        return self.model.step(self.values[:, position - 1], self.state)

    def seconds(self, position: int, count: int) -> float:
        """Return the mean seconds of ``count`` steps from a position on, after one to warm up."""
        self.step(position)
        begin = time.process_time()
        for i in range(count):
            self.step(position + i)
        return (time.process_time() - begin) / count


def peak_here(way: str, relative: str, side: int, batch: int) -> int:
    """Return the bytes of the last step in this process."""
    torch.set_num_threads(1)

    def work() -> None:
        Writer(way, relative, side, batch).step(side**2 - 1)

    with torch.inference_mode():
        Writer(way, relative, 16, 1).step(255)  # libraries keep memory from their first calls
        return peak_bytes(work)


def measure(relative: str, side: int, batch: int) -> Iterator[dict]:
    """Yield a row for each way of generating a batch."""
    from writing import peak_here  # under a name that another process can import

    values = side**2
    # Without a cache, large batches are computed image by image.
    sizes = {way: batch if way != WAYS[2] or values <= 256 else 1 for way in WAYS}
    writers = {way: Writer(way, relative, side, size) for way, size in sizes.items()}
    steps: dict[str, list[list[float]]] = {way: [[] for _ in range(SEGMENTS)] for way in WAYS}
    for _ in range(ROUNDS):
        for segment in range(SEGMENTS):
            position = 1 + round((segment + 0.5) * (values - STEPS - 1) / SEGMENTS)
            for way, writer in writers.items():
                seconds = writer.seconds(position, 1 if way == WAYS[2] else STEPS)
                steps[way][segment].append(seconds * batch / sizes[way])
    for way in WAYS:
        medians = [statistics.median(each) for each in steps[way]]
        seconds = values * statistics.mean(medians)
        given = {"way": way, "relative": relative, "side": side, "batch": batch}
        yield {
            "way": way,
            "relative": relative,
            "values": values,
            "batch": batch,
            "seconds_median": seconds,
            "images_per_second": batch / seconds,
            "state_bytes": writers[way].state_bytes,
            "peak_bytes": ask(peak_here, given, f"{way}, {side} px"),
            "step_seconds_by_segment": " ".join(f"{each:.4g}" for each in medians),
        }


def charts(rows: list[dict]) -> list[Chart]:
    """Return images per second by position and batch, then memory and seconds of a step."""

    def over(relative: str, batch: str, column: str, scale: float = 1) -> list[Series]:
        own = [row for row in rows if (row["relative"], row["batch"]) == (relative, batch)]
        points = {
            way: [
                (int(row["values"]), float(row[column]) / scale if row[column] else None)
                for row in own
                if row["way"] == way
            ]
            for way in WAYS
        }
        return [
            Series(way, SeriesStyle.of(i), *zip(*points[way], strict=True))
            for i, way in enumerate(WAYS)
        ]

    axis = {"log_x": 4, "log_y": 10, "x_ticks": sorted({int(row["values"]) for row in rows})}
    named = {"flat": "relative position", "none": "no relative position"}
    size = "values per image (pixels x channels)"
    found = [
        Chart(f"Batch {batch}, {named[relative]}", size, "images per second",
              over(relative, batch, "images_per_second"), **axis)
        for relative in RELATIVE for batch in ("1", "16")
    ]  # fmt: skip
    memory = over("flat", "16", "peak_bytes", 2**20)
    title = "Peak memory, batch 16, relative position"
    found.append(Chart(title, size, "MiB", memory, **axis))
    last = [row for row in rows if (row["relative"], row["batch"]) == ("flat", "16")][-3:]
    values = int(last[0]["values"])
    places = [(i + 0.5) * values / SEGMENTS for i in range(SEGMENTS)]
    lines = [
        Series(
            way,
            SeriesStyle.of(i),
            places,
            [1000 * float(x) for x in row["step_seconds_by_segment"].split()],
        )
        for i, (way, row) in enumerate(zip(WAYS, last, strict=True))
    ]
    title = f"Time per value, image of {values:,} values, batch 16"
    found.append(Chart(title, "index of the value in the image", "milliseconds", lines, log_y=10))
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        torch.set_num_threads(1)
        provenance = provenance_of("cpu", []) | {
            "command": "python docs/figures/writing.py measure"
        }
        records: list[dict] = []
        with torch.inference_mode():
            for relative in RELATIVE:
                for side in SIDES:
                    for batch in BATCHES:
                        records += measure(relative, side, batch)
                        write_text(FOLDER / "writing.csv", csv_text(records, provenance))
    with open(FOLDER / "writing.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    draw(
        FOLDER / "writing.png",
        "Autoregressive generation (softmax without cache: partly extrapolated)",
        charts(rows),
        rows[0],
    )
