"""Masks are the ink of the pictures, come to the model's size with them, and label patches."""

import cv2
import numpy as np
import pytest

from visionattn.data.documents import draw_page
from visionattn.data.drawn_images import paint, patch_labels, see_mask
from visionattn.data.embedded import CanvasArgs, Digits, digit_splits, draw_canvas
from visionattn.data.geometry import Geometry


def test_the_ink_of_the_digit_is_where_the_picture_differs_from_one_with_an_empty_digit():
    digits = digit_splits(0.1, 5)["validation"]
    empty = Digits(np.zeros_like(digits.images), digits.labels)
    task = CanvasArgs(distractors=0)
    for seed, vary in enumerate((False, True) * 10):
        options = dict(vary=vary, task=task, masked=True)
        drawn, without = (
            draw_canvas(each, seed, 61, 77, np.random.default_rng(seed), **options)
            for each in (digits, empty)
        )
        added = drawn.image[:, :, 0].astype(int) - without.image[:, :, 0]
        # A quarter of white, at contrasts from 0.5 to 0.7.
        assert (drawn.mask[added > 46] == 2 + drawn.label).all() and (added > 46).sum() > 20
        assert not drawn.mask[added < 31].any() and not without.mask.any()


def test_the_ink_of_a_mark_and_of_distractors_is_the_dark_of_a_page():
    seen = 0
    for seed in range(8):
        label = seed % 4
        plain = draw_page(np.random.default_rng(seed), 301, 263, label)
        page = draw_page(np.random.default_rng(seed), 301, 263, label, masked=True)
        assert plain.mask is None and (page.image == plain.image).all()
        top, left, side, _ = page.mark
        rows, columns = np.nonzero(page.mask > 1)
        assert top <= rows.min() and rows.max() < top + side
        assert left <= columns.min() and columns.max() < left + side
        ink = page.mask == 2 + label
        assert (page.mask[page.mask > 1] == 2 + label).all()
        image = page.image[:, :, 0].astype(float)
        paper = image[page.mask == 0].mean()
        assert paper - image[ink].mean() > 60
        # A distractor is as dark as the mark.
        if (page.mask == 1).any():
            seen += 1
            assert abs(image[page.mask == 1].mean() - image[ink].mean()) < 40
    assert seen > 2


def test_a_part_covers_what_lies_below_it_and_its_faint_pixels_are_no_ink():
    mask = np.full((3, 4), 1, np.uint8)
    ink = np.array([[0, 64, 65, 255]], np.uint8)
    paint(mask, 1, 0, ink, 7, None)
    assert mask.tolist() == [[1] * 4, [1, 1, 7, 7], [1] * 4]
    cover = np.array([[0, 127], [128, 255]], np.uint8)
    paint(mask, 1, 1, np.array([[0, 0], [0, 70]], np.uint8), 5, cover)
    assert mask.tolist() == [[1] * 4, [1, 1, 7, 7], [1, 0, 5, 1]]


@pytest.mark.parametrize(
    ("fit", "size"),
    [("native", None), ("crop", (24, 56)), ("pad", (48, 40)), ("stretch", (32, 64))],
)
def test_a_mask_comes_to_the_size_of_the_model_with_its_image(fit, size):
    """An image that is its own mask, of squares large enough to outlast resizing."""
    mask = np.kron(np.array([[0, 3, 3], [1, 1, 0]], np.uint8), np.ones((15, 13), np.uint8))
    geometry = Geometry(fit, size, None, (8, 8))
    view = geometry.view(*mask.shape)
    seen = see_mask(mask, view)
    assert seen.shape == view.canvas and seen.dtype == np.uint8
    assert set(np.unique(seen)) == {0, 1, 3}
    top, left, height, width = view.box
    part = mask[top : top + height, left : left + width].astype(float)
    smooth = cv2.resize(part, view.content[::-1], interpolation=cv2.INTER_LINEAR)
    near = np.abs(seen[: view.content[0], : view.content[1]] - smooth)
    assert (near < 1).mean() > 0.97 and near.mean() < 0.1
    # What is beyond repeats the edge up to whole patches, and is else background.
    beyond = seen[view.content[0] :]
    assert (beyond == (seen[view.content[0] - 1] if fit == "native" else 0)).all()


def test_a_patch_is_what_most_of_its_ink_is_where_a_sixteenth_is_inked():
    mask = np.zeros((8, 18), np.uint8)  # two rows of three patches of 4 x 6 pixels
    mask[0, :2] = 4  # 2 of 24 pixels
    mask[3, 6] = 4  # 1 of 24
    mask[0, 12:18], mask[1, 12:16] = 1, 3
    mask[4:8, 0:6] = 2
    mask[4, 6:8], mask[5, 6:8] = 3, 1
    labels = patch_labels(mask, (2, 3), 5)
    assert labels.tolist() == [[4, 0, 1], [2, 1, 0]] and labels.dtype == np.int64
    exact = np.zeros((16, 32), np.uint8)  # 16 of 256 pixels, and 15
    exact[2, :16], exact[2, 16:31] = 2, 2
    assert patch_labels(exact, (1, 2), 3).tolist() == [[2, 0]]
    with pytest.raises(ValueError, match="8 x 18 pixels is not a whole number of patches"):
        patch_labels(mask, (2, 4), 5)
