"""The most bytes of tensors that a work holds, counted without computing it."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import timm
import torch
from torch.profiler import ProfilerActivity, profile

import visionattn  # noqa: F401  registers the models
from visionattn.ops.footprint import LARGE_BYTES, Footprint, counting

MIB = 2**20


def allocated(work) -> int:
    """The most bytes that PyTorch's allocator gave out during real work, as its profiler saw it."""
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    level = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


def test_a_tensor_counts_until_nobody_holds_it():
    with counting() as (count, _):
        a = torch.empty(3, MIB, dtype=torch.uint8)
        b = torch.cat([a, a])
        assert count.live_bytes == 9 * MIB
        view = b[2:]
        del a, b
        assert count.live_bytes == 6 * MIB
        del view
        assert count.live_bytes == 0 and count.peak_bytes == 9 * MIB


def test_small_tensors_are_told_from_large_ones_at_the_peak():
    with counting() as (count, _):
        torch.empty(LARGE_BYTES + MIB, dtype=torch.uint8)
        small = torch.empty(MIB, dtype=torch.uint8)
        large = torch.empty(LARGE_BYTES + 3 * MIB, dtype=torch.uint8)
        assert count.peak_bytes - count.small_bytes == large.numel()
        assert count.small_bytes == small.numel()


MODELS = {
    "scaleformer_vit_t": dict(depth=2),
    "taylorshift_vit_t": dict(depth=2),
    "taylorshift_abs_vit_t": dict(depth=2, img_size=160),
    "vit_tiny_patch16_224": dict(depth=2, img_size=160),
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_counted_as_the_allocator_gives_memory_out(name, checkpointing):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **MODELS[name])
    model.set_grad_checkpointing(checkpointing)

    def step(model):
        images = torch.ones(7, 3, 160, 160)
        model(images).sum().backward()

    def real():
        step(model)
        model.zero_grad(set_to_none=True)

    with counting() as (count, copied):
        step(copied(model))
    assert count.peak_bytes == pytest.approx(allocated(real), rel=0.05)


def test_what_an_operator_holds_within_counts_at_each_call():
    torch.manual_seed(0)
    model = timm.create_model("scaleformer_vit_t", depth=1, horizon=2)
    with counting() as (count, copied):
        fake = copied(model).eval()
        with torch.inference_mode():
            fake(torch.ones(1, 3, 160, 160))
        first, count.peak_bytes = count.peak_bytes, 0
        with torch.inference_mode():
            fake(torch.ones(1, 3, 160, 160))
    assert count.peak_bytes == first


def step_on(model, rows, columns):
    with counting() as (count, copied):
        copied(model)(torch.ones(3, 3, rows, columns)).sum().backward()
    return count


SMALL_PATCHES = dict(depth=1, embed_dim=48, num_heads=3, patch_size=2)


@pytest.mark.parametrize("name", ["scaleformer_vit_t", "taylorshift_vit_t"])
def test_a_few_pieces_of_a_loop_hold_as_much_as_all(name, monkeypatch):
    model = timm.create_model(name, **SMALL_PATCHES)
    few = step_on(model, 80, 86)
    monkeypatch.setattr("visionattn.ops.footprint.only_few", nullcontext)
    every = step_on(model, 80, 86)
    assert (few.peak_bytes, few.small_bytes) == (every.peak_bytes, every.small_bytes)


def test_counting_four_times_the_pixels_takes_less_than_twice_the_operators(monkeypatch):
    model = timm.create_model("taylorshift_vit_t", **SMALL_PATCHES)
    ran, run = [], Footprint.__torch_dispatch__
    monkeypatch.setattr(
        Footprint, "__torch_dispatch__", lambda *args, **given: ran.append(0) or run(*args, **given)
    )
    step_on(model, 80, 86)
    few = len(ran)
    step_on(model, 160, 172)
    assert len(ran) - few < 2 * few


def test_no_fake_tensor_stays_behind():
    torch.manual_seed(0)
    model = timm.create_model("scaleformer_vit_t", depth=1).eval()
    images = torch.rand(1, 3, 48, 80)
    with torch.inference_mode():
        before = model(images)
        with counting() as (_, copied):
            copied(model)(torch.ones(1, 3, 48, 80))
        assert torch.equal(model(images), before)


def test_a_process_forked_after_a_count_can_go_backward():
    code = """
import os, torch
from visionattn.ops.footprint import counting
def backward():
    torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
with counting():
    backward()
if os.fork() == 0:
    backward()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
"""
    subprocess.run([sys.executable, "-c", code], check=True)
