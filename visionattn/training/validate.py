"""Run ``visionattn validate``: evaluate a checkpoint at several image sizes."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from visionattn.cli.exit_codes import is_out_of_memory
from visionattn.cli.files import check_free, write_text
from visionattn.cli.parsing import field_types, flags_of, parse
from visionattn.cli.progress import Progress
from visionattn.cli.provenance import provenance
from visionattn.cli.untrusted import refuse
from visionattn.data.buckets import cell_px
from visionattn.data.data_config import DataConfig
from visionattn.data.folder_walk import listed
from visionattn.data.geometry import Geometry, check_geometry, pixels, sides
from visionattn.data.mask_files import check_judged
from visionattn.data.mask_values import said_of_masks
from visionattn.data.option_ranges import check_signs
from visionattn.data.splits import eval_batches, images_to_judge
from visionattn.data.synthetic_images import seen_as
from visionattn.model_config import Task
from visionattn.models.building import check_geometries, patch_size
from visionattn.models.cost import (
    FEW_PIXELS,
    Expected,
    ForwardMemory,
    Passes,
    Shape,
    describe,
    images_that_fit,
)
from visionattn.models.devices import pick_device, precision_taken
from visionattn.models.patches import takes_sizes
from visionattn.models.weights import DataSpec, existing, load_model
from visionattn.training.config import ValidateConfig, parse_train
from visionattn.training.evaluate import Evaluation, OutputEvaluation, evaluate
from visionattn.training.output_scores import told
from visionattn.training.run_folder import CONFIG
from visionattn.training.training_cost import known, largest_images, largest_shape, loading_bytes

COLUMNS = {
    "classification": ("size", "images", "accuracy", "top-5", "images/s"),
    "segmentation": ("size", "images", "mean IoU", "pixels", "images/s"),
    "generate": ("size", "images", "bits/dim", "images/s"),
    "multilabel": ("size", "images", "mAP", "F1", "images/s"),
    "regression": ("size", "images", "R2", "MAE", "RMSE", "images/s"),
}
"""Headings of the table by task; ``pixels`` is the pixel accuracy."""


@dataclass(frozen=True)
class SizeResult:
    """The result at one image size."""

    img_size: int | tuple[int, int] | None
    """Size in pixels; None for native image sizes."""
    result: Evaluation | None
    """The evaluation at this size; None if it ran out of memory."""
    task: Task = "classification"
    """The task of the model."""

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the printed row, for ``COLUMNS``."""
        size = {None: "own"}.get(self.img_size, str(self.img_size))
        if isinstance(self.img_size, tuple):
            size = "x".join(map(str, self.img_size))
        if self.result is None:
            return (size, "out of memory")
        result, speed = self.result, f"{self.result.images_per_second:.4g}"
        if self.task == "generate":
            return (size, str(result.images), f"{result.loss:.4f}", speed)
        if isinstance(result, OutputEvaluation):
            means = [told(value, name) for name, value in result.outputs.means.items()]
            return (size, str(result.images), *means, speed)
        second = result.top5 if result.ious is None else result.accuracy
        shares = ("-" if x is None else f"{100 * x:.2f} %" for x in (result.score, second))
        return (size, str(result.images), *shares, speed)

    def details(self, spec: DataSpec) -> list[str]:
        """Return a table with the metrics of each output, or of each class of pixels."""
        columns: Mapping[str, Sequence[float | None]]
        if isinstance(self.result, OutputEvaluation):
            columns = self.result.outputs.columns
        elif self.result and self.result.ious and self.result.average_precisions:
            columns = {"IoU": self.result.ious, "AP": self.result.average_precisions}
        else:
            return []
        names = spec.output_names
        width = max(map(len, names))
        rows = [f"{'':{width}} {align(list(columns))}"]
        for name, *values in zip(names, *columns.values(), strict=True):
            cells = [told(value, key) for key, value in zip(columns, values, strict=True)]
            rows.append(f"{name:{width}} {align(cells)}")
        return rows


def parse_validate(argv: Sequence[str]) -> ValidateConfig:
    """Read the flags of ``visionattn validate``. Data options that are not given come from the
    run's ``config.yaml``.

    Raises:
        ValueError, FileNotFoundError: wrong flag, missing checkpoint, or unknown data; one line.
    """
    # Find the checkpoint before parsing all flags, because its run sets defaults.
    given = flags_of(argv, field_types(ValidateConfig))
    defaults: dict[str, Any] = {}
    trained_on = None
    if "checkpoint" in given:
        path = existing(given["checkpoint"])
        beside = path.with_name(CONFIG)
        if beside.is_file():
            run = parse_train(["--config", str(beside)])
            # Another dataset keeps only the options of the run that mean the same for it.
            keep = (
                asdict(run.data)
                if given.get("data.name", run.data.name) == run.data.name
                else {key: getattr(run.data, key) for key in OF_ANY_DATA}
            )
            defaults = {f"data.{key}": keep[key] for key in keep if key not in IDLE}
            # Whole images may be much larger than the crops of a training batch.
            batch_size = run.batch_size if run.data.crop is None else "auto"
            defaults |= {"seed": run.seed, "batch_size": batch_size}
            files = [
                [os.path.realpath(data.get(f"data.{key}") or "") for key in ("root", "labels")]
                for data in (defaults, defaults | given)
            ]
            if files[0] != files[1]:
                # Groups and folds divide the training images.
                defaults |= {"data.group_from": None, "data.fold": None}
            trained_on = run.data
        elif "data.name" not in given:
            raise ValueError(
                f"{beside} does not exist; expected --data.name, such as --data.name folder "
                "--data.root FOLDER"
            )
    config = parse(
        ValidateConfig,
        argv,
        command="validate",
        description="Evaluate a checkpoint at several image sizes.",
        example="--checkpoint checkpoints/digits/best.safetensors --img-size 32 48 64",
        defaults=defaults,
    )
    # The checkpoint and the flags set the preprocessing; options of the run's data are ignored.
    usual = {f"data.{key}": value for key, value in asdict(DataConfig()).items()} | defaults
    refuse(
        (config.checkpoint is None, "expected --checkpoint: the best.safetensors of a run"),
        *(
            (
                getattr(config.data, key) != usual[f"data.{key}"] or f"data.{key}" in given,
                f"data.{key} applies only to training; pass {flag} instead",
            )
            for key, flag in SEEN.items()
        ),
        *(
            (
                getattr(config.data, key) != usual[f"data.{key}"],
                f"data.{key} applies only to training; remove it",
            )
            for key in IDLE
        ),
    )
    if config.split is None and trained_on and _same_root(config.data, trained_on):
        return replace(config, split="val")
    return config


def _same_root(data: DataConfig, other: DataConfig) -> bool:
    """Tell whether both name the same table and the same folder of images, by any path."""
    folders = (data.name, other.name) == ("folder", "folder") and data.labels == other.labels
    return folders and os.path.realpath(data.root or "") == os.path.realpath(other.root or "")


SEEN = {
    "fit": "the resizing with --fit",
    "img_size": "the sizes to evaluate at with --img-size",
    "img_size_choices": "the sizes to evaluate at with --img-size",
    "max_patches": "the most patches with --max-patches",
}
"""Data options of a training that have their own flags here."""


IDLE = ("augment", "sampler", "crop", "crop_around", "crops", "features", "mean", "std")
"""Data options of a training without effect on an evaluation; the weights have mean and std."""


OF_ANY_DATA = ("root", "val_fraction", "on_error", "cache", "workers")
"""Data options of a training that mean the same for another data set."""


class Validation:
    """A checkpoint and the images to evaluate it on, after all checks.

    Args:
        config: the result of ``parse_validate``.

    Attributes:
        split: the evaluated images: ``train``, ``validation``, ``test`` or ``all``.

    Raises:
        ValueError, FileNotFoundError: wrong or mismatched checkpoint, data, sizes or device; one
            line.
    """

    def __init__(self, config: ValidateConfig):
        batch_size = None if config.batch_size == "auto" else config.batch_size
        check_signs({"batch_size": batch_size, "threads": config.threads}, {"seed": config.seed})
        if config.json:
            check_free(Path(config.json), overwrite=True)
        if config.threads:
            torch.set_num_threads(config.threads)
        self.device = pick_device(config.device)
        self.config = replace(config, amp=precision_taken(config.amp, self.device))
        self.model: nn.Module = load_model(config.checkpoint, device=self.device)
        self.spec: DataSpec = self.model.data_spec
        self.geometries = self._find_geometries()
        check_geometries(self.model, self.geometries)
        self.split, self.dataset = self._find_images(config.data)
        self.notes: list[str] = []
        self.expected: Expected | None = None
        self.config = self._fitting(config)

    def _fitting(self, config: ValidateConfig) -> ValidateConfig:
        """Return the options with a number for ``batch_size auto``: the most images of the largest
        size that fit.

        Raises:
            DoesNotFit: a batch clearly does not fit into memory.
            ValueError: the memory of the model is unknown.
        """
        first, data = self.geometries[0], config.data

        def beside(shape: Shape) -> int:
            return loading_bytes(data, self.dataset, self.spec, shape)

        leaves_out = first.fit == "pad" and takes_sizes(self.model)
        flag = "--data.batch_patches {patches}" if first.canvas is None else "--batch-size {images}"
        self.passes = Passes(
            self.model.eval(), self.spec, self.device, self.config.amp, leaves_out=leaves_out
        )
        memory = ForwardMemory(
            self.passes,
            first.patch_px,
            cell_px(first),
            beside,
            native=first.canvas is None,
            batches=flag,
        )
        if config.batch_size == "auto":
            size, _ = largest_images(self.dataset, tuple(self.geometries))
            number = memory.auto(size, len(self.dataset))
            self.notes.append(images_that_fit(number, size))
            if first.canvas is None:
                data = replace(data, batch_patches=number * (math.prod(size) // cell_px(first)))
            config = replace(config, batch_size=number, data=data)
        self.shapes = [
            known(
                eval_batches(
                    self.dataset, data, batch_size=config.batch_size, geometry=geometry
                ).shapes()
            )
            for geometry in self.geometries
        ]
        if not any(map(len, self.shapes)):  # no image of known size to try
            return config
        shape = largest_shape(np.concatenate(self.shapes))
        self.expected = memory.check(shape, memory.bytes_of(shape))
        return config

    def outlook(self) -> Iterator[str]:
        """Yield lines with the value of ``batch_size auto`` and the estimated cost, measured by a
        trial; nothing for a short evaluation.
        """
        yield from self.notes
        seen = np.concatenate(self.shapes)
        if self.expected is None or seen.prod(1).sum() <= FEW_PIXELS:
            return
        first, shape = self.geometries[0], largest_shape(seen)
        each = self.passes.forward_seconds(shape, first.patch_px)
        yield describe(
            seen[:, 1:],
            len(self.dataset),
            cell_px(first, self.spec.encoding),
            self.expected,
            None if each is None else each * float(seen.prod(1).sum()) / math.prod(shape[1:]),
            sizes=sum(len(shapes) > 0 for shapes in self.shapes),
        )

    def _find_geometries(self) -> list[Geometry]:
        """Return the preprocessing: as in training, unless flags change it."""
        config, spec = self.config, self.spec
        fit, max_patches = config.fit or spec.fit, config.max_patches
        if max_patches is None and config.img_size is None and fit == "native":
            max_patches = spec.max_patches
        usual = spec.img_size if max_patches is None else None
        found = []
        for size in config.img_size or [usual]:
            check_geometry(fit, size, max_patches)
            found.append(Geometry(fit, sides(size), max_patches, patch_size(self.model)))
        return found

    def about(self) -> str:
        """Return a line with checkpoint, images and preprocessing."""
        images = {"all": "all", "train": "the training"}.get(self.split, f"the {self.split}")
        data = self.config.data
        place = data.root if data.name == "folder" else data.name
        where = f"{self.config.checkpoint} on {images} images of {place}"
        return f"{where}; preprocessing: {self.describe()}"

    def describe(self) -> str:
        """Return the preprocessing in words, with the size if there is only one."""
        first, *others = self.geometries
        seen = f"{first.fit}, at several sizes" if others else seen_as(self.dataset, first)
        if first.fit == "pad" and not takes_sizes(self.model):
            seen += "; this model sees the padding as black"
        return seen

    def _find_images(self, data: DataConfig) -> tuple[str, Dataset]:
        # Options stored with the weights also apply to other folders.
        known: dict[str, Any] = {
            key: getattr(self.spec, key)
            for key in ("bands", "value_range", "page")
            if data.name == "folder" and getattr(data, key) is None
        }
        if self.spec.task != "classification":
            known["task"] = self.spec.task
        if self.spec.task == "segmentation" and data.name == "folder":
            known["masks"] = self._meaning_of_masks(data)
        data = replace(data, **known)
        # Passed as choices of a training, all sizes are checked now, not one by one later.
        first = self.geometries[0]
        if first.fit != "native" and data.batch_patches is not None and self.spec.fit != "native":
            raise ValueError(
                f"data.batch_patches needs fit native, got {first.fit}; pass batch_size instead"
            )
        found, spec = images_to_judge(
            replace(
                data,
                fit=first.fit,
                img_size=None if first.img_size is None else list(first.img_size),
                img_size_choices=[min(each.img_size) for each in self.geometries if each.img_size]
                or None,
                max_patches=first.max_patches,
                batch_patches=data.batch_patches if first.fit == "native" else None,
            ),
            self.config.seed,
            self.spec.class_names,
        )
        for key in ("task", "num_classes", "class_names", "in_chans", "encoding"):
            own, other = getattr(self.spec, key), getattr(spec, key)
            if own != other and not (key == "class_names" and not (own and other)):
                what = key.replace("_", " ")
                raise ValueError(
                    f"the checkpoint does not fit the data: expected {what} {brief(own)}, got "
                    f"{brief(other)}"
                )
        split = self.config.split
        usual = next(name for name in ("all", "test", "validation", "train") if name in found)
        chosen = usual if split is None else {"val": "validation"}.get(split, split)
        if chosen not in found:
            there = ", ".join("val" if name == "validation" else name for name in found)
            raise ValueError(
                f"{data.root or data.name} has no images for --split {split}; choose from {there}"
            )
        check_judged(found[chosen], self.spec, chosen)
        return chosen, found[chosen]

    def _meaning_of_masks(self, data: DataConfig) -> dict[str, Any]:
        """Return ``data.masks``, with missing values from the weights."""
        said, colours = said_of_masks(data), self.spec.colours
        if not (said.layers or said.classes or said.colours):
            said = replace(said, classes=list(self.spec.output_names))
        if colours and said.colours is None and len(said.classes or colours) == len(colours):
            said = replace(said, colours=list(map(list, colours)))
        return {key: value for key, value in asdict(said).items() if value is not None}

    def rows(self) -> Iterator[SizeResult]:
        """Yield the evaluation at each size."""
        for geometry in self.geometries:
            batches = eval_batches(
                self.dataset,
                self.config.data,
                batch_size=self.config.batch_size,
                geometry=geometry,
            )
            what = f"{pixels(geometry.img_size)}" if geometry.img_size else ""
            try:
                with (
                    Progress(len(self.dataset), what=what) as progress,
                    progress.within(self.model, self.config.batch_size),
                ):
                    result = evaluate(
                        self.model,
                        progress.over(batches, lambda batch: len(batch.labels)),
                        self.spec,
                        device=self.device,
                        amp=self.config.amp,
                    )
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                result = None
            size = geometry.img_size
            side = size[0] if size and size[0] == size[1] else size
            yield SizeResult(side, result, self.spec.task)

    def save(self, rows: Sequence[SizeResult]) -> None:
        """Write the rows and their provenance to the file that ``config.json`` names."""
        table = [
            {"img_size": row.img_size}
            | (asdict(row.result) if row.result else {"error": "out of memory"})
            for row in rows
        ]
        content = {
            "split": self.split,
            "seen": self.describe(),
            "rows": table,
            "provenance": provenance(self.device),
            "config": asdict(self.config),
        }
        write_text(Path(self.config.json), json.dumps(content, indent=2) + "\n")


def align(cells: Sequence[str]) -> str:
    """Return a line of the table with aligned cells."""
    return "  ".join(f"{cell:>10}" for cell in cells)


def brief(value: Any) -> str:
    """Return a value as one line."""
    return f"{len(value)} ({listed(value)})" if isinstance(value, tuple) else str(value)
