"""Sweeps of head counts: the pool of trainings with trainers that only pretend, and one small sweep
from end to end.
"""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers import warm_python
from tests.helpers.tools import read_csv, words
from visionattn.cli.commands import started
from visionattn.cli.ends import Failed, OutOfMemory, run_tool
from visionattn.lab.sweep import cells, expected
from visionattn.lab.sweep import run as sweep_run
from visionattn.lab.sweep.config import EXAMPLE, parse_sweep
from visionattn.lab.sweep.folder import LOCK, SweepFolder
from visionattn.lab.sweep.run import sweep

BASE = {
    "model": {
        "name": "taylorshift_vit_t",
        "args": {"patch_size": 8, "embed_dim": 16, "depth": 1, "mlp_ratio": 1},
    },
    "data": {"name": "digits", "img_size": 32, "workers": 0},
    "optim": {"lr": 1e-3, "warmup_epochs": 0.1},
    "epochs": 1,
    "batch_size": 64,
    "threads": 1,
}
FAKE = """
import json, os, pathlib, signal, sys, time, yaml
config = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))
here, run = pathlib.Path(__file__).parent, pathlib.Path(config["output"]) / config["run"]
run.mkdir(exist_ok=True)
with open(here / "calls", "a") as calls:
    calls.write(json.dumps([config["run"], *sys.argv[3:]]) + "\\n")
acts = json.loads((here / "acts").read_text()).get(config["run"], ["finish"])
called = sum(1 for line in open(here / "calls") if json.loads(line)[0] == config["run"])
act = acts[min(called, len(acts)) - 1]
(run / "last.pt").write_text("state")
if act == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if act == "wait":
    def stop(*_):
        print("stopped after step 3", file=sys.stderr)
        sys.exit(130)
    signal.signal(signal.SIGINT, stop)
    (here / f"waits_{config['run']}").write_text("")
    time.sleep(60)
if act == "crash":
    raise RuntimeError("the trainer has a fault")
if act in ("nan", "oom", "bad"):
    print(f"error: {act} at step 7", file=sys.stderr)
    sys.exit({"nan": 1, "oom": 3, "bad": 2}[act])
accuracy = 0.5 + 0.01 * config["model"]["args"]["num_heads"] + 0.1 * config["seed"]
result = {"best_epoch": 1, "validation_accuracy": 0.25, "test_accuracy": accuracy}
result |= {"test_loss": 1.0, "test_images": 359}
result |= {"train_seconds": 2.0, "images_per_second": 9.0}
status = {"status": "finished", "result": result, "provenance": {"commit": "c0ffee"}}
(run / "status.json").write_text(json.dumps(status))
"""


class Fakes:
    """A folder with a base configuration and a trainer that does as it is told, cell by cell and
    attempt by attempt.
    """

    def __init__(self, folder, **acts):
        self.folder, self.output = folder, folder / "sweep"
        (folder / "fake.py").write_text(FAKE)
        (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
        (folder / "acts").write_text(json.dumps(acts))

    def __call__(self, *flags, measure="false"):
        """Run the sweep without measuring; returns what it printed."""
        lines = []
        argv = [
            "--base",
            str(self.folder / "base.yaml"),
            "--output",
            str(self.output),
            "--measure",
            measure,
            *flags,
        ]
        sweep(argv, lines.append, train=(sys.executable, str(self.folder / "fake.py")))
        return "\n".join(lines)

    def calls(self):
        """What was started since the last look: run and flags."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        seen, self.seen = getattr(self, "seen", 0), len(lines)
        return [json.loads(line) for line in lines[seen:]]

    def endings(self):
        """Status and reason of each training."""
        found = {}
        for path in (self.output / "cells").glob("*.json"):
            ending = json.loads(path.read_text())["ending"]
            found[path.stem] = (ending["status"], ending["reason"])
        return found


def sketch(path, charts, **options):
    """What stands in for a picture, which takes a second to draw."""
    path.write_bytes(b"\x89PNG")


@pytest.fixture(autouse=True)
def quick_pictures(request, monkeypatch):
    """Draw pictures in the test of them alone."""
    if "picture" not in request.node.name:
        monkeypatch.setattr(sweep_run, "png", sketch)


def markdown_tables(text):
    """Every Markdown table of a text as a list of dicts."""
    tables, lines = [], text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("|---"):
            names = [cell.strip() for cell in lines[number - 1].strip("|").split("|")]
            rows = []
            for row in lines[number + 1 :]:
                if not row.startswith("|"):
                    break
                rows.append(
                    dict(
                        zip(
                            names, (cell.strip() for cell in row.strip("|").split("|")), strict=True
                        )
                    )
                )
            tables.append(rows)
    return tables


def test_finished_cells_are_skipped_and_accuracies_are_means_over_seeds(tmp_path):
    fakes = Fakes(tmp_path)
    flags = tuple(
        words("--heads 2 8 --attention taylorshift softmax --seeds 0 3 --train_form efficient")
    )
    printed = fakes(*flags, "--jobs", "3")
    names = {f"taylorshift_h{h}_efficient_32px_seed{s}" for h in (2, 8) for s in (0, 3)}
    names |= {f"softmax_h{h}_32px_seed{s}" for h in (2, 8) for s in (0, 3)}
    assert sorted(fakes.calls()) == sorted([name] for name in names)
    table = markdown_tables(printed)[0]
    assert [(row["h"], row["d"], row["accuracy"]) for row in table] == [
        ("2", "8", "67.0 ± 21.2"),
        ("8", "2", "73.0 ± 21.2"),
    ]
    assert "0 to train" in fakes(*flags) and fakes.calls() == []
    fakes(*flags[:3], "16", *flags[3:])
    assert sorted(fakes.calls()) == sorted(
        [name.replace("h2", "h16")] for name in names if "_h2_" in name
    )


def test_tables_and_picture_are_written_after_each_cell(tmp_path, monkeypatch):
    """What is written while the second training is still to come."""
    fakes, seen, real = Fakes(tmp_path), [], cells.start

    def start(plan, cell, folder, command):
        table = fakes.output / "table.md"
        found = markdown_tables(table.read_text())[0] if table.exists() else []
        seen.append([row["accuracy"] for row in found])
        assert (fakes.output / "sweep.png").exists() == bool(found)
        return real(plan, cell, folder, command)

    monkeypatch.setattr(cells, "start", start)
    fakes("--heads", "2", "4", "--attention", "softmax")
    assert seen == [[], ["52.0", ""]]


def test_a_dry_run_lists_what_is_left_with_its_time_and_trains_nothing(tmp_path, monkeypatch):
    """One network does not fit, and one is trained already."""
    fakes, asked = Fakes(tmp_path), []

    def build(config, states, resumed, processes, device):
        asked.append((config.model.args["num_heads"], config.seed, config.data.img_size))
        if config.model.args["num_heads"] == 8:
            raise OutOfMemory("too little memory")
        return config, None, []

    monkeypatch.setattr(expected, "build", build)
    monkeypatch.setattr(
        expected,
        "forecast",
        lambda config, memory: SimpleNamespace(seconds=60.0 * len(asked)),
    )
    flags = ("--attention", "softmax", "--seeds", "0", "3", "--dry_run", "true", "--heads")
    printed = fakes(*flags, "2", "8")
    assert [list(row.values()) for row in markdown_tables(printed)[0]] == [
        ["softmax_h2_32px_seed0", "1 min", ""],
        ["softmax_h8_32px_seed0", "-", "too little memory"],
        ["softmax_h2_32px_seed3", "1 min", ""],
        ["softmax_h8_32px_seed3", "-", "too little memory"],
    ]
    assert printed.splitlines()[-1].startswith("4 trainings of together 2 min, besides")
    assert asked == [(2, 0, 32), (8, 0, 32)]
    assert fakes.calls() == [] and not fakes.output.exists()
    fakes("--attention", "softmax", "--heads", "2")
    left = markdown_tables(fakes(*flags, "2"))[0]
    assert [row["cell"] for row in left] == ["softmax_h2_32px_seed3"]


def test_each_form_is_trained_unless_one_stands_for_all(tmp_path):
    fakes = Fakes(tmp_path)
    printed = fakes("--heads", "2")
    assert {name for [name] in fakes.calls()} == {
        f"taylorshift_h2_{form}_32px_seed0" for form in ("direct", "efficient")
    }
    assert list(markdown_tables(printed)[0][0])[2:4] == ["direct accuracy", "efficient accuracy"]


def test_a_killed_cell_is_kept_as_failed_and_resumed_by_the_next_call(tmp_path):
    name = "softmax_h2_32px_seed0"
    fakes = Fakes(tmp_path, **{name: ["kill", "finish"]})
    flags = ("--attention", "softmax", "--heads", "2", "4")
    with pytest.raises(Failed, match=f"{name} ended with failed: killed by signal 9; --retry"):
        fakes(*flags)
    assert fakes.endings()[name] == ("failed", "killed by signal 9")
    table = markdown_tables((fakes.output / "table.md").read_text())[0]
    assert [row["accuracy"] for row in table] == ["failed", "54.0"]
    assert fakes.calls() == [[name], ["softmax_h4_32px_seed0"]]
    fakes(*flags)
    assert fakes.calls() == [[name, "--resume"]]
    assert fakes.endings()[name] == ("finished", None)


def test_failed_cells_are_kept_with_their_status_until_they_are_retried(tmp_path):
    cells = {
        act: f"softmax_h{h}_32px_seed0"
        for act, h in {"nan": 1, "oom": 2, "bad": 4, "crash": 8}.items()
    }
    fakes = Fakes(tmp_path, **{name: [act, "finish"] for act, name in cells.items()})
    flags = ("--attention", "softmax", "--heads", "1", "2", "4", "8", "16")
    with pytest.raises(Failed, match=r"h1_32px_seed0 ended with nan: nan at step 7 \(and 3 more\)"):
        fakes(*flags)
    wanted = {cells["nan"]: ("nan", "nan at step 7"), cells["oom"]: ("oom", "oom at step 7")}
    wanted |= {
        cells["bad"]: ("failed", "bad at step 7"),
        cells["crash"]: ("failed", "RuntimeError: the trainer has a fault"),
    }
    assert fakes.endings() == wanted | {"softmax_h16_32px_seed0": ("finished", None)}
    rows = {
        row["run"]: (row["status"], row["reason"]) for row in read_csv(fakes.output / "cells.csv")
    }
    assert rows == wanted | {"softmax_h16_32px_seed0": ("finished", "")}
    fakes.calls()
    with pytest.raises(Failed):
        fakes(*flags)
    assert fakes.calls() == []
    fakes(*flags, "--retry")
    afresh = {cells["nan"]: "--overwrite"}
    assert sorted(fakes.calls()) == sorted(
        [name, afresh.get(name, "--resume")] for name in cells.values()
    )
    assert {status for status, _ in fakes.endings().values()} == {"finished"}


def test_a_sweep_whose_every_cell_fails_says_the_first_reason_in_one_line(tmp_path, capsys):
    names = [f"softmax_h{h}_32px_seed0" for h in (2, 4)]
    fakes = Fakes(tmp_path, **dict.fromkeys(names, ["bad"]))
    assert (
        run_tool(lambda: fakes("--attention", "softmax", "--heads", "2", "4", measure="true")) == 2
    )
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(
        "error: every one of the 2 trainings failed, the first with failed: bad at step 7;"
    )
    assert len(fakes.endings()) == 2 and not list((fakes.output / "measurements").iterdir())
    rows = read_csv(fakes.output / "cells.csv")
    assert [(row["status"], row["reason"]) for row in rows] == [("failed", "bad at step 7")] * 2


def test_a_narrower_call_does_not_replace_the_tables_of_a_wider_one(tmp_path):
    fakes = Fakes(tmp_path)
    fakes("--heads", "2", "4", "--train_form", "efficient")
    before = {path: path.read_bytes() for path in fakes.output.rglob("*") if path.is_file()}
    for fewer in (("--heads", "2"), ("--heads", "2", "4", "--form", "efficient")):
        with pytest.raises(
            ValueError,
            match=r"has rows that this call does not name, e.g. taylorshift_h\d_\w+_32px_seed0;",
        ):
            fakes(*fewer, "--train_form", "efficient")
    assert {path: path.read_bytes() for path in fakes.output.rglob("*") if path.is_file()} == before


def test_ctrl_c_stops_the_cells_gently_and_the_next_call_goes_on(tmp_path):
    names = [f"softmax_h{h}_32px_seed0" for h in (2, 4, 8)]
    fakes = Fakes(tmp_path, **{name: ["wait", "finish"] for name in names})
    flags = ["--attention", "softmax", "--heads", "2", "4", "8"]
    code = (
        "import sys\n"
        "from visionattn.cli.ends import run_tool\n"
        "from visionattn.lab.sweep.run import sweep\n"
        f"sys.exit(run_tool(lambda: sweep(sys.argv[1:], print, train=(sys.executable, "
        f"{str(tmp_path / 'fake.py')!r}))))"
    )
    argv = [
        *words(
            "--base {} --output {} --measure false --jobs 2", tmp_path / "base.yaml", fakes.output
        ),
        *flags,
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 600
    while len(list(tmp_path.glob("waits_*"))) < 2 and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    with pytest.raises(ValueError, match="another sweep, or a training of it, is at work"):
        fakes(*flags)
    os.killpg(process.pid, signal.SIGINT)
    assert (
        process.communicate(timeout=600)[1]
        == "stopped; the same command goes on with the trainings that are left\n"
    )
    assert process.returncode == 130
    assert fakes.endings() == dict.fromkeys(names[:2], ("stopped", "stopped after step 3"))
    fakes.calls()
    (tmp_path / "acts").write_text("{}")
    fakes(*flags)
    assert sorted(fakes.calls()) == [[names[0], "--resume"], [names[1], "--resume"], [names[2]]]


def test_a_folder_of_another_training_or_with_other_things_is_refused_and_kept(tmp_path):
    fakes = Fakes(tmp_path)
    flags = ("--attention", "softmax", "--heads", "2")
    fakes(*flags)
    before = {path: path.read_bytes() for path in fakes.output.rglob("*") if path.is_file()}
    with pytest.raises(
        ValueError,
        match=r"holds a sweep of another training: epochs is 2, there it is 1; choose another",
    ):
        fakes(*flags, "--epochs", "2")
    assert {path: path.read_bytes() for path in fakes.output.rglob("*") if path.is_file()} == before
    fakes.calls()
    fakes(*flags, "--epochs", "2", "--overwrite")
    assert fakes.calls() == [["softmax_h2_32px_seed0"]]
    fakes.output = tmp_path / "other"
    fakes.output.mkdir()
    (fakes.output / "thesis.txt").write_text("all of it")
    with pytest.raises(ValueError, match="is not empty and holds no sweep"):
        fakes(*flags, "--overwrite")
    fakes.output = tmp_path / "other" / "thesis.txt"
    with pytest.raises(ValueError, match="is a file"):
        fakes(*flags)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.txt"]


BAD = {
    "--heads 2": "--base is missing",
    "--base {base}": "--heads is missing",
    "--base {base} --heads 2 3 12": "heads: 3, 12 do not divide the width 16 of "
    "taylorshift_vit_t; these do: 1, 2, 4, 8, 16",
    "--base {base} --heads 0": "heads must be above 0, got 0",
    "--base {base} --heads 2 --seeds 0 -1": "seeds must be at least 0, got -1",
    "--base {base} --heads 2 2": "heads names a value twice: 2 2",
    "--base {base} --heads 2 --attention linear": "attention must be a list of values or null",
    "--base {base} --heads 2 --attention softmax --form "
    "direct": "--form and --train_form do nothing here: softmax attention",
    "--base {base} --heads 2 --form direct --train_form "
    "efficient": "train_form efficient is not among form direct",
    "--base {base} --heads 2 --train false --retry": "train false and retry contradict each other",
    "--base {base} --heads 2 --measure false --measure_batch "
    "3": "measure false and measure_batch contradict",
    "--base {base} --heads 2 --train false --measure false": "train false and measure false "
    "contradict",
    "--base {base} --heads 2 --set optim.lr": "set: wanted KEY=VALUE",
    "--base {base} --heads 2 --data.root a": "--data.root is an option of the training in --base; "
    "--set data.root=VALUE changes it",
    "--base {base} --heads 2 --model.args.depth 3": "--set model.args.depth=VALUE changes it",
    "--base {base} --heads 2 --seed 3": "of the training in --base; use --seeds",
    "--base {base} --heads 2 --resume": "each training of the sweep has its own",
    "--base {base} --heads 2 --set seed=3": "set: seed cannot be set here; use --seeds",
    "--base {base} --heads 2 --set optim.learning=3": "unknown option --optim.learning",
    "--base {base} --heads 2 --epochs 1 --set "
    "optim.warmup_epochs=1": "optim.warmup_epochs 1.0 leaves nothing",
    "--base {base} --heads 2 --img_size 32 36": "image of 36 x 36 pixels is not a whole number of "
    "8-pixel patches",
    "--base {base} --heads 2 --set data.img_size_choices=[32] --img_size "
    "32": "would change the evaluation alone",
    "--base {base} --heads 2 --set model.name=resnet18 "
    "model.args={{}}": "resnet18 does not take these args",
    "--base {base} --heads 2 --set model.name=vit_tiny_patch16_224 model.args={{}} --form "
    "direct": "are for visionattn's models",
    "--base {base} --heads 2 --set data.name=canvas "
    "data.task=segmentation": "has data.task segmentation, and a sweep compares accuracies",
    "--base missing.yaml --heads 2": "no configuration file at missing.yaml",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_line_before_anything_starts(flags, tmp_path, capsys):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    argv = [*flags.format(base=tmp_path / "base.yaml").split(), "--output", str(tmp_path / "sweep")]
    assert run_tool(lambda: sweep(argv, print, train=("false",))) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and BAD[flags] in error and error.count("\n") == 1
    assert not (tmp_path / "sweep").exists()


def test_the_example_of_the_help_is_a_sweep_that_can_be_parsed():
    assert parse_sweep(EXAMPLE.split()).heads == [2, 4]


def test_a_killed_training_is_out_of_memory_only_where_the_system_says_so(tmp_path, monkeypatch):
    counts = iter([5, 6])
    for module in ("lab.sweep.cells", "cli.fresh_process"):
        monkeypatch.setattr(f"visionattn.{module}.memory_kills", lambda: next(counts))
    name = "softmax_h2_32px_seed0"
    fakes = Fakes(tmp_path, **{name: ["kill"]})
    with pytest.raises(
        ValueError, match="the first with oom: the system ended the process for want of memory"
    ):
        fakes("--attention", "softmax", "--heads", "2")
    assert SweepFolder(fakes.output).path.joinpath(LOCK).exists()
    fakes.calls()
    with pytest.raises(ValueError, match="oom"):
        fakes("--attention", "softmax", "--heads", "2")
    assert fakes.calls() == []


@pytest.fixture(scope="module")
def small_sweep(tmp_path_factory, quick_python):
    """A sweep of two head counts and two attentions, trained by the real trainer: its folder, what
    it printed, its flags.
    """
    folder, lines = tmp_path_factory.mktemp("real"), []
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    argv = ["--base", str(folder / "base.yaml"), "--output", str(folder / "sweep")]
    argv += ["--heads", "2", "8", "--jobs", "2"]
    argv += ["--attention", "taylorshift", "softmax", "--train_form", "efficient"]
    argv += ["--measure_batch", "3", "--measure_rounds", "2"]
    draw, report = sweep_run.png, sweep_run.report
    with pytest.MonkeyPatch.context() as patch:

        def at_the_end(*given):
            patch.setattr(sweep_run, "png", draw)
            report(*given)

        warm_python.use(quick_python, patch)
        patch.setattr(sweep_run, "png", sketch)
        patch.setattr(sweep_run, "report", at_the_end)
        sweep(argv, lines.append, train=started("train"))
    return folder / "sweep", "\n".join(lines), argv


def test_a_sweep_runs_from_end_to_end_and_its_tables_have_the_published_shape(small_sweep):
    _, printed, _ = small_sweep
    inference, training, size, softmax, *_ = markdown_tables(printed)
    assert list(size[0]) == ["h", "d", "parameters", "direct GFLOP", "efficient GFLOP"]
    for table in (inference, training):
        assert list(table[0]) == [
            *(
                "h",
                "d",
                "accuracy",
                "direct img/s",
                "direct MiB",
                "efficient img/s",
                "efficient MiB",
            ),
            *("efficient / direct img/s", "efficient / direct MiB"),
        ]
        assert [(row["h"], row["d"]) for row in table] == [("2", "8"), ("8", "2")]
        # So small a model may fit into pages that the process has anyway: 0 MiB, and no ratio.
        assert all(float(value or 0) >= 0 for row in table for value in row.values())
    assert list(softmax[0]) == ["h", "d", "accuracy", "img/s", "MiB"]
    cells = {(row["heads"], row["form"]): row for row in read_csv(small_sweep[0] / "cells.csv")}
    for name, table in (("inference", inference), ("training", training)):
        for row in table:
            direct, efficient = (cells[row["h"], form] for form in ("direct", "efficient"))
            mib = [int(cell[f"{name}_peak_bytes"]) / 1024**2 for cell in (direct, efficient)]
            assert [float(row["direct MiB"]), float(row["efficient MiB"])] == pytest.approx(
                mib, rel=1e-3
            )
            ratio = pytest.approx(mib[1] / mib[0], rel=1e-2) if all(mib) else ""
            assert (
                float(row["efficient / direct MiB"]) if all(mib) else row["efficient / direct MiB"]
            ) == ratio
            speed = [float(cell[f"{name}_images_per_second"]) for cell in (direct, efficient)]
            assert [float(row["direct img/s"]), float(row["efficient img/s"])] == pytest.approx(
                speed, rel=1e-3
            )
    for line in (
        "- taylorshift direct, inference: taylorshift direct ran",
        "- taylorshift efficient, training: taylorshift efficient ran",
        "- softmax, inference: sdpa ",
    ):
        assert line in printed


def test_the_list_of_cells_holds_every_figure_with_its_provenance(small_sweep):
    rows = read_csv(small_sweep[0] / "cells.csv")
    assert [(row["attention"], row["heads"], row["form"], row["trained_form"]) for row in rows] == [
        *(("taylorshift", h, form, "efficient") for h in "28" for form in ("direct", "efficient")),
        *(("softmax", h, "", "") for h in "28"),
    ]
    for row in rows:
        assert row["status"] == "finished" and row["test_images"] == "359" and row["tokens"] == "16"
        assert int(row["head_dim"]) * int(row["heads"]) == 16
        for key in words(
            "test_accuracy validation_accuracy parameters flops train_seconds cell_seconds"
        ):
            assert float(row[key]) > 0, key
        for name in ("inference", "training"):
            assert float(row[f"{name}_images_per_second"]) > 0
            assert int(row[f"{name}_peak_bytes"]) >= 0
            assert row[f"{name}_status"] == "ok"
            assert (
                row["attention"] == "softmax"
                or row[f"{name}_backend"] == f"taylorshift {row['form']}"
            )
        assert (row["device"], row["threads"], row["measure_threads"]) == (
            "cpu, 1 threads",
            "1",
            "1",
        )
        assert row["measure_batch"] == "3" and row["command"].startswith("visionattn sweep --base")
        assert row["torch"]
    assert (
        len({row["test_accuracy"] for row in rows if row["trained_form"] and row["heads"] == "2"})
        == 1
    )


def test_hyperparameters_have_equal_keys_in_each_run(small_sweep):
    folders = sorted((small_sweep[0] / "hparams").iterdir())
    assert len(folders) == 6
    seen = []
    for folder in folders:
        events = EventAccumulator(str(folder)).Reload()
        data = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        parameters = HParamsPluginData.FromString(data).session_start_info.hparams
        assert folder.name.startswith(
            f"{parameters['attention'].string_value}_h{parameters['heads'].number_value:.0f}"
        )
        seen.append((set(parameters), set(events.Tags()["scalars"])))
    assert seen.count(seen[0]) == 6
    assert {"heads", "form", "seed"} <= seen[0][0] and {
        "sweep/test_accuracy",
        "sweep/inference_peak_bytes",
    } <= seen[0][1]


def test_a_repeated_sweep_trains_and_measures_nothing_and_prints_the_same_tables(small_sweep):
    folder, printed, argv = small_sweep
    files = {path: path.read_bytes() for path in folder.glob("measurements/*.json")}
    assert len(files) == 6 and len((folder / "sweep.png").read_bytes()) > 10_000
    lines = []
    sweep(argv, lines.append, train=("false",))
    assert markdown_tables("\n".join(lines)) == markdown_tables(printed)
    assert {path: path.read_bytes() for path in folder.glob("measurements/*.json")} == files
