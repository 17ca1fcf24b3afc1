"""Measure networks in this process, which ``measurement.py`` has made for it: told and answered as
plain values.

Weights are fresh and images random: neither decides what is measured. It knows no files.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from visionattn.cli.ends import is_out_of_memory
from visionattn.lab.measure import attention_backends, interleaved_seconds, peak_bytes, warm_up
from visionattn.model_config import ModelConfig
from visionattn.models.building import build_model
from visionattn.models.machine import autocast
from visionattn.models.weights import DataSpec
from visionattn.training.config import OptimConfig
from visionattn.training.optimize import OptimizerStep, make_mixup, mix_batch

Work = Callable[[], None]


def make_work(told: dict[str, Any], network: dict[str, Any], batch: int) -> Work:
    """Make one inference or one training step, with weights and a batch of images in memory.

    A training step is the configured one without loading and averaging of weights: forward, loss,
    backward, clipping, update.
    """
    torch.manual_seed(0)
    if told["threads"]:
        torch.set_num_threads(told["threads"])
    device = torch.device(told["device"])
    spec = replace(DataSpec(**told["spec"]), img_size=network["img_size"])
    model = build_model(ModelConfig(**network["model"]), spec)[0].to(device)
    channels = 1 if spec.encoding == "grey_one_hot" else spec.in_chans
    images = torch.randint(256, (batch, channels, spec.img_size, spec.img_size), dtype=torch.uint8)
    inputs = spec.prepare(images.to(device))
    forward = torch.compile(model) if told["compile"] else model
    if told["pass"] == "training":
        return training_step(model.train(), forward, inputs, told, spec)
    model.eval()

    @torch.inference_mode()
    def work() -> None:
        with autocast(device, told["amp"]):
            forward(inputs)

    return work


def training_step(
    model: nn.Module, forward: nn.Module, inputs: torch.Tensor, told: dict[str, Any], spec: DataSpec
) -> Work:
    """Return a step of the optimiser on one batch."""
    optim, device = OptimConfig(**told["optim"]), inputs.device
    step = OptimizerStep(model, optim, device, told["amp"])
    mix = make_mixup(optim, spec.num_classes)
    targets = torch.randint(spec.num_classes, (len(inputs),)).to(device)
    if mix is not None:
        inputs, targets = mix_batch(mix, inputs, targets)

    def work() -> None:
        step.add_gradients(forward, inputs, targets)
        step.update()
        step.optimizer.zero_grad(set_to_none=True)

    return work


def measure_memory(told: dict[str, Any]) -> dict[str, Any]:
    """Measure the peak memory of one pass above the level with weights, state of the optimiser and
    images, and note which attention ran.

    ``peak_bytes`` is None where the system cannot measure it.
    """
    [network] = told["networks"]
    work = make_work(told, network, told["batch"])
    work()  # from here on the optimiser's state is there, and what libraries keep for this size
    try:
        peak = peak_bytes(work, told["device"])
    except NotImplementedError:
        peak = None
    return {"peak_bytes": peak, "backends": attention_backends(work)}


def measure_time(told: dict[str, Any]) -> dict[str, Any]:
    """Measure the seconds of a pass of each network in turns, by name, round by round; None for one
    that does not fit.
    """
    works, warm, seconds = {}, [], {}
    for network in told["networks"]:
        try:
            work = make_work(told, network, told["batch"])
            warm.append(warm_up(work, device=told["device"]))
            works[network["name"]] = work
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            seconds[network["name"]] = None
    rounds = dict(rounds=told["rounds"], max_rounds=told["rounds"], device=told["device"])
    samples = interleaved_seconds(list(works.values()), warm, **rounds) if works else []
    return {"seconds": seconds | dict(zip(works, samples, strict=True))}
