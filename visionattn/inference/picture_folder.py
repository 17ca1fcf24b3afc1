"""A folder of pictures from ``visionattn look`` or ``visionattn generate``, marked by a JSON
summary named after the command.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from visionattn.cli.files import check_new, write_text
from visionattn.cli.provenance import provenance
from visionattn.inference.model_opening import Opened


def check_picture_folder(folder: Path, summary: str, overwrite: bool) -> None:
    """Raise ValueError if a command's folder cannot be created, or replaced with ``overwrite``; one
    line.

    Args:
        folder: path of the folder.
        summary: the name of the summary, ``look.json``.
        overwrite: whether a folder with such a summary may be replaced.
    """
    is_known = (folder / summary).is_file()
    if is_known and not overwrite:
        raise ValueError(f"{folder} exists; pass --overwrite to replace it")
    if overwrite and folder.is_dir() and not is_known:
        raise ValueError(
            f"{folder} has no {summary}, so --overwrite does not delete it; pass another folder"
        )
    check_new(folder, replaces=summary if overwrite else None)


def about(opened: Opened, options: Any) -> dict[str, Any]:
    """Return the origin of results as JSON types: provenance, model and options."""
    return provenance(opened.device) | {"model": opened.notes, "options": asdict(options)}


def write_summary(path: Path, opened: Opened, options: Any, images: Any) -> None:
    """Write the summary into a folder from ``whole_folder``: provenance, model, options, and
    ``images`` (JSON types).
    """
    content = {"provenance": about(opened, options), "images": images}
    write_text(path, json.dumps(content, indent=1))
