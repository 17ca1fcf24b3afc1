"""Write the model card of a checkpoint from its file and its run folder.

``card.jinja`` is the template, laid out like timm's cards. Paths are private: a card shows only
their last part.
"""

import json
import shlex
from functools import reduce
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from torch import nn

from visionattn.cli.files import printable
from visionattn.cli.parsing import field_types, parse
from visionattn.cli.untrusted import from_json, read_json
from visionattn.data.data_checks import EMBEDDED
from visionattn.data.geometry import geometry_of
from visionattn.models.building import patch_size
from visionattn.models.conversion import HUBS, SOURCES, is_file
from visionattn.models.registration import is_ours
from visionattn.models.weights import described, read_metadata
from visionattn.training.checkpoint import best_figures
from visionattn.training.config import TrainConfig, parse_train
from visionattn.training.distil.distil_config import DistilConfig
from visionattn.training.distil.distillation import DISTIL, WORDS
from visionattn.training.run_folder import BEST, CONFIG, STATUS, Ended

MOST_CLASSES = 40
"""Maximum number of classes in a card; ``config.json`` lists all."""
UNTOLD = ("output", "resume", "overwrite", "show_batch", "parallel", "dist_timeout", "data.cache")
UNTOLD += ("teacher_cache",)
"""Options that a card omits: they do not affect the weights, or apply to several processes."""
TOLD = ("model.name", "data.name")
"""Options that a card shows even at their defaults."""
PATHS = ("data.root", "data.labels", "data.features", "data.augment", "init_from", "teacher")
"""Options with paths, shortened to their last part."""


def card_of(path: Path, model: nn.Module, *, title: str, source: str, license: str | None) -> str:
    """Return the card in Markdown, with the metadata header of the hub.

    Args:
        path: the file of the weights; for the best weights of a run, the files of its folder count,
            too.
        model: the model with its weights.
        title: title of the card.
        source: name for ``timm.create_model``: ``hf-hub:ORG/NAME`` or ``local-dir:FOLDER``.
        license: license identifier of the hub; None: unknown.

    Raises:
        ValueError, OSError: a file of the run is damaged; one line.
    """
    metadata = read_metadata(path)
    name, args, spec = described(metadata, path)
    converted = metadata.get("converted_from")
    text = metadata.get("pretrained_cfg", "{}")
    kept = from_json(dict[str, Any], text, f"pretrained_cfg of {path}")
    text = files(__package__).joinpath("card.jinja").read_text(encoding="utf-8")
    template = jinja2.Template(
        text, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    card = template.render(
        title=" ".join(title.split()),
        task="image-classification" if spec.num_classes else "image-feature-extraction",
        license=license or "unknown",
        name=name,
        ours=is_ours(name),
        parameters=f"{sum(parameter.numel() for parameter in model.parameters()):,}",
        attention=args.get("attention"),
        spec=spec,
        classes=[" ".join(each.split()) for each in spec.class_names],
        most_classes=MOST_CLASSES,
        mean=", ".join(f"{value:g}" for value in spec.mean),
        std=", ".join(f"{value:g}" for value in spec.std),
        preprocessing=geometry_of(spec, patch_size(model)).describe(),
        converted=converted,
        license_of_source=kept.get("license"),
        run={} if converted else _run(path),
        source=json.dumps(source),
    )
    return printable(card)


def _run(checkpoint: Path) -> dict[str, Any]:
    """Return the content of the run folder for its best weights; empty for other files."""
    folder, parent = checkpoint.absolute().parent, checkpoint.absolute().parents[1]
    if checkpoint.name != BEST or not (folder / CONFIG).is_file():
        return {}
    config = parse_train(["--config", str(folder / CONFIG)])
    status: Ended = {}
    if (folder / STATUS).is_file():
        way_out = "delete it to share without its metrics"
        status = read_json(Ended, folder / STATUS, way_out)
    whole, figures = None, best_figures(checkpoint)
    if (parent / DISTIL).is_file():
        read = parse(DistilConfig, ["--config", str(parent / DISTIL)])
        whole = read if folder.name in read.stages else None
    return {
        "data": Path(config.data.root or config.data.name).name,
        "embedded": config.data.name in EMBEDDED,
        "result": status.get("result"),
        "monitor": config.monitor,
        "loss": figures and figures.loss,
        "distilled": whole and _distilled(whole, folder.name),
        "command": command_of(whole or config),
        "made": status.get("provenance"),
    }


def _distilled(config: DistilConfig, stage: str) -> dict[str, Any]:
    """Return the teacher of distilled weights, and their stage."""
    teacher = str(config.teacher)
    return {
        "teacher": _public(teacher),
        "model": config.model,
        "random": not (config.pretrained or is_file(teacher) or teacher.startswith(SOURCES)),
        "stage": stage,
        "stages": config.stages,
        "what": WORDS[stage],
    }


def command_of(config: TrainConfig | DistilConfig) -> str:
    """Return the command that trains or distills with a configuration: model or teacher, data, and
    each option that differs from its default.
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
    """Return the last part of a path; keep names of models on a hub in full."""
    if source.startswith(HUBS):
        return source
    kind = next((kind for kind in SOURCES if source.startswith(kind)), "")
    return kind + Path(source.removeprefix(kind)).name
