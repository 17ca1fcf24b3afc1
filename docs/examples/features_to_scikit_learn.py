"""Compute features of images with a pretrained model, and classify them with scikit-learn.

    python docs/examples/features_to_scikit_learn.py path/to/images

The folder has one subfolder per class. Without a folder, the images are handwritten digits of
scikit-learn.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import visionattn


def make_folder() -> Path:
    """Save 20 images of 8 x 8 px of each digit, in one subfolder per digit."""
    folder, digits = Path(tempfile.mkdtemp()), load_digits()
    for digit in range(10):
        (folder / str(digit)).mkdir()
        for number, image in enumerate(digits.images[digits.target == digit][:20]):
            picture = Image.fromarray((image * 255 / 16).astype(np.uint8))
            picture.save(folder / str(digit) / f"{number}.png")
    return folder


# 1. The data: the class of an image is the name of its folder.
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else make_folder()
images = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".png"))
classes = [path.parent.name for path in images]

# 2. One feature vector per image. The model is a name of timm or of this package, a checkpoint, or
# a module. This one comes with the package and was trained on digits; for photographs choose
# another, e.g. "vit_small_patch14_dinov2.lvd142m", whose weights timm downloads.
features = visionattn.extract_features("scaleformer_vit_digits", images).numpy()
print(f"{features.shape[0]} images, {features.shape[1]} numbers per image")

# 3. A linear classifier, with cross-validation: each image is classified by a model that was fitted
# without it.
classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
accuracies = cross_val_score(classifier, features, classes, cv=4)
print(f"accuracy: {accuracies.mean():.3f} (folds: {', '.join(f'{a:.2f}' for a in accuracies)})")
