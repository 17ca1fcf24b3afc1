"""Both forms of the class sums, whatever the size would choose: against the quadratic definition
and each other.
"""

import pytest
import torch

from tests.helpers.oracles import assert_agree, draw, draw_qkv, run
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Joint, kernelized_attention, reference
from visionattn.ops.position import joint
from visionattn.ops.position import tiles as class_tiles

FORMS = {"direct": True, "tiled": False}


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    monkeypatch.setattr(joint, "direct_is_faster", lambda *sizes: FORMS[request.param])
    return request.param


def kept_patches(patches, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [torch.randperm(patches, generator=generator)[: patches - 11] for _ in range(2)]
    )


def test_the_direct_form_is_for_few_keys_alone():
    assert joint.direct_is_faster(keys=709, rows=7)
    assert not joint.direct_is_faster(keys=710, rows=7)
    assert not joint.direct_is_faster(keys=230, rows=1)


def test_bands_and_chunks_of_heads_leave_no_seam(monkeypatch):
    """A band as short as can be, so that every window crosses an edge, against one band for all."""
    layout = TokenLayout(0, Grid(37, 29))
    tensors = draw_qkv(queries=layout.num_tokens, keys=layout.num_tokens, d=5, e=300)
    tensors["table"] = draw(1, 7, 7, 5, seed=5).abs()

    def attend(q, k, v, table):
        return kernelized_attention(q, k, v, relative=Joint(table, layout, "mean"))

    monkeypatch.setattr(joint, "direct_is_faster", lambda *sizes: False)
    monkeypatch.setattr(class_tiles, "BAND_ELEMENTS", 1 << 30)
    whole = run(attend, tensors)
    monkeypatch.setattr(class_tiles, "BAND_ELEMENTS", 1)
    assert_agree(run(attend, tensors), whole)


@pytest.mark.parametrize("grid, horizon", [((1, 61), 30), ((7, 43), 12), ((7, 23), 40)])
def test_tiles_shorter_than_the_reach_agree_with_the_definition(monkeypatch, grid, horizon):
    """A window then spans several tiles, and a long horizon does not make tiles, whose weights are
    held, long too.
    """
    monkeypatch.setattr(joint, "direct_is_faster", lambda *sizes: False)
    for name in ("TILE_ROWS", "TILE_COLUMNS", "TILE_OF_ONE_ROW", "LONGEST_TILE"):
        monkeypatch.setattr(class_tiles, name, 5)
    layout = TokenLayout(1, Grid(*grid))
    tensors = draw_qkv(queries=layout.num_tokens, d=5, e=6)
    tensors["table"] = draw(3, 2 * horizon + 1, 2 * horizon + 1, 5, seed=5).abs()

    def attend(operation):
        return lambda q, k, v, table: operation(q, k, v, relative=Joint(table, layout, "mean"))

    assert_agree(
        run(attend(kernelized_attention), tensors),
        run(attend(reference.kernelized_attention), tensors),
    )


def test_a_horizon_as_long_as_the_sequence_does_not_lengthen_the_tiles():
    tiles = class_tiles.Tiles(1, 2048, (0, 1500), torch.device("cpu"))
    assert tiles.columns.size == class_tiles.LONGEST_TILE < 1500
