"""List the networks and trainings of a sweep, and check on the meta device that their models can be
built.
"""

import re
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import torch
from torch import nn

from visionattn.data.data_checks import resolved
from visionattn.data.splits import Splits, build_splits
from visionattn.lab.measure import count_flops
from visionattn.lab.sweep.sweep_flags import SweepConfig
from visionattn.layers.attention_layer import idle_options
from visionattn.model_config import ModelConfig
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.building import build_model, check_img_size, patch_size
from visionattn.models.taylorshift_vit import PUBLISHED
from visionattn.models.weights import DataSpec
from visionattn.ops.attentions import ATTENTIONS, FORMS
from visionattn.training.config import TrainConfig


@dataclass(frozen=True)
class Network:
    """The varied values of a training's model: a network of the grid."""

    attention: str
    """An attention of this package, or the name of a model without one."""
    heads: int
    form: str | None
    """None if the attention has no forms."""
    img_size: int
    """Height and width in pixels."""

    @property
    def name(self) -> str:
        """The name of its measurements, e.g. ``taylorshift_h4_direct_32px``."""
        form = f"_{self.form}" if self.form else ""
        return f"{self.attention}_h{self.heads}{form}_{self.img_size}px"


@dataclass(frozen=True)
class SweepCell:
    """One training."""

    network: Network
    seed: int

    @property
    def name(self) -> str:
        """The name of its run folder."""
        return f"{self.network.name}_seed{self.seed}"


@dataclass(frozen=True)
class SweepPlan:
    """A checked sweep."""

    base: TrainConfig
    splits: Splits
    own_attention: str | None
    """The attention of the training's model; None for a model of another package."""
    networks: tuple[Network, ...]
    seeds: tuple[int, ...]
    train_form: str | None
    """The only form to train. Its accuracy counts for all forms. None: train each form."""
    facts: dict[Network, dict[str, int]] = field(default_factory=dict)
    """For each network: ``head_dim``, ``tokens`` (patches of an image, without prefix tokens),
    ``parameters``, and ``flops`` of a forward pass for one image.
    """

    def cell(self, network: Network, seed: int) -> SweepCell:
        """Return the training whose accuracy counts for a network."""
        if network.form and self.train_form:
            network = replace(network, form=self.train_form)
        return SweepCell(network, seed)

    def cells(self) -> list[SweepCell]:
        """Return every training once, one seed after the other, so that an early stop leaves
        complete tables.
        """
        pairs = product(self.seeds, self.networks)
        return list(dict.fromkeys(self.cell(network, seed) for seed, network in pairs))

    def model(self, network: Network) -> ModelConfig:
        """Return the configuration of a network's model."""
        return model_of(self.base.model, self.own_attention, network)

    def data_spec(self, network: Network) -> DataSpec:
        """Return the data specification of the network's images."""
        return replace(self.splits.spec, img_size=network.img_size)

    def training(self, cell: SweepCell, runs: Path) -> TrainConfig:
        """Return the configuration of a cell's training, with its run folder in ``runs``."""
        return replace(
            self.base,
            model=self.model(cell.network),
            data=replace(self.base.data, img_size=cell.network.img_size),
            seed=cell.seed,
            output=str(runs),
            run=cell.name,
            resume=False,
            overwrite=False,
        )


def make_plan(config: SweepConfig, base: TrainConfig) -> SweepPlan:
    """Build the grid, and check that each network can be built; write nothing.

    Raises:
        ValueError, FileNotFoundError: missing data, a head count that does not divide the width, an
            option without effect, or a network that cannot be built; one line.
    """
    choices = base.data.img_size_choices
    if choices and config.img_size:
        raise ValueError(
            "--img_size would change only the evaluation, since the training has "
            "data.img_size_choices; add --set data.img_size_choices=null"
        )
    data = resolved(base.data)
    sizes = config.img_size or [data.img_size]
    if data.fit == "native" or not all(isinstance(size, int) for size in sizes):
        raise ValueError(
            "a sweep needs images of one size; set data.img_size to one number, and data.fit to "
            "pad, stretch or crop"
        )
    splits = build_splits(
        replace(base.data, img_size=sizes[0], img_size_choices=sizes), config.seeds[0]
    )
    first = replace(base.model, args=base.model.args | {"num_heads": config.heads[0]})
    model = on_meta(first, splits.spec)
    check_img_size(model, [*sizes, *(choices or [])])
    own = attention_of(model) if isinstance(model, VisionAttnTransformer) else None
    networks = make_networks(config, own, base.model.name, sizes)
    seeds = tuple(dict.fromkeys(config.seeds))
    plan = SweepPlan(base, splits, own, networks, seeds, config.train_form)
    return replace(plan, facts={network: facts_of(plan, network) for network in networks})


def attention_of(model: VisionAttnTransformer) -> str:
    """Return the name of the model's attention. Plus signs join several names."""
    return "+".join(dict.fromkeys(block.attn.attention for block in model.blocks))


def make_networks(
    config: SweepConfig, own: str | None, model_name: str, sizes: list[int]
) -> tuple[Network, ...]:
    """Return each network of the options once. An attention without forms has one network.

    Raises:
        ValueError: an option has no effect.
    """
    if own is None and (config.attention or config.form or config.train_form):
        raise ValueError(
            f"--attention, --form and --train_form need a model of visionattn, got {model_name}"
        )
    attentions = config.attention or [own or model_name]
    formed = [name for name in attentions if name in ATTENTIONS and ATTENTIONS[name].forms]
    if not formed and (config.form or config.train_form):
        raise ValueError(
            f"--form and --train_form have no effect, because {' and '.join(attentions)} "
            "attention has no forms; remove them"
        )
    networks = []
    for size, attention, heads in product(sizes, attentions, config.heads):
        forms = (config.form or FORMS) if attention in formed else [None]
        networks += [Network(attention, heads, form, size) for form in forms]
    return tuple(dict.fromkeys(networks))


def model_of(base: ModelConfig, own: str | None, network: Network) -> ModelConfig:
    """Return the base model with the network's head count, form and attention.

    Networks differ only in head count, form and attention. For another attention, start from the
    plain ``scaleformer_vit_*`` name of the same size. The options that are registered with
    the base name (absolute position, no relative position, pooling) become arguments. Arguments
    without effect on the other attention, such as a temperature, are left out.

    Args:
        base: the model of the training.
        own: its attention; None for a model of another package. Then only the head count varies.
        network: a network of the grid.
    """
    args = base.args | {"num_heads": network.heads}
    if own is None:
        return replace(base, args=args)
    form = {"form": network.form} if network.form else {}
    if network.attention == own:
        return replace(base, args=args | form)
    args.pop("form", None)
    if base.name.startswith(("taylorshift_abs_vit", "taylorshift_vit_pixel")):
        args = PUBLISHED | args
    args |= {"attention": network.attention} | form
    idle = idle_options(ATTENTIONS[network.attention], feature_map=args.get("feature_map"))
    kept = {key: value for key, value in args.items() if key not in idle}
    name = re.sub(r"^taylorshift(_abs)?_vit", "scaleformer_vit", base.name)
    return replace(base, name=name, args=kept)


def on_meta(config: ModelConfig, spec: DataSpec) -> nn.Module:
    """Return the model on the meta device, without memory for its weights.

    Raises:
        ValueError: the model cannot be built.
    """
    with torch.device("meta"):
        return build_model(config, spec)[0]


def facts_of(plan: SweepPlan, network: Network) -> dict[str, int]:
    """Return the values of ``SweepPlan.facts`` for a network."""
    model, px = on_meta(plan.model(network), plan.data_spec(network)), network.img_size
    rows, columns = patch_size(model)
    return {
        "head_dim": model.embed_dim // network.heads,
        "tokens": -(-px // rows) * -(-px // columns),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops": count_flops(model, px, px),
    }
