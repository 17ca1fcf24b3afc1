"""Which blocks best stay softmax: those whose attention a student imitates worst.

In stage a each block imitates the teacher on the teacher's own inputs, with parameters of its own.
So the losses of the others do not depend on which block stays softmax, and those with the largest
losses are the ones without which the sum is least.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from visionattn.data.batches import Batch
from visionattn.models import VisionAttnTransformer
from visionattn.models.machine import autocast
from visionattn.models.patches import takes_sizes
from visionattn.models.weights import DataSpec
from visionattn.training.distil.imitation import attention_losses
from visionattn.training.distributed import Processes

BLOCKS = "blocks.csv"
"""The table of all blocks, beside the folders of the stages."""


@dataclass(frozen=True)
class BlockLosses:
    """The loss of each block on the validation images."""

    losses: list[float]
    """Squared error of the attention's output relative to its square, on average over images."""

    def worst(self, count: int) -> list[int]:
        """Return which blocks have the largest losses, in order; of equals, the first."""
        ranked = sorted(range(len(self.losses)), key=lambda i: (-self.losses[i], i))
        return sorted(ranked[:count])

    def csv(self, chosen: Sequence[int]) -> str:
        """Return the table as CSV."""
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(["block", "loss", "softmax"])
        writer.writerows([i, loss, int(i in chosen)] for i, loss in enumerate(self.losses))
        return text.getvalue()

    def lines(self, chosen: Sequence[int]) -> list[str]:
        """Return the table for people."""
        rows = (
            f"  block {i:>3}  loss {loss:.4f}{'  stays softmax' if i in chosen else ''}"
            for i, loss in enumerate(self.losses)
        )
        return ["how far each block's attention is from the teacher's after stage a:", *rows]


@torch.inference_mode()
def measure_blocks(
    student: VisionAttnTransformer,
    teacher: VisionAttnTransformer,
    batches: Iterable[Batch],
    spec: DataSpec,
    *,
    device: torch.device,
    amp: str,
    processes: Processes,
) -> BlockLosses:
    """Measure each block of a student.

    Args:
        student, teacher: on ``device``, in eval mode.
        batches: the images, or the part of them that this process takes.
        spec: what the images are.
        device, amp: where and in which precision to compute.
        processes: those that take the other parts; all get the same result.
    """
    depth = len(student.blocks)
    total = torch.zeros(depth, dtype=torch.float64)

    def own() -> int:
        count = 0
        for images, labels, sizes in batches:
            filled = sizes.to(device) if sizes is not None and takes_sizes(student) else None
            inputs = spec.prepare(images.to(device))
            with autocast(device, amp):
                found = attention_losses(student, teacher, inputs, filled, range(depth))
            total.add_(found.sum(0).cpu().double())
            count += len(labels)
        return count

    count = processes.together(own)
    *sums, images = processes.sum(*total.tolist(), count)
    return BlockLosses([value / images for value in sums])
