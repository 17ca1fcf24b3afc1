"""Processor seconds and peak memory of ``BagEncoder`` and of softmax attention over random tiles of
a slide: the table of ``docs/large.md``.

    python docs/figures/bags.py kernelized 25000 [--backward]

The other kinds are ``taylorshift``, ``fused`` (softmax) and ``scores`` (softmax, with its scores in
memory). One measurement per process, because the peak is the process's.
"""

import argparse
import math
import resource
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from visionattn.models.bag import BagEncoder

IN_FEATURES, EMBED_DIM, DEPTH, HEADS = 384, 192, 2, 3


def by_scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return softmax attention with all its scores in memory."""
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def slide(tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features ``[n, 384]`` and places ``[n, 2]`` on five sixths of a grid of 3 to 4."""
    height = math.ceil(math.sqrt(tiles * 6 / 5 * 3 / 4))
    width = math.ceil(tiles * 6 / 5 / height)
    chosen = torch.randperm(height * width)[:tiles]
    return torch.randn(tiles, IN_FEATURES), torch.stack([chosen // width, chosen % width], 1)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("kind", choices=("kernelized", "taylorshift", "fused", "scores"))
parser.add_argument("tiles", type=int)
parser.add_argument("--backward", action="store_true")
flags = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
if flags.kind in ("fused", "scores"):
    shape = (1, HEADS, flags.tiles, EMBED_DIM // HEADS)
    qkv = [torch.randn(shape, requires_grad=flags.backward) for _ in range(3)]
    attend = scaled_dot_product_attention if flags.kind == "fused" else by_scores
    compute = lambda: sum(attend(*qkv).sum() for _ in range(DEPTH))  # noqa: E731
else:
    features, places = slide(flags.tiles)
    options = {"attention": flags.kind, "relative": "joint", "global_pool": "max"}
    model = BagEncoder(IN_FEATURES, EMBED_DIM, DEPTH, HEADS, 2, **options)
    compute = lambda: model(features, places).sum()  # noqa: E731
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
begin = time.process_time()
with torch.set_grad_enabled(flags.backward):
    result = compute()
    if flags.backward:
        result.backward()
seconds = time.process_time() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(f"{flags.kind}, {flags.tiles:,} tiles: {seconds:.2f} s, {peak:.2f} GiB, {before:.2f} before")
