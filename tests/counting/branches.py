"""Which programs of a launch run a part of the machine code, where programs differ in what they do.

A kernel may have a branch for each kind of its programs. How many take one is known of the loops
in it (``trips.Loop.taken``): what is reached through such a branch alone runs as often.
"""

from collections.abc import Sequence

import numpy as np

from tests.counting import sass, trips

ENDS = ("EXIT", "RET", "BRX", "JMP")


def shares_of_programs(
    code: Sequence[sass.Instruction],
    loops: Sequence[sass.Loop],
    meant: Sequence[trips.Loop],
) -> dict[int, float]:
    """The share of the programs that run each instruction, by address; of those in loops it is
    what runs the loop at all.

    Args:
        code: instructions by address.
        loops: those of the machine code, whose places are lines of the source.
        meant: those of the source.
    """
    if not code:
        return {}
    starts, follow = _blocks(code)
    above = _dominators(follow)
    last = _postdominators(follow)
    block_of = np.searchsorted(starts, [x.address for x in code], side="right") - 1
    runs = _programs_of_loops(starts, above, loops, meant)
    shares = np.ones(len(starts))
    for block in sorted(range(len(starts)), key=lambda block: len(above[block])):
        if block in last or len(above[block]) == 1:
            continue
        closest = max(above[block] - {block}, key=lambda other: len(above[other]))
        shares[block] = min(shares[closest], runs[block]) if block in runs else shares[closest]
    return {x.address: float(shares[block]) for x, block in zip(code, block_of, strict=True)}


def _programs_of_loops(starts, above, loops, meant) -> dict[int, float]:
    """By block that loops are reached through alone, the share of programs that run any of them."""
    masks: dict[int, np.ndarray] = {}
    for loop in loops:
        taken = [x.taken for x in meant if x.place[1] == loop.place[1]]
        if not taken:
            continue
        header = int(np.searchsorted(starts, loop.first, side="right")) - 1
        for block in above.get(header, ()):
            masks[block] = np.maximum(masks.get(block, 0), np.maximum.reduce(taken))
    return {block: float(mask.mean()) for block, mask in masks.items()}


def _blocks(code: Sequence[sass.Instruction]) -> tuple[list[int], dict[int, list[int]]]:
    """Addresses where straight code begins, and which of it may follow which."""
    starts, places = {code[0].address}, {x.address for x in code}
    for x, after in zip(code, code[1:], strict=False):
        if x.target is not None or x.name in ENDS:
            starts.add(after.address)
        if x.target in places:
            starts.add(x.target)
    ordered = sorted(starts)
    number = {address: i for i, address in enumerate(ordered)}
    follow: dict[int, list[int]] = {i: [] for i in range(len(ordered))}
    for x, after in zip(code, [*code[1:], None], strict=True):
        if after is not None and after.address not in number:
            continue
        block = int(np.searchsorted(ordered, x.address, side="right")) - 1
        if x.target in number:
            follow[block].append(number[x.target])
        goes_on = x.conditional or (x.target is None and x.name not in ENDS)
        if after is not None and goes_on:
            follow[block].append(number[after.address])
    return ordered, follow


def _dominators(follow: dict[int, list[int]], first: int = 0) -> dict[int, set[int]]:
    """Of each block that can be reached, all through which every way to it leads, with itself."""
    before: dict[int, list[int]] = {block: [] for block in follow}
    for block, after in follow.items():
        for other in after:
            before[other].append(block)
    reached, ways = {first}, [first]
    while ways:
        for other in follow[ways.pop()]:
            if other not in reached:
                reached.add(other)
                ways.append(other)
    found = {block: set(reached) for block in reached} | {first: {first}}
    changed = True
    while changed:
        changed = False
        for block in sorted(reached - {first}):
            new = {block} | set.intersection(*(found[x] for x in before[block] if x in reached))
            if new != found[block]:
                found[block], changed = new, True
    return found | {block: {block} for block in follow if block not in reached}


def _postdominators(follow: dict[int, list[int]]) -> set[int]:
    """Blocks through which every way from the first one to an end leads."""
    end = len(follow)
    back: dict[int, list[int]] = {block: [] for block in range(end + 1)}
    for block, after in follow.items():
        for other in after or [end]:
            back[other].append(block)
    return _dominators(back, end)[0]
