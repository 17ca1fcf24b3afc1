"""Train a classifier on a folder of images, then classify images with it.

    python docs/examples/train_on_a_folder.py path/to/images

The folder has one subfolder per class. Without a folder, two photographs of scikit-learn are cut
into squares: one class shows parts of a temple, the other parts of a flower.
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_sample_images

import visionattn


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


# 1. The data: a folder with one subfolder per class.
demo = len(sys.argv) < 2
folder = make_folder() if demo else Path(sys.argv[1])

# 2. Train. "finetune" is a configuration for your own folder; the dictionary replaces some of its
# values, with the names of the flags of `visionattn train`. A tenth of the images is held out.
options = {"data.root": str(folder), "data.workers": 0, "run": "example", "overwrite": True}
if demo:  # small images and a short run
    options |= {"model.args.patch_size": 8, "batch_size": 8, "epochs": 5}
result = visionattn.train("finetune", options)
print(f"accuracy on the held-out images: {result.validation:.2f}, after {result.seconds:.0f} s")

# 3. Classify. Any list of files, folders, Pillow images or arrays will do.
images = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".png"))[:3]
predictions = visionattn.predict(result.checkpoint, images, top_k=1)
for path, (name,), (probability,) in zip(
    images, predictions.classes, predictions.probabilities.tolist(), strict=True
):
    print(f"{path.relative_to(folder)}: {name} ({probability:.0%})")
