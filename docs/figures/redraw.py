"""Draws figures from their CSV files, without measuring: ``python docs/figures/redraw.py``."""

from pathlib import Path

from image_size import FIGURE

from visionattn.cli.tables import Record, read_rows
from visionattn.lab.charts import Chart, SeriesStyle
from visionattn.lab.figures import chosen, distinct, heads_of, memory_of, over, scaled
from visionattn.lab.papers import FIGURES, draw

CONTROLS = {
    "area": "4 distractors per 128 x 128 px",
    "four": "4 distractors per image",
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
                 scaled("accuracy", 100), model, SeriesStyle.of(number), spread=True)
            for number, (model,) in enumerate(distinct(rows, "model"))
        ]  # fmt: skip
        names = "side of the test images in px", "test accuracy in %"
        charts.append(Chart(CONTROLS[control], *names, series, **axis))
    return charts


def losses_of(rows: list[Record]) -> list[Chart]:
    """Return the training loss over images, a series per model."""
    series = [
        over(chosen(rows, ("model",), (model,)), "images", scaled("train_loss", 1), model,
             SeriesStyle.of(number))
        for number, (model,) in enumerate(distinct(rows, "model"))
    ]  # fmt: skip
    return [Chart("", "training images", "mean loss of 50 steps (chance: 2.303)", series)]


NAMES = {
    "vit_small_patch16_224": "timm ViT-S, fused attention",
    "vit_small_patch16_224+eager": "timm ViT-S, attention matrix stored",
}
"""Models of ``memory.csv`` in words."""

DRAWN = {name: (figure.title, figure.charts) for name, figure in FIGURES.items()}
DRAWN["image-size"] = FIGURE.title, FIGURE.charts
DRAWN["heads-digits"] = (
    "Accuracy, speed and memory over the number of heads (digits, 1,024 pixels as tokens)",
    lambda rows: heads_of(rows, "32"),
)
DRAWN["quality"] = (
    "Accuracy on canvases larger than in training (48 to 80 px); bands: standard deviation",
    quality_of,
)
DRAWN["cifar10-pixel"] = (
    "Loss of pixel models on CIFAR-10, first hour on one core",
    losses_of,
)
DRAWN["memory"] = (
    "Memory over image size: one block, one image, float32",
    lambda rows: memory_of(
        [row | {"model": NAMES.get(row["model"], row["model"])} for row in rows]
    ),
)

for name, (title, charts) in DRAWN.items():
    path = Path(__file__).with_name(f"{name}.csv")
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(read_rows(file))
    draw(path.with_suffix(".png"), title, charts(rows), rows[0])
