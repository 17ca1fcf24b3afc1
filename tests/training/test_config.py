"""Configuration files and flags become dataclasses, and every mistake in them one line."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from visionattn.cli.exit_codes import run_tool
from visionattn.cli.parsing import parse
from visionattn.training.config import TrainConfig, check
from visionattn.training.distil.distil_config import parse_distil

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
DISTILLATIONS = [path for path in CONFIGS if path.stem.startswith("distil_")]


def read(*argv: str) -> TrainConfig:
    return parse(TrainConfig, argv)


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "epochs: 7\noptim: {lr: 2.0e-3, name: lamb}\n"
        "model: {args: {depth: 5, num_heads: 3, attention: [window, kernelized]}}\n"
    )
    flags = ("--optim.lr", "3e-4", "--model.args.depth", "2")
    config = read("--config", str(file), *flags)
    found = config.epochs, config.optim.lr, config.optim.name, config.batch_size
    assert found == (7, 3e-4, "lamb", 64)
    args = {"depth": 2, "num_heads": 3, "attention": ["window", "kernelized"]}
    assert config.model.args == args
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
def test_an_unknown_name_is_answered_with_the_nearest_right_one(wrong, right):
    with pytest.raises(ValueError, match=f"^unknown option --{wrong}; did you mean --{right}\\?$"):
        read(f"--{wrong}", "3")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("epochs: [", "is not a YAML file"),
        ("- epochs\n", ": expected names and values, got a list"),
        ("optim: 3\n", "optim: expected names and values, got 3"),
        ("epochs: ten\n", "epochs must be an integer, got ten"),
        ("epoch: 3\n", "a.yaml: unknown key epoch; did you mean epochs?"),
        ("optim: {lrr: 3}\n", "a.yaml: unknown key optim.lrr; did you mean optim.lr?"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_line(tmp_path, text, part):
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        read("--config", str(file))
    assert part in str(error.value) and "\n" not in str(error.value)


def test_the_printed_configuration_is_a_configuration(capsys, tmp_path):
    flags = ("--optim.lr", "3e-4", "--data.img_size_choices", "96", "128")
    with pytest.raises(SystemExit) as end:
        read(*flags, "--print_config")
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert end.value.code == 0 and read("--config", str(file)) == read(*flags)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_of_the_repository_is_valid_and_has_a_header(path):
    if path in DISTILLATIONS:
        parse_distil(["--config", str(path)])
    else:
        check(replace(read("--config", str(path)), run=path.stem))
    header = re.split("\nmodel:|\nteacher:", path.read_text())[0]
    for word in ("# Source:", "# Command:", "# Expected:", "# Hardware:", "# Time:"):
        assert word in header, word


REFUSED = {
    # Values of other types.
    "--optim.lr fast": "optim.lr must be a number, got fast",
    "--epochs 3.5": "epochs must be an integer, got 3.5",
    "--compile perhaps": "compile must be true or false, got perhaps",
    "--data.name mnist": "data.name must be one of digits, digits_pixel, canvas, documents, copy, "
    "cifar10, cifar10_pixel, folder, got mnist",
    "--optim.clip_grad x": "optim.clip_grad must be a number, got x",
    "--data.img_size_choices 96 big": "data.img_size_choices[1] must be an integer, got big",
    "--optim.lr": "--optim.lr needs a value: NUMBER",
    "--optim.lr=": "optim.lr must be a number, got ''",
    "--optim.lr .nan": "optim.lr must be a number, got .nan",
    # Words that are no options.
    "--config --epochs=3": "--config needs a value: TEXT",
    "--epochs 32 48": "--epochs expects one value, got 32 48",
    "--quick true": "unknown option --quick; --help lists all",
    "--data 1": "unknown option --data; did you mean --data.name?",
    "--model scaleformer_vit_t": "unknown option --model; did you mean --model.name? Pass a file "
    "of options with --config",
    "--model.args depth=3": "model.args must be names and values, got depth=3",
    "-lr 3": "expected an option that begins with --, got -lr",
    "--epochs=3 4": "expected an option that begins with --, got 4",
    "stray": "expected an option that begins with --, got stray",
    # Values out of range.
    "--epochs 0": "epochs must be above 0, got 0",
    "--optim.lr -0.1": "optim.lr must be above 0, got -0.1",
    "--optim.lr 1e30": "optim.lr must be at most 1e+09, got 1e+30",
    "--optim.clip_grad 2e9": "optim.clip_grad must be at most 1e+09, got 2000000000.0",
    "--optim.accumulate 0": "optim.accumulate must be above 0, got 0",
    "--seed -1": "seed must be at least 0, got -1",
    "--patience 0": "patience must be above 0",
    "--freeze -1 --init-from a": "freeze must be at least 0",
    "--parallel 0": "parallel must be above 0",
    "--optim.mixup -1": "optim.mixup must be at least 0, got -1.0",
    "--optim.label_smoothing 1": "optim.label_smoothing must be in [0, 1), got 1.0",
    "--optim.ema_decay 0": "optim.ema_decay must be in (0, 1), got 0.0",
    "--optim.layer_decay 1.1": "optim.layer_decay must be in (0, 1], got 1.1",
    "--loss.class_weights 1 -1": "loss.class_weights[1] must be",
    "--data.val_fraction 1": "data.val_fraction must be in (0, 1), got 1.0",
    "--data.img_size_choices 96 0": "data.img_size_choices[1] must be above 0, got 0",
    "--data.img_size_choices []": "data.img_size_choices is empty; pass sizes, or remove it",
    "--optim.min_lr 1": "expected optim.min_lr at most the peak optim.lr 0.001, got 1.0",
    "--optim.drop_epochs 0": "optim.drop_epochs must be above 0, got 0.0",
    "--optim.drop_epochs 10": "optim.drop_epochs must be above optim.warmup_epochs 1.0 and below "
    "epochs 10, got 10.0",
    "--optim.drop_epochs 1": "optim.drop_epochs must be above optim.warmup_epochs 1.0 and below "
    "epochs 10, got 1.0",
    "--optim.warmup_epochs 10": "expected optim.warmup_epochs below epochs 10, got 10.0; pass "
    "--optim.warmup_epochs 5",
    # Options that contradict each other.
    "--resume --overwrite": "resume continues a run and overwrite deletes it; pass only one",
    "--freeze backbone": "freeze backbone would keep random weights",
    "--data.fit pad --data.img_size 32 --optim.mixup 0.5": "optim.mixup and optim.cutmix need "
    "images without padding, got data.fit pad",
    "--parallel sequence --data.fit pad --data.img_size 16": "parallel sequence needs data.task "
    "classification, images without padding and no compilation; remove data.fit pad",
    "--parallel sequence --data.task segmentation": "parallel sequence needs",
    "--parallel sequence --data.crop 16": "parallel sequence needs",
    "--data.crop 16 --optim.mixup 0.2": "optim.mixup and optim.cutmix need images without",
    # Losses and metrics of other tasks.
    "--loss.name dice": "loss.name dice needs data.task segm",
    "--data.task segmentation --loss.name dice --loss.class_weights balanced": "loss.name dice "
    "weights all classes",
    "--data.task segmentation --loss.name focal --optim.label_smoothing 0.1": "optim.label_"
    "smoothing needs a",
    "--loss.name focal --optim.mixup 0.2": "optim.mixup and optim.cutmix need",
    "--loss.class_weights [1] --optim.cutmix 1": "optim.mixup and optim.cutmix need",
    "--data.task generate --loss.name focal": "data.task generate learns",
    "--data.task generate --loss.class_weights balanced": "data.task generate learns",
    "--data.task multilabel --optim.mixup 0.2": "optim.mixup and optim.cutmix need one class per",
    "--data.task regression --optim.cutmix 1": "optim.mixup and optim.cutmix need one class per",
    "--data.task regression --optim.label_smoothing 0.1": "optim.label_smoothing needs classes, go",
    "--data.task regression --loss.class_weights balanced": "loss.class_weights needs classes, got",
    "--data.task regression --loss.name focal": "loss.name focal needs classes, got",
    "--data.task multilabel --loss.name l1": "loss.name l1 needs data.task regression, got multila",
    "--data.task multilabel --monitor r2": "monitor r2 needs data.task regression, got multilabel; "
    "use one of map, f1, loss",
    "--monitor map": "monitor map needs data.task multilabel",
    "--monitor mean_iou": "monitor mean_iou needs data.task segmentation",
}


@pytest.mark.parametrize(("flags", "line"), REFUSED.items())
def test_what_cannot_be_trained_is_one_line(flags, line):
    with pytest.raises(ValueError) as error:
        check(read(*flags.split()))
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


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

    assert run_tool(work) == code and capsys.readouterr().err == line


def test_a_fault_of_the_program_is_not_taken_for_bad_input():
    with pytest.raises(ZeroDivisionError):
        run_tool(lambda: 1 / 0)


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
