"""Train a head on as many object patches as a quarter of the background's: ``few-images.csv``.

    python docs/figures/balanced_patches.py pasted features --seed 0     # 20 seconds

``features`` is the output of ``visionattn features --dense --blocks 5`` for
``pasted/objects/images``. A patch is an object's where its mask covers more than half of it, and
takes no part in training where it covers 10 to 50 %.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CLASSES, HIDDEN, STEPS, LR, TOP = 4, 128, 800, 3e-3, 3


def read(pictures: Path, features: Path, part: str) -> list[tuple[Tensor, Tensor, int]]:
    """Return the features ``[n, D]`` and classes ``[n]`` of patches, and the class, per picture."""
    read_pictures = []
    for row in csv.DictReader((features / "index.csv").open()):
        path = Path(row["path"])
        if path.parent.name != part:
            continue
        with safe_open(features / row["shard"], "pt") as file:
            maps = file.get_tensor(row["key"]).float()
        mask = np.array(Image.open(pictures / f"objects/masks/{part}/{path.stem}.png"))
        kind, size = int(mask.max()), maps.shape[:0:-1]
        object_px = Image.fromarray((mask > 0).astype(np.float32))
        share = torch.from_numpy(np.array(object_px.resize(size, Image.Resampling.BOX)))
        classes = torch.where(share > 0.5, kind, torch.where(share > 0.1, -1, 0)).flatten()
        read_pictures.append((maps.flatten(1).mT.contiguous(), classes, kind))
    return read_pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pictures", type=Path)
    parser.add_argument("features", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    parts = {p: read(options.pictures, options.features, p) for p in ("train", "val", "test")}
    x = torch.cat([x for x, _, _ in parts["train"]])
    labels = torch.cat([labels for _, labels, _ in parts["train"]])
    mean, deviation = x.mean(0), x.std(0)
    objects, ground = (labels > 0).nonzero()[:, 0], (labels == 0).nonzero()[:, 0]
    hidden = nn.Linear(x.shape[1], HIDDEN)
    head = nn.Sequential(hidden, nn.GELU(), nn.Dropout(0.5), nn.Linear(HIDDEN, 1 + CLASSES))
    optimizer = torch.optim.AdamW(head.parameters(), lr=LR, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, STEPS)
    for _ in range(STEPS):
        chosen = torch.cat(
            [
                objects[torch.randint(len(objects), (256,))],
                ground[torch.randint(len(ground), (1024,))],
            ]
        )
        loss = cross_entropy(head((x[chosen] - mean) / deviation), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    head.eval()
    for name in ("val", "test"):
        right = 0
        for each, _, kind in parts[name]:
            with torch.no_grad():
                outputs = head((each - mean) / deviation)
            scores = (outputs[:, 1:] - outputs[:, :1]).topk(TOP, 0).values.mean(0)
            right += int(scores.argmax()) + 1 == kind
        print(f"{name} {100 * right / len(parts[name]):.1f} %")


if __name__ == "__main__":
    main()
