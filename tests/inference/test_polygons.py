"""Probabilities, polygons, COCO objects and boxes in files: what they say of each pixel."""

import json
from dataclasses import replace

import numpy as np
import pytest
import rasterio
import torch
from affine import Affine
from PIL import Image
from rasterio.features import rasterize
from scipy.ndimage import label
from scipy.special import softmax

from tests.helpers.inference_files import (
    ARGS,
    MODEL,
    PAINTED,
    PAINTER,
    flags,
    read_map,
    write_folder,
    write_segmenter,
    write_weights,
)
from tests.helpers.tools import read_csv
from visionattn.command import run
from visionattn.inference.segment import nearest
from visionattn.models.segmentation import IGNORED, classes_of, probabilities_of
from visionattn.models.weights import load_model, save_model

NAMES, COLOURS = ("soil", "roof", "road"), ((0, 0, 0), (200, 30, 20), (90, 90, 95))
FILES, SHAPES = ("0", "1", "deep/land"), [(17, 40), (24, 35)]
PLACE, PIXELS = Affine(0.5, 0, 733601, 0, -0.5, 3725139), Affine.identity()


def write_land(path: str, pixels: np.ndarray) -> None:
    """A raster with a place on the earth."""
    height, width, count = pixels.shape
    profile = dict(driver="GTiff", count=count, height=height, width=width, dtype="uint8")
    with rasterio.open(path, "w", transform=PLACE, crs="EPSG:32616", **profile) as file:
        file.write(pixels.transpose(2, 0, 1))


@pytest.fixture
def scenes(tmp_path, monkeypatch):
    """The current folder, with weights, two pictures and a raster."""
    monkeypatch.chdir(tmp_path)
    write_segmenter("best.safetensors", replace(PAINTED, class_names=NAMES, colours=COLOURS))
    arrays = write_folder(tmp_path / "images", SHAPES)
    (tmp_path / "images" / "deep").mkdir()
    write_land("images/deep/land.tif", arrays[1])
    return tmp_path


def predict(*more: str, output: str = "out") -> int:
    return run("predict", flags("--save", *more, output=output))


def mask_of(name: str, folder: str = "plain") -> np.ndarray:
    return np.asarray(Image.open(f"{folder}/{name}.png"))


def test_probabilities_are_the_softmax_and_name_the_same_classes_as_logits():
    logits = torch.randn(2, 5, 31, 23, generator=torch.Generator().manual_seed(0))
    # Equal in float16, and the later class is the best.
    logits[0, 1] += 9
    logits[0, 3] = logits[0, 1] + 1e-5
    logits[1, 2, 7, 11], logits[1, 4, 8, 12] = float("nan"), float("inf")
    bad = torch.zeros(2, 31, 23, dtype=torch.bool)
    logits[1, 0, 9, 13] = float("-inf")
    bad[1, 7, 11] = bad[1, 8, 12] = bad[1, 9, 13] = True
    found = probabilities_of(logits)
    assert found.dtype == torch.float16 and torch.equal(found.isnan().all(1), bad)
    with np.errstate(invalid="ignore"):
        wanted = softmax(logits.double().numpy(), 1)
    assert np.nanmax(np.abs(found.double().numpy() - wanted)) < 2**-10
    assert ((found.double().sum(1) - 1).abs()[~bad] < 2**-9).all()
    assert torch.equal(found.argmax(1)[~bad], logits.argmax(1)[~bad])
    assert torch.equal(classes_of(found), classes_of(logits))


def test_maps_sum_to_one_and_give_the_same_masks(scenes):
    assert run("predict", flags(output="plain")) == 0
    for suffix in ("npy", "zarr", "tif"):
        assert predict("probabilities", "masks", "--map_format", suffix, output=suffix) == 0
        rows = read_csv(scenes / suffix / "masks.csv")
        files = [f"{suffix}/{name}.{suffix}" for name in FILES]
        assert [row["probabilities"] for row in rows] == files
        for name, file in zip(FILES, files, strict=True):
            maps, mask = read_map(file), mask_of(name)
            assert maps.shape == (3, *mask.shape) and len(np.unique(mask)) == 3
            assert np.abs(maps.astype(float).sum(0) - 1).max() < 2**-9
            assert np.array_equal(maps.argmax(0), mask)
            assert np.array_equal(mask_of(name, suffix), mask)
    with rasterio.open("tif/deep/land.tif") as file:
        assert (file.crs, file.transform) == ("EPSG:32616", PLACE)


def test_polygons_cover_exactly_the_pixels_of_their_classes(scenes):
    assert run("predict", flags(output="plain")) == 0
    assert predict("geojson") == 0
    holes = 0
    for name in FILES:
        mask, place = mask_of(name), PLACE if name == "deep/land" else PIXELS
        file = json.loads((scenes / "out" / f"{name}.geojson").read_text())
        crs = {"type": "name", "properties": {"name": "urn:ogc:def:crs:EPSG::32616"}}
        assert file.get("crs") == (crs if place == PLACE else None)
        drawn = np.full(mask.shape, IGNORED)
        for each in file["features"]:
            about, number = each["properties"], NAMES.index(each["properties"]["class"])
            known = {"name": NAMES[number], "color": list(COLOURS[number])}
            assert (about["objectType"], about["classification"]) == ("annotation", known)
            inside = rasterize([each["geometry"]], mask.shape, transform=place) == 1
            assert (drawn[inside] == IGNORED).all()
            drawn[inside] = number
            holes += len(each["geometry"]["coordinates"]) > 1
        assert np.array_equal(drawn, mask)
        assert len(file["features"]) == sum(label(mask == number)[1] for number in range(3))
    assert holes and not (scenes / "out" / "0.png").exists()


def test_objects_of_coco_cover_exactly_the_pixels_of_the_named_classes(scenes):
    assert run("predict", flags(output="plain")) == 0
    assert predict("coco", "--outline", "road", "roof") == 0
    coco = json.loads((scenes / "out" / "coco.json").read_text())
    assert coco["categories"] == [{"id": 2, "name": "roof"}, {"id": 3, "name": "road"}]
    assert [image["file_name"] for image in coco["images"]] == ["0.png", "1.png", "deep/land.tif"]
    assert [each["id"] for each in coco["annotations"]] == list(
        range(1, len(coco["annotations"]) + 1)
    )
    for image, name in zip(coco["images"], FILES, strict=True):
        mask = mask_of(name)
        assert (image["height"], image["width"]) == mask.shape
        drawn = np.zeros(mask.shape, int)
        for each in coco["annotations"]:
            if each["image_id"] != image["id"]:
                continue
            # Runs go down the columns, and the first has zeros.
            counts, (height, width) = each["segmentation"]["counts"], each["segmentation"]["size"]
            inside = np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(width, height).T
            (rows, columns), (left, top) = np.nonzero(inside), each["bbox"][:2]
            ends = [columns.max() + 1 - left, rows.max() + 1 - top]
            assert each["bbox"] == [columns.min(), rows.min(), *ends]
            assert len(rows) == each["area"] and not drawn[inside].any()
            assert label(inside)[1] == 1
            drawn[inside] = each["category_id"] - 1
        assert np.array_equal(drawn, mask)


@pytest.mark.parametrize(("have", "wanted"), [(5, 13), (10, 7)])
def test_each_pixel_of_the_file_gets_the_nearest_pixel_of_the_model(have, wanted):
    places = (np.arange(wanted) + 0.5) * have // wanted
    assert nearest(have, wanted).tolist() == places.tolist()


@pytest.mark.parametrize("fit", ["pad", "crop", "stretch"])
def test_masks_and_maps_come_back_to_the_size_of_the_file(scenes, fit):
    size = ("--fit", fit, "--img-size", "32")
    assert run("predict", flags(*size, output="plain")) == 0
    assert predict("probabilities", "geojson", *size) == 0
    for name in FILES[:2]:
        maps, mask = read_map(f"out/{name}.npy"), mask_of(name)
        assert np.array_equal(np.isnan(maps).all(0), mask == IGNORED)
        side = min(mask.shape) if fit == "crop" else max(mask.shape)
        top, left = (max(0, (px - side) // 2) for px in mask.shape)
        wanted = np.zeros(mask.shape, bool)
        wanted[top : top + side, left : left + side] = True  # crop: the square in the middle
        assert np.array_equal(mask != IGNORED, wanted)
        assert np.array_equal(maps.argmax(0)[mask != IGNORED], mask[mask != IGNORED])
        features = json.loads((scenes / "out" / f"{name}.geojson").read_text())["features"]
        covered = rasterize([each["geometry"] for each in features], mask.shape)
        assert np.array_equal(covered == 1, mask != IGNORED)


def test_outputs_that_are_not_finite_are_rows_without_files(scenes, capsys):
    model = load_model("best.safetensors")
    model.backbone.blocks[1].mlp.fc2.bias.data[3] = float("nan")
    save_model("best.safetensors", model, MODEL, PAINTER, model.data_spec)
    for kinds in (["masks"], ["probabilities", "geojson", "coco"]):
        assert predict(*kinds) == 2
        said = "none of the 3 images has a mask; first: images/0.png: outputs are not finite\n"
        assert capsys.readouterr().err == f"error: {said}"
        assert not (scenes / "out").exists()


def test_boxes_of_winning_patches_lie_where_the_image_does(scenes):
    write_weights("max.safetensors", args=ARGS | dict(global_pool="max", class_token=False))
    given = ["max.safetensors", "images/0.png", "images/deep/land.tif", "--img-size", "native"]
    assert run("look", [*given, "--show", "boxes", "--output", "out"]) == 0
    images = json.loads((scenes / "out" / "look.json").read_text())["images"]
    for number, (image, place) in enumerate(zip(images, (PIXELS, PLACE), strict=True), 1):
        file = json.loads((scenes / "out" / f"{number}-boxes.geojson").read_text())
        assert ("crs" in file) == (place == PLACE) and image["winners"]
        for each, winner in zip(file["features"], image["winners"], strict=True):
            top, left, height, width = winner["box"]
            corners = {place @ (x, y) for x in (left, left + width) for y in (top, top + height)}
            (ring,) = each["geometry"]["coordinates"]
            assert ring[0] == ring[-1] and {tuple(point) for point in ring} == corners
            assert each["properties"]["added"] == winner["added"]
            assert each["properties"]["classification"]["name"] == image["class"]
