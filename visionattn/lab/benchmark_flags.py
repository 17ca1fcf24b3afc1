"""The commands of ``visionattn benchmark`` and their flags: what is typed. It measures nothing."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from visionattn.cli.commands import program, typed
from visionattn.cli.parsing import MOST, whole_from
from visionattn.cli.untrusted import brief
from visionattn.lab.cases import DTYPES
from visionattn.lab.papers import FIGURES
from visionattn.ops.attentions import FORM_CHOICES

EXAMPLE = "operations taylorshift kernelized+joint sdpa --tokens 256 512 --width 32 --no-memory"


positive, whole = whole_from(1), whole_from(0)


LONGEST = 1e6
"""The most seconds or minutes that may be asked for."""


def duration(text: str) -> float:
    """Return a number from 0 to ``LONGEST``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= LONGEST:
        wanted = f"at most {LONGEST:,.0f}" if value > LONGEST else "0 or more"
        raise argparse.ArgumentTypeError(f"wanted {wanted}, got {brief(text)}")
    return value


SWITCH = {"action": "store_true"}
FLAGS = {
    "tokens": dict(nargs="+", type=positive, default=[1024, 4096], metavar="N", help="(1024 4096)"),
    "img-size": dict(nargs="+", type=positive, metavar="PX", help="height and width (%(default)s)"),
    "width": dict(nargs="+", type=positive, default=[64], metavar="d", help="of a head (64)"),
    "heads": dict(type=positive, default=6, help="(%(default)s)"),
    "horizon": dict(type=whole, metavar="R", help="of the relative position (3); 0 is one class"),
    "form": dict(
        nargs="+", choices=FORM_CHOICES, metavar="FORM", help=f"any of {', '.join(FORM_CHOICES)}"
    ),
    "dtype": dict(
        nargs="+",
        choices=DTYPES,
        default=["float32"],
        metavar="DTYPE",
        help=f"any of {', '.join(DTYPES)} (float32)",
    ),
    "backward": SWITCH | dict(help="time forward and backward, not the forward alone"),
    "batch": dict(type=positive, default=1, help="images at once (%(default)s)"),
    "workers": dict(
        nargs="+",
        type=whole,
        default=[0, 1, 2],
        metavar="W",
        help="processes that load; 0 loads in the main process (0 1 2)",
    ),
    "read-all": SWITCH
    | dict(help="also decode all of each image, where a part or a smaller size is enough"),
    "baseline": dict(
        metavar="CASE",
        help="the case that ratios are taken to (sdpa, or the first case); as the table names it, "
        "form included",
    ),
    "rounds": dict(type=positive, default=5, help="of the interleaved run at least (%(default)s)"),
    "seconds": dict(
        type=duration, default=1.0, help="for each case while more rounds are made (%(default)s)"
    ),
    "no-memory": SWITCH
    | dict(help="leave out peak memory, which takes a process of some seconds per case"),
    "processor-time": SWITCH
    | dict(
        help="seconds that a processor spends, not those of a clock: other work on the machine "
        "does not count; with --threads 1"
    ),
    "threads": dict(type=whole_from(1, MOST["threads"]), help="of a processor (what torch takes)"),
    "device": dict(default="cpu", help="cpu or cuda (%(default)s)"),
    "only": dict(metavar="PATTERN", help="the rows that this regular expression fits"),
    "minutes": dict(type=duration, help="after which no row is begun (%(default)s)"),
    "rehearse": SWITCH
    | dict(help="the same lines on a processor, at tiny sizes, kernels interpreted; minutes"),
    "quick": SWITCH | dict(help="a short version that shows no more than that it runs"),
    "rows": dict(
        metavar="FILE",
        help="each row as a line of JSON as it is ready; added to a file that exists",
    ),
    "csv": dict(metavar="FILE", help="the rows as CSV, with provenance"),
    "json": dict(metavar="FILE", help="the rows as JSON, with provenance"),
    "plot": dict(
        metavar="FILE", help="PNG of time (and memory) over size, log-log, with fitted slopes"
    ),
    "output": dict(
        metavar="FOLDER", default=".", help="where NAME.png and NAME.csv go (the current folder)"
    ),
    "overwrite": SWITCH | dict(help="replace files that exist"),
}
"""Every flag once, as argparse takes it; what a command changes is in ``Command.changed``."""


ABSENT = dict(threads=None, device="cpu", no_memory=False, horizon=None, rehearse=False)
ABSENT |= dict(csv=None, json=None, plot=None)
"""What holds in commands without these flags."""


@dataclass(frozen=True)
class Command:
    """A command of the tool."""

    about: str
    flags: str
    """Those that act in it."""
    names: dict | None = None
    """What stands behind the command without a flag, as argparse takes it, under ``names``."""
    changed: dict | None = None
    """What argparse is told otherwise than in ``FLAGS``, by flag."""


TIMED = "form dtype backward batch baseline rounds seconds no-memory threads device"
WRITTEN = "csv json overwrite"
COMMANDS = {
    "operations": Command(
        "operations against each other and against what a user would otherwise take",
        f"tokens width heads horizon {TIMED} plot {WRITTEN}",
        dict(
            nargs="+",
            metavar="NAME",
            help="taylorshift, kernelized, softmax, window, relative, sdpa, eager, "
            "eager-kernelized; options behind plus signs: taylorshift+temperature+joint",
        ),
        {"form": dict(help=f"{FLAGS['form']['help']}, where there are forms (efficient)")},
    ),
    "models": Command(
        "whole models, ours and timm's",
        f"img-size {TIMED} plot {WRITTEN}",
        dict(
            nargs="+",
            metavar="NAME",
            help="timm names; options: scaleformer_vit_s+identity, vit_small_patch16_224+eager, "
            "taylorshift_vit_s+heads=12",
        ),
        {
            "img-size": dict(default=[224, 512], help="height and width (224 512)"),
            "form": dict(help=f"{FLAGS['form']['help']}, of our models (auto)"),
        },
    ),
    "targets": Command(
        "the figures to reach, and what they come to here; minutes",
        f"only rounds seconds threads {WRITTEN}",
        changed={
            "rounds": dict(default=None, help="at least (5; 3 for models above 1024 px)"),
            "seconds": dict(default=None, help="for each case (2; none for models)"),
        },
    ),
    "papers": Command(
        "a figure of the papers, redrawn on this machine",
        "quick output processor-time threads overwrite",
        dict(choices=FIGURES, metavar="FIGURE", help=f"one of {', '.join(FIGURES)}"),
    ),
    "loader": Command(
        "the data pipeline alone",
        f"img-size batch workers read-all rounds seconds {WRITTEN}",
        dict(
            nargs="+",
            metavar="DATA",
            help="YAML files of trainings or names of data sets; options: "
            "configs/canvas.yaml+augment=none, folder+root=PATH",
        ),
        {
            "img-size": dict(help="height and width (as the data say)"),
            "batch": dict(default=None, help="images at once (that of the training)"),
            "rounds": dict(help="of the interleaved run (%(default)s)"),
            "seconds": dict(default=3.0, help="for each case in all its rounds (%(default)s)"),
        },
    ),
    "gpu": Command(
        "on an NVIDIA GPU: kernels and models against floors measured there, SDPA and eager "
        "operations; minutes",
        f"only minutes rehearse rows {WRITTEN}",
        changed={"minutes": dict(default=5.0)},
    ),
}
FORMER = {"figure": "papers"} | {name: name for name in COMMANDS if name != "papers"}
"""Flags of earlier versions, and the commands that they have become."""


class _Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print its usage and leave."""

    def error(self, message: str):
        raise ValueError(f"{message}; --help lists the options")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    given = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser = _Parser(
        prog=program("benchmark"),
        description="Time and memory of operations and models against what a user would otherwise "
        "take.\nCOMMAND --help lists the options of a command.",
        epilog=f"try:\n  {typed('benchmark')} {EXAMPLE}",
        **given,
    )
    parser.set_defaults(**ABSENT)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=command.about, description=command.about, **given)
        if command.names:
            one.add_argument("names", **command.names)
        for flag in command.flags.split():
            one.add_argument(f"--{flag}", **FLAGS[flag] | (command.changed or {}).get(flag, {}))
    return parser


def parse_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags of the command that is named first.

    Raises:
        ValueError: no command, a flag that it does not have, or a value that is none.
    """
    given = [word.split("=")[0].removeprefix("--") for word in argv if word.startswith("--")]
    former = next((name for name in given if name in FORMER), None)
    if former and argv[0] not in COMMANDS:
        now = f"benchmark {FORMER[former]}"
        raise ValueError(f"--{former} is now a command: {now}; {now} --help lists its options")
    if not argv:
        raise ValueError(f"wanted one of {', '.join(COMMANDS)}, got none; --help says what they do")
    flags, left = make_parser().parse_known_args(argv)
    for name in given:
        owners = [other for other, of in COMMANDS.items() if name in of.flags.split()]
        if owners and flags.command not in owners:
            raise ValueError(
                f"--{name} does nothing with {flags.command}; it belongs to {' and '.join(owners)}"
            )
    empty = next((name for name, value in vars(flags).items() if value == ""), None)
    if empty:
        raise ValueError(f"--{empty} is empty; give a value, or leave it out")
    if left:
        raise ValueError(
            f"unrecognized arguments: {' '.join(left)}; {flags.command} --help lists the options"
        )
    return flags
