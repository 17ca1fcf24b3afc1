"""The arguments of a model that its file of weights states, for ``timm.create_model``: a file of
``save_model`` knows its sizes, so whoever loads it through timm need not repeat them.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from timm.layers import to_2tuple

from visionattn.models.segmentation import HEAD_ARGS, block_places

FREE = ("form", "img_size", "dynamic_img_size", "dynamic_img_pad", "global_pool", "weight_init")
FREE += ("fix_init", "device", "dtype", "features_only", "out_indices", "output_stride")
"""Arguments that may differ from those of the file, besides rates of dropout: no weight depends on
them.
"""
FITTED = ("patch_size", "horizon", "in_chans", "num_classes")
"""Arguments to which weights are fitted that ``pretrained=True`` loads."""


def checkpoint_of_caller() -> Any:
    """Return ``checkpoint_path`` of the ``timm.create_model`` that called the entry point which
    calls this, or None. timm keeps it to itself, and loads it into the finished model.
    """
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__") != "timm.models._factory":
        return None
    return frame.f_locals.get("checkpoint_path")


def args_of_file(
    path: str | Path,
    name: str,
    defaults: Mapping[str, Any],
    given: Mapping[str, Any],
    *,
    fitted: bool,
) -> tuple[dict[str, Any], Any]:
    """Return the arguments that a file of ours states and ``given`` does not, and the ``DataSpec``
    of its images; nothing and None for files of others.

    Args:
        path: the file.
        name: the model that is asked for, which may be a pyramid over that of the file.
        defaults: what the name stands for.
        given: arguments of the call.
        fitted: weights are fitted to ``FITTED``.

    Raises:
        ValueError: the file is of another attention, or ``given`` contradicts it; one line.
    """
    # It knows the defaults of names, which come from modules that call this.
    from visionattn.models.registration import DEFAULTS, is_ours
    from visionattn.models.weights import FORMAT, described

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError):  # timm reads it, or says why not
        return {}, None
    if metadata.get("format") != FORMAT:
        return {}, None
    source, stated, spec = described(metadata, path)
    if not is_ours(source):
        return {}, None
    own = DEFAULTS[source.partition(".")[0]].get("attention")
    if own != defaults.get("attention") and "attention" not in given:
        raise ValueError(
            f"{path} holds a {source}, of attention {own}, and {name} is of "
            f"{defaults.get('attention')}; create {source}, or the pyramid of its family"
        )
    stated = _of_body(stated) | {"in_chans": spec.in_chans}
    if spec.task != "segmentation":
        stated["num_classes"] = spec.num_classes
    if "pyramid_channels" not in defaults:
        stated.pop("pyramid_channels", None)
    free = FREE + FITTED if fitted else FREE
    for key, value in given.items():
        if key in free or "drop" in key or key not in stated:
            continue
        if _comparable(key, value) != _comparable(key, stated[key]):
            raise ValueError(
                f"expected {key} {stated[key]!r} as in {path}, got {value!r}; leave it out"
            )
    return {key: value for key, value in stated.items() if key not in given}, spec


def _of_body(stated: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the body of a segmentation, whose blocks above the last one that its
    head reads are not in the file; those of other models as they are.
    """
    body = {key: value for key, value in stated.items() if key not in HEAD_ARGS}
    if stated.get("head_blocks") is None:
        return body
    depth = body["depth"]
    body["depth"] = last = block_places(stated["head_blocks"], depth)[-1] + 1
    if not isinstance(body["attention"], str):
        body["attention"] = body["attention"][:last]
    if body.get("softmax_blocks"):
        body["softmax_blocks"] = [n % depth for n in body["softmax_blocks"] if n % depth < last]
    return body


def _comparable(key: str, value: Any) -> Any:
    if key == "patch_size":
        return tuple(to_2tuple(value))
    return tuple(value) if isinstance(value, list) else value
