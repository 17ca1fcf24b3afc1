"""Absurd values for every typed flag of every tool."""

import itertools
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from tests.malformed.mutations import shown
from tests.malformed.runner import Case
from tests.malformed.valid import CONVERT, DISTIL, EXPORT, FEATURES, GENERATE, LOOK, SHARE
from visionattn.cli.parsing import field_types
from visionattn.data.stats import StatsConfig
from visionattn.inference.feature_options import ExtractOptions
from visionattn.inference.generate_options import GenerateOptions
from visionattn.inference.inference_options import PredictOptions
from visionattn.inference.look_options import LookOptions
from visionattn.lab.benchmark import COMMANDS
from visionattn.lab.profile.profile_flags import ProfileConfig
from visionattn.lab.report.report_page import ReportConfig
from visionattn.lab.sweep.sweep_flags import SweepConfig
from visionattn.models.conversion import ConvertOptions
from visionattn.models.export import ExportOptions
from visionattn.training.config import TrainConfig, ValidateConfig
from visionattn.training.distil.distil_config import DistilConfig
from visionattn.training.share import ShareConfig

LONG = "x" * 5000
WRONG = {
    int: ("x", "1.5", "-1", "1e400", ".nan", "{a: 1}", "[[1]]"),
    float: ("x", ".nan", ".inf", "-1e300", "{a: 1}", "[[1]]", "1e400"),
    bool: ("maybe", "2", "1.5", "[true]", "{a: 1}"),
    str: ("",),
    list: ("{a: 1}", "[[[1]]]", "[null]", "[{a: 1}]", "[1"),
    dict: ("x", "[1]", "1", "{1: 2}", "{a: 1"),
    Literal: ("wrong", "1", "[none]", LONG),
}
"""Values that no flag of the type takes."""
TAKES = {"features_block": ("-1",)}
"""What a flag takes though others of its type do not."""


TRAIN = ("train", "--config", "train.yaml", "--run", "out")
TOOLS = {
    "train": (TRAIN, TrainConfig),
    "validate": (
        ("validate", "--checkpoint", "run/best.safetensors", "--json", "out.json"),
        ValidateConfig,
    ),
    "stats": (
        ("stats", "--data.root", "images", "--data.workers", "0", "--output", "out.yaml"),
        StatsConfig,
    ),
    "predict": (("predict", *FEATURES[1:], "--output", "out.csv"), PredictOptions),
    "features": ((*FEATURES, "--output", "out"), ExtractOptions),
    "look": (LOOK, LookOptions),
    "generate": (GENERATE, GenerateOptions),
    "share": (SHARE, ShareConfig),
    "convert": (CONVERT, ConvertOptions),
    "distil": (DISTIL, DistilConfig),
    "export": (EXPORT, ExportOptions),
    "sweep": (("sweep", "--base", "base.yaml", "--heads", "2", "--output", "out"), SweepConfig),
    "profile": (
        ("profile", "--models", "vit_tiny_patch16_224", "--img_size", "32", "--depth", "1")
        + ("--output", "out"),
        ProfileConfig,
    ),
    "report": (("report", "run", "--output", "out.html"), ReportConfig),
}
BENCHMARKS = {"operations": "taylorshift", "models": "vit_tiny_patch16_224", "loader": "digits"}
BENCHMARKS |= {"papers": "taylorshift-heads"}
TOOLS |= {
    f"benchmark {name}": (("benchmark", name, *filter(None, [BENCHMARKS.get(name)])), command)
    for name, command in COMMANDS.items()
}


def cases() -> Iterator[Case]:
    """Return a case for each flag and each value that it does not take."""
    for name, (argv, config) in TOOLS.items():
        for flag, kind in field_types(config).items():
            for value in some(list(wrong_values(flag, kind))):
                yield Case(f"flag {name}/{flag}={shown(value)}", (*argv, f"--{flag}={value}"))
        for number, words in enumerate(ODD_WORDS):
            yield Case(f"flag {name}/odd {number}", (*argv, *words))
    yield from benchmark_cases()


ODD_WORDS = (
    ("--no_such_flag", "1"),
    ("--no_such_flag=" + "x" * 5000,),
    ("--" + "y" * 5000, "1"),
    ("stray",),
    ("-x",),
    ("--=1",),
    ("--config",),
    ("--config", "nowhere.yaml"),
    ("--config", "images"),
    ("--seed.x.y.z", "1"),
    ("--help.me", "1"),
)
"""Words that are no flags of a tool."""


def wrong_values(flag: str, kind: Any) -> Iterator[str]:
    """Return values that a flag of this type does not take."""
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    heads = [get_origin(member) or member for member in members]
    if type(None) not in heads and str not in heads and dict not in heads:
        yield "null"
    taken = set(TAKES.get(flag, ()))
    if len(heads) > 1 and list in heads:
        taken |= {"[[1]]", "[none]"}
    if str not in heads:
        first = next(head for head in heads if head in WRONG)
        yield from (value for value in WRONG[first] if value not in taken)


TURN = itertools.count()


def some(values: list[str]) -> list[str]:
    """Return two of the values, other ones from call to call; null always."""
    start = next(TURN)
    rest = [value for value in values if value != "null"]
    chosen = [rest[(start + i) % len(rest)] for i in range(min(2, len(rest)))]
    return ["null"] * (len(rest) < len(values)) + chosen


def benchmark_cases() -> Iterator[Case]:
    """Return the cases of the commands of the benchmark that are no flags."""
    for flag in ("--minutes=x", "--minutes=-1", "--minutes=.nan", "--only=(", "--rehearse=x"):
        yield Case(f"flag benchmark gpu/{flag}", ("benchmark", "gpu", flag))
