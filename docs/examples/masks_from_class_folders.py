"""Turn class folders into masks of the objects that decide the class: patches that resemble images
of their own class more than images of other classes.

    python docs/examples/masks_from_class_folders.py path/to/features path/to/masks

``path/to/features`` comes from ``visionattn features --dense --blocks 5 --images path/to/images``,
with one subfolder per class in ``path/to/images``, or in its ``train`` and ``val``. The masks are
for ``visionattn train --data.task segmentation --data.features path/to/features``.
"""

import random
import sys
from pathlib import Path

import torch
from PIL import Image
from torch.nn.functional import avg_pool2d, normalize

from visionattn.data.kept_features import FeatureFolder

CHANNELS = 64  # principal components in which patches are compared
COMPARED = 40  # images of each class that an image is compared with
NEAREST = 5  # images of them whose mean similarity counts
PATCHES = 8  # patches of the object in each mask
UNSURE = 0.05  # share of the other patches, with the highest scores, that are ignored

# 1. The maps of features [D, H, W] of all readable images except "test".
kept, output = FeatureFolder(sys.argv[1]), Path(sys.argv[2])
read = [row for row in kept.rows if row["status"] == "ok"]
rows = [row for row in read if Path(row["path"]).parent.parent.name != "test"]
files = [Path(row["path"]) for row in rows]
classes = [file.parent.name for file in files]
names = sorted(set(classes))
if len(names) < 2:
    sys.exit(f"expected features of readable images in two or more class folders, got {names}")
maps = [kept.read(row).float() for row in rows]

# 2. Each patch as a unit vector of whitened principal components.
sample = torch.cat([each.flatten(1).T[::7] for each in maps]).double()
variances, vectors = torch.linalg.eigh(sample.T.cov())
scale = variances[-CHANNELS:].clamp(min=0).sqrt() + 1e-3 * variances[-1].sqrt()
components, mean = (vectors[:, -CHANNELS:] / scale).float(), sample.mean(0).float()
patches = [normalize((x.flatten(1).T - mean) @ components, dim=1).bfloat16() for x in maps]

# 3. The images to compare with, and a quarter of their patches.
draw, bank = random.Random(0), []
for name in names:
    own = [number for number, label in enumerate(classes) if label == name]
    bank += draw.sample(own, min(COMPARED, len(own)))

for number, file in enumerate(files):
    # 4. Similarity of each patch to its own class, minus similarity to the other classes.
    similar = {True: [], False: []}
    for other in bank:
        if other != number:
            nearest = (patches[number] @ patches[other][::4].T).float().amax(1)
            similar[classes[other] == classes[number]].append(nearest)
    own, others = (torch.stack(each).sort(0).values[-NEAREST:].mean(0) for each in similar.values())
    scores = (own - others).view(1, *maps[number].shape[1:])
    scores = avg_pool2d(scores, 3, 1, 1, count_include_pad=False)[0]

    # 5. The mask: the best patches around the best one; 255, ignored, for other high scores.
    mask = torch.zeros(scores.shape, dtype=torch.uint8)
    mask.view(-1)[scores.flatten().topk(int(UNSURE * scores.numel())).indices] = 255
    row, column = divmod(int(scores.argmax()), scores.shape[1])
    around = slice(max(0, row - 2), row + 3), slice(max(0, column - 2), column + 3)
    best = scores[around].flatten().sort(descending=True).values[:PATCHES]
    mask[around][scores[around] >= best[-1]] = 1 + names.index(classes[number])

    # 6. The files: a link to the image, and its mask.
    split = file.parent.parent.name if file.parent.parent.name in ("train", "val") else ""
    for kind in ("images", "masks"):
        (output / kind / split).mkdir(parents=True, exist_ok=True)
    name = f"{classes[number]}_{file.stem}"
    (output / "images" / split / f"{name}{file.suffix}").symlink_to(file.resolve())
    size = int(rows[number]["width"]), int(rows[number]["height"])
    large = Image.fromarray(mask.numpy()).resize(size, Image.Resampling.NEAREST)
    large.save(output / "masks" / split / f"{name}.png")
(output / "classes.yaml").write_text(f"classes: [{', '.join(['background', *names])}]\n")
print(f"{len(files)} masks of {len(names)} classes in {output}")
