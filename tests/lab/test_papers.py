"""Figures of the papers: crossings and tables of known numbers, and which cases are measured."""

import pytest

from visionattn.lab.case_comparison import CaseResult, record_of
from visionattn.lab.cases import Case
from visionattn.lab.papers import FIGURES, crossing, crossings, heads_table, milliseconds_of


def rows_of(sizes, direct, efficient):
    """Records of both forms of TaylorShift."""
    return [
        record_of(CaseResult(Case("operation", "taylorshift", n, 8, form=form, heads=3),
                      samples=[y], peak_bytes=peak))
        for n, *values in zip(sizes, direct, efficient, strict=True)
        for form, y, peak in zip(("direct", "efficient"), values, (n << 14, n << 15), strict=True)
    ]  # fmt: skip


SIZES = [16, 32, 64, 128, 256, 512]


@pytest.mark.parametrize(
    ("places", "direct", "expected"),
    [
        (slice(1, None), lambda n: n**2 / 100, 100),
        # Above at 32 tokens only, and for good from 100 on.
        (slice(None), lambda n: {16: 8, 32: 640}.get(n, n**2 / 100), 100),
        (slice(1, 3), lambda n: n**2 / 100, "none up to 64"),
        (slice(3, None), lambda n: n**2 / 100, "below 128"),
        (slice(0), float, "-"),
    ],
)
def test_a_crossing_lies_where_two_power_laws_meet(places, direct, expected):
    sizes = SIZES[places]
    found = crossing(rows_of(sizes, map(direct, sizes), map(float, sizes)), milliseconds_of)
    assert found == expected if isinstance(expected, str) else found == pytest.approx(expected)


def test_crossings_stand_beside_the_published_ones_and_are_marked():
    sizes = [64, 128, 256, 512]
    rows = rows_of(sizes, [n**2 for n in sizes], [100 * n for n in sizes])
    lost = CaseResult(
        Case("operation", "taylorshift", 1024, 8, form="direct"), status="out of memory"
    )
    (record,) = crossings([*rows, record_of(lost)])
    assert record == {
        "d": 8,
        "N0 published": 73,
        "N0 measured (time)": "100",
        "N1 published": 47,
        "N1 measured (memory)": "none up to 512",
    }
    time, memory = FIGURES["crossover"].charts(rows)
    assert [mark.text for mark in time.marks] == [
        "equal at 73, published",
        "equal at 100, measured",
    ]
    assert [mark.text for mark in memory.marks] == ["equal at 47, published"]
    (time,) = FIGURES["crossover"].charts([row | {"peak_bytes": 1 << 20} for row in rows])
    assert time.title == "Head width 8: time of a forward pass"


def test_head_counts_stand_beside_the_published_ones():
    cases = [
        Case("model", "taylorshift_vit_pixel+heads=16", 32, form=form, batch=16)
        for form in ("direct", "efficient")
    ]
    rows = [
        CaseResult(cases[0], samples=[2], peak_bytes=5 << 20),
        CaseResult(cases[1], status="out of memory"),
    ]
    (record,) = heads_table([record_of(row) for row in rows])
    assert record["d"] == 16 and record["direct images/s"] == "8" and record["direct MiB"] == "5"
    assert record["efficient images/s"] is None and record["published efficient images/s"] == 9713
