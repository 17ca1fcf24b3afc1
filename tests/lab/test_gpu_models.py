"""Models in the table of a GPU, at sizes that a processor has done at once; blocks are traced and
not compiled.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import visionattn.ops as ops
from visionattn.lab.gpu import models as gpu_models
from visionattn.lab.gpu import table as gpu
from visionattn.lab.gpu.device import rehearsed
from visionattn.lab.gpu.models import (
    compare,
    features_of,
    gradients_of,
    launches_counted,
    make_images,
    make_model,
)
from visionattn.lab.gpu.operations import Bench
from visionattn.lab.gpu.timing import Budget, Ceilings
from visionattn.lab.target_table import gpu_targets
from visionattn.ops.gpu import launch

# torch's compiler looks at gradients of tensors that are no leaves:
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf Tensor"
)

BASELINES = {
    "vit_small_patch16_224": "vit_tiny_patch16_224",
    "scaleformer_vit_s+identity": "scaleformer_vit_t+identity",
    None: None,
}


@pytest.fixture
def bench():
    """Models of two blocks that are called as they are."""
    few = dict(impl="eager", backend="eager", seconds=0.0, rounds=1, depth=2)
    return Bench(rehearsed(), torch.Generator().manual_seed(3), Ceilings(1e10, 1e11), **few)


def small(kind):
    """The figures of a kind at one size, of models of the smallest width."""
    of_kind = [figure for figure in gpu_targets() if figure.kind == kind]
    figures = [figure for figure in of_kind if figure.case == of_kind[0].case]
    case = replace(figures[0].case, name="scaleformer_vit_t", size=48, batch=2, dtype="float32")
    return [replace(figure, case=case, baseline=BASELINES[figure.baseline]) for figure in figures]


def test_models_are_timed_in_one_run_and_related_to_each_baseline(bench):
    timm, twin = gpu.results_of(small("model"), bench, Budget(1))
    assert timm.status == twin.status == "ok" and timm.seconds == twin.seconds and timm.error < 1e-5
    assert timm.values == (timm.sdpa / timm.seconds.median,) and twin.sdpa is None
    assert twin.values == (1.0,)
    assert timm.notes[0] == f"{2 / timm.seconds.median:.4g} images/s"
    assert timm.notes[1] == "no kernel ran: these are eager operations"
    assert timm.notes[2].startswith("vit_tiny_patch16_224 ")
    assert twin.notes[2].startswith("scaleformer_vit_t+identity ")


def test_a_model_whose_attention_is_wrong_has_no_time(bench, monkeypatch):
    right = ops.kernelized_attention
    monkeypatch.setattr(
        ops,
        "kernelized_attention",
        lambda q, k, v, impl="auto", **options: right(
            q.flip(2) if impl == "auto" else q, k, v, impl=impl, **options
        ),
    )
    results = list(
        gpu.results_of([*small("model"), *small("image"), *small("training")], bench, Budget(1))
    )
    assert len(results) == 4
    for result in results:
        assert result.status.startswith("wrong: error ") and result.seconds is None
        assert result.values == ()


def test_a_baseline_that_does_not_fit_leaves_the_others(bench, monkeypatch):
    make_shallow = gpu_models.make_model

    def make(name, case, bench):
        if name.startswith("vit"):
            raise torch.OutOfMemoryError("full")
        return make_shallow(name, case, bench)

    monkeypatch.setattr(gpu_models, "make_model", make)
    timm, twin = gpu.results_of(small("model"), bench, Budget(1))
    assert (timm.sdpa, timm.reached) == ("out of memory", "not measured") and twin.values[0] > 0


def test_one_image_is_timed_with_and_without_a_graph(bench, monkeypatch):
    figure = small("latency")[0]
    (result,) = gpu.results_of([figure], bench, Budget(1))
    assert result.status == "ok" and result.values == (1.0, 1.0)
    assert result.notes[-1].startswith("without a graph ")
    monkeypatch.setattr(bench.gpu, "graph_of", lambda calls: None)
    (result,) = gpu.results_of([figure], bench, Budget(1))
    assert result.status == "failed: a model cannot be recorded as a CUDA graph" and result.broken


def test_an_image_may_be_wider_than_high(bench):
    figures = [f for f in gpu_targets() if f.case.name == "scaleformer_vit_b" and f.case.batch == 1]
    assert {f.case.image_size for f in figures} == {(1024, 2048)}
    case = replace(
        figures[0].case, name="scaleformer_vit_t", size=32, image_width=64, dtype="float32"
    )
    figures = [
        replace(f, case=case, baseline=baseline)
        for f, baseline in zip(figures, BASELINES.values(), strict=False)
    ]
    timm, twin = gpu.results_of(figures, bench, Budget(1))
    assert make_images(case, bench).shape == (1, 3, 32, 64)
    assert timm.values == (1e3 * timm.seconds.median, 1.0) and twin.values == (1.0,)


def test_a_large_image_counts_all_memory_that_is_allocated(bench, monkeypatch):
    monkeypatch.setattr(gpu_models, "_most_gib", lambda model, image, bench: 23.0)
    (result,) = gpu.results_of(small("image"), bench, Budget(1))
    assert result.values == (result.seconds.median, 23.0) and result.reached == "yes"
    assert result.notes[-1] == "2 blocks checked"


def test_a_training_step_is_related_in_time_and_memory(bench, monkeypatch):
    peaks = iter([3 << 30, 4 << 30])
    monkeypatch.setattr(bench.gpu, "peak_bytes", lambda work: next(peaks))
    (result,) = gpu.results_of(small("training"), bench, Budget(1))
    assert result.status == "ok" and result.values == (result.sdpa / result.seconds.median, 0.75)
    assert result.notes[1:] == ["peak 3 GiB", "ViT-S 4 GiB"] and 0 < result.error < 0.05


def test_gradients_are_those_of_equal_parameters_together_and_images_in_turn_give_the_batch(bench):
    case = small("training")[0].case
    model = gpu_models.make_model("scaleformer_vit_t", case, bench)
    images = make_images(case, bench)
    upstream = torch.randn(2, 10, 192)
    together = gradients_of(model, images=images, upstream=upstream, bench=bench)
    in_turn = gradients_of(model, images=images, upstream=upstream, bench=bench, one_by_one=True)
    tables = torch.cat([block.attn.relative.table.flatten() for block in model.blocks])
    assert together["gradient of blocks.attn.relative.table"].shape == tables.shape
    assert "gradient of head.weight" not in together and "gradient of cls_token" in together
    for name, x in together.items():
        torch.testing.assert_close(in_turn[name], x, rtol=1e-3, atol=1e-3 * x.abs().max().item())
    assert all(block.attn.qkv.weight.grad is None for block in model.blocks)


def test_a_model_may_err_twice_as_much_as_eager_operations_and_its_launches_are_noted(monkeypatch):
    monkeypatch.setattr(launch, "_launch", lambda kernel, *args, **meta: None)
    exact = {"x": torch.ones(4), "y": torch.ones(4)}

    def off(by):
        return lambda: {"x": torch.ones(4), "y": (1 + by) * torch.ones(4)}

    def work():
        launch.run(SimpleNamespace(__name__="_means"), (1,))
        return off(0.05)()

    status, error, notes = compare(work, off(0.03), lambda: exact)
    assert (status, notes) == ("ok", ["1 kernels launched"]) and error == pytest.approx(0.05)
    assert (
        compare(work, off(0.02), lambda: exact)[0]
        == "wrong: error 5.0e-02 of y, eager's is 2.0e-02"
    )
    assert compare(off(0.009), off(0.0), lambda: exact)[0] == "ok"
    assert compare(off(float("nan")), off(1.0), lambda: exact)[0].startswith(
        "wrong: error nan of y"
    )


def test_a_model_that_runs_no_kernel_where_it_should_has_no_time(bench, monkeypatch):
    figures = [
        *small("model"),
        *small("image"),
        *small("training"),
        small("latency")[0],
    ]
    bench.impl = "triton"  # while on a processor "auto" takes eager operations
    results = list(gpu.results_of(figures, bench, Budget(1)))
    assert len(results) == 5
    for result in results:
        assert result.status == "failed: no kernel ran, these are eager operations"
        assert result.seconds is None
    monkeypatch.setattr(gpu_models.machine, "NOT_BY_AUTO", {("kernelized", torch.float32): 1e9})
    assert next(gpu.results_of(small("image"), bench, Budget(1))).status == "ok"


def test_eager_operations_stand_in_for_those_of_a_model_while_it_is_checked(bench, monkeypatch):
    impls = []
    right = ops.kernelized_attention

    def call(*tensors, impl="auto", **options):
        impls.append(impl)
        return right(*tensors, **options)

    monkeypatch.setattr(ops, "kernelized_attention", call)
    case = small("model")[0].case
    model, images = gpu_models.make_model(case.name, case, bench), make_images(case, bench)
    features_of(gpu_models.eager_copy(model), images)
    assert impls == ["eager"] * 2
    with launches_counted() as names:
        features_of(model, images)
    assert names == [] and impls == ["eager", "eager", "auto", "auto"]


def test_the_baseline_is_made_for_its_image_size_and_attends_sharply(bench):
    case = small("model")[0].case
    model = make_model("vit_tiny_patch16_224", case, bench)
    assert model.patch_embed.img_size == (48, 48) and not model.dynamic_img_size
    assert model.blocks[0].attn.qkv.weight.std().item() == pytest.approx(
        0.08, rel=0.1
    )  # four times timm's start
