"""``visionattn benchmark``: what is checked, what is measured, what a row says when something is
wrong, figures of the papers, and what the command refuses. No test looks at a time.
"""

import sys
from dataclasses import replace

import pytest
import torch
from timm.models import create_model

import visionattn.lab.case_comparison as compare
import visionattn.lab.measure as measure
import visionattn.lab.targets as targets
import visionattn.ops as ops
from tests.helpers.tools import assert_one_error, load_tool, read_csv, words
from visionattn.cli.exit_codes import Failed
from visionattn.lab.accuracy import disagreement
from visionattn.lab.case_comparison import (
    CaseResult,
    MeasurementPlan,
    build,
    case_peak_bytes,
    check_case,
    measure_together,
    ratios_of,
    record_of,
    spread,
)
from visionattn.lab.cases import Case
from visionattn.lab.compared_models import build_model, identity_twin, set_impl, values_alone
from visionattn.lab.measure import attention_backends
from visionattn.lab.papers import FIGURES, crossing, crossings, heads_table, milliseconds_of
from visionattn.lab.targets import Target, measure_targets
from visionattn.ops.position import joint_position

PLAN = MeasurementPlan(rounds=2, max_rounds=2, seconds=0, memory=False)


def operation(name, form="auto", **more):
    return Case("operation", name, 77, 8, form=form, heads=3, **more)


OPERATIONS = """sdpa:auto sdpa+causal:auto eager+causal:auto eager-kernelized:auto
eager-kernelized+causal:auto softmax+joint:auto window:auto window+joint:auto
taylorshift+temperature:auto taylorshift+temperature+joint:efficient taylorshift+axial+sum:efficient
kernelized+softmax:efficient kernelized+favor:efficient kernelized+relu+masked:auto
kernelized+causal+flat+sum:efficient kernelized+causal+flat:direct kernelized+joint:efficient
relative:efficient relative+causal:efficient relative+causal:direct"""


@pytest.mark.parametrize("named", OPERATIONS.split())
def test_operations_agree_with_their_definition_with_their_gradients(named):
    assert check_case(operation(*named.split(":"), backward=True)) is None


def test_operations_agree_in_half_precision_whose_totals_are_beyond_it():
    assert check_case(operation("relative", "efficient", dtype="float16", backward=True)) is None


MODELS = "scaleformer_vit_t taylorshift_vit_t+heads=6 vit_tiny_patch16_224"


@pytest.mark.parametrize("name", MODELS.split())
def test_models_agree_with_their_definition(name):
    assert check_case(Case("model", name, 64, backward=name.startswith("taylor"))) is None


@pytest.fixture
def wrong_taylorshift(monkeypatch):
    """The operation attends to other queries, and softmax does too."""
    right, fused = ops.taylorshift_attention, torch.nn.functional.scaled_dot_product_attention

    def flipped(q, k, v, **options):
        return right(q.flip(2), k, v, **options)

    monkeypatch.setitem(ops.OPERATIONS, "taylorshift", flipped)
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, **options: fused(q.flip(2), k, v, **options),
    )


@pytest.mark.parametrize("name", ["taylorshift_vit_t", "vit_tiny_patch16_224"])
def test_a_wrong_model_is_found(wrong_taylorshift, name):
    assert check_case(Case("model", name, 64)).startswith("wrong: out differs")


def test_what_is_wrong_is_a_row_that_says_so_and_is_not_timed(wrong_taylorshift):
    cases = [operation("taylorshift", "efficient"), operation("eager")]
    wrong, good = measure_together(cases, PLAN, "eager")
    assert wrong.status.startswith("wrong: out differs from the reference by ")
    assert (wrong.samples, wrong.ratios) == ([], [])
    assert good.status == "ok" and len(good.samples) == 2
    figure = dict(most=1.0, measure=targets.growth_of_bytes_kept)
    ratio = Target("t", "N = 77", cases[0], 1.0, cases[1])
    found = measure_targets([ratio, Target("f", "N = 77", cases[0], **figure)], PLAN)
    assert [record["met"][:10] for record in found] == ["wrong: out"] * 2


def test_a_wrong_gradient_is_found_where_the_backward_pass_is_timed(monkeypatch):
    right = ops.taylorshift_attention

    def without_gradient_of_k(q, k, v, **options):
        return right(q, k.detach() + 0 * k, v, **options)

    monkeypatch.setitem(ops.OPERATIONS, "taylorshift", without_gradient_of_k)
    case = operation("taylorshift", "efficient")
    assert check_case(case) is None
    assert "gradient of k differs" in check_case(replace(case, backward=True))


CHOOSING = [
    (operation("kernelized+joint", "efficient"), "kernelized efficient"),
    (replace(operation("taylorshift+joint", "direct"), size=720), "taylorshift direct"),
    (replace(operation("taylorshift"), size=3000), "taylorshift efficient"),
    (Case("model", "taylorshift_vit_t", 64, form="efficient"), "taylorshift efficient"),
]


@pytest.mark.parametrize("case, form", CHOOSING, ids=lambda value: getattr(value, "label", None))
def test_the_forms_that_are_timed_are_those_that_were_checked(case, form):
    assert attention_backends(build(case)) == (form,)
    assert form in attention_backends(lambda: check_case(case))


def test_sums_over_classes_are_checked_as_they_run_at_the_size_of_the_case(monkeypatch):
    """On rows of seven classes, pairs take longer than tiles from 710 keys on."""
    right, direct = joint_position.direct_is_faster, set()
    monkeypatch.setattr(
        joint_position,
        "direct_is_faster",
        lambda *given: direct.add(right(*given)) or right(*given),
    )
    case = operation("kernelized+joint", "efficient")
    for size in (case.size, 720):
        direct.clear()
        assert check_case(replace(case, size=size)) is None and direct == {size == case.size}


FAILURES = {
    "gpu": (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
    "cpu": (RuntimeError("can't allocate memory: 9 bytes"), "out of memory"),
    "python": (MemoryError(), "out of memory"),
    "absent": (NotImplementedError("there are no kernels"), "not built: there are no kernels"),
    "failed": (Failed("killed by signal 9"), "failed: killed by signal 9"),
}


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("stage", ["check_case", "warm_up"])
def test_what_fails_is_a_row_that_says_so_and_leaves_the_others(monkeypatch, kind, stage):
    error, status = FAILURES[kind]
    right = getattr(compare, stage)

    def fail(work, *rest, **options):
        if "relu" in str(getattr(work, "name", getattr(work, "function", ""))):
            raise error
        return right(work, *rest, **options)

    monkeypatch.setattr(compare, stage, fail)
    cases = [operation("kernelized+relu", "efficient"), operation("sdpa")]
    full, good = measure_together(cases, PLAN, "sdpa")
    assert (full.status, full.samples) == (status, []) and good.ratios == [1, 1]


def test_a_row_holds_counts_and_bytes_worked_out_by_hand():
    (row,), (trained,) = (
        measure_together([operation("eager", backward=backward)], PLAN)
        for backward in (False, True)
    )
    assert row.flops == 2 * 3 * 77 * 77 * (8 + 8) and trained.flops == 3 * row.flops
    scaled_q_k_v_and_weights = 4 * 3 * (3 * 77 * 8 + 77 * 77)
    assert row.kept_bytes is None and trained.kept_bytes == scaled_q_k_v_and_weights


def test_rows_are_related_to_the_baseline_round_by_round(monkeypatch):
    # A machine that is three times slower in the second round: the ratio does not see it.
    assert ratios_of([2.0, 6.0, 2.0], [4.0, 12.0, 4.0]) == [0.5] * 3
    assert list(spread("a", [1.0, 2.0, 3.0, 4.0, 5.0]).values()) == [3.0, 2.0, 4.0]
    assert spread("a", [7.0]) == {"a_median": 7.0, "a_low": 7.0, "a_high": 7.0}
    monkeypatch.setattr(compare, "warm_up", lambda work, **options: 1.0)
    monkeypatch.setattr(
        compare, "interleaved_seconds", lambda works, *rest, **options: [[3.0, 8.0], [2.0, 4.0]]
    )
    cases = [operation("eager"), operation("sdpa")]
    rows = measure_together(cases, PLAN, "sdpa")
    assert [(row.ratios, row.baseline) for row in rows] == [([1.5, 2], "sdpa"), ([1, 1], "sdpa")]
    assert [row.ratios for row in measure_together(cases, PLAN)] == [[], []]


def test_disagreement_names_what_is_missing_or_not_a_number():
    one = torch.ones(3)
    assert disagreement({"out": one}, {"out": one}, 0.0) is None
    assert "gradient of v" in disagreement({"gradient of v": None}, {"gradient of v": one}, 1.0)
    assert "nan" in disagreement({"out": one * float("nan")}, {"out": one}, 1.0)


def test_identity_twin_has_the_parameters_of_its_model_and_leaves_attention_out():
    model = create_model("taylorshift_vit_t", depth=2, num_heads=4).eval()
    twin, image = identity_twin(model), torch.randn(2, 3, 48, 80)
    mine, own = model.state_dict(), twin.state_dict()
    assert list(mine) == list(own) and all(torch.equal(mine[name], own[name]) for name in mine)
    q, k, v = torch.randn(3, 1, 4, 5, 7)
    set_impl(twin, "eager")  # leaves it as it is
    assert all(block.attn.operation(q, k, v) is v for block in twin.blocks)
    assert not any(block.attn.operation is values_alone for block in model.blocks)
    with torch.no_grad():
        assert not torch.allclose(model(image), twin(image))


def test_a_network_is_cut_and_checkpointed_and_no_step_of_training():
    case = Case("model", "taylorshift_vit_t", 32, form="direct", depth=2, checkpointing=True)
    model = build_model(case, "meta")
    assert [block.attn.form for block in model.blocks] == ["direct"] * 2
    assert model.grad_checkpointing
    with pytest.raises(ValueError, match="expected depth at most 12 for taylorshift_vit_t, got 13"):
        build_model(replace(case, depth=13), "meta")


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a CPU is measured under Linux only")
def test_peak_memory_is_that_of_a_fresh_process(started_quickly):
    case = Case("operation", "eager", 2053, 8, heads=2)
    scores = 4 * 2 * 2053 * 2053
    assert 1.9 * scores < case_peak_bytes(case) < 2.6 * scores  # the scores and their softmax


# Targets


def test_every_figure_to_reach_is_in_the_table_with_its_bound():
    bounds = {f"{target.what}, {target.at}": target.reach for target in targets.targets()}
    assert len(bounds) == len(targets.targets()) == 37
    assert {target.at for target in targets.choose("identity.*2048 px")} == {"2048 px"}
    assert [target.case.form for target in targets.choose("DIRECT")] == ["direct"]
    for target in targets.choose("bytes kept"):  # the name exists, and so does its form
        build(replace(target.case, size=77), "meta").forward()
    with pytest.raises(ValueError, match="no regular expression"):
        targets.choose("(")


def target_of(case, most=1.0, **more):
    base = None if "measure" in more else replace(case, name="sdpa", form="auto")
    return Target(case.name, f"N = {case.size}", case, most, base, **more)


def test_ratios_of_one_size_come_from_one_run_and_are_judged_by_their_bounds(monkeypatch):
    runs = []

    def measure(cases, plan):
        runs.append(([case.label for case in cases], plan.rounds, plan.max_rounds, plan.seconds))
        seconds = {"sdpa": 4.0, "kernelized efficient": 1.0, "taylorshift efficient": 6.0}
        return [CaseResult(case, samples=[seconds.get(case.label, 1.0)] * 2) for case in cases]

    monkeypatch.setattr(targets, "measure_together", measure)
    first, second = (operation(name, "efficient") for name in ("kernelized", "taylorshift"))
    wanted = [target_of(first), target_of(replace(first, size=45), None), target_of(second, 1.4)]
    found = [(r["measured"], r["met"]) for r in measure_targets(wanted)]
    assert found == [(0.25, "yes"), (1.5, "no"), (0.25, "-")]
    assert runs == [
        (["sdpa", "kernelized efficient", "taylorshift efficient"], 5, 30, 2.0),
        (["sdpa", "kernelized efficient"], 5, 30, 2.0),
    ]


def test_figures_are_measured_and_what_cannot_be_says_why():
    def absent(case):
        raise NotImplementedError("later")

    case = operation("taylorshift", "efficient", backward=True)
    wanted = [target_of(case, 2.1, measure=targets.growth_of_bytes_kept, least=1.8)]
    kept, later = measure_targets([*wanted, target_of(case, measure=absent)], PLAN)
    assert kept["met"] == "yes" and kept["measured"] == pytest.approx(2, abs=0.2)
    assert later["met"] == "not built: later" and later["measured"] is None


def test_memory_is_related_to_the_inputs_after_the_output_is_taken_off(monkeypatch):
    monkeypatch.setattr(targets, "case_peak_bytes", lambda case: 7 * 4 * 3 * 77 * 8)
    assert targets.memory_over_inputs(operation("taylorshift", "efficient")) == 2.0


SMALL = words("--rounds 1 --seconds 0 --no-memory")


main = load_tool("benchmark")


def test_the_printed_rows_are_written_with_what_they_depend_on(tmp_path, capsys):
    csv, plot, before = tmp_path / "rows.csv", tmp_path / "rows.png", torch.get_num_threads()
    named = "operations kernelized relative+causal sdpa --width 8 --tokens 77 45 --horizon 0"
    files = words("--csv {} --plot {} --threads 3 --backward", csv, plot)
    assert main([*words(named), *SMALL, *files]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert printed.err == "" and "cpu, 3 threads" in lines[0] and "torch " in lines[0]
    assert torch.get_num_threads() == before
    labels = ["kernelized efficient", "relative+causal efficient", "sdpa"]
    cells = [line.strip("| ").split(" | ") for line in lines[4:]]
    assert [row[:2] for row in cells] == [[label, n] for n in ("77", "45") for label in labels]
    rows = read_csv(csv)
    assert [row["case"] for row in rows] == 2 * labels
    assert {(row["status"], row["baseline"], row["pass"]) for row in rows} == {
        ("ok", "sdpa", "forward+backward")
    }
    assert all(float(row["kept_bytes"]) > 0 and row["peak_bytes"] == "" for row in rows)
    assert rows[0]["command"].startswith("visionattn benchmark operations kernelized")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main([*words(named), *SMALL, "--csv", str(csv)]) == 2
    assert f"{csv} exists; pass --overwrite to replace it" in capsys.readouterr().err


def test_models_are_compared_with_twin_and_timm(capsys):
    names = ["scaleformer_vit_t", "scaleformer_vit_t+identity", "vit_tiny_patch16_224+eager"]
    flags = ["models", *names, "--img-size", "32", *SMALL]
    assert main([*flags, "--baseline", "vit_tiny_patch16_224+eager"]) == 0
    lines = capsys.readouterr().out.splitlines()[4:]
    assert [line.split(" | ")[0] for line in lines] == [f"| {name}" for name in names]
    assert all(line.endswith(" ok |") for line in lines) and " | 1 | 1 | 1 | " in lines[2]


def test_some_of_the_figures_to_reach_are_printed(tmp_path, capsys):
    kept = tmp_path / "targets.csv"
    assert main(["targets", "--only", "kept.*kernelized efficient", "--csv", str(kept)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and "| 1.8 to 2.1 | 1.996 |  |  | yes |" in lines[4]
    (row,) = read_csv(kept)
    assert row["met"] == "yes" and row["command"].startswith("visionattn benchmark targets --only")


@pytest.mark.parametrize("figure", FIGURES)
def test_figures_are_drawn_and_their_rows_written(tmp_path, capsys, monkeypatch, figure):
    def peak_here(case, device, warm):
        return measure.peak_bytes(compare.build(case))

    monkeypatch.setattr(compare, "case_peak_bytes", peak_here)
    path = tmp_path / f"{figure}.csv"
    assert main(["papers", figure, "--quick", "--csv", str(path)]) == 0
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    rows = read_csv(path)
    assert len(rows) >= 4 and {row["status"] for row in rows} == {"ok"}
    assert capsys.readouterr().out.count("\n| ") >= len(rows)


BAD_FLAGS = {
    "": "expected one of operations, models, targets, papers, loader, gpu, got ''",
    "figures": "got 'figures'",
    "operations": "nothing to measure",
    "operations sdqa": "operation 'sdqa': expected one of sdpa, eager",
    "operations sdpa+joint": "sdpa has no option 'joint'; expected causal",
    "operations kernelized+joint+axial": "expected at most one relative position",
    "operations kernelized+relu+favor": "expected at most one feature map",
    "models scaleformer_vit_q": "taylorshift_vit_s), got 'scaleformer_vit_q'",
    "models vit_tiny_patch16_224+identity": "identity needs a model of visionattn",
    "models scaleformer_vit_t+eager": "eager needs a timm vit_*",
    "models scaleformer_vit_t+heads=none": "expected options identity, eager or heads=NUMBER",
    "models scaleformer_vit_t+heads=5": "expected num_heads that divides the width 192",
    "models vit_tiny_patch16_224+heads=5": "cannot be built as a vision transformer: dim should",
    "models resnet18": "resnet18 cannot be built as a vision transformer: ",
    "models swin_tiny_patch4_window7_224": "expected a plain vision transformer of timm or visiona",
    "models vit_tiny_r_s16_p8_224": "expected a plain vision transformer of timm or visionattn",
    "models scaleformer_vit_t --img-size 65": "is not a whole number of 16-pixel patches",
    "operations sdpa --baseline eager": "baseline eager: expected one of the cases: sdpa",
    "operations sdpa --tokens 0": "tokens must be at least 1, got 0",
    "operations sdpa --tokens 99999999999999": "its inputs need ",
    "operations relative --horizon -1": "horizon must be at least 0, got -1",
    "operations sdpa window --horizon 2": "horizon has no effect without relative position",
    "operations sdpa --dtype int8": "dtype",
    "operations sdpa --seconds -1": "seconds must be at least 0, got -1",
    "operations sdpa --device cuda:99": "device 'cuda:99' is not available",
    "operations sdpa --csv nowhere/rows.csv": "nowhere for rows.csv",
    "operations sdpa --plot rows.csv": "expected --plot to end in .png, got rows.csv",
    "papers crossover --csv crossover.png": "expected --csv to end in .csv, got crossover.png",
    "operations sdpa eager --form direct": "form has no effect, because sdpa, eager have no forms",
    "operations sdpa --img-size 64": "unknown option --img-size",
    "targets --only nothing": "matches none of 37 rows",
    "papers five": "figure must be one of crossover",
    "papers crossover --csv nowhere/a.csv": "nowhere for a.csv",
    "gpu": "expected a GPU for PyTorch",
    "gpu all": "unrecognized arguments: all; --help lists the options",
    "gpu --only nothing": "rows; first: 'kernelized forward d = 64",
    "gpu --minutes -1": "--minutes must be at least 0, got -1",
    "gpu --csv nowhere/rows.csv": "nowhere for rows.csv",
    "loader digitz": "data.name must be one of digits, digits_pixel, canvas",
    "loader nowhere.yaml": "no configuration file at nowhere.yaml",
    "loader folder+root=nowhere": "nowhere",
    "loader digits+augment=three": "augment three is not available for digits",
    "loader digits+workers=3": "digits+workers=3: workers is set by --workers",
    "loader digits+light": "expected an option such as augment=none, one of task, root, labels",
    "loader canvas --img-size 64 40": "canvas of 40 pixels is too small",
    "loader digits --workers -1": "workers must be at least 0, got -1",
}


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_bad_input_ends_with_one_line_and_code_2(tmp_path, capsys, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(flags.split()) == 2
    assert_one_error(capsys, BAD_FLAGS[flags])
    assert list(tmp_path.iterdir()) == []


def rows_of(sizes, direct, efficient):
    """Records of both forms of TaylorShift."""
    return [
        record_of(CaseResult(Case("operation", "taylorshift", n, 8, form=form, heads=3),
                      samples=[y], peak_bytes=peak))
        for n, *values in zip(sizes, direct, efficient, strict=True)
        for form, y, peak in zip(("direct", "efficient"), values, (n << 14, n << 15), strict=True)
    ]  # fmt: skip


SIZES = [16, 32, 64, 128, 256, 512]


@pytest.mark.parametrize(
    ("places", "direct", "expected"),
    [
        (slice(1, None), lambda n: n**2 / 100, 100),
        # Above at 32 tokens only, and for good from 100 on.
        (slice(None), lambda n: {16: 8, 32: 640}.get(n, n**2 / 100), 100),
        (slice(1, 3), lambda n: n**2 / 100, "none up to 64"),
        (slice(3, None), lambda n: n**2 / 100, "below 128"),
        (slice(0), float, "-"),
    ],
)
def test_a_crossing_lies_where_two_power_laws_meet(places, direct, expected):
    sizes = SIZES[places]
    found = crossing(rows_of(sizes, map(direct, sizes), map(float, sizes)), milliseconds_of)
    assert found == expected if isinstance(expected, str) else found == pytest.approx(expected)


def test_crossings_stand_beside_the_published_ones_and_are_marked():
    sizes = [64, 128, 256, 512]
    rows = rows_of(sizes, [n**2 for n in sizes], [100 * n for n in sizes])
    lost = CaseResult(
        Case("operation", "taylorshift", 1024, 8, form="direct"), status="out of memory"
    )
    (record,) = crossings([*rows, record_of(lost)])
    assert record == {
        "d": 8,
        "N0 published": 73,
        "N0 measured (time)": "100",
        "N1 published": 47,
        "N1 measured (memory)": "none up to 512",
    }
    time, memory = FIGURES["crossover"].charts(rows)
    assert [mark.text for mark in time.marks] == [
        "equal at 73, published",
        "equal at 100, measured",
    ]
    assert [mark.text for mark in memory.marks] == ["equal at 47, published"]
    (time,) = FIGURES["crossover"].charts([row | {"peak_bytes": 1 << 20} for row in rows])
    assert time.title == "Head width 8: time of a forward pass"


def test_head_counts_stand_beside_the_published_ones():
    cases = [
        Case("model", "taylorshift_vit_pixel+heads=16", 32, form=form, batch=16)
        for form in ("direct", "efficient")
    ]
    rows = [
        CaseResult(cases[0], samples=[2], peak_bytes=5 << 20),
        CaseResult(cases[1], status="out of memory"),
    ]
    (record,) = heads_table([record_of(row) for row in rows])
    assert record["d"] == 16 and record["direct images/s"] == "8" and record["direct MiB"] == "5"
    assert record["efficient images/s"] is None and record["published efficient images/s"] == 9713
