"""Open a model for images of any size, from a timm name, from weights of ours, or from both.

This module decides where weights come from and which image sizes a model takes. Image files are
handled elsewhere.
"""

import json
import math
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import PretrainedCfg
from torch import Tensor, nn

from visionattn.cli.files import first_line
from visionattn.cli.untrusted import brief
from visionattn.data.geometry import Geometry, Size, check_geometry, pixels, sides
from visionattn.inference.inference_options import (
    NATIVE,
    InferenceOptions,
    OpenOptions,
    in_tiles,
)
from visionattn.models.building import (
    ModelConfig,
    build_model,
    check_geometries,
    fixed_size,
    patch_size,
)
from visionattn.models.devices import pick_device, precision_taken
from visionattn.models.patch_heads import PatchClassifier, PatchModel
from visionattn.models.patches import takes_sizes
from visionattn.models.registration import check_reads, create, split_args
from visionattn.models.weights import (
    FORMAT,
    UNBUILDABLE,
    DataSpec,
    described,
    digest_of_weights,
    existing,
    is_pickle,
    load_model,
    read_metadata,
    read_state_dict,
)

ANY_SIZE = ({"dynamic_img_size": True}, {"strict_img_size": False})
"""Arguments with which timm models accept images of any size: for models with absolute position,
and for models with windows.
"""
READ_BY = ("in_chans", "encoding", "mean", "std", "bands", "value_range", "page")
"""Fields of a ``DataSpec`` that determine the pixel values of an image at its size."""


@dataclass(frozen=True)
class Opened:
    """A model in eval mode, and the description of its images."""

    model: nn.Module
    name: str
    """Its timm name."""
    args: dict[str, Any]
    """Arguments from its file or the options that build it, without classes and channels."""
    spec: DataSpec
    """Specification of its images and outputs."""
    geometry: Geometry
    """Preprocessing of images of any size."""
    device: torch.device
    notes: tuple[str, ...]
    """Source of its weights, as readable lines."""
    body_alone: bool = False
    """Whether it is the body of a model with a head on patches, which has feature maps but no
    vector per image.
    """

    def check_features(self, *, dense: bool) -> None:
        """Raise ValueError if there are no feature maps (``dense``), or no features of a whole
        image.
        """
        if self.body_alone and not dense:
            raise ValueError(
                f"model {self.name} has a head on patches and no feature vector of an image; pass "
                "dense"
            )
        method = "forward_intermediates" if dense else "forward_head"
        if not hasattr(self.model, method):
            raise ValueError(f"{self.name} has no such features, because it has no {method}")

    def identity(self) -> dict[str, Any]:
        """Return everything that determines the model's outputs, as JSON types.

        This is the name, arguments, a digest of the weights, how images are read and preprocessed,
        and the kind of device.
        """
        spec, seen = asdict(self.spec), self.geometry
        return {
            "model": self.name,
            "args": json.dumps(self.args, sort_keys=True),
            "weights": digest_of_weights(self.model),
            "images_as": json.dumps([spec[key] for key in READ_BY]),
            "img_size": pixels(seen.img_size) if seen.img_size else NATIVE,
            "fit": seen.fit,
            "max_patches": seen.max_patches,
            "device": self.device.type,
        }


def open_model(options: OpenOptions, *, classifies: bool) -> Opened:
    """Build the model named by the options on its device.

    Args:
        options: checked by ``check``.
        classifies: whether its outputs are used, so that random weights are refused.

    Raises:
        ValueError, FileNotFoundError: model, weights, size or device are wrong or incompatible; one
            line.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    device = pick_device(options.device)
    # One of our files states its model; other weights need --model.
    metadata = description(options.checkpoint) if options.checkpoint else None
    if metadata:
        if options.model:
            raise ValueError(
                f"{options.checkpoint} states its model, {brief(metadata.get('model'))}; remove "
                "--model"
            )
        _check_seed(options)
        model = load_model(options.checkpoint)
        check_reads(model)
        name, args, _ = described(metadata, options.checkpoint)
        said = json.loads(metadata["args"])
        spec, notes = model.data_spec, [f"{name} of {options.checkpoint}"]
    else:
        if not (options.checkpoint or options.pretrained) and classifies:
            raise ValueError("predictions need weights; pass --checkpoint or --pretrained")
        model, args, spec, notes = _by_name(options, classifies)
        name, said = options.model, args
    model, spec, body_alone = _body_of(model, spec, classifies)
    if body_alone:
        args = split_args(args)[1]
        args |= {"head_blocks": model.taken} if isinstance(model, PatchClassifier) else {}
    spec = _with_files(spec, options)
    geometry = _geometry(options, spec, patch_size(model))
    model = _free_size(model, name, args, spec, None if in_tiles(options) else geometry.canvas)
    notes[0] += f"; preprocessing: {geometry.describe()}"
    if geometry.fit == "pad" and not takes_sizes(model):
        notes[0] += f"; padding is black for {name}"
    model = model.to(device).eval()
    return _opened(options, model, name, said, spec, geometry, device, tuple(notes), body_alone)


def options_naming(model: str | Path) -> dict[str, Any]:
    """Return the options for a checkpoint, or for a timm name with its pretrained weights.

    Raises:
        ValueError, FileNotFoundError: there is no such checkpoint or name, or the checkpoint does
            not state its model; one line.
    """
    name = os.fspath(model)
    if os.path.isfile(name) or (os.path.isdir(name) and not timm.is_model(name)):
        if description(name) is None:
            raise ValueError(
                f"{name} does not state the model of its weights; build the model, load them and "
                "pass the module"
            )
        return {"checkpoint": name}
    if not timm.is_model(name):
        raise ValueError(f"expected an existing checkpoint or a timm model, got {name}")
    return {"model": name, "pretrained": True}


def open_module(model: nn.Module, options: OpenOptions, *, classifies: bool) -> Opened:
    """Open a given module unchanged on its device; of a segmentation model only the body, unless
    ``classifies``.

    Its ``data_spec``, set by ``load_model``, specifies its images; otherwise timm's
    ``pretrained_cfg`` does.

    Raises:
        ValueError: its images are not specified, or it does not accept this size; one line.
    """
    check_reads(model)
    name = type(model).__name__
    spec = getattr(model, "data_spec", None)
    if spec is None:
        cfg = getattr(model, "pretrained_cfg", None)
        if cfg is None:
            raise ValueError(
                f"the preprocessing of {name} is unknown; set its data_spec to a "
                "visionattn.DataSpec"
            )
        known = {field.name for field in fields(PretrainedCfg)}
        kept = cfg if isinstance(cfg, dict) else asdict(cfg)
        kept = PretrainedCfg(**{key: value for key, value in kept.items() if key in known})
        spec = _spec_of(kept, model.state_dict())
        spec = replace(spec, num_classes=getattr(model, "num_classes", spec.num_classes))
    model, spec, body_alone = _body_of(model, spec, classifies)
    spec, fixed = _with_files(spec, options), fixed_size(model)
    if fixed is not None and spec.fit != NATIVE:
        spec = replace(spec, img_size=fixed)
    geometry = _geometry(options, spec, patch_size(model))
    if fixed not in (None, geometry.canvas):
        raise ValueError(
            f"{name} accepts only images of {fixed[0]} x {fixed[1]} pixels; build it with "
            "dynamic_img_size=True"
        )
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    return _opened(options, model, name, {}, spec, geometry, device, (), body_alone)


def _opened(options: OpenOptions, model: nn.Module, *found: Any) -> Opened:
    """Return an opened model, and replace ``amp auto`` in the options by the precision of its
    device, so that results name it.
    """
    opened = Opened(model, *found)
    check_geometries(model, [opened.geometry])
    if isinstance(options, InferenceOptions):
        options.amp = precision_taken(options.amp, opened.device)
    return opened


def _body_of(
    model: nn.Module, spec: DataSpec, classifies: bool
) -> tuple[nn.Module, DataSpec, bool]:
    """Return the body of a model with a head on patches whose outputs are not used, its
    specification, and whether it is one. The body of a classifier gives the maps of its blocks.
    """
    if classifies or not isinstance(model, PatchModel):
        return model, spec, False
    body = model.backbone
    if isinstance(model, PatchClassifier):
        body = PatchClassifier(body, 0, head_blocks=model.taken)
        body.norms = model.norms
    return body, replace(spec, task="classification", num_classes=0), True


def _with_files(spec: DataSpec, options: OpenOptions) -> DataSpec:
    """Return a model's specification with the reading options applied.

    Raises:
        ValueError: the number of bands differs from the model's channels; one line.
    """
    if options.bands is not None:
        if len(options.bands) != spec.in_chans:
            raise ValueError(
                f"expected {spec.in_chans} bands, one per channel of the model, got "
                f"{len(options.bands)}"
            )
        spec = replace(spec, bands=tuple(options.bands))
    if options.value_range is not None:
        spec = replace(spec, value_range=tuple(options.value_range), range_found=False)
    return spec if options.page is None else replace(spec, page=options.page)


def _geometry(options: OpenOptions, spec: DataSpec, patch_px: Size) -> Geometry:
    """Return the preprocessing: as in training unless options differ; for tiles, images at their
    own sizes.
    """
    asked = options.img_size or options.fit or options.max_patches or getattr(options, "data", None)
    if options.img_size == NATIVE or (in_tiles(options) and not asked):
        return Geometry("native", None, None, patch_px)
    fit, max_patches, img_size = options.fit or spec.fit, options.max_patches, options.img_size
    if max_patches is None and img_size is None and fit == "native":
        max_patches = spec.max_patches
    if max_patches is None and img_size is None:
        img_size = spec.img_size
    check_geometry(fit, img_size, max_patches)
    return Geometry(fit, sides(img_size), max_patches, patch_px)


def description(path: str) -> dict[str, str] | None:
    """Return the metadata of one of our files; None for weights of other projects.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a complete file of weights.
    """
    try:
        metadata = read_metadata(path)
    except ValueError:
        if is_pickle(existing(path)):  # from torch.save, without metadata
            return None
        raise
    return metadata if metadata.get("format") == FORMAT else None


def of_no_model(path: str | None) -> ValueError:
    """Return the error for weights without a model description, if no option names the model."""
    return ValueError(
        f"{path} does not state its model; pass --model, or use the best.safetensors of a run"
    )


def _free_size(
    model: nn.Module, name: str, args: dict[str, Any], spec: DataSpec, img_size: Size | None
) -> nn.Module:
    """Make a model that was built for one image size accept another, or any."""
    fixed = fixed_size(model)
    if fixed is None or fixed == img_size:
        return model
    reason = ""
    try:
        if img_size is not None and hasattr(model, "set_input_size"):
            model.set_input_size(img_size=img_size)
            return model
    except UNBUILDABLE as error:
        reason = f": {first_line(error)}"
    for option in ANY_SIZE:
        try:
            free = create(name, spec.task, spec.num_classes, spec.in_chans, args | option)
        except TypeError:  # it has no such option
            continue
        free.load_state_dict(model.state_dict())
        free.data_spec = spec
        return free
    raise ValueError(f"{name} accepts only images of {fixed[0]} x {fixed[1]} pixels{reason}")


def _by_name(
    options: OpenOptions, classifies: bool
) -> tuple[nn.Module, dict[str, Any], DataSpec, list[str]]:
    """Build a model by name, with weights from a file, from timm, or at random."""
    if not options.model:
        raise of_no_model(options.checkpoint)
    name, args = options.model, dict(options.args)
    cfg = (timm.get_pretrained_cfg(name) if timm.is_model(name) else None) or PretrainedCfg()
    given = read_state_dict(options.checkpoint) if options.checkpoint else {}
    spec = _spec_of(cfg, given)
    # Built for the requested size, so that an absolute position is resampled once, from the file's
    # size.
    given = options.img_size if options.img_size not in (None, NATIVE) else spec.img_size
    built_for = replace(spec, img_size=sides(given))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model, args = build_model(
            ModelConfig(name, args | ({"pretrained": True} if options.pretrained else {})),
            built_for,
        )
    if options.pretrained:
        spec = getattr(model, "data_spec", spec)  # from our weights, which hold more
        return model, args, spec, [f"{name}, pretrained weights"]
    if not options.checkpoint:
        note = f"{name} with random weights (seed {options.seed}), because there is no --checkpoint"
        return model, args, spec, [note]
    from visionattn.models.weight_placement import place_weights

    placement = place_weights(model, name, options.checkpoint)
    if not placement.new:
        _check_seed(options)
    lost = [key for key in placement.new if key.startswith(_classifiers(cfg))]
    if classifies and lost:
        raise ValueError(
            f"expected the classifier of {name} in {options.checkpoint}, but {lost[0]} is missing"
        )
    return model, args, spec, [name, *placement.lines()]


def _check_seed(options: OpenOptions) -> None:
    """Raise ValueError for a seed together with a checkpoint that provides all weights."""
    if options.seed and not options.seed_divides:
        raise ValueError(
            f"seed {options.seed} has no effect, because {options.checkpoint} has all weights; "
            "remove it"
        )


def _classifiers(cfg: PretrainedCfg) -> tuple[str, ...]:
    """Return the names of a model's last layers."""
    return (cfg.classifier,) if isinstance(cfg.classifier, str) else tuple(cfg.classifier or ())


def _spec_of(cfg: PretrainedCfg, given: dict[str, Tensor]) -> DataSpec:
    """Return timm's specification of a model's images, with the channels and classes of a state
    dict.
    """
    channels, height, width = cfg.input_size
    classes = next(
        (len(given[f"{name}.weight"]) for name in _classifiers(cfg) if f"{name}.weight" in given),
        cfg.num_classes,
    )
    first = given.get(f"{cfg.first_conv}.weight") if isinstance(cfg.first_conv, str) else None
    if first is not None and first.ndim == 4:
        channels = first.shape[1]
    if channels == 256:
        return DataSpec(256, classes, (), (), (), "grey_one_hot", max(height, width))
    mean, std = cfg.mean, cfg.std
    if channels != len(mean):
        mean = (math.fsum(mean) / len(mean),) * channels
        std = (math.fsum(std) / len(std),) * channels
    return DataSpec(channels, classes, (), tuple(mean), tuple(std), None, max(height, width))
