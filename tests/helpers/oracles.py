"""What the tests of the operations share: seeded inputs, comparison by name, and memory."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


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


class Largest(TorchDispatchMode):
    """Keeps the most entries of any tensor that was made within."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else (found,):
            if isinstance(x, torch.Tensor):
                self.entries = max(self.entries, x.numel())
        return found
