"""Machine code of one kernel as NVIDIA's disassembler prints it: instructions, the loops around
them, and what they are.

It knows nothing of Triton but where its disassembler lies, and nothing of how often a loop runs.
"""

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile

FILE_LINE = re.compile(r'//## File "(.*)", line (\d+)')
LABEL = re.compile(r"^(\.L_\w+):")
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*)(.*);")
BRANCH = re.compile(r"`\((\.L_\w+)\)")
MATRIX = re.compile(r"(HMMA|HGMMA|QGMMA|IGMMA|DMMA|UTC\w*MMA)\b")
ASKED_BEFORE = 6
"""Instructions up to a branch back among which a waiting loop asks."""
WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
MARKERS = ("LDG", "LDGSTS", "STG", "BAR", "SHFL", "RED", "ATOMG")
"""Instructions that ptxas neither makes nor drops: their number tells how often it has unrolled a
loop."""


@dataclass(frozen=True)
class Instruction:
    """One line of the disassembly."""

    address: int
    opcode: str
    """With its suffixes: ``HGMMA.64x64x16.F32.BF16``."""
    place: tuple[str, int]
    """File and line of the source, ("", 0) where there is none."""
    target: int | None = None
    """The address that a branch jumps to."""
    conditional: bool = False
    """Whether a thread may leave it out: it has a predicate."""

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix instruction."""
        return MATRIX.match(self.opcode) is not None

    @property
    def operations(self) -> float | None:
        """Of a matrix instruction, for one warp, in the time of half precision; None where the
        opcode does not tell."""
        if not self.is_matrix:
            return 0.0
        times = 2 if "TF32" in self.opcode else 1
        if match := re.match(
            r"HGMMA\.(?:SP\.)?(\d+)x(\d+)x(\d+)", self.opcode
        ):  # of four warps together
            return times * 2.0 * int(match[1]) * int(match[2]) * int(match[3]) / 4
        if match := re.match(r"HMMA\.(?:SP\.)?16(8)(4|8|16)\b", self.opcode):
            return times * 2.0 * 16 * int(match[1]) * int(match[2])
        return None

    @property
    def loaded_bytes(self) -> int:
        """Bytes that each thread asks global memory for."""
        if self.name not in ("LDG", "LDGSTS"):
            return 0
        suffixes = self.opcode.split(".")
        return next((size for name, size in WIDTHS.items() if name in suffixes), 4)

    @property
    def name(self) -> str:
        """The opcode without suffixes."""
        return self.opcode.split(".")[0]


@dataclass(frozen=True)
class Loop:
    """Instructions from ``first`` to the branch back at ``last``, both addresses."""

    first: int
    last: int
    place: tuple[str, int]
    """Of the branch back, which carries the line of the source's ``for``."""

    def __contains__(self, instruction: Instruction) -> bool:
        return self.first <= instruction.address <= self.last

    def waits(self, code: list[Instruction]) -> bool:
        """Whether the branch only asks again whether something is done, or returns from asking."""
        before = [x for x in code if x.address <= self.last][-ASKED_BEFORE:]
        return any(x.opcode.endswith("TRYWAIT") or x.name == "NANOSLEEP" for x in before)


@lru_cache
def tool(name: str) -> str:
    """The path of a tool of NVIDIA's that Triton brings along."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def disassembled(cubin: bytes) -> str:
    """The text of ``nvdisasm`` with lines of the source."""
    return _of_file("nvdisasm", ("-c", "-g"), cubin)


def usage(cubin: bytes) -> dict[str, int]:
    """Registers of a thread ("REG"), and bytes of its stack and local memory."""
    text = _of_file("cuobjdump", ("--dump-resource-usage",), cubin)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def _of_file(name: str, options: tuple[str, ...], cubin: bytes) -> str:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool(name), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(text: str) -> list[Instruction]:
    """Instructions in order, without the padding behind the last EXIT."""
    found, labels, waiting, place = [], {}, [], ("", 0)
    for line in text.splitlines():
        if match := FILE_LINE.search(line):
            place = match[1], int(match[2])
        elif match := LABEL.match(line.strip()):
            waiting.append(match[1])
        elif match := INSTRUCTION.search(line):
            address = int(match[1], 16)
            labels |= dict.fromkeys(waiting, address)
            waiting = []
            jump = BRANCH.search(match[4]) if match[3].startswith("BRA") else None
            # A uniform branch has its predicate behind its name.
            conditional = bool(match[2] or (jump and re.match(r"\s*!?U?P\w", match[4])))
            found.append((address, match[3], place, jump and jump[1], conditional))
    resolved = [Instruction(*first, labels.get(jump), may) for *first, jump, may in found]
    # Behind the code there is a branch to itself, and padding.
    end = next((i for i, x in enumerate(resolved) if x.target == x.address), len(resolved))
    return resolved[:end]


def loops(code: list[Instruction]) -> list[Loop]:
    """Loops by address of their first instruction, outer ones before inner ones.

    Branches back to one place are one loop. Loops that only wait are among them.
    """
    last: dict[int, Instruction] = {}
    for instruction in code:
        if instruction.target is not None and instruction.target < instruction.address:
            last[instruction.target] = instruction
    found = [Loop(first, branch.address, branch.place) for first, branch in last.items()]
    return sorted(found, key=lambda loop: (loop.first, -loop.last))


def markers(code: list[Instruction]) -> Counter:
    """Numbers of the instructions that tell how often a loop is unrolled."""
    return Counter(x.name for x in code if x.name in MARKERS)
