"""Where the weights of a training come from: random, placed from a file, or those of a timm ViT,
which becomes one of our models by ``from_softmax``.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
from torch import nn

from visionattn.cli.untrusted import brief
from visionattn.models.building import ModelConfig, build_model, check_args
from visionattn.models.conversion import (
    NAME,
    OPTIONS,
    SOURCES,
    Converted,
    body_of,
    from_softmax,
    open_teacher,
)
from visionattn.models.placement import place_weights
from visionattn.models.registration import DEFAULTS, is_ours
from visionattn.models.segmentation import HEAD_ARGS, Segmenter
from visionattn.models.weights import FORMAT, DataSpec, described, existing, read_metadata
from visionattn.training.config import TrainConfig

FAMILY = ("attention", "relative", "temperature_init")
"""What a name of ours gives to the model that a ViT becomes."""
NONE_GIVEN = "leave it out (--model.args '{}' drops what a configuration gives)"
"""The way on where arguments of a body stand beside weights that have another."""


def started_model(
    config: TrainConfig, model: ModelConfig, spec: DataSpec, *, first: bool = True
) -> tuple[nn.Module, ModelConfig, dict[str, Any], list[str]]:
    """Make the model of a run with the weights that it starts from.

    Args:
        config: the run, of which ``init_from`` and ``init_model`` are read.
        model: what to build; the body of a teacher takes its place.
        spec: what the images are.
        first: this process gives the others its weights; they need none that are placed.

    Returns:
        The model, what was built (``converted_vit`` with all arguments, where a teacher gave the
        body), its arguments as ``build_model`` gives them, and lines about the weights.

    Raises:
        ValueError, FileNotFoundError: the model or the weights are wrong; one line.
    """
    source = config.init_from
    if spec.task == "segmentation" and not _is_segmenter(source):
        return _on_started_body(config, model, spec, first)
    if config.init_model is not None and not is_ours_by_name(model.name):
        raise ValueError(
            f"init_model is for models of ours, and {model.name} is none; leave it out"
        )
    if source is None:
        if config.init_model is not None:
            raise ValueError("init_model says whose weights init_from holds; name both, or neither")
        if model.name == NAME and "embed_dim" not in model.args:
            raise ValueError(
                f"{NAME} has the body of a teacher; name it with --init-from, e.g. "
                "vit_small_patch16_224, or a file"
            )
        return (*_built(model, spec), [])
    if is_teacher(source, config.init_model, model.name):
        body = None if _metadata(source) else config.init_model
        vit, lines = open_teacher(source, body=body, pretrained=True)
        converted = converted_for(vit, model, spec)
        lines += [*converted.lines(), *_other_values(converted.spec, spec)]
        chosen = replace(model, name=NAME, args=converted.args)
        if model.grad_checkpointing:
            converted.model.set_grad_checkpointing(True)
        return converted.model, chosen, converted.args, lines
    if model.name == NAME:
        held = _args_in(source)
        for key, asked in model.args.items():
            if key in held and key not in OPTIONS and held[key] != asked:
                raise ValueError(
                    f"the weights to start from have {key} {brief(held[key])}, model.args "
                    f"{brief(asked)}; {NONE_GIVEN}"
                )
        model = replace(model, args=held | model.args)
    made, chosen, args = _built(model, spec)
    return made, chosen, args, place_weights(made, model.name, source).lines() if first else []


def _is_segmenter(source: str | None) -> bool:
    """Tell whether a file holds the weights of a segmentation, its head included."""
    metadata = _metadata(source) if source else {}
    return bool(metadata) and described(metadata, source)[2].task == "segmentation"


def _on_started_body(
    config: TrainConfig, model: ModelConfig, spec: DataSpec, first: bool
) -> tuple[nn.Module, ModelConfig, dict[str, Any], list[str]]:
    """Put a new head of pixels on a body that starts as that of a classification would."""
    head = {key: value for key, value in model.args.items() if key in HEAD_ARGS}
    body_model = replace(
        model, args={key: value for key, value in model.args.items() if key not in HEAD_ARGS}
    )
    body_spec = replace(spec, task="classification", num_classes=0, class_names=())
    body, chosen, args, lines = started_model(config, body_model, body_spec, first=first)
    made = Segmenter(body, spec.num_classes, **head)
    return made, replace(chosen, args=chosen.args | head), args | head, lines


def _built(model: ModelConfig, spec: DataSpec) -> tuple[nn.Module, ModelConfig, dict[str, Any]]:
    made, args = build_model(model, spec)
    return made, model, args


def is_teacher(source: str, body: str | None, name: str) -> bool:
    """Tell whether a model of ours of that name starts from a timm ViT that says its body: by
    timm's name, in a file of ``visionattn train``, or in a state dict whose ``body`` is given.
    """
    if not is_ours_by_name(name):
        return False
    if not Path(source).is_file():
        return source.startswith(SOURCES) or timm.is_model(source)
    metadata = _metadata(source)
    if not metadata:
        return body is not None
    held = metadata.get("model", "")
    return timm.is_model(held) and not is_ours(held)


def is_ours_by_name(name: str) -> bool:
    """Tell whether a name, which timm may not know, is that of a model of ours."""
    return timm.is_model(name) and is_ours(name)


def _metadata(source: str) -> dict[str, str]:
    """Return the metadata of a safetensors file of ours; none of others, and of names."""
    try:
        found = read_metadata(source) if Path(source).is_file() else {}
    except ValueError:
        return {}
    return found if found.get("format") == FORMAT else {}


def _args_in(source: str) -> dict[str, Any]:
    """Return the arguments of the converted model in a file.

    Raises:
        ValueError: it holds none.
    """
    metadata = _metadata(str(existing(source)))
    if metadata.get("model") != NAME:
        raise ValueError(
            f"{source} does not say what body its weights have; name it with --init-model, or make "
            "a file of `visionattn convert` of it"
        )
    return described(metadata, source)[1]


def converted_for(vit: nn.Module, model: ModelConfig, spec: DataSpec) -> Converted:
    """Make the model that is to be trained of a teacher.

    Args:
        vit: the teacher.
        model: a name of ours, whose attention and relative position are taken, and whose width and
            depth the teacher must have; or ``converted_vit``, for any teacher. Its arguments are
            those of ``from_softmax``.
        spec: what the images are: their channels and classes are the model's.

    Raises:
        ValueError: the teacher cannot be converted, or is of another size; one line.
    """
    check_args(model)
    body, family = body_of(vit), DEFAULTS[model.name.partition(".")[0]]
    given = given_to_teacher(model)
    for key, wanted in {"embed_dim": "wide", "depth": "deep"}.items():
        has = body[key]
        asked = given.pop(key, family.get(key))
        if asked is not None and asked != has:
            other = f"take a model of their size, or {NAME}, which takes theirs"
            raise ValueError(
                f"the weights to start from are {has} {wanted}, {model.name} {asked}; "
                f"{NONE_GIVEN if model.name == NAME else other}"
            )
    return from_softmax(vit, **given, num_classes=spec.num_classes, in_chans=spec.in_chans)


def given_to_teacher(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments that a name of ours and its arguments give to ``from_softmax``."""
    family = DEFAULTS[model.name.partition(".")[0]]
    return {key: family[key] for key in FAMILY if key in family} | model.args


def _other_values(teachers: DataSpec, spec: DataSpec) -> list[str]:
    """Say where a teacher has seen images of other values than the run gives."""
    if (teachers.mean, teachers.std) == (spec.mean, spec.std) or spec.encoding is not None:
        return []
    mean, std = (" ".join(f"{x:g}" for x in of) for of in (teachers.mean, teachers.std))
    return [f"  its images had other values: --data.mean {mean} --data.std {std}"]
