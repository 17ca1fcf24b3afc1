"""The relative position along a raster knows rows and columns."""

import pytest
import torch

from visionattn.layers.raster import RasterAttention, RasterTables
from visionattn.layout import Grid, TokenLayout


def entry_of(back, row, tables):
    """Where the entry of the value ``back`` values before the one asked for is, by its place."""
    span = tables.span
    up = next((up for up in range(tables.rows + 1) if abs(back - up * row) <= span), None)
    nearest = round(back / row)
    if up is not None and abs(back - nearest * row) <= span and nearest <= tables.rows:
        return "near", nearest, back - nearest * row + span
    return "rest", min(back // row, tables.rows)


@pytest.mark.parametrize("width, channels", [(1, 3), (5, 1), (23, 3)])
def test_the_value_above_has_the_same_entry_at_every_width(width, channels):
    tables = RasterTables(2, 4, rows=2, reach=1, channels=channels)
    with torch.no_grad():
        for parameter in tables.parameters():
            parameter.normal_()
    row, height = width * channels, 7
    relative = tables(TokenLayout(0, Grid(height, row)))
    horizon = relative.table.shape[1] // 2
    assert relative.layout is None and horizon == min(2 * row + tables.span, height * row)
    assert torch.count_nonzero(relative.table[:, horizon + 1 :]) == 0
    entries = torch.nn.functional.elu(torch.cat([tables.near.flatten(1, 2), tables.rest], 1)) + 1
    side = 2 * tables.span + 1
    for offset in range(horizon):
        # The token ``offset`` before that of value i holds value i - 1 - offset.
        name, *place = entry_of(offset + 1, row, tables)
        if name == "near" and 2 * abs(place[1] - tables.span) == row:
            continue  # just as near to two rows
        index = place[0] * side + place[1] if name == "near" else 3 * side + place[0]
        found = relative.table[:, horizon - offset]
        torch.testing.assert_close(found, entries[:, index] * 4)  # 16 / d
    torch.testing.assert_close(relative.table[:, 0], entries[:, -1] * 4)


def test_heads_begin_at_the_pixels_nearby():
    tables = RasterTables(4, 8, rows=1, reach=2, channels=3)
    table = tables(TokenLayout(0, Grid(6, 30))).table
    horizon = table.shape[1] // 2
    back = [horizon + 1 - int(head[:horizon].sum(1).argmax()) for head in table]
    assert back == [3, 30, 33, 27]  # left, above, above to the left and to the right


WRONG = [
    (dict(attention="taylorshift"), "attention='taylorshift' has no causal form .its linear"),
    (dict(attention="window"), "attention='window' has no causal form .tokens of a"),
    (dict(feature_map="softmax"), "feature_map='softmax' has no causal form: its keys"),
    (dict(relative="joint"), "relative 'joint': expected flat, along the raster, or none"),
    (dict(attention="softmax", normalization="sum"), "normalization='sum' has no effect"),
    (dict(rows=-1, reach=2), "expected integers rows and reach of at least 0, got -1 and 2"),
]


def test_what_has_no_causal_form_says_why():
    for options, message in WRONG:
        with pytest.raises(ValueError, match=message):
            RasterAttention(8, 2, **options)
