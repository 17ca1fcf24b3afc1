"""What a pass that was stopped goes on with: one file in its folder, whole or not there."""

import hashlib
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from visionattn.cli.files import first_line, forget_unfinished, write_whole

NAME = "progress.safetensors"
EVERY_SECONDS = 120.0
MOST_SHARE = 0.05
"""The share of the time that writing may take."""


class Snapshots:
    """The snapshots of one pass in its folder.

    Args:
        folder: it exists.
        model: its weights are part of what tells the pass from others.
        identity: JSON types that tell it from others.
    """

    def __init__(self, folder: Path, model: nn.Module, identity: dict[str, Any]):
        self.path, self.folder = folder / NAME, folder
        known = {"weights": digest(model)} | identity
        self.identity = json.dumps(known, sort_keys=True, default=str)
        self.last, self.took = time.perf_counter(), 0.0

    def due(self) -> bool:
        """Tell whether a snapshot is worth its time."""
        passed = time.perf_counter() - self.last
        return passed > max(EVERY_SECONDS, self.took / MOST_SHARE)

    def write(
        self, place: dict[str, Any], tensors: dict[str, Tensor], *, needed: bool = True
    ) -> None:
        """Write one in place of the last. Where there is no room for it, a warning says so, unless
        it is ``needed``: the pass itself goes on.

        Raises:
            OSError: it is needed and cannot be written; the last one stays.
        """
        begun = time.perf_counter()
        kept = {name: x.detach().to("cpu").contiguous() for name, x in tensors.items()}
        about = {"identity": self.identity, "place": json.dumps(place)}
        try:
            write_whole(self.path, lambda path: save_file(_apart(kept), path, about))
        except OSError as error:
            if needed:
                raise
            warnings.warn(
                f"{self.path} cannot be written ({first_line(error)}): a pass that is killed goes "
                "on from the last one that could",
                stacklevel=2,
            )
        self.last = time.perf_counter()
        self.took = self.last - begun

    def place(self) -> dict[str, Any] | None:
        """Return how far the last snapshot had come; None without one.

        Raises:
            ValueError: it is of another pass, or damaged.
        """
        found = self._read()
        return None if found is None else found[0]

    def load(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return place and tensors of the last snapshot; None without one. The tensors are views of
        the mapped file.

        Raises:
            ValueError: it is of another pass, or damaged.
        """
        forget_unfinished(self.path)
        return self._read()

    def _read(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                about = file.metadata() or {}
                if about.get("identity") != self.identity:
                    raise ValueError(
                        f"{self.folder} keeps the work of another image, model or options; delete "
                        "it or name another folder"
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return json.loads(about["place"]), tensors
        except (SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{self.path} is damaged; delete it to begin anew") from error

    def delete(self) -> None:
        """Delete the snapshot of a pass that is done."""
        self.path.unlink(missing_ok=True)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that share no memory, as the format wants them."""
    seen: set[int] = set()
    found = {}
    for name, x in tensors.items():
        place = x.untyped_storage().data_ptr()
        alone = place not in seen and x.numel() * x.element_size() == x.untyped_storage().nbytes()
        found[name] = x if alone or not x.numel() else x.clone()
        seen.add(place)
    return found


def digest(model: nn.Module) -> str:
    """Return a number that tells weights from others."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode())
        found.update(value.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()[:32]
