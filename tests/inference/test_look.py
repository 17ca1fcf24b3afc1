"""``visionattn look``: which patches, tokens and classes are meant, what is drawn where, and what
is refused before anything is written.
"""

import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import visionattn
from tests.helpers.inference_files import ARGS, COLOUR, write_image, write_weights
from tests.helpers.tools import assert_one_error, load_tool, written
from visionattn.data.geometry import Box, Geometry
from visionattn.inference.look.drawing import FOR, Picture, by_rank, ranked
from visionattn.inference.look.find import of_patches, patch_at
from visionattn.inference.look.options import parse_look, parse_queries
from visionattn.inference.look.run import Looking, cut
from visionattn.lab.report.look import look_page
from visionattn.layout import Grid
from visionattn.models.attribution import find_attribution
from visionattn.models.weights import DataSpec, load_model, save_model

look = load_tool("look")
MAX = ARGS | dict(global_pool="max", class_token=False)
FILE = "best.safetensors"
NATIVE = ("--img-size", "native")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with weights of a model that pools by the maximum, and two images."""
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / FILE, args=MAX)
    write_image(tmp_path / "a.png", 40, 56, seed=1)
    write_image(tmp_path / "b.png", 24, 24, seed=2)
    return tmp_path


def evidence_by_hand(path, image, **options):
    """The evidence of a file's own pixels."""
    model = load_model(path)
    pixels = np.asarray(Image.open(image), np.float32) / 255
    inputs = (pixels - np.array(COLOUR.mean)) / np.array(COLOUR.std)
    inputs = torch.tensor(inputs.transpose(2, 0, 1)[None], dtype=torch.float32)
    return find_attribution(model, inputs, **options)


def opened(path):
    """The pixels of a picture."""
    with Image.open(path) as picture:
        return np.asarray(picture)


def summary(folder):
    return json.loads((folder / "look.json").read_text())["images"]


def test_the_folder_holds_the_pictures_the_page_and_the_numbers(folder, capsys):
    assert look([FILE, "a.png", "b.png", "--output", "out", *NATIVE]) == 0
    found, out = evidence_by_hand(FILE, "a.png"), folder / "out"
    first, second = summary(out)
    place = divmod(int(found.patches.argmax()), 7)
    names = {f"{i}-{name}.png" for i in (1, 2) for name in ("winners", "gradient", "features")}
    names |= {f"1-block-1-{place[0]}-{place[1]}.png", "tables.png", "index.html", "look.json"}
    others = set(os.listdir(out)) - names
    assert len(others) == 1 and re.fullmatch(r"2-block-1-\d-\d\.png", others.pop())
    assert first["class"] == COLOUR.class_names[found.target]
    assert first["margin"] == pytest.approx(found.margin, abs=1e-5)
    assert first["logits"] == pytest.approx(found.logits.tolist(), abs=1e-5)
    best = first["winners"][0]
    assert (best["row"], best["column"]) == place
    assert best["box"] == [8 * place[0], 8 * place[1], 8, 8]
    assert best["added"] == pytest.approx(float(found.patches.max()), abs=1e-5)
    assert best["channels"] == int(found.channels[place])
    assert [(row["block"], row["query"]) for row in first["rows"]] == [
        (1, f"row {place[0]}, column {place[1]}")
    ]
    row = first["rows"][0]
    assert row["content"] + row["place"] + row["prefix"] == pytest.approx(1)
    assert (first["path"], second["path"]) == ("a.png", "b.png")
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "out/index.html: evidence in 2 images"
    assert f"a.png: {first['class']}, " in printed.out
    page = (out / "index.html").read_text()
    assert set(re.findall(r'href="([^":]+)"', page)) == {
        name for name in os.listdir(out) if name.endswith(".png")
    }


def test_the_image_is_drawn_pixel_for_pixel_with_what_patches_add(folder):
    assert look([FILE, "a.png", "--output", "out", "--show", "winners", *NATIVE]) == 0
    assert set(os.listdir(folder / "out")) == {"1-winners.png", "index.html", "look.json"}
    found = evidence_by_hand(FILE, "a.png")
    added = found.patches / found.patches.abs().max()
    drawn = opened(folder / "out" / "1-winners.png").astype(float)
    times = 512 // 56
    grey = np.asarray(Image.open("a.png").convert("L")).astype(float)
    # Where nothing is boxed: a patch that is none of the highest and has none beside it.
    boxed = found.patches.flatten().argsort(descending=True)[:5].tolist()
    places = [divmod(place, 7) for place in boxed]
    free = [
        (y, x)
        for y in range(5)
        for x in range(7)
        if all(max(abs(y - row), abs(x - column)) > 1 for row, column in places)
    ]
    assert free
    for y, x in free:
        share = 0.8 * abs(float(added[y, x]))
        colour = np.array(FOR if added[y, x] > 0 else (0, 114, 178))
        for down, right in ((0, 0), (3, 5), (7, 7)):
            row, column = 8 * y + down, 8 * x + right
            wanted = grey[row, column] * (1 - share) + colour * share
            pixel = drawn[row * times : (row + 1) * times, column * times : (column + 1) * times]
            assert np.abs(pixel - wanted).max() <= 1


@pytest.mark.parametrize("flags", [(), ("--img-size", "24", "--fit", "crop")])
def test_an_image_that_the_model_sees_smaller_is_drawn_at_its_own_size(folder, flags):
    """The mark of a patch lies where the patch is in the file."""
    flags = flags or ("--img-size", "32", "--fit", "native")
    write_image(folder / "large.png", 610, 900, seed=3)
    given = ["large.png", "--output", "out", "--show", "winners", *flags]
    assert look([FILE, *given]) == 0
    height, width = opened(folder / "out" / "1-winners.png").shape[:2]
    assert width == 900 and height > 610
    view = summary(folder / "out")[0]["view"]
    top, left, height, width = view["box"]
    if "crop" in flags:
        assert (top, left, height, width) == (0, 145, 610, 610) and view["canvas"] == [24, 24]
    else:
        assert (top, left, height, width) == (0, 0, 610, 900) and view["canvas"][1] == 32
    best = summary(folder / "out")[0]["winners"][0]
    scale = height / view["content"][0]
    assert best["box"][0] == pytest.approx(top + best["row"] * 8 * scale, abs=1)
    assert best["box"][1] == pytest.approx(
        left + best["column"] * 8 * width / view["content"][1], abs=1
    )


def test_padding_is_no_evidence(folder):
    flags = ("--img-size", "64", "--fit", "pad", "--output", "out")
    assert look([FILE, "a.png", *flags]) == 0
    found = summary(folder / "out")[0]
    assert found["view"]["content"][1] == 64 and found["view"]["content"][0] < 64
    rows = -(-found["view"]["content"][0] // 8)
    assert all(winner["row"] < rows for winner in found["winners"])
    kept = [key["weight"] for key in found["rows"][0]["highest"] if key["row"] >= rows]
    assert not any(kept)


def test_places_the_top_and_the_class_token_are_queried(folder):
    args = MAX | dict(class_token=True, reg_tokens=1)
    write_weights(folder / "class.safetensors", args=args)
    flags = ("--queries", "9,55", "class", "top", "--blocks", "0", "-1", "--show", "rows")
    assert look(["class.safetensors", "a.png", "--output", "out", *flags, *NATIVE]) == 0
    rows = summary(folder / "out")[0]["rows"]
    assert [row["block"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert [row["query"] for row in rows[:2]] == ["row 1, column 6", "class"]
    assert rows[1]["place"] == 0 and rows[0]["prefix"] > 0
    assert {"1-block-0-class.png", "1-block-1-1-6.png"} <= set(os.listdir(folder / "out"))
    write_weights(folder / "token.safetensors", args=args | dict(global_pool="token"))
    assert look(["token.safetensors", "a.png", "--output", "token", *NATIVE]) == 0
    (found,) = summary(folder / "token")
    assert [row["query"] for row in found["rows"]] == ["class"] and "winners" not in found
    assert "The class token alone is pooled" in (folder / "token" / "index.html").read_text()
    assert "1-winners.png" not in os.listdir(folder / "token")


def test_rows_are_of_a_head_or_of_the_mean_of_all(folder):
    def weight(*flags):
        given = [FILE, "a.png", "--output", "out", "--overwrite", "--show", "rows", *NATIVE]
        assert look([*given, "--queries", "0,0", *flags]) == 0
        return summary(folder / "out")[0]["rows"][0]

    heads = [weight("--head", str(head))["content"] for head in range(3)]
    assert weight()["content"] == pytest.approx(sum(heads) / 3, abs=1e-5)
    assert max(heads) - min(heads) > 1e-4
    place, content = weight("--term", "place"), weight("--term", "content")
    both = weight()
    assert sum(key["weight"] for key in place["highest"]) <= both["place"] + 1e-6
    assert place["highest"] != content["highest"] != both["highest"]


def test_a_class_is_named_or_numbered(folder):
    flags = ("a.png", "--output", "out", "--overwrite", "--show", "winners", *NATIVE)
    for word in ("cedar", "2"):
        assert look([FILE, *flags, "--target", word]) == 0
        (found,) = summary(folder / "out")
        assert found["class"] == "cedar"
        wanted = evidence_by_hand(FILE, "a.png", target=2)
        assert found["margin"] == pytest.approx(wanted.margin, abs=1e-5)


def test_the_same_twice_and_a_folder_is_replaced_only_when_asked(folder, capsys):
    given = [FILE, "a.png", "b.png", "--output", "out", *NATIVE]
    assert look(given) == 0
    first = written(folder / "out")
    capsys.readouterr()
    assert look(given) == 2
    assert_one_error(capsys, "out exists; --overwrite replaces it")
    assert written(folder / "out") == first
    assert look([FILE, "b.png", "--output", "out", "--overwrite", *NATIVE]) == 0
    assert not [name for name in os.listdir(folder / "out") if name.startswith("2-")]
    assert sorted(os.listdir(folder)) == ["a.png", "b.png", FILE, "out"]
    assert look([*given, "--overwrite"]) == 0
    same = ("index.html", "look.json")
    again = {name: each for name, each in written(folder / "out").items() if name not in same}
    assert again == {name: each for name, each in first.items() if name not in same}


def test_what_is_no_folder_of_look_is_never_replaced(folder, capsys):
    (folder / "mine").mkdir()
    (folder / "mine" / "kept.txt").write_text("x")
    for name in ("mine", "a.png"):
        for more in ((), ("--overwrite",)):
            before = written(folder)
            capsys.readouterr()
            assert look([FILE, "a.png", "--output", name, *more]) == 2
            printed = capsys.readouterr()
            assert printed.err.startswith(f"error: {name} ") and printed.err.count("\n") == 1
            assert written(folder) == before


BAD = {
    "no image": ([FILE, "torn.png"], "torn.png: "),
    "text": ([FILE, "a.txt.png"], "a.txt.png: "),
    "one of several": ([FILE, "a.png", "torn.png"], "torn.png: "),
    "nowhere": ([FILE, "no.png"], "no image, folder or list at no.png"),
    "no images": ([FILE], "--images is missing"),
    "nothing": ([], "name what to run"),
    "no checkpoint": (["gone.safetensors", "a.png"], "gone.safetensors"),
    "no head": (["headless.safetensors", "a.png"], "has no classes, so there is no evidence"),
    "of timm by name": (["vit_tiny_patch16_224", "a.png"], "is no model of visionattn"),
    "weights of timm": (
        ["timm.safetensors", "a.png", "--model", "vit_tiny_patch16_224"],
        "is no model of visionattn",
    ),
    "of timm": (["timm.safetensors", "a.png"], "is no model of visionattn"),
    "block": ([FILE, "a.png", "--blocks", "2"], "no block 2; the 2 blocks are 0 to 1"),
    "block from the end": ([FILE, "a.png", "--blocks", "-3"], "there is no block -3"),
    "features block": ([FILE, "a.png", "--features-block", "7"], "there is no block 7"),
    "head": ([FILE, "a.png", "--head", "3"], "no head 3; the 3 heads are 0 to 2"),
    "head below": ([FILE, "a.png", "--head", "-1"], "head must be at least 0, got -1"),
    "query below": ([FILE, "a.png", "--queries", "40,0", *NATIVE], "a.png: query 40,0 is outside"),
    "query right": ([FILE, "a.png", "--queries", "0,56", *NATIVE], "a.png: query 0,56 is outside"),
    "query of the second": (
        [FILE, "a.png", "b.png", "--queries", "30,3", *NATIVE],
        "b.png: query 30,3 is outside of what the model sees of the image, 24 x 24 pixels from 0,0",
    ),
    "query cut off": ([FILE, "a.png", "--queries", "9,2"], "40 x 40 pixels from 0,8 on"),
    "query of words": ([FILE, "a.png", "--queries", "left"], "queries must be places such as"),
    "query of one number": ([FILE, "a.png", "--queries", "5"], "queries must be places such as"),
    "query below zero": ([FILE, "a.png", "--queries=-1,5"], "queries must be places such as"),
    "class token": ([FILE, "a.png", "--queries", "class"], "has no class token to query"),
    "class": ([FILE, "a.png", "--target", "oak"], "no class oak; the classes are ash, birch"),
    "class by number": ([FILE, "a.png", "--target", "4"], "there is no class 4"),
    "show": ([FILE, "a.png", "--show", "all"], "show must be some of winners, gradient"),
    "idle query": (
        [FILE, "a.png", "--show", "winners", "--queries", "top"],
        "queries is for rows of attention, which show leaves out",
    ),
    "idle head": ([FILE, "a.png", "--show", "tables", "--head", "0"], "head is for rows"),
    "idle term": ([FILE, "a.png", "--show", "tables", "--term", "place"], "term is for rows"),
    "twice": ([FILE, "a.png", "--images", "b.png"], "images stand first or behind --images"),
    "no place": (
        ["plain.safetensors", "a.png", "--term", "place"],
        "a.png: block 1 has no share of",
    ),
    "batches": ([FILE, "a.png", "--batch-size", "2"], "unknown option --batch-size"),
    "folder": ([FILE, "a.png", "--output", "no/out"], "no folder "),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(folder, capsys, case):
    (folder / "torn.png").write_bytes((folder / "a.png").read_bytes()[:200])
    (folder / "a.txt.png").write_text("a text")
    argv, said = BAD[case]
    if argv[:1] == ["headless.safetensors"]:
        spec = replace(COLOUR, num_classes=0, class_names=())
        model = timm.create_model("scaleformer_vit_t", num_classes=0, **MAX)
        save_model(folder / argv[0], model, "scaleformer_vit_t", MAX, spec)
    if argv[:1] == ["timm.safetensors"]:
        args = dict(img_size=16, patch_size=8, embed_dim=24, depth=1, num_heads=3)
        model = timm.create_model("vit_tiny_patch16_224", num_classes=4, **args)
        save_model(folder / argv[0], model, "vit_tiny_patch16_224", args, COLOUR)
    if argv[:1] == ["plain.safetensors"]:
        args = {key: value for key, value in MAX.items() if key != "horizon"}
        write_weights(folder / argv[0], args=args | dict(relative="none"))
    before = written(folder)
    output = [] if "--output" in argv else ["--output", "out"]
    assert look([*argv, *output]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1, error
    assert written(folder) == before and not (folder / "out").exists()
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_without_an_output_nothing_runs(folder, capsys):
    assert look([FILE, "a.png"]) == 2
    assert_one_error(capsys, "--output is missing: a folder for the pictures")


def test_a_model_that_comes_with_weights_may_stand_first(folder):
    options = parse_look(["scaleformer_vit_digits", "a.png", "b.png", "--output", "out"])
    assert (options.model, options.pretrained) == ("scaleformer_vit_digits", True)
    assert options.images == ["a.png", "b.png"] and options.checkpoint is None
    options = parse_look(["a.png", "--checkpoint", FILE, "--output", "out"])
    assert (options.checkpoint, options.images) == (FILE, ["a.png"])


def test_a_pixel_of_the_file_lies_in_the_patch_that_shows_it():
    crop = Geometry("crop", (24, 16), None, (8, 8)).view(60, 100)  # its centre, 60 x 40 px
    assert crop.box == Box(0, 30, 60, 40)
    for place, patch in (((0, 30), (0, 0)), ((19, 49), (0, 0)), ((20, 50), (1, 1))):
        assert patch_at(crop, (8, 8), place) == patch
    assert patch_at(crop, (8, 8), (59, 69)) == (2, 1)
    for place in ((0, 29), (0, 70), (60, 30)):
        with pytest.raises(ValueError, match=f"query {place[0]},{place[1]} is outside"):
            patch_at(crop, (8, 8), place)
    whole = Geometry("native", None, None, (8, 8)).view(21, 30)  # the last patches are not full
    assert patch_at(whole, (8, 8), (20, 29)) == (2, 3)


def test_sums_of_patches_are_those_of_their_pixels():
    gradient = torch.arange(12.0).reshape(3, 4) - 5
    found = of_patches(gradient, Grid(2, 2), (2, 2))  # the last row of patches is not full
    assert found.tolist() == [[5 + 4 + 1 + 0, 3 + 2 + 1 + 2], [3 + 4, 5 + 6]]


def test_ranks_give_strength_and_the_scale_tells_the_values():
    values = np.arange(1000.0)
    strength = by_rank(values)
    assert strength[0] == pytest.approx(0, abs=1e-3) and strength[-1] == pytest.approx(1)
    assert strength[899] == pytest.approx(np.log10(10) / np.log10(2000), abs=1e-2)
    assert (np.diff(strength) > 0).all()
    assert len(set(by_rank(np.ones(7)))) == 1
    ticks = dict((text, place) for place, text in ranked(values))
    assert set(ticks) == {"half above 499", "10 % above 899", "1 % above 989", "highest 999"}
    assert ticks["10 % above 899"] == pytest.approx(1 / np.log10(2000))


def test_queries_are_words_and_places():
    assert parse_queries(None) is None
    assert parse_queries(["3,4", "top", "3,4", "class"]) == ((3, 4), "top", "class")
    with pytest.raises(ValueError, match="queries must be 1 to 64, got 65"):
        parse_queries([f"{i},0" for i in range(65)])
    with pytest.raises(ValueError, match="queries must be 1 to 64, got 0"):
        parse_queries([])


def test_values_of_any_range_and_bands_are_drawn(folder):
    """Float values and five bands: of many bands the first three are shown."""
    spec = DataSpec(5, 2, (), (0.4,) * 5, (0.3,) * 5, None, 16, bands=(1, 2, 3, 4, 5))
    spec = replace(spec, value_range=(0.0, 4.0))
    write_weights(folder / "bands.safetensors", spec, args=MAX)
    np.save("bands.npy", np.random.default_rng(3).uniform(0, 4, (40, 48, 5)).astype(np.float32))
    for flags in (NATIVE, ("--img-size", "16", "--fit", "stretch")):
        given = ["bands.safetensors", "bands.npy", "--output", "out", "--overwrite", *flags]
        assert look(given) == 0
        assert summary(folder / "out")[0]["class"] in ("0", "1")


def test_grey_levels_that_are_channels_have_a_gradient_too(folder):
    spec = DataSpec(256, 3, (), (), (), "grey_one_hot", 16)
    write_weights(folder / "levels.safetensors", spec, args=MAX)
    assert look(["levels.safetensors", "a.png", "--output", "out"]) == 0


def test_a_long_strip_and_a_name_without_spaces_are_drawn(folder):
    name = "n" * 120 + ".png"
    write_image(folder / name, 8, 1600, seed=4)
    assert look([FILE, name, "--output", "out", *NATIVE]) == 0
    assert opened(folder / "out" / "1-winners.png").shape[1] == 1600


def test_from_python_the_same_is_found_and_the_model_is_left_as_it_was(folder):
    model = load_model(FILE).train()
    queries = [(9, 55), "top"]
    options = dict(queries=queries, blocks=[0], target="elm", img_size="native")
    found = visionattn.look(
        model,
        ["a.png", "b.png"],
        show=["rows", "gradient"],
        **{**options, "queries": ["top", (9, 20)]},
    )
    assert model.training and all(each.requires_grad for each in model.parameters())
    assert [each.path for each in found] == ["a.png", "b.png"] and found[0].components is None
    pixels = np.asarray(Image.open("a.png"))
    (again,) = visionattn.look(FILE, pixels, device="cpu", **options)
    wanted = evidence_by_hand(FILE, "a.png", target=3)
    for each in (again, found[0]):
        assert each.class_name == "elm"
        torch.testing.assert_close(each.evidence.patches, wanted.patches, rtol=0, atol=1e-5)
        torch.testing.assert_close(each.evidence.gradient, wanted.gradient, rtol=0, atol=1e-5)
        assert each.top == divmod(int(wanted.patches.argmax()), 7)
    assert [row.place for row in again.rows] == [(1, 6), again.top]
    assert again.components.shape == (3, 5, 7) and again.shares.shape == (3,)
    assert again.patch_at(39, 0) == (4, 0) and again.box(4, 6) == Box(32, 48, 8, 8)
    (plain,) = visionattn.look(FILE, pixels, show=["winners"], img_size="native")
    assert plain.rows == [] and plain.evidence.gradient is None
    for options, said in (
        (dict(target="oak"), "no class oak"),
        (dict(blocks=[5]), "no block 5"),
        (dict(show=[]), "show is empty"),
        (dict(queries=["left"]), "queries must be places"),
        (dict(queries=[(99, 0)]), "image 0: query 99,0 is outside"),
        (dict(img_size=20), "is not a whole number of"),
    ):
        with pytest.raises(ValueError, match=said):
            visionattn.look(FILE, pixels, **options)
    with pytest.raises(ValueError, match="torn.png: "):
        (folder / "torn.png").write_bytes(b"no image")
        visionattn.look(FILE, "torn.png")
    with pytest.raises(ValueError, match="is no model of visionattn"):
        vit = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
        visionattn.look(vit, pixels)


def test_a_patch_that_the_image_does_not_fill_ends_with_it(folder):
    """On its file, whole or seen at half its size."""
    write_image(folder / "odd.png", 21, 30, seed=5)
    (found,) = visionattn.look(FILE, "odd.png", show=["winners"], img_size="native")
    assert found.box(2, 3) == Box(16, 24, 5, 6) and found.box(0, 0) == Box(0, 0, 8, 8)
    write_image(folder / "twice.png", 48, 32, seed=6)
    (found,) = visionattn.look(FILE, "twice.png", show=["winners"], img_size=24, fit="native")
    assert tuple(found.grid) == (3, 2) and found.box(2, 1) == Box(32, 16, 16, 16)


def test_a_folder_that_came_meanwhile_is_kept(folder):
    looking = Looking(parse_look([FILE, "b.png", "--output", "out"]))
    (folder / "out").mkdir()
    (folder / "out" / "look.json").write_text("of another")
    with pytest.raises(ValueError, match="out exists"):
        looking.run(print, look_page)
    assert written(folder / "out") == {"look.json": b"of another"}


def test_a_detail_is_of_the_image_and_not_of_the_sentences_below_it():
    sheet = Image.new("RGB", (2000, 900), "white")
    sheet.paste((0, 0, 0), (0, 0, 1900, 500))
    picture = Picture("a", "a", (), sheet, Box(490, 1890, 8, 8), (1900, 500))
    part = cut(picture)
    assert part.size == (640, 500) and part.getextrema() == ((0, 0),) * 3
