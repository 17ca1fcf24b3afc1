"""What a callable costs: floating point operations and peak memory. ``python -m visionattn.measure`` prints the table of models.

Nothing here trains or reads data; models are counted on the meta device, without computing anything.
"""

import copy
import gc
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import visionattn.ops.flops  # noqa: F401  registers what our operators count


def count_flops(model: nn.Module, height: int, width: int) -> int:
    """Floating point operations (a multiply-add is two) of one forward of one image of ``height`` x ``width`` pixels.

    The model stays as it is. ``torch.utils.flop_counter`` counts matrix products, convolutions and our operators, and no
    elementwise work.
    """
    model = copy.deepcopy(model).to("meta").eval()
    image = torch.empty(1, model.patch_embed.proj.in_channels, height, width, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(image)
    return counter.get_total_flops()


def peak_bytes(work: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Peak memory in bytes while ``work()`` runs, above the level just before it.

    On a GPU what PyTorch's allocator handed out. On a CPU the resident memory of the process, which Linux alone can measure
    anew; call it in a fresh process, since memory freed earlier may be used again without being seen.

    Raises:
        NotImplementedError: a CPU under another system than Linux.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not sys.platform.startswith("linux"):
        raise NotImplementedError("peak memory of a CPU is measured under Linux only")
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_bytes("VmRSS")
    work()
    return _resident_bytes("VmHWM") - before


def _resident_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE).group(1))


def model_table(names: Sequence[str], sizes: Sequence[int], **args) -> list[dict[str, str | float]]:
    """A row per timm model, built with ``args``: name, parameters in millions, and GFLOP at each square size in pixels."""
    rows = []
    for name in names:
        with torch.device("meta"):
            model = timm.create_model(name, **args)
        row = {"model": name, "parameters (M)": round(sum(p.numel() for p in model.parameters()) / 1e6, 1)}
        rows.append(row | {f"GFLOP at {size}": round(count_flops(model, size, size) / 1e9, 1) for size in sizes})
    return rows


def main() -> None:
    """Print the table of models in Markdown, with timm's ViT (SDPA) for comparison."""
    sizes = (224, 1024, 4096)
    families = ("scaleformer_vit", "taylorshift_vit", "taylorshift_abs_vit")
    rows = model_table([f"{family}_{size}" for family in families for size in "tsbl"], sizes)
    plain = [f"vit_{word}_patch16_224" for word in ("tiny", "small", "base", "large")]
    rows += [row | {"model": f"timm {row['model']}"} for row in model_table(plain, sizes, dynamic_img_size=True)]
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(f"{value:,}" if isinstance(value, float) else value for value in row.values()) + " |")


if __name__ == "__main__":
    main()
