"""Check and time models on a GPU: inference, one large image, a training step. The baselines are
timm's ViT with SDPA, and the same network without attention (the identity).

``torch.compile`` compiles block by block, so that twelve equal blocks are compiled once. Before a
model is timed, it is compared with the same model with PyTorch's operations in float32. The allowed
error is twice the error of PyTorch's operations in the dtype of the model.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from visionattn.cli.exit_codes import is_out_of_memory
from visionattn.cli.tables import Record
from visionattn.lab import compared_models
from visionattn.lab.accuracy import beyond_eager, errors_of
from visionattn.lab.cases import Case
from visionattn.lab.gpu.gpu_operations import Bench, Call, fresh_memory, in_words, seconds_of
from visionattn.lab.gpu.gpu_rows import GpuRow
from visionattn.lab.measure import peak_bytes
from visionattn.lab.model_step import ModelStep
from visionattn.models.devices import autocast
from visionattn.models.registration import is_ours
from visionattn.ops.gpu.launch import launching_with
from visionattn.training.config import OptimConfig

CHECK_DEPTH = 2
"""Number of blocks to check; all are alike."""
LARGE = 2**26
"""From this number of pixels on, blocks of a model are not compiled."""


def make_model(case: Case, bench: Bench, name: str | None = None) -> nn.Module:
    """Build the model of the case, or the model ``name`` for its images, with seeded weights."""
    case = replace(case, name=name or case.name)
    args = {} if is_ours(case.base) else {"img_size": case.image_size}
    model = compared_models.build_model(case, str(bench.device), **args)
    compared_models.as_trained(model)
    if bench.rehearsed:  # on a GPU, "auto" already selects the kernels
        compared_models.set_impl(model, "triton")
    return model


def make_images(case: Case, bench: Bench) -> Tensor:
    """Return random images ``[B, 3, height, width]``."""
    options = dict(generator=bench.generator, device=bench.device, dtype=case.torch_dtype)
    return torch.randn(case.batch, 3, *case.image_size, **options)


def compiled(model: nn.Module, case: Case, bench: Bench) -> nn.Module:
    """Compile the blocks of the model for one size, unless the image has ``LARGE`` pixels."""
    if case.size * (case.image_width or case.size) < LARGE:
        for block in model.blocks:
            block.compile(dynamic=False, backend="aot_eager" if bench.rehearsed else "inductor")
    return model


def gradients_of(model: nn.Module, images: Tensor, upstream: Tensor, amp: str) -> dict[str, Tensor]:
    """Return the gradients of all parameters, given the gradient ``upstream [B, N, D]`` of the
    features.

    Gradients of the same parameter in all blocks form one entry.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with autocast(images.device, amp):
        features = model.forward_features(images)
    found = torch.autograd.grad(
        features, tuple(named.values()), upstream.to(features.dtype), allow_unused=True
    )
    kinds: dict[str, list[Tensor]] = {}
    for name, x in zip(named, found, strict=True):
        if x is not None:
            kind = ".".join(word for word in name.split(".") if not word.isdigit())
            kinds.setdefault(f"gradient of {kind}", []).append(x.flatten())
    return {kind: torch.cat(parts) for kind, parts in kinds.items()}


def features_of(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return the features of one image: its tokens before the head."""
    with torch.inference_mode():
        return {"features": model.forward_features(images[:1])}


def check_model(case: Case, images: Tensor, bench: Bench) -> Record:
    """Compare the first blocks of a model with eager operations, in the same dtype and in float32.

    Features of one image are compared or, for training, all gradients. The status of the record
    says if no kernel was launched.
    """
    model = make_model(replace(case, depth=min(CHECK_DEPTH, case.depth or CHECK_DEPTH)), bench)
    plain = copy.deepcopy(model)
    compared_models.set_impl(plain, "eager")
    exact = copy.deepcopy(plain).float()
    results_of: Callable[..., dict[str, Tensor]] = features_of
    if case.backward:
        images = images[:1]
        upstream = torch.randn_like(features_of(plain, images)["features"])
        results_of = partial(gradients_of, upstream=upstream, amp=case.amp)
    model = compiled(model, case, bench)
    names: list[str] = []

    def counted(launch_one, kernel, *args, **meta) -> None:
        names.append(kernel.__name__)
        launch_one(kernel, *args, **meta)

    with launching_with(run=counted):
        actual = results_of(model, images)
    eager = results_of(plain, images)
    if case.backward:
        results_of = partial(gradients_of, upstream=upstream, amp="none")
    expected = results_of(exact, images.float())
    errors, eager_errors = errors_of(actual, expected), errors_of(eager, expected)
    record: Record = {"status": "ok", "error": max(errors.values())}
    if beyond := beyond_eager(errors, eager_errors):
        name = beyond[0]
        both = f"error {errors[name]:.1e} of {name}, eager's {eager_errors[name]:.1e}"
        record["status"] = f"wrong: {both}"
    elif not names:
        record["status"] = "failed: no kernel ran, these are eager operations"
    return record


def work_of(case: Case, images: Tensor, bench: Bench, name: str | None = None) -> Call:
    """Return a function that runs inference or a training step with the model of the case, or with
    the model ``name``.
    """
    model = compiled(make_model(case, bench, name), case, bench)
    how = dict(backward=case.update, update=case.update, optim=OptimConfig(lr=1e-5))
    step = ModelStep(model, bench.device, case.amp, **how)
    step.place(images)
    return step.run


def measure_model(row: GpuRow, bench: Bench) -> Record:
    """Check the model, then time it and its baselines. Training steps and the large image run
    without a CUDA graph, and their peak memory is measured.
    """
    case, images = row.case, make_images(row.case, bench)
    fresh_memory()
    record = check_model(case, images, bench)
    if record["status"] != "ok":
        return record
    names = {"seconds": None}
    if row.sdpa is not None:
        names |= {"sdpa_seconds": row.sdpa, "identity_seconds": f"{case.name}+identity"}
    graph = not case.update and row.sdpa is not None
    for column, name in names.items():
        fresh_memory()
        try:
            work = work_of(case, images, bench, name)
            record[column] = seconds_of(work, bench.device, graph=graph)
            if not graph and not bench.rehearsed:
                peak = torch.cuda.memory_allocated() + peak_bytes(work, bench.device)
                record[column.replace("seconds", "gib")] = peak / 2**30
            del work
        except RuntimeError as failure:
            if name is None or not is_out_of_memory(failure):
                raise
            record[column] = in_words(failure)
    return record
