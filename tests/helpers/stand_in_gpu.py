"""A GPU that is not there: its tensors are those of the processor, and its memory is counted."""

import pytest
import torch

GPU = torch.device("cuda", 0)
PIXEL_BYTES = 10
"""What a pixel takes in a pass."""


class OnProcessor(torch.overrides.TorchFunctionMode):
    """While active, what is asked for on a GPU is made on the processor."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def moved(value):
            on_gpu = isinstance(value, torch.device) and value.type == "cuda"
            return torch.device("cpu") if on_gpu else value

        return func(*map(moved, args), **{k: moved(v) for k, v in (kwargs or {}).items()})


class Card:
    """A GPU of ``size`` bytes, of which ``held`` are tensors of this process and 500 others'.

    Each pass of a model that ``runs`` takes ``PIXEL_BYTES`` a pixel, or is out of memory.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int, held: int = 1000):
        self.size, self.held, self.peak, self.emptied = size, held, held, 0
        for name, value in {
            "mem_get_info": lambda device: (size - held - 500, size),
            "memory_reserved": lambda device: held + 500,
            "memory_allocated": lambda device: held,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": self.forget,
            "synchronize": lambda device=None: None,
            "empty_cache": self.empty,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def forget(self, device: torch.device) -> None:
        self.peak = self.held

    def empty(self) -> None:
        self.emptied += 1

    def runs(self, model: torch.nn.Module) -> torch.nn.Module:
        """Let a model take memory here."""
        model.register_forward_pre_hook(lambda model, given: self.take(given[0]))
        return model

    def take(self, images: torch.Tensor) -> None:
        taken = PIXEL_BYTES * images.shape[0] * images[0, 0].numel()
        self.peak = max(self.peak, self.held + taken)
        if self.peak > self.size:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
