"""From a configuration to a model: what cannot checkpoint its gradients says so; too little
memory is a result.
"""

import io
import json

import pytest

from tests.helpers.small_runs import MODEL, SPEC, small_config
from tests.helpers.tools import written
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
def small_run(tmp_path, small):
    """Start a run with these options; returns its exit code and its status."""

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
    kept = written(tmp_path / "small")
    monkeypatch.setattr("visionattn.training.trainer.load_whole", no_memory)
    code, status = small_run(resume=True, epochs=2)
    assert (code, status["status"], status["result"]) == (3, "oom", None)
    assert written(tmp_path / "small") | {"status.json": b""} == kept | {"status.json": b""}


def test_what_is_refused_overwrites_nothing(tmp_path, small_run):
    small_run()
    kept = written(tmp_path / "small")
    assert small_run(overwrite=True, model={"num_heads": 3})[0] == 2
    assert written(tmp_path / "small") == kept


@pytest.mark.parametrize(
    ("key", "way_out"),
    [("init_values", r"a value \(0 for no LayerScale\)"), ("horizon", "a value")],
)
def test_an_argument_that_timm_would_drop_is_refused(key, way_out):
    with pytest.raises(ValueError, match=f"model.args.{key} null has no effect.*{way_out}$"):
        build_model(ModelConfig("scaleformer_vit_pixel", {key: None}), SPEC)
