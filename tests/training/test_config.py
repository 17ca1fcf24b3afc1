"""Configuration files and flags become dataclasses, and every mistake in them one line."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from visionattn.cli.exit_codes import run_tool
from visionattn.cli.parsing import field_types, parse, way_out
from visionattn.data.data_config import DataConfig
from visionattn.training.config import OptimConfig, TrainConfig, check, parse_train
from visionattn.training.distil.distil_config import parse_distil

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
DISTILLATIONS = [path for path in CONFIGS if path.stem.startswith("distil_")]


def read(*argv: str) -> TrainConfig:
    return parse(TrainConfig, argv)


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "epochs: 7\noptim: {lr: 2.0e-3, name: lamb}\nmodel: {args: {depth: 5, num_heads: 3}}\n"
    )
    config = read("--config", str(file), "--optim.lr", "3e-4", "--model.args.depth", "2")
    assert (config.epochs, config.optim.lr, config.optim.name, config.batch_size) == (
        7,
        3e-4,
        "lamb",
        64,
    )
    assert config.model.args == {"depth": 2, "num_heads": 3}
    assert isinstance(config.optim, OptimConfig) and isinstance(config.data, DataConfig)


def test_a_list_of_attentions_may_stand_in_yaml_and_on_the_command_line(tmp_path):
    file, mix = tmp_path / "a.yaml", ["window", "kernelized"]
    file.write_text("model:\n  args:\n    attention: [window, kernelized]\n    depth: 2\n")
    assert read("--config", str(file)).model.args == {"attention": mix, "depth": 2}
    flags = ("--model.args.attention", '["softmax", "window"]')
    assert read("--config", str(file), *flags).model.args["attention"] == ["softmax", "window"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--init-from", "a/b-c.pt", "--data.img-size-choices", "96", "128", "160", "--resume"],
        ["--init_from=a/b-c.pt", "--data.img_size_choices=[96, 128, 160]", "--resume=true"],
        ["--resume", "true", "--data.img_size_choices", "[96,128,160]", "--init_from", "a/b-c.pt"],
    ],
)
def test_hyphens_lists_and_switches_may_be_written_in_every_usual_way(flags):
    config = read(*flags)
    assert (config.init_from, config.data.img_size_choices, config.resume) == (
        "a/b-c.pt",
        [96, 128, 160],
        True,
    )


def test_optional_values_can_be_switched_off_and_negative_numbers_are_values():
    config = read("--optim.clip_grad", "null", "--seed", "-3", "--data.img_size_choices", "null")
    assert (config.optim.clip_grad, config.seed, config.data.img_size_choices) == (None, -3, None)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("optim.learning_rate", "optim.lr"),
        ("optim.lrr", "optim.lr"),
        ("lr", "optim.lr"),
        ("batchsize", "batch_size"),
        ("data.image_size", "data.img_size"),
        ("optim.ema", "optim.ema_decay"),
        ("epoch", "epochs"),
        ("dat.name", "data.name"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_right_one(tmp_path, wrong, right):
    assert way_out(wrong, list(field_types(TrainConfig))) == f"did you mean {right}?"
    with pytest.raises(ValueError, match=f"^unknown option --{wrong}; did you mean --{right}\\?$"):
        read(f"--{wrong}", "3")
    group, _, leaf = wrong.rpartition(".")
    if group != "dat":
        file = tmp_path / "a.yaml"
        file.write_text(yaml.safe_dump({group: {leaf: 3}} if group else {leaf: 3}))
        with pytest.raises(
            ValueError, match=f"a.yaml: unknown key {wrong}; did you mean {right}\\?$"
        ):
            read("--config", str(file))


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--optim.lr", "fast"], "optim.lr must be a number, got fast"),
        (["--epochs", "3.5"], "epochs must be an integer, got 3.5"),
        (["--compile", "perhaps"], "compile must be true or false, got perhaps"),
        (
            ["--data.name", "mnist"],
            "data.name must be one of digits, digits_pixel, canvas, documents, copy, cifar10, "
            "cifar10_pixel, folder, got mnist",
        ),
        (["--optim.clip_grad", "x"], "optim.clip_grad must be a number, got x"),
        (
            ["--data.img_size_choices", "96", "big"],
            "data.img_size_choices[1] must be an integer, got big",
        ),
        (["--optim.lr"], "--optim.lr needs a value: NUMBER"),
        (["--optim.lr="], "optim.lr must be a number, got "),
        (["--config", "--epochs=3"], "--config needs a value: TEXT"),
        (["--epochs", "32", "48"], "--epochs expects one value, got 32 48"),
        (["--quick", "true"], "unknown option --quick; --help lists all"),
        (
            ["--model", "scaleformer_vit_t"],
            "unknown option --model; did you mean --model.name? Pass a file of options with "
            "--config",
        ),
        (["--model.args", "depth=3"], "model.args must be names and values, got depth=3"),
        (["-lr", "3"], "expected an option that begins with --, got -lr"),
        (["--epochs=3", "4"], "expected an option that begins with --, got 4"),
        (["stray"], "expected an option that begins with --, got stray"),
    ],
)
def test_a_value_of_a_wrong_type_is_one_line(argv, line):
    with pytest.raises(ValueError) as error:
        read(*argv)
    assert str(error.value).replace("'", "") == line


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("epochs: [", "is not a YAML file"),
        ("- epochs\n", ": expected names and values, got a list"),
        ("optim: 3\n", "optim: expected names and values, got 3"),
        ("epochs: ten\n", "epochs must be an integer, got ten"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_line(tmp_path, text, part):
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        read("--config", str(file))
    assert part in str(error.value) and "\n" not in str(error.value)


def test_the_printed_configuration_is_a_configuration(capsys, tmp_path):
    with pytest.raises(SystemExit) as end:
        read("--optim.lr", "3e-4", "--data.img_size_choices", "96", "128", "--print_config")
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert end.value.code == 0
    assert read("--config", str(file)) == read(
        "--optim.lr", "3e-4", "--data.img_size_choices", "96", "128"
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_of_the_repository_is_valid_and_has_a_header(path):
    if path in DISTILLATIONS:
        parse_distil(["--config", str(path)])
    else:
        check(replace(read("--config", str(path)), run=path.stem))
    header = re.split("\nmodel:|\nteacher:", path.read_text())[0]
    for word in ("# Source:", "# Command:", "# Expected:", "# Hardware:", "# Time:"):
        assert word in header, word


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--epochs", "0"], "epochs must be above 0, got 0"),
        (["--optim.lr", "-0.1"], "optim.lr must be above 0, got -0.1"),
        (["--optim.lr", "1e30"], "optim.lr must be at most 1e+09, got 1e+30"),
        (["--optim.clip_grad", "2e9"], "optim.clip_grad must be at most 1e+09, got 2000000000.0"),
        (["--optim.lr", ".nan"], "optim.lr must be a number, got .nan"),
        (["--optim.accumulate", "0"], "optim.accumulate must be above 0, got 0"),
        (["--seed", "-1"], "seed must be at least 0, got -1"),
        (["--optim.mixup", "-1"], "optim.mixup must be at least 0, got -1.0"),
        (["--optim.label_smoothing", "1"], "optim.label_smoothing must be in [0, 1), got 1.0"),
        (["--optim.ema_decay", "0"], "optim.ema_decay must be in (0, 1), got 0.0"),
        (["--optim.layer_decay", "1.1"], "optim.layer_decay must be in (0, 1], got 1.1"),
        (["--data.val_fraction", "1"], "data.val_fraction must be in (0, 1), got 1.0"),
        (["--data.img_size_choices", "96", "0"], "data.img_size_choices[1] must be above 0, got 0"),
        (
            ["--data.img_size_choices", "[]"],
            "data.img_size_choices is empty; pass sizes, or remove it",
        ),
        (["--optim.min_lr", "1"], "expected optim.min_lr at most the peak optim.lr 0.001, got 1.0"),
        (["--optim.drop_epochs", "0"], "optim.drop_epochs must be above 0, got 0.0"),
        (
            ["--optim.drop_epochs", "10"],
            "optim.drop_epochs must be above optim.warmup_epochs 1.0 and below epochs 10, got 10.0",
        ),
        (
            ["--optim.drop_epochs", "1"],
            "optim.drop_epochs must be above optim.warmup_epochs 1.0 and below epochs 10, got 1.0",
        ),
        (
            ["--optim.warmup_epochs", "10"],
            "expected optim.warmup_epochs below epochs 10, got 10.0; pass --optim.warmup_epochs 5",
        ),
        (
            ["--resume", "--overwrite"],
            "resume continues a run and overwrite deletes it; pass only one",
        ),
    ],
)
def test_values_out_of_range_are_one_line_with_the_key(flags, line):
    with pytest.raises(ValueError) as error:
        check(read(*flags))
    assert str(error.value) == line


def test_the_ends_of_the_ranges_are_allowed():
    config = TrainConfig(
        optim=OptimConfig(
            layer_decay=1.0, label_smoothing=0.0, warmup_epochs=0, weight_decay=0, clip_grad=None
        )
    )
    check(config)
    assert asdict(config)["optim"]["layer_decay"] == 1.0


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("expected 3,\n  got 4"), 2, "error: expected 3, got 4\n"),
        (FileNotFoundError("no x"), 2, "error: no x\n"),
        (
            PermissionError(13, "Permission denied", "a/b.yaml"),
            2,
            "error: a/b.yaml: Permission denied\n",
        ),
        (OSError(28, "No space left on device"), 2, "error: [Errno 28] No space left on device\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            ValueError(
                "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most "
                "recent call last):\n"
                "ValueError: cannot read a.png"
            ),
            2,
            "error: cannot read a.png\n",
        ),
    ],
)
def test_a_tool_ends_with_a_code_and_one_line(capsys, error, code, line):
    def work():
        raise error

    assert run_tool(work) == code
    assert capsys.readouterr().err == line


def test_a_fault_of_the_program_is_not_taken_for_bad_input():
    with pytest.raises(ZeroDivisionError):
        run_tool(lambda: 1 / 0)


def test_a_group_of_options_is_not_taken_for_one_option():
    with pytest.raises(ValueError, match="unknown option --data; did you mean --data.name"):
        parse_train(["--data", "1"])


def test_the_other_values_of_a_stage_are_its_own_defaults(tmp_path):
    """Stage b has another rate and other epochs than a stage has by itself."""
    path = tmp_path / "distil.yaml"
    path.write_text("teacher: test_vit\nb: {epochs: 2}\n")
    for words in (["--teacher", "test_vit", "--b.epochs", "2"], ["--config", str(path)]):
        config = parse_distil(words)
        assert (config.b.epochs, config.b.lr, config.c.lr) == (2, 5e-4, 1e-4)


def test_null_removes_an_argument_of_the_configuration(tmp_path):
    file = tmp_path / "windows.yaml"
    file.write_text("model: {args: {patch_size: 8, window_size: 7}}")
    removed = ["--config", str(file), "--model.args.window_size", "null"]
    assert parse(TrainConfig, removed).model.args == {"patch_size": 8}
    # Without such an argument nothing is removed, and building the model refuses null.
    given = ["--model.args.window_size", "null"]
    assert parse(TrainConfig, given).model.args == {"window_size": None}
