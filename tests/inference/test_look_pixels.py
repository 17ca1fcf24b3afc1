"""What ``visionattn look`` draws, pixel by pixel, against the numbers of the model.

Files hold each pixel of the model's input as a square: what it sees is known without resampling.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.helpers.inference_files import ARGS, COLOUR, write_weights
from tests.helpers.tools import load_tool
from visionattn.inference import attribution_folder as run
from visionattn.models.attribution import Attribution, find_attribution, principal, watch
from visionattn.models.weights import load_model

look = load_tool("look")
PREFIX = 2
TINY = ARGS | dict(global_pool="avgmax", class_token=True, reg_tokens=PREFIX - 1, horizon=2)
ORANGE, BLUE, GREEN = (213, 94, 0), (0, 114, 178), (0, 128, 80)
GREY = (107, 107, 107)
PATCH, ASKED = 8, (1, 2)
"""Pixels of a patch, and the patch whose row of attention is drawn: no mirror image of itself."""


@dataclass(frozen=True)
class Case:
    """An image, how the model sees it, and where pixels of its input come to lie."""

    file: tuple[int, int]
    seen: tuple[int, int]
    """The size at which the model sees what it sees."""
    flags: tuple[str, ...]
    each: int = 1
    """Pixels of the file along the side of one of the model's."""
    first: tuple[int, int] = (0, 0)
    """Where in the file the part begins that the model sees."""
    times: int = 1
    """Pixels of the picture along the side of one of the file."""
    present: tuple[int, int] | None = None
    """The part of the input that counts, where that is not all of it."""
    most_drawn_px: int = run.MOST_DRAWN_PX

    @property
    def grid(self):
        return tuple(-(-px // PATCH) for px in self.seen)

    @property
    def drawn(self):
        """The same in the smaller picture of a file above ``most_drawn_px``."""
        if self.file[0] * self.file[1] <= self.most_drawn_px:
            return self
        file, first = (tuple(px // self.each for px in pair) for pair in (self.file, self.first))
        return replace(self, file=file, each=1, first=first)


CROP = ("--img-size", "32", "48", "--fit", "crop")
CASES = {
    "native": Case((37, 52), (37, 52), ("--img-size", "native"), times=9),
    "cropped left and right": Case(
        (144, 131), (48, 32), ("--img-size", "48", "32", "--fit", "crop"), 3, (0, 17), 3
    ),
    "too large to draw": Case((280, 336), (32, 48), CROP, 7, (28, 0), 10, None, 1921),
    "padded": Case(
        (40, 56), (40, 56), ("--img-size", "56", "56", "--fit", "pad"), times=9, present=(40, 56)
    ),
}


@dataclass(frozen=True)
class Seen:
    """The pictures of a case, and what the model gives by hand."""

    case: Case
    grey: np.ndarray
    """The file as grey levels."""
    folder: Path
    evidence: Attribution
    row: np.ndarray
    """With which weights the patch that is asked sees the others, the mean of all heads."""
    components: np.ndarray
    """The three main components of the features, ``[3, H, W]``."""

    def picture(self, name):
        """The pixels of a picture without what stands below the image."""
        (path,) = self.folder.glob(f"1-{name}*.png")
        height, width = (px * self.case.drawn.times for px in self.case.drawn.file)
        return np.asarray(Image.open(path)).astype(float)[:height, :width]

    def sampled(self, picture):
        """The colour of the picture in the middle of each pixel of the model's input."""
        case = self.case.drawn
        down, right = (
            np.array([int((first + (i + 0.5) * case.each) * case.times) for i in range(count)])
            for first, count in zip(case.first, case.seen, strict=True)
        )
        return picture[down][:, right]

    def even(self, picture):
        """Whether each pixel of the model's input is of one colour, to its edges."""
        case = self.case.drawn
        side = case.each * case.times
        top, left = (first * case.times for first in case.first)
        height, width = (side * px for px in case.seen)
        wanted = self.sampled(picture).repeat(side, 0).repeat(side, 1)
        return np.array_equal(picture[top : top + height, left : left + width], wanted)

    def frame(self, row, column):
        """The line around a patch, one pixel away from it, as a mask of the picture."""
        case = self.case.drawn
        scale, mask = case.each * case.times, np.zeros([px * case.times for px in case.file], bool)
        top, left = (
            first * case.times + place * PATCH * scale
            for first, place in zip(case.first, (row, column), strict=True)
        )
        bottom, right = (
            first * case.times + min((place + 1) * PATCH, seen) * scale
            for first, place, seen in zip(case.first, (row, column), case.seen, strict=True)
        )
        mask[max(0, top - 1) : bottom + 1, max(0, left - 1) : right + 1] = True
        mask[top:bottom, left:right] = False
        return mask


def strength(colours):
    """How strong the colour over grey paper is, from -1, blue, to 1, orange."""
    more = colours[..., 0] - colours[..., 2]
    return np.where(more > 0, more / ORANGE[0], more / BLUE[2]) / 0.8


def of_pixels(patches, seen):
    """Values of patches as values of the pixels that the model sees."""
    return np.kron(patches, np.ones((PATCH, PATCH)))[: seen[0], : seen[1]]


@pytest.fixture(scope="module", params=CASES)
def seen(request, tmp_path_factory):
    """All pictures of an image, once for all tests of it."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp("look")
    random = np.random.default_rng(7)
    own = random.integers(0, 256, (*case.seen, 3)).astype(np.uint8)
    file = random.integers(0, 256, (*case.file, 3)).astype(np.uint8)
    (top, left), large = case.first, np.kron(own, np.ones((case.each, case.each, 1), np.uint8))
    file[top : top + large.shape[0], left : left + large.shape[1]] = large
    Image.fromarray(file).save(folder / "a.png")
    write_weights(folder / "best.safetensors", args=TINY)
    # The middle of the patch that is asked, in the file.
    asked = [
        first + int((place + 0.5) * PATCH * case.each)
        for first, place in zip(case.first, ASKED, strict=True)
    ]
    given = ["best.safetensors", "a.png", "--output", "out", "--target", "birch", *case.flags]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(run, "MOST_DRAWN_PX", case.most_drawn_px)
        assert look([*given, "--queries", f"{asked[0]},{asked[1]}"]) == 0
    model = load_model(folder / "best.safetensors")
    sides = [int(case.flags[1])] * 2 if case.present else [count * PATCH for count in case.grid]
    beyond = [(0, side - px) for side, px in zip(sides, case.seen, strict=True)]
    inputs = (np.pad(own, (*beyond, (0, 0)), mode="edge") / 255 - COLOUR.mean) / COLOUR.std
    inputs = torch.tensor(inputs.transpose(2, 0, 1)[None], dtype=torch.float32)
    sizes = None if case.present is None else torch.tensor([case.present])
    evidence = find_attribution(model, inputs, sizes=sizes, target=1)
    across = sides[1] // PATCH
    token = PREFIX + ASKED[0] * across + ASKED[1]
    rows, features = watch(model, inputs, {1: [token]}, sizes=sizes, features=1)
    height, width = case.grid
    row = rows[1].total[0, :, 0, PREFIX:].mean(0).unflatten(0, (-1, across))
    components, _ = principal(features[:, :height, :width])
    return Seen(
        case,
        np.asarray(Image.fromarray(file).convert("L")).astype(float),
        folder / "out",
        evidence,
        row[:height, :width].numpy(),
        components.numpy(),
    )


def assert_paper_is_the_file(seen, name):
    """Below the colours lies the image, and what the model does not see of it is pale."""
    picture, case = seen.picture(name), seen.case.drawn
    share = 0.8 * np.abs(strength(seen.sampled(picture)))[..., None]
    colour = np.where(strength(seen.sampled(picture))[..., None] > 0, ORANGE, BLUE)
    top, left = seen.case.first
    bottom, right = (
        first + count * seen.case.each
        for first, count in zip(seen.case.first, seen.case.seen, strict=True)
    )
    middle, step = seen.case.each // 2, seen.case.each
    paper = seen.grey[top + middle : bottom : step, left + middle : right : step, None]
    assert np.abs(seen.sampled(picture) - paper * (1 - share) - colour * share).max() <= 3
    if case.file == seen.case.file:  # else what is outside is not drawn
        outside = np.ones(case.file, bool)
        outside[max(0, top - 2) : bottom + 2, max(0, left - 2) : right + 2] = False  # and frames
        middles = picture[case.times // 2 :: case.times, case.times // 2 :: case.times]
        pale = 255 - 0.35 * (255 - seen.grey[outside])
        assert np.abs(middles[outside] - pale[:, None]).max(initial=0) <= 1
        assert outside.any() == ("crop" in case.flags)


def test_winners_are_drawn_where_they_are_and_the_highest_are_framed(seen):
    height, width = seen.case.grid
    added = seen.evidence.patches.numpy()[:height, :width]
    assert added.min() < 0 < added.max()
    wanted = of_pixels(added / np.abs(added).max(), seen.case.seen)
    picture = seen.picture("winners")
    np.testing.assert_allclose(strength(seen.sampled(picture)), wanted, atol=0.01)
    assert_paper_is_the_file(seen, "winners")
    orange = (picture == ORANGE).all(-1)  # colours over paper are never as strong
    highest = {divmod(int(place), width) for place in np.argsort(-added, axis=None)[:5]}
    for place in np.ndindex(height, width):
        assert (orange[seen.frame(*place)].mean() > 0.5) == (place in highest)


def test_the_gradient_is_drawn_where_it_is(seen):
    height, width = seen.case.seen
    gradient = seen.evidence.gradient.numpy()
    order = np.sort(np.abs(gradient), axis=None)[::-1]
    most = order[round(0.005 * order.size) - 1]
    wanted = np.clip(gradient[:height, :width] / most, -1, 1)
    picture = seen.picture("gradient")
    np.testing.assert_allclose(strength(seen.sampled(picture)), wanted, atol=0.01)
    assert seen.even(picture)
    assert_paper_is_the_file(seen, "gradient")


def test_a_row_is_drawn_where_its_keys_are_and_its_query_is_framed(seen):
    rank = seen.row.argsort(axis=None).argsort().reshape(seen.row.shape)
    count = rank.size
    wanted = -np.log10(1 - (rank + 0.5) / count) / np.log10(2 * count)
    picture = seen.picture("block-1-1-2")
    got = strength(seen.sampled(picture))
    np.testing.assert_allclose(got, of_pixels(wanted, seen.case.seen), atol=0.01)
    assert_paper_is_the_file(seen, "block-1-1-2")
    ranked = np.sort(seen.row, axis=None)[::-1] * count
    said = f"Colours go by rank: half of the patches above {ranked[count // 2]:.3g}"
    assert said in (seen.folder / "index.html").read_text()
    green = (picture == GREEN).all(-1)
    assert (green == seen.frame(*ASKED)).all()


def test_features_are_drawn_where_they_are_and_white_beside(seen):
    low, high = np.quantile(seen.components, (0.01, 0.99), axis=(1, 2))[..., None, None]
    spread = np.clip((seen.components - low) / (high - low), 0, 1)
    wanted = [of_pixels(255 * each, seen.case.seen) for each in spread]
    picture, case = seen.picture("features"), seen.case.drawn
    np.testing.assert_allclose(seen.sampled(picture), np.stack(wanted, -1), atol=1)
    assert seen.even(picture)
    top, left, part = *case.first, [px * case.each for px in case.seen]
    inside = np.zeros(case.file, bool)
    inside[top : top + part[0], left : left + part[1]] = True
    inside = np.kron(inside, np.ones((case.times, case.times), bool))
    assert (picture[~inside] == 255).all()


def squares(picture):
    """The insides of the squares that are framed in a picture, line by line."""
    frame = (picture == GREY).all(-1)
    edges = np.diff(np.pad(frame, ((0, 0), (1, 1))).astype(int))
    lines = [
        (y, x, end)
        for y, edge in enumerate(edges)
        for x, end in zip(np.flatnonzero(edge > 0), np.flatnonzero(edge < 0), strict=True)
        if end - x > 50  # letters have shorter strokes
    ]
    for y, x, end in lines:
        below = [line for line in lines if line[0] > y and line[1:] == (x, end)]
        if frame[y + 1, x] and frame[y + 1, end - 1] and below:
            yield picture[y + 1 : below[0][0], x + 1 : end - 1]


@pytest.mark.parametrize("kind", ["joint", "axial"])
def test_tables_are_drawn_with_the_offsets_where_they_are(tmp_path, monkeypatch, kind):
    """An entry is that of the key's place less the query's, from the upper left."""
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors", args=TINY | dict(relative=kind))
    Image.fromarray(np.zeros((16, 24, 3), np.uint8)).save("a.png")
    assert look(["best.safetensors", "a.png", "--output", "out", "--show", "tables"]) == 0
    weights, wanted = load_file("best.safetensors"), []
    for block in range(2):
        of_block = {
            key.rsplit(".", 1)[1]: torch.where(value > 0, value + 1, value.exp()).sum(-1)
            for key, value in weights.items()
            if key.startswith(f"blocks.{block}.attn.relative.")
        }
        for head in range(3):
            if kind == "axial":
                parts = of_block["rows"][head][:, None], of_block["columns"][head][None]
                wanted.append(parts[0] + parts[1])
            else:
                wanted.append(torch.atleast_2d(of_block["table"][head]))
    found = list(squares(np.asarray(Image.open("out/tables.png"))))
    assert len(found) == len(wanted) == 6
    for square, table in zip(found, wanted, strict=True):
        level = table.log().numpy()
        tint = (level - level.min()) / (level.max() - level.min())
        cell = square.shape[1] // level.shape[1]
        assert square.shape[:2] == tuple(cell * count for count in level.shape)
        got = 1 - square[cell // 2 :: cell, cell // 2 :: cell, 2] / 255  # orange has no blue
        np.testing.assert_allclose(got, tint, atol=0.01)
