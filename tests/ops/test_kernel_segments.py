"""Causal kernelized attention over several segments of one image, where chunks are views of the
caller's memory.
"""

import pytest
import torch

from tests.helpers.oracles import assert_agree, draw_qkv, run
from visionattn.ops import RandomFeatures, kernelized_attention, reference
from visionattn.ops.kernelized.operands import plan_chunks


@pytest.mark.parametrize("lengths", [(1500, 1500), (1500, 700), (700, 1500)])
@pytest.mark.parametrize("feature_map", ["elu1", "random"])
def test_segments_of_one_image_leave_no_seam(feature_map, lengths):
    # A segment of two heads of width 6 and 5 is some thousands of numbers long; a smaller one would
    # need copies.
    if feature_map == "random":
        feature_map = RandomFeatures(6, 130, torch.Generator().manual_seed(0)).double()
    tensors = draw_qkv(1, 2, *lengths, d=6, e=90)

    def attend(operation):
        return lambda **inputs: operation(**inputs, feature_map=feature_map, causal=True)

    def fast(**inputs):
        return kernelized_attention(
            **inputs, feature_map=feature_map, causal=True, form="efficient"
        )

    assert_agree(run(fast, tensors), run(attend(reference.kernelized_attention), tensors))


def test_a_segment_is_shorter_than_the_sequence():
    assert plan_chunks(torch.empty(1, 2, 1500, 90), 1500, 130 + 90, 64)[1] < 700
