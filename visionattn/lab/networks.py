"""Whole models that are compared: ours, timm's, and ours with attention replaced by the identity,
the physical limit.

It knows nothing of single operations and of time.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import timm
import torch
from einops import rearrange
from torch import Tensor, nn

import visionattn.models  # noqa: F401  registers ours with timm
from visionattn.lab.accuracy import tolerance
from visionattn.lab.cases import Case, Work
from visionattn.lab.operations import check_forms, defined, results
from visionattn.layers import Attention
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.registration import is_ours
from visionattn.ops import OPERATIONS
from visionattn.ops.attentions import AttentionKind

CHECK_GRID = (29, 31)
"""Patches on which models are checked; no square."""
CHECK_DEPTH = 2
"""Blocks that are checked; all are alike."""
SHARPER = 4
"""How many times larger the weights of q, k and v and of the gate are where results are checked."""
NEAR = 0.2
"""The standard deviation of convolutions of values where results are checked."""


def values_alone(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """Return the values as they are: an operation without attention."""
    return v


def identity_twin(model: VisionAttnTransformer) -> VisionAttnTransformer:
    """Return a copy of a model of ours, with equal parameters, whose attention layers return the
    values as they are. Projections, the convolution of values and the output gate stay.
    """
    twin = copy.deepcopy(model)
    for layer in attentions_of(twin):
        layer.operation = values_alone
    return twin


@torch.no_grad()
def as_trained(model: nn.Module) -> None:
    """Let the result of a new model depend on its attention as that of a trained one does.

    As they start, attention hardly depends on q, the gate lets a fifth of it through, and the
    convolution of values is 0.
    """
    generator = torch.Generator().manual_seed(0)
    for block in model.blocks:
        attention = block.attn
        attention.qkv.weight *= SHARPER
        if getattr(attention, "output_gate", None) is not None:
            attention.output_gate.weight *= SHARPER
        if getattr(attention, "value_conv", None) is not None:
            weight = attention.value_conv.weight
            weight.copy_(NEAR * torch.randn(weight.shape, generator=generator))


def has_forms(model: str) -> bool:
    """Tell whether forms are for this model: one of ours, whose attention is there."""
    base, *options = model.split("+")
    return timm.is_model(base) and is_ours(base) and "identity" not in options


def read_options(case: Case) -> dict[str, str]:
    """Return the options of a model's name: "identity", "eager", and ``heads=12``.

    Raises:
        ValueError: a model that timm does not know, an option or a form that it has not, or two
            that contradict each other.
    """
    if not timm.is_model(case.base):
        raise ValueError(
            f"timm knows no model {case.base!r}; try scaleformer_vit_s, taylorshift_vit_s, "
            f"vit_small_patch16_224"
        )
    found = {name: value for name, _, value in (each.partition("=") for each in case.options)}
    heads = found.get("heads", "1")
    if set(found) - {"identity", "eager", "heads"} or not heads.isdecimal() or int(heads) < 1:
        raise ValueError(
            f"{case.name}: options of models are identity, eager and heads=NUMBER, got "
            f"{'+'.join(case.options)}"
        )
    ours = is_ours(case.base)
    if "identity" in found and not ours:
        raise ValueError(f"{case.name}: an identity twin is made of visionattn's models")
    if "eager" in found and (ours or not case.base.startswith("vit_")):
        raise ValueError(f"{case.name}: eager attention is an option of timm's vit_*")
    if case.form != "auto" and not has_forms(case.name):
        raise ValueError(f"{case.label}: forms are for visionattn's models that have attention")
    return found


def build_model(case: Case, device: str = "cpu", **args: object) -> nn.Module:
    """Build the model of the case with seeded weights, in its dtype and form, cut to its depth,
    checkpointed where the case says so: ``eval`` for a forward, ``train`` for a backward too.
    ``args`` are further arguments of the model; timm's without ``img_size`` take any size.

    Raises:
        ValueError: an unknown name, an option that this model has not, or a depth beyond its own.
    """
    options = read_options(case)
    if "heads" in options:
        args["num_heads"] = int(options["heads"])
    if not is_ours(case.base):
        args["dynamic_img_size"] = "img_size" not in args
    with torch.random.fork_rng(devices=[]), torch.device("meta" if device == "meta" else "cpu"):
        torch.manual_seed(0)
        model = timm.create_model(case.base, **args)
    if "identity" in options:
        model = identity_twin(model)
    if "eager" in options:
        unfuse(model)
    if case.depth is not None:
        if case.depth > len(model.blocks):
            raise ValueError(f"depth {case.depth}: {case.name} has {len(model.blocks)} blocks")
        model.blocks = model.blocks[: case.depth]
    if case.checkpointing:
        model.set_grad_checkpointing()
    set_form(model, case.form)
    return model.to(device, case.torch_dtype).train(case.backward)


def make_image(case: Case, model: nn.Module, height: int, width: int, device: str) -> Tensor:
    """Make seeded images ``[B, C, height, width]``; for the models of single pixels one-hot grey
    levels.
    """
    shape = (case.batch, model.patch_embed.proj.in_channels, height, width)
    if device == "meta":
        return torch.empty(shape, dtype=case.torch_dtype, device=device)
    generator = torch.Generator().manual_seed(height + width)
    if shape[1] == 256:
        levels = torch.randint(256, (case.batch, height, width), generator=generator)
        images = rearrange(nn.functional.one_hot(levels, 256), "b h w level -> b level h w")
    else:
        images = torch.randn(shape, generator=generator)
    return images.to(device, case.torch_dtype).contiguous()


def set_form(model: nn.Module, form: str) -> None:
    """Let every attention layer of a model of ours run in this form; "auto" is left to models that
    have none.
    """
    if form != "auto":
        for block in model.blocks:
            block.attn.form = form


def unfuse(model: nn.Module) -> None:
    """Let every attention layer of a model of timm's make its matrix of all pairs."""
    for block in model.blocks:
        block.attn.fused_attn = False


def attentions_of(model: nn.Module) -> list[Attention]:
    """Return our attention layers in a model; none in others."""
    return [layer for layer in model.modules() if isinstance(layer, Attention)]


def set_impl(model: nn.Module, impl: str) -> None:
    """Let every attention layer of a model of ours run "eager" or "triton" operations, where it has
    both.
    """
    for layer in attentions_of(model):
        if layer.kind.impl and layer.operation is not values_alone:
            layer.operation = partial(OPERATIONS[layer.kind.name], impl=impl)


def build_network(case: Case, device: str = "cpu") -> Work:
    """Build the model and an image in memory.

    Raises:
        ValueError: mixed precision or a step of training, which are of ``lab/model_step.py``.
    """
    if case.amp != "none" or case.update:
        raise ValueError(f"{case.name}: {case.work} in {case.precision} is run by a profile alone")
    model = build_model(case, device)
    leaves = tuple(parameter for parameter in model.parameters() if parameter.requires_grad)
    inputs = {"image": make_image(case, model, case.size, case.size, device)}
    return Work(lambda image: model(image), inputs, leaves, case.backward)


def check_network(case: Case, device: str = "cpu") -> str | None:
    """Compare the first blocks of the model with their definition in float64 on ``CHECK_GRID``;
    None, or what is wrong.

    The definition is the same model with the operations of ``visionattn.ops.reference`` (for the
    identity: with v itself), or, for timm's, with eager attention. Results and, where the case has
    a backward pass, the image's gradient are compared. Forms are those of ``check_operation``: each
    where the model chooses, and sums over classes as at the size of the case.
    """
    case = replace(case, batch=1)
    model = build_model(case, device)
    model.blocks = model.blocks[:CHECK_DEPTH]
    as_trained(model)
    rows, columns = model.patch_embed.patch_size
    image = make_image(case, model, CHECK_GRID[0] * rows, CHECK_GRID[1] * columns, device)
    definition = copy.deepcopy(model).double()
    if not is_ours(case.base):
        unfuse(definition)
    for layer in attentions_of(definition):
        if layer.operation is not values_alone:
            layer.operation = definition_of(layer.kind)
    expected = results(definition.forward, {"x": image.double()}, case.backward)

    def run(form: str) -> dict[str, Tensor]:
        set_form(model, form)
        return results(model.forward, {"x": image}, case.backward)

    formed, tokens = has_forms(case.name), (case.size // rows) * (case.size // columns)
    limit = 10 * tolerance(case.torch_dtype)
    return check_forms(case, formed, run, expected, limit, tokens)


def definition_of(kind: AttentionKind) -> Callable[..., Tensor]:
    """Return the definition of an attention as a function of what the layer passes."""

    def call(q: Tensor, k: Tensor, v: Tensor, *, value_drop: float, form=None, **options) -> Tensor:
        assert value_drop == 0, "models are compared without dropout"
        return defined(kind)(q, k, v, **options)

    return call
