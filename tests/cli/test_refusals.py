"""What every tool refuses in one line before it does anything: devices that compute nothing, empty
values, absurd sizes; and how long such a line may be.
"""

import os
import shlex
import sys

import pytest

from tests.helpers.inference_files import write_image, write_weights
from tests.helpers.tools import assert_one_error
from visionattn.cli.exit_codes import LONGEST, bounded, in_one_line, run_tool
from visionattn.command import main

IMAGES = "--checkpoint best.safetensors --images images --workers 0 --img_size native"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with weights, an image and a folder of two weights, as the current folder."""
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    write_image(tmp_path / "images" / "a.png", 16, 24, 7)
    (tmp_path / "run").mkdir()
    for name in ("a", "best"):
        (tmp_path / "run" / f"{name}.safetensors").touch()
    return tmp_path


COMPUTE_NOTHING = dict.fromkeys(
    [
        "train --model.args.patch_size 8 --model.args.depth 1 --data.img_size 16 --data.workers 0 "
        "--epochs 1 --optim.warmup_epochs 0.5 --run small --device meta",
        "sweep --base digits --heads 2 --set device=meta --output sweep",
        "profile --models scaleformer_vit_t --img-size 32 --depth 1 --device meta",
        "benchmark operations sdpa --tokens 16 --no-memory --device meta",
        "validate --checkpoint best.safetensors --data.name digits --device meta",
        f"features {IMAGES} --device meta --output out",
        f"predict {IMAGES} --device meta --output out.csv",
    ],
    "device 'meta' cannot compute",
)
FOLDERS = dict.fromkeys(
    [
        "train --config digits --init-from run",
        "validate --checkpoint run",
        "predict --checkpoint run --images images",
        "features --checkpoint run --images images --output out",
        "look run images/a.png --output out",
        "generate run --output out.png",
        "share run --to out",
        "export run --output out.onnx",
        "convert run --output out.safetensors",
        "distil --teacher run --data.name digits",
    ],
    "at run: it is a folder; pass the weights in it, run/best.safetensors",
)
TRAINING = {
    "train --optim.learning_rate 1": "unknown option --optim.learning_rate; did you mean --opti",
    "train --optim.lr fast": "optim.lr must be a number, got fast",
    "train --config nowhere.yaml": "no configuration file at nowhere.yaml",
    "train --data.name folder": "root",
    "train --data.name folder --data.root nowhere": "nowhere",
    "train --data.name cifar10 --data.root nowhere": "nowhere",
    "train --model.name scaleformer_vit_q": "timm model, got 'scaleformer_vit_q'; did you mean",
    "train --model.args.pretrained true": "pretrained",
    "train --model.args.patch_size 8 --data.img_size 30": "8-pixel patches; the nearest that fit",
    "train --init-from nowhere.pt": "no checkpoint at nowhere.pt",
    "train --resume": "nothing to resume",
    "train --resume --overwrite": "pass only one",
    "train --device cuda:99": "device 'cuda:99' is not available",
}
EMPTY = {
    "train --init-from=": "init_from is empty; pass a value, or remove it",
    "train --data.root=": "data.root is empty",
    "validate --checkpoint best.safetensors --data.name digits --json=": "json is empty",
    "features --model scaleformer_vit_t --checkpoint= --images images --output out": "checkpoint",
    "predict --checkpoint best.safetensors --images images --output=": "output is empty",
    "profile --output=": "output is empty",
    "report images --title=": "title is empty",
    "benchmark operations sdpa --csv=": "csv is empty",
    "sweep --base digits --heads 2 --set init_from=": "init_from is empty",
    # timm's global_pool="" pools nothing
    "train --model.args.global_pool '' --epochs 0 --run a": "epochs must be above 0",
}
ABSURD = {
    "benchmark operations taylorshift sdpa --tokens 1000000000000": "its inputs need",
    "benchmark operations taylorshift --tokens 64 999999999999999999": "its inputs need",
    "benchmark operations kernelized --tokens 64 --width 1000000000000": "its inputs need",
    "benchmark operations kernelized --tokens 64 --heads 1000000000000000": "its inputs need",
    "benchmark operations kernelized+joint --tokens 64 --horizon 1000000000": "its inputs need",
    "benchmark operations sdpa --tokens 64 --batch 999999999999999999": "its inputs need",
    "benchmark operations taylorshift --form direct --tokens 8000000000 --width 1": "its inputs",
    "benchmark models vit_tiny_patch16_224 --img-size 100000000": "its inputs need",
    "benchmark models scaleformer_vit_t --img-size 64 1000000000000": "its inputs need",
    "benchmark loader digits --img-size 1000000000": "its inputs need",
    "profile --models scaleformer_vit_t --depth 1 --img-size 1000000000": "its inputs need",
    "profile --models scaleformer_vit_t --img-size 256 --batch 1000000000000": "its inputs need",
}


@pytest.mark.parametrize("refused", [COMPUTE_NOTHING, FOLDERS, TRAINING, EMPTY, ABSURD])
def test_what_no_tool_does_is_one_line_before_anything_is_made(folder, capsys, refused):
    before = sorted(os.listdir(folder))
    for line, part in refused.items():
        assert main(shlex.split(line)) == 2, line
        assert_one_error(capsys, part)
        assert sorted(os.listdir(folder)) == before, line


def test_lines_are_bounded_and_keep_both_ends():
    path = "/a/long/path" * 12
    assert bounded(f"no file at {path}; name another") == f"no file at {path}; name another"
    value = "x" * 5000
    line = in_one_line(ValueError(f"lr must be a number, got {value}; remove it"))
    assert line.startswith("lr must be a number, got xxx") and line.endswith("xxx; remove it")
    assert "xxx ... xxx" in line and len(line) <= LONGEST
    assert len(in_one_line(FileNotFoundError(2, "No such file or directory", value))) <= LONGEST


def test_a_reader_that_ends_ends_the_command_without_an_error(monkeypatch, capfd):
    """As ``head`` does behind ``predict``."""
    redirected = []
    monkeypatch.setattr(os, "dup2", lambda source, target: redirected.append(target))

    def write():
        raise BrokenPipeError(32, "Broken pipe")

    assert run_tool(write) == 2 and not redirected
    assert capfd.readouterr().err == "error: [Errno 32] Broken pipe\n"
    with monkeypatch.context() as broken:
        broken.setattr(sys.stdout, "flush", write)
        assert run_tool(write) == 1
    assert len(redirected) == 1 and capfd.readouterr().err == ""
