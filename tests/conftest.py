"""Before any test: where there is no GPU, Triton interprets its kernels on the processor. It reads this when it is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
