"""The command line of ``tools/benchmark.py``: flags, and what they must be. It times nothing."""

import argparse
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from visionattn.cli.parsing import check_free
from visionattn.lab.cases import DTYPES, FORMS, Case
from visionattn.lab.compare import Plan
from visionattn.lab.memory import build
from visionattn.lab.operations import FORMED, has_position
from visionattn.lab.papers import FIGURES
from visionattn.lab.targets import choose
from visionattn.training.build import pick_device

if TYPE_CHECKING:  # reading images needs libraries that a machine with a GPU may lack
    from visionattn.lab.loader import LoaderCase, Source

EXAMPLE = (
    "python tools/benchmark.py --operations taylorshift kernelized+joint sdpa --tokens 256 "
    "512 --width 32 --no-memory"
)


class _Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print its usage and leave."""

    def error(self, message: str):
        raise ValueError(f"{message}; --help lists the options")


def make_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = _Parser(
        prog="benchmark.py",
        description="Time and memory of operations and models against what a user would otherwise "
        "take.",
        epilog=f"try:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what is compared; one of these seven")
    add = what.add_argument
    text = (
        "taylorshift, kernelized, softmax, relative, sdpa, eager; options behind plus signs: "
        "taylorshift+temperature+joint"
    )
    add("--operations", nargs="+", metavar="NAME", help=text)
    text = (
        "timm names; options: scaleformer_vit_s+identity, vit_small_patch16_224+eager, "
        "taylorshift_vit_s+heads=12"
    )
    add("--models", nargs="+", metavar="NAME", help=text)
    add(
        "--targets",
        action="store_true",
        help="the figures to reach, and what they come to here; minutes",
    )
    add(
        "--figure",
        choices=FIGURES,
        help="redraw a figure of the papers on this machine; writes PNG and CSV",
    )
    text = (
        "the data pipeline alone: YAML files of trainings or names of data sets; options: "
        "configs/canvas.yaml+augment=none"
    )
    add("--loader", nargs="+", metavar="DATA", help=text + ", folder+root=PATH")
    text = (
        "on an NVIDIA GPU: kernels and models against floors measured there, SDPA and eager "
        "operations; minutes"
    )
    add("--gpu", action="store_true", help=text)
    text = (
        "on an NVIDIA GPU: blocks, pairs, warps, stages of kernels, no segments; writes "
        "visionattn/ops/gpu/launches.json"
    )
    add("--tune", action="store_true", help=text)
    text = (
        "with --gpu or --tune: the same lines on a processor, at tiny sizes and with made-up "
        "times; minutes"
    )
    add("--rehearse", action="store_true", help=text)
    add = parser.add_argument_group("sizes").add_argument
    add(
        "--tokens",
        nargs="+",
        type=_positive,
        default=[1024, 4096],
        metavar="N",
        help="of operations (1024 4096)",
    )
    add(
        "--img-size",
        nargs="+",
        type=_positive,
        metavar="PX",
        help="of models (224 512); of --loader (as the data say)",
    )
    add(
        "--width",
        nargs="+",
        type=_positive,
        default=[64],
        metavar="d",
        help="width of a head of operations (64)",
    )
    text = (
        "of the operations that have forms, and of our models (efficient for operations, auto "
        "for models)"
    )
    add("--form", nargs="+", choices=FORMS, metavar="FORM", help=text)
    add(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        default=["float32"],
        metavar="DTYPE",
        help=f"one of {', '.join(DTYPES)} (float32)",
    )
    add("--backward", action="store_true", help="time forward and backward, not the forward alone")
    add("--batch", type=_positive, help="(1; of --loader that of the training)")
    text = "processes that load; 0 loads in the main process (0 1 2)"
    add("--workers", nargs="+", type=_whole, default=[0, 1, 2], metavar="W", help=text)
    add(
        "--heads",
        type=_positive,
        default=6,
        help="of operations (6); of a model by its option +heads=12",
    )
    add(
        "--horizon",
        type=_whole,
        metavar="R",
        help="of the relative position of operations (3); 0 is one class",
    )
    add = parser.add_argument_group("how it is measured").add_argument
    text = (
        "the case that ratios are taken to (sdpa, or the first case); as the table names it, "
        "form included"
    )
    add("--baseline", metavar="CASE", help=text)
    add(
        "--rounds",
        type=_positive,
        help="of the interleaved run at least (5; 3 for models above 1024 px of --targets)",
    )
    text = (
        "for each case while more rounds are made (1; of --targets 2, and none for models); of "
        "--loader in all its rounds (3)"
    )
    add("--seconds", type=float, help=text)
    add(
        "--no-memory",
        action="store_true",
        help="leave out peak memory, which takes a process of some seconds per case",
    )
    add("--threads", type=_positive, help="of a processor (what torch takes)")
    add("--device", default="cpu", help="cpu or cuda (cpu)")
    text = "of --targets, --gpu and --tune the rows that this regular expression fits"
    add("--only", metavar="PATTERN", help=text)
    add(
        "--minutes", type=float, help="after which no row is begun, of --gpu (5) and of --tune (20)"
    )
    add(
        "--quick",
        action="store_true",
        help="of --figure a short version that shows no more than that it runs",
    )
    add = parser.add_argument_group("what is written").add_argument
    add("--csv", metavar="FILE", help="the rows as CSV, with provenance")
    add("--json", metavar="FILE", help="the rows as JSON, with provenance")
    add(
        "--rows",
        metavar="FILE",
        help="of --gpu: each row as a line of JSON as it is ready; added to a file that exists",
    )
    add(
        "--plot",
        metavar="FILE",
        help="PNG of time (and memory) over size, log-log, with fitted slopes",
    )
    add(
        "--output",
        metavar="FOLDER",
        default=".",
        help="where --figure writes NAME.png and NAME.csv (the current folder)",
    )
    add("--overwrite", action="store_true", help="replace files that exist")
    return parser


def _positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted a whole number above 0, got {text}")
    return int(text)


def _whole(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"wanted a whole number from 0, got {text}")
    return int(text)


@dataclass(frozen=True)
class Options:
    """Checked flags."""

    flags: argparse.Namespace
    sources: "tuple[Source, ...]" = ()
    """What ``--loader`` names."""

    @property
    def plan(self) -> Plan:
        """What to measure and how long."""
        flags = self.flags
        usual = 2.0 if flags.targets else 3.0 if flags.loader else 1.0
        seconds = usual if flags.seconds is None else flags.seconds
        return Plan(
            rounds=flags.rounds or 5,
            seconds=seconds,
            memory=not flags.no_memory,
            device=flags.device,
        )

    @property
    def minutes(self) -> float:
        """After which no row of ``--gpu`` or ``--tune`` is begun."""
        usual = 20.0 if self.flags.tune else 5.0
        return usual if self.flags.minutes is None else self.flags.minutes

    @property
    def paced(self) -> bool:
        """Whether the flags say how long to measure."""
        return self.flags.rounds is not None or self.flags.seconds is not None

    def cases(self) -> list[list[Case]]:
        """The cases, those of one place together."""
        flags, groups = self.flags, []
        operations, names = flags.operations is not None, flags.operations or flags.models
        for dtype in flags.dtype:
            shared = dict(
                dtype=dtype, backward=flags.backward, batch=flags.batch or 1, heads=flags.heads
            )
            shared["horizon"] = Case.horizon if flags.horizon is None else flags.horizon
            for width in flags.width if operations else [None]:
                for size in flags.tokens if operations else flags.img_size or [224, 512]:
                    kind = "operation" if operations else "model"
                    cases = [
                        Case(kind, name, size, width, form=form, **shared)
                        for name in names
                        for form in self._forms(name)
                    ]
                    groups.append(list(dict.fromkeys(cases)))
        return groups

    def loader_cases(self) -> "list[LoaderCase]":
        """What ``--loader`` measures, all in one run."""
        from visionattn.lab.loader import LoaderCase

        flags = self.flags
        cases = [
            LoaderCase(source, workers, flags.batch or source.config.batch_size, size)
            for source in self.sources
            for size in flags.img_size or [None]
            for workers in flags.workers
        ]
        return list(dict.fromkeys(cases))

    def _forms(self, name: str) -> Sequence[str]:
        if not self._has_forms(name):
            return ["auto"]
        return self.flags.form or (["efficient"] if self.flags.operations else ["auto"])

    def _has_forms(self, name: str) -> bool:
        base, *options = name.split("+")
        if self.flags.operations:
            return base in FORMED
        return base.startswith(("scaleformer_", "taylorshift_")) and "identity" not in options

    def check_acts(self) -> None:
        """Raise ValueError for a flag that acts on none of the cases or figures that are named."""
        flags = self.flags
        names = flags.operations or flags.models or []
        if flags.form and not any(self._has_forms(name) for name in names):
            raise ValueError(f"--form does nothing here: {', '.join(names)} have no forms")
        if flags.horizon is not None and not any(has_position(name) for name in names):
            raise ValueError(
                f"--horizon does nothing here: {', '.join(names)} have no relative position"
            )
        chosen = choose(flags.only) if flags.targets else []
        if chosen and self.paced and all(target.baseline is None for target in chosen):
            raise ValueError(
                "--rounds and --seconds do nothing here: the figures that --only leaves are not "
                "timed"
            )

    def baseline(self, cases: Sequence[Case]) -> str:
        """The label of the case that ratios are taken to.

        Raises:
            ValueError: there is no such case.
        """
        labels = [case.label for case in cases]
        if self.flags.baseline is None:
            return "sdpa" if "sdpa" in labels else labels[0]
        if self.flags.baseline not in labels:
            raise ValueError(
                f"--baseline {self.flags.baseline!r}: wanted one of the cases: {', '.join(labels)}"
            )
        return self.flags.baseline


def parse_options(argv: Sequence[str]) -> Options:
    """Read and check the flags; nothing is measured or written.

    Raises:
        ValueError: a flag is wrong, two contradict each other, or a file is in the way.
    """
    flags = make_parser().parse_args(argv)
    chosen = [name for name in WHAT if getattr(flags, name)]
    if len(chosen) != 1:
        raise ValueError(
            f"wanted one of {', '.join(f'--{name}' for name in WHAT)}, got "
            f"{' and '.join(chosen) or 'none'}"
        )
    given = {word.split("=")[0] for word in argv if word.startswith("--")}
    for flag, wanted in IDLE.items():
        if flag in given and chosen[0] not in wanted:
            raise ValueError(
                f"{flag} does nothing with --{chosen[0]}; it belongs to "
                f"{' and '.join(f'--{n}' for n in wanted)}"
            )
    for name in ("seconds", "minutes"):
        value = getattr(flags, name)
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"--{name}: wanted 0 or more, got {value}")
    pick_device(flags.device)
    options = Options(flags)
    options.check_acts()
    if chosen[0] in ("operations", "models"):
        for cases in options.cases():
            options.baseline(cases)
            for case in cases:
                check_case_runs(case)
    for path in outputs(flags):
        check_free(path, flags.overwrite)
    if flags.loader:
        return replace(options, sources=tuple(open_sources(flags)))
    if flags.gpu or flags.tune:
        check_gpu(flags)
    return options


def check_gpu(flags: argparse.Namespace) -> None:
    """Raise ValueError for an ``--only`` of ``--gpu`` or ``--tune`` that leaves no row, and where
    there is no GPU.

    A rehearsal wants Triton's interpreter instead of a GPU.
    """
    if flags.rehearse:
        from visionattn.lab.gpu.rehearsal import check_interpreter

        check_interpreter()
    if flags.gpu:
        from visionattn.lab.gpu.table import rows as check_rows
    else:
        from visionattn.lab.gpu.tune import check_rows
    check_rows(flags.only)
    if not flags.rehearse:
        pick_gpu()


def pick_gpu() -> torch.device:
    """The GPU at hand.

    Raises:
        ValueError: there is none that PyTorch can use.
    """
    if not torch.cuda.is_available():
        raise ValueError("no GPU here that PyTorch can use (torch.cuda.is_available() is False)")
    return torch.device("cuda", torch.cuda.current_device())


def open_sources(flags: argparse.Namespace) -> "list[Source]":
    """The images that ``--loader`` names; a name that is given twice counts once.

    Raises:
        ValueError, FileNotFoundError: something about them is wrong, or there are more workers than
            shards.
    """
    from visionattn.data.streams import Shards
    from visionattn.lab.loader import open_source

    sources = [open_source(text, flags.img_size) for text in dict.fromkeys(flags.loader)]
    for source in sources:
        train = source.splits.train
        if isinstance(train, Shards) and max(flags.workers) > len(train.shard_lengths):
            raise ValueError(
                f"{source.label} has {len(train.shard_lengths)} shards, too few for "
                f"{max(flags.workers)} workers"
            )
    return sources


WHAT = ("operations", "models", "targets", "figure", "loader", "gpu", "tune")
_SWEEP = ("operations", "models")
_GPU = ("gpu", "tune")
IDLE = {
    "--tokens": ("operations",),
    "--width": ("operations",),
    "--heads": ("operations",),
    "--horizon": ("operations",),
    "--img-size": ("models", "loader"),
    "--workers": ("loader",),
    "--form": _SWEEP,
    "--dtype": _SWEEP,
    "--backward": _SWEEP,
    "--batch": (*_SWEEP, "loader"),
    "--baseline": _SWEEP,
    "--no-memory": _SWEEP,
    "--rounds": (*_SWEEP, "targets", "loader"),
    "--seconds": (*_SWEEP, "targets", "loader"),
    "--plot": _SWEEP,
    "--only": ("targets", *_GPU),
    "--minutes": _GPU,
    "--rehearse": _GPU,
    "--rows": ("gpu",),
    "--quick": ("figure",),
    "--output": ("figure",),
    "--csv": (*_SWEEP, "targets", "loader", *_GPU),
    "--json": (*_SWEEP, "targets", "loader", *_GPU),
    "--device": _SWEEP,
    "--threads": (*_SWEEP, "targets", "figure"),
}
"""Flags that act with some of the seven alone."""


def check_case_runs(case: Case) -> None:
    """Raise ValueError for a name, an option or a size that does not exist or fit; shapes alone are
    followed.

    What is not built yet is no bad input: its row will say so.
    """
    with contextlib.suppress(NotImplementedError), torch.no_grad():
        build(case, "meta").forward()


def outputs(flags: argparse.Namespace) -> list[Path]:
    """The files that will be written."""
    named = [Path(name) for name in (flags.csv, flags.json, flags.plot) if name]
    if flags.figure:
        named += [Path(flags.output) / f"{flags.figure}.{end}" for end in ("png", "csv")]
    return named
