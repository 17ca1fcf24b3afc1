"""Which networks and which trainings a sweep is made of, and whether they can be: arithmetic and
models on the meta device.

It runs nothing and knows no files.
"""

import re
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import nn

from visionattn.data.data_checks import resolved
from visionattn.data.splits import build_splits
from visionattn.lab.measure import count_flops
from visionattn.lab.sweep.config import SweepConfig
from visionattn.layers.attention import idle_options
from visionattn.model_config import ModelConfig
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.building import build_model, check_img_size
from visionattn.models.taylorshift_vit import PUBLISHED
from visionattn.models.weights import DataSpec
from visionattn.ops.attentions import ATTENTIONS, FORMS
from visionattn.training.config import TrainConfig


@dataclass(frozen=True)
class Network:
    """A network of the grid; its measurements are those of one row of the tables.

    It says what is varied of a training's configuration, which names the rest, so that no ``Case``
    of a benchmark could stand for it: width, depth and any other argument of the model, data,
    precision and optimiser are those of the configuration.
    """

    attention: str
    """One of ours, or the name of a model that is not ours."""
    heads: int
    form: str | None
    """None where the attention has no forms."""
    img_size: int
    """Height and width in pixels."""

    @property
    def name(self) -> str:
        """The name of its files."""
        return "_".join(
            [
                self.attention,
                f"h{self.heads}",
                *([self.form] if self.form else []),
                f"{self.img_size}px",
            ]
        )


@dataclass(frozen=True)
class Cell:
    """One training."""

    network: Network
    seed: int

    @property
    def name(self) -> str:
        """The name of its run folder."""
        return f"{self.network.name}_seed{self.seed}"


@dataclass(frozen=True)
class Facts:
    """What the shapes of a network alone decide."""

    head_dim: int
    tokens: int
    """Patches of an image, without prefix tokens."""
    parameters: int
    flops: int
    """Floating point operations of one image's forward; see ``count_flops``."""


@dataclass(frozen=True)
class Grid:
    """All networks in order, and the seeds that each is trained with."""

    networks: tuple[Network, ...]
    seeds: tuple[int, ...]
    train_form: str | None
    """The form whose trainings count for every form; None: each form has its own."""

    def cell(self, network: Network, seed: int) -> Cell:
        """Return the training whose accuracy counts for a network."""
        if network.form and self.train_form:
            network = replace(network, form=self.train_form)
        return Cell(network, seed)

    def cells(self) -> list[Cell]:
        """Return every training once, smaller seeds first, so that an early end leaves whole
        tables.
        """
        return list(
            dict.fromkeys(
                self.cell(network, seed) for seed in self.seeds for network in self.networks
            )
        )


@dataclass(frozen=True)
class Plan:
    """A sweep that can be run."""

    base: TrainConfig
    spec: DataSpec
    own_attention: str | None
    """That of the training's model; None for a model that is not ours."""
    grid: Grid
    facts: dict[Network, Facts]
    tested: bool
    """Whether the data have a test split."""

    def model(self, network: Network) -> ModelConfig:
        """Return the model of a network."""
        return model_of(self.base.model, self.own_attention, network)

    def data_spec(self, network: Network) -> DataSpec:
        """Return what the network expects of its images."""
        return replace(self.spec, img_size=network.img_size)


def make_plan(config: SweepConfig, base: TrainConfig) -> Plan:
    """Lay out the grid and check that each of its networks can be built; nothing is written.

    Raises:
        ValueError, FileNotFoundError: the data are not there, a head count does not divide the
            width, an option has nothing to act on, or a network cannot be built; one line.
    """
    if base.data.img_size_choices and config.img_size:
        raise ValueError(
            "--img_size would change the evaluation alone, since the training has "
            "data.img_size_choices; "
            "add --set data.img_size_choices=null"
        )
    data = resolved(base.data)
    sizes = config.img_size or [data.img_size]
    if not all(isinstance(size, int) for size in sizes):
        raise ValueError(
            "a sweep compares networks on images of one size; name data.img_size as one number, "
            "with a data.fit of pad, stretch or crop"
        )
    if data.fit == "native":
        raise ValueError(
            "a sweep compares networks on images of one size, which data.fit native does not give; "
            "add --set data.fit=pad"
        )
    splits = build_splits(
        replace(base.data, img_size=sizes[0], img_size_choices=sizes), config.seeds[0]
    )
    narrow = replace(base.model, args=base.model.args | {"num_heads": 1})
    model = on_meta(narrow, splits.spec)
    check_img_size(model, [*sizes, *(base.data.img_size_choices or [])])
    check_heads(config.heads, model, base.model.name)
    own = attention_of(model) if isinstance(model, VisionAttnTransformer) else None
    grid = make_grid(config, own, base.model.name, sizes)
    plan = Plan(base, splits.spec, own, grid, {}, splits.test is not None)
    facts = {
        network: facts_of(on_meta(plan.model(network), plan.data_spec(network)), network)
        for network in grid.networks
    }
    return replace(plan, facts=facts)


def attention_of(model: VisionAttnTransformer) -> str:
    """Return the name of the model's attention; those of a model of several, joined."""
    return "+".join(dict.fromkeys(block.attn.attention for block in model.blocks))


def make_grid(config: SweepConfig, own: str | None, model_name: str, sizes: list[int]) -> Grid:
    """Make the grid of the options; attentions without forms have one network for all forms."""
    if own is None and (config.attention or config.form or config.train_form):
        raise ValueError(
            f"--attention, --form and --train_form are for visionattn's models, not for "
            f"{model_name}"
        )
    attentions = config.attention or [own or model_name]
    formed = [name for name in attentions if name in ATTENTIONS and ATTENTIONS[name].forms]
    if not formed and (config.form or config.train_form):
        raise ValueError(
            f"--form and --train_form do nothing here: {' and '.join(attentions)} attention has "
            f"no forms"
        )
    networks = []
    for size, attention, heads in product(sizes, attentions, config.heads):
        forms = (config.form or FORMS) if attention in formed else [None]
        networks += [Network(attention, heads, form, size) for form in forms]
    return Grid(tuple(networks), tuple(config.seeds), config.train_form)


def check_heads(heads: list[int], model: nn.Module, name: str) -> None:
    """Raise ValueError for a model without head counts, and for those that do not divide its
    width.
    """
    attn = getattr(model.blocks[0], "attn", None) if len(getattr(model, "blocks", ())) else None
    if getattr(attn, "num_heads", None) != 1:
        raise ValueError(
            f"model {name} has no blocks whose attention takes num_heads; choose a vision "
            f"transformer"
        )
    width = model.embed_dim
    wrong = [str(count) for count in heads if width % count]
    if wrong:
        divisors = ", ".join(str(count) for count in range(1, width + 1) if width % count == 0)
        verb = "does" if len(wrong) == 1 else "do"
        raise ValueError(
            f"heads: {', '.join(wrong)} {verb} not divide the width {width} of {name}; these do: "
            f"{divisors}"
        )


def model_of(base: ModelConfig, own: str | None, network: Network) -> ModelConfig:
    """Return the base model with the network's head count, form and attention, and otherwise the
    same.

    Another attention than the model's own is built from the plain ``scaleformer_vit_*`` name of the
    same size, to which the registered options of the base name (absolute position, no relative one,
    pooling) are passed as arguments: registered options cannot be taken back, and a temperature has
    nothing to act on outside of TaylorShift. So networks differ in the attention alone.

    Args:
        base: the model of the training.
        own: its attention; None for a model that is not ours, whose head count alone is varied.
        network: of the grid.
    """
    args = base.args | {"num_heads": network.heads}
    if own is None:
        return replace(base, args=args)
    form = {"form": network.form} if network.form else {}
    if network.attention == own:
        return replace(base, args=args | form)
    args.pop("form", None)
    published = base.name.startswith("taylorshift_abs_vit") or base.name.startswith(
        "taylorshift_vit_pixel"
    )
    args = (PUBLISHED if published else {}) | args | {"attention": network.attention} | form
    idle = idle_options(ATTENTIONS[network.attention], feature_map=args.get("feature_map"))
    kept = {key: value for key, value in args.items() if key not in idle}
    return replace(
        base, name=re.sub(r"^taylorshift(_abs)?_vit", "scaleformer_vit", base.name), args=kept
    )


def on_meta(config: ModelConfig, spec: DataSpec) -> nn.Module:
    """Return the model without memory for its weights.

    Raises:
        ValueError: it cannot be built.
    """
    with torch.device("meta"):
        return build_model(config, spec)[0]


def facts_of(model: nn.Module, network: Network) -> Facts:
    """Count the tokens, parameters and operations of a network."""
    rows, columns = model.patch_embed.patch_size
    parameters = sum(parameter.numel() for parameter in model.parameters())
    flops = count_flops(model, network.img_size, network.img_size)
    tokens = -(-network.img_size // rows) * -(-network.img_size // columns)
    return Facts(model.embed_dim // network.heads, tokens, parameters, flops)
