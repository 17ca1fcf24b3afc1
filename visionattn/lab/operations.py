"""Operations that are compared, with the inputs they run on and the definition each is checked
against.

``sdpa``, ``eager`` and ``eager-kernelized`` are what a user would otherwise take. It knows nothing
of models and of time.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

import visionattn.ops as ops
from visionattn.lab.accuracy import disagreement, tolerance
from visionattn.lab.cases import Case, Work, forms_to_check
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import OPERATIONS, Axial, Flat, Joint, count_classes, reference
from visionattn.ops.attentions import ATTENTIONS, AttentionKind
from visionattn.ops.choice import choosing_as
from visionattn.ops.feature_maps import FEATURE_MAPS, elu1
from visionattn.ops.position.kinds import KINDS, relative_sums
from visionattn.ops.sums import accumulation_dtype

POSITIONS = tuple(KINDS)
MAPS = tuple(name for name in FEATURE_MAPS if name != "elu1")
"""Feature maps that an option names, beside "favor", FAVOR+."""


def _options_of(kind: AttentionKind) -> tuple[str, ...]:
    """Return what may stand behind the name of one of our attentions."""
    maps = (*MAPS, "favor") if kind.feature_map else ()
    own = ("temperature",) * kind.temperature + maps + ("causal",) * kind.causal
    if kind.windows:
        return tuple(name for name in POSITIONS if KINDS[name] is not Flat)
    return (*own, *POSITIONS) if kind.signed else (*own, *POSITIONS, "sum", "masked")


OPTIONS = dict.fromkeys(("sdpa", "eager", "eager-kernelized", "relative"), ("causal",))
OPTIONS |= {kind.name: _options_of(kind) for kind in ATTENTIONS.values()}
"""Options of each operation. Relative position has ``normalization="mean"``, as in the models,
unless "sum" is named; with "masked" every fourth key takes no part.
"""
FORMED = (*(kind.name for kind in ATTENTIONS.values() if kind.forms), "relative")
"""Operations that have a direct and an efficient form."""
CHECK_TOKENS = 33 * 41
"""More than a chunk of any operation holds, on a grid that is no square."""


def check_name(case: Case) -> None:
    """Raise ValueError for an operation or an option that does not exist."""
    if case.base not in OPTIONS:
        raise ValueError(f"operation {case.base!r}: wanted one of {', '.join(OPTIONS)}")
    known = OPTIONS[case.base]
    for option in case.options:
        if option not in known:
            raise ValueError(f"{case.base} has no option {option!r}; it has {', '.join(known)}")
    if len(set(case.options) & set(POSITIONS)) > 1:
        raise ValueError(f"{case.name}: one relative position at a time")


def has_position(name: str) -> bool:
    """Tell whether the operation of this name has relative position, and so a horizon."""
    base, *options = name.split("+")
    return base == "relative" or bool(set(options) & set(POSITIONS))


def grid_of(tokens: int) -> Grid:
    """Return the grid nearest to a square that has this many patches, height at most the width."""
    height = next(h for h in range(math.isqrt(tokens), 0, -1) if tokens % h == 0)
    return Grid(height, tokens // height)


def make_tensors(case: Case, tokens: int, device: str) -> dict[str, Tensor]:
    """Make seeded inputs by name, in the dtype of the case: q, k, v ``[B, h, N, d]``, and what the
    options ask for.
    """
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        if device == "meta":
            return torch.empty(*shape, dtype=case.torch_dtype, device=device)
        return torch.randn(*shape, generator=generator).to(device, case.torch_dtype)

    shape, side = (case.batch, case.heads, tokens, case.width), 2 * case.horizon + 1
    tensors = {name: draw(*shape) for name in "qkv"}
    if case.base == "taylorshift" and "temperature" not in case.options:
        tensors["q"] /= case.width**0.5  # scores of about 1, as with a temperature
    if "temperature" in case.options:
        tensors["temperature"] = draw(case.heads).abs() + 1
    sides = {
        "joint": {"table": (side, side)},
        "axial": {"rows": (side,), "columns": (side,)},
        "flat": {"table": (side,)},
    }
    kinds = (
        ["flat"]
        if case.base == "relative"
        else [word for word in case.options if word in POSITIONS]
    )
    for kind in kinds:
        for name, extent in sides[kind].items():  # type: ignore[attr-defined]
            tensors[name] = draw(case.heads, *extent, case.width).abs() * 16 / case.width
    return tensors


def position_of(case: Case, tokens: int, device: str) -> Callable[..., object]:
    """Make the relative position of tables. Counts per class are made here, once, as a model makes
    them once per forward.
    """
    signed = case.base in ATTENTIONS and ATTENTIONS[case.base].signed
    mode = "sum" if signed or "sum" in case.options or case.base == "relative" else "mean"
    layout = TokenLayout(0, grid_of(tokens))
    if "joint" in case.options and not signed:
        wide = torch.float64 if case.dtype == "float64" else torch.float32
        layout = layout._replace(
            counts=count_classes(layout, (case.horizon,) * 2, dtype=wide, device=device)
        )

    def position(tables: dict[str, Tensor]):
        if not tables:
            return None
        if "joint" in case.options:
            return Joint(tables["table"], layout, mode)
        if "axial" in case.options:
            return Axial(tables["rows"], tables["columns"], layout, mode)
        return Flat(tables["table"], None, mode)

    return position


def function_of(
    case: Case, tokens: int, device: str, impl: str | None = None
) -> Callable[..., Tensor]:
    """Return the operation of the case as a function of its tensors; ``impl`` "eager" or "triton"
    is passed on to it where it has both.
    """
    position, causal = position_of(case, tokens, device), "causal" in case.options
    kind, options = ATTENTIONS.get(case.base), arguments_of(case, tokens, device)
    if kind is not None and kind.forms:
        options["form"] = case.form
    if impl is not None and kind is not None and kind.impl:
        options["impl"] = impl

    def call(
        q: Tensor, k: Tensor, v: Tensor, temperature: Tensor | None = None, **tables: Tensor
    ) -> Tensor:
        relative = position(tables)
        if case.base == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        if case.base == "eager":
            return eager_attention(q, k, v, causal)
        if case.base == "eager-kernelized":
            return eager_kernelized_attention(q, k, v, causal)
        if kind is not None:
            learned = {"temperature": temperature} if kind.temperature else {}
            return OPERATIONS[kind.name](q, k, v, relative=relative, **learned, **options)
        if case.form == "direct":
            return dense_relative(q, v, relative, causal)
        total = q.new_full((1, 1, 1), v.shape[2], dtype=accumulation_dtype(q, v))
        return relative_sums(relative, q, v, None, total, causal).values

    return call


def arguments_of(case: Case, tokens: int, device: str) -> dict[str, object]:
    """Return what the options of one of our attentions ask for, besides relative position and what
    is learned. With "masked" every fourth key is left out, others in each image.
    """
    arguments: dict[str, object] = {}
    if case.base in ATTENTIONS and ATTENTIONS[case.base].windows and not has_position(case.name):
        arguments["layout"] = TokenLayout(0, grid_of(tokens))
    if "causal" in case.options:
        arguments["causal"] = True
    if "masked" in case.options:
        image = torch.arange(case.batch, device=device)[:, None]
        key = torch.arange(tokens, device=device)
        arguments["key_mask"] = (key + image) % 4 != 3
    if case.base in ATTENTIONS and ATTENTIONS[case.base].feature_map:
        arguments["feature_map"] = feature_map_of(case, device)
    return arguments


def feature_map_of(case: Case, device: str):
    """Return the name of the feature map, or FAVOR+ as an object with seeded features."""
    if "favor" not in case.options:
        return next((word for word in case.options if word in MAPS), "elu1")
    return ops.RandomFeatures(case.width, case.width, torch.Generator().manual_seed(1)).to(device)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Compute ``softmax(q k^T / sqrt(d)) v`` with all scores in memory: what models write without a
    fused operator.
    """
    scores = torch.matmul(q * q.shape[3] ** -0.5, k.mT)
    if causal:
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return torch.matmul(scores.softmax(-1), v)


def eager_kernelized_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Compute kernelized attention in its quadratic form with all scores in memory, masked where
    causal: the papers' naive one.
    """
    weights = torch.matmul(elu1(q), elu1(k).mT)
    if causal:
        weights = weights.tril()
    return torch.matmul(weights, v) / weights.sum(3, keepdim=True)


def dense_relative(q: Tensor, v: Tensor, relative: Flat, causal: bool) -> Tensor:
    """Return the relative term with all its weights in memory, ``A_rel`` of Scaleformer by its
    definition.
    """
    present = torch.ones(v.shape[0], v.shape[2], dtype=torch.bool, device=v.device)
    weights = reference.relative_weights(relative, q, present)
    return torch.matmul(weights.tril() if causal else weights, v)


def build_operation(case: Case, device: str = "cpu") -> Work:
    """Build inputs in memory and the operation on them."""
    check_name(case)
    tensors = make_tensors(case, case.size, device)
    if case.backward:
        tensors = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    return Work(
        function_of(case, case.size, device), tensors, tuple(tensors.values()), case.backward
    )


def check_operation(case: Case, device: str = "cpu") -> str | None:
    """Compare the case with its definition in float64 at ``CHECK_TOKENS`` tokens; None, or what is
    wrong.

    With form "auto" each form is compared, since at the size of the case another one may run than
    at that of the check; sums over classes are made in the form of the size of the case. Of a batch
    two images are compared.
    """
    case = replace(case, batch=min(case.batch, 2))
    tensors = make_tensors(case, CHECK_TOKENS, device)
    meaning = definition_of(case, CHECK_TOKENS, device)
    expected = results(
        meaning, {name: tensor.double() for name, tensor in tensors.items()}, case.backward
    )
    for form in forms_to_check(case, case.base in FORMED):
        with choosing_as(tokens=case.size):
            actual = results(
                function_of(replace(case, form=form), CHECK_TOKENS, device), tensors, case.backward
            )
        wrong = disagreement(actual, expected, tolerance(case.torch_dtype))
        if wrong:
            return wrong
    return None


def results(
    function: Callable[..., Tensor], tensors: dict[str, Tensor], backward: bool
) -> dict[str, Tensor]:
    """Return the result under "out" and, with ``backward``, each gradient under "gradient of
    <name>", for one upstream gradient.
    """
    if not backward:
        with torch.no_grad():
            return {"out": function(**tensors)}
    inputs = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    out = function(**inputs)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16().to(out)
    return with_gradients(out, inputs, upstream)


def with_gradients(out: Tensor, inputs: dict[str, Tensor], upstream: Tensor) -> dict[str, Tensor]:
    """Return the result and the gradient of each input by name; None where it does not depend on
    the input.
    """
    gradients = torch.autograd.grad(out, tuple(inputs.values()), upstream, allow_unused=True)
    named = zip((f"gradient of {name}" for name in inputs), gradients, strict=True)
    return {"out": out.detach()} | dict(named)


def definition_of(case: Case, tokens: int, device: str) -> Callable[..., Tensor]:
    """Return what the case means, from ``visionattn.ops.reference``, as a function of
    its tensors.
    """
    position, causal = position_of(case, tokens, device), "causal" in case.options
    meant = {"sdpa": "softmax", "eager": "softmax", "eager-kernelized": "kernelized"}
    kind = ATTENTIONS.get(meant.get(case.base, case.base))
    arguments = arguments_of(case, tokens, device)

    def call(
        q: Tensor, k: Tensor, v: Tensor, temperature: Tensor | None = None, **tables: Tensor
    ) -> Tensor:
        relative = position(tables)
        if kind is None:
            return dense_relative(q, v, relative, causal)
        learned = {"temperature": temperature} if kind.temperature else {}
        return defined(kind)(q, k, v, relative=relative, **learned, **arguments)

    return call


def defined(kind: AttentionKind) -> Callable[..., Tensor]:
    """Return the definition of an attention, which is called as the operation is but
    has no forms.
    """
    definition = getattr(reference, f"{kind.name}_attention")

    def call(q: Tensor, k: Tensor, v: Tensor, *, relative=None, **options) -> Tensor:
        if kind.windows or not kind.signed:
            return definition(q, k, v, relative=relative, **options)
        bias = None if relative is None else reference.relative_bias(relative, q)
        return definition(q, k, v, bias=bias, **options)

    return call
