"""How right the forecasts of memory and time are: ``python -m visionattn.lab.forecasts`` prints the
table of ``docs/cost.md``.

Each case runs in a process of its own, which first tells what it expects, as ``visionattn train``
and ``features`` do, and then does several steps or forwards and is measured.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import timm
import torch

import visionattn.models  # noqa: F401  registers ours with timm
from visionattn.cli.fresh_process import Forks, ask
from visionattn.cli.memory import resident_bytes, taken_bytes
from visionattn.cli.tables import heading, line
from visionattn.data.batches import Batch
from visionattn.models.building import ModelConfig
from visionattn.models.patches import call
from visionattn.models.registration import is_ours
from visionattn.models.weights import DataSpec
from visionattn.training.config import TrainConfig
from visionattn.training.distributed import Processes
from visionattn.training.learner import Learner
from visionattn.training.passes import StepPasses
from visionattn.training.trial import try_steps

CLASSES = 10
REPEATS = 4
"""Steps or forwards that are measured."""


@dataclass(frozen=True)
class Case:
    """A model at work."""

    model: str
    px: int
    batch: int
    work: str
    """"training", "checkpointed" training, or "inference"."""


CASES = (
    Case("scaleformer_vit_t", 224, 16, "training"),
    Case("scaleformer_vit_s", 512, 2, "checkpointed"),
    Case("scaleformer_vit_t", 1024, 1, "training"),
    Case("taylorshift_vit_t", 512, 4, "training"),
    Case("taylorshift_vit_s", 1024, 1, "inference"),
    Case("vit_small_patch16_224", 224, 16, "training"),
    Case("vit_small_patch16_224", 224, 16, "checkpointed"),
    Case("swin_tiny_patch4_window7_224", 448, 2, "training"),
    Case("convnext_tiny", 224, 8, "training"),
    Case("convnext_tiny", 512, 8, "inference"),
)


def measure(model: str, px: int, batch: int, work: str, threads: int) -> dict[str, float]:
    """Return bytes and seconds, expected and measured, of a case in this process."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    resizes = is_ours(model) or model.startswith("convnext")
    made = timm.create_model(model, num_classes=CLASSES, **({} if resizes else {"img_size": px}))
    spec = DataSpec(3, CLASSES, (), (0.5,) * 3, (0.25,) * 3, None, px, "crop")
    cpu, shape = torch.device("cpu"), (batch, px, px)
    if work == "inference":
        return _inference(made, spec, shape)
    if work == "checkpointed":
        made.set_grad_checkpointing(True)
    config = TrainConfig(ModelConfig(model), batch_size=batch)
    passes = StepPasses(made, spec, cpu, "none", checkpointing=work == "checkpointed")
    expected = taken_bytes(cpu) + (passes.step_bytes(shape, config.optim) or 0)
    learner = Learner(config, made, spec, cpu, 1000, Processes())
    seconds = try_steps(learner, [shape])[-1].seconds
    images = torch.randint(256, (batch, 3, px, px), dtype=torch.uint8)
    given = Batch(images, torch.arange(batch) % CLASSES)
    made.train()
    return _measured(lambda: learner.step([given]), expected, seconds)


def _inference(made: torch.nn.Module, spec: DataSpec, shape: tuple) -> dict[str, float]:
    made.eval()
    passes = StepPasses(made, spec, torch.device("cpu"), "none")
    expected = taken_bytes(torch.device("cpu")) + (passes.forward_bytes(shape) or 0)

    def forward(count: int) -> float:
        images = torch.randint(256, (count, 3, *shape[1:]), dtype=torch.uint8)
        start = time.perf_counter()
        with torch.inference_mode():
            call(made, spec.prepare(images), None)
        return time.perf_counter() - start

    forward(1)
    seconds = forward(1) * shape[0]  # as a trial image tells it
    return _measured(lambda: forward(shape[0]), expected, seconds)


def _measured(work, expected: float, seconds: float) -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the trial is not that of the work
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return {
        "expected": expected,
        "measured": resident_bytes("VmHWM"),
        "seconds expected": seconds,
        "seconds measured": statistics.median(times),
    }


def rows(threads: int) -> Iterator[list[str]]:
    """Measure case after case, and yield a row for people of each."""
    from visionattn.lab import forecasts  # by the name under which another process finds it

    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            with Forks(Path(folder) / "log") as run:
                found = ask(forecasts.measure, asdict(case) | {"threads": threads}, case.model, run)
            memory = found["expected"] / found["measured"]
            pace = found["seconds expected"] / found["seconds measured"]
            yield [
                case.model,
                f"{case.px}",
                f"{case.batch}",
                case.work,
                *(f"{found[key] / 2**20:.0f}" for key in ("expected", "measured")),
                f"{memory:.2f}",
                *(f"{found[f'seconds {key}']:.2f}" for key in ("expected", "measured")),
                f"{pace:.2f}",
            ]


def main() -> None:
    """Print the table in Markdown."""
    about = "Compare forecasts of memory and time with what is then measured; takes minutes."
    parser = argparse.ArgumentParser("python -m visionattn.lab.forecasts", description=about)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    threads = parser.parse_args().threads
    columns = ["model", "px", "images", "work", "MiB expected", "MiB measured", "ratio"]
    print(heading([*columns, "s expected", "s measured", "ratio"]), flush=True)
    for row in rows(threads):
        print(line(row), flush=True)


if __name__ == "__main__":
    main()
