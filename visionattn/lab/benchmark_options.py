"""What the flags of ``visionattn benchmark`` mean, and what they must be. It times nothing."""

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from visionattn.cli.files import check_free
from visionattn.data.ranges import check_workers
from visionattn.lab.benchmark_flags import parse_flags
from visionattn.lab.cases import Case, check_sizes
from visionattn.lab.compare import Plan
from visionattn.lab.gpu.gpu_rows import chosen
from visionattn.lab.gpu.gpu_table import make_bench
from visionattn.lab.memory import build
from visionattn.lab.networks import has_forms
from visionattn.lab.operations import FORMED, has_position
from visionattn.lab.target_table import choose
from visionattn.models.machine import pick_device

if TYPE_CHECKING:  # reading images needs libraries that a machine with a GPU may lack
    from visionattn.lab.loader import LoaderCase, Source

TARGET_ROUNDS, TARGET_SECONDS = 5, 2.0
"""How long a figure to reach is measured where no flag says so."""


@dataclass(frozen=True)
class Options:
    """Checked flags."""

    flags: argparse.Namespace
    sources: "tuple[Source, ...]" = ()
    """What ``loader`` names."""

    @property
    def plan(self) -> Plan:
        """Return what to measure and how long, of a command that times."""
        flags = self.flags
        return Plan(
            rounds=flags.rounds or TARGET_ROUNDS,
            seconds=TARGET_SECONDS if flags.seconds is None else flags.seconds,
            memory=not flags.no_memory,
            device=flags.device,
        )

    @property
    def paced(self) -> bool:
        """Tell whether the flags say how long to measure."""
        return self.flags.rounds is not None or self.flags.seconds is not None

    def cases(self) -> list[list[Case]]:
        """Return the cases, those of one place together."""
        flags, groups = self.flags, []
        shared = dict(backward=flags.backward, batch=flags.batch)
        if flags.command == "operations":
            horizon = Case.horizon if flags.horizon is None else flags.horizon
            shared |= dict(kind="operation", heads=flags.heads, horizon=horizon)
            places = [(size, width) for width in flags.width for size in flags.tokens]
        else:
            shared |= dict(kind="model")
            places = [(size, None) for size in flags.img_size]
        for dtype in flags.dtype:
            for size, width in places:
                cases = [
                    Case(name=name, size=size, width=width, form=form, dtype=dtype, **shared)
                    for name in flags.names
                    for form in self._forms(name)
                ]
                groups.append(list(dict.fromkeys(cases)))
        return groups

    def loader_cases(self) -> "list[LoaderCase]":
        """Return what ``loader`` measures, all in one run."""
        from visionattn.lab.loader import LoaderCase

        flags = self.flags
        cases = [
            LoaderCase(source, workers, flags.batch or source.config.batch_size, size, read_all)
            for source in self.sources
            for size in flags.img_size or [None]
            for workers in flags.workers
            for read_all in ([False, True] if flags.read_all else [False])
        ]
        return list(dict.fromkeys(cases))

    def _forms(self, name: str) -> Sequence[str]:
        if not self._has_forms(name):
            return ["auto"]
        return self.flags.form or (
            ["efficient"] if self.flags.command == "operations" else ["auto"]
        )

    def _has_forms(self, name: str) -> bool:
        if self.flags.command == "operations":
            return name.split("+")[0] in FORMED
        return has_forms(name)

    def check_acts(self) -> None:
        """Raise ValueError for a flag that acts on none of the cases that are named."""
        flags, names = self.flags, ", ".join(self.flags.names)
        if flags.form and not any(map(self._has_forms, flags.names)):
            raise ValueError(f"--form does nothing here: {names} have no forms")
        if flags.horizon is not None and not any(map(has_position, flags.names)):
            raise ValueError(f"--horizon does nothing here: {names} have no relative position")

    def baseline(self, cases: Sequence[Case]) -> str:
        """Return the label of the case that ratios are taken to.

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
    flags = parse_flags(argv)
    options = Options(flags)
    if flags.command in ("operations", "models"):
        check_cases(options)
    if flags.command == "targets":
        targets = choose(flags.only)
        if options.paced and all(target.baseline is None for target in targets):
            raise ValueError(
                "--rounds and --seconds do nothing here: the figures that --only leaves are not "
                "timed"
            )
    for path in outputs(flags):
        check_free(path, flags.overwrite)
    if flags.command == "papers" and flags.processor_time and flags.threads != 1:
        raise ValueError("--processor-time adds up the seconds of all threads; give --threads 1")
    if flags.command == "loader":
        from visionattn.lab.loader import open_sources

        for workers in flags.workers:
            check_workers(workers, "workers")
        for size in flags.img_size or []:
            check_sizes(Case("model", "loader", size, batch=flags.batch or 1))
        sources = open_sources(flags.names, flags.img_size, flags.workers, read_all=flags.read_all)
        return replace(options, sources=sources)
    if flags.command == "gpu":
        chosen(flags.only, rehearse=flags.rehearse)
        make_bench(flags.rehearse)
    return options


def check_cases(options: Options) -> None:
    """Raise ValueError for a device that is not here, a flag without effect, and a case whose name,
    options or size do not exist or fit; shapes alone are followed.
    """
    pick_device(options.flags.device)
    options.check_acts()
    for cases in options.cases():
        options.baseline(cases)
        for case in cases:
            check_sizes(case)
            # What is not built yet is no bad input: its row will say so.
            with contextlib.suppress(NotImplementedError), torch.no_grad():
                build(case, "meta").forward()


def outputs(flags: argparse.Namespace) -> list[Path]:
    """Return the files that will be written."""
    if flags.command == "papers":
        return [Path(flags.output) / f"{flags.names}.{end}" for end in ("png", "csv")]
    return [Path(name) for name in (flags.csv, flags.json, flags.plot) if name]
