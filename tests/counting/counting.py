"""What one launch costs, counted from its machine code and its sizes without a GPU."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from tests.counting import sass, trips
from tests.counting.branches import shares_of_programs
from tests.counting.occupancy import Use, programs_per_multiprocessor
from tests.helpers.kernel_launches import Launch


@dataclass(frozen=True)
class Count:
    """One launch, compiled for one GPU. Instructions are of warps."""

    kernel: str
    """The function's name."""
    programs: int
    warps: int
    """Of a program."""
    registers: int
    spilled_bytes: int
    shared_bytes: int
    resident: int
    """Programs that a multiprocessor holds at once."""
    looped: float
    """Instructions in loops, of all programs."""
    once: float
    """Instructions outside of loops, of all programs."""
    matrix: float
    """Matrix instructions, of all programs."""
    barriers: float
    """Barriers, counted for each warp, of all programs."""
    operations: float
    """Of products, a multiply and an add being two."""
    bytes: float
    """Of the tensors that it reads and writes, each counted once."""
    loaded_bytes: float
    """That its threads ask global memory for, however often and from whichever cache."""
    unit: str
    """The matrix unit's instruction: "wgmma", "mma.sync", "tcgen05.mma" or ""."""


@dataclass(frozen=True)
class Compiled:
    """What one compilation gives, whatever sizes it is launched with."""

    cubin: bytes
    ttir: str
    ptx: str
    warps: int
    shared_bytes: int

    @cached_property
    def code(self) -> list[sass.Instruction]:
        """The machine code."""
        return sass.instructions(sass.disassembled(self.cubin))

    @cached_property
    def loops(self) -> list[sass.Loop]:
        """Of the machine code."""
        return sass.loops(self.code)

    @cached_property
    def usage(self) -> dict[str, int]:
        """Registers of a thread ("REG"), and bytes of its stack and local memory."""
        return sass.usage(self.cubin)

    @property
    def spilled_bytes(self) -> int:
        """Of registers of a thread that did not fit."""
        return max(self.usage["STACK"], self.usage["LOCAL"])

    @property
    def unit(self) -> str:
        """The matrix unit's instruction; "" where there is none."""
        units = ("tcgen05.mma", "wgmma", "mma.sync")
        return next((name for name in units if name in self.ptx), "")


_compiled: dict[tuple[str, int], Compiled] = {}


def compiled(launch: Launch, capability: int) -> Compiled:
    """Compile the launch with the bundled compiler, once in a process."""
    import triton

    key, source, target, options = launch.specialised(capability)
    place = f"{launch.kernel.fn.__module__} {key}", capability
    if place not in _compiled:
        found = triton.compile(source, target=target, options=options)
        texts = (found.asm[name] for name in ("cubin", "ttir", "ptx"))
        _compiled[place] = Compiled(*texts, found.metadata.num_warps, found.metadata.shared)
    return _compiled[place]


def count(launch: Launch, capability: int) -> Count:
    """Count one launch as compiled for a GPU of this capability."""
    found = compiled(launch, capability)
    code, text = found.code, trips.read(found.ttir, launch.grid, launch.arguments)
    loops = loops_of_source(code, found.loops, text)
    runs = times_run(code, loops, text, found.ptx)
    programs = math.prod(launch.grid)
    every = programs * found.warps

    def total(wanted) -> float:
        return every * sum(runs[x.address] for x in code if wanted(x))

    inside = {x.address for x in code for loop in loops if x in loop}
    use = Use(found.warps, found.usage["REG"], found.shared_bytes)
    return Count(
        kernel=launch.kernel.__name__,
        programs=programs,
        warps=found.warps,
        registers=use.registers,
        spilled_bytes=found.spilled_bytes,
        shared_bytes=use.shared_bytes,
        resident=programs_per_multiprocessor(use, capability),
        looped=total(lambda x: x.address in inside),
        once=total(lambda x: x.address not in inside),
        matrix=total(lambda x: x.is_matrix),
        barriers=total(lambda x: x.name == "BAR"),
        operations=operations_of(code, runs, every, text),
        bytes=touched_bytes(launch.args),
        loaded_bytes=every * 32 * sum(runs[x.address] * x.loaded_bytes for x in code),
        unit=found.unit,
    )


def operations_of(
    code: Sequence[sass.Instruction], runs: dict[int, float], warps: int, text: trips.Text
) -> float:
    """Of the matrix instructions, those that several warps repeat included; of the source where
    opcodes do not tell.

    Raises:
        ValueError: they are fewer than the source wants, so that a loop was taken to run less often
        than it does.
    """
    each = [(x.operations, runs[x.address]) for x in code if x.is_matrix]
    if any(operations is None for operations, _ in each):
        return text.operations
    found = warps * sum(operations * times for operations, times in each)
    if not found >= 0.99 * text.operations:
        wanted = f"where the source has {text.operations:.4g}"
        raise ValueError(f"matrix instructions of {found:.4g} operations, {wanted}")
    return found


def touched_bytes(arguments: Sequence[object]) -> int:
    """Bytes of all tensors among the arguments, elements that several of them share counted
    once."""
    tensors = {}
    for x in arguments:
        if isinstance(x, torch.Tensor) and x.numel():
            own = [
                (size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if stride
            ]
            elements = 1
            for size, _ in own:
                elements *= size
            place = (x.untyped_storage()._cdata, x.storage_offset(), x.dtype)
            tensors[place] = max(tensors.get(place, 0), elements * x.element_size())
    return sum(tensors.values())


def loops_of_source(
    code: Sequence[sass.Instruction], loops: Sequence[sass.Loop], text: trips.Text
) -> list[sass.Loop]:
    """Loops with the place of the ``for`` that they are of; those that only wait are left out.

    The branch back carries the line of its ``for``, or where ptxas has scheduled it among others,
    theirs: such a loop is of the one ``for`` whose own is not met, of several the last above it.

    Raises:
        ValueError: there is none.
    """
    lines = {loop.place[1] for loop in text.loops}
    known = [loop for loop in loops if loop.place[1] in lines]
    met = {loop.place[1] for loop in known}
    missing = [loop.place for loop in text.loops if loop.place[1] not in met]
    for loop in loops:
        if loop in known or loop.waits(code):
            continue
        file, line = loop.place
        above = [place for place in missing if place[0] == file and place[1] < line]
        above = missing if len(missing) == 1 else above
        if not above:
            raise ValueError(f"a loop of the machine code at {loop.place} is not in the source")
        known.append(replace(loop, place=max(above, key=lambda place: place[1])))
    return sorted(known, key=lambda loop: (loop.first, -loop.last))


def times_run(
    code: Sequence[sass.Instruction], loops: Sequence[sass.Loop], text: trips.Text, ptx: str
) -> dict[int, float]:
    """How often each instruction runs in a program, by address, the mean over programs.

    A loop of the machine code is that of the source whose ``for`` its branch back carries. Where
    ptxas has unrolled one, or made several of one, each takes its share of the trips. Code outside
    of loops runs in the programs that come to it.
    """
    shares_of_code = shares_of_programs(code, loops, text.loops)
    looped = {x.address for x in code if any(x in loop for loop in loops)}
    runs = {x.address: 1.0 if x.address in looped else shares_of_code[x.address] for x in code}
    per_line = loop_markers(ptx)
    for place in dict.fromkeys(loop.place for loop in loops):
        own = [loop for loop in loops if loop.place == place]
        meant = [loop for loop in text.loops if loop.place[1] == place[1]]
        for loop, times in shares(code, own, meant, per_line):
            for x in code:
                if x in loop:
                    runs[x.address] *= times
    return runs


def shares(
    code, own: Sequence[sass.Loop], meant: Sequence[trips.Loop], per_line: dict[int, list[int]]
):
    """Each loop of the machine code and how often it runs, of loops of the source with the same
    line."""
    in_ptx = per_line.get(own[0].place[1], [])
    if len(own) == len(meant):
        for number, (loop, source) in enumerate(zip(own, meant, strict=True)):
            found = sum(sass.markers([x for x in code if x in loop]).values())
            wanted = in_ptx[number] if number < len(in_ptx) else 0
            unrolled = max(1, round(found / wanted)) if wanted else 1
            yield loop, float(source.trips.mean()) / unrolled
        return
    # Unrolled copies and the remainder of one loop: by the marks that one trip leaves.
    bodies = [sum(sass.markers([x for x in code if x in loop]).values()) for loop in own]
    least = (
        (in_ptx[0] if in_ptx else 0) or min(body for body in bodies if body) if any(bodies) else 1
    )
    left = sum(float(source.trips.mean()) for source in meant)
    for body, loop in sorted(zip(bodies, own, strict=True), key=lambda pair: -pair[0]):
        unrolled = max(1, round(body / least))
        times = left // unrolled if unrolled > 1 else left
        left -= times * unrolled
        yield loop, times


PTX_MARK = re.compile(
    r"\b(ld\.global|cp\.async\.c[ag]|st\.global|bar\.sync|barrier\.sync|shfl\.sync|red\.global|atom\.global)"
)


def loop_markers(ptx: str) -> dict[int, list[int]]:
    """By line of the source's ``for``, the marks in each loop of the PTX that branches back
    there."""
    lines, labels, found, line = ptx.splitlines(), {}, {}, 0
    for number, text in enumerate(lines):
        text = text.strip()
        if match := re.match(r"(\$L__BB\w+):", text):
            labels[match[1]] = number
        elif match := re.match(r"\.loc\s+\d+ (\d+) ", text):
            line = int(match[1])
        elif match := re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\w+);", text):
            first = labels.get(match[1])
            if first is not None:
                found.setdefault(line, []).append(
                    sum(len(PTX_MARK.findall(x)) for x in lines[first:number])
                )
    return found
