"""Sweeps of head counts: the grid, the pool of trainings with trainers that only pretend, and one
small sweep from end to end.
"""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import product, takewhile

import pytest
import timm
import torch
import yaml

from tests.helpers import warm_python
from tests.helpers.tools import read_csv, words, written
from visionattn.cli.commands import started
from visionattn.cli.exit_codes import DoesNotFit, Failed, run_tool
from visionattn.cli.memory import resident_bytes
from visionattn.data.data_config import DataConfig
from visionattn.lab.measure import count_flops
from visionattn.lab.sweep import cell_trainings, head_sweep, network_costs
from visionattn.lab.sweep.head_grid import (
    Network,
    SweepCell,
    SweepPlan,
    attention_of,
    make_networks,
    make_plan,
    model_of,
    on_meta,
)
from visionattn.lab.sweep.head_sweep import sweep
from visionattn.lab.sweep.sweep_flags import EXAMPLE, SweepConfig
from visionattn.model_config import ModelConfig
from visionattn.models.cost import Passes
from visionattn.models.weights import DataSpec
from visionattn.training.config import TrainConfig

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
result |= {"test_loss": 1.5, "train_seconds": 2.0}
status = {"status": "finished", "result": result, "provenance": {"commit": "c0ffee"}}
(run / "status.json").write_text(json.dumps(status))
"""


class Fakes:
    """A folder with a base configuration and a trainer that does as it is told, cell by cell and
    attempt by attempt.
    """

    def __init__(self, folder, **acts):
        self.folder, self.output, self.seen = folder, folder / "sweep", 0
        (folder / "fake.py").write_text(FAKE)
        (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
        (folder / "acts").write_text(json.dumps(acts))

    def __call__(self, flags, measure="false"):
        """Run the sweep of softmax without measuring; returns what it printed."""
        lines = []
        argv = words("--base {} --output {}", self.folder / "base.yaml", self.output)
        argv += words(f"--attention softmax --measure {measure} --heads {flags}")
        sweep(argv, lines.append, train=(sys.executable, str(self.folder / "fake.py")))
        return "\n".join(lines)

    def calls(self):
        """What was started since the last look: run and flags."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        seen, self.seen = self.seen, len(lines)
        return sorted(json.loads(line) for line in lines[seen:])

    def column(self, *names):
        """Columns of the table of all cells, by the name of the run."""
        rows = read_csv(self.output / "cells.csv")
        return {row["run"]: tuple(row[name] for name in names) for row in rows}


def cell(heads, seed=0):
    return f"softmax_h{heads}_32px_seed{seed}"


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """Draw no pictures and estimate nothing, but in the sweep from end to end."""
    if "end_to_end" not in request.node.name:
        monkeypatch.setattr(head_sweep, "png", lambda path, charts, **options: path.touch())
        monkeypatch.setattr(network_costs, "expect", lambda plan, network: (2**30, 6.0))


def markdown_tables(text):
    """Every Markdown table of a text as a list of dicts."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    heads = [number for number, cells in enumerate(lines) if cells and set("".join(cells)) == {"-"}]
    return [
        [dict(zip(lines[n - 1], row, strict=True)) for row in takewhile(bool, lines[n + 1 :])]
        for n in heads
    ]


def test_finished_cells_are_skipped_and_accuracies_are_means_over_seeds(tmp_path):
    fakes = Fakes(tmp_path)
    printed = fakes("2 8 --seeds 0 3 --jobs 3")
    assert "4 trainings: peak memory: up to 1.0 GiB for each of 3 parallel trainings" in printed
    assert fakes.calls() == sorted([cell(h, s)] for h in (2, 8) for s in (0, 3))
    (table,) = markdown_tables(printed)
    found = [(row["heads"], row["head width"], row["test accuracy in %"]) for row in table]
    assert found == [("2", "8", "67 ± 21"), ("8", "2", "73 ± 21")]
    again = fakes("2 8 2 --seeds 0 3 3")  # repeated values count once
    assert markdown_tables(again) == [table] and "0 to train" in again and fakes.calls() == []
    fakes("2 16 --seeds 0 3")
    assert fakes.calls() == [[cell(16, 0)], [cell(16, 3)]]
    assert fakes.column("test_loss", "train_commit")[cell(2, 3)] == ("1.5", "c0ffee")


def test_table_and_picture_are_written_after_each_cell(tmp_path, monkeypatch):
    fakes, seen, real = Fakes(tmp_path), [], cell_trainings.start

    def start(*given, **options):
        table, picture = (fakes.output / name for name in ("table.md", "sweep.png"))
        seen.append((table.read_text().count("| 52 |") if table.exists() else 0, picture.exists()))
        return real(*given, **options)

    monkeypatch.setattr(cell_trainings, "start", start)
    fakes("2 4")
    assert seen == [(0, False), (1, True)]


def test_killed_cells_are_resumed_and_failed_ones_kept_until_they_are_retried(tmp_path):
    ends = {
        "nan": ("nan", "nan at step 7"),
        "oom": ("oom", "oom at step 7"),
        "bad": ("failed", "bad at step 7"),
        "crash": ("failed", "RuntimeError: the trainer has a fault"),
        "kill": ("failed", "killed by signal 9"),
    }
    names = {act: cell(h) for act, h in zip(ends, (1, 2, 4, 8, 16), strict=True)}
    fakes = Fakes(tmp_path, **{name: [act, "finish"] for act, name in names.items()})
    with pytest.raises(ValueError, match="every training failed: .*h1_32px_seed0 ended with nan"):
        fakes("1 2 4 8 16", measure="true")
    assert not (fakes.output / "measurements.jsonl").exists()
    wanted = {names[act]: said for act, said in ends.items()}
    assert fakes.column("status", "reason") == wanted
    fakes.calls()
    with pytest.raises(Failed, match=r"h1_32px_seed0 ended with nan: nan at step 7 \(and 3 more\)"):
        fakes("1 2 4 8 16")
    assert fakes.calls() == [[names["kill"], "--resume"]]
    assert fakes.column("status", "attempts")[names["kill"]] == ("finished", "2")
    fakes("1 2 4 8 16 --retry")
    wanted = [[name, "--resume"] for act, name in names.items() if act != "kill"]
    wanted[0][1] = "--overwrite"  # with its state it would come to the same end
    assert fakes.calls() == sorted(wanted)
    assert {status for (status,) in fakes.column("status").values()} == {"finished"}


def test_a_training_that_the_system_ends_for_want_of_memory_is_out_of_memory(tmp_path, monkeypatch):
    kills = iter([5, 6])
    for module in ("lab.sweep.cell_trainings", "cli.fresh_process"):
        monkeypatch.setattr(f"visionattn.{module}.memory_kills", lambda: next(kills))
    with pytest.raises(ValueError, match="oom: the system killed the process"):
        Fakes(tmp_path, **{cell(2): ["kill"]})("2")


def test_ctrl_c_stops_the_cells_gently_and_the_next_call_goes_on(tmp_path, started_quickly):
    names = [cell(h) for h in (2, 4, 8)]
    fakes = Fakes(tmp_path, **{name: ["wait", "finish"] for name in names})
    code = (
        "import sys\n"
        "from visionattn.cli.exit_codes import run_tool\n"
        "from visionattn.lab.sweep.head_sweep import sweep\n"
        f"sys.exit(run_tool(lambda: sweep(sys.argv[1:], print, train=(sys.executable, "
        f"{str(tmp_path / 'fake.py')!r}))))"
    )
    argv = words("--base {} --output {}", tmp_path / "base.yaml", fakes.output)
    argv += words("--measure false --jobs 2 --attention softmax --heads 2 4 8")
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
    with pytest.raises(ValueError, match="another sweep, or a training of it, is running"):
        fakes("2 4 8")
    os.killpg(process.pid, signal.SIGINT)
    said = "stopped; the same command resumes with the remaining trainings\n"
    assert process.communicate(timeout=600)[1] == said and process.returncode == 130
    assert (fakes.output / "endings.jsonl").read_text().count('"stopped after step 3"') == 2
    fakes.calls()
    (tmp_path / "acts").write_text("{}")
    fakes("2 4 8")
    assert fakes.calls() == [[names[0], "--resume"], [names[1], "--resume"], [names[2]]]


def test_a_folder_of_another_training_or_with_other_things_is_refused_and_kept(tmp_path):
    fakes = Fakes(tmp_path)
    fakes("2")
    before = written(fakes.output)
    with pytest.raises(ValueError, match=r"holds a sweep of another training \(epochs: 2\);"):
        fakes("2 --set epochs=2")
    assert written(fakes.output) == before
    fakes.calls()
    fakes("2 --set epochs=2 --overwrite")
    assert fakes.calls() == [[cell(2)]]
    fakes.output = tmp_path / "other"
    fakes.output.mkdir()
    (fakes.output / "base.yaml").write_text("all of it")
    with pytest.raises(ValueError, match="expected an empty folder or a sweep"):
        fakes("2 --overwrite")
    assert written(fakes.output) == {"base.yaml": b"all of it"}


def test_a_damaged_status_is_none(tmp_path):
    for text in ("5", '{"result": [1]}', '{"provenance": 3}', '{"resu'):
        (tmp_path / "status.json").write_text(text)
        assert cell_trainings.read_status(tmp_path) == {}


def test_a_dry_run_says_what_is_left_with_memory_and_time_and_writes_nothing(tmp_path):
    fakes = Fakes(tmp_path)
    printed = fakes("2 8 --seeds 0 3 --dry_run true").splitlines()
    assert printed[1].endswith("estimated time: 24 s in total")
    assert printed[2:] == [cell(2), cell(8), cell(2, 3), cell(8, 3)]
    assert fakes.calls() == [] and not fakes.output.exists()


def test_more_trainings_at_a_time_than_fit_are_refused_and_one_that_does_not_fit_is_a_row(
    monkeypatch,
):
    """Of 10 GiB one network takes 4, and another one 13, which its own training refuses."""
    needed = {2: 4 * 2**30, 8: 13 * 2**30}
    monkeypatch.setattr(network_costs, "expect", lambda plan, each: (needed[each.heads], 1.0))
    monkeypatch.setattr(network_costs, "memory_there_is", lambda device: 10 * 2**30)
    cells = [SweepCell(Network("softmax", h, None, 32), seed) for h in needed for seed in range(3)]
    plan, lines = SweepPlan(TrainConfig(device="cpu"), None, None, (), (), None), []
    network_costs.tell_expected(plan, cells, 3, lines.append)
    memory = "peak memory: up to 4.0 GiB for each of 3 parallel trainings, 10.0 GiB available"
    assert lines == [f"6 trainings: {memory}; estimated time: 6.0 s in total"]
    with pytest.raises(DoesNotFit, match="4 parallel trainings would need .*; --jobs 2 would fit"):
        network_costs.tell_expected(plan, cells, 4, lines.append)


BAD = {
    EXAMPLE.replace("--heads 2 4", "--heads 5"): "expected num_heads that divides the width 16",
    "--heads 2": "expected --base: the YAML",
    "--base {base}": "expected --heads: head",
    "--base {base} --heads 2 3": "expected num_heads that divides the width 16 (1, 2",
    "--base {base} --heads 2 --set model.name=resnet18 model.args={{}}": "unexpected keyword "
    "argument 'num_heads'",
    "--base {base} --heads 0": "heads must be at least 1, got 0",
    "--base {base} --heads 2 --seeds 0 -1": "seeds must be at least 0, got -1",
    "--base {base} --heads 2 --attention linear": "attention[0] must be one of taylorshift, kern",
    "--base {base} --heads 2 --attention softmax --form "
    "direct": "--form and --train_form have no effect, because softmax attention",
    "--base {base} --heads 2 --form direct --train_form "
    "efficient": "expected train_form among form direct, got efficient",
    "--base {base} --heads 2 --measure false --measure_batch 3": "need measure true",
    "--base {base} --heads 2 --set optim.lr": "set: expected KEY=VALUE",
    "--base {base} --heads 2 --epochs 1": "unknown option --epochs",
    "--base {base} --heads 2 --set run=a": "each training of the sweep has its own",
    "--base {base} --heads 2 --set optim.learning=3": "unknown option --optim.learning",
    "--base {base} --heads 2 --set model.args.depth=0": "depth must be from 1 to",
    "--base {base} --heads 2 --img_size 32 36": "36 x 36 pixels is not a whole number of 8-pixel",
    "--base {base} --heads 2 --set data.img_size_choices=[32] --img_size "
    "32": "would change only the evaluation",
    "--base {base} --heads 2 --set data.fit=native": "a sweep needs images of one size",
    "--base {base} --heads 2 --set model.name=vit_tiny_patch16_224 model.args={{}} --form "
    "direct": "need a model of visionattn",
    "--base {base} --heads 2 --set data.name=canvas "
    "data.task=segmentation": "a sweep needs data.task classification, got segmentation",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_line_before_anything_starts(flags, tmp_path, capsys):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    argv = [*flags.format(base=tmp_path / "base.yaml").split(), "--output", str(tmp_path / "sweep")]
    assert run_tool(lambda: sweep(argv, print, train=("false",))) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and BAD[flags] in error and error.count("\n") == 1
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_a_sweep_runs_from_end_to_end_and_a_repeated_one_does_nothing(tmp_path, quick_python):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    argv = words("--base {} --output {}", tmp_path / "base.yaml", tmp_path / "sweep")
    argv += words("--heads 2 --train_form efficient")
    argv += words("--measure_batch 3 --measure_rounds 2")
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        warm_python.use(quick_python, patch)
        sweep(argv, lines.append, train=started("train"))
    (table,) = markdown_tables("\n".join(lines))
    assert [row["form"] for row in table] == ["direct", "efficient"]
    assert float(table[1]["training step, img/s over direct"]) > 0
    for row in read_csv(tmp_path / "sweep" / "cells.csv"):
        assert row["trained_form"] == "efficient" and row["status"] == "finished"
        assert row["test_images"] == "359" and row["command"].startswith("visionattn sweep --base")
        for key in words("test_accuracy parameters flops train_seconds cell_seconds attempts"):
            assert float(row[key]) > 0, key
        for name in ("inference", "training"):
            assert row[f"{name}_status"] == "ok" and int(row[f"{name}_peak_bytes"]) >= 0
            assert float(row[f"{name}_images_per_second"]) > 0
            assert row[f"{name}_backend"] == f"taylorshift {row['form']}"
    assert len((tmp_path / "sweep" / "sweep.png").read_bytes()) > 10_000
    kept = written(tmp_path / "sweep")
    sweep(argv, lines.append, train=("false",))
    assert markdown_tables("\n".join(lines)) == [table] * 2
    after = written(tmp_path / "sweep")
    assert all(kept[name] == after[name] for name in cell_trainings.KEPT)


def small_plan(**args):
    model = ModelConfig("scaleformer_vit_t", {"patch_size": 8, "embed_dim": 24, "depth": 2} | args)
    base = TrainConfig(model=model, data=DataConfig(img_size=40), threads=1, device="cpu")
    return make_plan(SweepConfig(base="", heads=[3, 6], form=["efficient"]), base)


class Here:
    """Stands in for fresh processes: memory is 7 bytes or an error for a head count, and passes are
    timed in this process.
    """

    def __init__(self, **errors):
        self.errors, self.asked = errors, []

    def __call__(self, function, given, what, returning=True):
        self.asked.append(function.__name__)
        assert returning == (function is network_costs.measure_memory)
        if not returning:
            return function(**json.loads(json.dumps(given)))
        if error := self.errors.get(f"h{given['model']['args']['num_heads']}"):
            raise error
        return {"peak_bytes": 7, "backend": "a"}


def measured(plan, folder, **options):
    """Measure the networks of a plan; returns the columns that are kept, by network."""
    config = SweepConfig(measure_batch=2, measure_rounds=3, **options)
    kept = cell_trainings.SweepFolder(folder)
    folder.mkdir(exist_ok=True)
    provenance = {"commit": None, "load": 0.0}
    network_costs.measure_networks(config, plan, kept, provenance, str, after=list)
    return list(kept.known(cell_trainings.MEASUREMENTS).values())


def test_ratios_of_speed_are_taken_round_by_round(monkeypatch):
    rounds = {"direct": [4.0, 9.0, 6.0], "efficient": [1.0, 3.0, 3.0]}
    found = {Network("kernelized", 3, form, 40): {"training_status": "ok"} for form in rounds}
    seconds = {"seconds": list(rounds.values())}
    monkeypatch.setattr(network_costs, "ask", lambda function, given, what, returning: seconds)
    conditions = network_costs.conditions_of(SweepConfig(), plan := small_plan())
    network_costs.time_networks(plan, found, "training", conditions)
    assert [columns["training_times_direct"] for columns in found.values()] == [1, 3]
    assert [columns["training_images_per_second"] for columns in found.values()] == [16 / 6, 16 / 3]


def test_what_does_not_fit_or_fails_is_a_status_and_the_others_are_timed(monkeypatch, tmp_path):
    for error, status in ((torch.OutOfMemoryError("x"), "oom"), (Failed("x: no"), "failed")):
        monkeypatch.setattr(network_costs, "ask", Here(h3=error))
        broken, whole = measured(small_plan(), tmp_path / status)
        assert broken["training_status"] == status
        assert "training_images_per_second" not in broken
        assert whole["training_peak_bytes"] == 7 and whole["training_images_per_second"] > 0


def test_networks_that_do_not_fit_together_are_out_of_memory(monkeypatch, tmp_path):
    make_step = network_costs.make_step

    def full(**given):
        if given["model"]["args"]["num_heads"] == 6:
            raise torch.OutOfMemoryError("full")
        return make_step(**given)

    monkeypatch.setattr(network_costs, "ask", Here())
    monkeypatch.setattr(network_costs, "make_step", full)
    fits, other = measured(small_plan(), tmp_path)
    assert fits["training_status"] == "ok" and fits["training_images_per_second"] > 0
    assert other["training_status"] == "oom" and "together" in other["training_reason"]


def test_memory_is_kept_at_once_before_any_network_is_timed(monkeypatch, tmp_path):
    ask = Here(h6=KeyboardInterrupt())
    monkeypatch.setattr(network_costs, "ask", ask)
    with pytest.raises(KeyboardInterrupt):
        measured(small_plan(), tmp_path)
    ask.errors.clear()
    rows = measured(small_plan(), tmp_path)
    assert ask.asked == ["measure_memory"] * 5 + ["measure_seconds"] * 2
    assert len(rows) == 2 and all("measured" in row for row in rows)
    measured(small_plan(), tmp_path)
    assert len(ask.asked) == 7


def test_a_training_is_expected_to_take_its_steps_and_evaluations(monkeypatch):
    plan = small_plan()
    monkeypatch.setattr(Passes, "forward_seconds", lambda self, shape, patch: 0.5)
    needed, seconds = expect(plan, plan.networks[0])
    assert seconds == 10 * 0.5 * (3 * len(plan.splits.train) + len(plan.splits.validation))
    assert needed > resident_bytes("VmRSS") / 2


expect = network_costs.expect


def test_the_facts_of_a_network_are_those_of_its_model():
    plan = small_plan()
    assert plan.splits.test is not None and plan.own_attention == "kernelized"
    for network, head_dim in zip(plan.networks, (8, 4), strict=True):
        facts, model = plan.facts[network], plan.model(network)
        built = timm.create_model(model.name, num_classes=10, in_chans=1, img_size=40, **model.args)
        count = sum(parameter.numel() for parameter in built.parameters())
        wanted = {"head_dim": head_dim, "tokens": 25, "parameters": count}
        assert facts == wanted | {"flops": count_flops(built, 40, 40)}


def test_the_grid_is_every_combination_and_one_training_can_stand_for_all_forms():
    attentions = ["taylorshift", "kernelized", "softmax"]
    config = SweepConfig(heads=[4, 8, 16], attention=attentions, form=["direct", "efficient"])
    networks = make_networks(config, "kernelized", "scaleformer_vit_t", [32, 48])
    expected = set(product(attentions[:2], config.heads, config.form, (32, 48)))
    expected |= set(product(["softmax"], config.heads, [None], (32, 48)))
    assert {(n.attention, n.heads, n.form, n.img_size) for n in networks} == expected
    for train_form, count in ((None, 60), ("efficient", 36)):
        plan = SweepPlan(TrainConfig(), None, None, networks, (0, 1), train_form)
        cells = plan.cells()
        assert len(cells) == len(set(cells)) == count
        assert [cell.seed for cell in cells] == [0] * (count // 2) + [1] * (count // 2)


@pytest.mark.parametrize(
    "name", words("taylorshift_vit_pixel scaleformer_vit_t taylorshift_abs_vit_t")
)
def test_networks_of_a_sweep_differ_in_the_attention_alone(name):
    args = {"depth": 1, "embed_dim": 24, "img_size": 32}
    args |= {} if "pixel" in name else {"patch_size": 8}
    args |= {"temperature_init": 2.0} if name.startswith("taylorshift") else {"horizon": 2}
    own = "kernelized" if name.startswith("scaleformer") else "taylorshift"
    base = timm.create_model(name, num_heads=3, **args)
    spec = DataSpec(base.patch_embed.proj.in_channels, base.num_classes, (), (), (), None, 32)

    def shapes_of(model):
        parts = ((key, value) for key, value in model.state_dict().items() if "relative" not in key)
        return {key: value.shape for key, value in parts if "temperature" not in key}

    for attention in ("taylorshift", "kernelized", "softmax"):
        form = None if attention == "softmax" else "efficient"
        config = ModelConfig(name, args, grad_checkpointing=True)
        config = model_of(config, own, Network(attention, 3, form, 32))
        model = on_meta(config, spec)
        assert model.blocks[0].attn.attention == attention and config.grad_checkpointing
        assert model.blocks[0].attn.form == (form or "auto")
        assert model.global_pool == base.global_pool
        assert ("blocks.0.attn.temperature" in model.state_dict()) == (attention == "taylorshift")
        assert shapes_of(model) == shapes_of(base)


def test_options_without_effect_on_another_attention_are_left_out():
    mix = dict(attention=["window", "kernelized"], window_size=5, form="efficient", horizon=2)
    size = dict(depth=2, embed_dim=24, img_size=32, patch_size=8)
    base = ModelConfig("scaleformer_vit_t", size | mix | dict(feature_map="random"))
    own = attention_of(on_meta(base, DataSpec(3, 4, (), (0.5,) * 3, (0.5,) * 3, None, 32)))
    assert own == "window+kernelized"
    (network,) = make_networks(SweepConfig(heads=[3]), own, base.name, [32])
    assert network == Network(own, 3, None, 32)
    kept = {
        name: model_of(base, own, Network(name, 3, None, 32)).args
        for name in (own, "window", "softmax")
    }
    assert kept[own] == base.args | {"num_heads": 3}
    size |= {"num_heads": 3}
    assert kept["window"] == size | dict(attention="window", window_size=5)
    assert kept["softmax"] == size | dict(attention="softmax", horizon=2)


def test_a_model_of_timm_is_swept_over_its_heads_alone():
    args = {"depth": 1, "patch_size": 8, "img_size": 32}
    base = TrainConfig(model=ModelConfig("vit_tiny_patch16_224", args))
    plan = make_plan(SweepConfig(base="", heads=[2, 4]), base)
    names = [network.name for network in plan.networks]
    assert names == [f"vit_tiny_patch16_224_h{h}_32px" for h in (2, 4)]
    assert on_meta(plan.model(plan.networks[1]), plan.splits.spec).blocks[0].attn.num_heads == 4
