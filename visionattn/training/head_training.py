"""Train only a head on the patch features that ``visionattn features --dense --blocks`` stored.

The inputs of the run are feature maps. Its checkpoint has model and head, and accepts images.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visionattn.data.data_config import DataConfig
from visionattn.data.geometry import geometry_of
from visionattn.data.images import ImageDataset
from visionattn.data.kept_features import BACKBONE, FeatureFolder, KeptDataset, PatchSamples
from visionattn.data.splits import Splits
from visionattn.model_config import ModelConfig
from visionattn.models import patch_heads
from visionattn.models.patches import takes_sizes
from visionattn.models.registration import split_args, with_head
from visionattn.models.segmentation import Segmenter
from visionattn.models.weights import DataSpec, described, load_model, read_metadata, save_model
from visionattn.training.objectives import PixelClasses

IMAGE_OPTIONS = ("fit", "img_size", "img_size_choices", "max_patches", "crop", "augment", "bands")
IMAGE_OPTIONS += ("value_range", "page", "mean", "std", "crop_around")
"""Image options that apply when features are extracted."""


@dataclass(frozen=True)
class HeadFiles:
    """Write checkpoints of model and head, from a run with only the head.

    Args:
        body: the model of the maps.
        images: the specification of its images.
        maps: the specification of the maps in the run, with mean and standard deviation.
    """

    body: patch_heads.PatchClassifier
    images: DataSpec
    maps: DataSpec

    def save(
        self,
        path: Path,
        model: nn.Module,
        name: str,
        args: dict[str, Any],
        spec: DataSpec,
        *,
        notes: dict[str, str],
    ) -> None:
        """Write the model of images: the head's first layer standardizes the maps."""
        with torch.random.fork_rng(devices=[]):
            head, _ = split_args(args)
            whole = with_head(self.body.backbone, spec.task, spec.num_classes, head)
        whole.norms = self.body.norms
        own = {key: x.cpu() for key, x in model.state_dict().items()}
        whole.load_state_dict(whole.state_dict() | own)
        first = whole.head if whole.neck is None else whole.neck[0]
        standardize(first, *(torch.tensor(each).double() for each in (spec.mean, spec.std)))
        seen = ("in_chans", "mean", "std", "img_size", "fit", "max_patches", "bands")
        seen += ("value_range", "range_found", "page")
        of_images = {key: getattr(self.images, key) for key in seen}
        save_model(path, whole, name, args, replace(spec, **of_images), notes=notes)

    def load(self, path: Path) -> nn.Module:
        """Return the head as a model of maps that are not standardized."""
        model = load_model(path)
        raw = dict(mean=(0.0,) * len(self.maps.mean), std=(1.0,) * len(self.maps.std))
        model.data_spec = replace(self.maps, **raw, thresholds=model.data_spec.thresholds)
        model.backbone = patch_heads.KeptMaps(model.width, model.patch_px)
        model.norms = nn.ModuleList([nn.Identity()])
        return model


class PatchClasses(PixelClasses):
    """Learn the classes of sampled patches; evaluations are of the pixels of whole maps."""

    def called(self, model: nn.Module) -> nn.Module:
        """Return the module whose outputs are the logits of patches."""
        self.patch_px = model.patch_px
        return CellLogits(model)

    def targets(self, images: int, size: tuple[int, int]) -> Tensor:
        """Return placeholder classes of the patches of a size in pixels."""
        down, across = self.patch_px
        return super().targets(images, (size[0] // down, size[1] // across))


class CellLogits(nn.Module):
    """A segmentation whose outputs are the logits of patches, ``[B, classes, H, W]``."""

    def __init__(self, model: Segmenter):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Return the logits; arguments as for ``Segmenter``."""
        return self.model.forward_cells(x, sizes)


@torch.no_grad()
def standardize(layer: nn.Conv2d, mean: Tensor, std: Tensor) -> None:
    """Fold the standardization of its input into a linear layer, in place."""
    weight = layer.weight.double() / std.view(1, -1, 1, 1)
    layer.bias.copy_(layer.bias.double() - weight.flatten(1) @ mean)
    layer.weight.copy_(weight)


def prepare_maps(
    data: DataConfig, chosen: ModelConfig, splits: Splits, seed: int
) -> tuple[Splits, nn.Module, ModelConfig, HeadFiles, list[str]]:
    """Open kept features, and build the head for them.

    Args:
        data: the options of the data.
        chosen: the options of the model: arguments of the head.
        splits: the images.
        seed: decides the samples of patches.

    Returns:
        The maps of the images, or samples of their patches for training with masks; the model of
        maps; the options of the whole model; its files; and lines about the features.

    Raises:
        ValueError, FileNotFoundError: an option contradicts the stored features, or they are of
            other images; one line.
    """
    folder, usual = str(data.features), DataConfig()
    kept = FeatureFolder(folder)
    for key in IMAGE_OPTIONS:
        if getattr(data, key) != getattr(usual, key):
            raise ValueError(
                f"data.{key} changes images, but data.features are already extracted; remove it"
            )
    path = kept.folder / BACKBONE
    body = load_model(path)
    name, args, images = described(read_metadata(path), path)
    head, _ = split_args(chosen.args)
    head.pop("head_blocks", None)
    # config.yaml of a run has the arguments of the whole model.
    given = {
        f"model.args.{key}": args.get(key) == x for key, x in chosen.args.items() if key not in head
    }
    given |= {chosen.name: chosen.name in (name, ModelConfig.name)}
    if wrong := [key for key, same in given.items() if not same]:
        raise ValueError(
            f"{wrong[0]} differs from the model of data.features {folder} ({name}, blocks "
            f"{body.taken}); remove it"
        )
    if not isinstance(splits.train, ImageDataset):
        raise ValueError(f"data.features {folder} needs data.name folder; remove it")
    spec = splits.spec
    how = dict(leaves_out=takes_sizes(body))
    geometry = geometry_of(images, body.patch_px)
    parts = {
        split: None if part is None else KeptDataset(part, kept, str(data.root), geometry, **how)
        for split, part in vars(splits).items()
        if split in ("train", "validation", "test")
    }
    mean, std = (tuple(each.tolist()) for each in parts["train"].moments())
    if len(mean) != body.width:
        raise ValueError(
            f"expected feature maps of {body.width} channels in data.features {folder}; extract "
            "them again"
        )
    of_maps = dict(in_chans=body.width, mean=mean, std=std, fit="native", img_size=None)
    spec = replace(spec, **of_maps, max_patches=None, bands=None, value_range=None, page=None)
    maps = patch_heads.KeptMaps(body.width, body.patch_px)
    model = with_head(maps, spec.task, spec.num_classes, head)
    if isinstance(model, Segmenter) and model.cells == (1, 1) and model.encoder is None:
        parts["train"] = PatchSamples(parts["train"], seed)
    built = replace(chosen, name=name, args=args | head)
    lines = [
        f"only the head learns, on features of {name}, blocks {body.taken}, in {folder}; "
        "data.workers is 0"
    ]
    return Splits(**parts, spec=spec), model, built, HeadFiles(body, images, spec), lines
