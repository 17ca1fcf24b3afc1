"""Average precision of the lesions of IDRiD's 27 test pictures: the table of ``docs/lesions.md``.

    python docs/figures/idrid_lesions.py best.safetensors "A. Segmentation" [--tiles 256] [--truth 1424 2144]

``--tiles`` runs the model over overlapping tiles in place of whole pictures; ``--truth`` is the size at which
predictions and ground truth are compared, by default the model's.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml

from visionattn import forward_tiles
from visionattn.data.data_config import DataConfig
from visionattn.data.geometry import Geometry, geometry_of
from visionattn.data.splits import SampleKey, build_splits
from visionattn.models.pixel_classes import average_precisions_of
from visionattn.models.weights import load_model
from visionattn.training.objectives import score_counts

CONFIG = Path(__file__).parents[2] / "configs" / "idrid_lesions.yaml"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("checkpoint")
parser.add_argument("root")
parser.add_argument("--tiles", type=int)
parser.add_argument("--truth", type=int, nargs=2)
parser.add_argument("--cache")
flags = parser.parse_args()
torch.set_num_threads(1)
model = load_model(flags.checkpoint).eval()
spec = model.data_spec
data = yaml.safe_load(CONFIG.read_text())["data"]
more = {"root": flags.root, "cache": flags.cache, "img_size": list(spec.img_size), "augment": "none"}
pictures = build_splits(DataConfig(**data | more), 0).test
seen = geometry_of(spec, (8, 8))
compared = Geometry("stretch", tuple(flags.truth or spec.img_size))
counts, start, seconds = 0, time.perf_counter(), 0.0
for number in range(len(pictures)):
    pixels = pictures[SampleKey(number, 0, seen)].pixels
    truth = torch.from_numpy(pictures[SampleKey(number, 0, compared)].label)[None]
    inputs = spec.prepare(torch.from_numpy(pixels).permute(2, 0, 1)[None])
    began = time.perf_counter()
    with torch.inference_mode():
        if flags.tiles:
            logits = forward_tiles(model, inputs, tile=flags.tiles)
        else:
            logits = model(inputs)
        seconds += time.perf_counter() - began
        logits = F.interpolate(logits, truth.shape[1:], mode="bilinear")
        counts = counts + score_counts(truth, logits)
curves = average_precisions_of(counts.numpy())
print(*(f"{name} {value:.4f}" for name, value in zip(spec.class_names, curves, strict=True)), sep=", ")
print(f"{len(pictures)} pictures, {seconds / len(pictures):.1f} s each")
