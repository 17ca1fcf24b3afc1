"""How close the students of ``docs/distillation.md`` are to the ViT-S/14: rows of
``student-quality.csv``.

    python docs/figures/student_quality.py WEIGHTS teacher 518 IMAGES...   # first: it keeps tokens
    python docs/figures/student_quality.py WEIGHTS tiled 1036 IMAGES...    # in tiles of 518 px
    python docs/figures/student_quality.py WEIGHTS best.safetensors 518 IMAGES...
    python docs/figures/student_quality.py WEIGHTS best.safetensors 112 CIFAR/train CIFAR/test

WEIGHTS is a folder with ``vit_small_patch14.safetensors`` and ``saliency_decoder.safetensors``.
Each call adds a row, for one model and size, so that its peak memory is its own. CIFAR is a folder
of class folders: a linear probe of class token and mean patch, 2,000 and 1,000 images.
"""

import resource
import sys
import time
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torchvision.transforms import v2

from visionattn import load_model
from visionattn.cli.provenance import provenance_of
from visionattn.cli.tables import csv_text
from visionattn.models import from_softmax
from visionattn.training.distil.imitation import teacher_features

OUTPUT = Path(__file__).with_name("student-quality.csv")


class SaliencyDecoder(nn.Module):
    """Turn patches ``[B, H*W, 384]`` of a square grid into saliency maps ``[B, 8 H, 8 W]``."""

    def __init__(self):
        super().__init__()
        for i, widths in enumerate(((384, 256), (256, 128), (128, 64)), 1):
            setattr(self, f"upconv{i}", nn.ConvTranspose2d(*widths, 4, 2, 1))
            setattr(self, f"bn{i}", nn.BatchNorm2d(widths[1]))
        self.final_conv = nn.Conv2d(64, 1, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return values in [0, 1]."""
        side = round(tokens.shape[1] ** 0.5)
        x = tokens.mT.unflatten(2, (side, side))
        for i in (1, 2, 3):
            x = getattr(self, f"bn{i}")(getattr(self, f"upconv{i}")(x)).relu()
        return self.final_conv(x).sigmoid()[:, 0]


def opened(folder: Path, name: str) -> nn.Module:
    """Return the teacher as a model of ours, or a student."""
    if name not in ("teacher", "tiled"):
        return load_model(name).eval()
    vit = timm.create_model("vit_small_patch14_dinov2", num_classes=0, dynamic_img_size=True)
    vit.load_state_dict(load_file(folder / "vit_small_patch14.safetensors"))
    return from_softmax(vit.eval(), softmax_blocks=range(12), pos_antialias=False).model


def compared(model: nn.Module, kind: str, images: list[Tensor], folder: Path) -> dict:
    """Return similarity to the teacher's kept tokens, seconds and peak memory."""
    found, seconds = [], []
    for image in images:
        begin = time.process_time()
        found.append(teacher_features(model, image, None, "tiled" if kind == "tiled" else "same"))
        seconds.append(time.process_time() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    kept = folder / f"tokens-{images[0].shape[2]}.npy"
    if kind == "teacher":
        np.save(kept, torch.cat(found).half().numpy())
    decoder = SaliencyDecoder().eval()
    decoder.load_state_dict(load_file(folder / "saliency_decoder.safetensors"), strict=False)
    wanted = torch.from_numpy(np.load(kept)).float()
    pairs = list(zip(found, wanted.split(1), strict=True))
    maps = [[decoder(tokens[:, 1:]) for tokens in pair] for pair in pairs]
    correlations = [np.corrcoef(a.flatten(), b.flatten())[0, 1] for a, b in maps]
    return dict(
        cosine=np.mean([torch.cosine_similarity(a, b, dim=2).mean() for a, b in pairs]),
        correlation=np.mean(correlations),
        mean_absolute_error=np.mean([(a - b).abs().mean() for a, b in maps]),
        seconds=np.median(seconds),
        peak_mib=peak,
    )


def probe(model: nn.Module, folders: list[str], read: v2.Transform) -> dict:
    """Return the accuracy of a linear probe on CIFAR-10."""
    parts = []
    for folder, count in zip(folders, (200, 100), strict=True):
        kinds = sorted(Path(folder).iterdir())
        files = [path for kind in kinds for path in sorted(kind.iterdir())[:count]]
        images = torch.stack([read(Image.open(path).convert("RGB")) for path in files])
        tokens = [model.forward_features(batch) for batch in images.split(50)]
        x = torch.cat([torch.cat([each[:, 0], each[:, 1:].mean(1)], 1) for each in tokens])
        parts.append((x.numpy(), [path.parent.name for path in files]))
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=300))
    return dict(probe=classifier.fit(*parts[0]).score(*parts[1]))


def main() -> None:
    """Append a row."""
    weights, name, size, *paths = sys.argv[1:]
    torch.set_num_threads(1)
    px, model = int(size), opened(Path(weights), name)
    steps = [v2.Resize(px, v2.InterpolationMode.BICUBIC), v2.CenterCrop(px), v2.ToImage()]
    steps += [v2.ToDtype(torch.float32, scale=True)]
    steps += [v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    read = v2.Compose(steps)
    row = dict.fromkeys(
        ("cosine", "correlation", "mean_absolute_error", "seconds", "peak_mib", "probe")
    )
    with torch.inference_mode():
        if Path(paths[0]).is_dir():
            row |= probe(model, paths, read)
        else:
            images = [read(Image.open(path).convert("RGB"))[None] for path in paths]
            row |= compared(model, name, images, Path(weights))
    kinds = [block.attn.attention for block in model.blocks]
    row = dict(model=name, softmax_blocks=kinds.count("softmax"), size=px, images=len(paths)) | row
    text = csv_text([row], provenance_of("cpu", [Path(__file__).name, name, size], threads=1))
    header, line = text.splitlines()
    with OUTPUT.open("a") as file:
        file.write(f"{line}\n" if OUTPUT.stat().st_size else text)
    print(header, line, sep="\n")


if __name__ == "__main__":
    main()
