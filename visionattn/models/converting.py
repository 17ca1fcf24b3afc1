"""``visionattn convert``: a timm ViT, by name or from a file, becomes a file of one of our
models.

This module owns the flags. A docstring under each field is its help text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from visionattn.cli.commands import typed
from visionattn.cli.files import check_free
from visionattn.cli.parsing import parse, with_first
from visionattn.models.conversion import Converted, from_softmax
from visionattn.models.teacher import LOCAL, is_file, open_teacher

EXAMPLE = "vit_tiny_patch16_224 --softmax-blocks 9 11 --output converted.safetensors --overwrite"

FLAGS = ("vit", "attention", "softmax_blocks", "num_heads")
"""Arguments of ``from_softmax`` that have flags of their own."""


@dataclass
class StudentOptions:
    """Whose weights, and what becomes of their attention."""

    teacher: str | None = None
    """A timm name such as ``vit_small_patch14_dinov2.lvd142m``, ``hf-hub:...``, ``local-dir:...``,
    or a file of weights, such as ``visionattn train`` writes with a ``vit_*`` as its model.
    """
    pretrained: bool = False
    """Take the weights that timm has of the name, which may have to be downloaded. Without, they
    are random.
    """
    model: str | None = None
    """The timm name of the body that a file has the weights of; files of ``visionattn train`` say
    it.
    """
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the teacher's body, e.g. ``{img_size: 518}``."""
    attention: list[str] = field(default_factory=lambda: ["kernelized"])
    """``kernelized``, ``taylorshift`` or ``window``, for all blocks; or a name for each block."""
    softmax_blocks: list[int] = field(default_factory=list)
    """Indices of blocks that stay the teacher's softmax; -1 is the last."""
    num_heads: int | None = None
    """Heads of the blocks; None: the teacher's. Others share the same weights out anew."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``visionattn.models.from_softmax`` that are of the attention, e.g.
    ``{value_conv: 5, centre_keys: false}``; ``convert`` takes all of them.
    """


@dataclass
class ConvertOptions(StudentOptions):
    """A model with the weights of another."""

    seed: int = 0
    """Seed of what is drawn: random weights, and the start of relative position."""
    output: str | None = None
    """The safetensors file, which ``visionattn.load_model`` and every command read."""
    overwrite: bool = False
    """Replace the file if it is there."""


def parse_convert(argv: Sequence[str]) -> ConvertOptions:
    """Read the flags of ``visionattn convert``, whose first word may be the teacher.

    Raises:
        ValueError: a flag is wrong, or the teacher or the file is missing; one line.
    """
    options = parse(
        ConvertOptions,
        with_first(argv, "teacher"),
        command="convert",
        description="Make one of our models of a timm ViT, with its weights; the first word may be "
        "the teacher, without its flag.",
        example=EXAMPLE,
    )
    if options.teacher is None:
        raise ValueError("name a teacher, e.g. vit_small_patch16_224, or a file of weights")
    if options.output is None:
        raise ValueError("name the file to write with --output")
    for name in FLAGS:
        if name in options.options:
            raise ValueError(
                f"options.{name} is given by --{'teacher' if name == 'vit' else name}; leave it out"
            )
    if options.seed < 0:
        raise ValueError(f"seed must be 0 or more, got {options.seed}")
    if not options.attention:
        raise ValueError("attention is empty; give a name, or leave it out")
    return options


def teacher_of(options: StudentOptions) -> tuple[nn.Module, list[str]]:
    """Open the teacher that options name, as ``open_teacher`` does; a file with ``pretrained`` is a
    ValueError.
    """
    if options.pretrained and is_file(str(options.teacher)):
        raise ValueError(
            f"pretrained is for names of timm, and {options.teacher} is a file, which has weights "
            "of its own; leave it out"
        )
    return open_teacher(
        str(options.teacher),
        body=options.model,
        pretrained=options.pretrained,
        args=options.args,
    )


def student_of(
    options: StudentOptions, vit: nn.Module, softmax_blocks: Sequence[int] | None = None
) -> Converted:
    """Make the model that options ask for, as ``from_softmax`` does.

    Args:
        softmax_blocks: in place of those of the options; None: those.
    """
    names = options.attention
    return from_softmax(
        vit,
        names[0] if len(names) == 1 else names,
        softmax_blocks=options.softmax_blocks if softmax_blocks is None else softmax_blocks,
        num_heads=options.num_heads,
        **options.options,
    )


def convert(argv: Sequence[str], say: Callable[[str], None]) -> None:
    """Do what the flags say, and say what became of the weights."""
    options = parse_convert(argv)
    output = Path(str(options.output))
    check_free(output, options.overwrite)
    _check_other(output, str(options.teacher))
    torch.manual_seed(options.seed)
    vit, lines = teacher_of(options)
    converted = student_of(options, vit)
    converted.save(output)
    say("\n".join([*lines, *converted.lines(), *_closing(converted, output)]))


def _check_other(output: Path, teacher: str) -> None:
    """Raise ValueError where the file to write is the teacher's own."""
    source = Path(teacher.removeprefix(LOCAL))
    if output.exists() and source.exists() and output.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{output} is of the teacher, which is kept; write to another file")


def _closing(converted: Converted, output: Path) -> list[str]:
    """Say what was written, and what it is not yet."""
    parameters = sum(parameter.numel() for parameter in converted.model.parameters())
    kinds = [block.attn.attention for block in converted.model.blocks]
    several = ", ".join(f"{kinds.count(kind)} of {kind}" for kind in dict.fromkeys(kinds))
    size = " x ".join(map(str, converted.model.patch_embed.img_size))
    train = typed("train", "--model.name", converted.name, "--init-from", str(output))
    return [
        f"{output}: {parameters:,} parameters, {len(kinds)} blocks ({several}), made for {size} px",
        "copied weights are a start, to be trained; for data of your own:",
        f"  {train} --data.name folder --data.root FOLDER",
    ]
