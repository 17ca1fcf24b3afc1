"""Overlapping tiles: where they lie, what vectors become, and maps that have no seams."""

import itertools

import numpy as np
import pytest
import timm
import torch
from torch import nn

import visionattn  # noqa: F401  registers models
from tests.helpers.tiled import Array, Rows
from visionattn.models.large.tiled_inference import forward_tiles, usual_overlap
from visionattn.models.segmentation import Segmenter

SMALL = dict(embed_dim=24, depth=2, num_heads=3, num_classes=5)


class Pointwise(nn.Module):
    """Logits of pixels, each of its own pixel alone."""

    def __init__(self, classes=4):
        super().__init__()
        self.mix = nn.Conv2d(3, classes, 1)

    def forward(self, x):
        return self.mix(x).tanh()


class OfItsTile(nn.Module):
    """Cells of ``side`` pixels whose values depend on all of the tile and on the place in it."""

    def __init__(self, side, classes=3):
        super().__init__()
        self.side = side
        self.mix = nn.Conv2d(3, classes, side, stride=side).double()

    def forward(self, x):
        maps = self.mix(x - x.mean((2, 3), keepdim=True))
        rows = torch.arange(maps.shape[2], dtype=x.dtype)[:, None]
        return maps + 0.1 * rows - 0.2 * torch.arange(maps.shape[3], dtype=x.dtype)


def starts(length, tile, overlap):
    """Where tiles begin, found one after the other."""
    found = [0]
    while found[-1] + tile < length:
        found.append(min(found[-1] + tile - overlap, length - tile))
    return found


def one_weight(place, tile, overlap, first, last):
    """How much a place in a tile counts along one side."""
    near = [1.0]
    if not first and overlap:
        near.append((place + 0.5) / overlap)
    if not last and overlap:
        near.append((tile - place - 0.5) / overlap)
    return min(near)


def blended(run, image, tile, overlap, cell):
    """Weighted mean in float64 of maps ``[K, h / cell, w / cell]`` that ``run`` gives of tiles."""
    sides = [side // cell for side in image.shape[2:]]
    tops, lefts = (starts(side, min(tile, side), overlap) for side in image.shape[2:])
    total, weight = 0, np.zeros(sides)
    for top, left in itertools.product(tops, lefts):
        values = run(image[:, :, top : top + tile, left : left + tile]).double().numpy()
        across = [
            [
                one_weight(i, count, overlap // cell, place == line[0], place == line[-1])
                for i in range(count)
            ]
            for count, place, line in zip(values.shape[1:], (top, left), (tops, lefts), strict=True)
        ]
        here = np.outer(*across)
        where = (place // cell for place in (top, left))
        pad = [(a, side - a - n) for a, side, n in zip(where, sides, here.shape, strict=True)]
        total = total + np.pad(values * here, [(0, 0), *pad])
        weight += np.pad(here, pad)
    return total / weight


@pytest.mark.parametrize("tile, overlap", [(32, 8), (24, 20)])
def test_maps_are_averaged_by_weights_that_fall_towards_the_borders(tile, overlap):
    torch.manual_seed(0)
    image = torch.randn(1, 3, 116, 76, dtype=torch.float64)
    model = OfItsTile(4)
    found = forward_tiles(model, image, tile=tile, overlap=overlap, batch_size=3)
    with torch.no_grad():
        wanted = blended(lambda part: model(part)[0], image, tile, overlap, 4)
    assert found.dtype == torch.float64 and found.shape == (1, 3, 29, 19)
    assert np.abs(found[0].numpy() - wanted).max() < 1e-12


@pytest.mark.parametrize("tile, overlap", [(31, 0), (17, 5)])
def test_what_depends_on_its_own_pixel_alone_is_exactly_the_same_in_tiles(tile, overlap):
    torch.manual_seed(1)
    images = torch.randn(2, 3, 97, 61)
    model = Pointwise()
    wanted = model(images).detach()
    found = forward_tiles(model, images, tile=tile, overlap=overlap, batch_size=4)
    assert torch.equal(found, wanted) and not found.requires_grad
    classes = forward_tiles(model, images, tile=tile, overlap=overlap, want="masks")
    assert torch.equal(classes, wanted.argmax(1).to(torch.uint8))
    shares = forward_tiles(model, images, tile=tile, overlap=overlap, want="probabilities")
    assert torch.equal(shares.argmax(1), wanted.argmax(1))
    assert (shares.double() - wanted.double().softmax(1)).abs().max() < 2**-10


@pytest.mark.parametrize(
    "name, args, cell",
    [
        ("scaleformer_vit_t", SMALL | {"patch_size": 8}, 8),
        ("resnet10t", {"num_classes": 5, "channels": [8, 8, 8, 8], "stem_width": 8}, 32),
    ],
)
def test_feature_maps_of_timm_and_of_ours(name, args, cell):
    torch.manual_seed(3)
    model = timm.create_model(name, **args).eval()
    image = torch.randn(1, 3, 96, 128)

    def last(part):
        with torch.no_grad():
            return model.forward_intermediates(part, norm=True, intermediates_only=True)[-1][0]

    found = forward_tiles(model, image, tile=64, overlap=32, want="dense", batch_size=2)
    wanted = blended(last, image, 64, 32, cell)
    assert found.shape[2:] == (96 // cell, 128 // cell)
    assert np.abs(found[0].numpy() - wanted).max() < 1e-5
    # An image that is one tile is what the model makes of it.
    assert torch.equal(forward_tiles(model, image, tile=128, want="dense")[0], last(image))
    assert torch.equal(forward_tiles(model, image, tile=160), model(image))


def test_logits_and_classes_of_the_pixels_of_a_segmentation():
    torch.manual_seed(4)
    body = timm.create_model("scaleformer_vit_t", **SMALL | dict(num_classes=0))
    model = Segmenter(body, 3).eval()
    nn.init.normal_(model.head.weight)
    image = torch.randn(1, 3, 100, 140)
    whole = torch.from_numpy(np.pad(image.numpy(), [(0, 0), (0, 0), (0, 12), (0, 4)], mode="edge"))

    def run(part):
        with torch.no_grad():
            return model(part)[0]

    wanted = blended(run, whole, 64, 16, 1)[:, :100, :140]
    found = forward_tiles(model, image, tile=64, overlap=16)
    assert found.shape == (1, 3, 100, 140)
    assert np.abs(found[0].numpy() - wanted).max() < 1e-5
    classes = forward_tiles(model, image, tile=64, overlap=16, want="masks")
    clear = np.sort(wanted, 0)[-1] - np.sort(wanted, 0)[-2] > 1e-4
    assert (classes[0].numpy() == wanted.argmax(0))[clear].all() and clear.mean() > 0.9
    assert torch.equal(
        forward_tiles(model, image, tile=144, want="masks")[0], model.masks(whole)[0, :100, :140]
    )
    assert forward_tiles(model, image, tile=64, want="dense").shape == (1, 24, 7, 9)


class Pixels(Array):
    """An image that notes what is read of it."""

    def __init__(self, pixels):
        super().__init__(pixels)
        self.reads = []

    def read(self, rows, columns):
        assert 0 <= rows.start < rows.stop <= self.height
        assert 0 <= columns.start < columns.stop <= self.width
        self.reads.append((rows.start, rows.stop, columns.start, columns.stop))
        return super().read(rows, columns)


class Bands(Rows):
    """A map that is put together of bands, and notes how much of the image was read by then."""

    def __init__(self, source):
        super().__init__()
        self.source, self.read_rows = source, []

    def write(self, first, band):
        assert first == (self.written[-1][1] if self.written else 0)
        super().write(first, band)
        self.read_rows.append(max(stop for _, stop, _, _ in self.source.reads))


def prepared(pixels):
    return torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)[None] / 255


@pytest.mark.parametrize("want", ["dense", "masks", "probabilities", "logits"])
def test_a_source_is_read_tile_by_tile_and_a_sink_gets_bands_as_they_are_done(want):
    rng = np.random.default_rng(5)
    source = Pixels(rng.integers(0, 256, (150, 91, 3), dtype=np.uint8))
    body = timm.create_model(
        "scaleformer_vit_t", num_classes=0, embed_dim=24, depth=1, num_heads=3, patch_size=8
    )
    model = Segmenter(body, 4)
    how = dict(tile=48, overlap=16, want=want)
    sink = Bands(source)
    assert forward_tiles(model, source, prepare=prepared, sink=sink, batch_size=2, **how) is None
    held = forward_tiles(model, prepared(source.pixels), **how)
    assert sink.finished and np.array_equal(sink.map, held.numpy() if want == "masks" else held[0])
    assert all(b - a <= 48 and d - c <= 48 for a, b, c, d in source.reads)
    # A band comes before more is read than its row of tiles, and of the next one a batch.
    ends = [48, 80, 112, 144, 150]
    assert all(a <= b for a, b in zip(sink.read_rows, [*ends[1:], 150], strict=True))
    assert len(source.reads) == len(set(source.reads)) == 5 * 3
    again = forward_tiles(model, source, **how)  # as fractions of 255
    assert torch.equal(again, held)


def test_numbers_that_are_not_finite_stay_so_and_masks_say_it():
    image = torch.zeros(1, 3, 40, 40)
    image[0, 0, 20, 30] = torch.nan
    model = Pointwise()
    assert forward_tiles(model, image, tile=16, overlap=8)[0, :, 20, 30].isnan().all()
    mask = forward_tiles(model, image, tile=16, overlap=8, want="masks")[0]
    assert mask[20, 30] == 255 and (mask == 255).sum() == 1


def test_the_model_keeps_its_mode_and_low_precision_becomes_float32():
    model = timm.create_model("scaleformer_vit_t", **SMALL, drop_rate=0.5).train()
    image = torch.randn(1, 3, 64, 64)
    first = forward_tiles(model, image, tile=32)
    assert torch.equal(first, forward_tiles(model, image, tile=32)) and model.training
    assert forward_tiles(model.bfloat16(), image.bfloat16(), tile=32).dtype == torch.float32


def test_an_overlap_that_is_left_out_is_an_eighth_in_whole_patches():
    assert [usual_overlap(tile, (16, 16)) for tile in (128, 144, 32, 16)] == [16, 32, 16, 0]


IMAGE = torch.zeros(1, 3, 64, 64)


WRONG = [
    ({"tile": 40}, "expected tiles in whole 16-pixel patches, got 40 pixels; use 32 or 48"),
    ({"overlap": 8}, "expected overlap in whole 16-pixel patches, got 8 pixels"),
    ({"overlap": 32}, "overlap from 0 to below tile"),
    ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ({"combine": "sum"}, "and one of mean, max"),
    ({"want": "dense", "combine": "max"}, "combine max needs outputs per image, got maps"),
    ({"want": "masks"}, "gives outputs of an image, expected logits of its pixels"),
    ({"prepare": prepared}, "prepare needs a source, got a tensor"),
    ({"sink": Bands(None)}, "a sink needs a map"),
    ({"image": torch.zeros(3, 64, 64)}, r"expected images \[B, C, H, W\]"),
    ({"sink": Bands(None), "image": IMAGE.expand(2, -1, -1, -1)}, "for a sink, got 2"),
    ({"model": nn.Flatten(), "want": "dense"}, "has no forward_intermediates"),
    ({"model": nn.AvgPool2d(8, 10), "overlap": 0}, "expected tile, overlap and image in whole"),
    ({"model": nn.Flatten(2), "overlap": 4}, r"outputs of shape \[3, 1024\]"),
]


def test_what_cannot_be_is_one_line():
    model = timm.create_model("scaleformer_vit_t", **SMALL)
    for given, text in WRONG:
        given = {"model": model, "image": IMAGE, "tile": 32} | given
        with pytest.raises(ValueError, match=text) as error:
            forward_tiles(given.pop("model"), given.pop("image"), **given)
        assert "\n" not in str(error.value)
