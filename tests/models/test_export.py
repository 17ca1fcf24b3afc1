"""Exported files give what the model gives, at other sizes, without this package.

Tracing a model takes seconds of processor time, so that one file of each format serves all fast
tests; the other models are slow ones.
"""

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.transformers.float16 import convert_float_to_float16
from timm.models import create_model

from tests.helpers.oracles import Largest
from tests.helpers.tools import assert_one_error, load_tool, written
from visionattn.models import export as exporting
from visionattn.models.export import export
from visionattn.models.registration import create
from visionattn.models.weights import DataSpec, load_model, save_model

main = load_tool("export")
ARGS = dict(embed_dim=24, depth=1, num_heads=3)
TINY = ARGS | dict(num_classes=5)
WORDS = ["--args", "{embed_dim: 24, depth: 1, num_heads: 3, num_classes: 5}"]
SIZES = ((1, 48, 48), (3, 80, 32), (2, 32, 112))
"""Batch, height and width in pixels."""
MOST = 1e-4


@torch.no_grad()
def liven(model):
    """Draw the weights so that each part of a model changes the output, and return it."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "relative" not in name:
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * max(parameter[0].numel(), 16) ** -0.5)
    return model


def tiny(name, **options):
    return liven(create_model(name, **TINY | options)).eval()


def images(batch, height, width, channels=3):
    generator = torch.Generator().manual_seed(height)
    return torch.randn(batch, channels, height, width, generator=generator)


def session(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


SPEC = DataSpec(3, 5, tuple("abcde"), (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), None, 48)
NAME = "taylorshift_abs_vit_t"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A folder with weights as a training keeps them."""
    folder = tmp_path_factory.mktemp("weights")
    save_model(folder / "best.safetensors", tiny(NAME), NAME, ARGS, SPEC)
    return folder


@pytest.fixture
def kept(weights, tmp_path, monkeypatch):
    """The same weights in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(weights / "best.safetensors", tmp_path)
    return tmp_path


@pytest.fixture
def untraced(monkeypatch):
    """Exports write an empty file, without the seconds that tracing takes."""
    monkeypatch.setattr(exporting, "_program", lambda *args: None)
    monkeypatch.setattr(exporting, "_write_program", lambda program, path, said: path.touch())


@pytest.fixture(scope="module")
def traced():
    """The trace of a model that takes what image files hold, once for both formats."""
    usual, made = exporting._program, []

    def once(*given):
        if not made:
            made.append(usual(*given))
        return made[0]

    return once


@pytest.fixture(scope="module")
def program(weights, traced, tmp_path_factory):
    """A program of ``torch.export``, and its model."""
    model = load_model(weights / "best.safetensors").train()
    model.blocks[0].eval()
    before = [part.training for part in model.modules()]
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "_program", traced)
        trials = export(model, path, "torch", prepare=True, notes={"made": "here"})
    assert [part.training for part in model.modules()] == before
    sides = [(trial.height, trial.width) for trial in trials]
    assert len(set(sides)) == 3 and any(height != width for height, width in sides)
    assert [each.name for each in path.parent.iterdir()] == ["model.pt2"]
    return path, model.eval()


def pixels(batch, height, width):
    return torch.randint(256, (batch, 3, height, width), dtype=torch.uint8)


def assert_prepared(found, x, model):
    """What a file gives of pixels is what the model gives of normalized images."""
    mean, std = (torch.tensor(of)[:, None, None] for of in (SPEC.mean, SPEC.std))
    with torch.inference_mode():
        wanted = model((x / 255 - mean) / std)
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(torch.as_tensor(found).detach(), wanted, rtol=MOST, atol=MOST)


def test_the_tool_exports_weights_with_their_normalisation_and_classes(
    kept, traced, capsys, monkeypatch
):
    monkeypatch.setattr(exporting, "_program", traced)
    assert main(["best.safetensors", "--prepare", "true", "--output", "model.onnx"]) == 0
    *trials, about, takes = capsys.readouterr().out.splitlines()
    assert len(trials) == 3 and all("from the model" in line for line in trials)
    assert about.startswith("model.onnx: ") and "uint8 [B, C, H, W]" in takes
    run = session("model.onnx")
    (given,) = run.get_inputs()
    assert (given.shape, given.type) == (["batch", 3, "height", "width"], "tensor(uint8)")
    for size in SIZES:
        found = run.run(None, {"images": (x := pixels(*size)).numpy()})[0]
        assert_prepared(found, x, load_model("best.safetensors"))
    said = run.get_modelmeta().custom_metadata_map
    assert said["visionattn.model"] == NAME and json.loads(said["class_names"]) == list("abcde")
    assert json.loads(said["visionattn.data"])["mean"] == [0.4, 0.5, 0.6]


FRESH = """
import sys, torch
run = torch.export.load("model.pt2").module()
torch.save([run(x) for x in torch.load("images.pt")], "found.pt")
assert "visionattn" not in sys.modules
"""


def test_a_program_runs_in_a_process_that_does_not_know_this_package(
    program, tmp_path, started_quickly
):
    path, model = program
    shutil.copy(path, tmp_path)
    given = [pixels(*size) for size in (*SIZES, (1, 32, 32))]  # the last is the smallest
    torch.save(given, tmp_path / "images.pt")
    done = subprocess.run(
        [sys.executable, "-c", FRESH], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for x, found in zip(given, torch.load(tmp_path / "found.pt"), strict=True):
        assert_prepared(found, x, model)
    extra = {"visionattn.json": ""}
    torch.export.load(path, extra_files=extra)
    said = json.loads(extra["visionattn.json"])
    assert said["visionattn.model"] == NAME and said["made"] == "here"


def most_entries(run, side, make=images):
    """The entries of the largest tensor that is made of an image of ``side`` patches."""
    with Largest() as largest, torch.inference_mode():
        run(make(1, 16 * side, 16 * side))
    return largest.entries


def test_tensors_of_an_exported_program_are_linear_in_the_patches(program):
    """Four times the patches: four times the entries of the largest, and not sixteen."""
    run = torch.export.load(program[0]).module()
    assert most_entries(run, 32, pixels) < 4.1 * most_entries(run, 16, pixels)


MIXED = dict(depth=3, attention=["window", "softmax", "kernelized"], window_size=3)
MIXED |= dict(feature_map="random", relative="axial")
PIXELS = dict(embed_dim=24, depth=2, num_heads=3, patch_size=8, head_stride=4, img_size=32)
PYRAMID = dict(features_only=True, pyramid_channels=4)
OTHERS = {
    "scaleformer": lambda: tiny("scaleformer_vit_t"),
    "mixed attentions": lambda: tiny("scaleformer_vit_t", **MIXED),
    "maps of a pyramid": lambda: tiny("taylorshift_abs_vit_t_pyramid", **PYRAMID),
    "masks": lambda: liven(create("scaleformer_vit_t", "segmentation", 3, 3, PIXELS)).eval(),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_onnx_runtime_gives_what_other_models_give(kind, tmp_path):
    model = OTHERS[kind]()
    export(model, tmp_path / "model.onnx", "onnx")
    run = session(tmp_path / "model.onnx")
    for size in SIZES:
        with torch.inference_mode():
            wanted = model(x := images(*size))
        wanted = [wanted] if isinstance(wanted, torch.Tensor) else wanted
        for found, each in zip(run.run(None, {"images": x.numpy()}), wanted, strict=True):
            most = MOST * max(1, float(each.abs().max()))
            torch.testing.assert_close(torch.from_numpy(found), each, rtol=0, atol=most)
    names = [f"output_{i}" for i in range(4)] if kind == "maps of a pyramid" else ["output"]
    assert [y.name for y in run.get_outputs()] == names


DIRECT = {
    "scaleformer_vit_t": dict(global_pool="avg"),
    "taylorshift_vit_t": dict(relative="axial"),
    "taylorshift_abs_vit_t_pyramid": dict(features_only=True, out_indices=[1], pyramid_channels=16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DIRECT)
def test_torch_s_own_exporter_takes_a_model_and_float16_made_of_the_file_is_finite(name, tmp_path):
    """As users of timm call it, at any batch and size; float16 as ONNX Runtime's tool makes it."""
    model, path = tiny(name, patch_size=4, **DIRECT[name]), tmp_path / "model.onnx"
    sizes = {0: "batch", 2: "height", 3: "width"}
    options = dict(dynamic_shapes=(sizes,), input_names=["images"], dynamo=True, verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (images(2, 36, 44),), path, **options)
        half = convert_float_to_float16(onnx.load(path), keep_io_types=True)
    half = onnxruntime.InferenceSession(half.SerializeToString())
    for run, size, most in (
        (session(path), (3, 12, 40), 1e-3),
        (session(path), (1, 64, 20), 1e-3),
        (half, (1, 24, 24), 1e-2),
        (half, (1, 400, 400), 1e-2),
    ):
        with torch.inference_mode():
            wanted = model(x := images(*size))
        wanted = wanted if isinstance(wanted, torch.Tensor) else wanted[0]
        found = torch.from_numpy(run.run(None, {"images": x.numpy()})[0])
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() < most * max(1, wanted.abs().max()), size


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_a_compiled_package_gives_what_its_model_gives(tmp_path):
    model = tiny("taylorshift_abs_vit_t", embed_dim=12, mlp_ratio=1.0)
    with torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):
        export(model, tmp_path / "model.pt2", "compiled")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]
    package = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))
    with torch.inference_mode():
        for x in (images(*size) for size in SIZES):
            torch.testing.assert_close(package(x), model(x), rtol=MOST, atol=MOST)
    assert package.get_metadata()["visionattn.model"] == "taylorshift_abs_vit_t"


@pytest.mark.slow
def test_grey_levels_are_made_channels_within(tmp_path):
    options = dict(embed_dim=12, num_heads=3)
    model = liven(create_model("taylorshift_vit_pixel", **options)).eval()
    model.data_spec = DataSpec(256, 10, (), (), (), "grey_one_hot", 32)
    export(model, tmp_path / "model.pt2", "torch", prepare=True)
    grey = torch.randint(256, (2, 1, 9, 12), dtype=torch.uint8)
    with torch.inference_mode():
        wanted = model(torch.nn.functional.one_hot(grey[:, 0].long(), 256).movedim(3, 1).float())
        found = torch.export.load(tmp_path / "model.pt2").module()(grey)
    torch.testing.assert_close(found, wanted, rtol=MOST, atol=MOST)


def test_a_file_that_does_not_give_what_the_model_gives_is_not_written(
    tmp_path, monkeypatch, untraced
):
    model, path = tiny(NAME), tmp_path / "model.pt2"
    path.write_bytes(b"before")
    for run, said in (
        (lambda x: [1.001 * model(x)], "expected a difference from the model of at most"),
        (
            lambda x: [model(x)[:, :4]],
            r"expected outputs \[\[1, 5\]\], as the model's, got \[\[1, 4\]\]",
        ),
        (lambda x: {}["bad\nand worse"], r"the exported file does not run \(KeyError: 'bad"),
    ):
        monkeypatch.setattr(exporting, "runner", lambda path, format: run)  # noqa: B023
        with pytest.raises(ValueError, match=f"^images of 224 x 224 px, 1 at a time: {said}"):
            export(model, path, "torch")
        assert written(tmp_path) == {"model.pt2": b"before"}


REFUSED = [
    ([], "expected a model, e.g. scaleformer_vit_s"),
    (["scaleformer_vit_t", "--output", "a.pt2"], "ends in .onnx for format onnx"),
    (["scaleformer_vit_t", "--output", "no/a.onnx"], "no folder"),
    (
        ["vit_tiny_patch16_224", "--output", "a.onnx"],
        "model of visionattn, got vit_tiny_patch16_224",
    ),
    (["garbled.safetensors", "--output", "a.onnx"], "garbled.safetensors is truncated or not a"),
    (
        ["best.safetensors", "--pretrained", "true", "--output", "a.onnx"],
        "pretrained and args need",
    ),
    (["best.safetensors", *WORDS, "--output", "a.onnx"], "args need a model name"),
    (
        ["best.safetensors", "--output", "there.onnx"],
        "there.onnx exists; pass --overwrite to replace it",
    ),
    (["scaleformer_vit_t", "--pretrained", "true", "--output", "a.onnx"], "no pretrained weights"),
    (
        ["scaleformer_vit_t", "--prepare", "true", *WORDS, "--output", "a.onnx"],
        "prepare needs the mean and std of",
    ),
    (
        ["scaleformer_vit_t", "--args", "{dynamic_img_size: false}", "--output", "a.onnx"],
        "for 224 x 224 px only",
    ),
]


def test_what_cannot_be_exported_is_one_line(kept, capsys, monkeypatch):
    Path("garbled.safetensors").write_bytes(b"x" * 99)
    Path("there.onnx").write_bytes(b"x")
    before = written(kept)
    for words, message in REFUSED:
        assert main(words) == 2, message
        assert_one_error(capsys, message)
        assert written(kept) == before
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    assert main(["best.safetensors", "--output", "a.onnx"]) == 2
    assert_one_error(capsys, "needs onnx and onnxscript and onnxruntime; pip install 'visionattn")


def test_what_an_exporter_raises_is_one_line(monkeypatch, kept, capsys):
    def fails(*args, **kwargs):
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(exporting, "_program", fails)
    assert main(["best.safetensors", "--format", "torch", "--output", "a.pt2"]) == 2
    assert_one_error(capsys, "taylorshift_abs_vit_t cannot be exported as torch: no such thing")
    assert not Path("a.pt2").exists()
