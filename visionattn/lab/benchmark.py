"""Run ``visionattn benchmark``. Each of its commands is a class with options, their checks and a
measurement, which prints a table and writes files.

The command ``gpu`` is in ``gpu/gpu_table.py``, which needs no library that reads configurations.
"""

import contextlib
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import cleandoc
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from visionattn.cli.commands import program, typed
from visionattn.cli.files import check_free, write_whole
from visionattn.cli.parsing import parse, with_first
from visionattn.cli.provenance import provenance_of, summary
from visionattn.cli.tables import Record
from visionattn.data.option_ranges import check_least, check_workers
from visionattn.lab import papers, targets
from visionattn.lab.case_comparison import (
    COLUMNS,
    MeasurementPlan,
    build,
    measure_together,
    record_of,
    tell,
)
from visionattn.lab.cases import Case, check_sizes
from visionattn.lab.compared_models import has_forms
from visionattn.lab.compared_operations import FORMED, position_named
from visionattn.lab.gpu.gpu_table import benchmark_gpu
from visionattn.models.devices import pick_device
from visionattn.ops.attentions import FormChoice

if TYPE_CHECKING:  # reading images needs libraries that a machine with a GPU may lack
    from visionattn.lab.loader_benchmark import LoaderCase

Print = Callable[[str], None]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]


def benchmark(argv: Sequence[str], show: Print) -> None:
    """Run the command named by the first word; ``show`` gets the table line by line.

    Raises:
        ValueError, OSError: a wrong option or an unwritable file; raised before measuring if
            possible.
        Failed: rows of ``gpu`` are wrong or could not be measured.
    """
    name, *words = argv or ("",)
    if name in ("-h", "--help"):
        show(commands())
        raise SystemExit(0)
    if name == "gpu":
        benchmark_gpu(words, show)
        return
    if name not in COMMANDS:
        wanted = ", ".join([*COMMANDS, "gpu"])
        raise ValueError(f"expected one of {wanted}, got {name[:80]!r}; see --help")
    command, before = COMMANDS[name], torch.get_num_threads()
    options = parse(
        command,
        with_first(words, command.first) if command.first else words,
        command=f"benchmark {name}",
        description=cleandoc(command.__doc__ or ""),
        example=command.example,
    )
    prepared = options.prepare()
    try:
        torch.set_num_threads(options.threads or before)
        provenance = provenance_of(getattr(options, "device", "cpu"), ["benchmark", *argv])
        show(summary(provenance) + "\n")
        options.run(prepared, provenance, show)
    finally:
        torch.set_num_threads(before)


def commands() -> str:
    """Return the text of ``visionattn benchmark --help``."""
    about = {name: command.__doc__ or "" for name, command in COMMANDS.items()}
    about["gpu"] = (
        "Kernels and models on an NVIDIA GPU, compared with the rates of that GPU; takes minutes."
    )
    lines = [
        textwrap.fill(" ".join(text.split()), 100, initial_indent=f"  {name:12}",
                      subsequent_indent=" " * 14)
        for name, text in about.items()
    ]  # fmt: skip
    example = typed("benchmark", "operations", *OperationOptions.example.split())
    head = [f"usage: {program('benchmark')} COMMAND ...", ""]
    head += ["COMMAND --help lists the options of a command.", ""]
    return "\n".join([*head, *lines, "", "example:", f"  {example}"])


@dataclass
class BenchmarkOptions:
    """Options that all commands share."""

    first: ClassVar[str] = ""
    """The option whose value may come first, without the option's name."""
    example: ClassVar[str]
    """Arguments of a working call."""
    csv: str | None = None
    """CSV file for the rows, with provenance."""
    threads: int | None = None
    """CPU threads; None: chosen by torch."""
    overwrite: bool = False
    """Replace existing files."""

    def files(self) -> list[str | None]:
        """Return the files to write; None means no file."""
        return [self.csv]

    def prepare(self) -> Any:
        """Check options and inputs, and return the work to measure.

        Raises:
            ValueError, OSError: an option is wrong or has no effect, or a file exists.
        """
        check_least(1, threads=self.threads)
        for option, suffix in (("csv", ".csv"), ("plot", ".png")):
            path = getattr(self, option, None)
            if path is not None and Path(path).suffix.lower() != suffix:
                raise ValueError(f"expected --{option} to end in {suffix}, got {path}")
        for path in filter(None, self.files()):
            check_free(Path(path), self.overwrite)

    def run(self, prepared: Any, provenance: Record, show: Print) -> None:
        """Measure the work that ``prepare`` returned; ``show`` gets the table line by line."""
        raise NotImplementedError


@dataclass
class CaseOptions(BenchmarkOptions):
    """Options that ``operations`` and ``models`` share."""

    first: ClassVar[str] = "names"
    names: list[str] = field(default_factory=list)
    """Operations or models to measure. They may come first, without ``--names``."""
    form: list[FormChoice] | None = None
    """Any of auto, direct, efficient; None: efficient for operations, auto for models. Baselines
    have no forms.
    """
    dtype: list[Dtype] = field(default_factory=lambda: ["float32"])
    """Any of float32, bfloat16, float16, float64."""
    backward: bool = False
    """Time forward and backward, not only the forward."""
    batch: int = 1
    """Batch size."""
    baseline: str | None = None
    """Baseline of the ratios, named as in the table with its form; None: sdpa, or the first case.
    """
    rounds: int = 5
    """Minimum rounds of the interleaved run."""
    seconds: float = 1.0
    """Measurement time of each case in seconds. More than ``rounds`` rounds run if they fit."""
    no_memory: bool = False
    """Skip peak memory, which takes a process of some seconds for each case."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    plot: str | None = None
    """PNG file for log-log plots of time and memory over size, with fitted slopes."""

    def files(self) -> list[str | None]:
        """Return the files to write; None means no file."""
        return [self.csv, self.plot]

    def cases(self) -> list[Case]:
        """Check sizes, and return the cases in the order of the options."""
        raise NotImplementedError

    def baseline_of(self, cases: Sequence[Case]) -> str:
        """Return the label of the baseline of the ratios.

        Raises:
            ValueError: no case has this label.
        """
        labels = [case.label for case in cases]
        baseline = self.baseline or ("sdpa" if "sdpa" in labels else labels[0])
        if baseline not in labels:
            raise ValueError(f"baseline {baseline}: expected one of the cases: {', '.join(labels)}")
        return baseline

    def prepare(self) -> list[list[Case]]:
        """Check names, sizes, devices and options; return the cases, grouped by ``Case.place``."""
        check_least(1, batch=self.batch, rounds=self.rounds)
        check_least(0, seconds=self.seconds)
        super().prepare()
        pick_device(self.device)
        places: dict[Case, list[Case]] = {}
        for case in self.cases():
            places.setdefault(case.place, []).append(case)
        groups = [list(dict.fromkeys(cases)) for cases in places.values()]
        if not groups:
            raise ValueError("nothing to measure; see the example of --help")
        if self.form not in (None, ["auto"]) and all(
            case.form == "auto" for cases in groups for case in cases
        ):
            raise ValueError(
                f"form has no effect, because {', '.join(self.names)} have no forms; remove it"
            )
        for cases in groups:
            self.baseline_of(cases)
            for case in cases:
                check_sizes(case)
                # If an operation is not implemented, its row will say so.
                with contextlib.suppress(NotImplementedError), torch.no_grad():
                    build(case, "meta").forward()
        return groups

    def run(self, groups: Sequence[Sequence[Case]], provenance: Record, show: Print) -> None:
        """Measure cases of one size against each other, and print them size by size."""
        memory, device = not self.no_memory, self.device
        plan = MeasurementPlan(
            rounds=self.rounds, seconds=self.seconds, memory=memory, device=device
        )
        rows = (
            record_of(row)
            for cases in groups
            for row in measure_together(cases, plan, self.baseline_of(cases))
        )
        records = tell(rows, COLUMNS, provenance, show, self.csv)
        if self.plot:
            from visionattn.lab.charts import png
            from visionattn.lab.figures import sizes_of

            charts, notes = sizes_of(records), [summary(provenance), provenance["command"]]
            write_whole(self.plot, lambda path: png(path, charts, notes=notes))


@dataclass
class OperationOptions(CaseOptions):
    """Attention operations against each other and against PyTorch's: taylorshift, kernelized,
    softmax, window, relative, sdpa, eager, eager-kernelized. Options follow plus signs:
    taylorshift+temperature+joint.
    """

    example: ClassVar[str] = (
        "taylorshift kernelized+joint sdpa --tokens 256 512 --width 32 --no-memory"
    )
    tokens: list[int] = field(default_factory=lambda: [1024, 4096])
    """Numbers of tokens N."""
    width: list[int] = field(default_factory=lambda: [64])
    """Head dimensions d."""
    heads: int = 6
    """Number of heads."""
    horizon: int = 3
    """Horizon R of the relative position; 0: a single class."""

    def cases(self) -> list[Case]:
        """Check sizes, and return the cases in the order of the options."""
        check_least(1, tokens=self.tokens, width=self.width, heads=self.heads)
        check_least(0, horizon=self.horizon)
        how = dict(backward=self.backward, batch=self.batch, heads=self.heads)
        how["horizon"] = self.horizon
        cases = [
            Case("operation", name, size, width, form, dtype, **how)
            for dtype, width, size, name in product(self.dtype, self.width, self.tokens, self.names)
            for form in ((self.form or ["efficient"]) if name.split("+")[0] in FORMED else ["auto"])
        ]
        if self.horizon != OperationOptions.horizon and not any(map(position_named, cases)):
            raise ValueError("horizon has no effect without relative position; remove it")
        return cases


@dataclass
class ModelOptions(CaseOptions):
    """Whole models of visionattn and timm, by timm name. Options follow plus signs:
    scaleformer_vit_s+identity, vit_small_patch16_224+eager, taylorshift_vit_s+heads=12.
    """

    example: ClassVar[str] = "scaleformer_vit_t --img_size 224"
    img_size: list[int] = field(default_factory=lambda: [224, 512])
    """Image sizes (height and width) in pixels."""

    def cases(self) -> list[Case]:
        """Check sizes, and return the cases in the order of the options."""
        check_least(1, img_size=self.img_size)
        return [
            Case("model", name, px, None, form, dtype, self.backward, self.batch)
            for dtype, px, name in product(self.dtype, self.img_size, self.names)
            for form in ((self.form or ["auto"]) if has_forms(name) else ["auto"])
        ]


@dataclass
class TargetOptions(BenchmarkOptions):
    """Performance targets, and the values measured on this machine; takes minutes."""

    example: ClassVar[str] = "--only 'N = 4096'"
    only: str | None = None
    """Regular expression that selects rows; None: all."""

    def prepare(self) -> list[targets.Target]:
        """Return the targets."""
        super().prepare()
        return targets.choose(self.only)

    def run(self, chosen: Sequence[targets.Target], provenance: Record, show: Print) -> None:
        """Measure the targets and print each when ready."""
        tell(targets.measure_targets(chosen), targets.COLUMNS, provenance, show, self.csv)


@dataclass
class PaperOptions(BenchmarkOptions):
    """A figure of the papers, measured and drawn on this machine."""

    first: ClassVar[str] = "figure"
    example: ClassVar[str] = "crossover --quick"
    figure: str | None = None
    """crossover, scaleformer-4, scaleformer-5, scaleformer-6 or taylorshift-heads. The name may
    come first, without ``--figure``.
    """
    csv: str | None = None
    """CSV file for the rows, with provenance. The PNG has the same name. None: the figure's name.
    """
    quick: bool = False
    """Measure few small sizes, only to show that it runs."""

    def files(self) -> list[str | None]:
        """Return the files to write."""
        csv = Path(self.csv or f"{self.figure}.csv")
        return [str(csv), str(csv.with_suffix(".png"))]

    def prepare(self) -> papers.Figure:
        """Return the figure."""
        if self.figure not in papers.FIGURES:
            raise ValueError(
                f"figure must be one of {', '.join(papers.FIGURES)}, got {self.figure}"
            )
        super().prepare()
        return papers.FIGURES[self.figure]

    def run(self, figure: papers.Figure, provenance: Record, show: Print) -> None:
        """Measure and draw the figure, and write its rows."""
        place = Path(self.files()[0] or "")
        papers.redraw(figure, place.parent, place.stem, provenance, show, quick=self.quick)


@dataclass
class LoaderOptions(BenchmarkOptions):
    """The data pipeline without a model, for YAML files of trainings or names of datasets. Options
    follow plus signs: configs/canvas.yaml+augment=none, folder+root=PATH.
    """

    first: ClassVar[str] = "names"
    example: ClassVar[str] = "digits --workers 0 --rounds 2"
    names: list[str] = field(default_factory=list)
    """Datasets or configurations to load. They may come first, without ``--names``."""
    img_size: list[int] | None = None
    """Image sizes (height and width) in pixels; None: the size in the data configuration."""
    batch: int | None = None
    """Batch size; None: as in the training."""
    workers: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Numbers of worker processes; 0 loads in the main process."""
    rounds: int = 5
    """Number of rounds of the interleaved run."""
    seconds: float = 3.0
    """Measurement time of each case in seconds, over all rounds."""

    def prepare(self) -> "list[LoaderCase]":
        """Find the images, and return the cases to measure."""
        from visionattn.lab.loader_benchmark import loader_cases

        if not self.names:
            raise ValueError("nothing to load; see the example of --help")
        check_least(1, img_size=self.img_size, batch=self.batch, rounds=self.rounds)
        check_least(0, seconds=self.seconds)
        for workers in self.workers:
            check_workers(workers, "workers")
        for px in self.img_size or []:
            check_sizes(Case("model", "loader", px, batch=self.batch or 1))
        super().prepare()
        return loader_cases(self.names, self.img_size, self.workers, self.batch)

    def run(self, cases: "Sequence[LoaderCase]", provenance: Record, show: Print) -> None:
        """Measure the loading throughput; print the steps that count, and a row for each case."""
        from visionattn.lab import loader_benchmark

        show(f"{loader_benchmark.COUNTED}\n")
        rows = loader_benchmark.measure_loaders(cases, rounds=self.rounds, seconds=self.seconds)
        tell(rows, loader_benchmark.COLUMNS, provenance, show, self.csv)


COMMANDS: dict[str, type[BenchmarkOptions]] = {
    "operations": OperationOptions,
    "models": ModelOptions,
    "targets": TargetOptions,
    "papers": PaperOptions,
    "loader": LoaderOptions,
}
