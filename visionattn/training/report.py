"""The last lines of a run: what came of it, and what to type next."""

from pathlib import Path

from visionattn.cli.commands import typed
from visionattn.training.config import TrainConfig
from visionattn.training.progress import Result
from visionattn.training.record import CONFIG


def report(config: TrainConfig, result: Result) -> list[str]:
    """Say what came of a finished run. The last line is the score on the test images, or on the
    validation images where there are none; no other line has a percentage.

    Args:
        config: the run.
        result: what it came to.
    """
    lines = [
        f"trained in {result.seconds:.0f} seconds",
        f"best weights (of epoch {result.best_epoch}): {result.checkpoint}",
        "try next:",
        *(f"  {command}" for command in next_commands(config, result)),
    ]
    return [*lines, reached(result)]


def reached(result: Result) -> str:
    """Return a line with the score of a run, or the loss where its images have no classes."""
    if result.test is None:
        if result.validation is None:
            return f"the least validation loss is that of epoch {result.best_epoch}"
        return (
            f"validation {result.measure} {100 * result.validation:.1f} % (there is no test split)"
        )
    if result.test.score is None:
        return f"test loss {result.test.loss:.4f}{result.unit}"
    return f"test {result.measure} {100 * result.test.score:.1f} %"


def next_commands(config: TrainConfig, result: Result) -> list[str]:
    """Return commands that work as they are and judge what came of the run: the weights at several
    image sizes, which say whether a larger one is worth a fine-tuning; written samples.
    """
    best = str(result.checkpoint)
    if config.data.task == "generate":
        samples = str(result.folder / "samples.png")
        return [
            typed("generate", best, "--output", samples),
            typed("validate", "--checkpoint", best),
        ]
    validate = ["validate", "--checkpoint", best]
    if result.sizes_px:
        square = all(rows == columns for rows, columns in result.sizes_px)
        sizes = [str(rows) for rows, _ in result.sizes_px]
        if not square:
            sizes = [str([list(each) for each in result.sizes_px])]
        validate += ["--img-size", *sizes]
    return [typed(*validate)]


def how_to_resume(config: TrainConfig) -> str:
    """Return the command that goes on with a run."""
    kept = Path(config.output) / config.run / CONFIG
    return typed("train", "--config", str(kept), "--resume")
