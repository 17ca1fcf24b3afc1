"""Paste small cut-outs into real photographs: the pictures of ``docs/few-images.md``.

    apt-get download lomiri-wallpapers-16.04 lomiri-wallpapers-20.04 mate-backgrounds \\
        plasma-workspace-wallpapers tuxpaint-stamps-default
    for package in *.deb; do dpkg -x $package debian; done
    python docs/figures/pasted_objects.py debian/usr/share pasted      # one minute

``pasted/classes/train/coin/007.jpg`` is a link to ``pasted/objects/images/train/007.jpg``, whose
mask is ``pasted/objects/masks/train/007.png``. The three sets show different photographs and the
same 24 objects.
"""

import argparse
import os
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

PHOTOGRAPHS = """
    Bridge_by Wine_by aitzgorri_by free_by greentock_by life_by picosdeeuropa_by seeding_by
    sunset_by Aqua Blinds Garden RainDrops Storm TwoWings Wood YellowFlower BytheWater ColdRipple
    ColorfulCups DarkestHour FallenLeaf Grey Kite OneStandsOut Path summer_1am
"""
"""The beginnings of their names; none shows an animal, a coin, a fruit or a vehicle."""
OBJECTS = {
    "animal": """animals/mammals/equines/zebra animals/mammals/cats/tiger_sumatran
        animals/mammals/bears/european-bear animals/mammals/rabbit_little animals/birds/penguin
        animals/birds/pigeon""",
    "coin": """symbols/money/canadian/coins/001penny symbols/money/canadian/coins/100loonie
        symbols/money/euro/coins/005 symbols/money/euro/coins/100
        symbols/money/us/coins/025quarter symbols/money/japanese/yen050""",
    "fruit": """food/fruit/Cherry_Stella food/fruit/Strawberry2 food/fruit/avocado
        food/fruit/kiwi food/fruit/lemon food/fruit/orange_seville""",
    "vehicle": """vehicles/auto/beetle vehicles/auto/truck vehicles/auto/sportscar2
        vehicles/emergency/firetruck vehicles/garbagetruck
        vehicles/masstransit/green_korean_bus""",
}
SETS = {"train": (128, 18), "val": (32, 4), "test": (40, 5)}
"""Pictures and photographs of each set."""


def find_photographs(share: Path) -> list[tuple[str, Path]]:
    """Return the beginning of its name and the file of each photograph."""
    files = [*share.glob("backgrounds/**/*.jpg"), *share.glob("wallpapers/*/contents/images/*.jpg")]
    named = {
        file.parts[-4] if "contents" in file.parts else file.stem: file
        for file in files
        if not file.is_symlink()
    }
    return [
        (start, next(named[name] for name in sorted(named) if name.startswith(start)))
        for start in PHOTOGRAPHS.split()
    ]


def cut(photograph: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Return a random part of the photograph's shape, its longest side 1,920 to 3,000 px."""
    size = np.array(photograph.size)
    longest = size.max()
    part = (size * rng.uniform(min(2000, longest), min(3000, longest)) / longest).round()
    corner = rng.integers(size - part + 1)
    return photograph.crop((*corner, *(corner + part)))


def vary(cutout: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Return the cut-out at 96 to 192 px, turned by at most 20 degrees, brighter or darker."""
    turned = cutout.rotate(rng.uniform(-20, 20), Image.Resampling.BICUBIC, expand=True)
    turned = turned.crop(turned.getchannel("A").getbbox())
    scale = rng.uniform(96, 192) / max(turned.size)
    small = turned.resize([round(side * scale) for side in turned.size], Image.Resampling.LANCZOS)
    bright = ImageEnhance.Brightness(small.convert("RGB")).enhance(rng.uniform(0.8, 1.2))
    bright.putalpha(small.getchannel("A"))
    return bright


def main() -> None:
    """Write the pictures in class folders, and with masks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("share", type=Path, help="usr/share of the unpacked packages")
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    photographs = find_photographs(options.share)
    rng.shuffle(photographs)
    number = 0
    for name, (count, shown) in SETS.items():
        parts = [photographs.pop() for _ in range(shown)]
        stamps = {kind: names.split() for kind, names in OBJECTS.items()}
        for index, kind in enumerate(rng.permutation(np.resize(list(OBJECTS), count))):
            picture = cut(Image.open(parts[index % shown][1]).convert("RGB"), rng)
            stamps[kind].append(stamps[kind].pop(0))
            stamp = options.share / f"tuxpaint/stamps/{stamps[kind][-1]}.png"
            cutout = vary(Image.open(stamp).convert("RGBA"), rng)
            place = tuple(rng.integers(np.subtract(picture.size, cutout.size) + 1).tolist())
            picture.paste(cutout, place, cutout)
            mask = Image.new("L", picture.size)
            inside = cutout.getchannel("A").point(lambda alpha: 255 * (alpha > 127))
            mask.paste(1 + list(OBJECTS).index(kind), place, inside)
            labelled = options.output / f"classes/{name}/{kind}/{number:03}.jpg"
            image = options.output / f"objects/images/{name}/{number:03}.jpg"
            ground_truth = options.output / f"objects/masks/{name}/{number:03}.png"
            for file in (labelled, image, ground_truth):
                file.parent.mkdir(parents=True, exist_ok=True)
            picture.save(image, quality=92)
            labelled.symlink_to(os.path.relpath(image, labelled.parent))
            mask.save(ground_truth)
            number += 1
        print(name, count, "pictures of", *sorted(start for start, _ in parts))
    names = ", ".join(["background", *OBJECTS])
    (options.output / "objects/classes.yaml").write_text(f"classes: [{names}]\n")


if __name__ == "__main__":
    main()
