"""The model card of a checkpoint: what its file and the folder of its run say, for people.

The text is laid out like timm's cards. Paths, which are private, are cut to their last part.
"""

import json
import shlex
from functools import reduce
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from timm.models._hub import generate_readme
from torch import nn

from visionattn.cli.files import printable
from visionattn.cli.parsing import field_types, parse
from visionattn.cli.untrusted import from_json, read_json
from visionattn.data.data_checks import EMBEDDED
from visionattn.data.geometry import geometry_of
from visionattn.models.building import patch_size
from visionattn.models.conversion import HUBS, SOURCES, is_file
from visionattn.models.registration import is_ours
from visionattn.models.weights import DataSpec, Kept, described, read_metadata
from visionattn.training.checkpoint import best_figures
from visionattn.training.config import TrainConfig
from visionattn.training.distil.config import DistilConfig
from visionattn.training.distil.run import DISTIL, WORDS
from visionattn.training.run_folder import BEST, CONFIG, STATUS

MOST_CLASSES = 40
"""So many classes are listed; ``config.json`` has them all."""
UNTOLD = ("output", "resume", "overwrite", "show_batch", "parallel", "sequence_ranks")
UNTOLD += ("dist_timeout",)
"""Options of a run that decide nothing of its weights, or that are for several processes."""
TOLD = ("model.name", "data.name")
"""Options that a card tells even where they are as usual."""
PATHS = ("data.root", "init_from", "teacher")
"""Options of which a card has the last part of the path."""


class Figures(TypedDict):
    """What a run has come to, as far as a card tells it."""

    best_epoch: int
    validation_accuracy: float | None
    train_seconds: float
    test_accuracy: NotRequired[float | None]
    test_images: NotRequired[int | None]


class Status(TypedDict):
    """``status.json``, as far as a card tells it."""

    result: Figures | None
    provenance: dict[str, Any]


def card_of(path: Path, model: nn.Module, *, title: str, source: str, license: str | None) -> str:
    """Write the card in Markdown, with the head that the hub reads.

    Args:
        path: the file of the weights; what lies beside it counts where it is the best one of a run.
        model: the model with its weights.
        title: what the card calls it.
        source: what ``timm.create_model`` takes: ``hf-hub:ORG/NAME`` or ``local-dir:FOLDER``.
        license: an identifier of the hub; None: it is unknown.

    Raises:
        ValueError, OSError: a file of the run is garbled; one line.
    """
    metadata = read_metadata(path)
    name, args, spec = described(metadata, path)
    ours = is_ours(name)
    task = "image-classification" if spec.num_classes else "image-feature-extraction"
    numbers = sum(parameter.numel() for parameter in model.parameters())
    details = {
        "Model": f"`{name}`, {numbers:,} parameters",
        "Attention": f"`{args.get('attention')}`, of visionattn" if ours else None,
        "Task": f"classification, {spec.num_classes:,} classes" if spec.num_classes else None,
        "Classes": _classes(spec.class_names or ()),
        "Data": None,
        "Images": _images(model, spec),
    } | (_converted(metadata, path) or _run(path))
    described_as = f"timm's `{name}`, trained with visionattn."
    if ours:
        described_as = (
            "A vision transformer of visionattn; `import visionattn` registers it with timm."
        )
    card = {
        "license": license or "unknown",
        "tags": [task, "timm", "transformers", *(["visionattn"] if ours else [])],
        "description": described_as,
        "details": {key: value for key, value in details.items() if value},
        "usage": _usage(source, spec),
    }
    return printable(generate_readme(card, " ".join(title.split()), task_name=task))


def _classes(names: tuple[str, ...]) -> str:
    """List the names of classes."""
    shown = ", ".join(f"`{' '.join(name.split())}`" for name in names[:MOST_CLASSES])
    more = len(names) - MOST_CLASSES
    return f"{shown} and {more:,} more, in config.json" if more > 0 else shown


def _images(model: nn.Module, spec: DataSpec) -> list[str]:
    """Say what the model's images are."""
    channels = f"{spec.in_chans} channel{'s' * (spec.in_chans > 1)}"
    if spec.encoding:
        values = "each of the 256 grey levels is a channel of zeros and ones"
    else:
        values = f"values in [0, 1], less {_numbers(spec.mean)}, divided by {_numbers(spec.std)}"
    lines = [
        f"{channels}: {values}",
        f"preprocessing: {geometry_of(spec, patch_size(model)).describe()}",
    ]
    if spec.bands:
        lines.append(f"bands {', '.join(map(str, spec.bands))} of the files, counted from 1")
    if spec.value_range:
        low, high = spec.value_range
        lines.append(f"values of the files from {low:g} to {high:g} become 0 to 1")
    return lines


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _converted(metadata: dict[str, str], path: Path) -> dict[str, Any]:
    """Say where copied weights are from; nothing of others, as trained ones do not say it."""
    source = metadata.get("converted_from")
    if not source:
        return {}
    kept = from_json(Kept, metadata.get("pretrained_cfg", "{}"), f"pretrained_cfg of {path}")
    known = f", which timm gives as {kept['license']}" if kept.get("license") else ""
    lines = [
        f"converted from `{source}`, and not trained since: a start for training",
        f"the licence of the weights of `{source}` holds for them{known}",
    ]
    return {"Weights": lines}


def _run(checkpoint: Path) -> dict[str, Any]:
    """Say what the folder of a run says of its best weights; nothing of other files."""
    folder, parent = checkpoint.absolute().parent, checkpoint.absolute().parents[1]
    if checkpoint.name != BEST or not (folder / CONFIG).is_file():
        return {}
    config = parse(TrainConfig, ["--config", str(folder / CONFIG)])
    status, distilled = None, None
    if (folder / STATUS).is_file():
        status = read_json(Status, folder / STATUS, "delete it to share without its figures")
    if (parent / DISTIL).is_file():
        read = parse(DistilConfig, ["--config", str(parent / DISTIL)])
        distilled = read if folder.name in read.stages else None
    name = config.data.name
    found: dict[str, Any] = {"Data": f"`{Path(config.data.root or name).name}`"}
    if name in EMBEDDED:
        found["Data"] = f"`{name}`, embedded in visionattn"
    if status and status["result"]:
        found |= _worth(status["result"], checkpoint, imitates=distilled is not None)
    if distilled:
        found["Weights"] = _distilled(distilled, folder.name)
    return found | {"Training": _training(distilled or config, status)}


def _worth(result: Figures, checkpoint: Path, *, imitates: bool) -> dict[str, list[str]]:
    """Say how many images the model gets right, where they have its classes, and by what its epoch
    was chosen: of weights that imitate a teacher, by the loss.
    """
    lines, epoch = [], result["best_epoch"]
    if result.get("test_accuracy") is not None:
        of = f"{result['test_images']:,} test images" if result.get("test_images") else "test"
        lines.append(f"{100 * result['test_accuracy']:.1f} % of {of}")
    chosen = f", by which epoch {epoch} was chosen"
    if (validated := result["validation_accuracy"]) is not None:
        own = f"{100 * validated:.1f} % of the validation images"
        lines.append(own if imitates else own + chosen)
        if not imitates:
            return {"Accuracy": lines}
    figures = best_figures(checkpoint)
    loss = f"loss of {figures.loss:.4g}" if figures else "loss"
    return {"Accuracy": lines, "Loss": [f"{loss} on the validation images{chosen}"]}


def _distilled(config: DistilConfig, stage: str) -> list[str]:
    """Say whom weights imitate, and from which stage they are."""
    source, body = str(config.teacher), f", a `{config.model}`" if config.model else ""
    drawn = not (config.pretrained or is_file(source) or source.startswith(SOURCES))
    random = " with random weights" if drawn else ""
    return [
        f"they imitate `{_public(source)}`{body}{random}, without labels",
        f"stage {stage} of {', '.join(config.stages)}: {WORDS[stage]}",
        "they began as the teacher's" + ("" if drawn else ", whose licence holds for them"),
    ]


def _training(config: TrainConfig | DistilConfig, status: Status | None) -> list[str]:
    """Say how the weights were made."""
    lines = [f"`{command_of(config)}`"]
    if status:
        made = status["provenance"]
        where = made.get("processor") or made.get("device") or "an unknown machine"
        took = status["result"] and f"{status['result']['train_seconds']:,.0f} seconds on "
        versions = f"torch {made.get('torch')}, visionattn {made.get('visionattn')}"
        commit = f", commit {made['commit'][:9]}" if made.get("commit") else ""
        lines.append(f"{took or ''}{where}; {versions}{commit}")
    return [" ".join(line.split()) for line in lines]


def command_of(config: TrainConfig | DistilConfig) -> str:
    """Return the command that trains or distils with a configuration: model or teacher, data, and
    each option that is not as usual.
    """
    kind = type(config)
    words, usual = ["visionattn", "train" if kind is TrainConfig else "distil"], kind()
    for key in field_types(kind):
        value, default = (reduce(getattr, key.split("."), options) for options in (config, usual))
        if key in UNTOLD or (value == default and key not in TOLD):
            continue
        if key in PATHS:
            value = _public(value)
        words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return shlex.join(words)


def _public(source: str) -> str:
    """Return the last part of a path; names of models on a hub are whole."""
    if source.startswith(HUBS):
        return source
    kind = next((kind for kind in SOURCES if source.startswith(kind)), "")
    return kind + Path(source.removeprefix(kind)).name


def _usage(source: str, spec: DataSpec) -> str:
    """Return the lines that load the model and run it, on images as in training."""
    lines = ["```python", "import timm, visionattn", ""]
    lines += [f"model = timm.create_model({json.dumps(source)}, pretrained=True).eval()"]
    call = "predict" if spec.num_classes else "extract_features"
    lines += [f'print(visionattn.{call}(model, ["image.png"]))']
    return "\n".join([*lines, "```"])
