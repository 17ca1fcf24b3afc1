"""Classes and masks that trained models give images which training has not seen."""

import numpy as np

import visionattn
from tests.helpers.trained_models import block_mask


def test_a_trained_classifier_names_the_colours_of_quadrants(trained_classifier):
    found = visionattn.predict(trained_classifier.checkpoint, trained_classifier.images, top_k=1)
    right = [
        path.split("/")[-2] == names[0]
        for path, names in zip(found.paths, found.classes, strict=True)
    ]
    assert len(right) == 16 and np.mean(right) > 0.9


def test_a_trained_segmenter_finds_the_materials(trained_segmenter):
    found = visionattn.segment(trained_segmenter.checkpoint, trained_segmenter.images)
    right = [(mask.numpy() == block_mask(100 + i)).mean() for i, mask in enumerate(found)]
    assert len(right) == 4 and np.mean(right) > 0.9
