"""Measurements: counts against arithmetic by hand, memory against what was allocated, and growth with the image."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from timm.models import create_model

from visionattn.measure import count_flops, model_table

ROOT = Path(__file__).parent.parent
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory of a CPU is measured under Linux only")


def test_flops_of_a_block_are_those_worked_out_by_hand():
    args = dict(embed_dim=24, num_heads=3, num_classes=5, img_size=64, patch_size=16, class_token=False, relative="none")
    counted = [count_flops(create_model("scaleformer_vit_t", depth=depth, **args), 64, 96) for depth in (1, 2)]
    n, width, d, heads = 24, 24, 8, 3
    linear = n * width * (3 * width + width + 8 * width)
    attention = heads * (2 * n * d * d + n * d)  # the state, its use, and the mass
    assert counted[1] - counted[0] == 2 * (linear + attention)


def test_relative_position_adds_its_classes_to_the_count():
    args = dict(embed_dim=24, num_heads=3, depth=1, class_token=False)
    without = create_model("taylorshift_vit_t", relative="none", **args)
    with_it = create_model("taylorshift_vit_t", horizon=2, **args)
    # 24 patches take the weights of pairs, 96 those of the 25 classes.
    assert count_flops(with_it, 64, 96) - count_flops(without, 64, 96) == 2 * 24 * 3 * (25 * 8 + 24 * 8)
    assert count_flops(with_it, 128, 192) - count_flops(without, 128, 192) == 2 * 96 * 3 * (25 * 8 + 25 * 8)


def test_counting_leaves_the_model_as_it_is():
    model = create_model("scaleformer_vit_t", depth=1).train()
    count_flops(model, 64, 96)
    assert model.training and not model.head.weight.is_meta


def test_table_has_a_row_per_model_and_grows_linearly():
    (row,) = model_table(["scaleformer_vit_t"], [1024, 2048])
    assert row["model"] == "scaleformer_vit_t" and row["parameters (M)"] == pytest.approx(5.8, abs=0.1)
    assert row["GFLOP at 2048"] / row["GFLOP at 1024"] == pytest.approx(4, rel=0.01)


def printed_by(code):
    """The integer that a fresh process prints, each of whose tensors has pages of its own: what is freed is seen to be."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env, check=True)
    return int(result.stdout)


@linux
def test_peak_is_what_was_allocated_above_the_level_before():
    peak = printed_by(
        "import torch\n"
        "from visionattn.measure import peak_bytes\n"
        "torch.ones(1 << 10).sum()\n"
        "print(peak_bytes(lambda: torch.ones(1 << 24).sum()))"
    )
    assert peak == pytest.approx(4 << 24, abs=8 << 20)  # the kernel counts pages in batches


GROWTH = """
import timm, torch, visionattn
from visionattn.measure import peak_bytes
torch.set_num_threads(1)
model = timm.create_model({name!r}, num_heads={heads}, depth=1).eval()
image = torch.randn(1, 3, {size}, {size})
with torch.inference_mode():
    model(image[:, :, :64, :64])
    print(peak_bytes(lambda: model(image)))
"""


@linux
@pytest.mark.parametrize("name, heads", [("scaleformer_vit_s", 6), ("taylorshift_vit_s", 12)])
def test_memory_of_a_forward_grows_with_the_patches(name, heads):
    """From 1024 to 2048 px, four times the patches; depth 1 has the peak of depth 12, whose blocks come one by one."""
    peaks = [printed_by(GROWTH.format(name=name, heads=heads, size=size)) for size in (1024, 2048)]
    assert peaks[1] / peaks[0] <= 4.4
