"""Processor seconds and memory of a slide as a bag of features, beside dense softmax attention.

``python -m visionattn.lab.bags`` prints a row for each model and number of tiles, each measured in
a fresh process of its own, whose peak is that of ``VmHWM``.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from visionattn.cli.ends import Failed
from visionattn.cli.fresh_process import ask
from visionattn.cli.memory import resident_bytes
from visionattn.cli.parsing import Parser, whole_from
from visionattn.models.bag import BagEncoder
from visionattn.ops.attentions import ATTENTIONS

IN_FEATURES, EMBED_DIM, DEPTH, HEADS = 384, 192, 2, 3
FILLED = 5 / 6
"""The share of a slide's places that has tiles, as 100,000 tiles on 300 x 400 places."""
WORK = ("kernelized", "taylorshift", "fused softmax", "softmax by its scores")
SIZES = {"kernelized": (25_000, 100_000), "taylorshift": (25_000, 100_000)}
SIZES |= {"fused softmax": (6_250, 12_500, 25_000), "softmax by its scores": (6_250, 12_500)}


def measure(work: str, tiles: int, threads: int, backward: bool) -> dict[str, float]:
    """Return the processor's ``seconds`` of one forward, or of a forward and a backward pass, of a
    bag, ``peak_bytes`` of this process, and ``level_bytes``, its peak before with the inputs.

    Args:
        work: an attention of ``BagEncoder``, or the softmax attention alone of as many blocks and
            heads, fused or with its scores in memory.
        tiles: n.
        threads: of torch.
        backward: with gradients.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if work in ATTENTIONS and ATTENTIONS[work].states:
        features, places = slide(tiles)
        options = {"attention": work, "relative": "joint", "global_pool": "max"}
        model = BagEncoder(IN_FEATURES, EMBED_DIM, DEPTH, HEADS, 2, **options)
        compute = lambda: model(features, places).sum()  # noqa: E731
    else:
        shape = (1, HEADS, tiles, EMBED_DIM // HEADS)
        operands = [torch.randn(shape, requires_grad=backward) for _ in range(3)]
        attend = scaled_dot_product_attention if work == "fused softmax" else by_scores
        compute = lambda: sum(attend(*operands).sum() for _ in range(DEPTH))  # noqa: E731
    level = resident_bytes("VmHWM")
    begin = time.process_time()
    with torch.set_grad_enabled(backward):
        out = compute()
        if backward:
            out.backward()
    seconds = time.process_time() - begin
    return {"seconds": seconds, "peak_bytes": resident_bytes("VmHWM"), "level_bytes": level}


def by_scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return softmax attention with all its scores in memory."""
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def slide(tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features ``[n, 384]`` and places ``[n, 2]`` of random tiles of a slide of 3 to 4."""
    height = math.ceil(math.sqrt(tiles / FILLED * 3 / 4))
    width = math.ceil(tiles / FILLED / height)
    chosen = torch.randperm(height * width)[:tiles]
    places = torch.stack([chosen // width, chosen % width], dim=1)
    return torch.randn(tiles, IN_FEATURES), places


def main(argv: Sequence[str]) -> int:
    """Print the table; a row that fails says why."""
    from visionattn.lab.bags import measure as named  # not that of __main__, for another process

    parser = Parser("python -m visionattn.lab.bags", description=__doc__.split("\n\n")[1])
    parser.add_argument("--threads", type=whole_from(1, 1024), default=1, help="of torch (1)")
    parser.add_argument("--only", nargs="+", choices=WORK, default=WORK)
    parser.add_argument("--backward", action=argparse.BooleanOptionalAction, default=False)
    flags = parser.parse_args(argv)
    passes = "forward and backward" if flags.backward else "forward"
    print(f"{DEPTH} blocks, {HEADS} heads, width {EMBED_DIM}; {passes}, {flags.threads} threads")
    for work in flags.only:
        for tiles in SIZES[work]:
            given = {"work": work, "tiles": tiles, "threads": flags.threads}
            try:
                found = ask(named, given | {"backward": flags.backward}, work)
                peak, level = (found[key] / 2**30 for key in ("peak_bytes", "level_bytes"))
                said = f"{found['seconds']:8.2f} s {peak:7.2f} GiB, {level:.2f} before"
            except (Failed, torch.OutOfMemoryError) as error:
                said = str(error)
            print(f"{work:<23}{tiles:>9,} tiles {said}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
