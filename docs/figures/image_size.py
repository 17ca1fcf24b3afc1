"""Whole models over the size of an image: ``image-size.csv`` and ``image-size.png``.

python docs/figures/image_size.py   # measures for hours
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from visionattn.cli.provenance import provenance_of
from visionattn.cli.tables import Record
from visionattn.lab.case_comparison import MeasurementPlan
from visionattn.lab.cases import Case
from visionattn.lab.charts import Chart
from visionattn.lab.figures import size_chart, value_of
from visionattn.lab.papers import Figure, images_per_second, mebibytes_of, redraw

MODELS = {
    "vit_small_patch16_224": "timm ViT-S (softmax)",
    "taylorshift_vit_s+heads=12": "taylorshift_vit_s",
    "scaleformer_vit_s+heads=12": "scaleformer_vit_s",
}


def size_cases(quick: bool) -> Iterator[list[Case]]:
    """Yield the cases of small models on one image."""
    for size in (32, 64) if quick else (512, 1024, 1536, 2048, 3072, 4096):
        yield [Case("model", name, size) for name in MODELS]


def size_plan(size: int) -> MeasurementPlan:
    """Plan fewer rounds where a forward takes longer; timm's takes many minutes above 2,048 px."""
    rounds = 5 if size <= 1024 else 3 if size < 2048 else 2
    how = dict(first_call=size > 2048, clock=time.process_time)
    return MeasurementPlan(rounds=rounds, seconds=0.0, **how)


def size_table(rows: Sequence[Record]) -> list[Record]:
    """Make the table of speed and memory by size, and how many times as fast as timm's."""
    table: dict[int, Record] = {}
    for row in rows:
        speed = images_per_second(row)
        peak = mebibytes_of(row)
        ratio = value_of(row, "ratio_median")
        record, name = table.setdefault(int(row["size"]), {"px": int(row["size"])}), row["case"]
        record[f"{name} images/s"] = speed and f"{speed:.3g}"
        record[f"{name} MiB"] = peak and f"{peak:,.0f}"
        record[f"{name} / timm's speed"] = ratio and f"{1 / ratio:.3g}"
    return list(table.values())


def size_charts(rows: Sequence[Record]) -> list[Chart]:
    """Draw up charts of images per second and peak memory over the side of an image; beside the
    names how many times as fast as timm's model the others are at the largest size.
    """
    last = size_table(rows)[-1]

    def fast(case: str) -> str:
        times = last.get(f"{case} / timm's speed")
        times = None if case == next(iter(MODELS)) else times
        if not times:
            return MODELS[case]
        # No-break spaces keep the second part in one line of the legend.
        faster = f"{float(times):.2g} × timm at {last['px']:,} px"
        return f"{MODELS[case]}, " + faster.replace(" ", "\N{NO-BREAK SPACE}")

    unit = "peak MiB above weights and image"
    return [
        size_chart("Speed", "images per second", rows, images_per_second, names=fast,
                   log_x=None, failed_below=True),
        size_chart("Memory", unit, rows, mebibytes_of, names=MODELS.__getitem__,
                   log_x=None, log_y=None, from_zero=True),
    ]  # fmt: skip


FIGURE = Figure(
    "Speed and memory over image size: one image, float32, one processor thread",
    size_cases,
    size_charts,
    size_table,
    size_plan,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    provenance = provenance_of("cpu", []) | {"command": "python docs/figures/image_size.py"}
    provenance["device"] += ", CPU time"
    redraw(FIGURE, Path(__file__).parent, "image-size", provenance, print)
