"""Operations on a GPU: checked against their definition in float64, then timed beside SDPA and
beside PyTorch's own operations.

Inputs are fresh random numbers that lie as a model's projection leaves them: ``[B, N, 3, h, d]``.
"""

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from visionattn.cli.ends import is_out_of_memory
from visionattn.lab.accuracy import BASELINE_ERROR, BESIDE_EAGER, errors_of, wrong
from visionattn.lab.cases import Case
from visionattn.lab.compare import Quartiles
from visionattn.lab.gpu.device import Call, Gpu
from visionattn.lab.gpu.expected import cost_of_case, in_units
from visionattn.lab.gpu.results import GpuResult
from visionattn.lab.gpu.timing import (
    Ceilings,
    Timed,
    called,
    in_words,
    is_fatal,
    recorded,
    seconds_of,
    sets_needed,
)
from visionattn.lab.operations import definition_of, function_of, make_tensors, with_gradients
from visionattn.lab.target_table import BATCH, HEADS
from visionattn.lab.targets import Target
from visionattn.ops.taylorshift.gpu import takes_efficient_kernels

FLEX_TOKENS = 16_384
"""Up to which ``flex_attention`` is compiled and timed: beyond it takes longer, and says the same.
"""
CHUNK_ELEMENTS = 2**27
"""Weights of the definition that are in memory at once."""
LONGEST = 2**20
"""Tokens up to which it is looked for where ``form="auto"`` changes."""


@dataclass
class Bench:
    """Where and how figures are measured."""

    gpu: Gpu
    generator: torch.Generator
    ceilings: Ceilings | None = None
    impl: str = "triton"
    model_impl: str = "auto"
    """What attention layers of models run; "auto" takes kernels on a GPU."""
    backend: str = "inductor"
    """Compiles the blocks of models."""
    seconds: float = 0.25
    """For each work, while which more than ``rounds`` rounds are made."""
    rounds: int = 5
    depth: int | None = None
    """Blocks of models; None: all."""
    filled_tokens: int = 2**20
    """Tokens of all heads and images that fill the GPU."""

    @property
    def device(self) -> torch.device:
        """The device that tensors are on."""
        return self.gpu.device

    def seconds_of(
        self, entries: Sequence[Timed], times: float = 1, rounds: int | None = None
    ) -> list[Quartiles]:
        """Return seconds of one call of each entry, in turns, for ``times`` as long as usual; at
        least ``rounds`` rounds.
        """
        rounds = min(self.rounds, rounds or self.rounds)
        return seconds_of(entries, self.gpu, seconds=times * self.seconds, rounds=rounds)

    def recorded(self, calls: Sequence[Call]) -> Timed:
        """Return the calls as one CUDA graph, where that can be recorded."""
        return recorded(calls, self.gpu)


HEADS_FIRST = "b n h d -> b h n d"


def draw(case: Case, bench: Bench, value_width: int | None = None) -> dict[str, Tensor]:
    """Draw inputs by name: q, k, v ``[B, h, N, d]``, what the options ask for, and ``grad``, the
    gradient of the result.

    Args:
        value_width: e, of v and the result; None: d.
    """
    options = dict(generator=bench.generator, device=bench.device, dtype=case.torch_dtype)
    shape = (case.batch, case.size, case.heads)
    qkv = torch.randn(*shape[:2], 3, case.heads, case.width, **options)
    qkv = rearrange(qkv, "b n qkv h d -> qkv b h n d")
    tensors = make_tensors(case, 1, str(bench.device)) | dict(
        zip("qkv", qkv.unbind(0), strict=True)
    )
    if value_width not in (None, case.width):
        tensors["v"] = rearrange(torch.randn(*shape, value_width, **options), HEADS_FIRST)
    grad = torch.randn(*shape, value_width or case.width, **options)
    return tensors | {"grad": rearrange(grad, HEADS_FIRST)}


def call_of(function: Callable[..., Tensor], tensors: dict[str, Tensor], backward: bool) -> Call:
    """Return one run of the forward, or of forward and backward, on these inputs."""
    grad = tensors["grad"]
    inputs = {name: tensor.detach() for name, tensor in tensors.items() if name != "grad"}
    if not backward:

        def forward() -> Tensor:
            with torch.inference_mode():
                return function(**inputs)

        return forward
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    return lambda: with_gradients(function(**leaves), leaves, grad)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let memory that is not written yet hold NaN within it: what a kernel leaves out does not look
    right from an earlier run.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # which operators do not repeat bit by bit
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def outputs(
    function: Callable[..., Tensor], tensors: dict[str, Tensor], backward: bool
) -> dict[str, Tensor]:
    """Return the result and the gradients by name, written into memory that held NaN."""
    with poisoned_memory():
        result = call_of(function, tensors, backward)()
    return result if backward else {"out": result}  # type: ignore[return-value]


def definition(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what the case means, in float64, some queries at a time; for cases without order or
    position.

    Source: ``visionattn.ops.reference``.
    """
    function = definition_of(case, case.size, str(tensors["q"].device))
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    step = max(1, CHUNK_ELEMENTS // (case.batch * case.heads * case.size))
    rows = {"out": [], "gradient of q": []}
    sums = {
        f"gradient of {name}": torch.zeros_like(x)
        for name, x in wide.items()
        if case.backward and name not in ("q", "grad")
    }

    def add(start: int) -> None:
        part = wide | {name: wide[name][:, :, start : start + step] for name in ("q", "grad")}
        for name, x in outputs(function, part, case.backward).items():
            if name in rows:
                rows[name].append(x)
            else:
                sums[name] += x  # one tensor of all keys, whatever the number of parts

    for start in range(0, case.size, step):
        add(start)
    return {name: torch.cat(parts, 2) for name, parts in rows.items() if parts} | sums


def check(case: Case, tensors: dict[str, Tensor], bench: Bench) -> tuple[str, float, list[str]]:
    """Find status, largest error, and what to note, of the kernels on these inputs."""
    where = str(bench.device)
    expected = definition(case, tensors)
    errors = errors_of(
        outputs(function_of(case, case.size, where, bench.impl), tensors, case.backward), expected
    )
    status = wrong(errors, case.dtype) or "ok"
    eager = errors_of(
        outputs(function_of(case, case.size, where, "eager"), tensors, case.backward), expected
    )
    far = {
        name: errors[name] / eager[name]
        for name in errors
        if errors[name] > BESIDE_EAGER * eager[name]
    }
    return (
        status,
        max(errors.values()),
        [f"error of {name} {ratio:.1f} x eager's" for name, ratio in far.items()],
    )


def input_sets(case: Case, bench: Bench) -> list[dict[str, Tensor]]:
    """Return as many inputs as the cache does not hold."""
    first = draw(case, bench)
    size = sum(first[name].numel() * first[name].element_size() for name in "qkv")
    return [first, *(draw(case, bench) for _ in range(sets_needed(size, bench.gpu) - 1))]


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def flex_of(bench: Bench) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return ``flex_attention`` without a modification, compiled."""
    compiled = torch.compile(flex_attention, dynamic=False, backend=bench.backend)
    return lambda q, k, v: compiled(q, k, v)


def softmax_baselines(case: Case, bench: Bench) -> dict[str, Callable[..., Tensor]]:
    """Return softmax attention as PyTorch has it, by the column of the table; flex up to
    ``FLEX_TOKENS``.
    """
    found = {"SDPA": _sdpa, "Flash": _flash}
    return found | ({"flex": flex_of(bench)} if takes_flex(case, bench) else {})


def takes_flex(case: Case, bench: Bench) -> bool:
    """Tell whether ``flex_attention`` is timed; on a processor, where a rehearsal runs, it has no
    gradient.
    """
    return case.size <= FLEX_TOKENS and not (case.backward and bench.device.type == "cpu")


def measure_operation(figure: Target, bench: Bench) -> GpuResult:
    """Check, then time the kernels, softmax attention and eager operations in one interleaved
    run.
    """
    case, where = figure.case, str(bench.device)
    sets = input_sets(case, bench)
    status, error, notes = check(case, sets[0], bench)
    if status != "ok":
        return GpuResult(figure, status, error=error)
    kernel, eager = (function_of(case, case.size, where, impl) for impl in (bench.impl, "eager"))
    entries = {
        "kernel": bench.recorded([call_of(kernel, tensors, case.backward) for tensors in sets])
    }
    # Softmax attention knows none of the case's options; a baseline that cannot be timed says why.
    plain = [{name: tensors[name] for name in ("q", "k", "v", "grad")} for tensors in sets]
    others: dict[str, float | str] = {}
    for name, function in softmax_baselines(case, bench).items():
        found = baseline(function, plain, case, bench)
        (others if isinstance(found, str) else entries)[name] = found
    # Eager operations may need more memory than there is: they are no reason to lose the row.
    try:
        call = call_of(eager, sets[0], case.backward)
        call()
        entries["eager"] = called([call])
    except RuntimeError as failure:
        if not is_out_of_memory(failure):
            raise
        others["eager"] = "out of memory"
    times = dict(zip(entries, bench.seconds_of(list(entries.values())), strict=True))
    others |= {name: spread.median for name, spread in times.items()}
    notes += [
        f"{name} not recorded, launches count"
        for name, entry in entries.items()
        if name != "eager" and not entry.replayed
    ]
    columns = {name.lower(): others.get(name) for name in ("SDPA", "Flash", "flex", "eager")}
    result = GpuResult(figure, "ok", times["kernel"], **columns, error=error, notes=notes)
    return _related(result, case, bench.ceilings)


def baseline(
    function: Callable[..., Tensor], sets: Sequence[dict[str, Tensor]], case: Case, bench: Bench
) -> Timed | str:
    """Return softmax attention checked and ready to be timed; or why it is not.

    What cannot run here, as a form that PyTorch has for other GPUs, leaves the row as it is.
    """
    try:
        expected, found = (call_of(one, sets[0], case.backward)() for one in (_sdpa, function))
        if not case.backward:
            expected, found = {"out": expected}, {"out": found}
        errors = errors_of(found, expected)
        beyond = [name for name, error in errors.items() if not error <= BASELINE_ERROR]
        if beyond:
            return f"wrong: error {errors[beyond[0]]:.1e} of {beyond[0]}"
        del found, expected
        return bench.recorded([call_of(function, tensors, case.backward) for tensors in sets])
    except Exception as failure:  # of a compiler too, which shares no base class with the others
        if is_fatal(failure):
            raise
        return in_words(failure)


def _related(result: GpuResult, case: Case, ceilings: Ceilings) -> GpuResult:
    """Fill in the floor and the numbers of the bounds."""
    cost, seconds = cost_of_case(case), result.seconds.median
    result.floor_seconds = ceilings.floor_seconds(cost)
    sdpa = None if isinstance(result.sdpa, str) else result.sdpa
    by_unit = in_units(cost, seconds, ceilings, sdpa)
    result.values = result.target.values_of(by_unit)
    return result


def crossing(ratio: Callable[[int], float], low: int, high: int, within: float = 1.05) -> float:
    """Return tokens at which a ratio that grows with the tokens passes 1, by bisection of their
    logarithm.

    Returns:
        ``low`` where it is above 1 there already, infinity where it is not even at ``high``.
    """
    if (below := ratio(low)) >= 1:
        return low
    if (above := ratio(high)) < 1:
        return float("inf")
    while high > within * low and high - low > 1:
        middle = round((low * high) ** 0.5)
        if (found := ratio(middle)) < 1:
            low, below = middle, found
        else:
            high, above = middle, found
    part = torch.tensor([below, above, low, high], dtype=torch.float64).log()
    return (part[2] - part[0] / (part[1] - part[0]) * (part[3] - part[2])).exp().item()


def measure_crossover(figure: Target, bench: Bench) -> GpuResult:
    """Find from how many tokens on the efficient form is the faster one, with heads that fill the
    GPU, and with 12 in the note.

    What ``form="auto"`` takes is a matter of its estimate; where that changes is noted beside.
    """
    limit, error = figure.case.size, 0.0
    for form in ("direct", "efficient"):
        case = replace(figure.case, form=form)
        status, found, notes = check(case, draw(case, bench), bench)
        error = max(error, found)
        if status != "ok":
            return GpuResult(figure, f"{status} ({form})", error=found)
    low, high = max(16, limit // 8), 4 * limit
    filling = partial(_filling, bench=bench)
    filled = crossing(
        lambda n: _direct_over_efficient(figure.case, n, filling(n), bench), low, high
    )
    few = crossing(lambda n: _direct_over_efficient(figure.case, n, BATCH, bench), low, high)
    auto = [auto_crossing(figure.case, batch_of) for batch_of in (filling, lambda n: BATCH)]
    notes = [
        f"auto changes at {auto[0]}",
        f"B*h = {BATCH * HEADS}: {_place(few, low, high)}, auto changes at {auto[1]}",
    ]
    if filled in (low, float("inf")):
        notes.insert(0, _place(filled, low, high))
    return GpuResult(figure, "ok", values=(filled,), error=error, notes=notes)


def _filling(tokens: int, bench: Bench) -> int:
    """Return images of ``HEADS`` heads that fill the GPU."""
    return max(1, bench.filled_tokens // (HEADS * tokens))


def auto_crossing(case: Case, batch_of: Callable[[int], int]) -> int:
    """Return from how many tokens on ``form="auto"`` takes the efficient kernels; arithmetic alone,
    nothing is measured.

    Args:
        batch_of: images, of a number of tokens.
    """

    def efficient(tokens: int) -> bool:
        shape = (batch_of(tokens), case.heads, tokens, case.width)
        q, k, v = torch.empty(3, *shape, dtype=case.torch_dtype, device="meta")
        return takes_efficient_kernels("auto", q, k, v, case.backward)

    return bisect_left(range(1, LONGEST), True, key=efficient) + 1


def _place(tokens: float, low: int, high: int) -> str:
    """Return a crossing in words, between the tokens that it was looked for."""
    return (
        f"none up to {high}"
        if tokens == float("inf")
        else f"{low} or below"
        if tokens == low
        else f"{tokens:.0f} tokens"
    )


def _direct_over_efficient(case: Case, tokens: int, batch: int, bench: Bench) -> float:
    """Return seconds of the direct form over those of the efficient one."""
    case = replace(case, size=tokens, batch=batch)
    sets, entries = input_sets(case, bench), []
    for form in ("direct", "efficient"):
        function = function_of(replace(case, form=form), tokens, str(bench.device), bench.impl)
        entries.append(
            bench.recorded([call_of(function, tensors, case.backward) for tensors in sets])
        )
    direct, efficient = bench.seconds_of(entries, 1 / 4)
    return direct.median / efficient.median


def eager_wider(case: Case, tensors: dict[str, Tensor], bench: Bench) -> dict[str, Tensor]:
    """Return what PyTorch's operations, held to the definition by the tests, give for these inputs
    in float32; in float64 for that.
    """
    wide = "float64" if case.dtype == "float32" else "float32"
    function = function_of(replace(case, dtype=wide), case.size, str(bench.device), "eager")
    return outputs(
        function, {name: x.to(getattr(torch, wide)) for name, x in tensors.items()}, case.backward
    )
