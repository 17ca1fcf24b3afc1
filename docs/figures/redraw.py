"""Draws figures from their CSV files, without measuring: ``python docs/figures/redraw.py``."""

from pathlib import Path

from image_size import FIGURE

from visionattn.cli.tables import Record, read_rows
from visionattn.lab.charts import Chart, Look
from visionattn.lab.figures import chosen, distinct, heads_of, memory_of, over, scaled
from visionattn.lab.papers import FIGURES, draw
from visionattn.lab.profile.memory_profile import Shape, n1_of

CONTROLS = {
    "area": "Fragments by area, 4 per 128 x 128 px",
    "four": "4 fragments on every canvas",
}
"""Titles of the controls of ``canvas``, as the column ``control`` of ``quality.csv`` has them."""


def quality_of(rows: list[Record]) -> list[Chart]:
    """Return accuracy over the side of the test images: a chart per control, means over seeds."""
    sizes = sorted({float(row["img_size"]) for row in rows})
    axis = {"log_x": 2, "x_ticks": sizes}
    charts = []
    for (control,) in distinct(rows, "control"):
        series = [
            over(chosen(rows, ("model", "control"), (model, control)), "img_size",
                 scaled("accuracy", 100), model, Look.of(number), spread=True)
            for number, (model,) in enumerate(distinct(rows, "model"))
        ]  # fmt: skip
        names = "size of the test images in px", "test accuracy in %"
        charts.append(Chart(CONTROLS[control], *names, series, **axis))
    return charts


DRAWN = {name: (figure.title, figure.charts) for name, figure in FIGURES.items()}
DRAWN["image-size"] = FIGURE.title, FIGURE.charts
DRAWN["heads-digits"] = (
    "Head counts of a pixel model on digits, images of 32 px",
    lambda rows: heads_of(rows, "32"),
)
DRAWN["quality"] = (
    "canvas: models trained at 48 to 80 px, 4 epochs; bands: standard deviation over seeds",
    quality_of,
)
DRAWN["memory"] = (
    "Memory of one block of small models, one image, float32",
    lambda rows: memory_of(rows, n1=n1_of([Shape((16, 16), 1, 64)])),
)

for name, (title, charts) in DRAWN.items():
    path = Path(__file__).with_name(f"{name}.csv")
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(read_rows(file))
    draw(path.with_suffix(".png"), title, charts(rows), rows[0])
