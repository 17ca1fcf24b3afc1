"""Train segmentation on GeoTIFFs, and write the predicted mask as a GeoTIFF at the same place.

    python docs/examples/segment_a_geotiff.py path/to/folder

The folder has GeoTIFFs in images/ and masks of the same names in masks/ (docs/segmentation.md).
Without a folder, the script makes scenes from a photograph of a flower; the mask is the petals.
Needs rasterio: pip install 'visionattn[raster]'.
"""

import sys
import tempfile
from pathlib import Path

import rasterio
from PIL import Image
from sklearn.datasets import load_sample_image

import visionattn
from visionattn.data.large import open_sink, open_source


def make_folder() -> Path:
    """Save four scenes of 208 x 320 px with coordinates, and masks with the values 0 and 1."""
    folder, photograph = Path(tempfile.mkdtemp()), load_sample_image("flower.jpg")
    (folder / "images").mkdir()
    (folder / "masks").mkdir()
    for number in range(4):
        top, left = 208 * (number // 2), 320 * (number % 2)
        scene = photograph[top : top + 208, left : left + 320]
        profile = dict(driver="GTiff", height=208, width=320, count=3, dtype="uint8")
        # One pixel is 10 x 10 m, in the coordinates of UTM zone 32.
        place = rasterio.Affine(10, 0, 500_000 + 10 * left, 0, -10, 5_400_000 - 10 * top)
        name = folder / "images" / f"{number}.tif"
        with rasterio.open(name, "w", **profile, crs="EPSG:32632", transform=place) as file:
            file.write(scene.transpose(2, 0, 1))
        petals = (scene[..., 0] > 120) & (scene[..., 1] < 110)
        Image.fromarray(petals.astype("uint8")).save(folder / "masks" / f"{number}.png")
    return folder


# 1. Train on random crops at full resolution; a scene is held out to select the best weights.
demo = len(sys.argv) < 2
folder = make_folder() if demo else Path(sys.argv[1])
options = {"data.root": str(folder), "data.workers": 0, "run": "example_masks", "overwrite": True}
if demo:  # small crops and a short run
    options |= {"data.crop": 64, "data.crops": 24, "epochs": 3, "data.val_fraction": 0.25}
result = visionattn.train("finetune_segmentation", options)
print(f"mean IoU on the held-out images: {result.validation:.2f}")

# 2. Write the mask of a scene. It is read and written in bands, so that it may exceed memory.
model, scene = visionattn.load_model(result.checkpoint), sorted((folder / "images").iterdir())[0]
with open_source(scene) as source, open_sink("mask.tif", source=source) as sink:
    visionattn.forward_tiled(
        model, source, sink, want="masks", prepare=source.prepare(model.data_spec)
    )
with rasterio.open("mask.tif") as mask:
    print(f"mask.tif: {mask.height} x {mask.width} px, {mask.crs}, {mask.bounds}")
