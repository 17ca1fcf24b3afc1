"""Keep a teacher's tokens in a folder, so that later epochs and runs read them.

The teacher's time is quadratic in the number of patches; for large images it is most of a training
step. Entries are named by a digest of pixels and teacher, so several processes and distillations
share a folder without locks, and it may be deleted at any time.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from visionattn.data.pixel_cache import keep_array


class KeptTokens:
    """A function that computes the tokens of images, and keeps them in a folder.

    Args:
        folder: made with the first entry.
        compute: returns the tokens ``[B, N, D]`` of ``images [B, C, H_px, W_px]`` and
            ``sizes [B, 2]``.
        teacher: the model that ``compute`` calls.
        options: everything else that determines the tokens; their ``repr`` is part of the name.
    """

    def __init__(
        self,
        folder: str,
        compute: Callable[[Tensor, Tensor | None], Tensor],
        teacher: nn.Module,
        *options: object,
    ):
        self.folder, self.compute = Path(folder), compute
        known = hashlib.sha256(repr(options).encode())
        for name, value in teacher.state_dict().items():
            known.update(name.encode())
            known.update(value.cpu().contiguous().view(torch.uint8).numpy())
        self._teacher = known.digest()

    @torch.no_grad()
    def __call__(self, images: Tensor, sizes: Tensor | None) -> Tensor:
        """Return the tokens of each image, rounded to float16, as float32 ``[B, N, D]``.

        Raises:
            OSError: an entry cannot be written, or the disk is almost full.
        """
        own_sizes = [None] * len(images) if sizes is None else sizes.tolist()
        paths = [self._path(*each) for each in zip(images, own_sizes, strict=True)]
        missing = [i for i, path in enumerate(paths) if not path.exists()]
        if missing:
            tokens = self.compute(images[missing], None if sizes is None else sizes[missing])
            for i, entry in zip(missing, tokens.half().cpu().numpy(), strict=True):
                keep_array(paths[i], entry)
        kept = np.stack([np.load(path) for path in paths])
        return torch.from_numpy(kept).to(images.device).float()

    def _path(self, image: Tensor, size: list[int] | None) -> Path:
        kind = image.device.type
        amp = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        digest = hashlib.sha256(self._teacher + repr((image.shape, size, amp)).encode())
        digest.update(image.float().cpu().contiguous().numpy())
        name = digest.hexdigest()
        return self.folder / name[:2] / f"{name[2:]}.npy"
