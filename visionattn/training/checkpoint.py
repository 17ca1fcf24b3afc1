"""Start and resume a run: its states ``last.pt`` and ``previous.pt``, the metrics of its best
weights, and initial weights (a file, or a timm ViT converted by ``from_softmax``).

A state is a file of plain tensors and plain types, so reading it runs no code. It is written
atomically: to a temporary file, flushed, read back and renamed.
"""

import errno
import json
import math
import zipfile
import zlib
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from visionattn.cli.exit_codes import in_one_line
from visionattn.cli.files import first_line, flush_folder, write_whole
from visionattn.cli.untrusted import brief, from_json, refuse
from visionattn.data.data_checks import WHOLE
from visionattn.data.folder_walk import composed, listed
from visionattn.data.splits import Splits
from visionattn.model_config import ModelConfig
from visionattn.models.building import build_model, check_args
from visionattn.models.conversion import (
    NAME,
    OPTIONS,
    SOURCES,
    Converted,
    body_of,
    from_softmax,
    open_teacher,
)
from visionattn.models.mixed_blocks import places_of_blocks
from visionattn.models.registration import DEFAULTS, args_of_name, is_ours, split_args, with_head
from visionattn.models.weight_placement import place_weights
from visionattn.models.weights import (
    FORMAT,
    UNREADABLE,
    DataSpec,
    describe_misfit,
    described,
    existing,
    read_metadata,
    read_pickle,
)
from visionattn.training.config import TrainConfig
from visionattn.training.run_folder import LAST, PREVIOUS, flat
from visionattn.training.run_progress import Position

STATE_FORMAT, STATE_VERSION = "visionattn.state", 4
QUIET = frozenset({"resume", "overwrite", "output", "run", "show_batch", "log", "save_every"})
QUIET |= {"init_from", "parallel", "dist_timeout", "data.cache"}
"""Options that may change on resume without a message."""
BINDING = ("seed", "optim.name", "optim.layer_decay")
BINDING += ("data.name", "data.task", "data.val_fraction", "data.args", "data.fit")
BINDING += ("data.masks", "freeze", "monitor")
"""Options that must not change on resume: they affect the images, the optimizer's state or the
choice of the best weights.
"""
COUNTED = ("batch_size", "optim.accumulate", "data.batch_patches", "data.max_patches")
COUNTED += ("data.sampler", "data.crop", "data.crops")
"""Options that must not change within an epoch."""
SIZES = ("data.img_size", "data.img_size_choices")
"""Options that must not change within an epoch if images have many sizes."""
TRAINED = ("optim.", "loss.", "batch_size")
TRAINED += ("data.augment", "data.img_size_choices", "data.sampler", "data.crop")
"""Prefixes of options that affect only training steps."""
PARTS = ("train", "validation", "test")
"""Splits of a dataset, as fields of ``Splits``."""
FAMILY = ("attention", "relative", "temperature_init")
"""Options that a model name of this package passes on to a converted ViT."""
NONE_GIVEN = "remove it (--model.args '{}' clears the arguments of a configuration)"
"""Advice for model arguments that contradict the weights."""


def save_state(path: str | Path, state: dict[str, Any], *, previous: Path | None = None) -> None:
    """Write a state atomically.

    Args:
        path: the file.
        state: plain tensors and plain types.
        previous: new path of the existing file; None: replace it.

    Raises:
        OSError: the state cannot be written, or does not read back; ``path`` and ``previous`` are
            unchanged.
    """

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            torch.save({"format": STATE_FORMAT, "version": STATE_VERSION} | state, file)

    def read_back(temporary: Path) -> None:
        try:
            check_sums(temporary)
        except ValueError as error:
            raise OSError(
                errno.EIO, "the written file does not read back; check the disk"
            ) from error

    write_whole(path, write, check=read_back, previous=previous)
    flush_folder(Path(path).parent)


def check_sums(path: Path) -> None:
    """Raise ValueError if a checksum of a record of ``torch.save`` is wrong; ``torch.load`` does
    not check them.
    """
    try:
        with zipfile.ZipFile(path) as file:
            bad = file.testzip()
    except (*UNREADABLE, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is a truncated or damaged checkpoint: {first_line(error)}"
        ) from error
    if bad:
        raise ValueError(f"{path} is a truncated or damaged checkpoint: wrong checksum of {bad}")


def read_state(path: str | Path) -> dict[str, Any]:
    """Read a state that ``save_state`` wrote, to the CPU.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file cannot be read, would run code, or is not a state of this format; one
            line.
    """
    state = read_pickle(path)
    if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
        raise ValueError(f"{path} is not the state of a run")
    check_sums(Path(path))
    if state.get("version") != STATE_VERSION:
        raise ValueError(
            f"expected state format {STATE_VERSION}, got {brief(state.get('version'))} ({path}); "
            "resume with the visionattn that wrote it"
        )
    return state


class States:
    """``last.pt`` and ``previous.pt`` of a run folder.

    Attributes:
        step: the step of the newest state on the disk; None before the first one.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.step: int | None = None
        self._spoilt = False

    def exist(self) -> bool:
        """Tell whether a state after step 0 exists, readable or not."""
        return self.step != 0 and any((self.folder / name).is_file() for name in (LAST, PREVIOUS))

    def save(self, state: dict[str, Any]) -> None:
        """Write ``last.pt``; the former one becomes ``previous.pt`` unless it was unreadable.

        Raises:
            OSError: the state cannot be written; both files are unchanged.
        """
        previous = None if self._spoilt else self.folder / PREVIOUS
        save_state(self.folder / LAST, state, previous=previous)
        self._spoilt, self.step = False, state["position"]["step"]

    def load(self, model: nn.Module, name: str) -> tuple[dict[str, Any], list[str]]:
        """Return the newest readable state, and a line of explanation if it is not ``last.pt``.

        Raises:
            ValueError: no state can be read, or it is from another model; one line.
        """
        state, reason = self._read()
        if state is None:
            raise ValueError(f"nothing to resume from: {reason}; pass --overwrite to start over")
        misfit = describe_misfit(state["model"], model.state_dict())
        if state["name"] != name or misfit:
            raise ValueError(
                f"{self.folder} has the state of another model, {brief(state['name'])}, not of "
                f"this {name}: {misfit or 'another name'}"
            )
        self.step = state["position"]["step"]
        previous = self.folder / PREVIOUS
        return state, [f"{reason}; resumes from {previous}, step {self.step}"] if reason else []

    def _read(self) -> tuple[dict[str, Any] | None, str]:
        """Return the newest readable state, and the reason why a newer one cannot be read."""
        reasons = []
        for path in (self.folder / LAST, self.folder / PREVIOUS):
            try:
                state = read_state(path)
                self._spoilt = bool(reasons) and (self.folder / LAST).exists()
                return state, "; ".join(reasons)
            except FileNotFoundError:
                reasons.append(f"{path} is missing")
            except (OSError, ValueError) as error:
                reasons.append(in_one_line(error))
        return None, "; ".join(reasons)

    @cached_property
    def newest(self) -> dict[str, Any]:
        """Return the newest readable state without its tensors; empty if there is none."""
        state, _ = self._read()
        return {key: state[key] for key in ("name", "args", "config")} if state else {}

    def started_as(self, config: TrainConfig) -> ModelConfig:
        """Return the model of a resumed run: the state's converted model if the flags name its
        teacher again, else the model in the flags.

        Raises:
            ValueError: the flags would convert the teacher to another model; one line.
        """
        model, state = config.model, self.newest
        if not config.init_from or state.get("name") != NAME:
            return model
        if state["config"].get("init_from") != config.init_from:
            return model
        args = state["args"]
        for key, value in given_to_teacher(model).items():
            if key == "softmax_blocks":
                value = places_of_blocks(value, args["depth"])
            if args.get(key) != value:
                raise ValueError(
                    f"the run has model.args.{key} {brief(args.get(key))}, not {brief(value)}; "
                    "resume with the same"
                )
        return replace(model, name=NAME, args=state["config"]["model"]["args"])

    def batches(self, config: TrainConfig) -> dict[str, Any]:
        """Return the options of the newest state that ``batch_size auto`` determines: batch size
        and data with ``batch_patches``. Empty without a state.
        """
        if not self.newest:
            return {}
        was = self.newest["config"]
        data = replace(config.data, batch_patches=was["data"].get("batch_patches"))
        return {"batch_size": was["batch_size"], "data": data}

    def kept(self) -> str:
        """Name the saved state, for the end of an error message."""
        if self.step is None:
            return "no state was saved yet"
        return f"the state of step {self.step} is kept, --resume continues from it"


def check_options(
    old: dict[str, Any], new: dict[str, Any], *, amid_epoch: bool, done: bool
) -> list[str]:
    """Check the options of a resumed run against its state.

    Args:
        old: the configuration of the state, as a dict.
        new: the configuration of the resumed run.
        amid_epoch: the state is from the middle of an epoch, and counts its batches.
        done: all epochs are trained.

    Returns:
        A line for each changed option.

    Raises:
        ValueError: a changed option must not change, or affects only training when all epochs are
            done.
    """
    # Options unknown to the version that wrote the state count as defaults.
    defaults = asdict(TrainConfig())
    groups = {
        key: value | old.get(key, {}) for key, value in defaults.items() if isinstance(value, dict)
    }
    old = defaults | old | groups
    changed = differences(old, new)
    idle = [line.split()[0] for line in changed if line.split()[0].startswith(TRAINED)]
    if done and idle:
        raise ValueError(
            f"all {new['epochs']} epochs are done, so another {idle[0]} has no effect; remove it, "
            f"or pass --epochs {new['epochs'] + 1} to train on"
        )
    fit = new["data"]["fit"]
    native = fit == "native" or (fit is None and new["data"]["name"] in WHOLE)
    counted = COUNTED + (SIZES if native else ())
    for key in BINDING + (counted if amid_epoch else ()):
        group, _, name = key.rpartition(".")
        was, is_now = ((options[group] if group else options)[name] for options in (old, new))
        if was != is_now:
            until = " until the epoch is over" if key in counted else ""
            raise ValueError(f"the run has {key} {was}, not {is_now}; resume with the same{until}")
    had, has = old["optim"]["ema_decay"], new["optim"]["ema_decay"]
    refuse(
        (
            new["init_from"] not in (None, old["init_from"]),
            f"init_from {new['init_from']} applies only to a new run; a resumed run keeps its own "
            "weights; remove it",
        ),
        (
            bool(had) != bool(has),
            f"expected optim.ema_decay {had} as at the start of the run, got {has}; averaging "
            "cannot be switched on or off later",
        ),
    )
    return changed


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a line for each changed option, except ``QUIET`` ones."""
    before, after = flat(old), flat(new)
    return [
        f"  {key} is now {after.get(key)}, was {before.get(key)}"
        for key in after | before
        if key not in QUIET and before.get(key) != after.get(key)
    ]


def changes(old: dict[str, Any] | None, new: dict[str, Any] | None, splits: Splits) -> str:
    """Describe how the images of a state differ from the current ones; empty if they are equal.

    Args:
        old: ``Trainer.listing()`` of the state; None if it has none.
        new: the listing of the run.
        splits: the current images, for their names.
    """
    if old is None or new is None:
        return ""
    was, now = (list(map(composed, listing["class_names"])) for listing in (old, new))
    if was != now:
        gone, come = (listed(sorted({*a} - {*b})) or "none" for a, b in ((was, now), (now, was)))
        return f"missing classes: {gone}; new classes: {come}; or another order"
    words = []
    for part in PARTS:
        held = [listing.get(part, torch.empty(0)) for listing in (old, new)]
        if len(held[0]) != len(held[1]):
            words.append(f"{len(held[1])} {part} images instead of {len(held[0])}")
        elif places := (held[0] != held[1]).nonzero().flatten().tolist():
            names = ", ".join(getattr(splits, part).name(place) for place in places[:3])
            more = ", ..." if len(places) > 3 else ""
            words.append(f"{len(places)} of {len(held[0])} {part} images differ ({names}{more})")
    return "; ".join(words)


@dataclass(frozen=True)
class BestFigures:
    """The metrics in the file of the best weights."""

    epoch: int
    """Counted from 1."""
    score: float | None
    """The score on the validation images, in [0, 1]; None for images without classes."""
    loss: float
    """Loss on the validation images."""

    @property
    def rank(self) -> tuple[float, float]:
        """Return the metrics as ``best`` and ``best_loss`` of ``Position``."""
        return -1.0 if self.score is None else self.score, self.loss

    def notes(self) -> dict[str, str]:
        """Return the metrics as metadata of the file."""
        return {"validation": json.dumps([self.epoch, self.score, self.loss])}


def best_figures(path: Path) -> BestFigures | None:
    """Read the metrics of the best weights from their file; None if it holds none.

    Raises:
        FileNotFoundError, ValueError: the file is missing or unreadable.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    notes = read_metadata(path).get("validation")
    if not notes:
        return None
    return BestFigures(*from_json(tuple[int, float | None, float], notes, f"validation of {path}"))


def recall_best(position: Position, path: Path) -> list[str]:
    """Set the best metrics of ``position`` from the file of the best weights, which may be newer
    than the state.

    Returns:
        A line if the file is missing or damaged; the weights of the next epoch then replace it.
    """
    if not position.best_epoch and not path.exists():
        return []
    try:
        found = best_figures(path)
    except (FileNotFoundError, ValueError) as error:
        position.best, position.best_loss, position.best_epoch = -1.0, math.inf, 0
        return [f"{error}; the weights of the next epoch replace it"]
    if found:
        position.best, position.best_loss = found.rank
        position.best_epoch = found.epoch
    return []


def started_model(
    config: TrainConfig, model: ModelConfig, spec: DataSpec, *, first: bool = True
) -> tuple[nn.Module, ModelConfig, dict[str, Any], list[str]]:
    """Build the model of a run with its initial weights.

    Args:
        config: the run; only ``init_from`` counts.
        model: the model to build; the body of a teacher replaces it.
        spec: the specification of the images.
        first: this process gives the others its weights; only it needs initialized weights.

    Returns:
        The model; its configuration (``converted_vit`` with all arguments for a teacher's body);
        its arguments as ``build_model`` returns them; and lines about the weights.

    Raises:
        ValueError, FileNotFoundError: wrong model or weights; one line.
    """
    source = config.init_from
    wants_head = spec.task == "segmentation" or split_args(model.args)[0]
    if wants_head and not _has_head(source):
        return _on_started_body(config, model, spec, first)
    if source is None:
        if model.name == NAME and "embed_dim" not in model.args:
            raise ValueError(
                f"{NAME} needs a teacher; pass --init-from with a timm name such as "
                "vit_small_patch16_224, or a file"
            )
        made, args = build_model(model, spec)
        return made, model, args, []
    if is_teacher(source, model.name):
        vit, lines = open_teacher(source, pretrained=True)
        converted = converted_for(vit, model, spec)
        lines += [*converted.lines(), *_other_values(converted.spec, spec)]
        chosen = replace(model, name=NAME, args=converted.args)
        if model.grad_checkpointing:
            converted.model.set_grad_checkpointing(True)
        return converted.model, chosen, converted.args, lines
    if model.name == NAME:
        held = _args_in(source)
        for key, asked in model.args.items():
            if key in held and key not in OPTIONS and held[key] != asked:
                raise ValueError(
                    f"expected model.args {key} {brief(held[key])} as in the initial weights, got "
                    f"{brief(asked)}; {NONE_GIVEN}"
                )
        model = replace(model, args=held | model.args)
    made, args = build_model(model, spec)
    return made, model, args, place_weights(made, model.name, source).lines() if first else []


def _has_head(source: str | None) -> bool:
    """Tell whether a file holds a model with a head on patch features."""
    metadata = _metadata(source) if source else {}
    if not metadata:
        return False
    _, args, spec = described(metadata, source)
    return spec.task == "segmentation" or bool(split_args(args)[0])


def _on_started_body(
    config: TrainConfig, model: ModelConfig, spec: DataSpec, first: bool
) -> tuple[nn.Module, ModelConfig, dict[str, Any], list[str]]:
    """Build a model with a new head on patch features; its body starts like a classifier's."""
    head, rest = split_args(model.args)
    body_model = replace(model, args=rest)
    body_spec = replace(spec, task="classification", num_classes=0, class_names=())
    body, chosen, args, lines = started_model(config, body_model, body_spec, first=first)
    made = with_head(body, spec.task, spec.num_classes, head)
    return made, replace(chosen, args=chosen.args | head), args | head, lines


def is_teacher(source: str, name: str) -> bool:
    """Tell whether the model ``name`` of this package starts from a timm ViT with known body, given
    by timm's name or by a file of ``visionattn train``.
    """
    if not (timm.is_model(name) and is_ours(name)):  # is_ours takes only timm's names
        return False
    if not Path(source).is_file():
        return source.startswith(SOURCES) or timm.is_model(source)
    held = _metadata(source).get("model", "")
    return timm.is_model(held) and not is_ours(held)


def _metadata(source: str) -> dict[str, str]:
    """Return the metadata of a safetensors file of this package; empty for others and for names."""
    try:
        found = read_metadata(source) if Path(source).is_file() else {}
    except ValueError:
        return {}
    return found if found.get("format") == FORMAT else {}


def _args_in(source: str) -> dict[str, Any]:
    """Return the arguments of the converted model in a file.

    Raises:
        ValueError: the file holds no arguments.
    """
    metadata = _metadata(str(existing(source)))
    if metadata.get("model") != NAME:
        raise ValueError(
            f"{source} does not name the model of its weights; convert it first: `visionattn "
            f"convert {source} --model NAME --output FILE`"
        )
    return described(metadata, source)[1]


def converted_for(vit: nn.Module, model: ModelConfig, spec: DataSpec) -> Converted:
    """Convert a teacher to the model to train.

    Args:
        vit: the teacher.
        model: a name of this package with the width and depth of the teacher, which sets attention
            and relative position; or ``converted_vit``, for any teacher. Its arguments go to
            ``from_softmax``.
        spec: the channels and classes of the images.

    Raises:
        ValueError: the teacher cannot be converted, or has another size; one line.
    """
    check_args(model)
    body, family = body_of(vit), DEFAULTS[model.name.partition(".")[0]]
    given = given_to_teacher(model)
    for key, wanted in {"embed_dim": "wide", "depth": "deep"}.items():
        has = body[key]
        asked = given.pop(key, family.get(key))
        if asked is not None and asked != has:
            other = f"choose a model of this size, or {NAME}, which adopts it"
            raise ValueError(
                f"expected a model {has} {wanted}, as the initial weights, got {asked} "
                f"({model.name}); {NONE_GIVEN if model.name == NAME else other}"
            )
    return from_softmax(vit, **given, num_classes=spec.num_classes, in_chans=spec.in_chans)


def given_to_teacher(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of ``from_softmax`` for a model name and its arguments."""
    family = args_of_name(model.name, model.args)
    return {key: family[key] for key in FAMILY if key in family} | model.args


def _other_values(teachers: DataSpec, spec: DataSpec) -> list[str]:
    """Return a line if the teacher was trained with another normalization than the run's."""
    if (teachers.mean, teachers.std) == (spec.mean, spec.std) or spec.encoding is not None:
        return []
    mean, std = (" ".join(f"{x:g}" for x in of) for of in (teachers.mean, teachers.std))
    return [
        f"  the teacher was trained with other mean and std: --data.mean {mean} --data.std {std}"
    ]
