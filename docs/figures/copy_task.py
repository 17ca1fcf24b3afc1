"""Loss over steps of runs of ``configs/copy.yaml``: ``copy.csv`` and ``copy.png``, as figure 2 of
Katharopoulos et al. 2020.

    python docs/figures/copy_task.py checkpoints/copy*
"""

import csv
import json
import math
import sys
from pathlib import Path

import yaml

from visionattn.cli.files import write_text
from visionattn.cli.provenance import provenance_of
from visionattn.cli.tables import csv_text
from visionattn.lab.charts import Chart, Mark, Series, SeriesStyle
from visionattn.lab.papers import draw

NAMES = {"softmax": "softmax", "elu1": "elu + 1", "relu": "relu", "random": "random (FAVOR+)"}
FOLDER = Path(__file__).parent


def rows_of(run: Path) -> list[dict]:
    """Return the losses of a run in nats per counted value: means since the row before."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    args = config["model"]["args"]
    softmax = args.get("attention") == "softmax"
    about = {"length": config["data"]["img_size"][1], "width": args["embed_dim"]}
    about["attention"] = "softmax" if softmax else args.get("feature_map") or "elu1"
    about["seed"] = config["seed"]
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        about | {"step": line["step"], "nats": round(line["loss"] * math.log(2), 4)}
        for line in lines
        if line["kind"] == "train" and line["loss"] is not None
    ]


def charts_of(rows: list[dict]) -> list[Chart]:
    """Return a chart per length; seeds share a color, and the last one carries the name."""
    charts = []
    for length, width in sorted({(row["length"], row["width"]) for row in rows}, reverse=True):
        series = []
        for number, (attention, name) in enumerate(NAMES.items()):
            own = [r for r in rows if (r["length"], r["attention"]) == (length, attention)]
            seeds = sorted({row["seed"] for row in own})
            for seed in seeds:
                points = [(row["step"], row["nats"]) for row in own if row["seed"] == seed]
                label = name if seed == seeds[-1] else ""
                series.append(Series(label, SeriesStyle.of(number), *zip(*points, strict=True)))
        title = f"Sequences of {length}, width {width}"
        mark = [Mark("0.1 nats", y=0.1)]
        charts.append(
            Chart(
                title,
                "training step",
                "nats per symbol of the repeated word; chance: 2.3",
                series,
                mark,
                log_y=10,
            )
        )
    return charts


if len(sys.argv) > 1:
    rows = [row for folder in sys.argv[1:] for row in rows_of(Path(folder))]
    provenance = provenance_of("cpu", []) | {"command": "python docs/figures/copy_task.py"}
    write_text(FOLDER / "copy.csv", csv_text(rows, provenance))
with open(FOLDER / "copy.csv", newline="") as file:  # also without runs: draws the figure again
    text = list(csv.DictReader(file))
numbers = {"length": int, "width": int, "seed": int, "step": int, "nats": float}
rows = [row | {key: kind(row[key]) for key, kind in numbers.items()} for row in text]
title = "Copy task: training loss (4 layers, 8 heads, batch 64; one line per seed)"
draw(FOLDER / "copy.png", title, charts_of(rows), rows[0])
