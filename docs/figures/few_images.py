"""Draw what decides the class of a large picture: ``docs/figures/few-images.jpg``.

    python docs/figures/few_images.py classes.safetensors pasted/classes/val/vehicle/129.jpg

Left the picture with its four highest patches, in the middle their surroundings at full size, right
the score of each class: the mean of its highest patches, against background.

Sources: photograph "picosdeeuropa" by Aitzol Berasategi, CC BY 4.0; cut-out from tuxpaint-stamps,
GPL-2, pasted and shrunk.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from visionattn.models.weights import load_model

WIDTH, HEIGHT, SHOWN = 1200, 400, 4
RED, BLUE, GREY = (230, 30, 30), (40, 90, 200), (190, 190, 190)


def scores_of(model: torch.nn.Module, picture: Image.Image) -> torch.Tensor:
    """Return the score of each class for each patch, ``[classes, H, W]``."""
    patch, longest = model.patch_px[0], np.max(model.data_spec.img_size)
    scale = min(1, longest / max(picture.size))
    size = [max(1, round(side * scale / patch)) * patch for side in picture.size]
    small = torch.from_numpy(np.array(picture.resize(size, Image.Resampling.BICUBIC)))
    with torch.inference_mode():
        inputs = model.data_spec.prepare(small.movedim(2, 0)[None])
        return model.head(model.forward_patches(inputs))[0]


def main() -> None:
    """Draw a picture, its highest patches and the scores of the classes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="of visionattn convert --top-patches")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--output", default="docs/figures/few-images.jpg")
    options = parser.parse_args()
    model, picture = load_model(options.checkpoint), Image.open(options.picture).convert("RGB")
    scores = scores_of(model, picture)
    classes = scores.flatten(1).topk(model.top).values.mean(1)
    winner = int(classes.argmax())
    rows, columns = scores.shape[1:]
    side_px = np.array([picture.width / columns, picture.height / rows])
    places = [divmod(int(place), columns) for place in scores[winner].flatten().topk(SHOWN).indices]

    sheet = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(22)
    scale = min(520 / picture.width, HEIGHT / picture.height)
    shown = picture.resize([round(side * scale) for side in picture.size], Image.Resampling.LANCZOS)
    sheet.paste(shown, (0, 0))
    centre = (np.array(places).mean(0)[::-1] + 0.5) * side_px
    corner = (centre - 150).clip(0, np.subtract(picture.size, 300)).round()
    sheet.paste(picture.crop((*corner, *(corner + 300))), (540, 0))
    draw.rectangle((*corner * scale, *(corner + 300) * scale), outline=RED, width=3)
    draw.rectangle((540, 0, 839, 299), outline=RED, width=3)
    for row, column in places:
        start = np.array([column, row]) * side_px - corner + (540, 0)
        draw.rectangle((*start, *(start + side_px)), outline="white", width=2)
    draw.text((540, 308), "its highest patches", "black", font)
    low, high = min(0, float(classes.min())), max(0.1, float(classes.max()))
    zero = 860 - low / (high - low) * 250
    for index, (name, score) in enumerate(zip(model.data_spec.class_names, classes, strict=True)):
        top = 10 + 72 * index
        end = zero + float(score) / (high - low) * 250
        draw.text((860, top), f"{name}  {float(score):+.1f}", "black", font)
        bar = (min(zero, end), top + 30, max(zero, end), top + 52)
        draw.rectangle(bar, fill=BLUE if index == winner else GREY)
    draw.text((860, 308), "score against background", "black", font)
    sheet.save(options.output, quality=85)


if __name__ == "__main__":
    main()
