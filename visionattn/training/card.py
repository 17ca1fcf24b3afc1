"""The model card of a checkpoint: what its file and the folder of its run know, for people.

The text is that of timm's cards. Of paths, which are private, it has the last part alone.
"""

import json
import shlex
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from timm.models._hub import generate_readme
from torch import nn

from visionattn.cli.files import printable
from visionattn.cli.parsing import field_types, parse
from visionattn.cli.untrusted import read_json
from visionattn.data.checks import EMBEDDED
from visionattn.data.geometry import geometry_of
from visionattn.models.registration import is_ours
from visionattn.models.weights import DataSpec
from visionattn.training.build import patch_size
from visionattn.training.config import TrainConfig
from visionattn.training.record import BEST, CONFIG, STATUS

MOST_CLASSES = 40
"""So many classes are listed; ``config.json`` has them all."""
UNTOLD = ("output", "resume", "overwrite", "show_batch", "parallel")
"""Options of a run that decide nothing of its weights, or that are for several processes."""
TOLD = ("model.name", "data.name")
"""Options that a card tells even where they are as usual."""
PATHS = ("data.root", "init_from")
"""Options of which a card has the last part of the path."""


class _Result(TypedDict):
    """What ``status.json`` says of a run that has finished, as far as a card tells it."""

    best_epoch: int
    validation_accuracy: float
    train_seconds: float
    test_accuracy: NotRequired[float | None]
    test_images: NotRequired[int | None]


class _Provenance(TypedDict):
    """What a run depends on, as far as a card tells it."""

    torch: str
    visionattn: str
    processor: NotRequired[str]
    device: NotRequired[str]
    commit: NotRequired[str | None]


class _Status(TypedDict):
    """``status.json``."""

    status: str
    result: _Result | None
    provenance: _Provenance


@dataclass(frozen=True)
class RunFacts:
    """What the folder of a run says; None where it does not."""

    config: TrainConfig | None
    status: _Status | None


def facts_beside(checkpoint: Path) -> RunFacts:
    """Read what lies beside a checkpoint: nothing, unless it is the best one of a run.

    Raises:
        ValueError, OSError: a file of the run is garbled; one line.
    """
    config, status = checkpoint.with_name(CONFIG), checkpoint.with_name(STATUS)
    if checkpoint.name != BEST or not config.is_file():
        return RunFacts(None, None)
    known = parse(TrainConfig, ["--config", str(config)])
    if not status.is_file():
        return RunFacts(known, None)
    return RunFacts(known, read_json(_Status, status, "delete it to share without its figures"))


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
        details["Accuracy"] = _accuracy(facts.status["result"])
    if facts.config:
        details["Training"] = _training(facts.config, facts.status)
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


def _accuracy(result: _Result) -> list[str]:
    """Say how many images the model gets right."""
    lines = []
    if result.get("test_accuracy") is not None:
        of = f"{result['test_images']:,} test images" if result.get("test_images") else "test"
        lines.append(f"{100 * result['test_accuracy']:.1f} % of {of}")
    chosen = f"by which epoch {result['best_epoch']} was chosen"
    of = f"{100 * result['validation_accuracy']:.1f} % of the validation images"
    return [*lines, f"{of}, {chosen}"]


def _training(config: TrainConfig, status: _Status | None) -> list[str]:
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


def command_of(config: TrainConfig) -> str:
    """Return the command that trains with a configuration: model, data, and each option that is
    not as usual.
    """
    words, usual = ["visionattn", "train"], TrainConfig()
    for key in field_types(TrainConfig):
        value, default = (reduce(getattr, key.split("."), options) for options in (config, usual))
        if key in UNTOLD or (value == default and key not in TOLD):
            continue
        if key in PATHS:
            value = Path(value).name
        words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return shlex.join(words)


def _usage(source: str, spec: DataSpec) -> str:
    """Return the lines that load the model and run it, on images as in training."""
    lines = ["```python", "import timm, visionattn", ""]
    lines += [f"model = timm.create_model({json.dumps(source)}, pretrained=True).eval()"]
    call = "predict" if spec.num_classes else "extract_features"
    lines += [f'print(visionattn.{call}(model, ["image.png"]))']
    return "\n".join([*lines, "```"])
