"""Options of ``visionattn features``: which images, which form of features, and whether to fit a
probe.

This module owns the flags and the checks that need no model and no image. A docstring under each
field is its help text.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from visionattn.cli.files import first_line
from visionattn.cli.untrusted import brief, read_yaml, refuse
from visionattn.data.data_config import DataConfig
from visionattn.data.option_ranges import check_least
from visionattn.inference.inference_options import DenseOptions, parse_options

EVAL_IMAGES = 500
"""Generated images per split if ``data_args`` does not set it."""
CONFIG = "config.yaml"
"""Training configuration, next to the weights of a run."""


@dataclass
class ExtractOptions(DenseOptions):
    """Features of images."""

    MOST_USED = ("images", "checkpoint", "model", "output", "img_size", "batch_size", "dense")
    """Flags at the top of the help."""

    labels: str | None = None
    """Label table as for training (``--data.labels``), with paths relative to the only folder in
    ``images``. Its rows are the images, the index gets its columns as ``table_...``, and ``probe``
    uses its classes and splits.
    """
    data: Literal["digits", "canvas", "documents"] | None = None
    """Built-in images instead of ``images``: the digits of scikit-learn, or the validation and test
    splits of ``canvas`` or ``documents`` at ``img_size``, drawn with ``seed``. If the checkpoint's
    run trained on this data, the settings of its ``config.yaml`` are the defaults.
    """
    data_args: dict[str, Any] = field(default_factory=dict)
    """Only for ``canvas`` and ``documents``: settings as in ``data.args`` of training, such as
    ``eval_images`` (here 500) or ``distractors``.
    """
    blocks: list[int] | None = None
    """Only for ``dense``: blocks whose feature maps, each after the final norm, are concatenated;
    from 0, or negative from the end. Also writes the model to ``backbone.safetensors``, for
    ``visionattn train --data.features``. None: the last block, without the model.
    """
    dtype: Literal["float32", "float16"] = "float32"
    """Data type of the features in the files."""
    shard_images: int = 4096
    """Images per file; the last batch of a file may exceed it, and rows of 16 MiB fill a file too.
    """
    shard_mib: int = 256
    """MiB of features per file, which stay in memory until it is full; the last batch of a file may
    exceed it.
    """
    probe: bool = False
    """Fit a linear probe and kNN on the features; ``images`` must be one folder of class folders,
    or of ``train/`` and ``val/`` (or ``test/``) with class folders, or have ``labels``. With
    ``dense``, only for ``canvas`` and ``documents``: fit a linear probe of patches against masks.
    """
    neighbours: int = 5
    """k of kNN; only for ``probe`` without ``dense``."""
    val_fraction: float = 0.1
    """Only for ``probe`` and ``canvas``: share of the images held out per class, by ``seed``, if
    there is no ``val/``; for ``canvas`` the share of digits used in validation images.
    """
    shard: str | None = None
    """Extract only part i of n of the images, ``i/n`` with i from 1 to n. Parts share ``output``,
    and are written to its folder ``parts``, in parallel or one by one.
    """
    merge: bool = False
    """Write one index over all parts in ``output``; no other option is allowed."""
    engine: Literal["here", "ray"] = "here"
    """``ray``: extract parts on the nodes of a Ray cluster; this process merges them."""
    address: str | None = None
    """Only for ``engine ray``: ``local`` (a temporary cluster on this machine), ``auto`` (the
    cluster running here or named by ``RAY_ADDRESS``), or host:port.
    """
    parts: int | None = None
    """Only for ``engine ray``: number of parts, one process each; None: one part per 512 images."""

    @property
    def drawn(self) -> bool:
        """Return whether the images are generated, at the size at which the model sees them."""
        from visionattn.data.data_checks import DRAWN

        return self.data in DRAWN

    @property
    def seed_divides(self) -> bool:
        """Return whether the seed splits images, as for a probe and for embedded data."""
        return self.probe or self.data is not None

    @property
    def needs_model(self) -> bool:
        """Return whether features are computed, not only merged."""
        return not self.merge

    def drawing(self) -> DataConfig:
        """Return the data options of the generated images, without their size."""
        args = {"eval_images": EVAL_IMAGES} | self.data_args
        return DataConfig(name=self.data, val_fraction=self.val_fraction, args=args)


def parse_extract(argv: Sequence[str], **about: str) -> ExtractOptions:
    """Read the flags of ``visionattn features``, with defaults for generated images from the
    checkpoint's run.

    Raises:
        ValueError, FileNotFoundError: a flag is wrong, or two exclude each other; one line.
    """
    options = parse_options(ExtractOptions, argv, **about)
    known = of_run(options)
    return parse_options(ExtractOptions, argv, defaults=known, **about) if known else options


def of_run(options: ExtractOptions) -> dict[str, Any]:
    """Return the data settings of the run next to a checkpoint, if it trained on the requested
    data; else nothing.

    Raises:
        ValueError: its ``config.yaml`` is not a configuration; one line.
    """
    file = Path(options.checkpoint or CONFIG).with_name(CONFIG)
    if not options.drawn or not options.checkpoint or not file.is_file():
        return {}
    run = read_yaml(file)
    try:
        data = run["data"]
        if data["name"] != options.data:
            return {}
        args = (data.get("args") or {}).items()
        known = {"data_args": {key: x for key, x in args if not key.endswith("_images")}}
        held = {"val_fraction"} & set(data) if options.data == "canvas" else set()
        return known | {"seed": run.get("seed", 0)} | {key: data[key] for key in held}
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is not a run configuration: {first_line(error)}") from error


def check(options: ExtractOptions) -> None:
    """Check the options that only features have, before anything is opened.

    Raises:
        ValueError: one line with the option, the allowed values and the given value.
    """
    if not options.output:
        raise ValueError("expected --output: a folder for the features")
    usual = ExtractOptions()
    given = [
        each.name
        for each in fields(options)
        if getattr(options, each.name) != getattr(usual, each.name)
    ]
    if options.merge:
        more = [name for name in given if name not in ("output", "merge")]
        if more:
            raise ValueError(
                f"merge reads all settings from the parts in --output; remove {more[0]}"
            )
        return
    _check_parts(options)
    if (options.images is None) == (options.data is None):
        raise ValueError("pass either --images or --data digits, canvas or documents")
    sizes = {key: getattr(options, key) for key in ("shard_images", "shard_mib", "neighbours")}
    check_least(1, **sizes, parts=options.parts)
    if not 0 < options.val_fraction < 1:
        raise ValueError(f"val_fraction must be in (0, 1), got {options.val_fraction}")
    if options.probe and options.dense and not options.drawn:
        what = "images of files" if options.data is None else options.data
        raise ValueError(
            f"a dense probe needs masks, got {what}; remove --dense, or pass --data canvas or "
            "documents"
        )
    one_folder = options.images is None or [*map(os.path.isdir, options.images)] == [True]
    if options.probe and not one_folder:
        raise ValueError("probe needs one folder of class folders as --images")
    if options.dense and options.combine is not None:
        raise ValueError("combine needs one vector per image, got --dense; remove it")
    holds_out = options.data == "canvas" or (options.probe and not options.drawn)
    for key, acts, whose in (
        ("labels", options.images is not None, "--images"),
        ("blocks", options.dense and options.tiles is None, "--dense of whole images"),
        ("neighbours", options.probe and not options.dense, "--probe without --dense"),
        ("val_fraction", holds_out, "--probe of files and digits, and for --data canvas"),
        ("data_args", options.drawn, "--data canvas and documents"),
        ("address", options.engine == "ray", "--engine ray"),
        ("parts", options.engine == "ray", "--engine ray"),
    ):
        if key in given and not acts:
            raise ValueError(f"{key} needs {whose}; remove it")


def _check_parts(options: ExtractOptions) -> None:
    """Check the options that divide a collection into parts."""
    from visionattn.data.large.map_writing import SINKS
    from visionattn.inference.shards import CollectionPart

    ray = options.engine == "ray"
    if options.shard is not None:
        CollectionPart.parse(options.shard)
    refuse(
        (
            ray and options.shard is not None,
            "engine ray divides the images itself; remove shard",
        ),
        (
            options.probe and (ray or options.shard is not None),
            "probe needs the features of all images; run the command without "
            f"{'engine' if ray else 'shard'} when all parts exist",
        ),
        (
            ray and Path(options.output or "").suffix.lower() in SINKS,
            f"engine ray needs a folder as --output, got the map {options.output}",
        ),
        (
            ray and options.overwrite,
            "engine ray does not overwrite; pass a new --output",
        ),
    )
    if ray:
        check_address(options.address)


def check_address(address: str | None) -> None:
    """Raise ValueError unless it is ``local``, ``auto`` or ``host:port``."""
    if address is None:
        raise ValueError("engine ray needs --address: local, auto, or host:port of a cluster")
    host, _, port = address.rpartition(":")
    named = re.fullmatch(r"[\w.-]+|\[[\da-f:]+\]", host, re.ASCII) is not None
    numbered = re.fullmatch(r"\d{1,5}", port, re.ASCII) is not None and 0 < int(port) < 2**16
    if address not in ("local", "auto") and not (named and numbered):
        raise ValueError(f"expected --address local, auto or host:port, got {brief(address)}")
