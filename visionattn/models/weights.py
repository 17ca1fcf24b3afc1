"""Weights on disk: a safetensors file with everything needed to rebuild its model, and readers for
any weight file.

This module owns the format of our weight files and ``DataSpec``, the contract between a model and
its images. It is independent of training.
"""

import hashlib
import json
import math
import pickle
import re
import struct
import unicodedata
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import timm
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from visionattn.cli.files import first_line, write_whole
from visionattn.cli.untrusted import SHOWN, brief
from visionattn.model_config import Fit, Task
from visionattn.models.pyramid import STRIDES
from visionattn.models.registration import (
    PYRAMID,
    check_reads,
    complete,
    create,
    is_ours,
)
from visionattn.models.segmentation import IGNORED
from visionattn.models.state_dicts import FeatureMaps

FORMAT = "visionattn"
FORMAT_VERSION = "3"
LOADING_ARGS = frozenset(
    {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
)
"""Arguments of ``timm.create_model`` that load weights; a file of weights does not need them."""
KEPT = ("interpolation", "crop_pct", "crop_mode", "license")
"""Fields of timm's configuration that ``DataSpec`` lacks; a file keeps them if given."""
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
"""Exceptions of ``torch.load`` for files that are truncated, malformed, or not a checkpoint."""
PICKLES = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
"""First bytes of pickles."""
UNBUILDABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
)
"""Exceptions of timm models for arguments that they do not accept, in addition to
``ValueError``.
"""
OPTIONAL = ("thresholds", "target_mean", "target_std")
"""Fields of ``DataSpec`` that files lack unless they are set."""
HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,64})\.[^.]*$")
"""First digits of the SHA-256 of a file in its name."""
LONGEST_ARGS = 200
"""Maximum number of characters of a model's arguments in an error."""


@dataclass(frozen=True)
class DataSpec:
    """A model's expectations of its images, and the meaning of its outputs. It is saved with the
    weights.
    """

    in_chans: int
    """Channels of the model's input: 256 for one-hot gray levels, else one per band."""
    num_classes: int
    """Length of the output."""
    class_names: tuple[str, ...]
    """Name of each output, in order; empty if the data has no names."""
    mean: tuple[float, ...]
    """Mean per channel of images scaled to [0, 1]; empty if values are levels."""
    std: tuple[float, ...]
    """Standard deviation per channel of images scaled to [0, 1]; empty if values are levels."""
    encoding: Literal["grey_one_hot"] | None
    """``grey_one_hot``: each of the 256 gray levels is a channel."""
    img_size: int | tuple[int, int] | None
    """Size of training images in pixels, as ``fit`` uses it: height and width, or one number for
    both; for ``native`` the longest side (None: no limit).
    """
    fit: Fit = "crop"
    """How images of any size were fitted to it."""
    max_patches: int | None = None
    """Maximum number of patches of an image, only for ``native``; None: no limit."""
    bands: tuple[int, ...] | None = None
    """Bands of a file that become the channels, from 1; None: gray, or red, green and blue."""
    value_range: tuple[float, float] | None = None
    """Values that map to 0 and 1, in files of more than 8 bits; None: the range stated in the file.
    """
    range_found: bool = False
    """Whether ``value_range`` was measured on files that state no range; it applies only to such
    files.
    """
    page: int | None = None
    """Page of a file that is read, from 1; None: the first."""
    task: Task = "classification"
    """Task of the outputs; values that are generated are levels."""
    colours: tuple[tuple[int, int, int], ...] | None = None
    """Red, green and blue of each class in masks; None: a class is its number."""
    thresholds: tuple[float, ...] | None = None
    """For ``multilabel``, the probability from which on an image has each class; None: 0.5."""
    target_mean: tuple[float, ...] | None = None
    """For ``regression``, the mean of each target over the training images."""
    target_std: tuple[float, ...] | None = None
    """For ``regression``, the standard deviation of each target over the training images."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """Return the name of each output; numbers if there are no names."""
        return self.class_names or tuple(map(str, range(self.num_classes)))

    def stored(self) -> dict[str, Any]:
        """Return the fields as JSON types, without ``OPTIONAL`` fields that are None."""
        fields = asdict(self)
        return {key: x for key, x in fields.items() if x is not None or key not in OPTIONAL}

    def values_of(self, outputs: Tensor) -> Tensor:
        """Return the meaning of a model's outputs ``[..., num_classes]``, float64: probabilities of
        classes for ``multilabel``, targets in the units of the labels for ``regression``.
        """
        if self.task == "multilabel":
            return outputs.double().sigmoid()
        mean, std = self.targets_like(outputs.double())
        return outputs.double() * std + mean

    def targets_like(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``target_mean`` and ``target_std`` as tensors like ``like``."""
        return like.new_tensor(self.target_mean), like.new_tensor(self.target_std)

    def holds(self, values: Sequence[float]) -> list[bool]:
        """Tell which classes of ``multilabel`` an image with these probabilities has."""
        least = self.thresholds or (0.5,) * self.num_classes
        return [value >= limit for value, limit in zip(values, least, strict=True)]

    def prepare(self, images: Tensor) -> Tensor:
        """Turn the values of image files into the model's input, on their device.

        Args:
            images: ``[B, C, H, W]``, uint8, float32 in [0, 1] for files of more than 8 bits, or
                float16 feature maps; C is ``in_chans``, or 1 for ``grey_one_hot``, which accepts
                only uint8.

        Returns:
            float32 ``[B, in_chans, H, W]``: ``(x - mean) / std`` for x in [0, 1], or one-hot gray
            levels; for ``generate`` the unchanged levels, uint8.

        Raises:
            ValueError: another type, or another number of channels.
        """
        channels = 1 if self.encoding == "grey_one_hot" else self.in_chans
        levels_alone = self.encoding == "grey_one_hot" or self.task == "generate"
        types = [torch.uint8] if levels_alone else [torch.uint8, torch.float32, torch.float16]
        if images.dtype not in types or images.ndim != 4 or images.shape[1] != channels:
            wanted = "uint8 images" if len(types) == 1 else "images of uint8, or float32 in [0, 1],"
            raise ValueError(
                f"expected {wanted} [B, {channels}, H, W], got {images.dtype} {list(images.shape)}"
            )
        if self.encoding == "grey_one_hot":
            levels = torch.arange(256, dtype=torch.uint8, device=images.device).view(1, 256, 1, 1)
            return (images == levels).to(torch.float32)
        if self.task == "generate":
            return images
        mean = torch.tensor(self.mean, device=images.device).view(1, -1, 1, 1)
        std = torch.tensor(self.std, device=images.device).view(1, -1, 1, 1)
        values = images.to(torch.float32)
        values = values.div_(255) if images.dtype == torch.uint8 else values
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

    The file is written completely or not at all.

    Args:
        path: the file; its folder exists.
        model: the module whose ``state_dict`` is saved.
        name: the timm name that builds it.
        args: the keyword arguments that build it, without ``num_classes`` and ``in_chans``; JSON
            types. Defaults of our models are saved with them.
        spec: specification of its images.
        notes: further metadata for the file.
    """
    metadata = {"format": FORMAT, "version": FORMAT_VERSION, "model": name}
    metadata |= {"args": json.dumps(complete(name, args)), "data": json.dumps(spec.stored())}
    metadata |= notes or {}
    tensors = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    content = in_order(save(tensors, metadata=metadata))
    write_whole(path, lambda temporary: temporary.write_bytes(content))


def in_order(content: bytes) -> bytes:
    """Return a safetensors file with its metadata sorted, so that equal weights give equal bytes:
    safetensors writes the entries in any order.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    head = json.loads(content[8:end])
    metadata = {"__metadata__": dict(sorted(head.pop("__metadata__").items()))}
    text = json.dumps(metadata | head, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


if TYPE_CHECKING:

    class LoadedModel(nn.Module):
        """A model of ``load_model``, for type checkers."""

        data_spec: DataSpec


def load_model(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    pyramid: bool = False,
    features_only: bool = False,
) -> "LoadedModel":
    """Rebuild a model from a file of ``save_model``, in eval mode, with its ``DataSpec`` as
    ``model.data_spec``.

    Args:
        path: the file.
        device: device of the model.
        pyramid: build one of our models with maps at strides of 4, 8, 16 and 32 px, see
            ``PyramidTransformer``; its layers start from initial values, with a warning, unless the
            file has them.
        features_only: return timm's wrapper of features, an encoder for decoders: the maps of the
            last three blocks, or of the pyramid.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is truncated, a pickle, or of another project, its tensors do not fit
            its model, or the model has neither features nor a pyramid.
    """
    metadata, tensors = read_safetensors(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} does not state its model; pass weights of other projects as --init-from"
        )
    if metadata.get("version") != FORMAT_VERSION:
        raise ValueError(
            f"expected format {FORMAT_VERSION}, got {brief(metadata.get('version'))} ({path}); use "
            "the visionattn that wrote it"
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
            raise ValueError(f"a pyramid needs a model of visionattn, got a {name} ({path})")
        options = dict(checkpoint_path=str(path), features_only=features_only)
        model = timm.create_model(name, **options, **PYRAMID)
    elif features_only:
        maps = len(STRIDES) if hasattr(model, "pyramid") else min(3, len(model.blocks))
        model = FeatureMaps(model, out_indices=maps)
    loaded: Any = model.to(device).eval()
    loaded.data_spec = spec
    return loaded


def _tell_timm(model: nn.Module, text: str, path: str | Path) -> None:
    """Update a model's ``pretrained_cfg`` with the image description of its file.

    Raises:
        ValueError: the file's text is malformed; one line.
    """
    try:
        kept = {key: value for key, value in json.loads(text).items() if key in KEPT}
    except (AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a damaged description of its model: {error}") from error
    spec, size = model.data_spec, model.patch_embed.img_size
    model.pretrained_cfg |= kept | dict(
        mean=spec.mean,
        std=spec.std,
        num_classes=spec.num_classes,
        input_size=(spec.in_chans, *size),
    )


def described(metadata: dict[str, str], path: str | Path) -> tuple[str, dict[str, Any], DataSpec]:
    """Return the model described by the metadata of one of our files: its timm name, its arguments
    (independent of current defaults), and the specification of its images.

    Raises:
        ValueError: they are malformed, name no timm model, or would load other weights; one line.
    """
    try:
        name, args, spec = (
            metadata["model"],
            json.loads(metadata["args"]),
            read_spec(metadata["data"]),
        )
        if not isinstance(args, dict):
            raise ValueError(f"expected args to be names and values, got {brief(args)}")
        # macOS writes é as e and an accent: names are compared in their composed form.
        names = tuple(unicodedata.normalize("NFC", name) for name in spec.class_names)
        spec = replace(spec, class_names=names)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        said = first_line(error)
        raise ValueError(f"{path} has a damaged description of its model: {said}") from error
    if not timm.is_model(name):
        raise ValueError(
            f"{path} holds a model {name[:SHOWN]!r}, which timm does not know; import the package "
            "that registers it"
        )
    # Arguments that load other weights could fetch any file: a checkpoint does not need them.
    if loading := LOADING_ARGS.intersection(args):
        raise ValueError(
            f"{path} refers to other weights ({', '.join(sorted(loading))}), which is not allowed"
        )
    return name, args, spec


def read_spec(text: str) -> DataSpec:
    """Return the specification of images from the JSON of a file of weights or a note. Building
    models must not need pydantic, so ``check_spec`` checks it.

    Raises:
        ValueError: it is malformed; one line.
    """
    try:
        fields = json.loads(text)
        spec = DataSpec(**{key: _with_tuples(value) for key, value in fields.items()})
        check_spec(spec)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"data: {first_line(error)}") from error
    return spec


def _with_tuples(value: Any) -> Any:
    """Return a value of JSON with tuples in place of lists."""
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def check_spec(spec: DataSpec) -> None:
    """Raise ValueError if a specification of images is impossible or inconsistent."""
    one_hot = spec.encoding == "grey_one_hot"
    channels = 0 if one_hot or spec.task == "generate" else spec.in_chans
    sides = spec.img_size if isinstance(spec.img_size, tuple) else (spec.img_size or 1,)
    targets = spec.num_classes if spec.task == "regression" else 0
    wrong = {
        "fit": spec.fit not in get_args(Fit),
        "task": spec.task not in get_args(Task),
        "encoding": spec.encoding not in (None, "grey_one_hot"),
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
        "range_found": not isinstance(spec.range_found, bool),
        "page": spec.page is not None and spec.page < 1,
        "colours": spec.colours is not None
        and (
            len(spec.colours) != spec.num_classes
            or not all(0 <= level <= 255 for colour in spec.colours for level in colour)
        ),
        "thresholds": spec.thresholds is not None
        and (
            (spec.task, len(spec.thresholds)) != ("multilabel", spec.num_classes)
            or not all(0 <= each <= 1 for each in spec.thresholds)
        ),
        "target_mean": len(spec.target_mean or ()) != targets
        or not all(map(math.isfinite, spec.target_mean or ())),
        "target_std": len(spec.target_std or ()) != targets
        or not all(0 < std < math.inf for std in spec.target_std or ()),
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(
                f"data.{key} {brief(getattr(spec, key))} does not fit in_chans {spec.in_chans} "
                f"and num_classes {spec.num_classes}"
            )


def describe_args(args: dict[str, Any]) -> str:
    """Format arguments as in a call; long lists are shortened."""
    text = ", ".join(f"{key}={_written(value)}" for key, value in args.items()) or "none"
    return text if len(text) <= LONGEST_ARGS else f"{text[:LONGEST_ARGS]} ..."


def _written(value: Any) -> str:
    return repr(value) if isinstance(value, (str, bool)) or value is None else brief(value)


def describe_misfit(given: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """Describe in one line how two state dicts differ in names, shapes and kinds of numbers; empty
    if they do not.
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
    """Return whether both hold floating point numbers or both do not: integers are not weights."""
    return given.is_floating_point() == wanted.is_floating_point() and not given.is_complex()


def check_finite(tensors: dict[str, Tensor], path: str | Path) -> None:
    """Raise ValueError if a tensor for use as weights has a NaN or an infinity.

    Args:
        tensors: by name.
        path: their source, for the error.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"expected finite weights, got NaN or infinity in {name} ({path})")


def digest_of(parts: Iterable[object]) -> str:
    """Return the SHA-256 of parts: bytes unchanged, and the ``repr`` of other objects."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode() + b"\n")
    return digest.hexdigest()


def digest_of_weights(model: nn.Module) -> str:
    """Return the SHA-256 of the names, shapes and bytes of a model's tensors."""

    def bytes_of(tensor: Tensor) -> bytes:
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    tensors = sorted(model.state_dict().items())
    return digest_of(part for name, x in tensors for part in (name, x.shape, bytes_of(x)))


def read_safetensors(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read the metadata and the tensors of a safetensors file, on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a safetensors file, is truncated, or fails ``check_hash``.
    """
    path = existing(path)
    check_hash(path)
    try:
        return open_safetensors(path)
    except SafetensorError as error:
        raise explain_safetensors(path, error) from error


def read_metadata(path: str | Path) -> dict[str, str]:
    """Read the metadata of a safetensors file from its header, without the tensors.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a safetensors file, or is truncated.
    """
    path = existing(path)
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        raise explain_safetensors(path, error) from error


def existing(path: str | Path) -> Path:
    """Return the path of an existing, readable file.

    Raises:
        FileNotFoundError, PermissionError: there is no such file, or it may not be read.
    """
    path = Path(path)
    if path.is_dir():
        inside = sorted(path.glob("*.safetensors"))
        best = next((each for each in inside if each.stem == "best"), *inside[:1] or [None])
        way_out = f"pass the weights in it, {best}" if best else "pass a file of weights"
        raise FileNotFoundError(f"no checkpoint at {path}: it is a folder; {way_out}")
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    with open(path, "rb"):  # safetensors reports a file without permission as missing
        return path


def check_hash(path: Path) -> None:
    """Check the SHA-256 of a file if its name has the first digits: ``NAME-abcdef12.safetensors``.

    The names follow ``torch.hub``, with 8 or more hexadecimal digits and at least one letter, which
    dates lack. Other names are not checked.

    Raises:
        ValueError: the file has another SHA-256.
    """
    named = HASH_IN_NAME.search(path.name)
    if named is None or named[1].isdigit():
        return
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if not found.startswith(named[1]):
        raise ValueError(
            f"{path} is damaged: expected SHA-256 {named[1]}... by its name, got "
            f"{found[: len(named[1])]}...; download it again, or rename a file that you changed"
        )


def open_safetensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read metadata and tensors; raise ``SafetensorError`` for any other file."""
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        return file.metadata() or {}, {name: file.get_tensor(name) for name in names}


def explain_safetensors(path: Path, error: SafetensorError) -> ValueError:
    """Return the error for a file that safetensors could not read."""
    if is_pickle(path):
        return ValueError(
            f"expected a safetensors file, got a pickle of torch.save ({path}); pass the "
            "best.safetensors of a run"
        )
    return ValueError(f"{path} is truncated or not a safetensors file: {first_line(error)}")


def is_pickle(path: Path) -> bool:
    """Return whether a file that safetensors cannot read is a pickle, plain or in torch's zip."""
    with open(path, "rb") as file:
        return file.read(2) in PICKLES or zipfile.is_zipfile(path)


def read_pickle(path: str | Path) -> Any:
    """Read a file of ``torch.save`` on the CPU, provided that reading it runs no code from the
    file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it might run code, is truncated, or is not a checkpoint.
    """
    path = existing(path)
    try:
        # Pass a stream: given a path, torch treats any name ending in .safetensors as safetensors.
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            with torch.serialization.safe_globals([Namespace]):
                return torch.load(file, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        if is_pickle(path) and re.search(r"GLOBAL|global|Unsupported (class|operand)", str(error)):
            raise ValueError(
                f"{path} might run code when unpickled and is refused; save plain tensors instead"
            ) from error
        raise ValueError(
            f"{path} is a truncated or damaged checkpoint: {first_line(error)}"
        ) from error


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of any weight file, whatever its name.

    It is a safetensors file, or a pickle with a state dict, possibly nested as by timm and others.
    Prefixes of data parallelism and ``torch.compile`` are removed from names.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, would run code, holds no named tensors, or fails
            ``check_hash``.
    """
    path = existing(path)
    check_hash(path)
    try:
        tensors = open_safetensors(path)[1]
    except SafetensorError:
        tensors = _tensors_in(read_pickle(path))
    if not tensors:
        raise ValueError(f"expected named tensors in {path}, got none")
    for wrapper in ("module.", "_orig_mod.", "module."):
        # A wrapper prefixes all tensors of its model; a model with a part of that name has others,
        # too.
        if all(key.startswith(wrapper) for key in tensors if "." in key):
            tensors = {key.removeprefix(wrapper): value for key, value in tensors.items()}
    return tensors


def _tensors_in(content: Any) -> dict[str, Tensor]:
    """Return the named tensors of a state dict: the ones nested deepest under the usual keys."""
    if not isinstance(content, dict):
        return {}
    for key in ("ema", "state_dict_ema", "model_ema", "model", "state_dict", "module"):
        if found := _tensors_in(content.get(key)):
            return found
    return {key: value for key, value in content.items() if isinstance(value, Tensor)}
