"""Weights and runs of before a default changed are what they were: files state what a model takes
by default.
"""

import pytest
import torch
from timm import create_model, list_models

from tests.helpers.small_runs import MODEL, SPEC
from visionattn.models.entry_points import LOCAL
from visionattn.models.registration import DEFAULTS, complete, is_ours
from visionattn.models.weights import load_model, save_model

NAME = "scaleformer_vit_t"
NEW = dict(output_gate=True, value_conv=3, global_pool="avg", relative="axial")
"""Defaults of later; ``MODEL`` gives the pooling."""


@pytest.fixture(autouse=True)
def before(monkeypatch):
    """Let the name stand for a model without the later options."""
    plain = {key: value for key, value in DEFAULTS[NAME].items() if key not in LOCAL}
    monkeypatch.setitem(DEFAULTS, NAME, plain)


@pytest.fixture
def later(monkeypatch):
    """Change what the name stands for when called."""

    def change():
        monkeypatch.setitem(DEFAULTS, NAME, DEFAULTS[NAME] | NEW)

    return change


def small(**options):
    torch.manual_seed(0)
    given = {"num_classes": SPEC.num_classes, "in_chans": SPEC.in_chans}
    return create_model(NAME, **given, **MODEL | options).eval()


def test_weights_load_as_the_model_they_were_saved_of(tmp_path, later):
    model, image = small(value_conv=5), torch.randn(2, 1, 16, 24)
    expected = model(image)
    path = tmp_path / "a.safetensors"
    save_model(path, model, NAME, MODEL | dict(value_conv=5), SPEC)
    later()
    assert small().blocks[0].attn.output_gate is not None
    assert torch.equal(load_model(path)(image), expected)


@pytest.mark.parametrize("name", [name for name in list_models("*vit*") if is_ours(name)])
def test_complete_arguments_build_the_same_model(name, monkeypatch):
    """Whatever the name stands for: nothing of it is left out."""
    with torch.device("meta"):
        expected = create_model(name)
        whole, size = complete(name, {}), size_of(name)
        monkeypatch.setitem(DEFAULTS, name, {})
        model = create_model(name, num_classes=expected.num_classes, **size, **whole)
    shapes = ({n: x.shape for n, x in of.state_dict().items()} for of in (model, expected))
    assert next(shapes) == next(shapes)
    assert model.global_pool == expected.global_pool
    assert complete(name, whole) == whole


def size_of(name):
    """What data, not names, say of the pixel models and of those that come with weights."""
    return {key: DEFAULTS[name][key] for key in ("img_size", "in_chans") if key in DEFAULTS[name]}
