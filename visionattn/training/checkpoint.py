"""The full state of a run in a file, and weights from elsewhere placed into a model.

The format of ``last.pt`` is defined here: plain tensors and plain types, so that reading it runs no
code. ``models/weights.py`` has the files of weights alone.
"""

import errno
import random
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from visionattn.cli.files import first_line, flush_folder, write_whole
from visionattn.cli.untrusted import brief, check_partly, checked
from visionattn.models.conversion import adapt_channels, filter_checkpoint
from visionattn.models.state_dicts import shape, shorten
from visionattn.models.weights import (
    UNREADABLE,
    describe_misfit,
    read_pickle,
    read_state_dict,
    same_kind,
)
from visionattn.training.config import TrainConfig
from visionattn.training.progress import Position, Window

FORMAT = "visionattn.state"
FORMAT_VERSION = 3
READABLE_VERSIONS = (2, 3)
"""Version 2 held the arguments of the model that were given, without defaults."""


def save_state(path: str | Path, state: dict[str, Any], *, previous: Path | None = None) -> None:
    """Write a state of plain tensors and plain types; the file appears whole or not at all.

    Args:
        path: the file. The state is written beside it, flushed to the disk and read back before it
            takes this name.
        state: what ``load_state`` gives back.
        previous: where the file that has the name until then goes; None: it is replaced.

    Raises:
        OSError: it cannot be written, or does not read back; ``path`` and ``previous`` are as they
            were.
    """
    path = Path(path)

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, "version": FORMAT_VERSION} | state, file)

    write_whole(path, write, check=read_back, previous=previous)
    flush_folder(path.parent)


def read_back(path: Path) -> None:
    """Raise OSError unless the file loads, and every byte that ``torch.save`` wrote reads back."""
    try:
        check_sums(path)
        torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except ValueError as error:
        raise OSError(errno.EIO, "what was written does not read back") from error


def check_sums(path: Path) -> None:
    """Raise ValueError unless the checksums that ``torch.save`` keeps of its records are right;
    ``torch.load`` does not check them.
    """
    try:
        with zipfile.ZipFile(path) as file:
            bad = file.testzip()
    except PermissionError:
        raise
    except (*UNREADABLE, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is no whole checkpoint (cut off or garbled): {first_line(error)}"
        ) from error
    if bad:
        raise ValueError(f"{path} is no whole checkpoint (cut off or garbled): wrong sum of {bad}")


def read_state(path: str | Path) -> dict[str, Any]:
    """Read what ``save_state`` wrote, on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, would run code, is no state, or one of another format or with
            something garbled; one line.
    """
    state = read_pickle(path)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not the state of a run")
    check_sums(Path(path))
    if state.get("version") not in READABLE_VERSIONS:
        raise ValueError(
            f"{path} has format {brief(state.get('version'))}, this visionattn reads formats "
            f"{', '.join(map(str, READABLE_VERSIONS))}"
        )
    try:
        check_content(state)
    except ValueError as error:
        raise ValueError(f"{path} is a garbled state of a run: {error}") from error
    return state


class _OldConfig(TypedDict):
    """What a state says of the options that it was saved with."""

    model: dict[str, Any]
    data: dict[str, Any]
    optim: dict[str, Any]


class _Optimizer(TypedDict):
    """What is kept of an optimiser; what is kept of a weight, by its number."""

    state: dict[int, dict[str, Tensor]]
    param_groups: list[dict[str, object]]


class _Random(TypedDict):
    """The states of the global generators, as ``random_state`` returns them."""

    torch: Tensor
    cuda: list[Tensor]
    numpy: tuple[str, Tensor, int, int, float]
    python: tuple[int, list[int], float | None]


class _Listing(TypedDict):
    """What tells the images of a run from others: a number for each."""

    class_names: list[str]
    train: Tensor
    validation: Tensor
    test: NotRequired[Tensor]


class _State(TypedDict):
    """What a state of a run must have; ``data`` is for people."""

    name: str
    args: dict[str, Any]
    config: _OldConfig
    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    optimizer: _Optimizer
    scaler: dict[str, Any]
    position: Position
    window: Window
    history: list[dict[str, int | float | None]]
    images: NotRequired[tuple[int, int]]
    listing: NotRequired[_Listing | None]
    unreadable: list[str]
    random: _Random


def check_content(state: dict[str, Any]) -> None:
    """Check that a state has all that a run goes on from, of the right types, and that its parts go
    together.

    Raises:
        ValueError: one line with the key, what was wanted and what came.
    """
    found = checked(_State, state, "state", nan=True)
    check_partly(TrainConfig, state["config"], "state.config")
    position: Position = found["position"]
    for part in ("position", "window"):
        for key, value in state[part].items():
            least = -1 if key == "best" else 0
            if not value >= least:
                raise ValueError(f"state.{part}.{key} must be at least {least}, got {brief(value)}")
    if position.epoch != len(state["history"]):
        raise ValueError(
            f"state.position.epoch is {position.epoch}, and state.history has "
            f"{len(state['history'])} epochs"
        )
    for number, row in enumerate(state["history"], start=1):
        if row.get("epoch") != number:
            raise ValueError(f"epoch {number} of state.history is {brief(row.get('epoch'))}")
    if bool(state["config"]["optim"].get("ema_decay")) != (state["ema"] is not None):
        raise ValueError("state.ema does not go with state.config.optim.ema_decay")
    listing = state.get("listing") or {}
    for part in ("train", "validation", "test"):
        numbers = listing.get(part)
        if numbers is not None and (numbers.ndim != 1 or numbers.dtype != torch.int64):
            raise ValueError(f"state.listing.{part} must be a whole number for each image")
    check_random_state(state["random"])


def check_random_state(state: dict[str, Any]) -> None:
    """Raise ValueError where the states of the generators are none; numpy and Python do not check
    all of them.
    """
    own, (kind, keys, position, _, _) = state["torch"], state["numpy"]
    version, internal, _ = state["python"]
    right = {
        "torch": own.dtype == torch.uint8 and own.shape == torch.get_rng_state().shape,
        "numpy": kind == "MT19937"
        and keys.dtype == torch.int64
        and keys.shape == (624,)
        and _are_words(keys.tolist())
        and 0 <= position <= 624,
        "python": version == 3
        and len(internal) == 625
        and _are_words(internal)
        and internal[-1] <= 624,
    }
    for name, is_right in right.items():
        if not is_right:
            raise ValueError(f"state.random.{name} is no state of a generator")


def _are_words(numbers: list[int]) -> bool:
    """Tell whether numbers fit into 32 bits."""
    return min(numbers) >= 0 and max(numbers) < 2**32


def check_state(state: dict[str, Any], path: str | Path, model: nn.Module, name: str) -> None:
    """Raise ValueError unless the state, which comes from ``path``, is one of this model in this
    format.
    """
    misfit = describe_misfit(state["model"], model.state_dict())
    if state["ema"] is not None and not misfit:
        misfit = describe_misfit(state["ema"], model.state_dict())
    if state["name"] != name or misfit:
        reason = misfit or "another name"
        raise ValueError(
            f"{path} is the state of another model, {brief(state['name'])}, not of this {name}: "
            f"{reason}"
        )


def random_state() -> dict[str, Any]:
    """Return the state of every global generator, as plain tensors and plain types."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],  # type: ignore[attr-defined]
        "python": [version, list(internal), gauss],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set every global generator to what ``random_state`` returned."""
    try:
        torch.set_rng_state(state["torch"])
    except RuntimeError as error:
        raise ValueError(
            f"state.random.torch is no state of a generator: {first_line(error)}"
        ) from error
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


@dataclass(frozen=True)
class Placement:
    """Where the tensors of a file went in a model."""

    source: str
    """The file."""
    placed: list[str]
    """Names in the model that got their values, resampled ones included."""
    resampled: list[str]
    """Names among those, with shapes, whose values were interpolated."""
    missing: list[str]
    """Names in the model that keep their initial values."""
    unused: list[str]
    """Names in the file that found no place."""

    def lines(self) -> list[str]:
        """Put the placement into a compact list for people."""
        head = (
            f"{len(self.placed)} of {len(self.placed) + len(self.missing)} tensors start from "
            f"{self.source}"
        )
        parts = (
            ("resampled", self.resampled),
            ("keep their initial values", self.missing),
            ("not used", self.unused),
        )
        lines = [f"  {what} ({len(names)}): {shorten(names)}" for what, names in parts if names]
        if any(".output_gate." in name for name in self.missing):
            lines.append(
                "  output gates that start near 0 let little through of the attention that is "
                "placed; --model.args.output_gate false has none"
            )
        return [head, *lines]


def place_weights(model: nn.Module, name: str, path: str | Path) -> Placement:
    """Start a model from weights of another head, patch size, image size or number of channels, as
    far as they fit.

    The model's ``checkpoint_filter_fn`` renames and resamples; what has another shape after it
    stays as it is in the model.

    Args:
        model: changed in place.
        name: its timm name.
        path: weights of ours, or a state dict of a timm model.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, would run code, or nothing of it fits.
    """
    # The model's own filter renames and resamples; filters of another number of channels are
    # adapted after it.
    given = read_state_dict(path)
    filtered = filter_checkpoint(given, model, name)
    wanted = model.state_dict()
    for key, value in filtered.items():
        if key.endswith("patch_embed.proj.weight") and key in wanted and value.ndim == 4:
            channels = wanted[key].shape[1]
            if (
                value.shape[1] != channels
                and value.shape[0] == wanted[key].shape[0]
                and 3 in (value.shape[1], channels)
            ):
                filtered[key] = adapt_channels(value, channels)
    own = {value.data_ptr() for value in wanted.values()}
    filtered = {
        key: value for key, value in filtered.items() if value.data_ptr() not in own
    }  # fillers, not of the file
    # What has another shape now stays in the model as it is, and is listed.
    fitting = {
        key: value
        for key, value in filtered.items()
        if key in wanted and value.shape == wanted[key].shape and same_kind(value, wanted[key])
    }
    placed = [key for key in wanted if key in fitting]
    if not any(fitting[key].ndim > 1 for key in placed):
        raise ValueError(
            f"nothing of {path} fits the model {name}: {describe_misfit(filtered, wanted)}"
        )
    # For the list: which tensors of the file were used, under whatever name, and which were
    # resampled.
    origins = {id(value): key for key, value in given.items()}
    used = {origins.get(id(filtered[key]), key) for key in placed}
    resampled = [
        f"{key} {shape(given[key])} -> {shape(fitting[key])}"
        for key in placed
        if key in given and given[key].shape != fitting[key].shape
    ]
    model.load_state_dict(fitting, strict=False)
    missing = [key for key in wanted if key not in fitting]
    return Placement(
        str(path), placed, resampled, missing, [key for key in given if key not in used]
    )
