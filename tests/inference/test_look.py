"""``visionattn look``: which patches, tokens and classes are meant, and what the folder holds."""

import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import visionattn
from tests.helpers.inference_files import ARGS, COLOUR, write_image, write_weights
from tests.helpers.tools import written
from visionattn.command import run
from visionattn.data.geometry import Box
from visionattn.inference.attribution_folder import cut
from visionattn.inference.look_options import parse_look
from visionattn.inference.pictures import Picture
from visionattn.models.attribution import find_attribution
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


def attributed(path, image, **options):
    """The attribution in a file's own pixels."""
    model = load_model(path)
    pixels = np.asarray(Image.open(image), np.float32) / 255
    inputs = (pixels - np.array(COLOUR.mean)) / np.array(COLOUR.std)
    inputs = torch.tensor(inputs.transpose(2, 0, 1)[None], dtype=torch.float32)
    return find_attribution(model, inputs, **options)


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


def test_a_model_that_comes_with_weights_may_stand_first(folder):
    options = parse_look(["scaleformer_vit_digits", "a.png", "b.png", "--output", "out"])
    assert (options.model, options.pretrained) == ("scaleformer_vit_digits", True)
    assert options.images == ["a.png", "b.png"] and options.checkpoint is None


def test_many_bands_of_any_range_and_grey_levels_as_channels_are_drawn(folder):
    spec = DataSpec(5, 2, (), (0.4,) * 5, (0.3,) * 5, None, 16, bands=(1, 2, 3, 4, 5))
    write_weights(folder / "bands.safetensors", replace(spec, value_range=(0.0, 4.0)), args=MAX)
    np.save("bands.npy", np.random.default_rng(3).uniform(0, 4, (40, 48, 5)).astype(np.float32))
    assert look("bands.npy", file="bands.safetensors") == 0
    assert summary(folder / "out")[0]["class"] in ("0", "1")
    spec = DataSpec(256, 3, (), (), (), "grey_one_hot", 16)
    write_weights(folder / "levels.safetensors", spec, args=MAX)
    assert look("a.png", file="levels.safetensors", output="grey") == 0


def test_from_python_the_same_is_found_and_the_model_is_left_as_it_was(folder):
    model = load_model(FILE).train()
    options = dict(blocks=[0], target=3, img_size="native")
    found = visionattn.look(
        model, ["a.png", "b.png"], queries=["top", (9, 20)], show=["rows", "gradient"], **options
    )
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
    with pytest.raises(ValueError, match="image 0: query 99,0 is outside"):
        visionattn.look(FILE, pixels, queries=[(99, 0)])


def test_a_detail_is_of_the_image_and_not_of_the_sentences_below_it():
    sheet = Image.new("RGB", (2000, 900), "white")
    sheet.paste((0, 0, 0), (0, 0, 1900, 500))
    picture = Picture("a", "a", (), sheet, Box(490, 1890, 8, 8), (1900, 500))
    part = cut(picture)
    assert part.size == (640, 500) and part.getextrema() == ((0, 0),) * 3
