"""Weights of before a default changed are what they were: files state what a model takes
by default, and those that did not yet are read with the defaults of their time.
"""

import json

import pytest
import torch
from safetensors.torch import save_file
from timm import create_model, list_models

from tests.helpers.small_runs import MODEL, SPEC
from visionattn.models.registration import DEFAULTS, FORMER, complete, is_ours
from visionattn.models.weights import load_model, read_metadata, save_model

NAME = "scaleformer_vit_t"
NEW = dict(output_gate=True, value_conv=3, global_pool="avg", relative="axial")
"""Defaults of later; ``MODEL`` gives the pooling."""


@pytest.fixture(autouse=True)
def before(monkeypatch):
    """Let the name stand for what it stood for when files did not state defaults."""
    monkeypatch.setitem(DEFAULTS, NAME, FORMER[NAME])


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


def written(path, version, model, **options):
    """Write weights as files of a version were."""
    save_model(path, model, NAME, MODEL | options, SPEC)
    if version < 3:
        metadata = read_metadata(path)
        metadata |= {"version": str(version), "args": json.dumps(MODEL | options)}
        save_file(model.state_dict(), path, metadata=metadata)
    return path


@pytest.mark.parametrize(
    ("version", "options"), [(1, {}), (2, dict(output_gate=True)), (3, dict(value_conv=5))]
)
def test_weights_load_as_the_model_they_were_saved_of(tmp_path, later, version, options):
    model, image = small(**options), torch.randn(2, 1, 16, 24)
    expected = model(image)
    path = written(tmp_path / "a.safetensors", version, model, **options)
    later()
    assert small().blocks[0].attn.output_gate is not None
    assert torch.equal(load_model(path)(image), expected)


def test_weights_of_a_model_with_new_defaults_come_back_and_miss_nothing_in_silence(
    tmp_path, later
):
    later()
    model, image = small(), torch.randn(2, 1, 16, 24)
    loaded = load_model(written(tmp_path / "a.safetensors", 3, model))
    assert torch.equal(loaded(image), model(image))
    with pytest.raises(ValueError, match="unexpected .first: blocks.0.attn.output_gate.weight"):
        load_model(written(tmp_path / "c.safetensors", 2, small(relative="joint", value_conv=0)))


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
