"""Bfloat16 products on processors: errors against the same formulas computed in bfloat16."""

from functools import partial

import pytest
import torch

from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Flat, Joint, kernelized_attention, sums, taylorshift_attention
from visionattn.ops.feature_maps import elu1
from visionattn.ops.position import joint, kinds
from visionattn.ops.reference import kernelized_attention as exact_kernelized
from visionattn.ops.reference import taylorshift_attention as exact_taylorshift

TAU = torch.linspace(1, 6, 6)


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch):
    """Take the path of processors with bfloat16 products on every processor."""
    monkeypatch.setattr(sums, "has_bfloat16_products", lambda: True)


def _unit(x):
    return x / x.square().sum(-1, keepdim=True).sqrt()


def efficient_kernelized(q, k, v):
    q, k = elu1(q), elu1(k)
    return (q @ (k.mT @ v)) / (q @ k.sum(2).unsqueeze(3))


def efficient_taylorshift(q, k, v, tau):
    q, k = tau.view(-1, 1, 1) * _unit(q), _unit(k)
    pairs = [torch.einsum("...i,...j->...ij", x, x).flatten(3) for x in (q, k)]
    values = pairs[0] @ (pairs[1].mT @ v) / 2 + q @ (k.mT @ v) + v.sum(2, keepdim=True)
    mass = pairs[0] @ pairs[1].sum(2).unsqueeze(3) / 2 + q @ k.sum(2).unsqueeze(3) + k.shape[2]
    return values / mass


def direct_kernelized(q, k, v):
    weights = elu1(q) @ elu1(k).mT
    return (weights @ v) / weights.sum(3, keepdim=True)


def direct_taylorshift(q, k, v, tau):
    scores = tau.view(-1, 1, 1) * _unit(q) @ _unit(k).mT
    weights = scores.square() / 2 + scores + 1
    return (weights @ v) / weights.sum(3, keepdim=True)


def ours_kernelized(form):
    return lambda q, k, v: kernelized_attention(q, k, v, form=form)


def ours_taylorshift(form):
    return lambda q, k, v, tau: taylorshift_attention(q, k, v, temperature=tau, form=form)


def exact(operation, tensors):
    """Return output and gradients in float64 of quadratic definitions."""
    if operation == "kernelized":
        return run(exact_kernelized, tensors)
    return run(lambda q, k, v, tau: exact_taylorshift(q, k, v, temperature=tau), tensors)


def run(attend, tensors):
    grad, *inputs = tensors
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = attend(*inputs)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in inputs)]


def errors(found, wanted):
    return [
        ((x.double() - y).square().mean() / y.square().mean()).sqrt().item()
        for x, y in zip(found, wanted, strict=True)
    ]


def draw(operation, tokens, width):
    """Return the gradient of the output, q, k, v and for TaylorShift a temperature of each head."""
    generator = torch.Generator().manual_seed(tokens)
    shape = 1, 6, tokens, width
    tensors = [torch.randn(shape, generator=generator).bfloat16() for _ in range(4)]
    return tensors if operation == "kernelized" else [*tensors, TAU.bfloat16()]


@pytest.mark.parametrize("tokens", [5, 701, 1500])
@pytest.mark.parametrize("form", ["direct", "efficient"])
@pytest.mark.parametrize("operation", ["kernelized", "taylorshift"])
def test_errors_are_at_most_twice_those_of_bfloat16_throughout(operation, form, tokens):
    tensors = draw(operation, tokens, 12)
    wanted = exact(operation, [x.double() for x in tensors])
    ours = run(globals()[f"ours_{operation}"](form), tensors)
    naive = run(globals()[f"{form}_{operation}"], tensors)
    names = ("out", "q", "k", "v", "temperature")[: len(ours)]
    for name, own, other in zip(names, errors(ours, wanted), errors(naive, wanted), strict=True):
        assert own <= 2 * other, f"{name}: {own:.1e} against {other:.1e}"


@pytest.mark.parametrize("tokens", [701, 65_536])
@pytest.mark.parametrize("operation", ["kernelized", "taylorshift"])
@torch.no_grad()
def test_sums_of_inference_stay_as_exact(operation, tokens):
    _, *tensors = draw(operation, tokens, 8)
    naive = globals()[f"efficient_{operation}"]
    wanted = naive(*(x.double() for x in tensors))
    ours = globals()[f"ours_{operation}"]("efficient")(*tensors)
    own, other = errors([ours, naive(*tensors)], [wanted, wanted])
    assert own <= 2 * other


@pytest.mark.parametrize("form", ["direct", "tiled"])
@pytest.mark.parametrize("grid, horizons", [((13, 18), (3, 2)), ((1, 200), (0, 4))])
def test_class_sums_err_at_most_twice_as_much_as_bfloat16_throughout(
    monkeypatch, grid, horizons, form
):
    monkeypatch.setattr(joint, "direct_is_faster", lambda *sizes: form == "direct")
    index = joint._class_index(grid, grid, horizons, torch.device("cpu"))
    counts, tokens = torch.nn.functional.one_hot(index).sum(1), len(index)
    generator = torch.Generator().manual_seed(3)
    q, v = (torch.randn(1, 2, *grid, 12, generator=generator).bfloat16() for _ in range(2))
    table = torch.rand(2, counts.shape[1], 12, generator=generator).bfloat16()

    def definition(q, table, v):
        per_class = elu1(q.flatten(2, 3)) @ table.mT * (tokens / counts.clamp(min=1).to(q.dtype))
        weights = per_class.gather(3, index.expand(1, 2, -1, -1))
        return (weights @ v.flatten(2, 3)) / weights.sum(3, keepdim=True)

    counted = counts.view(1, *grid, -1).float(), torch.full((1, 1, 1, 1), float(tokens))
    values, mass = joint.class_sums(q, table, v, *counted, *horizons)
    assert values.dtype == mass.dtype == torch.float32
    ours, wanted = (
        (values / mass.unsqueeze(4)).flatten(2, 3),
        definition(q.double(), table.double(), v.double()),
    )
    own, other = errors([ours, definition(q, table, v)], [wanted, wanted])
    assert own <= 2 * other


@pytest.mark.parametrize("relative", ["joint", "flat"])
def test_class_sums_are_of_bfloat16_products_without_gradients_alone(monkeypatch, relative):
    """Under recorded gradients, which nearly cancel, tables are float32."""
    layout, seen = TokenLayout(0, Grid(5, 7)), []
    monkeypatch.setattr(
        kinds,
        "class_sums",
        lambda q, table, *rest: seen.append(table.dtype) or joint.class_sums(q, table, *rest),
    )
    _, q, k, v = draw("kernelized", 35, 12)
    table = torch.rand(6, 7, 7, 12).bfloat16()
    given = Joint(table, layout) if relative == "joint" else Flat(table[:, 0], layout)
    options = dict(relative=given, form="efficient")
    for operation in (
        kernelized_attention,
        partial(taylorshift_attention, temperature=TAU),
    ):
        operation(q, k, v, **options)
        with torch.no_grad():
            operation(q, k, v, **options)
    assert seen == [torch.float32, torch.bfloat16] * 2
