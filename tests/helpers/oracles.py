"""What the tests of the operations share: seeded inputs, loops over single pairs, and comparison by
name.

The loops know nothing of the package: they are what ``visionattn.ops.reference`` itself is checked
against.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that depend on the seed and the shape alone, drawn in float64 and rounded."""
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def draw_qkv(
    batch: int = 2,
    heads: int = 3,
    queries: int = 77,
    keys: int | None = None,
    d: int = 16,
    e: int = 24,
    seed: int = 0,
) -> dict[str, Tensor]:
    """q, k and v by name, in float64."""
    keys = queries if keys is None else keys
    shapes = {"q": (queries, d), "k": (keys, d), "v": (keys, e)}
    return {
        name: draw(batch, heads, *shape, seed=seed + i)
        for i, (name, shape) in enumerate(shapes.items())
    }


def draw_table(*shape: int, seed: int) -> Tensor:
    """A positive table."""
    return draw(*shape, seed=seed).abs() + 0.05


def draw_mask(batch: int, keys: int, seed: int = 7) -> Tensor:
    """A key mask that leaves about two thirds of the keys, and others in each batch entry."""
    mask = torch.rand(batch, keys, generator=torch.Generator().manual_seed(seed)) < 0.67
    mask[:, keys // 2] = True
    return mask


def draw_kept(batch: int, patches: int, present: int, seed: int = 11) -> Tensor:
    """Another choice of patches in another order for each batch entry."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [torch.randperm(patches, generator=generator)[:present] for _ in range(batch)]
    )


def run(
    function: Callable[..., Tensor], tensors: dict[str, Tensor], seed: int = 99
) -> dict[str, Tensor]:
    """The result under "out", and the gradient of every tensor under its name, for one fixed
    upstream gradient.

    The upstream gradient is a bfloat16 number, so that runs in different dtypes start from the same
    one.
    """
    inputs = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    out = function(**inputs)
    upstream = draw(*out.shape, seed=seed, dtype=torch.bfloat16).to(out.dtype)
    gradients = torch.autograd.grad(out, list(inputs.values()), upstream)
    return {"out": out.detach()} | dict(zip(inputs, gradients, strict=True))


def assert_agree(
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    tolerance: float = 1e-12,
    floor: float = 0.0,
) -> None:
    """Each entry agrees to ``tolerance`` times the largest magnitude of the expected one (at least
    ``floor``).
    """
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        got = actual[name]
        assert got.shape == want.shape, f"{name}: {tuple(got.shape)} instead of {tuple(want.shape)}"
        error, scale = (got - want).abs().max().item(), max(want.abs().max().item(), floor)
        assert error <= tolerance * scale, (
            f"{name}: off by {error:.2e} where the largest value is {scale:.2e}"
        )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expected, in float64."""
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm()).item()


def saved_bytes(function: Callable[..., Tensor], tensors: dict[str, Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass, each storage counted once."""
    storages: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        out = function(**inputs)
    assert out.requires_grad
    return sum(storages.values())


def peak_bytes(function: Callable[[], object]) -> int:
    """Highest level of CPU memory while ``function`` runs, above the level before it, as the
    profiler saw it.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    level = peak = 0
    for event in sorted(
        profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()
    ):
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


def dot(a: Tensor, b: Tensor) -> float:
    return math.fsum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def elu1(x: Tensor) -> Tensor:
    return torch.tensor(
        [value + 1 if value > 0 else math.exp(value) for value in x.tolist()], dtype=torch.float64
    )


def loop_mean(weight: Callable[[int, int, int, int], float], v: Tensor, queries: int) -> Tensor:
    """Weighted mean of the values, one pair at a time; ``weight(b, head, i, j)``."""
    batch, heads, keys, e = v.shape
    out = torch.zeros(batch, heads, queries, e, dtype=torch.float64)
    for b in range(batch):
        for head in range(heads):
            for i in range(queries):
                weights = [weight(b, head, i, j) for j in range(keys)]
                mass = math.fsum(weights)
                for f in range(e):
                    total = math.fsum(w * v[b, head, j, f].item() for j, w in enumerate(weights))
                    out[b, head, i, f] = total / mass if mass else 0.0
    return out


def loop_taylor_weight(
    q: Tensor, k: Tensor, temperature: Tensor | None, coefficients: tuple[float, float, float]
):
    """``weight(b, head, i, j)`` of TaylorShift."""
    a, b2, c = coefficients

    def weight(b: int, head: int, i: int, j: int) -> float:
        x = dot(q[b, head, i], k[b, head, j])
        if temperature is not None:
            lengths = math.sqrt(dot(q[b, head, i], q[b, head, i])) * math.sqrt(
                dot(k[b, head, j], k[b, head, j])
            )
            x = temperature[head].item() * x / lengths
        return a * x**2 + b2 * x + c

    return weight


def loop_relative_weight(relative, q: Tensor, present: list[list[bool]]):
    """``weight(b, head, i, j)`` of Flat, Axial or Joint, from where each token lies; prefix tokens
    lie nowhere.

    ``present[b][j]`` tells whether key j takes part.
    """
    layout, kind = relative.layout, type(relative).__name__
    width = 0 if layout is None else layout.grid.width

    def place(b: int, token: int) -> tuple[int, int] | None:
        if layout is None:
            return (0, token)
        if token < layout.num_prefix:
            return None
        patch = token - layout.num_prefix
        index = patch if layout.kept is None else int(layout.kept[b, patch])
        return divmod(index, layout.grid.width)

    def clip(delta: int, table: Tensor) -> int:
        horizon = (table.shape[1] - 1) // 2
        return max(-horizon, min(horizon, delta)) + horizon

    def classes(b: int, i: int, j: int) -> dict[str, int | tuple[int, int]]:
        """The class of the pair in each table, none where it takes no part."""
        here, there = place(b, i), place(b, j)
        if here is None or there is None or not present[b][j]:
            return {}
        dy, dx = there[0] - here[0], there[1] - here[1]
        if kind == "Axial":
            return {"rows": clip(dy, relative.rows), "columns": clip(dx, relative.columns)}
        if kind == "Joint":
            return {"table": (clip(dy, relative.table), clip(dx, relative.table))}
        if layout is not None and layout.present is not None:
            holds = layout.present[b].tolist()
            order = sorted(range(len(holds)), key=lambda place: (not holds[place], place))
            ours, theirs = (order.index(y * width + x) for y, x in (here, there))
            return {"table": clip(theirs - ours, relative.table)}
        return {"table": clip(dy * width + dx, relative.table)}

    def weight(b: int, head: int, i: int, j: int) -> float:
        total = 0.0
        for name, index in classes(b, i, j).items():
            table = getattr(relative, name)
            score = dot(elu1(q[b, head, i]), table[head if table.shape[0] > 1 else 0][index])
            if relative.normalization == "mean":
                score /= sum(
                    classes(b, i, other).get(name) == index for other in range(len(present[b]))
                )
            total += score
        return total

    return weight
