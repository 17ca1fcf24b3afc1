"""The last lines of a distillation: what came of it, and what to type next."""

from visionattn.cli.commands import typed
from visionattn.training.distil.run import Distilled


def report(result: Distilled) -> list[str]:
    """Say what came of a distillation; the last line says how good its weights are."""
    best = str(result.checkpoint)
    lines = [
        f"best weights: {best}",
        "try next, where the classes of the images are the teacher's:",
        f"  {typed('validate', '--checkpoint', best)}",
        "on other images:",
        f"  {typed('features', '--checkpoint', best, '--images', 'FOLDER')}",
    ]
    return [*lines, result.line] if result.line else lines
