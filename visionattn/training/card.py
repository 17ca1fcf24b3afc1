"""The model card of a checkpoint: what its file and the folder of its run know, for people.

The text is that of timm's cards. Of paths, which are private, it has the last part alone.
"""

import json
import shlex
from functools import reduce
from pathlib import Path
from typing import Any

from timm.models._hub import generate_readme
from torch import nn

from visionattn.cli.files import printable
from visionattn.cli.parsing import field_types
from visionattn.data.data_checks import EMBEDDED
from visionattn.data.geometry import geometry_of
from visionattn.models.building import patch_size
from visionattn.models.conversion import HUBS, SOURCES, is_file
from visionattn.models.registration import is_ours
from visionattn.models.weights import DataSpec
from visionattn.training.config import TrainConfig
from visionattn.training.distil.config import DistilConfig
from visionattn.training.distil.run import WORDS
from visionattn.training.facts import Figures, RunFacts, Status

MOST_CLASSES = 40
"""So many classes are listed; ``config.json`` has them all."""
UNTOLD = ("output", "resume", "overwrite", "show_batch", "parallel", "sequence_ranks")
"""Options of a run that decide nothing of its weights, or that are for several processes."""
TOLD = ("model.name", "data.name")
"""Options that a card tells even where they are as usual."""
PATHS = ("data.root", "init_from", "teacher")
"""Options of which a card has the last part of the path."""


def card_of(
    model: nn.Module,
    name: str,
    args: dict[str, Any],
    spec: DataSpec,
    facts: RunFacts,
    *,
    title: str,
    source: str,
    license: str | None,
) -> str:
    """Write the card in Markdown, with the head that the hub reads.

    Args:
        model: the model with its weights.
        name: the timm name that builds it.
        args: the arguments that build it, besides classes and channels.
        spec: what its images are.
        facts: what is known of its training.
        title: what the card calls it.
        source: what ``timm.create_model`` takes: ``hf-hub:ORG/NAME`` or ``local-dir:FOLDER``.
        license: an identifier of the hub; None: it is unknown.
    """
    ours = is_ours(name)
    task = "image-classification" if spec.num_classes else "image-feature-extraction"
    numbers = sum(parameter.numel() for parameter in model.parameters())
    details: dict[str, Any] = {"Model": f"`{name}`, {numbers:,} parameters"}
    if ours:
        details["Attention"] = f"`{args.get('attention')}`, of visionattn"
    details |= _task(spec, facts.config) | {"Images": _images(model, spec)}
    if facts.status and facts.status["result"]:
        details |= _worth(facts.status["result"], facts)
    if facts.converted_from:
        details["Weights"] = _converted(facts.converted_from, facts.source_license)
    if facts.distilled:
        details["Weights"] = _distilled(facts.distilled, facts.stage)
    if facts.config:
        details["Training"] = _training(facts.distilled or facts.config, facts.status)
    described = f"timm's `{name}`, trained with visionattn."
    if ours:
        described = (
            "A vision transformer of visionattn; `import visionattn` registers it with timm."
        )
    card = {
        "license": license or "unknown",
        "tags": [task, "timm", "transformers", *(["visionattn"] if ours else [])],
        "description": described,
        "details": details,
        "usage": _usage(source, spec),
    }
    return printable(generate_readme(card, " ".join(title.split()), task_name=task))


def _task(spec: DataSpec, config: TrainConfig | None) -> dict[str, Any]:
    """Say what is told apart, and on which data."""
    found: dict[str, Any] = {}
    if spec.num_classes:
        found["Task"] = f"classification, {spec.num_classes:,} classes"
    if spec.class_names:
        shown = [f"`{' '.join(name.split())}`" for name in spec.class_names[:MOST_CLASSES]]
        more = len(spec.class_names) - len(shown)
        found["Classes"] = ", ".join(shown) + (
            f" and {more:,} more, in config.json" if more else ""
        )
    if config:
        data = config.data
        found["Data"] = f"`{data.name}`, embedded in visionattn"
        if data.name not in EMBEDDED:
            found["Data"] = f"`{Path(data.root or data.name).name}`"
    return found


def _images(model: nn.Module, spec: DataSpec) -> list[str]:
    """Say what the model's images are."""
    channels = f"{spec.in_chans} channel{'s' * (spec.in_chans > 1)}"
    if spec.encoding:
        values = "each of the 256 grey levels is a channel of zeros and ones"
    else:
        values = f"values in [0, 1], less {_numbers(spec.mean)}, divided by {_numbers(spec.std)}"
    lines = [f"{channels}: {values}", f"fit {geometry_of(spec, patch_size(model)).describe()}"]
    if spec.bands:
        lines.append(f"bands {', '.join(map(str, spec.bands))} of the files, counted from 1")
    if spec.value_range:
        low, high = spec.value_range
        lines.append(f"values of the files from {low:g} to {high:g} become 0 to 1")
    return lines


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _worth(result: Figures, facts: RunFacts) -> dict[str, list[str]]:
    """Say how many images the model gets right, where they have its classes, and by what its epoch
    was chosen: of weights that imitate a teacher, by the loss.
    """
    lines = []
    if result.get("test_accuracy") is not None:
        of = f"{result['test_images']:,} test images" if result.get("test_images") else "test"
        lines.append(f"{100 * result['test_accuracy']:.1f} % of {of}")
    validated, epoch = result["validation_accuracy"], result["best_epoch"]
    of = "" if validated is None else f"{100 * validated:.1f} % of the validation images"
    if facts.distilled is None and of:
        return {"Accuracy": [*lines, f"{of}, by which epoch {epoch} was chosen"]}
    lines += [of] if of else []
    loss = "" if facts.validation_loss is None else f" of {facts.validation_loss:.4g}"
    chosen = f"loss{loss} on the validation images, by which epoch {epoch} was chosen"
    return ({"Accuracy": lines} if lines else {}) | {"Loss": [chosen]}


def _converted(source: str, license: str | None) -> list[str]:
    """Say where copied weights are from."""
    known = f", which timm gives as {license}" if license else ""
    return [
        f"converted from `{source}`, and not trained since: a start for training",
        f"the licence of the weights of `{source}` holds for them{known}",
    ]


def _distilled(config: DistilConfig, stage: str | None) -> list[str]:
    """Say whom weights imitate, and from which stage they are."""
    source, body = str(config.teacher), f", a `{config.model}`" if config.model else ""
    drawn = not (config.pretrained or is_file(source) or source.startswith(SOURCES))
    random = " with random weights" if drawn else ""
    return [
        f"they imitate `{_public(source)}`{body}{random}, without labels",
        f"stage {stage} of {', '.join(config.stages)}: {WORDS[str(stage)]}",
        "they began as the teacher's" + ("" if drawn else ", whose licence holds for them"),
    ]


def _training(config: TrainConfig | DistilConfig, status: Status | None) -> list[str]:
    """Say how the weights were made."""
    lines = [f"`{command_of(config)}`"]
    if status:
        made = status["provenance"]
        where = made.get("processor") or made.get("device") or "an unknown machine"
        took = status["result"] and f"{status['result']['train_seconds']:,.0f} seconds on "
        versions = f"torch {made['torch']}, visionattn {made['visionattn']}"
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
