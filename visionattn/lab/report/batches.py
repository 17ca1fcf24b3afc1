"""The first batches of runs as their models saw them. It knows nothing of pages.

Runs with the same data, augmentation, batches and patches share a sheet.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from PIL import Image

from visionattn.cli.parsing import parse
from visionattn.lab.report.runs import Run, for_each
from visionattn.training.config import TrainConfig, check
from visionattn.training.first_batches import draw_sheet, first_batches
from visionattn.training.record import CONFIG

MOST_PX = 1600
"""Sheets are at most so wide and so high."""
PNG_BYTES = 300_000
"""Sheets that take more than this as PNG are shown as JPEG."""


@dataclass
class Batches:
    """The first batches that some runs share."""

    source: str
    """The sheet, as a data address."""
    runs: list[str] = field(default_factory=list)


def batches_of(runs: Sequence[Run]) -> tuple[list[Batches], dict[str, str]]:
    """Draw the first batches of training and of validation of each run.

    Returns:
        The sheets, and for the runs that have none the reason, a line each.
    """
    found: dict[str, Batches] = {}

    def add(run: Run) -> None:
        config = config_of(run)
        key = repr(seen(config))
        if key not in found:
            sheet = draw_sheet(first_batches(config), most_px=MOST_PX)
            found[key] = Batches(address(sheet))
        found[key].runs.append(run.name)

    skipped = for_each(runs, add)
    return list(found.values()), skipped


def config_of(run: Run) -> TrainConfig:
    """Return the configuration of a run, such that making its batches fetches, starts and sets
    nothing.

    Raises:
        ValueError, OSError: there is none, or it is not one of this version; one line.
    """
    path = run.folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"there is no {CONFIG}")
    config = parse(TrainConfig, ["--config", str(path)])
    config.data = replace(config.data, download=False)
    config.optim = replace(config.optim, ema_decay=None)
    config = replace(config, threads=None, init_from=None, resume=False, show_batch=None)
    check(config)
    return config


def seen(config: TrainConfig) -> list:
    """Return the options that first batches depend on."""
    optim = config.optim
    mixing = [optim.mixup, optim.cutmix, optim.label_smoothing]
    batches = [config.batch_size, config.eval_batch_size, config.seed]
    return [asdict(config.data), asdict(config.model), mixing, batches]


def address(sheet: Image.Image) -> str:
    """Return a sheet as a data address: PNG, or JPEG where that would be large."""
    kind, stream = "png", io.BytesIO()
    sheet.save(stream, format="PNG", optimize=True)
    if len(stream.getvalue()) > PNG_BYTES:
        kind, stream = "jpeg", io.BytesIO()
        sheet.save(stream, format="JPEG", quality=85)
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"
