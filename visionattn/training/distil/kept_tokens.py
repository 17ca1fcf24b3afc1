"""Keep a teacher's tokens in a folder, so that later epochs and runs read them.

The teacher's time is quadratic in the number of patches; for large images it is most of a training
step.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import visionattn
from visionattn.data.pixel_cache import ArrayCache
from visionattn.models.weights import digest_of_weights


class KeptTokens:
    """A function that computes the tokens of images, and keeps them in a folder.

    Args:
        folder: made with the first entry.
        compute: returns the tokens ``[B, N, D]`` of ``images [B, C, H_px, W_px]`` and
            ``sizes [B, 2]``.
        teacher: the model that ``compute`` calls.
        options: everything else that determines the tokens; their ``repr`` is part of the key.
    """

    def __init__(
        self,
        folder: str,
        compute: Callable[[Tensor, Tensor | None], Tensor],
        teacher: nn.Module,
        *options: object,
    ):
        self.compute, self._cache = compute, ArrayCache(folder, "teacher_cache")
        weights = digest_of_weights(teacher)
        self._known = repr((visionattn.__version__, weights, repr(teacher), options))

    @torch.no_grad()
    def __call__(self, images: Tensor, sizes: Tensor | None) -> Tensor:
        """Return the tokens of images, rounded to float16, as float32 ``[B, N, D]``.

        Blank images, on which memory and time are measured, are always computed.
        """
        if isinstance(images, FakeTensor) or torch.equal(images.amax((2, 3)), images.amin((2, 3))):
            return self.compute(images, sizes).float()
        each_size = [None] * len(images) if sizes is None else sizes.split(1)
        kept = [self._tokens(*each) for each in zip(images.split(1), each_size, strict=True)]
        return torch.from_numpy(np.concatenate(kept)).to(images.device).float()

    def _tokens(self, image: Tensor, size: Tensor | None) -> np.ndarray:
        kind = image.device.type
        amp = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        known = repr((self._known, image.shape, None if size is None else size.tolist(), amp))
        key = known.encode() + image.float().cpu().numpy().tobytes()
        return self._cache.entry(key, lambda: self.compute(image, size).half().cpu().numpy())
