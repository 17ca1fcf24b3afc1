"""For which inputs there are kernels: the reasons against them, what ``auto`` takes, and a launch
for all that is taken.
"""

import pytest

pytest.importorskip("triton", reason="GPU kernels need Triton")

import torch
from timm.models import create_model

from tests.helpers.kernel_checks import interpreted
from tests.helpers.oracles import draw_kept, draw_qkv
from visionattn.lab.measure import attention_backends
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    Axial,
    Flat,
    Joint,
    kernelized_attention,
    taylorshift_attention,
)
from visionattn.ops.gpu import gpu_requirements
from visionattn.ops.kernelized import kernelized_triton as kernelized_gpu
from visionattn.ops.taylorshift import taylorshift_triton as taylorshift_gpu

WHY_NOT = {"kernelized": kernelized_gpu.why_not, "taylorshift": taylorshift_gpu.why_not}


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float16)


GRID = TokenLayout(0, Grid(4, 5))
REASONS = {
    "on meta": (dict(q=torch.empty(1, 2, 20, 16, device="meta")), "q is on meta"),
    "bfloat16, interpreted": (dict(q=half(1, 2, 20, 16).bfloat16()), "bfloat16 wrongly"),
    "float64": (dict(q=torch.zeros(1, 2, 20, 16, dtype=torch.float64)), "float64"),
    "mixed": (dict(v=torch.zeros(1, 2, 20, 16)), "one of float16, bfloat16, float32 for all three"),
    "odd width": (dict(q=half(1, 2, 20, 12)), "q is 12 wide"),
    "wide values": (dict(v=half(1, 2, 20, 136)), "v is 136 wide"),
    "map": (dict(feature_map="given"), '"elu1" and "relu"'),
    "form": (dict(form="direct"), 'form="direct"'),
    "causal": (dict(causal=True), 'causal attention has no kernel; impl="eager" runs it'),
    "flat": (dict(relative=Flat(half(2, 3, 16))), "Flat"),
    "axial": (dict(relative=Axial(half(2, 3, 16), half(2, 3, 16), GRID)), "Axial"),
    "masked": (
        dict(relative=Joint(half(2, 3, 3, 16), GRID), key_mask=torch.ones(1, 20, dtype=torch.bool)),
        "key_mask",
    ),
    "absent": (
        dict(relative=Joint(half(2, 3, 3, 16), GRID._replace(present=torch.ones(1, 20).bool()))),
        "absent patches",
    ),
    "kept": (
        dict(relative=Joint(half(2, 3, 3, 16), GRID._replace(kept=draw_kept(1, 20, 9)))),
        "layout.kept",
    ),
    "one class": (dict(relative=Joint(half(2, 1, 3, 16), GRID)), "not for (0, 1)"),
    "classes": (dict(relative=Joint(half(2, 13, 13, 16), GRID)), "not for 169"),
}


@interpreted
def test_inputs_without_a_kernel_are_told_why():
    tensors = {x: half(1, 2, 20, 16) for x in "qkv"}
    for why_not in WHY_NOT.values():
        assert why_not(**tensors) is None
    for name, (change, words) in REASONS.items():
        assert words in kernelized_gpu.why_not(**tensors | change), name
        if name not in ("map", "form", "causal"):
            assert words in taylorshift_gpu.why_not(**tensors | change), name


@interpreted
@pytest.mark.parametrize("function", [kernelized_attention, taylorshift_attention])
def test_triton_by_name_raises_the_reason_and_auto_takes_eager_on_a_processor(function):
    q, k, v = draw_qkv(queries=20, d=16, e=16).values()
    with pytest.raises(NotImplementedError, match='impl="triton": q, k, v are torch.float64'):
        function(q, k, v, impl="triton")
    q, k, v = q.float(), k.float(), v.float()
    assert not any("triton" in name for name in attention_backends(lambda: function(q, k, v)))
    backends = attention_backends(lambda: function(q, k, v, impl="triton"))
    assert backends and all("triton" in name for name in backends)


@interpreted
@pytest.mark.parametrize(
    "name, relative", [("scaleformer_vit_t", "joint"), ("taylorshift_vit_t", "none")]
)
def test_a_model_leaves_absent_patches_out_where_auto_takes_kernels(name, relative, monkeypatch):
    """With a position their mask has no kernel; without one it has."""
    monkeypatch.setattr(gpu_requirements, "_on_gpu", lambda x: True)
    options = dict(embed_dim=16, num_heads=2, depth=1, num_classes=3, relative=relative)
    model = create_model(name, **options).eval()
    x = torch.randn(1, 3, 64, 48, generator=torch.Generator().manual_seed(0))
    alone, sizes = x[:, :, :32, :32].clone(), torch.tensor([(32, 20)])
    x[:, :, 32:], x[:, :, :, 32:] = float("nan"), float("nan")
    with torch.no_grad():
        assert torch.allclose(model(x, sizes=sizes), model(alone), atol=1e-5)
        ran = [
            attention_backends(lambda: model(x, sizes=sizes)),
            attention_backends(lambda: model(alone)),
        ]
    assert ["triton" in names[0] for names in ran] == [relative == "none", True]


@interpreted
def test_the_capability_of_a_gpu_and_the_version_of_triton_decide(monkeypatch):
    for found, triton, words in (
        ("9.0", "3.6.0", None),
        ("8.0", "3.6.0", None),
        ("7.5", "3.9.0", "compute capability 7.5"),
        ("8.9", "3.9.0", "compute capability 8.9"),
        ("10.0", "3.8.1", "3.9 or newer"),  # it sums wrongly on Blackwell
        ("10.0", "3.10.0", None),
    ):
        monkeypatch.setattr(gpu_requirements, "capability", lambda device: found)  # noqa: B023
        monkeypatch.setattr(gpu_requirements, "version", lambda name: triton)  # noqa: B023
        reason = gpu_requirements.why_not_here(torch.device("cuda"), torch.bfloat16)
        assert reason is None if words is None else words in reason


WIDTHS = (8, 40, 64, 72, 128, 136)


@interpreted
@pytest.mark.parametrize(
    "d, dtype", [(d, torch.float16) for d in WIDTHS] + [(40, torch.float32), (72, torch.float32)]
)
def test_every_kernel_has_a_launch_for_all_that_is_taken(d, dtype, monkeypatch):
    """Nothing is computed: each launch of both passes asks the table for its row, which raises
    where there is none.
    """
    monkeypatch.setattr("visionattn.ops.gpu.launch.run", lambda *args, **meta: None)
    ways = [(kernelized_attention, "kernelized", {})]
    learned = {"temperature": torch.ones(1)}
    for form in ("direct", "efficient"):
        ways.append((taylorshift_attention, "taylorshift", learned | {"form": form}))
    layout = TokenLayout(1, Grid(2, 3))
    tables = [torch.zeros(1, side, side, d) for side in (1, 3, 7, 11, 13)]
    positions = [None, *(Joint(table, layout) for table in tables)]
    taken = 0
    for e in WIDTHS:
        q, k, v = (
            torch.zeros(1, 1, 7, width, dtype=dtype, requires_grad=True) for width in (d, d, e)
        )
        for function, name, options in ways:
            for relative in positions:
                if WHY_NOT[name](q, k, v, relative=relative) is None:
                    out = function(q, k, v, relative=relative, impl="triton", **options)
                    torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
                    taken += 1
    assert (taken > 0) == (d <= (128 if dtype == torch.float16 else 64))
