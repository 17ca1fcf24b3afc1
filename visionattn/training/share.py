"""Run ``visionattn share``: write a checkpoint as a folder for
``timm.create_model("local-dir:FOLDER")``, or upload it for ``hf-hub:ORG/NAME``.

timm writes weights and configuration. This module adds all arguments of the model, the
specification of its images, names of classes, and the card.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from timm.models import save_for_hf
from torch import nn

from visionattn.cli.files import check_new, first_line, whole_folder, write_text
from visionattn.cli.parsing import parse, with_first
from visionattn.cli.untrusted import brief, refuse
from visionattn.models.building import patch_size
from visionattn.models.entry_points import images_cfg
from visionattn.models.weights import check_finite, described, load_model, read_metadata
from visionattn.training.model_card import card_of

HUB = re.compile(r"hf-hub:([\w.-]+/[\w.-]+)")
SCHEME = re.compile(r"(hf[-_]hub|local-dir|https?):")
LICENSE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,60}")
"""Matches license identifiers such as apache-2.0."""
ELSEWHERE = ("tag", "label_", "test_", "description", "notes", "origin_url")
"""Name prefixes of timm's fields that describe other weights of the architecture."""
EXAMPLE = "checkpoints/digits/best.safetensors --to checkpoints/shared --license apache-2.0"


@dataclass
class ShareConfig:
    """Options for writing a checkpoint in the formats of timm and transformers."""

    checkpoint: str | None = None
    """The ``best.safetensors`` of a run, or another file that ``visionattn.load_model`` reads;
    ``--checkpoint`` may be omitted if the file comes first.
    """
    to: str | None = None
    """A new folder, or ``hf-hub:ORG/NAME`` to upload."""
    license: str | None = None
    """License identifier of the weights, e.g. ``apache-2.0``. None: the card says "unknown"."""


def parse_share(argv: Sequence[str]) -> ShareConfig:
    """Read the flags of ``visionattn share``, and check them without weights and network.

    Raises:
        ValueError, FileNotFoundError: wrong or missing flag, or an existing folder; one line.
    """
    words = with_first(argv, "checkpoint")
    about = "Write a checkpoint in the formats of timm and transformers, with a model card."
    config = parse(ShareConfig, words, command="share", description=about, example=EXAMPLE)
    to = config.to or ""
    refuse(
        (config.checkpoint is None, "expected --checkpoint: the best.safetensors of a run"),
        (config.to is None, "expected --to: a folder or hub"),
        (
            not LICENSE.fullmatch(config.license or "unknown"),
            f"expected a license identifier such as apache-2.0, got {brief(config.license)}",
        ),
        (
            SCHEME.match(to) and not HUB.fullmatch(to),
            f"expected --to to be a folder or hf-hub:ORG/NAME, got {brief(to)}",
        ),
    )
    if not HUB.fullmatch(to):
        check_new(Path(to))
    return config


def share(config: ShareConfig) -> list[str]:
    """Write the folder or upload it, and return lines about it.

    Raises:
        ValueError, OSError: not a checkpoint, non-finite weights, a damaged file of the run, an
            invalid or existing name, no token, or a refusal of the hub; one line, and nothing is
            written.
    """
    path, to = Path(config.checkpoint), Path(config.to)
    model = load_model(path)
    kinds = {"segmentation": "gives classes of pixels", "generate": "generates images"}
    kinds |= {"multilabel": "gives several classes per image", "regression": "gives numbers"}
    if what := kinds.get(model.data_spec.task):
        raise ValueError(
            f"{path} {what}, which timm and transformers do not support; read the file with "
            "visionattn.load_model"
        )
    check_finite(model.state_dict(), path)
    if hub := HUB.fullmatch(config.to):
        said, source = f"uploaded to https://huggingface.co/{hub[1]}", config.to
        card = card_of(path, model, title=to.name, source=source, license=config.license)
        upload(path, model, card, config.license, name=hub[1])
    else:
        said, source = f"written to {to}", f"local-dir:{to}"
        # The card does not reveal the path of the folder.
        about = dict(title=to.name, source=f"local-dir:{to.name}", license=config.license)
        card = card_of(path, model, **about)
        with whole_folder(to) as place:
            write(place, path, model, card, config.license)
    call = f"timm.create_model({json.dumps(source, ensure_ascii=False)}, pretrained=True)"
    return [said, f"{call} loads it, after import visionattn"]


def write(folder: Path, path: Path, model: nn.Module, card: str, license: str | None) -> None:
    """Write ``model.safetensors``, ``config.json`` and ``README.md``.

    Args:
        folder: an existing folder.
        path: the file of the weights.
        model: the result of ``load_model``.
        card: the text of ``README.md``.
        license: license of the weights; None: unknown.
    """
    _, args, spec = described(read_metadata(path), path)
    known = model.pretrained_cfg.items()
    kept = {key: value for key, value in known if not key.startswith(ELSEWHERE)}
    model.pretrained_cfg = kept | {"license": license or "unknown"}
    model.pretrained_cfg |= images_cfg(spec, patch_size(model))
    labels = {"label_names": list(spec.class_names)} if spec.class_names else {}
    save_for_hf(model, str(folder), model_config=labels, model_args=args, safe_serialization=True)
    # transformers passes both these arguments and the number of classes to the model.
    described_again = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    described_again["model_args"].pop("num_classes", None)
    write_text(folder / "config.json", json.dumps(described_again, indent=2) + "\n")
    write_text(folder / "README.md", card)


def upload(path: Path, model: nn.Module, card: str, license: str | None, *, name: str) -> None:
    """Upload the files to the repository ``name`` of the hub, which is new or holds no model; other
    arguments as for ``write``.

    Raises:
        ValueError: no token, an invalid name, or the repository holds a model.
        OSError: the hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    # The base class of HTTP errors, for any HTTP library of the hub's client.
    bases = [each for each in HfHubHTTPError.__mro__ if each.__module__ != "builtins"]
    if get_token() is None:
        raise ValueError("expected a token for the hub; run hf auth login, or set HF_TOKEN")
    api = HfApi(library_name="visionattn")
    try:
        if api.file_exists(name, "config.json"):
            raise ValueError(f"hf-hub:{name} already holds a model; choose another name")
        with TemporaryDirectory() as folder:
            write(Path(folder), path, model, card, license)
            api.create_repo(name, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=folder, commit_message="Add model")
    except tuple(bases) as error:
        raise OSError(f"the hub refused {name}: {first_line(error)}") from error
