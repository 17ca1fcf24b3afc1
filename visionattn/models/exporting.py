"""``visionattn export``: a model, by name or from a file, becomes a file that runs elsewhere.

This module owns the flags. A docstring under each field is its help text.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from visionattn.cli.files import check_free, first_line
from visionattn.cli.parsing import parse, with_first
from visionattn.cli.tables import sized
from visionattn.models.export import (
    SUFFIXES,
    Format,
    check_exportable,
    check_format,
    export,
)
from visionattn.models.registration import is_ours
from visionattn.models.weights import (
    LOADING_ARGS,
    UNBUILDABLE,
    check_finite,
    describe_args,
    load_model,
)

SHAPE = "[B, C, H, W] of whole patches, two or more along each side"
EXAMPLE = "checkpoints/digits/best.safetensors --format torch --output digits.pt2 --overwrite"


@dataclass
class ExportOptions:
    """A model as a file that runs elsewhere."""

    model: str | None = None
    """The ``best.safetensors`` of a run, another file that ``visionattn.load_model`` reads, or a
    timm name of ours; it may stand first, without ``--model``.
    """
    pretrained: bool = False
    """Take the weights that come with the name. Without, those of a name are random."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of a model by name, e.g. ``{num_classes: 10}``."""
    format: Format = "onnx"
    """``onnx`` for ONNX Runtime and others; ``torch``, a program that ``torch.export.load`` reads;
    ``compiled``, a package that AOTInductor compiles for processors like this one.
    """
    prepare: bool = False
    """Let the file take what image files hold and normalise it; without, it takes normalised
    float32.
    """
    output: str | None = None
    """The file, which ends in .onnx or .pt2."""
    overwrite: bool = False
    """Replace the file if it is there."""
    seed: int = 0
    """Seed of random weights."""


def parse_export(argv: Sequence[str]) -> ExportOptions:
    """Read the flags of ``visionattn export``, whose first word may be the model.

    Raises:
        ValueError: a flag is wrong, or the model or the file is missing; one line.
    """
    options = parse(
        ExportOptions,
        with_first(argv, "model"),
        command="export",
        description="Write a model as ONNX, as a program of torch.export or as a compiled package, "
        "once the file has given what the model gives at three sizes; the first word may be the "
        "model, without its flag.",
        example=EXAMPLE,
    )
    if options.model is None:
        raise ValueError("name a model, e.g. scaleformer_vit_s, or a file of weights")
    if options.output is None:
        raise ValueError("name the file to write with --output")
    suffix = SUFFIXES[options.format]
    if Path(options.output).suffix != suffix:
        raise ValueError(
            f"output {options.output}: a file of format {options.format} ends in {suffix}"
        )
    if options.seed < 0:
        raise ValueError(f"seed must be 0 or more, got {options.seed}")
    for key in LOADING_ARGS.intersection(options.args):
        raise ValueError(f"args.{key} loads weights; name a file of weights as the model")
    check_format(options.format)
    return options


def opened(options: ExportOptions) -> nn.Module:
    """Return the model that options name.

    Raises:
        ValueError, FileNotFoundError: there is none, or it is not ours; one line.
    """
    source = str(options.model)
    if not timm.is_model(source):
        if not (os.path.exists(source) or os.sep in source or source.endswith(".safetensors")):
            near = get_close_matches(source, timm.list_models(), n=1, cutoff=0)[0]
            raise ValueError(
                f"{source} is neither a file nor a model of timm; the nearest is {near}"
            )
        for name in ("pretrained", "args"):
            if getattr(options, name):
                raise ValueError(f"{name} is for names of models, and {source} is a file")
        model = load_model(source)
        check_finite(model.state_dict(), Path(source))
        return model
    if not is_ours(source):
        raise ValueError(
            f"{source} is no model of visionattn; torch.onnx.export and torch.export take timm's "
            "own"
        )
    torch.manual_seed(options.seed)
    try:
        return timm.create_model(source, pretrained=options.pretrained, **options.args)
    except UNBUILDABLE as error:
        raise ValueError(
            f"model {source} does not take these args: {describe_args(options.args)} "
            f"({first_line(error)})"
        ) from error


def export_model(argv: Sequence[str], say: Callable[[str], None]) -> None:
    """Do what the flags say, and say what was written, once it has been tried."""
    options = parse_export(argv)
    output = Path(str(options.output))
    check_free(output, options.overwrite)
    if output.exists() and output.resolve() == Path(str(options.model)).resolve():
        raise ValueError(f"{output} is the model's own file, which is kept; write to another file")
    model = opened(options)
    check_exportable(model)
    begun = time.perf_counter()
    trials = export(model, output, options.format, prepare=options.prepare)
    seconds = time.perf_counter() - begun
    for trial in trials:
        say(
            f"{trial.batch} x {trial.height} x {trial.width} px: {trial.difference:.1e} from the "
            "model"
        )
    say(f"{output}: {sized(output.stat().st_size)}, format {options.format}, {seconds:.0f} s")
    say(_takes(model, options))


def _takes(model: nn.Module, options: ExportOptions) -> str:
    """Say what the file takes and gives."""
    spec = getattr(model, "data_spec", None)
    if not options.prepare:
        return f"it takes normalised float32 {SHAPE}"
    kind = "uint8" if spec.value_range is None else "float32 in [0, 1]"
    return f"it takes {kind} {SHAPE}, and normalises them"
