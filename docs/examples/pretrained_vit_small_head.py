"""Freeze a pretrained ViT of timm, and fit a small classifier on the features of its patches.

    python docs/examples/pretrained_vit_small_head.py path/to/images

The folder has one subfolder per class; timm downloads the weights at the first run. Without a
folder, a small ViT with random weights runs on squares of two photographs: only to see it work.
"""

import sys
import tempfile
from pathlib import Path

import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import visionattn

MODEL = "vit_small_patch14_dinov2.lvd142m"


def make_folder() -> Path:
    """Save 40 squares of 80 px of each photograph, in one subfolder per photograph."""
    folder = Path(tempfile.mkdtemp())
    for name, photograph in zip(("temple", "flower"), load_sample_images().images, strict=True):
        (folder / name).mkdir()
        for number in range(40):
            top, left = 80 * (number // 8), 80 * (number % 8)
            square = photograph[top : top + 80, left : left + 80]
            Image.fromarray(square).save(folder / name / f"{number}.png")
    return folder


# 1. The images, and a ViT that accepts any image size.
demo = len(sys.argv) < 2
folder = make_folder() if demo else Path(sys.argv[1])
images = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".png"))
classes = [path.parent.name for path in images]
name = "vit_tiny_patch16_224" if demo else MODEL
vit = timm.create_model(name, pretrained=not demo, num_classes=0, dynamic_img_size=True)

# 2. A map of patch features per image, [D, H, W]. The mean describes the whole image; the maximum
# over patches keeps small objects, which the mean would blur.
maps = visionattn.extract_features(vit, images, dense=True, img_size=80 if demo else 448)
features = torch.stack([torch.cat([each.mean((1, 2)), each.amax((1, 2))]) for each in maps])
print(f"{len(features)} images, {features.shape[1]} numbers per image")

# 3. The head: logistic regression, tested on a quarter of the images.
parts = train_test_split(
    features.numpy(), classes, test_size=0.25, stratify=classes, random_state=0
)
head = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))
head.fit(parts[0], parts[2])
print(f"accuracy on {len(parts[3])} test images: {head.score(parts[1], parts[3]):.3f}")
