"""``visionattn.train`` is the command ``train``, and raises where that ends."""

import io
from copy import deepcopy
from pathlib import Path

import pytest
from safetensors.torch import load_file

import visionattn
from tests.helpers.small_runs import same
from visionattn.command import main
from visionattn.model_config import ModelConfig
from visionattn.training.config import DataConfig, TrainConfig
from visionattn.training.train_call import config_of

SMALL = {
    "model": {"args": {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}},
    "data": {"name": "digits", "img_size": 16, "workers": 0},
    "batch_size": 128,
    "epochs": 1,
    "optim.warmup_epochs": 0.5,
}


def test_a_training_comes_to_what_the_command_comes_to(tmp_path, capsys):
    said = io.StringIO()
    result = visionattn.train(SMALL, {"output": tmp_path, "run": "called"}, stream=said)
    assert capsys.readouterr().out == "" and "epoch 1/1" in said.getvalue()
    flags = ["--model.args={patch_size: 8, embed_dim: 16, depth: 1, num_heads: 2}"]
    flags += ["--data.name=digits", "--data.img_size=16", "--data.workers=0", "--batch_size=128"]
    flags += ["--epochs=1", "--optim.warmup_epochs=0.5", f"--output={tmp_path}", "--run=typed"]
    assert main(["train", *flags]) == 0
    assert f"test accuracy {100 * result.test.accuracy:.1f} %" in capsys.readouterr().out
    same(load_file(result.checkpoint), load_file(tmp_path / "typed" / "best.safetensors"))
    assert Path(result.folder) == tmp_path / "called"
    with pytest.raises(ValueError, match="is not empty"):
        visionattn.train(SMALL, {"output": tmp_path, "run": "called"})


def test_a_run_is_named_in_every_way_and_left_as_it_was(tmp_path):
    own = TrainConfig(model=ModelConfig(args={"depth": 2}), data=DataConfig(img_size=48), epochs=3)
    before = deepcopy(own)
    found = config_of(own, {"optim": {"lr": 3e-4}, "data.img_size_choices": [48, 56]})
    assert own == before and (found.epochs, found.model.args) == (3, {"depth": 2})
    assert (found.optim.lr, found.data.img_size_choices) == (3e-4, [48, 56])
    assert found.run == "digits_scaleformer_vit_t"
    shipped = config_of("digits", {"model.args.depth": 1, "optim.clip_grad": None})
    assert (shipped.run, shipped.data.augment, shipped.optim.clip_grad) == ("digits", "light", None)
    assert shipped.model.args["depth"] == 1 and shipped.model.args["patch_size"] == 4
    file = tmp_path / "mine.yaml"
    file.write_text("epochs: 7\n")
    assert (config_of(file).run, config_of(str(file)).epochs) == ("mine", 7)


@pytest.mark.parametrize(
    ("asked", "overrides", "part"),
    [
        ("digitz", None, "no configuration file at digitz"),
        ({}, {"optim": {"learning_rate": 1}}, "--optim.learning_rate; did you mean --optim.lr?"),
        ({"epochs": "many"}, None, "epochs must be an integer, got many"),
        ({"help": True}, None, "help is not a key of a run"),
        ({"model": {"args": {"act": object}}}, None, "mappings for model.args"),
    ],
)
def test_a_wrong_run_is_one_line(asked, overrides, part):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        visionattn.train(asked, overrides)
    assert part in str(error.value) and "\n" not in str(error.value)
