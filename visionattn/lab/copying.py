"""How fast models learn to copy: ``python -m visionattn.lab.copying checkpoints/copy_*`` draws the
loss of runs of ``configs/copy.yaml`` over their steps, a chart for each length of the sequences and
a line for each run, and writes the same as CSV.

Losses of a run are in bits for each value that counts, those drawn in nats, as in the paper.

Source: Katharopoulos et al. 2020, figure 2 (convergence on a sequence duplication task).
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from visionattn.cli.ends import run_tool
from visionattn.cli.files import check_free, write_text
from visionattn.cli.parsing import Parser
from visionattn.cli.provenance import provenance_of
from visionattn.cli.tables import Record, csv_text, markdown
from visionattn.lab.charts import Chart, Look, Mark, Series
from visionattn.lab.report.rows import chosen, distinct
from visionattn.lab.report.runs import Run, is_run, number, read_run

TITLE = "Copying a word of 10 symbols: 4 layers, 8 heads, batch 64, RAdam"
NAMES = {"softmax": "softmax", "elu1": "elu + 1", "relu": "relu", "random": "random (FAVOR+)"}
"""Attentions and feature maps, in the order of their lines."""
CONVERGED = 0.1
"""Nats for each value; a guess is ln 10 = 2.3."""
CHART = ("length", "width")
"""The columns that a chart has one value of."""
LINE = (*CHART, "attention", "seed")
"""Those that a line has one value of."""


def rows_of(run: Run) -> list[Record]:
    """Return a row for each line that a run wrote about its steps: the loss in nats is the mean
    over the steps since the line before.

    Raises:
        ValueError: it is no run that learnt to copy, or it has learnt nothing yet.
    """
    if run.setting("data", "name") != "copy" or not run.steps:
        raise ValueError(f"{run.folder} has no losses of a training with data.name copy")
    args = run.setting("model", "args") or {}
    softmax = args.get("attention") == "softmax"
    shared = {
        "length": run.setting("data", "img_size")[1],
        "width": args["embed_dim"],
        "attention": "softmax" if softmax else args.get("feature_map") or "elu1",
        "seed": run.setting("seed"),
    }
    return [
        shared | {"step": line["step"], "nats": round(loss * math.log(2), 4)}
        for line in run.steps
        if (loss := number(line.get("loss"))) is not None
    ]


def charts_of(rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Draw up the loss over steps, the longest sequences first; seeds share a colour, and the last
    one has the name.
    """
    charts = []
    for length, width in sorted(distinct(rows, *CHART), key=lambda pair: -int(pair[0])):
        here = chosen(rows, CHART, (length, width))
        series = []
        for i, (attention, name) in enumerate(NAMES.items()):
            of_map = chosen(here, ("attention",), (attention,))
            seeds = [seed for (seed,) in distinct(of_map, "seed")]
            for seed in seeds:
                own = chosen(of_map, ("seed",), (seed,))
                x, y = ([float(row[key]) for row in own] for key in ("step", "nats"))
                series.append(Series(name if seed == seeds[-1] else "", Look(i), x, y))
        title = f"Sequences of {length}, width {width}"
        mark = Mark(f"{CONVERGED} nats", y=CONVERGED)
        charts.append(Chart(title, "step", "nats per value that counts", series, [mark], log_y=10))
    return charts


def ends_of(rows: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Return a row for each run: the step at which its loss first was below ``CONVERGED``, and its
    last loss.
    """
    found = []
    for key in distinct(rows, *LINE):
        own = chosen(rows, LINE, key)
        below = [row["step"] for row in own if float(row["nats"]) < CONVERGED]
        last = own[-1]
        found.append(
            dict(zip(LINE, key, strict=True))
            | {f"below {CONVERGED} at step": below[0] if below else "never"}
            | {"last step": last["step"], "nats there": f"{float(last['nats']):.3f}"}
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Read runs, print where each came to, and draw them; return the exit code."""
    parser = Parser("python -m visionattn.lab.copying", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--output", type=Path, required=True, help="PNG file; the CSV lies beside")
    flags = parser.parse_args(argv)

    def work() -> None:
        from visionattn.lab.papers import draw

        if flags.output.suffix != ".png":
            raise ValueError(f"--output must be a file that ends in .png, got {flags.output}")
        check_free(flags.output, overwrite=True)
        rows: list[Record] = []
        for folder in flags.runs:
            if not is_run(folder):
                raise ValueError(f"{folder} is no folder of a run")
            rows += rows_of(read_run(folder, folder.name, now=time.time()))
        # Each row names the command: the paths of all runs would be most of the file.
        command = f"python -m visionattn.lab.copying, {len(flags.runs)} runs"
        provenance = provenance_of("cpu", [], threads=1) | {"command": command}
        write_text(flags.output.with_suffix(".csv"), csv_text(rows, provenance))
        draw(flags.output, TITLE, charts_of(rows), provenance)
        print(markdown(ends_of(rows)))

    return run_tool(work)


if __name__ == "__main__":
    raise SystemExit(main())
