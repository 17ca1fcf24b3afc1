"""What the file of weights and the folder of its run know of how they came about, for their card.

``card.py`` puts it into words.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

from visionattn.cli.parsing import parse
from visionattn.cli.untrusted import from_json, read_json
from visionattn.models.weights import Kept, read_metadata
from visionattn.training.config import TrainConfig
from visionattn.training.distil.config import DistilConfig
from visionattn.training.distil.run import DISTIL
from visionattn.training.record import BEST, CONFIG, STATUS
from visionattn.training.states import best_figures


class Figures(TypedDict):
    """What ``status.json`` says of a run that has finished, as far as a card tells it."""

    best_epoch: int
    validation_accuracy: float | None
    train_seconds: float
    test_accuracy: NotRequired[float | None]
    test_images: NotRequired[int | None]


class Provenance(TypedDict):
    """What a run depends on, as far as a card tells it."""

    torch: str
    visionattn: str
    processor: NotRequired[str]
    device: NotRequired[str]
    commit: NotRequired[str | None]


class Status(TypedDict):
    """``status.json``."""

    status: str
    result: Figures | None
    provenance: Provenance


@dataclass(frozen=True)
class RunFacts:
    """What is known; None where neither the file nor the folder says it."""

    config: TrainConfig | None = None
    status: Status | None = None
    validation_loss: float | None = None
    """Of these weights."""
    distilled: DistilConfig | None = None
    """The distillation of which the run is a stage."""
    stage: str | None = None
    """Which one it is."""
    converted_from: str | None = None
    """Whose weights a file has as ``visionattn convert`` wrote them: trained ones do not say it."""
    source_license: str | None = None
    """Licence of those, as timm tells it."""


def facts_beside(checkpoint: Path) -> RunFacts:
    """Read what the file of a checkpoint says, and what lies beside it: nothing, unless it is the
    best one of a run.

    Raises:
        ValueError, OSError: a file of the run is garbled; one line.
    """
    metadata = read_metadata(checkpoint)
    if source := metadata.get("converted_from"):
        said = metadata.get("pretrained_cfg", "{}")
        kept = from_json(Kept, said, f"pretrained_cfg of {checkpoint}")
        return RunFacts(converted_from=source, source_license=kept.get("license"))
    config, status = checkpoint.with_name(CONFIG), checkpoint.with_name(STATUS)
    if checkpoint.name != BEST or not config.is_file():
        return RunFacts()
    known, told = parse(TrainConfig, ["--config", str(config)]), None
    if status.is_file():
        told = read_json(Status, status, "delete it to share without its figures")
    figures, folder = best_figures(checkpoint), checkpoint.absolute().parent
    distilled = None
    if (folder.parent / DISTIL).is_file():
        read = parse(DistilConfig, ["--config", str(folder.parent / DISTIL)])
        distilled = read if folder.name in read.stages else None
    return RunFacts(
        config=known,
        status=told,
        validation_loss=figures.loss if figures else None,
        distilled=distilled,
        stage=folder.name if distilled else None,
    )
