"""Weights on disk: a safetensors file that carries what is needed to rebuild its model, and the
reading of any weights.

This module owns the format of our weight files and ``DataSpec``, the contract between a model and
its images. It knows nothing of training.
"""

import json
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from visionattn.cli.files import first_line, write_whole

FORMAT = "visionattn"
FORMAT_VERSION = 2
READABLE_VERSIONS = ("1", "2")
"""Version 1 knew neither ``fit`` nor ``max_patches``: its images were resized and cropped."""
Fit = Literal["native", "pad", "stretch", "crop"]
"""How images of any size come to a model; ``visionattn.data.geometry`` says what each does."""
LOADING_ARGS = frozenset(
    {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
)
"""Arguments of ``timm.create_model`` that fetch weights; a file of weights has no need of them."""
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
UNBUILDABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
)
"""What a model of timm raises for arguments that it does not take, besides ``ValueError``."""


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
    """Mean per channel of images scaled to [0, 1]; empty for one-hot input."""
    std: tuple[float, ...]
    """Standard deviation per channel of images scaled to [0, 1]; empty for one-hot input."""
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

    def prepare(self, images: Tensor) -> Tensor:
        """Turn the values of image files into the model's input, on the device where they are.

        Args:
            images: ``[B, C, H, W]``, uint8, or float32 in [0, 1] where the files have more than 8
                bits; C is ``in_chans``, or 1 for ``grey_one_hot``, which takes uint8 alone.

        Returns:
            float32 ``[B, in_chans, H, W]``: ``(x - mean) / std`` for x in [0, 1], or one-hot grey
            levels.

        Raises:
            ValueError: another type, or another number of channels.
        """
        channels = 1 if self.encoding == "grey_one_hot" else self.in_chans
        types = [torch.uint8] if self.encoding == "grey_one_hot" else [torch.uint8, torch.float32]
        if images.dtype not in types or images.ndim != 4 or images.shape[1] != channels:
            wanted = "uint8 images" if len(types) == 1 else "images of uint8, or float32 in [0, 1],"
            raise ValueError(
                f"wanted {wanted} [B, {channels}, H, W], got {images.dtype} {list(images.shape)}"
            )
        if self.encoding == "grey_one_hot":
            levels = torch.arange(256, dtype=torch.uint8, device=images.device).view(1, 256, 1, 1)
            return (images == levels).to(torch.float32)
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
            types.
        spec: what its images are.
        notes: further metadata for the file.
    """
    metadata = {"format": FORMAT, "version": str(FORMAT_VERSION), "model": name}
    metadata |= {"args": json.dumps(args), "data": json.dumps(asdict(spec))}
    metadata |= notes or {}
    tensors = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    write_whole(path, lambda temporary: temporary.write_bytes(save(tensors, metadata=metadata)))


def load_model(path: str | Path, *, device: str | torch.device = "cpu") -> nn.Module:
    """Rebuild a model from a file of ``save_model``, in eval mode, with its ``DataSpec`` as
    ``model.data_spec``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is cut off, a pickle, of another project, or its tensors are not those
            of its model.
    """
    # What the file says of itself is checked before anything is built from it.
    metadata, tensors = read_safetensors(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} has no description of its model; weights of other projects go through "
            "--init-from"
        )
    if metadata.get("version") not in READABLE_VERSIONS:
        raise ValueError(
            f"{path} has format {metadata.get('version')}, this visionattn reads formats "
            f"{' and '.join(READABLE_VERSIONS)}"
        )
    try:
        name, args = metadata["model"], json.loads(metadata["args"])
        spec = json.loads(metadata["data"])
        spec = DataSpec(
            **{
                key: tuple(value) if isinstance(value, list) else value
                for key, value in spec.items()
            }
        )
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} has a garbled description of its model: {first_line(error)}"
        ) from error
    if not timm.is_model(name):
        raise ValueError(
            f"{path} holds a model {name!r}, which timm does not know; import the package that "
            "registers it"
        )
    # Arguments that load other weights could fetch any file: a checkpoint has no need of them.
    if loading := LOADING_ARGS.intersection(args):
        raise ValueError(
            f"{path} asks for other weights to be loaded ({', '.join(sorted(loading))}): refused"
        )
    try:
        with torch.random.fork_rng(devices=[]):
            model = timm.create_model(
                name, num_classes=spec.num_classes, in_chans=spec.in_chans, **args
            )
    except (*UNBUILDABLE, ValueError) as error:
        raise ValueError(
            f"{path} names a model {name!r} that cannot be built with these args: "
            f"{describe_args(args)} ({first_line(error)})"
        ) from error
    # Names and shapes are compared first, so that a misfit is one line.
    misfit = describe_misfit(tensors, model.state_dict())
    if misfit:
        raise ValueError(f"{path} does not fit the model {name!r} that it names: {misfit}")
    model.load_state_dict(tensors)
    model.data_spec = spec
    return model.to(device).eval()


def describe_args(args: dict[str, Any]) -> str:
    """Write arguments as they stand in a call."""
    return ", ".join(f"{key}={value!r}" for key, value in args.items()) or "none"


def describe_misfit(given: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """Say in one line how two state dicts differ in names and shapes; an empty string where they do
    not.
    """
    missing = [key for key in wanted if key not in given]
    unexpected = [key for key in given if key not in wanted]
    reshaped = [key for key in wanted if key in given and given[key].shape != wanted[key].shape]
    parts = [
        f"{len(keys)} {what} (first: {keys[0]})"
        for what, keys in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", reshaped),
        )
        if keys
    ]
    return ", ".join(parts)


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
    """Tell whether a file that safetensors cannot read is a whole pickle, alone or in torch's zip.

    Its first bytes do not tell: in a safetensors file they are the length of its head, which may be
    any number. So this follows the pickle to its end, which runs nothing of it.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return any(name.endswith("/data.pkl") for name in archive.namelist())
        with open(path, "rb") as file:
            return [opcode.name for opcode, *_ in pickletools.genops(file)][0] == "PROTO"
    except PermissionError:
        raise
    except (zipfile.BadZipFile, *UNREADABLE):
        return False


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
    except SafetensorError as error:
        tensors = _tensors_in(_read_other(path, error))
    if not tensors:
        raise ValueError(f"{path} holds no tensors by name")
    for wrapper in ("module.", "_orig_mod.", "module."):
        # A wrapper names all its model's tensors; a model with a part of that name has others too.
        if all(key.startswith(wrapper) for key in tensors if "." in key):
            tensors = {key.removeprefix(wrapper): value for key, value in tensors.items()}
    return tensors


def _read_other(path: Path, error: SafetensorError) -> Any:
    """Read what ``torch.save`` wrote; the error for a file in neither format names both."""
    try:
        return read_pickle(path)
    except ValueError as second:
        if is_pickle(path):
            raise
        raise ValueError(
            f"{path} is no whole file of weights (cut off or garbled): as safetensors: "
            f"{first_line(error)}; as a file of torch.save: {first_line(second.__cause__)}"
        ) from second


def _tensors_in(content: Any) -> dict[str, Tensor]:
    """Return the named tensors of a state dict: those that lie deepest under the usual keys."""
    if not isinstance(content, dict):
        return {}
    for key in ("ema", "state_dict_ema", "model_ema", "model", "state_dict", "module"):
        if found := _tensors_in(content.get(key)):
            return found
    return {key: value for key, value in content.items() if isinstance(value, Tensor)}
