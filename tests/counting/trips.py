"""How often the loops of a kernel run, and what it multiplies, from Triton's own text of it (TTIR)
and the numbers of a launch.

Integers that the text computes from sizes and program ids are computed here for a sample of
programs. It knows nothing of the machine code.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

SAMPLE = 128
"""Programs whose loops are counted, evenly spaced over the grid."""
LOCATION = re.compile(r"^(#loc\w*) = loc\((.*)\)$")
RESULT = re.compile(r"^\s*(%[\w.$-]+)(?::\d+)? = (.*?)(?: loc\(.*\))?$")
FOR = re.compile(
    r"scf\.for (?:unsigned )?(%[\w.$-]+) = (%[\w.$-]+) to (%[\w.$-]+) step (%[\w.$-]+)"
)
DOT = re.compile(r"tt\.dot(?:_scaled)? .*: tensor<(\d+)x(\d+)x(\w+)> \* tensor<(\d+)x(\d+)x\w+>")
SCALAR = re.compile(r": (?:i1|i8|i16|i32|i64|index)\b")


@dataclass
class Loop:
    """One ``for`` of the source."""

    trips: np.ndarray
    """For each program of the sample."""
    place: tuple[str, int]
    """File and line of the ``for``."""
    inside: "Loop | None"
    taken: np.ndarray
    """For each program of the sample, 1 where it comes to the loop at all, else 0."""
    operations: float = 0.0
    """Of its products in one trip, a multiply and an add being two, without those of loops within
    it."""

    @property
    def total(self) -> np.ndarray:
        """Trips of one program, those of the loops around it included."""
        return self.trips if self.inside is None else self.trips * self.inside.total


@dataclass
class Text:
    """What the text of a kernel says of one launch."""

    loops: list[Loop]
    operations: float
    """Of all products of all programs, in the time of half precision: float32 in three passes of
    tf32, each of half the rate, counts six times."""


def _locations(text: str) -> dict[str, str]:
    return {match[1]: match[2] for line in text.splitlines() if (match := LOCATION.match(line))}


def _place(name: str, locations: dict[str, str]) -> tuple[str, int]:
    """The innermost file and line of a location."""
    value = locations.get(name, name)
    if match := re.match(r'"([^"]*)":(\d+):\d+', value):
        return match[1], int(match[2])
    inner = re.search(r"#loc\w*", value)
    return _place(inner[0], locations) if inner else ("", 0)


def _truncated(x, y):
    """Division towards zero, as C has it; 0 by 0."""
    safe = np.where(y == 0, 1, y)
    return np.sign(x) * np.sign(safe) * (np.abs(x) // np.abs(safe))


def _compared(kind: str, x, y):
    by_kind = {
        "eq": np.equal,
        "ne": np.not_equal,
        "slt": np.less,
        "sle": np.less_equal,
        "sgt": np.greater,
    }
    by_kind |= {
        "sge": np.greater_equal,
        "ult": np.less,
        "ule": np.less_equal,
        "ugt": np.greater,
        "uge": np.greater_equal,
    }
    return by_kind[kind](x, y).astype(np.int64)


BINARY = {
    "addi": np.add,
    "subi": np.subtract,
    "muli": np.multiply,
    "divsi": _truncated,
    "divui": _truncated,
    "ceildivsi": lambda x, y: -(-x // np.where(y == 0, 1, y)),
    "remsi": lambda x, y: x - y * _truncated(x, y),
    "remui": lambda x, y: x - y * _truncated(x, y),
    "minsi": np.minimum,
    "minui": np.minimum,
    "maxsi": np.maximum,
    "maxui": np.maximum,
    "andi": np.bitwise_and,
    "ori": np.bitwise_or,
    "xori": np.bitwise_xor,
    "shli": np.left_shift,
    "shrsi": np.right_shift,
}


def _value(
    operation: str, known: dict[str, np.ndarray], ids: tuple[np.ndarray, ...], grid: tuple[int, ...]
):
    """The integer that one operation gives, None where it is none or is not known."""
    if match := re.match(r"arith\.constant (true|false|-?\d+)(?: : \w+)?$", operation):
        return np.int64(
            {"true": 1, "false": 0}.get(match[1])
            if match[1] in ("true", "false")
            else int(match[1])
        )
    if match := re.match(r"tt\.get_(program_id|num_programs) (\w)", operation):
        axis = "xyz".index(match[2])
        return ids[axis] if match[1] == "program_id" else np.int64(grid[axis])
    if not SCALAR.search(operation) or not operation.startswith("arith."):
        return None
    name = operation.split(".", 1)[1].split(" ")[0]
    given = [known.get(word) for word in re.findall(r"%[\w.$-]+", operation.split(" : ")[0])]
    if any(x is None for x in given):
        return None
    if name == "cmpi":
        return _compared(re.match(r"arith\.cmpi (\w+)", operation)[1], *given)
    if name in ("extsi", "extui", "trunci", "index_cast"):
        return given[0]
    if name == "select":
        return np.where(given[0] != 0, given[1], given[2])
    return BINARY[name](*given) if name in BINARY else None


def read(text: str, grid: tuple[int, ...], arguments: dict[str, object]) -> Text:
    """Loops and products of one launch.

    Args:
        text: TTIR.
        grid: programs along each axis.
        arguments: the numbers that the kernel was launched with, by name.

    Raises:
        ValueError: how often a loop runs depends on something that is not known before the launch.
    """
    sizes = (*grid, 1, 1)[:3]
    programs = math.prod(sizes)
    flat = np.unique(np.linspace(0, programs - 1, min(SAMPLE, programs)).astype(np.int64))
    ids = flat % sizes[0], flat // sizes[0] % sizes[1], flat // (sizes[0] * sizes[1])
    known = {f"%{name}": np.int64(x) for name, x in arguments.items() if isinstance(x, int)}
    locations, loops, operations = _locations(text), [], 0.0
    every = np.ones_like(flat)
    # Around the line: loops, and of other blocks which programs of the sample run them.
    blocks: list[Loop | np.ndarray] = []
    left = every
    lines = text.splitlines()
    ends = _ends(lines)
    for number, line in enumerate(lines):
        stripped = line.strip()
        if stripped.startswith("}"):
            # "} else {" closes one block and opens another.
            left = blocks.pop() if blocks else every
        if match := FOR.search(line):
            first, last, step = (known.get(match[i]) for i in (2, 3, 4))
            place = _place(ends[number], locations)
            if first is None or last is None or step is None:
                where = f"line {place[1]} of {place[0]}"
                raise ValueError(
                    f"{where}: how often this loop runs is not known before the launch"
                )
            inside, taken = _around(blocks, every)
            trips = np.maximum(0, -(-(last - first) // step)) * taken
            everywhere = taken if inside is None else taken * inside.taken
            loops.append(Loop(trips, place, inside, everywhere))
            known[match[1]] = first + step * (trips // 2)
            blocks.append(loops[-1])
            continue
        if match := DOT.search(line):
            passes = (2 if match[3] == "f32" else 1) * (3 if "tf32x3" in line else 1)
            own = 2.0 * int(match[1]) * int(match[2]) * int(match[5]) * passes
            around, taken = _around(blocks, every)
            if around is None:
                operations += own * programs * taken.mean()
            else:
                around.operations += own * taken.mean()
        elif match := RESULT.match(line):
            value = _value(match[2], known, ids, sizes)
            if value is not None:
                known[match[1]] = value
        if re.search(r"\{\s*(loc\(.*\))?$", stripped) and not stripped.startswith("module"):
            blocks.append(_taken(stripped, known, left, every))
    operations += sum(loop.operations * loop.total.mean() * programs for loop in loops)
    return Text(loops, operations)


def _around(blocks: list, every: np.ndarray) -> tuple[Loop | None, np.ndarray]:
    """The innermost loop, and which programs of the sample run what is in it here."""
    taken = every
    for block in reversed(blocks):
        if isinstance(block, Loop):
            return block, taken
        taken = taken * block
    return None, taken


def _taken(line: str, known: dict, left: Loop | np.ndarray, every: np.ndarray) -> np.ndarray:
    """Which programs of the sample run the block that the line opens; all where it is unknown."""
    if line.startswith("} else"):
        return every if left is every else 1 - left
    match = re.search(r"scf\.if (%[\w.$-]+)", line)
    condition = known.get(match[1]) if match else None
    return every if condition is None else (condition != 0).astype(np.int64) * every


def _ends(lines: list[str]) -> dict[int, str]:
    """For the line of each ``scf.for`` the name of its location, which stands at its closing
    brace."""
    found, opened = {}, []
    for number, line in enumerate(lines):
        stripped = line.strip()
        if stripped.startswith("}") and opened:
            start = opened.pop()
            if start is not None and (match := re.search(r"loc\((#loc\w*)\)", stripped)):
                found[start] = match[1]
        if re.search(r"\{\s*(loc\(.*\))?$", stripped) or FOR.search(line):
            opened.append(number if FOR.search(line) else None)
    return {start: found.get(start, "") for start in range(len(lines))}
