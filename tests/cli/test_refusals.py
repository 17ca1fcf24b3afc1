"""What every tool refuses in one line before it does anything: devices that compute nothing, empty
values, folders of images that are not there; and how long such a line may be.
"""

import os
import warnings

import PIL
import pytest

import visionattn
from tests.helpers import inference_files
from tests.helpers.inference_files import write_image, write_weights
from tests.helpers.tools import assert_one_error
from visionattn.cli.ends import LONGEST, bounded, in_one_line, run_tool, warnings_in_one_line
from visionattn.command import main

SMALL = "--model.args.patch_size 8 --model.args.depth 1 --data.img_size 16 --data.workers 0"
SMALL += " --epochs 1 --optim.warmup_epochs 0.5"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with weights and an image, as the current folder."""
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    write_image(tmp_path / "images" / "a.png", 16, 24, 7)
    return tmp_path


def inferring(*more: str, output: str = "out") -> list[str]:
    return inference_files.flags("--img_size", "native", *more, output=output)


COMPUTES = {
    "train": f"train {SMALL} --run small --device meta",
    "sweep": "sweep --base digits --heads 2 --set device=meta --output sweep",
    "profile": "profile --models scaleformer_vit_t --img-size 32 --depth 1 --device meta",
    "benchmark": "benchmark operations sdpa --tokens 16 --no-memory --device meta",
    "validate": "validate --checkpoint best.safetensors --data.name digits --device meta",
}


@pytest.mark.parametrize("tool", [*COMPUTES, "features", "predict"])
def test_a_device_that_computes_nothing_is_refused_by_every_tool(folder, capsys, tool):
    words = COMPUTES[tool].split() if tool in COMPUTES else None
    before = sorted(os.listdir(folder))
    given = words or [tool, *inferring("--device", "meta", output=f"out.{tool}.csv")]
    assert main(given) == 2
    assert_one_error(capsys, "device 'meta' computes nothing: it knows shapes alone")
    assert sorted(os.listdir(folder)) == before


READS_WEIGHTS = [
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
]


@pytest.mark.parametrize("command", READS_WEIGHTS)
def test_of_a_folder_in_place_of_weights_those_in_it_are_named(folder, capsys, command):
    for name in ("a", "best"):
        (folder / "run").mkdir(exist_ok=True)
        (folder / "run" / f"{name}.safetensors").touch()
    assert main(command.split()) == 2
    assert_one_error(capsys, "at run: it is a folder; name the weights in it, run/best.safetensors")


EMPTY = {
    "train --init-from=": "init_from is empty; give a value, or leave it out",
    "train --data.root=": "data.root is empty",
    "validate --checkpoint best.safetensors --data.name digits --json=": "json is empty",
    "features --model scaleformer_vit_t --checkpoint= --images images --output out": "checkpoint",
    "predict --checkpoint best.safetensors --images images --output=": "output is empty",
    "profile --csv=": "csv is empty",
    "report images --title=": "title is empty",
    "benchmark operations sdpa --csv=": "csv is empty",
    "sweep --base digits --heads 2 --set init_from=": "init_from is empty",
}


@pytest.mark.parametrize("line", EMPTY)
def test_an_empty_value_is_refused_and_does_not_count_as_left_out(folder, capsys, line):
    before = sorted(os.listdir(folder))
    assert main(line.split()) == 2
    assert_one_error(capsys, EMPTY[line])
    assert sorted(os.listdir(folder)) == before


def test_texts_within_arguments_of_models_may_be_empty(folder, capsys):
    """timm's ``global_pool=""`` pools nothing."""
    assert main(["train", "--model.args.global_pool", "", "--epochs", "0", "--run", "a"]) == 2
    assert_one_error(capsys, "epochs must be above 0")


def test_images_that_are_not_there_are_said_before_anything_about_where_results_would_go(
    folder, capsys
):
    (folder / "checkpoints" / "small").mkdir(parents=True)
    for name in ("checkpoints/small/mine", "out.csv", "out.yaml", "out.png", "full/mine"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    (folder / "base.yaml").write_text("data: {name: folder, root: nowhere}\n")
    missing = "--data.name folder --data.root nowhere"
    lines = {
        f"train {SMALL} {missing} --run small": "data root nowhere does not exist",
        f"train {SMALL} {missing} --show-batch out.png": "data root nowhere does not exist",
        "stats --data.root nowhere --output out.yaml": "data root nowhere does not exist",
        "sweep --base base.yaml --heads 2 --output full": "data root nowhere does not exist",
        "predict --checkpoint best.safetensors --images nowhere --output out.csv": "at nowhere",
        "features --checkpoint best.safetensors --images nowhere --output full": "at nowhere",
    }
    for line, part in lines.items():
        assert main(line.split()) == 2, line
        assert_one_error(capsys, part)


def test_lines_are_bounded_and_keep_both_ends():
    path = "/a/long/path" * 12
    assert bounded(f"no file at {path}; name another") == f"no file at {path}; name another"
    value, error = "x" * 5000, ValueError
    line = in_one_line(error(f"lr must be a number, got {value}; leave it out"))
    assert line.startswith("lr must be a number, got xxx") and line.endswith("xxx; leave it out")
    assert " ... " in line and len(line) < 300
    many = in_one_line(error("names: " + " ".join(map(str, range(3000))) + "; name fewer"))
    assert many.startswith("names: 0 1 2 ") and many.endswith("2999; name fewer")
    assert len(many) <= LONGEST
    assert len(in_one_line(FileNotFoundError(2, "No such file or directory", value))) <= LONGEST


@pytest.mark.parametrize(
    "words",
    [
        ["x" * 5000],
        ["train", f"--{'x' * 5000}", "1"],
        ["train", "--optim.lr", "x" * 5000],
        ["train", "--run", "y" * 5000],
        ["train", "--config", "y" * 5000],
        ["benchmark", "x" * 5000],
        ["benchmark", "operations", "x" * 5000],
        ["predict", "--checkpoint", "x" * 5000, "--images", "images"],
        ["features", "--images", *(f"images/{i}" for i in range(2000)), "--model", "x" * 5000],
    ],
    ids=lambda words: " ".join(words)[:30],
)
def test_whatever_is_given_no_tool_says_more_than_a_few_lines_of_a_screen(folder, capsys, words):
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and len(printed) <= LONGEST + 20, len(printed)


def test_notes_are_bounded_and_those_of_pillow_are_a_line_too():
    with warnings_in_one_line():
        said = [
            warnings.formatwarning(UserWarning(text), UserWarning, package.__file__, 1)
            for package, text in ((visionattn, "z" * 5000), (PIL, "Corrupt\nEXIF data"))
        ]
    assert said[0].startswith("note: zzz") and len(said[0]) <= LONGEST + 7
    assert said[1] == "note: Corrupt EXIF data\n"


def test_the_reason_in_a_status_is_that_line(capsys):
    def work():
        raise ValueError("a " * 5000)

    assert run_tool(work) == 2
    assert len(capsys.readouterr().err) <= LONGEST + 8


ABSURD = {
    "operations taylorshift sdpa --tokens 1000000000000": "its inputs alone take",
    "operations taylorshift --tokens 64 999999999999999999": "its inputs alone take",
    "operations kernelized --tokens 64 --width 1000000000000": "its inputs alone take",
    "operations kernelized --tokens 64 --heads 1000000000000000": "its inputs alone take",
    "operations kernelized+joint --tokens 64 --horizon 1000000000": "its inputs alone take",
    "operations sdpa --tokens 64 --batch 999999999999999999": "its inputs alone take",
    "operations taylorshift --form direct --tokens 8000000000 --heads 1 --width 1": "name smaller",
    "models vit_tiny_patch16_224 --img-size 100000000": "its inputs alone take",
    "models scaleformer_vit_t --img-size 64 1000000000000": "its inputs alone take",
    "loader digits --img-size 1000000000": "its inputs alone take",
}


@pytest.mark.parametrize("line", ABSURD)
def test_absurd_sizes_are_one_line_before_anything_of_them_is_made(capsys, line):
    assert main(["benchmark", *line.split()]) == 2
    assert_one_error(capsys, ABSURD[line])


def test_absurd_sizes_of_a_profile_are_one_line(capsys):
    for more in ("--img-size 1000000000", "--img-size 256 --batch 1000000000000"):
        assert (
            main(["profile", "--models", "scaleformer_vit_t", "--depth", "1", *more.split()]) == 2
        )
        assert_one_error(capsys, "its inputs alone take")
