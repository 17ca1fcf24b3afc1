"""Build and check whole models for comparisons: models of this package, timm's models, and models
whose attention is replaced by the identity. The latter are the upper limit of speed.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import timm
import torch
from einops import rearrange
from timm.models import VisionTransformer
from torch import Tensor, nn

import visionattn.models  # noqa: F401  registers the package's models with timm
from visionattn.cli.files import first_line
from visionattn.lab.accuracy import tolerance
from visionattn.lab.cases import Case, Work
from visionattn.lab.compared_operations import check_forms, defined, results
from visionattn.layers import Attention
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.registration import is_ours
from visionattn.models.weights import UNBUILDABLE
from visionattn.ops import OPERATIONS
from visionattn.ops.attentions import AttentionKind

CHECK_GRID = (29, 31)
"""Grid of patches for checks of models; not a square."""
CHECK_DEPTH = 2
"""Number of blocks to check; all are alike."""
SHARPER = 4
"""Factor for the weights of q, k, v and the output gate, for checks of results."""
NEAR = 0.2
"""Standard deviation of the weights of value convolutions, for checks of results."""


def values_alone(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """Return the values unchanged: an operation without attention."""
    return v


def identity_twin(model: VisionAttnTransformer) -> VisionAttnTransformer:
    """Return a copy of a model of this package, with equal parameters, whose attention layers
    return the values unchanged. Projections, value convolution and output gate stay.
    """
    copied = copy.deepcopy(model)
    for layer in attentions_of(copied):
        layer.operation = values_alone
    return copied


@torch.no_grad()
def as_trained(model: nn.Module) -> None:
    """Scale the weights of a new model, so that its result depends on its attention as in a trained
    model.

    At initialization, attention hardly depends on q, the output gate passes a fifth of the
    result, and the value convolution is 0.
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
    """Tell whether the model has forms, as models of this package with attention do."""
    base, *options = model.split("+")
    return timm.is_model(base) and is_ours(base) and "identity" not in options


def read_options(case: Case) -> dict[str, str]:
    """Return the options of a model's name: "identity", "eager", and ``heads=12``.

    Raises:
        ValueError: a model that timm does not know, an option or a form that it does not have, or
            options that contradict each other.
    """
    if not timm.is_model(case.base):
        raise ValueError(
            "expected a timm model such as scaleformer_vit_s or vit_small_patch16_224 (or "
            f"taylorshift_vit_s), got {case.base!r}"
        )
    found = {name: value for name, _, value in (each.partition("=") for each in case.options)}
    heads = found.get("heads", "1")
    if set(found) - {"identity", "eager", "heads"} or not heads.isdecimal() or int(heads) < 1:
        raise ValueError(
            f"{case.name}: expected options identity, eager or heads=NUMBER, got "
            f"{'+'.join(case.options)}"
        )
    ours = is_ours(case.base)
    if "identity" in found and not ours:
        raise ValueError(f"{case.name}: identity needs a model of visionattn")
    if "eager" in found and (ours or not case.base.startswith("vit_")):
        raise ValueError(f"{case.name}: eager needs a timm vit_*")
    if case.form != "auto" and not has_forms(case.name):
        raise ValueError(f"{case.label}: form needs a model of visionattn with attention")
    return found


def build_model(case: Case, device: str = "cpu", **args: object) -> nn.Module:
    """Build the model of the case with seeded weights, in ``train`` mode if the case has a
    backward.

    Args:
        case: states dtype, form, depth and gradient checkpointing.
        device: where to build the model.
        args: further arguments of the model. A timm model without ``img_size`` accepts any size.

    Raises:
        ValueError: not a plain vision transformer, an option that it does not have, or too large a
            depth.
    """
    options = read_options(case)
    if "heads" in options:
        args["num_heads"] = int(options["heads"])
    if not is_ours(case.base):
        args["dynamic_img_size"] = "img_size" not in args
    with torch.random.fork_rng(devices=[]), torch.device("meta" if device == "meta" else "cpu"):
        torch.manual_seed(0)
        try:
            model = timm.create_model(case.base, **args)
        except UNBUILDABLE as error:
            raise ValueError(
                f"{case.name} cannot be built as a vision transformer: {first_line(error)}"
            ) from error
    if not isinstance(model, VisionTransformer) or hasattr(model.patch_embed, "backbone"):
        raise ValueError(
            f"expected a plain vision transformer of timm or visionattn, got {case.name}"
        )
    if "identity" in options:
        model = identity_twin(model)
    if "eager" in options:
        unfuse(model)
    if case.depth is not None:
        if case.depth > len(model.blocks):
            raise ValueError(
                f"expected depth at most {len(model.blocks)} for {case.name}, got {case.depth}"
            )
        model.blocks = model.blocks[: case.depth]
    if case.checkpointing:
        model.set_grad_checkpointing()
    set_form(model, case.form)
    return model.to(device, case.torch_dtype).train(case.backward)


def make_image(case: Case, model: nn.Module, height: int, width: int, device: str) -> Tensor:
    """Return seeded images ``[B, C, height, width]``: one-hot gray levels for pixel models."""
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
    """Set the form of every attention layer of a model of this package; "auto" changes nothing."""
    if form != "auto":
        for block in model.blocks:
            block.attn.form = form


def unfuse(model: nn.Module) -> None:
    """Make every attention layer of a timm model compute its full attention matrix."""
    for block in model.blocks:
        block.attn.fused_attn = False


def attentions_of(model: nn.Module) -> list[Attention]:
    """Return the attention layers of this package in a model; empty for other models."""
    return [layer for layer in model.modules() if isinstance(layer, Attention)]


def set_impl(model: nn.Module, impl: str) -> None:
    """Set the implementation, "eager" or "triton", of every attention layer that has both."""
    for layer in attentions_of(model):
        if layer.kind.impl and layer.operation is not values_alone:
            layer.operation = partial(OPERATIONS[layer.kind.name], impl=impl)


def build_network(case: Case, device: str = "cpu") -> Work:
    """Build the model and an image in memory."""
    model = build_model(case, device)
    leaves = tuple(parameter for parameter in model.parameters() if parameter.requires_grad)
    inputs = {"image": make_image(case, model, case.size, case.size, device)}
    return Work(lambda image: model(image), inputs, leaves, case.backward)


def check_network(case: Case, device: str = "cpu") -> str | None:
    """Compare the first blocks of the model with their definition in float64 on ``CHECK_GRID``;
    return the error as text, or None.

    The definition is the same model with the operations of ``visionattn.ops.reference``, or timm's
    model with eager attention. The identity is its own definition. The check compares results and,
    if the case has a backward pass, the gradient of the image. Forms are checked as in
    ``check_operation``.
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
    """Return the definition of an attention as a function of the layer's arguments."""

    def call(q: Tensor, k: Tensor, v: Tensor, *, value_drop: float, form=None, **options) -> Tensor:
        assert value_drop == 0, "models are compared without dropout"
        return defined(kind)(q, k, v, **options)

    return call
