"""Weights on disk: a safetensors file that carries what is needed to rebuild its model, and the
reading of any weights.

This module owns the format of our weight files and ``DataSpec``, the contract between a model and
its images. It knows nothing of training.
"""

import json
import math
import pickle
import re
import struct
import unicodedata
import warnings
import zipfile
from argparse import Namespace
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import timm
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from visionattn.cli.files import first_line, write_whole
from visionattn.cli.untrusted import SHOWN, brief, checked, from_json
from visionattn.models.pyramid import STRIDES
from visionattn.models.registration import (
    FORMER,
    PYRAMID,
    Task,
    check_reads,
    complete,
    create,
    is_ours,
)
from visionattn.models.segmentation import IGNORED
from visionattn.models.state_dicts import FeatureMaps

FORMAT = "visionattn"
FORMAT_VERSION = 3
READABLE_VERSIONS = ("1", "2", "3")
"""Version 1 knew neither ``fit`` nor ``max_patches``: its images were resized and cropped. Before
version 3 the arguments of our models were those that were given, without defaults.
"""
Fit = Literal["native", "pad", "stretch", "crop"]
"""How images of any size come to a model; ``visionattn.data.geometry`` says what each does."""
LOADING_ARGS = frozenset(
    {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
)
"""Arguments of ``timm.create_model`` that fetch weights; a file of weights has no need of them."""
KEPT = ("interpolation", "crop_pct", "crop_mode", "license")
"""What timm says of a model besides ``DataSpec``, and what a file keeps of it if it is told."""
UNREADABLE = (
    RuntimeError,
    OSError,
    pickle.UnpicklingError,
    EOFError,
    AssertionError,
    KeyError,
    IndexError,
    AttributeError,
    TypeError,
    ValueError,
    struct.error,
)
"""What ``torch.load`` raises for files that are cut off, garbled, or no checkpoint at all."""
PICKLES = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
"""How pickles begin."""
UNBUILDABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
)
"""What a model of timm raises for arguments that it does not take, besides ``ValueError``."""
LONGEST_ARGS = 200
"""The most characters of a model's arguments in an error."""


@dataclass(frozen=True)
class DataSpec:
    """What a model expects of its images, and what its outputs mean. It travels with the
    weights.
    """

    in_chans: int
    """Channels of the model's input: 256 for one-hot grey levels, else one for each band."""
    num_classes: int
    """Length of the output."""
    class_names: tuple[str, ...]
    """Name of each output, in order; empty where the data has none."""
    mean: tuple[float, ...]
    """Mean per channel of images scaled to [0, 1]; empty where values are levels."""
    std: tuple[float, ...]
    """Standard deviation per channel of images scaled to [0, 1], likewise."""
    encoding: Literal["grey_one_hot"] | None
    """``grey_one_hot``: each of the 256 grey levels is a channel."""
    img_size: int | tuple[int, int] | None
    """Size in pixels that images were brought to in training, as ``fit`` takes it: height and
    width, or one number for both; the longest side for ``native``, where None is no limit.
    """
    fit: Fit = "crop"
    """How images of any size were brought there."""
    max_patches: int | None = None
    """The most patches of an image, for ``native`` alone; None: no limit."""
    bands: tuple[int, ...] | None = None
    """Which bands of a file are the channels, from 1; None: grey, or red, green and blue."""
    value_range: tuple[float, float] | None = None
    """The values that become 0 and 1, in files of more than 8 bits; None: what a file states."""
    range_found: bool = False
    """``value_range`` was found by looking at files that do not state theirs, and is for those."""
    page: int | None = None
    """Which page of a file is read, from 1; None: the first."""
    task: Task = "classification"
    """What the outputs are of: images, pixels, or values to be written, which are levels."""
    colours: tuple[tuple[int, int, int], ...] | None = None
    """Red, green and blue of each class in masks; None: a class is its number."""

    def prepare(self, images: Tensor) -> Tensor:
        """Turn the values of image files into the model's input, on the device where they are.

        Args:
            images: ``[B, C, H, W]``, uint8, or float32 in [0, 1] where the files have more than 8
                bits; C is ``in_chans``, or 1 for ``grey_one_hot``, which takes uint8 alone.

        Returns:
            float32 ``[B, in_chans, H, W]``: ``(x - mean) / std`` for x in [0, 1], or one-hot grey
            levels; for ``generate`` the levels as they are, uint8.

        Raises:
            ValueError: another type, or another number of channels.
        """
        channels = 1 if self.encoding == "grey_one_hot" else self.in_chans
        levels_alone = self.encoding == "grey_one_hot" or self.task == "generate"
        types = [torch.uint8] if levels_alone else [torch.uint8, torch.float32]
        if images.dtype not in types or images.ndim != 4 or images.shape[1] != channels:
            wanted = "uint8 images" if len(types) == 1 else "images of uint8, or float32 in [0, 1],"
            raise ValueError(
                f"wanted {wanted} [B, {channels}, H, W], got {images.dtype} {list(images.shape)}"
            )
        if self.encoding == "grey_one_hot":
            levels = torch.arange(256, dtype=torch.uint8, device=images.device).view(1, 256, 1, 1)
            return (images == levels).to(torch.float32)
        if self.task == "generate":
            return images
        mean = torch.tensor(self.mean, device=images.device).view(1, -1, 1, 1)
        std = torch.tensor(self.std, device=images.device).view(1, -1, 1, 1)
        values = images.to(torch.float32).div_(255) if images.dtype == torch.uint8 else images
        return (values - mean).div_(std)


def save_model(
    path: str | Path,
    model: nn.Module,
    name: str,
    args: dict[str, Any],
    spec: DataSpec,
    *,
    notes: dict[str, str] | None = None,
) -> None:
    """Write weights, model name, model arguments and data specification to one safetensors file.

    The file appears whole or not at all.

    Args:
        path: the file; its folder exists.
        model: the module whose ``state_dict`` is kept.
        name: the timm name that builds it.
        args: the keyword arguments that build it, besides ``num_classes`` and ``in_chans``; JSON
            types. What models of ours take by default is kept with them.
        spec: what its images are.
        notes: further metadata for the file.
    """
    metadata = {"format": FORMAT, "version": str(FORMAT_VERSION), "model": name}
    metadata |= {"args": json.dumps(complete(name, args)), "data": json.dumps(asdict(spec))}
    metadata |= notes or {}
    tensors = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    content = in_order(save(tensors, metadata=metadata))
    write_whole(path, lambda temporary: temporary.write_bytes(content))


def in_order(content: bytes) -> bytes:
    """Return a safetensors file with its metadata in order, so that equal weights are equal bytes:
    safetensors writes the entries in any order.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    head = json.loads(content[8:end])
    metadata = {"__metadata__": dict(sorted(head.pop("__metadata__").items()))}
    text = json.dumps(metadata | head, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


def load_model(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    pyramid: bool = False,
    features_only: bool = False,
) -> nn.Module:
    """Rebuild a model from a file of ``save_model``, in eval mode, with its ``DataSpec`` as
    ``model.data_spec``.

    Args:
        path: the file.
        device: where the model is to be.
        pyramid: build ours with maps at strides of 4, 8, 16 and 32 px, see ``PyramidTransformer``;
            its layers start fresh, with a warning, unless the file has them.
        features_only: return timm's wrapper of features, an encoder for decoders: the maps of the
            last three blocks, or of the pyramid.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is cut off, a pickle, of another project, its tensors are not those of
            its model, or the model has neither features nor a pyramid.
    """
    metadata, tensors = read_safetensors(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} has no description of its model; weights of other projects go through "
            "--init-from"
        )
    if metadata.get("version") not in READABLE_VERSIONS:
        raise ValueError(
            f"{path} has format {brief(metadata.get('version'))}, this visionattn reads formats "
            f"{', '.join(READABLE_VERSIONS)}"
        )
    name, args, spec = described(metadata, path)
    try:
        with torch.random.fork_rng(devices=[]):
            model = create(name, spec.task, spec.num_classes, spec.in_chans, args)
    except (*UNBUILDABLE, ValueError) as error:
        raise ValueError(
            f"{path} names a model {name!r} that cannot be built with these args: "
            f"{describe_args(args)} ({first_line(error)})"
        ) from error
    if misfit := describe_misfit(tensors, model.state_dict()):
        raise ValueError(f"{path} does not fit the model {name!r} that it names: {misfit}")
    model.load_state_dict(tensors)
    model.data_spec = spec
    if "pretrained_cfg" in metadata:
        _tell_timm(model, metadata["pretrained_cfg"], path)
    if pyramid or features_only:
        check_reads(model)
        model = getattr(model, "backbone", model)
    if pyramid and "pyramid_channels" not in args:
        if not is_ours(name):
            raise ValueError(f"{path} holds a {name}, and a pyramid is for models of visionattn")
        options = dict(checkpoint_path=str(path), features_only=features_only)
        model = timm.create_model(name, **options, **PYRAMID)
    elif features_only:
        maps = len(STRIDES) if hasattr(model, "pyramid") else min(3, len(model.blocks))
        model = FeatureMaps(model, out_indices=maps)
    model.data_spec = spec
    return model.to(device).eval()


class Kept(TypedDict, total=False):
    """What a file may say for timm: ``KEPT``."""

    interpolation: str
    crop_pct: float
    crop_mode: str
    license: str


def _tell_timm(model: nn.Module, text: str, path: str | Path) -> None:
    """Let a model's ``pretrained_cfg`` say of its images what its file says.

    Raises:
        ValueError: the file's text is garbled; one line.
    """
    try:
        kept = from_json(Kept, text, "pretrained_cfg")
    except ValueError as error:
        raise ValueError(f"{path} has a garbled description of its model: {error}") from error
    spec, size = model.data_spec, model.patch_embed.img_size
    model.pretrained_cfg |= {key: value for key, value in kept.items() if key in KEPT} | dict(
        mean=spec.mean,
        std=spec.std,
        num_classes=spec.num_classes,
        input_size=(spec.in_chans, *size),
    )


def described(metadata: dict[str, str], path: str | Path) -> tuple[str, dict[str, Any], DataSpec]:
    """Return what the metadata of a file of ours say of its model: its timm name, the arguments
    that build it, whatever the defaults are by now, and what its images are.

    Raises:
        ValueError: they are garbled, name no model of timm, or have other weights loaded; one line.
    """
    try:
        said = checked(_Description, metadata, "metadata")
        args = from_json(dict[str, Any], said["args"], "args")
        spec = from_json(DataSpec, said["data"], "data")
        check_spec(spec)
        # macOS writes é as e and an accent: names are compared in their composed form.
        names = tuple(unicodedata.normalize("NFC", name) for name in spec.class_names)
        spec = replace(spec, class_names=names)
    except ValueError as error:
        raise ValueError(f"{path} has a garbled description of its model: {error}") from error
    name = said["model"]
    if not timm.is_model(name):
        raise ValueError(
            f"{path} holds a model {name[:SHOWN]!r}, which timm does not know; import the package "
            "that registers it"
        )
    # Arguments that load other weights could fetch any file: a checkpoint has no need of them.
    if loading := LOADING_ARGS.intersection(args):
        raise ValueError(
            f"{path} asks for other weights to be loaded ({', '.join(sorted(loading))}): refused"
        )
    stated = metadata.get("version") not in ("1", "2")
    return name, complete(name, args, {} if stated else FORMER), spec


class _Description(TypedDict):
    """What the metadata of a file of ours must have besides its format."""

    model: str
    args: str
    data: str


def check_spec(spec: DataSpec) -> None:
    """Raise ValueError where what is said of images cannot be, or contradicts itself."""
    one_hot = spec.encoding == "grey_one_hot"
    channels = 0 if one_hot or spec.task == "generate" else spec.in_chans
    sides = spec.img_size if isinstance(spec.img_size, tuple) else (spec.img_size or 1,)
    wrong = {
        "in_chans": spec.in_chans < 1 or (one_hot and spec.in_chans != 256),
        "num_classes": spec.num_classes < 0
        or (spec.task == "segmentation" and not 1 <= spec.num_classes <= IGNORED),
        "class_names": len(spec.class_names) not in (0, spec.num_classes),
        "mean": len(spec.mean) != channels or not all(map(math.isfinite, spec.mean)),
        "std": len(spec.std) != channels or not all(0 < std < math.inf for std in spec.std),
        "img_size": min(sides) < 1 or spec.img_size == 0,
        "max_patches": spec.max_patches is not None and spec.max_patches < 1,
        "bands": spec.bands is not None
        and (len(spec.bands) != (0 if one_hot else spec.in_chans) or min(spec.bands) < 1),
        "value_range": spec.value_range is not None
        and not -math.inf < spec.value_range[0] < spec.value_range[1] < math.inf,
        "page": spec.page is not None and spec.page < 1,
        "colours": spec.colours is not None
        and (
            len(spec.colours) != spec.num_classes
            or not all(0 <= level <= 255 for colour in spec.colours for level in colour)
        ),
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(
                f"data.{key} is {brief(getattr(spec, key))}, which does not go with "
                f"in_chans {spec.in_chans} and num_classes {spec.num_classes}"
            )


def describe_args(args: dict[str, Any]) -> str:
    """Write arguments as they stand in a call, the first of many."""
    text = ", ".join(f"{key}={_written(value)}" for key, value in args.items()) or "none"
    return text if len(text) <= LONGEST_ARGS else f"{text[:LONGEST_ARGS]} ..."


def _written(value: Any) -> str:
    return repr(value) if isinstance(value, (str, bool)) or value is None else brief(value)


def describe_misfit(given: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """Say in one line how two state dicts differ in names, shapes and kinds of numbers; an empty
    string where they do not.
    """
    missing = [key for key in wanted if key not in given]
    unexpected = [key for key in given if key not in wanted]
    both = [key for key in wanted if key in given]
    reshaped = [key for key in both if given[key].shape != wanted[key].shape]
    retyped = [key for key in both if not same_kind(given[key], wanted[key])]
    parts = [
        f"{len(keys)} {what} (first: {keys[0]})"
        for what, keys in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", reshaped),
            ("of another type", retyped),
        )
        if keys
    ]
    return ", ".join(parts)


def same_kind(given: Tensor, wanted: Tensor) -> bool:
    """Tell whether both hold fractions or both do not: whole numbers are no weights."""
    return given.is_floating_point() == wanted.is_floating_point() and not given.is_complex()


def check_finite(tensors: dict[str, Tensor], path: str | Path) -> None:
    """Raise ValueError where a tensor that is to be used as weights has a NaN or an infinity.

    Args:
        tensors: by name.
        path: where they are from, for the error.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{path} is no use as weights: its {name} has NaN or infinity")


def read_safetensors(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read the metadata and the tensors of a safetensors file, on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no safetensors file, or one that is cut off.
    """
    path = existing(path)
    try:
        return open_safetensors(path)
    except SafetensorError as error:
        raise explain_safetensors(path, error) from error


def read_metadata(path: str | Path) -> dict[str, str]:
    """Read the metadata of a safetensors file off its head, without the tensors.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no safetensors file, or one that is cut off.
    """
    path = existing(path)
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        raise explain_safetensors(path, error) from error


def existing(path: str | Path) -> Path:
    """Return the path of a file that is there and may be read.

    Raises:
        FileNotFoundError, PermissionError: there is no such file, or it may not be read.
    """
    path = Path(path)
    if path.is_dir():
        inside = sorted(path.glob("*.safetensors"))
        best = next((each for each in inside if each.stem == "best"), *inside[:1] or [None])
        way_out = f"name the weights in it, {best}" if best else "name a file of weights"
        raise FileNotFoundError(f"no checkpoint at {path}: it is a folder; {way_out}")
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    with open(path, "rb"):  # safetensors says of a file without permission that it is not there
        return path


def open_safetensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read metadata and tensors; raise ``SafetensorError`` for any other file."""
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        return file.metadata() or {}, {name: file.get_tensor(name) for name in names}


def explain_safetensors(path: Path, error: SafetensorError) -> ValueError:
    """Make the error for a file that safetensors could not read."""
    if is_pickle(path):
        return ValueError(
            f"{path} is a pickle of torch.save, not a safetensors file; give the best.safetensors "
            "of a run"
        )
    return ValueError(
        f"{path} is no whole safetensors file (cut off or garbled): {first_line(error)}"
    )


def is_pickle(path: Path) -> bool:
    """Tell whether a file that safetensors cannot read is a pickle, alone or in torch's zip."""
    with open(path, "rb") as file:
        return file.read(2) in PICKLES or zipfile.is_zipfile(path)


def read_pickle(path: str | Path) -> Any:
    """Read what ``torch.save`` wrote, on the CPU, provided that reading it runs no code of the
    file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it would run code, or it is a safetensors file, cut off, or no checkpoint.
    """
    path = existing(path)
    try:
        # As a stream: given a path, torch takes all that ends in .safetensors for safetensors.
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            with torch.serialization.safe_globals([Namespace]):
                return torch.load(file, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except UNREADABLE as error:
        if is_safetensors(path):
            raise ValueError(
                f"{path} is a safetensors file, which holds weights alone, not a file of torch.save"
            ) from error
        refused = re.search(r"(?:GLOBAL|global:?|class) ([\w.]+\.[\w.]+)", str(error))
        if refused and is_pickle(path):
            raise ValueError(
                f"{path} would run code when unpickled ({refused[1]}) and is refused: save plain "
                "tensors instead"
            ) from error
        if "Unsupported operand" in str(error):
            raise ValueError(
                f"{path} is no file of torch.save and might run code when unpickled: refused"
            ) from error
        raise ValueError(
            f"{path} is no whole checkpoint (cut off or garbled): {first_line(error)}"
        ) from error


def is_safetensors(path: Path) -> bool:
    """Tell whether the head of a safetensors file can be read."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except SafetensorError:
        return False


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of any weight file, whatever its name.

    It is a safetensors file, or a pickle with a state dict in it, also nested as timm and others
    do. What data parallelism and ``torch.compile`` put before every name is taken off.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, would run code, or holds no tensors by name.
    """
    path = existing(path)
    try:
        tensors = open_safetensors(path)[1]
    except SafetensorError:
        tensors = _tensors_in(_read_other(path))
    if not tensors:
        raise ValueError(f"{path} holds no tensors by name")
    for wrapper in ("module.", "_orig_mod.", "module."):
        # A wrapper names all its model's tensors; a model with a part of that name has others too.
        if all(key.startswith(wrapper) for key in tensors if "." in key):
            tensors = {key.removeprefix(wrapper): value for key, value in tensors.items()}
    return tensors


def _read_other(path: Path) -> Any:
    """Read what ``torch.save`` wrote; the error for a file in neither format names both."""
    try:
        return read_pickle(path)
    except ValueError as second:
        if is_pickle(path):
            raise
        raise ValueError(
            f"{path} is no whole file of weights (cut off or garbled), neither of safetensors nor "
            "of torch's tensors"
        ) from second


def _tensors_in(content: Any) -> dict[str, Tensor]:
    """Return the named tensors of a state dict: those that lie deepest under the usual keys."""
    if not isinstance(content, dict):
        return {}
    for key in ("ema", "state_dict_ema", "model_ema", "model", "state_dict", "module"):
        if found := _tensors_in(content.get(key)):
            return found
    return {key: value for key, value in content.items() if isinstance(value, Tensor)}
