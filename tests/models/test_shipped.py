"""Weights that come with the package: what they are, and that timm and a wheel have them."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

import visionattn
from visionattn.inference.inference_options import InferenceOptions
from visionattn.inference.model_opening import open_model
from visionattn.models import shipped
from visionattn.models.weights import load_model, read_metadata

ROOT = Path(__file__).parents[2]
FAMILIES = {"scaleformer_vit": "kernelized", "taylorshift_vit": "taylorshift"}
SIDE = {"digits": 32, "canvas": 128, "documents": 512}
TASKS = {
    "digits": (10, [str(digit) for digit in range(10)]),
    "canvas": (10, [str(digit) for digit in range(10)]),
    "documents": (4, None),
}
MOST_BYTES = 2**21
ANY = "scaleformer_vit_digits"


def image(spec, side=(40, 64)):
    return torch.randn(2, spec.in_chans, *(-(-px // 16) * 16 for px in side))


@pytest.mark.parametrize("name", shipped.FILES)
def test_a_shipped_model_is_what_its_name_says(name):
    path = shipped.FILES[name]
    family, _, task = name.rpartition("_")
    metadata, model = read_metadata(path), load_model(path)
    args, spec = json.loads(metadata["args"]), model.data_spec
    assert metadata["version"] == "3" and args["attention"] == FAMILIES[family]
    assert spec.num_classes == TASKS[task][0] == len(spec.class_names) and spec.in_chans == 1
    assert list(spec.class_names) == (TASKS[task][1] or list(spec.class_names))
    assert spec.img_size in (SIDE[task], (SIDE[task],) * 2) and path.stat().st_size < MOST_BYTES
    assert (spec.fit == "native") == (task == "documents")


@pytest.mark.parametrize("name", shipped.FILES)
def test_timm_and_tools_build_it_as_the_checkpoint_says(name):
    expected = load_model(shipped.FILES[name])
    spec = expected.data_spec
    model = timm.create_model(name, pretrained=True).eval()
    x = image(spec)
    assert torch.equal(model(x), expected(x)) and model.data_spec == spec
    cfg = model.pretrained_cfg
    side = SIDE[name.rpartition("_")[2]]
    assert cfg["architecture"] == name and tuple(cfg["input_size"]) == (1, side, side)
    assert (tuple(cfg["mean"]), tuple(cfg["std"])) == (spec.mean, spec.std)
    assert (cfg["num_classes"], cfg["label_names"]) == (spec.num_classes, spec.class_names)
    assert cfg["fixed_input_size"] is False and cfg["license"] == "apache-2.0"
    drawn = timm.create_model(name)
    assert not torch.equal(drawn.head.weight, model.head.weight)
    assert not hasattr(drawn, "data_spec")
    opened = open_model(InferenceOptions(model=name, pretrained=True), classifies=True)
    of_file = open_model(InferenceOptions(checkpoint=str(shipped.FILES[name])), classifies=True)
    assert opened.spec == of_file.spec and opened.geometry == of_file.geometry


def test_timm_lists_as_pretrained_what_is_there_and_nothing_else():
    names = timm.list_pretrained("scaleformer*") + timm.list_pretrained("taylorshift*")
    assert sorted(names) == sorted(shipped.FILES) == timm.list_models(module="shipped")
    there = (ROOT / "visionattn" / "models" / "shipped").glob("*.safetensors")
    assert sorted(path.stem for path in there) == sorted(shipped.FILES)


def test_another_head_other_channels_and_features_are_as_timm_makes_them():
    own = load_file(shipped.FILES[ANY])
    model = timm.create_model(ANY, pretrained=True, num_classes=3)
    assert model.head.weight.shape == (3, 64) and model.data_spec.class_names == ()
    assert torch.equal(model.blocks[3].mlp.fc2.weight, own["blocks.3.mlp.fc2.weight"])
    model = timm.create_model(ANY, pretrained=True, num_classes=0).eval()
    x = torch.randn(1, 1, 32, 48)
    pooled = model(x)
    assert pooled.shape == (1, 64)
    head = torch.nn.functional.linear(pooled, own["head.weight"], own["head.bias"])
    assert torch.allclose(head, timm.create_model(ANY, pretrained=True).eval()(x), atol=1e-5)
    colour = timm.create_model(ANY, pretrained=True, in_chans=3).eval()
    grey = torch.randn(1, 1, 32, 32)
    assert torch.allclose(
        colour(grey.expand(1, 3, 32, 32)), load_model(shipped.FILES[ANY])(grey), atol=1e-4
    )
    assert not hasattr(colour, "data_spec")
    maps = timm.create_model(ANY, pretrained=True, features_only=True).eval()(x)
    assert [tuple(each.shape) for each in maps] == [(1, 64, 8, 12)] * 3


def test_it_reads_digits_that_it_was_not_trained_on():
    """Test digits of scikit-learn, by name and not by position; the run got 98.9 % of them."""
    from visionattn.data.data_config import DataConfig
    from visionattn.data.splits import build_splits

    test = build_splits(DataConfig(name="digits", img_size=32), 0).test
    images = [test.images[i] for i in range(0, 359, 6)]
    found = visionattn.predict(ANY, images, top_k=1)
    right = [
        classes[0] == str(test.labels[i])
        for classes, i in zip(found.classes, range(0, 359, 6), strict=True)
    ]
    assert len(right) == 60 and sum(right) >= 57


INSTALLED = """
import sys
import timm, torch, visionattn
assert visionattn.__file__.startswith(sys.argv[1]), visionattn.__file__
for name in timm.list_models(module="shipped", pretrained=True):
    model = timm.create_model(name, pretrained=True)
    assert model.pretrained_cfg["file"].startswith(sys.argv[1])
    print(name, model.head.weight.sum().item())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this tree, built with the setuptools that is installed."""
    setuptools = pytest.importorskip("setuptools", minversion="77")
    place = tmp_path_factory.mktemp("wheel")
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    settings = f"[build]\nbuild_base = {place}/build\n[egg_info]\negg_base = {place}\n"
    (place / "settings.cfg").write_text(settings)
    env = os.environ | {"DIST_EXTRA_CONFIG": str(place / "settings.cfg")}
    given = dict(cwd=ROOT, env=env, capture_output=True, text=True)
    done = subprocess.run([sys.executable, "-c", code, str(place)], **given)
    assert done.returncode == 0, done.stderr
    assert setuptools and len(list(place.glob("*.whl"))) == 1
    return next(place.glob("*.whl"))


@pytest.mark.slow
def test_a_wheel_has_the_weights_and_loads_them_where_it_is_installed(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    env = os.environ | {"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", INSTALLED, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sums = {
        name: load_file(path)["head.weight"].sum().item() for name, path in shipped.FILES.items()
    }
    assert done.stdout.splitlines() == [f"{name} {total}" for name, total in sums.items()]


@pytest.mark.slow
def test_a_wheel_has_every_file_that_the_package_has_here(wheel):
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if name.startswith("visionattn/")}
    listed = subprocess.run(
        ["git", "ls-files", "visionattn", "configs"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode or not listed.stdout:
        pytest.skip("no repository says which files there are")
    wanted = {
        f"visionattn/{name}" if name.startswith("configs/") else name
        for name in listed.stdout.splitlines()
    }
    assert wanted <= packed | {"visionattn/configs/__init__.py"}


@pytest.mark.slow
def test_a_type_checker_accepts_the_page_about_python_with_the_installed_wheel(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "installed")
    page = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    env = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", script]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "Success: no issues found in 1 source file\n", done.stdout + done.stderr
