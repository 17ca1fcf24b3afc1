"""Images and weights to run, written by the tests, and what a model makes of pixels, by the
shortest code there is.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import tifffile
import timm
import torch
import zarr
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from tests.helpers.tools import read_csv
from visionattn.models.registration import create
from visionattn.models.weights import DataSpec, save_model

ROOT = Path(__file__).parents[2]
MODEL = "scaleformer_vit_t"
ARGS = dict(patch_size=8, embed_dim=24, depth=2, num_heads=3, horizon=1, global_pool="avg")
COLOUR = DataSpec(
    3, 4, ("ash", "birch", "cedar", "elm"), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), None, 16
)
DECODER = dict(embed_dim=16, depth=2, num_heads=2, mlp_ratio=2.0)
GREY = DataSpec(1, 3, (), (0.3,), (0.2,), None, 24)
PAINTER = dict(patch_size=8, embed_dim=16, depth=2, num_heads=2, head_stride=2, horizon=1)
PAINTED = DataSpec(3, 3, (), (0.5,) * 3, (0.25,) * 3, None, None, "native", task="segmentation")


def flags(*more: str, output: str | None = "out") -> list[str]:
    """Options of a tool that runs ``best.safetensors`` on the images of a folder, here and now."""
    given = ["--checkpoint", "best.safetensors", "--images", "images", "--workers", "0"]
    return given + (["--output", output] if output else []) + list(more)


def write_weights(
    path: Path, spec: DataSpec = COLOUR, *, seed: int = 5, name: str = MODEL, args: dict = ARGS
) -> Path:
    """A checkpoint of random weights, large enough for the outputs of different images to
    differ.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = timm.create_model(
            name, num_classes=spec.num_classes, in_chans=spec.in_chans, **args
        )
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
    save_model(path, model, name, args, spec)
    return path


def write_decoder(
    path: Path,
    channels: int = 1,
    size: tuple[int, int] | None = (6, 9),
    fit: str = "crop",
    change: Callable[[nn.Module], object] | None = None,
    **more: object,
) -> Path:
    """A checkpoint of a decoder of random weights, which ``change`` may change; its classes, where
    it is conditioned, are three.
    """
    args = DECODER | more
    names = ("ash", "birch", "cedar") if args.get("conditioned") else ()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = create("pixel_decoder", "generate", len(names), channels, args)
        torch.nn.init.normal_(model.head.weight, std=0.5)
    if change is not None:
        change(model)
    spec = DataSpec(channels, len(names), names, (), (), None, size, fit, task="generate")
    save_model(path, model, "pixel_decoder", args, spec)
    return path


def write_segmenter(path: Path, spec: DataSpec = PAINTED) -> Path:
    """A checkpoint of random weights that gives masks of images of any size."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = create(MODEL, "segmentation", spec.num_classes, spec.in_chans, PAINTER)
        torch.nn.init.normal_(model.head.weight)
    save_model(path, model, MODEL, PAINTER, spec)
    return path


def write_tiff(path: Path, height: int, width: int, seed: int = 1, **how: object) -> np.ndarray:
    """A noisy color image in tiles of 16 x 16 px; returns its pixels, ``[H, W, 3]``."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    tifffile.imwrite(path, pixels, tile=(16, 16), photometric="rgb", **how)
    return pixels


def write_image(path: Path, height: int, width: int, seed: int) -> np.ndarray:
    """A noisy color image; returns its pixels, ``[H, W, 3]``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def write_folder(folder: Path, shapes: list[tuple[int, int]]) -> list[np.ndarray]:
    """Images ``0.png``, ``1.png`` and so on of these heights and widths; returns their pixels."""
    return [
        write_image(folder / f"{i}.png", *shape, seed=100 + i) for i, shape in enumerate(shapes)
    ]


def direct(
    weights: Path, pixels: np.ndarray, spec: DataSpec = COLOUR
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a model makes of one image in whole patches: what enters its head ``[D]``, its last
    tokens as a map ``[D, H, W]``, its logits.
    """
    model = timm.create_model(
        MODEL, num_classes=spec.num_classes, in_chans=spec.in_chans, **ARGS
    ).eval()
    model.load_state_dict(load_file(weights))
    seen = {}
    model.head.register_forward_pre_hook(lambda module, given: seen.update(pooled=given[0][0]))
    model.norm.register_forward_hook(lambda module, given, tokens: seen.update(tokens=tokens[0]))
    scaled = (pixels / 255 - np.array(spec.mean)) / np.array(spec.std)
    with torch.no_grad():
        logits = model(torch.tensor(scaled.transpose(2, 0, 1)[None], dtype=torch.float32))[0]
    rows, columns = pixels.shape[0] // 8, pixels.shape[1] // 8
    last = np.empty((ARGS["embed_dim"], rows, columns), np.float32)
    for row in range(rows):
        for column in range(columns):
            last[:, row, column] = seen["tokens"][1 + row * columns + column]
    return seen["pooled"].numpy(), last, logits.numpy()


def read_index(folder: Path) -> list[dict[str, str]]:
    """The rows of the index of a folder of features."""
    return read_csv(folder / "index.csv")


def read_map(path: str) -> np.ndarray:
    """The array in an ``.npy``, ``.zarr`` or TIFF."""
    if path.endswith(".zarr"):
        return zarr.open_array(path, mode="r")[:]
    return np.load(path) if path.endswith(".npy") else tifffile.imread(path)


def feature_of(folder: Path, row: dict[str, str]) -> np.ndarray:
    """The feature that a row of the index points to."""
    tensor = load_file(folder / row["shard"])[row["key"]]
    return (tensor[int(row["row"])] if row["row"] else tensor).numpy()
