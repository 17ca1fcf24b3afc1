"""``visionattn share``: what it writes is what timm and transformers load, its card says what the
run knows, and what cannot be shared is one line.
"""

import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import create_autospec

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image
from safetensors.torch import load_file, save_file

import visionattn
from tests.helpers import distilled_runs
from tests.helpers.inference_files import ARGS, COLOUR, GREY, write_weights
from tests.helpers.resumed_runs import status_of
from tests.helpers.small_runs import small_config
from tests.helpers.tools import assert_one_error, words, written
from visionattn.command import main
from visionattn.models import from_softmax
from visionattn.models.entry_points import images_cfg
from visionattn.models.weights import DataSpec, load_model, read_safetensors
from visionattn.training import engine
from visionattn.training.config import DataConfig, TrainConfig, parse_train
from visionattn.training.distil.distil_config import DistilConfig, parse_distil
from visionattn.training.model_card import _distilled, command_of

NATIVE = DataSpec(2, 3, ("a", "b b", 'c"\n'), (0.3, 0.4), (0.2, 0.1), None, None, "native", 60)
NATIVE = replace(NATIVE, bands=(2, 5), value_range=(-3.0, 700.0), page=2)
ONE_HOT = DataSpec(256, 10, (), (), (), "grey_one_hot", 32)
HEADLESS = DataSpec(3, 0, (), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), None, (24, 40), "stretch")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


ABSOLUTE = {key: value for key, value in ARGS.items() if key != "horizon"} | {"img_size": 24}
PIXELS = {"img_size": 32, "embed_dim": 12, "num_heads": 3}


def shared(*flags, folder="out"):
    """Share ``best.safetensors`` here, and return the configuration that timm reads."""
    assert main(["share", "best.safetensors", "--to", folder, *flags]) == 0
    return json.loads(Path(folder, "config.json").read_text())


@pytest.mark.parametrize(
    "name, spec, args, size",
    [
        ("taylorshift_abs_vit_t", GREY, ABSOLUTE, (24, 24)),
        ("scaleformer_vit_t", NATIVE, ARGS | {"output_gate": False, "reg_tokens": 2}, (24, 40)),
        ("taylorshift_vit_pixel", ONE_HOT, PIXELS, (32, 32)),
        ("vit_tiny_patch16_224", COLOUR, {"embed_dim": 24, "num_heads": 3, "depth": 1}, (224, 224)),
    ],
    ids=["absolute", "native", "pixels", "timm"],
)
def test_timm_loads_what_the_checkpoint_holds(name, spec, args, size, here):
    write_weights(here / "best.safetensors", spec, name=name, args=args)
    image = torch.randn(2, spec.in_chans, *size)
    config = shared()
    found = timm.create_model("local-dir:out", pretrained=True).eval()
    with torch.no_grad():
        expected = load_model("best.safetensors")(image)
        assert (found(image) - expected).abs().max() <= 1e-6 and expected.std() > 1e-3
    ours = not name.startswith("vit_")
    assert getattr(found, "data_spec", None) == (spec if ours else None)
    assert config["architecture"] == name and config["num_classes"] == spec.num_classes
    assert config.get("label_names", []) == list(spec.class_names)


def test_the_folder_says_what_timm_asks_about_images(here):
    write_weights(here / "best.safetensors", COLOUR)
    cfg = shared("--license", "cc-by-4.0")["pretrained_cfg"]
    assert cfg["input_size"] == [3, 16, 16] and cfg["license"] == "cc-by-4.0"
    assert (cfg["crop_pct"], cfg["crop_mode"], cfg["fixed_input_size"]) == (1.0, "center", False)
    model = timm.create_model("local-dir:out", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    image = Image.effect_noise((16, 16), 60).convert("RGB")
    pixels = torch.from_numpy(np.array(image))[None]
    prepared = model.data_spec.prepare(pixels.permute(0, 3, 1, 2))
    assert torch.allclose(transform(image)[None], prepared, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "mode", "size"),
    [
        (dict(fit="pad", img_size=(24, 48)), "border", (24, 48)),
        (dict(fit="native", img_size=100), "border", (96, 96)),
        (dict(fit="native", img_size=None, max_patches=60), "border", (56, 56)),
        (dict(fit="native", img_size=None), "border", (224, 224)),
        (dict(fit="stretch"), "squash", (16, 16)),
    ],
)
def test_each_way_of_seeing_images_has_its_nearest_in_timm(changes, mode, size):
    cfg = images_cfg(replace(COLOUR, **changes), (8, 8))
    assert (cfg["crop_mode"], cfg["input_size"]) == (mode, (3, *size))


def test_a_new_head_and_other_channels_are_adapted_as_timm_does(here):
    write_weights(here / "best.safetensors", COLOUR)
    shared()
    own = load_file("best.safetensors")
    model = timm.create_model("local-dir:out", pretrained=True, num_classes=7, in_chans=1)
    assert model.head.weight.shape == (7, 24) and not hasattr(model, "data_spec")
    first = own["patch_embed.proj.weight"].sum(1, keepdim=True)
    assert torch.allclose(model.patch_embed.proj.weight, first, atol=1e-6)
    assert torch.equal(model.blocks[1].mlp.fc1.weight, own["blocks.1.mlp.fc1.weight"])


@pytest.mark.slow
def test_transformers_loads_the_folder_through_its_wrapper_of_timm(here):
    transformers = pytest.importorskip("transformers")
    write_weights(here / "best.safetensors", COLOUR)
    shared()
    image, model = torch.randn(2, 3, 24, 40), load_model("best.safetensors")
    with torch.no_grad():
        logits, tokens = model(image), model.forward_features(image)
        for kind in ("AutoModelForImageClassification", "TimmWrapperForImageClassification"):
            found = getattr(transformers, kind).from_pretrained("out").eval()
            assert (found(image).logits - logits).abs().max() <= 1e-6 < logits.std()
        assert found.config.id2label == dict(enumerate(COLOUR.class_names))
        found = transformers.TimmWrapperModel.from_pretrained("out").eval()
        pooled = model.forward_head(tokens, pre_logits=True)
        assert (found(image).pooler_output - pooled).abs().max() <= 1e-6


def test_the_card_says_what_the_run_knows_and_no_path_of_the_machine(here, small, capsys):
    engine.train(small_config(here / "secret" / "place", model={"mlp_ratio": 2}))
    folder = here / "secret" / "place" / "small"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["init_from"] = str(here / "secret" / "start.safetensors")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    capsys.readouterr()
    assert main(["share", str(folder / "best.safetensors"), "--to", "my model"]) == 0
    call = 'timm.create_model("local-dir:my model", pretrained=True)'
    said = f"written to my model\n{call} loads it, after import visionattn\n"
    assert capsys.readouterr().out == said
    card = (here / "my model" / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["library_name"] == "timm" and head["license"] == "unknown"
    assert head["pipeline_tag"] == "image-classification" and "visionattn" in head["tags"]
    result = status_of(folder)["result"]
    numbers = sum(tensor.numel() for tensor in load_file(folder / "best.safetensors").values())
    for line in (
        "# Model card for my model",
        call,
        f"- {100 * result['test_accuracy']:.1f} % of 29 test images\n",
        f"- {100 * result['validation_accuracy']:.1f} % of the validation images, by which epoch "
        f"{result['best_epoch']} was chosen\n",
        "- **Classes:** `ne`, `nw`, `se`, `sw`\n- **Data:** `digits`, embedded in visionattn\n",
        "  - 1 channel: values in [0, 1], less 0.3, divided by 0.2\n",
        "  - preprocessing: center crop to 16 x 16 px\n",
        f"`scaleformer_vit_t`, {numbers:,} parameters\n",
        f"; torch {torch.__version__}, visionattn {visionattn.__version__}",
        "--init_from start.safetensors",
    ):
        assert line in card, line
    everything = b"".join(written(here / "my model").values()).decode("latin")
    assert "secret" not in everything and str(here) not in everything
    # What lies beside the best weights is not about others.
    shutil.copy(folder / "best.safetensors", folder / "other.safetensors")
    assert main(["share", str(folder / "other.safetensors"), "--to", "other"]) == 0
    other = (here / "other" / "README.md").read_text()
    assert "Accuracy" not in other and "Training" not in other
    (folder / "status.json").write_text("[garbled")
    capsys.readouterr()
    assert main(["share", str(folder / "best.safetensors"), "--to", "out"]) == 2
    assert_one_error(capsys, "status.json is damaged")


def test_the_command_of_a_card_trains_with_the_same_configuration(tmp_path):
    config = small_config(tmp_path, optim={"clip_grad": None, "ema_decay": 0.9}, seed=3)
    config.data.img_size_choices, config.data.args = [16, 24], {}
    line = command_of(config)
    assert line.startswith("visionattn train --epochs 2 ") and "--model.args '{" in line
    again = replace(parse_train(shlex.split(line)[2:]), output=config.output)
    assert asdict(again) == asdict(config)


def test_the_card_of_distilled_weights_says_whom_they_imitate(here):
    (here / "secret").mkdir()
    teacher = distilled_runs.teacher_file(here / "secret")
    config = distilled_runs.config_of(here / "secret", teacher, options={"relative": "none"})
    with distilled_runs.on_quadrants():
        distilled_runs.run(config)
    folder = here / "secret" / "small"
    status = status_of(folder / "b")
    status["provenance"] |= {"torch": "2", "visionattn": "0.1"}  # what these runs leave out
    (folder / "b" / "status.json").write_text(json.dumps(status))
    assert main(["share", str(folder / "b" / "best.safetensors"), "--to", "out"]) == 0
    card = (here / "out" / "README.md").read_text()
    (line,) = re.findall("`(visionattn .*)`", card)
    assert line.startswith("visionattn distil --teacher teacher.safetensors --options '{")
    again = replace(parse_distil(shlex.split(line)[2:]), output=config.output, teacher=str(teacher))
    assert asdict(again) == yaml.safe_load((folder / "distil.yaml").read_text())
    for part in (
        r"- loss of [\d.e-]+ on the validation images, by which epoch \d was chosen\n",
        r"- [\d.]+ % of the validation images\n",
        "they imitate `teacher.safetensors`, without labels\n",
        "- stage b of a, b: the whole network imitates the teacher's final features\n",
        "whose license holds for them",
    ):
        assert re.search(part, card), part
    assert "secret" not in card
    # As where the images have not the classes of the teacher.
    status["result"] |= {"validation_accuracy": None, "test_accuracy": None}
    (folder / "b" / "status.json").write_text(json.dumps(status))
    assert main(["share", str(folder / "b" / "best.safetensors"), "--to", "other"]) == 0
    card = (here / "other" / "README.md").read_text()
    assert "Accuracy" not in card and "- loss of " in card


def test_a_card_tells_teachers_that_were_drawn_from_those_with_weights():
    named = DistilConfig(teacher="vit_tiny_patch16_224")
    assert _distilled(named, "b")["random"]
    for other in (replace(named, pretrained=True), DistilConfig(teacher="runs/best.safetensors")):
        assert not _distilled(other, "b")["random"]


def test_the_card_of_converted_weights_says_that_they_are_copied(here):
    vit = timm.create_model("vit_tiny_patch16_224", embed_dim=24, num_heads=3, depth=1)
    from_softmax(vit).save("best.safetensors")
    shared()
    card = (here / "out" / "README.md").read_text()
    assert "converted from `vit_tiny_patch16_224`, and not trained since" in card
    licence = "the license of the weights of `vit_tiny_patch16_224` holds for them"
    assert f"{licence}, which timm gives as apache-2.0\n" in card
    assert "Training" not in card and "license: unknown" in card


def test_of_names_of_models_and_of_paths_a_command_tells_what_is_public():
    for given, told in {
        "hf-hub:org/name": "hf-hub:org/name",
        "local-dir:/home/me/vit": "local-dir:vit",
        "/home/me/vit.pth": "vit.pth",
        "vit_tiny_patch16_224.augreg_in21k": "vit_tiny_patch16_224.augreg_in21k",
    }.items():
        assert f"--teacher {told} " in command_of(DistilConfig(teacher=given))
    keys = ("root", "labels", "features", "cache", "augment")
    data = DataConfig(name="folder", **{key: f"/home/me/{key}" for key in keys})
    command = command_of(TrainConfig(data=data, output="/home", init_from="/home/me/start"))
    assert "--data.labels labels " in command and "/home" not in command
    command = command_of(DistilConfig(teacher="a", data=data, teacher_cache="/home/me/tokens"))
    assert "/home" not in command


def card_without_run(here, spec):
    write_weights(here / "best.safetensors", spec)
    shared(folder=f"out{spec.num_classes}")
    return (here / f"out{spec.num_classes}" / "README.md").read_text()


def test_a_checkpoint_without_its_run_has_a_card_without_figures(here):
    card = card_without_run(here, NATIVE)
    assert "Accuracy" not in card and "Training" not in card and '`a`, `b b`, `c"`' in card
    assert "native size, at most 60 patches" in card
    assert "bands 2, 5 of the files" in card and "from -3 to 700 become 0 to 1" in card
    card = card_without_run(here, HEADLESS)
    assert "pipeline_tag: image-feature-extraction" in card and "classes" not in card
    assert "visionattn.extract_features(model" in card
    names = tuple(f"class {number}" for number in range(1200))
    card = card_without_run(here, replace(COLOUR, num_classes=1200, class_names=names))
    assert "`class 39` and 1,160 more, in config.json" in card and "class 40" not in card


REFUSED = {
    "": "expected --checkpoint: ",
    "best.safetensors": "expected --to: a folder or hub",
    "nowhere.safetensors --to out": "no checkpoint at nowhere.safetensors",
    "nan.safetensors --to out": "got NaN or infinity in blocks.1.mlp.fc1.bias",
    "best.safetensors --to there": "there exists; pass a new folder",
    "best.safetensors --to hf_hub:a/b": "expected --to to be a folder or hf-hub:ORG/NAME",
    "best.safetensors --to out --license none,really": "expected a license identifier such as",
    "best.safetensors --to hf-hub:name": "to be a folder or hf-hub:ORG/NAME, got hf-hub:na",
    "best.safetensors --to hf-hub:a/b": "expected a token for the hub; run hf auth login",
}


def test_bad_input_is_one_line_and_writes_nothing(here, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    write_weights(here / "best.safetensors", COLOUR)
    (here / "there").mkdir()
    metadata, tensors = read_safetensors("best.safetensors")
    tensors["blocks.1.mlp.fc1.bias"][2] = float("nan")
    save_file(tensors, "nan.safetensors", metadata=metadata)
    before, names = written(here), sorted(os.listdir(here))
    for line, message in REFUSED.items():
        assert main(["share", *line.split()]) == 2
        assert_one_error(capsys, message)
        assert written(here) == before and sorted(os.listdir(here)) == names


def hub_of(monkeypatch, *, holds=False, error=None):
    """Replace the hub at the boundary; returns its functions, and the files that it is given."""
    api, files = create_autospec(HfApi, instance=True), {}

    def take(*, folder_path, **named):
        files.update(written(Path(folder_path)))

    api.file_exists.return_value = holds
    api.upload_folder.side_effect = error or take
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **named: api)
    return api, files


def test_a_model_is_uploaded_as_it_would_be_written(here, monkeypatch, capsys):
    write_weights(here / "best.safetensors", COLOUR)
    api, files = hub_of(monkeypatch)
    assert main(words("share best.safetensors --to hf-hub:org/trees --license mit")) == 0
    said = capsys.readouterr().out.splitlines()
    call = 'timm.create_model("hf-hub:org/trees", pretrained=True)'
    assert said[0] == "uploaded to https://huggingface.co/org/trees" and call in said[1]
    assert [name for name, *_ in api.mock_calls] == ["file_exists", "create_repo", "upload_folder"]
    assert all("org/trees" in str(call) for call in api.mock_calls)
    card = files.pop("README.md").decode()
    assert "license: mit" in card and call in card and "# Model card for trees" in card
    assert os.listdir(here) == ["best.safetensors"]
    shared("--license", "mit")
    assert files == {name: text for name, text in written(here / "out").items() if "R" not in name}
    capsys.readouterr()
    api, files = hub_of(monkeypatch, holds=True)
    assert main(words("share best.safetensors --to hf-hub:org/trees")) == 2
    assert_one_error(capsys, "hf-hub:org/trees already holds a model; choose another name")
    assert not api.create_repo.called


def test_what_the_hub_refuses_is_one_line(here, monkeypatch, capsys):
    http = sys.modules[HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]
    request = http.Request("POST", "https://huggingface.co/api")
    forbidden = http.Response(403, request=request)
    write_weights(here / "best.safetensors", COLOUR)
    for error in (
        HfHubHTTPError("403 Forbidden: no\nlonger text", response=forbidden),
        http.ConnectError("Name or service not known"),
    ):
        hub_of(monkeypatch, error=error)
        assert main(words("share best.safetensors --to hf-hub:org/trees")) == 2
        assert_one_error(capsys, f"the hub refused org/trees: {str(error).splitlines()[0]}")
