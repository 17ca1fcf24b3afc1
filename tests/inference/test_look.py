"""``visionattn look``: which patches, tokens and classes are meant, and what the folder holds."""

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import visionattn
from tests.helpers.inference_files import ARGS, COLOUR, write_image, write_weights
from tests.helpers.tools import written
from visionattn.command import run
from visionattn.data.geometry import Box
from visionattn.inference import attribution_folder, attribution_pictures
from visionattn.inference.look_options import parse_look
from visionattn.models.attribution import find_attribution, watch
from visionattn.models.weights import DataSpec, load_model

MAX = ARGS | dict(global_pool="max", class_token=False)
FILE = "best.safetensors"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with weights of a model that pools by the maximum, and two images."""
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / FILE, args=MAX)
    write_image(tmp_path / "a.png", 40, 56, seed=1)
    write_image(tmp_path / "b.png", 24, 24, seed=2)
    return tmp_path


def inputs_of(image):
    """The input of a model in a file's own pixels."""
    pixels = np.asarray(Image.open(image), np.float32) / 255
    inputs = (pixels - np.array(COLOUR.mean)) / np.array(COLOUR.std)
    return torch.tensor(inputs.transpose(2, 0, 1)[None], dtype=torch.float32)


def attributed(path, image, **options):
    """The attribution in a file's own pixels."""
    return find_attribution(load_model(path), inputs_of(image), **options)


def look(*more: str, file: str = FILE, output: str = "out") -> int:
    return run("look", [file, *more, "--img-size", "native", "--output", output])


def summary(folder):
    return json.loads((folder / "look.json").read_text())["images"]


def test_the_folder_holds_the_pictures_the_page_and_the_numbers(folder, capsys):
    assert look("a.png", "b.png") == 0
    found, out = attributed(FILE, "a.png"), folder / "out"
    first, second = summary(out)
    place = divmod(int(found.patches.argmax()), 7)
    names = {f"{i}-{name}.png" for i in (1, 2) for name in ("winners", "gradient", "features")}
    names |= {f"1-block-1-{place[0]}-{place[1]}.png", "tables.png", "index.html", "look.json"}
    (other,) = set(os.listdir(out)) - names
    assert re.fullmatch(r"2-block-1-\d-\d\.png", other)
    assert first["class"] == COLOUR.class_names[found.target]
    assert first["margin"] == pytest.approx(found.margin, abs=1e-5)
    assert first["logits"] == pytest.approx(found.logits.tolist(), abs=1e-5)
    best = first["winners"][0]
    assert (best["row"], best["column"]) == place
    assert best["box"] == [8 * place[0], 8 * place[1], 8, 8]
    assert best["added"] == pytest.approx(float(found.patches.max()), abs=1e-5)
    assert best["channels"] == int(found.channels[place])
    (row,) = first["rows"]
    assert (row["block"], row["query"]) == (1, f"row {place[0]}, column {place[1]}")
    assert row["content"] + row["place"] + row["prefix"] == pytest.approx(1)
    assert (first["path"], second["path"]) == ("a.png", "b.png")
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "out/index.html: attribution in 2 images"
    assert f"a.png: {first['class']}, " in printed.out
    page = (out / "index.html").read_text()
    assert set(re.findall(r'href="([^":]+)"', page)) == {
        name for name in os.listdir(out) if name.endswith(".png")
    }


def test_places_the_top_and_the_class_token_are_queried(folder):
    args = MAX | dict(class_token=True, reg_tokens=1)
    write_weights(folder / "class.safetensors", args=args)
    flags = ("--queries", "9,55", "class", "top", "--blocks", "0", "-1", "--show", "rows")
    assert look("a.png", *flags, file="class.safetensors") == 0
    rows = summary(folder / "out")[0]["rows"]
    assert [row["block"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert [row["query"] for row in rows[:2]] == ["row 1, column 6", "class"]
    assert rows[1]["place"] == 0 and rows[0]["prefix"] > 0
    write_weights(folder / "token.safetensors", args=args | dict(global_pool="token"))
    assert look("a.png", file="token.safetensors", output="token") == 0
    (found,) = summary(folder / "token")
    assert [row["query"] for row in found["rows"]] == ["class"] and "winners" not in found
    assert "Only the class token is pooled" in (folder / "token" / "index.html").read_text()


def test_the_row_of_a_place_is_that_of_its_token_behind_the_prefix(folder):
    write_weights(folder / FILE, args=MAX | dict(class_token=True, reg_tokens=1))
    options = dict(queries=[(9, 55)], show=["rows"], img_size="native")
    (found,) = visionattn.look(FILE, ["a.png"], **options)
    rows, _ = watch(load_model(FILE), inputs_of("a.png"), {1: [2 + 7 + 6]})
    wanted = rows[1].total[0, :, 0, 2:].mean(0).unflatten(0, (5, 7))
    torch.testing.assert_close(found.rows[0].term("both"), wanted)


def test_rows_are_of_a_head_or_of_the_mean_of_all(folder):
    def row(*flags):
        assert look("a.png", "--overwrite", "--show", "rows", "--queries", "0,0", *flags) == 0
        return summary(folder / "out")[0]["rows"][0]

    heads = [row("--head", str(head))["content"] for head in range(3)]
    both, place, content = row(), row("--term", "place"), row("--term", "content")
    assert both["content"] == pytest.approx(sum(heads) / 3, abs=1e-5)
    assert max(heads) - min(heads) > 1e-4
    assert sum(key["weight"] for key in place["highest"]) <= both["place"] + 1e-6
    assert place["highest"] != content["highest"] != both["highest"]


def test_the_same_twice_and_a_folder_is_replaced_when_asked(folder):
    assert look("a.png", "b.png") == 0
    first = written(folder / "out")
    assert look("b.png", "--overwrite") == 0
    assert not [name for name in os.listdir("out") if name.startswith("2-")]
    assert look("a.png", "b.png", "--overwrite") == 0
    again = written(folder / "out")
    assert again.keys() == first.keys()
    assert all(again[name] == first[name] for name in first if name.endswith(".png"))
    (folder / "mine").mkdir()
    assert look("b.png", "--overwrite", output="mine") == 2


def test_many_bands_of_any_range_are_drawn(folder):
    spec = DataSpec(5, 2, (), (0.4,) * 5, (0.3,) * 5, None, 16, bands=(1, 2, 3, 4, 5))
    write_weights(folder / "bands.safetensors", replace(spec, value_range=(0.0, 4.0)), args=MAX)
    np.save("bands.npy", np.random.default_rng(3).uniform(0, 4, (40, 48, 5)).astype(np.float32))
    assert look("bands.npy", file="bands.safetensors") == 0
    assert summary(folder / "out")[0]["class"] in ("0", "1")


def test_a_model_that_comes_with_weights_may_stand_first(folder):
    options = parse_look(["scaleformer_vit_digits", "a.png", "b.png", "--output", "out"])
    assert (options.model, options.pretrained) == ("scaleformer_vit_digits", True)
    assert options.images == ["a.png", "b.png"] and options.checkpoint is None


def test_from_python_the_same_is_found_and_the_model_is_left_as_it_was(folder):
    model = load_model(FILE).train()
    options = dict(blocks=[0], target=3, img_size="native")
    found = visionattn.look(model, ["a.png", "b.png"], show=["rows", "gradient"], **options)
    assert model.training and all(each.requires_grad for each in model.parameters())
    assert [each.path for each in found] == ["a.png", "b.png"] and found[0].components is None
    pixels = np.asarray(Image.open("a.png"))
    (again,) = visionattn.look(FILE, pixels, device="cpu", queries=[(9, 55), "top"], **options)
    wanted = attributed(FILE, "a.png", target=3)
    for each in (again, found[0]):
        assert each.class_name == "elm"
        torch.testing.assert_close(each.evidence.patches, wanted.patches, rtol=0, atol=1e-5)
        torch.testing.assert_close(each.evidence.gradient, wanted.gradient, rtol=0, atol=1e-5)
        assert each.top == divmod(int(wanted.patches.argmax()), 7)
    assert [row.place for row in again.rows] == [(1, 6), again.top]
    assert again.components.shape == (3, 5, 7) and again.shares.shape == (3,)
    assert again.patch_at(39, 0) == (4, 0) and again.box(4, 6) == Box(32, 48, 8, 8)
    with pytest.raises(ValueError, match="queries must be a list, got top"):
        visionattn.look(model, pixels, queries="top")


TINY = ARGS | dict(global_pool="avgmax", class_token=True, reg_tokens=1, horizon=2)
ORANGE, BLUE, GREEN = (213, 94, 0), (0, 114, 178), (0, 128, 80)
PATCH, ASKED = 8, (1, 2)
"""Pixels of a patch, and the patch whose row of attention is drawn: no mirror image of itself."""
LARGE_PX = 1921


@dataclass(frozen=True)
class Case:
    """An image, how the model sees it, and where pixels of its input come to lie."""

    file: tuple[int, int]
    seen: tuple[int, int]
    """The size at which the model sees what it sees."""
    options: dict
    each: int = 1
    """Pixels of the file along the side of one of the model's."""
    first: tuple[int, int] = (0, 0)
    """Where in the file the part begins that the model sees."""
    times: int = 9
    """Pixels of the picture along the side of one of the file."""


CASES = {
    "native": Case((37, 52), (37, 52), dict(img_size="native")),
    "cropped": Case((144, 131), (48, 32), dict(img_size=[48, 32], fit="crop"), 3, (0, 17), 3),
    "too large to draw": Case(
        (280, 336), (32, 48), dict(img_size=[32, 48], fit="crop"), 7, (28, 0)
    ),
    "padded": Case((40, 56), (40, 56), dict(img_size=[56, 56], fit="pad")),
}


@dataclass(frozen=True)
class Drawn:
    """The folder of a case, where its pictures have pixels of the model's input, and the file."""

    case: Case
    folder: Path
    grey: np.ndarray

    def picture(self, name):
        """The pixels of a picture without what stands below the image."""
        (path,) = self.folder.glob(f"1-{name}*.png")
        height, width = (px * self.case.times for px in self.case.file)
        return np.asarray(Image.open(path)).astype(float)[:height, :width]

    def sampled(self, picture):
        """The color of the picture in the middle of each pixel of the model's input."""
        case = self.case
        down, right = (
            np.array([int((first + (i + 0.5) * case.each) * case.times) for i in range(count)])
            for first, count in zip(case.first, case.seen, strict=True)
        )
        return picture[down][:, right]

    def inside(self, places=(0, 0), count=None, around=0):
        """A mask of the picture: ``count`` patches from a place on, or all, and a line around."""
        case, side = self.case, PATCH * self.case.each
        mask = np.zeros([px * case.times for px in case.file], bool)
        slices = []
        for first, place, seen in zip(case.first, places, case.seen, strict=True):
            start = first + place * side
            last = first + seen * case.each
            end = last if count is None else min(start + count * side, last)
            slices.append(slice(max(0, start * case.times - around), end * case.times + around))
        mask[tuple(slices)] = True
        return mask

    def assert_even(self, picture):
        """Each pixel of the model's input is of one color, to its edges."""
        side = self.case.each * self.case.times
        wanted = self.sampled(picture).repeat(side, 0).repeat(side, 1)
        np.testing.assert_array_equal(picture[self.inside()], wanted.reshape(-1, 3))

    def frame(self, place):
        """The line around a patch, one pixel away from it."""
        return self.inside(place, 1, 1) & ~self.inside(place, 1)


def strength(colours):
    """How strong the color over gray paper is, from -1, blue, to 1, orange."""
    more = colours[..., 0] - colours[..., 2]
    return np.where(more > 0, more / ORANGE[0], more / BLUE[2]) / 0.8


def assert_drawn(drawn, name, wanted):
    """Colors are as strong as is wanted; below them lies the image, pale where it is not seen."""
    picture, case = drawn.picture(name), drawn.case
    sampled = drawn.sampled(picture)
    np.testing.assert_allclose(strength(sampled), wanted, atol=0.01)
    share = 0.8 * np.abs(strength(sampled))[..., None]
    colour = np.where(strength(sampled)[..., None] > 0, ORANGE, BLUE)
    grey = drawn.grey.repeat(case.times, 0).repeat(case.times, 1)[..., None]
    assert np.abs(sampled - drawn.sampled(grey) * (1 - share) - colour * share).max() <= 3
    outside = ~drawn.inside(around=2)  # and frames
    pale = 255 - 0.35 * (255 - grey[outside])
    assert np.abs(picture[outside] - pale).max(initial=0) <= 1.5
    return picture


@pytest.mark.parametrize("name", CASES)
def test_all_pictures_show_the_numbers_where_they_are(tmp_path, monkeypatch, name):
    case, random = CASES[name], np.random.default_rng(7)
    own = random.integers(0, 256, (*case.seen, 3)).astype(np.uint8)
    file = random.integers(0, 256, (*case.file, 3)).astype(np.uint8)
    (top, left), large = case.first, np.kron(own, np.ones((case.each, case.each, 1), np.uint8))
    file[top : top + large.shape[0], left : left + large.shape[1]] = large
    monkeypatch.chdir(tmp_path)
    Image.fromarray(file).save("a.png")
    write_weights(tmp_path / "best.safetensors", args=TINY)
    asked = [
        first + int((place + 0.5) * PATCH * case.each)
        for first, place in zip(case.first, ASKED, strict=True)
    ]
    if name == "too large to draw":
        monkeypatch.setattr(attribution_folder, "MOST_DRAWN_PX", LARGE_PX)
    words = f"best.safetensors a.png --output out --target birch --queries {asked[0]},{asked[1]}"
    flags = [f"--{name}={value}" for name, value in case.options.items()]
    assert run("look", [*words.split(), *flags]) == 0
    options = case.options | dict(target="birch", queries=[tuple(asked)])
    (found,) = visionattn.look("best.safetensors", ["a.png"], **options)
    if name == "too large to draw":  # a smaller picture of the file is drawn
        case = replace(case, file=(40, 48), each=1, first=(4, 0), times=10)
        file = file.reshape(40, 7, 48, 7, 3).mean((1, 3)).round().astype(np.uint8)
    drawn = Drawn(case, tmp_path / "out", np.asarray(Image.fromarray(file).convert("L")) * 1.0)

    height, width = (-(-px // PATCH) for px in case.seen)

    def of_pixels(patches):
        return np.kron(patches, np.ones((PATCH, PATCH)))[: case.seen[0], : case.seen[1]]

    added = found.evidence.patches.numpy()[:height, :width]
    assert added.min() < 0 < added.max() and not found.evidence.patches[height:].any()
    picture = assert_drawn(drawn, "winners", of_pixels(added / np.abs(added).max()))
    orange = (picture == ORANGE).all(-1)  # colors over paper are never as strong
    highest = {divmod(int(place), width) for place in np.argsort(-added, axis=None)[:5]}
    for place in np.ndindex(height, width):
        assert (orange[drawn.frame(place)].mean() > 0.5) == (place in highest)

    gradient = found.evidence.gradient.numpy()
    order = np.sort(np.abs(gradient), axis=None)[::-1]
    most = order[round(0.005 * order.size) - 1]
    gradient = gradient[: case.seen[0], : case.seen[1]]
    drawn.assert_even(assert_drawn(drawn, "gradient", np.clip(gradient / most, -1, 1)))

    row = found.rows[0].term("both")[:height, :width].numpy()
    rank = row.argsort(axis=None).argsort().reshape(row.shape)
    wanted = -np.log10(1 - (rank + 0.5) / row.size) / np.log10(2 * row.size)
    picture = assert_drawn(drawn, "block-1-1-2", of_pixels(wanted))
    assert ((picture == GREEN).all(-1) == drawn.frame(ASKED)).all()
    ranked = np.sort(row, axis=None)[::-1] * row.size
    said = f"Colors follow ranks: half of the patches above {ranked[row.size // 2]:.3g}"
    assert said in (tmp_path / "out" / "index.html").read_text()

    components = found.components[:, :height, :width].numpy()
    low, high = np.quantile(components, (0.01, 0.99), axis=(1, 2))[..., None, None]
    wanted = [of_pixels(255 * each) for each in np.clip((components - low) / (high - low), 0, 1)]
    picture = drawn.picture("features")
    np.testing.assert_allclose(drawn.sampled(picture), np.stack(wanted, -1), atol=1)
    drawn.assert_even(picture)
    assert (picture[~drawn.inside()] == 255).all()


def test_tables_are_drawn_with_the_offsets_where_they_are():
    """An entry is at the key's place minus the query's, from the upper left."""
    level = torch.arange(1.0, 16).view(3, 5)
    level[1, 2] = 0
    levels = torch.stack([level, level.flip(0)])
    sheet = np.asarray(attribution_pictures.tables([(0, levels.exp())], False).image).astype(int)
    rows, columns = np.nonzero(sheet[..., 0] - sheet[..., 2] > 5)  # orange has no blue
    drawn = sheet[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1, 2]
    cell = len(drawn) // 3
    for square, wanted in zip((drawn[:, : 5 * cell], drawn[:, -5 * cell :]), levels, strict=True):
        got = 1 - square[cell // 2 :: cell, cell // 2 :: cell] / 255
        np.testing.assert_allclose(got, wanted / 15, atol=0.01)
