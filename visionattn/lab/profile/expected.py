"""How long the cells of a profile will take, from one small cell and one small pass of each
series.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from visionattn.lab.cases import Case
from visionattn.lab.measure import count_flops
from visionattn.lab.networks import build_model
from visionattn.lab.profile.step import Step

TRIAL_PATCHES = 32
"""Patches a side of the image that is tried, unless the smallest of a series has fewer."""
PASSES, SAVED = 2, 1 / 3
"""What a cell runs: passes, and of those with a backward once more the forward."""


def expected_seconds(
    cases: Sequence[Case], device: str, measure: Callable[[Case], object]
) -> Iterator[tuple[Case, float]]:
    """Yield each case with the seconds that its cell is expected to take.

    Time grows as the operations that torch counts. The start of a process, with its libraries, is
    that of one small cell.

    Args:
        cases: those of one series one after the other, sizes rising.
        device: where the passes run.
        measure: measures a case in a process of its own.
    """
    begin, start = time.perf_counter(), None
    for series in dict.fromkeys(case.series for case in cases):
        own = [case for case in cases if case.series == series]
        step = Step(own[0], device)
        patch = max(step.model.patch_embed.patch_size)
        tried = replace(own[0], size=min(own[0].size, TRIAL_PATCHES * patch))
        if start is None:
            begin = time.perf_counter()
            measure(replace(tried, size=min(tried.size, 4 * patch)))
            start = time.perf_counter() - begin
        step.place(tried.size)
        step.run()
        begin = time.perf_counter()
        step.run()
        seconds = time.perf_counter() - begin
        passes = PASSES + (SAVED if tried.backward else 0)
        model = build_model(tried, "meta")
        small = count_flops(model, tried.size, tried.size)
        for case in own:
            more = count_flops(model, case.size, case.size) / small
            yield case, start + passes * seconds * more
