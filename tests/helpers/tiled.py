"""Small models and images for passes over bands of rows."""

import os
import signal
from collections.abc import Container
from contextlib import suppress

import numpy as np
import timm
import torch
from torch import nn

import visionattn  # noqa: F401
from visionattn.layout import Grid
from visionattn.models.large.band_plan import plan
from visionattn.models.large.token_store import PassFolder


class Array:
    """An array ``[h, w, C]`` as a source."""

    def __init__(self, pixels):
        self.pixels, self.dtype = pixels, pixels.dtype
        self.height, self.width, self.channels = pixels.shape

    def read(self, rows, columns):
        return self.pixels[rows, columns]


class Rows:
    """A sink in memory, which checks that it is used as it is to be."""

    def __init__(self):
        self.map, self.finished, self.written = None, False, []

    def begin(self, shape, dtype):
        if self.map is None:
            self.map = np.zeros(shape, dtype)
        assert self.map.shape == tuple(shape) and self.map.dtype == dtype

    def write(self, first, band):
        assert not self.finished and band.shape[0] == self.map.shape[0]
        self.map[:, first : first + band.shape[1]] = band
        self.written.append((first, first + band.shape[1]))

    def finish(self):
        self.finished = True

    def close(self):
        pass


def draw_image(height, width, seed=0):
    """Pixels from 0 to 1, float64 ``[height, width, 3]``."""
    return np.random.default_rng(seed).random((height, width, 3))


def make(**args):
    """A tiny model in float64 and eval mode, of patches of 4 px; what starts at zero is drawn."""
    options = dict(embed_dim=24, depth=3, num_heads=2, patch_size=4, img_size=32, num_classes=5)
    torch.manual_seed(3)
    model = timm.create_model("scaleformer_vit_t", **options | args).double().eval()
    for name, value in model.named_parameters():
        if "value_conv" in name or "token" in name or "pos_embed" in name:
            nn.init.normal_(value, std=0.3)
    return model


def least_memory(model, height, width):
    """The least bound of memory, in KiB, under which an image has bands of patches of 4 px."""
    grid = Grid(-(-height // 4), -(-width // 4))
    for kib in range(16, 1 << 20, 16):
        with suppress(ValueError):
            plan(model, grid, kib * 1024, "dense", model)
            return kib * 1024


def stop_at(monkeypatch, numbers: Container[int]) -> list[int]:
    """Send this process Ctrl-C as passes over bands record the bands of these numbers, counted from
    1 over all passes; return a list with an entry for each band.
    """
    real, bands = PassFolder.record, []

    def record(self, *place):
        real(self, *place)
        bands.append(len(bands) + 1)
        if bands[-1] in numbers:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(PassFolder, "record", record)
    return bands
