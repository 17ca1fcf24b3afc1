"""Models on a GPU: images per second, one large image, a step of training; ours against timm's ViT
with SDPA.

Blocks are compiled with ``torch.compile``, one by one, so that twelve equal ones are compiled once.
What is timed is checked against the same model in float32 with PyTorch's own operations: its error
may be twice that of those operations in its own dtype.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import timm
import torch
from torch import Tensor, nn

from visionattn.cli.ends import is_out_of_memory
from visionattn.lab import networks
from visionattn.lab.accuracy import beyond_eager, errors_of
from visionattn.lab.cases import Case
from visionattn.lab.compare import Quartiles
from visionattn.lab.gpu.operations import Bench
from visionattn.lab.gpu.results import GpuResult
from visionattn.lab.gpu.timing import Timed, called
from visionattn.lab.target_table import WITH_GRAPH, WITHOUT_GRAPH
from visionattn.lab.targets import Target
from visionattn.models.registration import is_ours
from visionattn.ops.gpu import machine
from visionattn.ops.gpu.launch import launching_with
from visionattn.training.config import OptimConfig
from visionattn.training.evaluate import autocast
from visionattn.training.optimize import OptimizerStep

CHECK_DEPTH = 2
"""Blocks of the largest image that are checked."""


def make_model(name: str, case: Case, bench: Bench) -> nn.Module:
    """Make a model with seeded weights; timm's is made for the image size."""
    case = replace(case, name=name)
    if is_ours(case.base):
        model = networks.build_model(case, str(bench.device))
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = timm.create_model(case.base, img_size=case.image_size)
        model = model.to(bench.device, case.torch_dtype).train(case.backward)
    model.blocks = model.blocks[: bench.depth]
    networks.as_trained(model)
    if bench.model_impl != "auto":
        networks.set_impl(model, bench.model_impl)
    return model


def make_images(case: Case, bench: Bench) -> Tensor:
    """Make random images ``[B, 3, height, width]``."""
    shape = (case.batch, 3, *case.image_size)
    return torch.randn(
        shape, generator=bench.generator, device=bench.device, dtype=case.torch_dtype
    )


def compile_blocks(model: nn.Module, bench: Bench) -> nn.Module:
    """Return the model, its blocks compiled for one size."""
    for block in model.blocks:
        block.compile(dynamic=False, backend=bench.backend)
    return model


def eager_copy(model: nn.Module) -> nn.Module:
    """Return a copy whose attention layers, if it is one of ours, run PyTorch's own operations."""
    copied = copy.deepcopy(model)
    networks.set_impl(copied, "eager")
    return copied


@contextmanager
def launches_counted() -> Iterator[list[str]]:
    """Append the names of the kernels that are launched within it to the list that it yields."""
    names: list[str] = []

    def counted(launch_one, kernel, *args, **meta) -> None:
        names.append(kernel.__name__)
        launch_one(kernel, *args, **meta)

    with launching_with(run=counted):
        yield names


def features_of(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return the tokens before the head."""
    with torch.inference_mode():
        return {"features": model.forward_features(images)}


def wants_kernels(bench: Bench) -> bool:
    """Tell whether models are to run kernels: the bench asks for them, and nothing is left to
    eager.
    """
    return bench.impl == "triton" and not machine.NOT_BY_AUTO


def compare(
    work: Callable[[], dict],
    eager: Callable[[], dict],
    exact: Callable[[], dict],
    *,
    kernels: bool = False,
) -> tuple[str, float, list[str]]:
    """Return status, largest error and notes of results by name, against eager operations in the
    same dtype and in float32.

    Args:
        work: gives the results.
        eager, exact: give those of eager operations; see ``eager_copy``.
        kernels: it fails where none is launched.
    """
    with launches_counted() as names:
        actual = work()
    expected = exact()
    beside = errors_of(eager(), expected)
    errors = errors_of(actual, expected)
    beyond = beyond_eager(errors, beside)
    notes = [
        f"{len(names)} kernels launched" if names else "no kernel ran: these are eager operations"
    ]
    if kernels and not names:
        return "failed: no kernel ran, these are eager operations", max(errors.values()), notes
    status = (
        f"wrong: error {errors[beyond[0]]:.1e} of {beyond[0]}, eager's is {beside[beyond[0]]:.1e}"
        if beyond
        else "ok"
    )
    return status, max(errors.values()), notes


def fresh_memory(bench: Bench) -> None:
    """Let go of what earlier figures held, compiled code included."""
    torch._dynamo.reset()
    bench.gpu.let_go()


def measure_inference(figures: Sequence[Target], bench: Bench) -> list[GpuResult]:
    """Measure the images per second of one model against others, at one size, in one interleaved
    run.
    """
    case = figures[0].case
    fresh_memory(bench)
    mine, images = make_model(case.name, case, bench), make_images(case, bench)
    status, error, notes = _check_inference(mine, images, bench)
    if status != "ok":
        return [GpuResult(figure, status, error=error) for figure in figures]
    entries: dict[str, Timed] = {case.name: bench.recorded([partial(infer, mine, images)])}
    others: dict[str, float | str] = {}
    for name in (figure.baseline for figure in figures):
        try:
            model = compile_blocks(make_model(name, case, bench), bench)
            entries[name] = bench.recorded([partial(infer, model, images)])
        except RuntimeError as failure:
            if not is_out_of_memory(failure):
                raise
            others[name] = "out of memory"
    times = dict(zip(entries, bench.seconds_of(list(entries.values()), 4), strict=True))
    own = times[case.name]
    others |= {name: spread.median for name, spread in times.items()}
    notes += [f"{name} not recorded" for name, entry in entries.items() if not entry.replayed]
    notes = [f"{case.batch / own.median:.4g} images/s", *notes]
    return [_against(figure, own, others[figure.baseline], error, notes) for figure in figures]


def _check_inference(
    model: nn.Module, images: Tensor, bench: Bench
) -> tuple[str, float, list[str]]:
    """Compile the blocks and compare the first image; see ``compare``."""
    plain, exact = eager_copy(model), eager_copy(model).float()
    compile_blocks(model, bench)
    return compare(
        lambda: {"features": features_of(model, images)["features"][:1]},
        lambda: features_of(plain, images[:1]),
        lambda: features_of(exact, images[:1].float()),
        kernels=wants_kernels(bench),
    )


def _against(
    figure: Target, own: Quartiles, other: float | str, error: float, notes: Sequence[str]
) -> GpuResult:
    """Return the result of a figure for the seconds of a batch and those of the baseline, or why
    there are none.
    """
    words = other if isinstance(other, str) else f"{figure.case.batch / other:.4g} images/s"
    by_unit = {"ms": 1e3 * own.median}
    by_unit |= {} if isinstance(other, str) else {"x images/s": other / own.median}
    values = figure.values_of(by_unit)
    sdpa = None if "identity" in figure.baseline else other
    notes = [*notes, f"{figure.baseline} {words}"]
    return GpuResult(figure, "ok", own, sdpa=sdpa, values=values, error=error, notes=notes)


def infer(model: nn.Module, images: Tensor) -> Tensor:
    """Return the classes of the images."""
    with torch.inference_mode():
        return model(images)


def measure_latency(figure: Target, bench: Bench) -> GpuResult:
    """Measure the seconds of one image with and without a CUDA graph, against the baseline, in one
    run.
    """
    case = figure.case
    fresh_memory(bench)
    mine, image = make_model(case.name, case, bench), make_images(case, bench)
    status, error, notes = _check_inference(mine, image, bench)
    if status != "ok":
        return GpuResult(figure, status, error=error)
    other = compile_blocks(make_model(figure.baseline, case, bench), bench)
    # Each model is called twice in a round: replayed from a graph, and as a user calls it.
    calls = [[partial(infer, model, image)] for model in (mine, other)]
    graphs = [bench.recorded(call) for call in calls]
    if not all(graph.replayed for graph in graphs):
        return GpuResult(figure, "failed: a model cannot be recorded as a CUDA graph", error=error)
    found = bench.seconds_of([*graphs, *(called(call) for call in calls)])
    own, baseline, launched, launched_baseline = found
    notes += [
        f"without a graph {1e3 * launched.median:.3g} ms, {figure.baseline} "
        f"{1e3 * launched_baseline.median:.3g} ms"
    ]
    ratios = {
        WITH_GRAPH: baseline.median / own.median,
        WITHOUT_GRAPH: launched_baseline.median / launched.median,
    }
    return GpuResult(
        figure,
        "ok",
        own,
        sdpa=baseline.median,
        values=figure.values_of(ratios),
        error=error,
        notes=notes,
    )


def measure_image(figure: Target, bench: Bench) -> GpuResult:
    """Measure the seconds of a plain forward of one large image, and the most memory that was
    allocated, weights and image included.
    """
    case = figure.case
    fresh_memory(bench)
    model, image = make_model(case.name, case, bench), make_images(case, bench)
    status, error, notes = _check_image(model, image, bench)
    if status != "ok":
        return GpuResult(figure, status, error=error)
    fresh_memory(bench)
    (seconds,) = bench.seconds_of([called([partial(infer, model, image)])], rounds=3)
    values = (seconds.median, _most_gib(model, image, bench))
    return GpuResult(
        figure,
        "ok",
        seconds,
        values=values,
        error=error,
        notes=[*notes, f"{CHECK_DEPTH} blocks checked"],
    )


def _check_image(model: nn.Module, image: Tensor, bench: Bench) -> tuple[str, float, list[str]]:
    """Compare the first blocks; see ``compare``."""
    short = copy.deepcopy(model)
    short.blocks = short.blocks[:CHECK_DEPTH]
    plain, exact = eager_copy(short), eager_copy(short).float()
    return compare(
        lambda: features_of(short, image),
        lambda: features_of(plain, image),
        lambda: features_of(exact, image.float()),
        kernels=wants_kernels(bench),
    )


def _most_gib(model: nn.Module, image: Tensor, bench: Bench) -> float:
    """Return the most memory of a forward in GiB, with all that is there before it."""
    before = bench.gpu.allocated_bytes()
    return (before + bench.gpu.peak_bytes(partial(infer, model, image))) / 2**30


def measure_training(figure: Target, bench: Bench) -> GpuResult:
    """Measure steps per second and peak memory above weights and optimiser, against the baseline;
    weights float32 under autocast.
    """
    case = figure.case
    fresh_memory(bench)
    mine, images = make_model(case.name, case, bench), make_images(case, bench)
    status, error, notes = _check_training(mine, images, case, bench)
    if status != "ok":
        return GpuResult(figure, status, error=error)
    baseline = compile_blocks(make_model(figure.baseline, case, bench), bench)
    steps = [called([make_step(model, images, case.amp, bench)]) for model in (mine, baseline)]
    peaks = []
    for step in steps:
        step.run()
        peaks.append(bench.gpu.peak_bytes(step.run))
    own, other = bench.seconds_of(steps, 4)
    notes += [f"peak {peaks[0] / 2**30:.3g} GiB", f"ViT-S {peaks[1] / 2**30:.3g} GiB"]
    values = (other.median / own.median, peaks[0] / peaks[1])
    return GpuResult(figure, "ok", own, sdpa=other.median, values=values, error=error, notes=notes)


def _check_training(
    model: nn.Module, images: Tensor, case: Case, bench: Bench
) -> tuple[str, float, list[str]]:
    """Compile the blocks and compare the gradients of all parameters; see ``compare``."""
    plain = eager_copy(model)
    compile_blocks(model, bench)
    tokens = (
        plain.num_prefix_tokens
        + images.shape[2] * images.shape[3] // plain.patch_embed.patch_size[0] ** 2
    )
    shape = (len(images), tokens, plain.embed_dim)
    upstream = torch.randn(shape, generator=bench.generator, device=bench.device)
    gradients = partial(gradients_of, images=images, upstream=upstream, bench=bench)
    return compare(
        lambda: gradients(model, amp=case.amp),
        lambda: gradients(plain, amp=case.amp, one_by_one=True),
        lambda: gradients(plain, one_by_one=True),
        kernels=wants_kernels(bench),
    )


def gradients_of(
    model: nn.Module,
    *,
    images: Tensor,
    upstream: Tensor,
    bench: Bench,
    amp: str = "none",
    one_by_one: bool = False,
) -> dict[str, Tensor]:
    """Return gradients for ``upstream [B, N, D]`` of the features, those of equal parameters of all
    blocks together.

    ``one_by_one`` takes the images in turn, which needs less memory.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total: dict[str, Tensor] = {}
    for part, grad in (
        zip(images.split(1), upstream.split(1), strict=True) if one_by_one else [(images, upstream)]
    ):
        with autocast(bench.device, amp):
            features = model.forward_features(part)
        found = torch.autograd.grad(
            features, tuple(named.values()), grad.to(features.dtype), allow_unused=True
        )
        for name, x in zip(named, found, strict=True):
            if x is not None:
                total[name] = x.float() if name not in total else total[name] + x.float()
    kinds: dict[str, list[Tensor]] = {}
    for name, x in total.items():
        kinds.setdefault(
            ".".join(word for word in name.split(".") if not word.isdigit()), []
        ).append(x.flatten())
    return {f"gradient of {kind}": torch.cat(parts) for kind, parts in kinds.items()}


def make_step(model: nn.Module, images: Tensor, amp: str, bench: Bench) -> Callable[[], None]:
    """Make one step of training in mixed precision, as ``visionattn train`` makes it."""
    step = OptimizerStep(model, OptimConfig(lr=1e-5), bench.device, amp, initial_scale=1.0)
    targets = torch.zeros(len(images), dtype=torch.int64, device=bench.device)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        step.add_gradients(model, images, targets)
        step.update()

    return run
