"""Cut pictures of IDRiD into tiles with a mask file per lesion, the images of ``docs/lesions.md``.

    python docs/figures/idrid_tiles.py "A. Segmentation" tiles --size 2128 1428 --grid 4 3

``tiles/images/{train,val,test}/IDRiD_01_00.jpg`` has the masks ``tiles/{EX,HE,SE,MA}/train/
IDRiD_01_00.tif``. Every eleventh training picture goes to ``val``. Sides of tiles are multiples of
14 px, the patch of the pretrained ViT.
"""

import argparse
from pathlib import Path

from PIL import Image

LESIONS = {
    "MA": "1. Microaneurysms",
    "HE": "2. Haemorrhages",
    "EX": "3. Hard Exudates",
    "SE": "4. Soft Exudates",
}
FOLDERS = {"a. Training Set": "train", "b. Testing Set": "test"}


def main() -> None:
    """Write the tiles of all pictures and masks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, help="the folder 'A. Segmentation'")
    parser.add_argument("output", type=Path)
    parser.add_argument("--size", type=int, nargs=2, default=(2128, 1428), help="width, height")
    parser.add_argument("--grid", type=int, nargs=2, default=(4, 3), help="columns, rows")
    options = parser.parse_args()
    size, (columns, rows) = tuple(options.size), options.grid
    width, height = size[0] // columns, size[1] // rows
    for folder, split in FOLDERS.items():
        pictures = sorted((options.root / "1. Original Images" / folder).glob("*.jpg"))
        for number, file in enumerate(pictures):
            layers = {"images": Image.open(file).resize(size, Image.Resampling.BOX)}
            for short, lesion in LESIONS.items():
                truth = options.root / "2. All Segmentation Groundtruths" / folder / lesion
                if (mask := truth / f"{file.stem}_{short}.tif").exists():
                    lesions = Image.open(mask).convert("L").point(lambda value: 255 * (value > 0))
                    layers[short] = lesions.resize(size, Image.Resampling.NEAREST).convert("1")
            held_out = split == "train" and number % 11 == 10
            for short, layer in layers.items():
                place = options.output / short / ("val" if held_out else split)
                place.mkdir(parents=True, exist_ok=True)
                for row in range(rows):
                    for column in range(columns):
                        left, top = width * column, height * row
                        tile = layer.crop((left, top, left + width, top + height))
                        name = place / f"{file.stem}_{row}{column}"
                        if short == "images":
                            tile.save(name.with_suffix(".jpg"), quality=95)
                        else:
                            tile.save(name.with_suffix(".tif"))
        print(split, len(pictures), "pictures")


if __name__ == "__main__":
    main()
