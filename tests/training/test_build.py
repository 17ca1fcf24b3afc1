"""From a configuration to a model: what cannot checkpoint its gradients says so; too little
memory is a result.
"""

import io
import json

import pytest

from tests.helpers.small_runs import MODEL, SPEC, quadrants_for, small_config
from visionattn.cli.exit_codes import run_tool
from visionattn.model_config import ModelConfig
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.building import build_model
from visionattn.training import engine


def test_a_model_that_cannot_checkpoint_says_so(monkeypatch):
    def refuse(self, enable=True):
        assert not enable, "gradient checkpointing not supported"  # as timm's VGG and others do

    monkeypatch.setattr(VisionAttnTransformer, "set_grad_checkpointing", refuse)
    with pytest.raises(
        ValueError,
        match="scaleformer_vit_t has no gradient checkpointing; remove model.grad_checkpointing",
    ):
        build_model(ModelConfig("scaleformer_vit_t", MODEL, True), SPEC)


def no_memory(*args, **options):
    raise RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9000000000 bytes"
    )


@pytest.fixture
def small_run(tmp_path, monkeypatch):
    """Start a run with these options; returns its exit code and its status."""
    monkeypatch.setattr(engine, "build_splits", quadrants_for)

    def start(**options):
        config = small_config(tmp_path, **{"epochs": 1, "optim": {"ema_decay": 0.9}} | options)
        code = run_tool(lambda: engine.train(config, stream=io.StringIO()) and None)
        path = tmp_path / "small" / "status.json"
        return code, json.loads(path.read_text()) if path.exists() else None

    return start


PLACES = [
    "timm.create_model",
    "visionattn.training.trainer.ModelEmaV3",
    "visionattn.training.trainer.Spread",
]


@pytest.mark.parametrize("place", PLACES)
def test_too_little_memory_before_the_first_step_is_a_result_too(
    tmp_path, small_run, monkeypatch, capsys, place
):
    monkeypatch.setattr(place, no_memory)
    code, status = small_run()
    assert code == status["exit_code"] == 3 and status["status"] == "oom"
    assert status["provenance"]["processes"] == 1
    assert status["reason"].startswith("out of memory before the first step; ")
    assert capsys.readouterr().err == f"error: {status['reason']}\n"
    assert [path.name for path in (tmp_path / "small").iterdir()] == ["status.json"]


def test_too_little_memory_on_a_resumption_replaces_the_old_status_and_keeps_the_state(
    tmp_path, small_run, monkeypatch
):
    assert small_run()[1]["status"] == "finished"
    kept = {
        path.name: path.read_bytes()
        for path in (tmp_path / "small").iterdir()
        if path.name != "status.json"
    }
    monkeypatch.setattr("visionattn.training.trainer.load_whole", no_memory)
    code, status = small_run(resume=True, epochs=2)
    assert (code, status["status"], status["result"]) == (3, "oom", None)
    assert {name: (tmp_path / "small" / name).read_bytes() for name in kept} == kept
    code, status = small_run(overwrite=True, model={"num_heads": 3})
    assert code == 2 and status["status"] == "oom"
    assert (tmp_path / "small" / "best.safetensors").exists()
    monkeypatch.setattr("timm.create_model", no_memory)
    assert small_run(overwrite=True)[0] == 3
    assert [path.name for path in (tmp_path / "small").iterdir()] == ["status.json"]


def test_an_argument_that_timm_would_drop_is_refused():
    with pytest.raises(ValueError, match="model.args.init_values null has no effect"):
        build_model(ModelConfig("scaleformer_vit_pixel", {"init_values": None}), SPEC)


def test_a_training_takes_the_map_among_the_arguments_of_its_model():
    args = MODEL | dict(feature_map="random", random_features=5)
    model, kept = build_model(ModelConfig("scaleformer_vit_t", args), SPEC)
    assert model.blocks[0].attn.feature_map.projection.shape == (5, 8)
    assert kept == args | {"img_size": 16}
    with pytest.raises(ValueError, match="feature_map 'favor': expected one of elu1"):
        build_model(ModelConfig("scaleformer_vit_t", MODEL | {"feature_map": "favor"}), SPEC)
