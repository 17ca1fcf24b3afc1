"""Kills of trainings, distillations, sweeps, extractions of features, maps computed in bands and
generated images: the same command, called again, ends with the same bytes and leaves nothing
behind.

``python -m tests.kills --count 20`` kills each kind that often, every third time in the middle of a
write, prints a line for each kill and ends with exit code 1 where an end differs.
"""

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

import numpy as np
import tifffile
import torch
import yaml

from tests.helpers.inference_files import write_decoder, write_folder, write_weights
from tests.helpers.resumed_runs import assert_same_end
from tests.helpers.tools import read_csv, written
from tests.helpers.warm_python import serving
from visionattn.cli.exit_codes import run_tool
from visionattn.cli.files import is_unfinished
from visionattn.command import run
from visionattn.lab.sweep.head_sweep import sweep

ROOT = Path(__file__).parents[1]
FORK = multiprocessing.get_context("fork")
BASE = {
    "model": {
        "name": "taylorshift_vit_t",
        "args": {"patch_size": 8, "embed_dim": 16, "depth": 1, "mlp_ratio": 1, "num_heads": 2},
    },
    "data": {"name": "digits", "img_size": 16, "workers": 0, "augment": "light"},
    "optim": {"lr": 3e-3, "warmup_epochs": 0.1, "ema_decay": 0.9},
    "batch_size": 128,
    "save_every": 3,
    "threads": 1,
}
TRAIN = "--config base.yaml --epochs 2 --run small --output out"
TEACHER = {"img_size": 16, "patch_size": 8, "in_chans": 1, "embed_dim": 16, "depth": 2}
TEACHER |= {"num_heads": 2, "num_classes": 10}
DISTIL = {
    "teacher": "vit_tiny_patch16_224",
    "args": TEACHER,
    "search_softmax_blocks": 1,
    "a": {"lr": 3e-3},
    "b": {"lr": 3e-3, "epochs": 1},
    "optim": {"warmup_epochs": 0.1, "ema_decay": 0.9},
} | {key: BASE[key] for key in ("data", "batch_size", "save_every", "threads")}
DISTILLATION = "--config distil.yaml --run small --output out"
SWEEP = "--base base.yaml --set epochs=1 --heads 2 4 --form efficient --jobs 2 --measure false"
SWEEP += " --output out"
FEATURES = "--checkpoint best.safetensors --images images --img_size native --batch_size 2"
FEATURES += " --shard_images 3 --workers 0 --output out"
MAP = "--dense --checkpoint best.safetensors --images large.tif --img_size native"
MAP += " --memory_gib 0.003 --output map.npy"
WRITE = "writer.safetensors --count 5 --batch_size 2 --output out"
SECONDS = 120
"""Until a command that does not end counts as one that hangs."""
TIMES = {"train_seconds", "images_per_second", "attempts", "date", "load", "sweep_seconds"}
TIMES |= {"seconds", "cell_seconds", "command", "reason"}
"""Columns in which the rows of equal sweeps differ."""


class Points:
    """Places within writes at which this process can be killed: where a file is cut in half before
    it is on the disk, before it gets its name, and after that.
    """

    def __init__(self, deadly: int):
        """Kill at the point of this number; 0: at none."""
        self.deadly, self.seen = deadly, 0
        self._real = os.fsync, os.replace
        os.fsync, os.replace = self._fsync, self._replace

    def _fsync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        self._reach(lambda: is_unfinished(path) and os.truncate(path, os.path.getsize(path) // 2))
        self._real[0](descriptor)

    def _replace(self, old, new) -> None:
        self._reach()
        self._real[1](old, new)
        self._reach()

    def _reach(self, last_act: Callable[[], object] = lambda: None) -> None:
        self.seen += 1
        if self.seen == self.deadly:
            last_act()
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Kind:
    """What is killed."""

    name: str
    begin: Callable[[int], int]
    """Run the command to its end, and return its exit code; the number is the point at which what
    it starts is killed.
    """
    same: Callable[[Path, Path], None]
    """Assert that the folders of two ends are equal."""


def calling(command: str, flags: str) -> Callable[[int], int]:
    """Call a command, with ``--resume`` where there is something to go on from."""

    def begin(_: int) -> int:
        words = flags.split()
        return run(command, [*words, "--resume"] if any(Path("out/small").glob("*")) else words)

    return begin


def same_run(left: Path, right: Path) -> None:
    assert_same_end(left, right)
    for name in ("best.safetensors", "config.yaml"):
        assert (left / name).read_bytes() == (right / name).read_bytes(), name


def same_training(left: Path, right: Path) -> None:
    same_run(left / "out" / "small", right / "out" / "small")


def same_distillation(left: Path, right: Path) -> None:
    folders = [folder / "out" / "small" for folder in (left, right)]
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1] == ["a", "b", "blocks.csv", "distil.yaml"], names
    for name in names[0][2:]:
        assert len({(folder / name).read_bytes() for folder in folders}) == 1, name
    for stage in "ab":
        same_run(*(folder / stage for folder in folders))


def sweep_heads(deadly: int) -> int:
    """Sweep; what it trains may be killed."""
    command = [sys.executable, "-m", "tests.kills", "--training", str(deadly)]
    return run_tool(lambda: sweep(SWEEP.split(), print, train=command))


def same_sweep(left: Path, right: Path) -> None:
    rows = [read_csv(folder / "out" / "cells.csv") for folder in (left, right)]
    timeless = [[{k: row[k] for k in row.keys() - TIMES} for row in each] for each in rows]
    differ = [k for a, b in zip(*timeless, strict=True) for k in a if a[k] != b[k]]
    assert not differ and len(timeless[0]) == 2, f"columns {differ}"
    names = [sorted(path.name for path in (folder / "out").iterdir()) for folder in (left, right)]
    assert names[0] == names[1], names
    runs = [path.name for path in (left / "out" / "runs").iterdir() if path.is_dir()]
    assert len(runs) == 2
    for name in runs:
        same_run(*(folder / "out" / "runs" / name for folder in (left, right)))


def same_files(left: Path, right: Path) -> None:
    found = [written(folder / "out") for folder in (left, right)]
    assert found[0].keys() == found[1].keys(), (found[0].keys(), found[1].keys())
    assert [name for name in found[0] if found[0][name] != found[1][name]] == []
    assert len(found[0]) >= 6


def same_map(left: Path, right: Path) -> None:
    assert (left / "map.npy").read_bytes() == (right / "map.npy").read_bytes()


KINDS = {
    kind.name: kind
    for kind in (
        Kind("training", calling("train", TRAIN), same_training),
        Kind("distillation", calling("distil", DISTILLATION), same_distillation),
        Kind("sweep", sweep_heads, same_sweep),
        Kind("features", calling("features", FEATURES), same_files),
        Kind("bands", calling("features", MAP), same_map),
        Kind("images", calling("generate", WRITE), same_files),
    )
}


def prepare(folder: Path) -> Path:
    """Write what the commands read."""
    folder.mkdir()
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    (folder / "distil.yaml").write_text(yaml.safe_dump(DISTIL))
    write_weights(folder / "best.safetensors")
    write_decoder(folder / "writer.safetensors")
    write_folder(folder / "images", [(16, 24), (40, 8), (16, 16)] * 5)
    pixels = np.random.default_rng(0).integers(0, 256, (640, 480, 3)).astype(np.uint8)
    tifffile.imwrite(folder / "large.tif", pixels, tile=(64, 64), photometric="rgb")
    # Features know when their images changed.
    for path in (*(folder / "images").iterdir(), folder / "large.tif"):
        os.utime(path, (1e9, 1e9))
    return folder


class Command:
    """A command in a fork of this process, within a folder; it says what it does to ``log``."""

    def __init__(self, kind: Kind, folder: Path, deadly: int = 0, deadly_to_training: int = 0):
        self.folder = folder

        def work() -> None:
            os.chdir(folder)
            with open("log", "a") as log:
                os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
            torch.set_num_threads(1)
            points = Points(deadly)
            code = kind.begin(deadly_to_training)
            Path("points").write_text(str(points.seen))
            sys.stdout.flush()
            os._exit(code)

        self.process = FORK.Process(target=work)
        self.process.start()

    def end(self) -> int:
        self.process.join(SECONDS)
        assert self.process.exitcode is not None, f"{self.folder} hangs"
        return self.process.exitcode

    def kill_after(self, seconds: float) -> int:
        self.process.join(seconds)
        if self.process.exitcode is None:
            os.kill(self.process.pid, signal.SIGKILL)
        return self.end()


def again(kind: Kind, folder: Path) -> None:
    """Call the command until it ends well: what a killed sweep had started is waited for."""
    until = time.monotonic() + SECONDS
    while (code := Command(kind, folder).end()) != 0:
        said = (folder / "log").read_text()
        assert code == 2 and "running in" in said.splitlines()[-1], f"exit code {code}: {said}"
        assert time.monotonic() < until, "it waits for ever"
        time.sleep(0.2)


def check_end(kind: Kind, whole: Path, folder: Path) -> None:
    """Assert that a killed command came to the same end, and that nothing is left behind."""
    kind.same(whole, folder)
    locks = ("run.lock", "features.lock")
    assert not [path for path in folder.rglob("*") if is_unfinished(path) or path.name in locks]
    assert not list(folder.glob(".*"))
    assert "Traceback" not in (folder / "log").read_text()


class Reference:
    """A command that nothing happens to: how long it takes, and how many points it has."""

    def __init__(self, kind: Kind, folder: Path):
        self.kind, self.folder = kind, prepare(folder)
        begin = time.monotonic()
        code = Command(kind, folder).end()
        assert code == 0, (folder / "log").read_text()
        self.seconds = time.monotonic() - begin
        self.points = int((folder / "points").read_text())

    def kill(self, folder: Path, number: int, draw: random.Random) -> str:
        """Kill the command once, let it go on and check its end; returns a line about it."""
        prepare(folder)
        if number % 3:
            seconds = draw.random() * self.seconds
            while (code := Command(self.kind, folder).kill_after(seconds)) == 0:
                rmtree(folder)  # it was quicker than before
                prepare(folder)
                seconds /= 2
            how = f"after {seconds:.1f} s"
        elif self.kind.name == "sweep" and number % 2:
            point = draw.randint(1, TRAINING_POINTS)
            code = Command(self.kind, folder, deadly_to_training=point).end()
            how = f"its trainings at point {point} of {TRAINING_POINTS} of their writes"
            assert code in (2, 4), f"exit code {code}"
        else:
            point = draw.randint(1, self.points)
            code = Command(self.kind, folder, deadly=point).end()
            how = f"at point {point} of {self.points} of its writes"
            assert code == -signal.SIGKILL, f"exit code {code}"
        again(self.kind, folder)
        check_end(self.kind, self.folder, folder)
        return f"{self.kind.name} {number + 1}: killed {how}; same bytes"


TRAINING_POINTS = 30
"""Points that each training of the sweep reaches at least."""


def kill_all(names: Sequence[str], count: int, folder: Path, seed: int) -> int:
    """Kill every kind ``count`` times; returns how many ends differ."""
    wrong = 0
    for name in names:
        reference = Reference(KINDS[name], folder / name)
        print(f"{name}: {reference.seconds:.1f} s, {reference.points} points", flush=True)
        draw = random.Random(f"{seed} {name}")
        for number in range(count):
            try:
                print(reference.kill(folder / f"{name}{number}", number, draw), flush=True)
            except AssertionError as error:
                wrong += 1
                print(f"{name} {number + 1}: DIFFERS: {str(error)[:2000]}", flush=True)
    print(f"{count * len(names)} kills, {wrong} ends that differ")
    return wrong


def main(argv: Sequence[str]) -> int:
    """Kill as asked for; with ``--training`` be a training that a sweep starts."""
    if argv[:1] == ["--training"]:
        Points(int(argv[1]))
        return run("train", argv[2:])
    parser = argparse.ArgumentParser("python -m tests.kills", description=__doc__.split("\n\n")[1])
    parser.add_argument("--count", type=int, default=20, help="kills of each kind (20)")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    flags = parser.parse_args(argv)
    torch.set_num_threads(1)
    with serving() as python, tempfile.TemporaryDirectory() as folder:
        sys.executable = str(python)  # for the trainings of sweeps
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        return int(kill_all(flags.only, flags.count, Path(folder), flags.seed) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
