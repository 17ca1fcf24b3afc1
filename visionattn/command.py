"""The command ``visionattn`` and its subcommands; ``tools/*.py`` call the same functions.

This is the top of the package: it may import everything, and nothing imports it. ``visionattn
--help`` does not wait for torch, nor does an error about a mistyped option of a subcommand whose
options need no torch (``Subcommand.options``): their names are checked before its modules are
imported.
"""

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import visionattn
from visionattn.cli.interruption import STOPPED, is_alone

Words = Sequence[str]
Say = Callable[[str], None]


def train(argv: Words, say: Say) -> None:
    """Train a model; under ``torchrun``, together with its other processes."""
    from visionattn.cli.exit_codes import Stopped
    from visionattn.training.config import parse_train
    from visionattn.training.distributed import joined
    from visionattn.training.engine import show_batch, train
    from visionattn.training.run_folder import how_to_resume
    from visionattn.training.run_progress import report

    with joined() as processes:
        config = processes.together(lambda: parse_train(argv))
        if config.show_batch is not None:
            if processes.first:
                say(show_batch(config))
            return
        try:
            result = train(config, processes=processes)
        except Stopped as stop:
            raise Stopped(f"{stop}; to resume: {how_to_resume(config)}") from stop
        if processes.first:
            say("\n".join(report(config, result)))


def distil(argv: Words, say: Say) -> None:
    """Distill a model; under ``torchrun``, together with its other processes."""
    from visionattn.training.distil.distil_config import parse_distil
    from visionattn.training.distil.distillation import distil
    from visionattn.training.distributed import joined

    with joined() as processes:
        config = processes.together(lambda: parse_distil(argv))
        result = distil(config, processes=processes)
        if processes.first:
            say("\n".join(result.report()))


def validate(argv: Words, say: Say) -> None:
    """Evaluate a checkpoint at several image sizes and print each row of the table once ready."""
    from visionattn.training.validate import COLUMNS, Validation, align, parse_validate

    config = parse_validate(argv)
    validation = Validation(config)
    say(validation.about())
    for line in validation.outlook():
        say(line)
    say(align(COLUMNS[validation.spec.task]))
    rows = []
    for row in validation.rows():
        rows.append(row)
        say(align(row.cells()))
        for line in row.details(validation.spec):
            say(line)
    if config.json:
        validation.save(rows)


def stats(argv: Words, say: Say) -> None:
    """Measure the mean and standard deviation of the user's training images."""
    from visionattn.data.stats import stats

    stats(argv, say)


def predict(argv: Words, say: Say) -> None:
    """Predict the class of each image, or of each pixel for a segmentation model."""
    from visionattn.inference.banded_inference import MapOfImage, is_map
    from visionattn.inference.inference_options import PredictOptions, parse_options
    from visionattn.inference.predict import predict
    from visionattn.inference.segment import MaskPredictor, gives_masks

    example = "--checkpoint checkpoints/digits/best.safetensors --images docs/figures"
    what = "Predict the classes of images, or draw segmentation masks."
    about = dict(command="predict", description=what, example=example)
    options = parse_options(PredictOptions, argv, **about)
    if not gives_masks(options):
        predict(options, say)
    elif is_map(options.output, features=options.saved == ["probabilities"]):
        MapOfImage(options).run(say)
    else:
        MaskPredictor(options).run(say)


def features(argv: Words, say: Say) -> None:
    """Extract the features of image files."""
    from visionattn.inference.banded_inference import MapOfImage, is_map
    from visionattn.inference.extraction import Extraction
    from visionattn.inference.feature_options import check, parse_extract
    from visionattn.inference.shards import merge

    example = "--model scaleformer_vit_t --images docs/figures --img_size 224 "
    about = dict(
        command="features",
        description="Extract features of images to safetensors, with an index.",
        example=example + "--output checkpoints/features/figures",
    )
    options = parse_extract(argv, **about)
    check(options)
    if options.merge:
        merge(Path(options.output), say)
    elif options.engine == "ray":
        from visionattn.integrations.ray_engine import extract

        extract(options, say)
    elif is_map(options.output, features=True):
        MapOfImage(options).run(say)
    else:
        Extraction(options).run(say)


def look(argv: Words, say: Say) -> None:
    """Draw the attribution map of a class over each image."""
    from visionattn.inference.attribution_folder import look
    from visionattn.inference.look_options import parse_look
    from visionattn.lab.report.templates import look_page

    look(parse_look(argv), say, look_page)


def generate(argv: Words, say: Say) -> None:
    """Generate images with a pixel decoder, or complete the lower part of image files."""
    from visionattn.inference.generate_options import parse_generate
    from visionattn.inference.generated_files import write_generated

    write_generated(parse_generate(argv), say)


def share(argv: Words, say: Say) -> None:
    """Write a checkpoint in the format of timm and transformers, or upload it."""
    from visionattn.training.share import parse_share, share

    say("\n".join(share(parse_share(argv))))


def convert(argv: Words, say: Say) -> None:
    """Convert a timm ViT and its weights to a model of this package."""
    from visionattn.models.conversion import convert

    convert(argv, say)


def export(argv: Words, say: Say) -> None:
    """Export a model to ONNX, to a torch.export program, or compiled."""
    from visionattn.models.export import export_model

    export_model(argv, say)


def sweep(argv: Words, say: Say) -> None:
    """Train and measure models with different head counts, one process per training run."""
    from visionattn.cli.commands import started
    from visionattn.lab.sweep.head_sweep import sweep

    sweep(argv, say, train=started("train"))


def profile(argv: Words, say: Say) -> None:
    """Measure the peak memory of models at several image sizes."""
    from visionattn.lab.profile.memory_profile import profile

    profile(argv, say)


def benchmark(argv: Words, say: Say) -> None:
    """Measure operations, models, kernels or data loading."""
    from visionattn.lab.benchmark import benchmark

    benchmark(argv, say)


def report(argv: Words, say: Say) -> None:
    """Write an HTML report on runs, sweeps and memory profiles."""
    from visionattn.lab.report.report_page import report

    say(report(argv))


@dataclass(frozen=True)
class Subcommand:
    """A row of ``visionattn --help`` and the function that it runs."""

    work: Callable[[Words, Say], None]
    about: str
    options: str | None = None
    """Import path of the dataclass of its options; None if that module imports torch."""
    several: bool = False
    """Whether ``torchrun`` may run the subcommand in several processes."""


SUBCOMMANDS = {
    "train": Subcommand(
        train,
        "train a model on images with classes",
        "visionattn.training.config.TrainConfig",
        several=True,
    ),
    "distil": Subcommand(
        distil, "train a linear-attention model from a softmax ViT, without labels", several=True
    ),
    "validate": Subcommand(
        validate,
        "evaluate a checkpoint at several image sizes",
        "visionattn.training.config.ValidateConfig",
    ),
    "stats": Subcommand(stats, "compute mean and standard deviation of training images, per band"),
    "predict": Subcommand(
        predict,
        "predict classes of images, as a table, CSV or JSON, or segmentation masks",
        "visionattn.inference.inference_options.PredictOptions",
    ),
    "features": Subcommand(
        features,
        "extract features of images to safetensors, with an index",
        "visionattn.inference.feature_options.ExtractOptions",
    ),
    "look": Subcommand(look, "draw the attribution map of a class over images"),
    "generate": Subcommand(generate, "generate or complete images with a pixel decoder"),
    "share": Subcommand(share, "write a checkpoint in the formats of timm and transformers"),
    "convert": Subcommand(convert, "convert a timm ViT and its weights to a model of visionattn"),
    "export": Subcommand(export, "export a model to ONNX, torch.export, or compiled"),
    "sweep": Subcommand(sweep, "train and measure one configuration with different head counts"),
    "profile": Subcommand(profile, "measure peak memory of models at several image sizes"),
    "benchmark": Subcommand(benchmark, "time operations, models, kernels and data loading"),
    "report": Subcommand(report, "write an HTML report on runs, sweeps and memory profiles"),
}


def run(name: str, argv: Words | None = None) -> int:
    """Run a subcommand and return the exit code of ``run_tool``.

    Args:
        name: one of ``SUBCOMMANDS``.
        argv: the arguments after the name; None: ``sys.argv[1:]``.
    """
    from visionattn.cli.exit_codes import run_tool

    words = sys.argv[1:] if argv is None else argv
    subcommand = SUBCOMMANDS[name]

    def work() -> None:
        if subcommand.options and is_alone():
            check_names(subcommand.options, words)
        import visionattn.models  # noqa: F401  registers them with timm

        subcommand.work(words, lambda text: print(text, flush=True))

    return run_tool(work, several=subcommand.several)


def check_names(options: str, argv: Words) -> None:
    """Raise ValueError for a flag that is not a field of the dataclass at import path
    ``options``.
    """
    from visionattn.cli.parsing import field_types, flags_of

    module, _, name = options.rpartition(".")
    flags_of(argv, field_types(getattr(import_module(module), name)))


def leave(code: int) -> NoReturn:
    """End this process with an exit code.

    After Ctrl-C, skip Python's shutdown, which takes a second or more to unload libraries.
    """
    if code == STOPPED:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)


def script() -> NoReturn:
    """Run the command ``visionattn`` and end the process."""
    leave(main())


def main(argv: Words | None = None) -> int:
    """Run the subcommand named first in ``argv`` and return its exit code; 2 without a known
    subcommand.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in SUBCOMMANDS:
        return run(name, rest)
    if name in ("--help", "-h", ""):
        print(overview(), file=sys.stdout if name else sys.stderr)
        return 0 if name else 2
    if name == "--version":
        print(f"visionattn {visionattn.__version__}")
        return 0
    closest = get_close_matches(name, SUBCOMMANDS, 1, 0)[0]
    print(
        f"error: visionattn has no command {name:.80}; did you mean {closest}? --help lists all "
        "commands",
        file=sys.stderr,
    )
    return 2


def overview() -> str:
    """Return the text of ``visionattn --help``."""
    rows = [f"  {name:<11}{row.about}" for name, row in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "usage: visionattn COMMAND ... | --version | --help",
            "",
            *rows,
            "",
            "visionattn COMMAND --help lists the options of a command and ends with an example.",
        ]
    )
