"""Build operations for comparisons, with their inputs, and check each against its definition.

``sdpa``, ``eager`` and ``eager-kernelized`` are the baselines.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.lab.accuracy import disagreement, tolerance
from visionattn.lab.cases import Case, Work
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import OPERATIONS, Flat, RandomFeatures, count_classes, reference
from visionattn.ops.attention_sums import accumulation_dtype
from visionattn.ops.attentions import ATTENTIONS, FORM_CHOICES, AttentionKind
from visionattn.ops.feature_maps import FEATURE_MAPS, elu1
from visionattn.ops.form_choice import choosing_as
from visionattn.ops.position.relative_position import KINDS, relative_sums

POSITIONS = tuple(KINDS)
MAPS = tuple(name for name in FEATURE_MAPS if name != "elu1")
"""Feature maps that are options, in addition to "favor" (FAVOR+)."""


def _options_of(kind: AttentionKind) -> tuple[str, ...]:
    """Return the options that may follow the name of an attention of this package."""
    maps = (*MAPS, "favor") if kind.feature_map else ()
    own = ("temperature",) * kind.temperature + maps + ("causal",) * kind.causal
    if kind.windows:
        return tuple(name for name in POSITIONS if KINDS[name] is not Flat)
    return (*own, *POSITIONS) if kind.signed else (*own, *POSITIONS, "sum", "masked")


OPTIONS = dict.fromkeys(("sdpa", "eager", "eager-kernelized", "relative"), ("causal",))
OPTIONS |= {kind.name: _options_of(kind) for kind in ATTENTIONS.values()}
"""Options of each operation. Relative position has ``normalization="mean"`` as in the models, and
``"sum"`` with the option "sum". "masked" masks every fourth key.
"""
TABLES = {"joint": ("table",), "axial": ("rows", "columns"), "flat": ("table",)}
"""Names of the tables of each relative position."""
FORMED = (*(kind.name for kind in ATTENTIONS.values() if kind.forms), "relative")
"""Operations that have a direct and an efficient form."""
CHECK_TOKENS = 33 * 41
"""Number of tokens of a check: more than a chunk of any operation, on a grid that is not square."""


def check_name(case: Case) -> None:
    """Raise ValueError for an operation or an option that does not exist."""
    if case.base not in OPTIONS:
        raise ValueError(f"operation {case.base!r}: expected one of {', '.join(OPTIONS)}")
    known = OPTIONS[case.base]
    for option in case.options:
        if option not in known:
            raise ValueError(f"{case.base} has no option {option!r}; expected {', '.join(known)}")
    for names, kind in ((POSITIONS, "relative position"), ((*MAPS, "favor"), "feature map")):
        if len(set(case.options) & set(names)) > 1:
            raise ValueError(f"{case.name}: expected at most one {kind}")


def position_named(case: Case) -> str | None:
    """Return the kind of relative position of an operation; None without one."""
    if case.base == "relative":
        return "flat"
    return next((word for word in case.options if word in POSITIONS), None)


def grid_of(tokens: int) -> Grid:
    """Return the grid of this many patches nearest to a square, with height at most the width."""
    height = next(h for h in range(math.isqrt(tokens), 0, -1) if tokens % h == 0)
    return Grid(height, tokens // height)


def make_tensors(case: Case, tokens: int, device: str) -> dict[str, Tensor]:
    """Return seeded inputs by name, in the dtype of the case: q, k, v ``[B, h, N, d]``, and the
    inputs of the options.
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
    kind = position_named(case)
    extent = (side, side) if kind == "joint" else (side,)
    for name in TABLES.get(kind, ()):
        tensors[name] = draw(case.heads, *extent, case.width).abs() * 16 / case.width
    return tensors


def arguments_of(case: Case, tokens: int, device: str) -> dict[str, object]:
    """Return the keyword arguments for the options of an attention, without tensors that are
    learned.

    "masked" masks every fourth key, different keys in each image.
    """
    arguments: dict[str, object] = {}
    kind = ATTENTIONS.get(case.base)
    if kind is not None and kind.windows and position_named(case) is None:
        arguments["layout"] = TokenLayout(0, grid_of(tokens))
    if "causal" in case.options:
        arguments["causal"] = True
    if "masked" in case.options:
        image = torch.arange(case.batch, device=device)[:, None]
        key = torch.arange(tokens, device=device)
        arguments["key_mask"] = (key + image) % 4 != 3
    if "favor" in case.options:
        seeded = torch.Generator().manual_seed(1)
        arguments["feature_map"] = RandomFeatures(case.width, case.width, seeded).to(device)
    elif kind is not None and kind.feature_map:
        named = (word for word in case.options if word in MAPS)
        arguments["feature_map"] = next(named, "elu1")
    return arguments


def function_of(
    case: Case, tokens: int, device: str, impl: str | None = None
) -> Callable[..., Tensor]:
    """Return the operation of the case as a function of its tensors. An operation that has both
    implementations gets ``impl``, "eager" or "triton".
    """
    kind, options = ATTENTIONS.get(case.base), arguments_of(case, tokens, device)
    if kind is None:
        function = {
            "sdpa": sdpa,
            "eager": eager_attention,
            "eager-kernelized": eager_kernelized_attention,
            "relative": dense_relative if case.form == "direct" else linear_relative,
        }[case.base]
    else:
        function = OPERATIONS[kind.name]
        options |= {"form": case.form} if kind.forms else {}
        options |= {"impl": impl} if impl is not None and kind.impl else {}
    return _with_position(case, tokens, device, partial(function, **options))


def definition_of(case: Case, tokens: int, device: str) -> Callable[..., Tensor]:
    """Return the definition of the case, from ``visionattn.ops.reference``, as a function of its
    tensors.
    """
    baselines = {"sdpa": "softmax", "eager": "softmax", "eager-kernelized": "kernelized"}
    kind = ATTENTIONS.get(baselines.get(case.base, case.base))
    function = dense_relative if kind is None else defined(kind)
    options = arguments_of(case, tokens, device)
    return _with_position(case, tokens, device, partial(function, **options))


def _with_position(
    case: Case, tokens: int, device: str, function: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return a function of tensors by name that builds the relative position from its tables.

    The counts per class are computed only once, as in a model's forward.
    """
    kind, signed = position_named(case), case.base in ATTENTIONS and ATTENTIONS[case.base].signed
    if kind is None:
        return function
    mode = "sum" if signed or "sum" in case.options or case.base == "relative" else "mean"
    layout = TokenLayout(0, grid_of(tokens))
    if kind == "joint" and not signed:
        wide = torch.float64 if case.dtype == "float64" else torch.float32
        counts = count_classes(layout, (case.horizon,) * 2, dtype=wide, device=device)
        layout = layout._replace(counts=counts)
    names, place = TABLES[kind], None if kind == "flat" else layout

    def call(**tensors: Tensor) -> Tensor:
        tables = {name: tensors.pop(name) for name in names}
        relative = KINDS[kind](**tables, layout=place, normalization=mode)
        return function(**tensors, relative=relative)

    return call


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Compute softmax attention with PyTorch's ``scaled_dot_product_attention``."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Compute ``softmax(q k^T / sqrt(d)) v`` with all scores in memory, not fused."""
    scores = torch.matmul(q * q.shape[3] ** -0.5, k.mT)
    if causal:
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return torch.matmul(scores.softmax(-1), v)


def eager_kernelized_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Compute kernelized attention in its quadratic form, with all weights in memory: the naive
    version in the papers.
    """
    weights = torch.matmul(elu1(q), elu1(k).mT)
    if causal:
        weights = weights.tril()
    return torch.matmul(weights, v) / weights.sum(3, keepdim=True)


def dense_relative(q: Tensor, k: Tensor, v: Tensor, relative: Flat, causal: bool = False) -> Tensor:
    """Return the relative term with all its weights in memory: ``A_rel`` of Scaleformer by its
    definition. k is unused.
    """
    present = torch.ones(v.shape[0], v.shape[2], dtype=torch.bool, device=v.device)
    weights = reference.relative_weights(relative, q, present)
    return torch.matmul(weights.tril() if causal else weights, v)


def linear_relative(
    q: Tensor, k: Tensor, v: Tensor, relative: Flat, causal: bool = False
) -> Tensor:
    """Return the relative term by sums over classes, as in the models."""
    total = q.new_full((1, 1, 1), v.shape[2], dtype=accumulation_dtype(q, v))
    return relative_sums(relative, q, v, None, total, causal).values


def defined(kind: AttentionKind) -> Callable[..., Tensor]:
    """Return the definition of an attention. It takes the operation's arguments except ``form``."""
    definition = getattr(reference, f"{kind.name}_attention")

    def call(q: Tensor, k: Tensor, v: Tensor, *, relative=None, **options) -> Tensor:
        if kind.windows or not kind.signed:
            return definition(q, k, v, relative=relative, **options)
        bias = None if relative is None else reference.relative_bias(relative, q)
        return definition(q, k, v, bias=bias, **options)

    return call


def build_operation(case: Case, device: str = "cpu") -> Work:
    """Build the operation and its inputs in memory."""
    check_name(case)
    tensors = make_tensors(case, case.size, device)
    if case.backward:
        tensors = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    function = function_of(case, case.size, device)
    return Work(function, tensors, tuple(tensors.values()), case.backward)


def check_operation(case: Case, device: str = "cpu") -> str | None:
    """Compare the case with its definition in float64 at ``CHECK_TOKENS`` tokens. Return the error
    as text, or None.

    At most two images of a batch are compared, in the forms that ``check_forms`` chooses.
    """
    case = replace(case, batch=min(case.batch, 2))
    tensors = make_tensors(case, CHECK_TOKENS, device)
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    expected = results(definition_of(case, CHECK_TOKENS, device), wide, case.backward)

    def run(form: str) -> dict[str, Tensor]:
        function = function_of(replace(case, form=form), CHECK_TOKENS, device)
        return results(function, tensors, case.backward)

    limit = tolerance(case.torch_dtype)
    return check_forms(case, case.base in FORMED, run, expected, limit, case.size)


def check_forms(
    case: Case,
    has_forms: bool,
    run: Callable[[str], dict[str, Tensor]],
    expected: dict[str, Tensor],
    limit: float,
    tokens: int,
) -> str | None:
    """Compare the results of ``run`` with the definition; return the error as text, or None.

    For form "auto" all forms are compared, because the case may run in another form than the small
    check. Sums over classes are computed as at the size of the case.

    Args:
        case: the case to check.
        has_forms: whether the case has several forms.
        run: returns the results by name, given a form.
        expected: the results of the definition.
        limit: largest allowed error, see ``disagreement``.
        tokens: number of tokens that decides how sums over classes are computed.
    """
    for form in FORM_CHOICES if case.form == "auto" and has_forms else (case.form,):
        with choosing_as(tokens=tokens):
            wrong = disagreement(run(form), expected, limit)
        if wrong:
            return wrong
    return None


def results(
    function: Callable[..., Tensor], tensors: dict[str, Tensor], backward: bool
) -> dict[str, Tensor]:
    """Return the result as "out" and, with ``backward``, the gradient of each input as "gradient of
    <name>", for a seeded upstream gradient.
    """
    if not backward:
        with torch.no_grad():
            return {"out": function(**tensors)}
    inputs = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    out = function(**inputs)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16().to(out)
    return with_gradients(out, inputs, upstream)


def with_gradients(out: Tensor, inputs: dict[str, Tensor], upstream: Tensor) -> dict[str, Tensor]:
    """Return the result and the gradient of each input by name; None if the result does not depend
    on the input.
    """
    gradients = torch.autograd.grad(out, tuple(inputs.values()), upstream, allow_unused=True)
    named = zip((f"gradient of {name}" for name in inputs), gradients, strict=True)
    return {"out": out.detach()} | dict(named)
