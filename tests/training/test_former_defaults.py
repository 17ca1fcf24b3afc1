"""Weights and runs of before a default changed are what they were: files state what a model takes
by default.
"""

import pytest
import torch
from timm import create_model, list_models

from tests.helpers.small_runs import MODEL, SPEC
from visionattn.models.registration import DEFAULTS, complete, is_ours
from visionattn.models.weights import load_model, save_model

NAME = "scaleformer_vit_t"
OTHERS = dict(output_gate=False, value_conv=5)
"""Defaults of another day."""


def test_weights_load_as_the_model_they_were_saved_of(tmp_path, monkeypatch):
    def made(**options):
        return create_model(NAME, num_classes=4, in_chans=1, **MODEL | options).eval()

    model, image, path = made(value_conv=7), torch.randn(2, 1, 16, 24), tmp_path / "a.safetensors"
    save_model(path, model, NAME, MODEL | dict(value_conv=7), SPEC)
    monkeypatch.setitem(DEFAULTS, NAME, DEFAULTS[NAME] | OTHERS)
    assert made().blocks[0].attn.output_gate is None
    assert torch.equal(load_model(path)(image), model(image))


@pytest.mark.parametrize("name", [name for name in list_models("*vit*") if is_ours(name)])
def test_complete_arguments_build_the_same_model(name, monkeypatch):
    """Whatever the name stands for: nothing of it is left out."""
    # What data, not names, say of the pixel models and of those that come with weights.
    size = {key: DEFAULTS[name][key] for key in ("img_size", "in_chans") if key in DEFAULTS[name]}
    with torch.device("meta"):
        expected, whole = create_model(name), complete(name, {})
        monkeypatch.setitem(DEFAULTS, name, {})
        model = create_model(name, num_classes=expected.num_classes, **size, **whole)
    shapes = ({n: x.shape for n, x in of.state_dict().items()} for of in (model, expected))
    assert next(shapes) == next(shapes)
    assert model.global_pool == expected.global_pool
    assert complete(name, whole) == whole
