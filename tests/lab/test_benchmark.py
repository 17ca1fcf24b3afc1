"""Comparing cases: what is checked, what is measured, and what a row says when something is wrong.
No test looks at a time.
"""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from timm.models import create_model

import visionattn.lab.compare as compare
import visionattn.ops as ops
from tests.helpers.tools import words
from visionattn.cli import fresh_process
from visionattn.cli.ends import Failed
from visionattn.lab.accuracy import disagreement
from visionattn.lab.cases import Case
from visionattn.lab.compare import Plan, Quartiles, check_case, measure_together, ratio_of
from visionattn.lab.memory import build, case_peak_bytes
from visionattn.lab.networks import CHECK_GRID, IdentityAttention, build_model, identity_twin
from visionattn.lab.operations import CHECK_TOKENS, grid_of
from visionattn.layers import Attention
from visionattn.layout import Grid
from visionattn.ops.choice import choose_form
from visionattn.ops.kernelized import attention as kernelized_room
from visionattn.ops.kernelized import eager as kernel_sums
from visionattn.ops.position import joint
from visionattn.ops.taylorshift import attention as taylorshift_room
from visionattn.ops.taylorshift import eager as taylor_sums
from visionattn.ops.taylorshift.features import chunk_tokens

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="memory of a CPU is measured under Linux only"
)
PLAN = Plan(rounds=2, max_rounds=2, seconds=0, memory=False)


def operation(name, form="auto", **more):
    return Case("operation", name, 77, 8, form=form, heads=3, **more)


OPERATIONS = [
    ("sdpa", "auto"),
    ("sdpa+causal", "auto"),
    ("eager", "auto"),
    ("eager-kernelized", "auto"),
    ("eager-kernelized+causal", "auto"),
    ("eager+causal", "auto"),
    ("softmax+joint", "auto"),
    ("window", "auto"),
    ("window+joint", "auto"),
    ("taylorshift", "auto"),
    ("taylorshift+temperature", "direct"),
    ("taylorshift+temperature+joint", "efficient"),
    ("taylorshift+axial+sum", "efficient"),
    ("kernelized", "direct"),
    ("kernelized+relu", "efficient"),
    ("kernelized+softmax", "efficient"),
    ("kernelized+favor", "efficient"),
    ("kernelized+causal", "efficient"),
    ("kernelized+causal", "direct"),
    ("kernelized+flat+sum", "efficient"),
    ("kernelized+causal+flat+sum", "efficient"),
    ("kernelized+causal+flat", "efficient"),
    ("kernelized+joint", "efficient"),
    ("relative", "efficient"),
    ("relative+causal", "efficient"),
    ("relative+causal", "direct"),
]


@pytest.mark.parametrize("name, form", OPERATIONS)
def test_operations_agree_with_their_definition_with_their_gradients(name, form):
    assert check_case(operation(name, form, backward=True)) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_operations_agree_in_other_dtypes(dtype):
    assert (
        check_case(operation("kernelized+joint", "efficient", dtype=dtype, backward=True)) is None
    )
    assert check_case(operation("taylorshift+temperature", "auto", dtype=dtype)) is None


MODELS = words(
    "scaleformer_vit_t scaleformer_vit_t+identity taylorshift_vit_t+heads=6 vit_tiny_patch16_224"
)


@pytest.mark.parametrize("name", MODELS)
def test_models_agree_with_their_definition(name):
    assert check_case(Case("model", name, 64)) is None


def test_a_model_agrees_with_its_definition_in_the_gradient_too():
    assert (
        check_case(Case("model", "taylorshift_vit_pixel", 32, form="efficient", backward=True))
        is None
    )


def test_a_wrong_operation_is_a_row_that_says_so_and_is_not_timed(monkeypatch):
    right = ops.kernelized_attention
    monkeypatch.setitem(
        ops.OPERATIONS, "kernelized", lambda q, k, v, **options: 1.01 * right(q, k, v, **options)
    )
    wrong, good = measure_together(
        [operation("kernelized", "efficient"), operation("sdpa")], PLAN, "sdpa"
    )
    assert wrong.status.startswith("wrong: out differs from the reference by ")
    assert wrong.seconds is None and wrong.ratio is None and wrong.samples == []
    assert good.status == "ok" and len(good.samples) == 2


def test_a_wrong_gradient_is_found_where_the_backward_pass_is_timed(monkeypatch):
    right = ops.taylorshift_attention

    def without_gradient_of_k(q, k, v, **options):
        return right(q, k.detach() + 0 * k, v, **options)

    monkeypatch.setitem(ops.OPERATIONS, "taylorshift", without_gradient_of_k)
    assert check_case(operation("taylorshift", "efficient")) is None
    assert "gradient of k differs" in check_case(
        operation("taylorshift", "efficient", backward=True)
    )


@pytest.mark.parametrize("name", ["taylorshift_vit_t", "vit_tiny_patch16_224"])
def test_a_wrong_model_is_found(monkeypatch, name):
    right = ops.taylorshift_attention
    monkeypatch.setitem(
        ops.OPERATIONS,
        "taylorshift",
        lambda q, k, v, **options: right(q.flip(2), k, v, **options),
    )
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, **options: real(q.flip(2), k, v, **options),
    )
    assert check_case(Case("model", name, 64)).startswith("wrong: out differs")


def test_every_form_is_checked_where_the_operation_chooses_one(monkeypatch):
    right, forms = ops.taylorshift_attention, []

    def record(q, k, v, form, **options):
        forms.append(form)
        return right(q, k, v, form=form, **options)

    monkeypatch.setitem(ops.OPERATIONS, "taylorshift", record)
    check_case(operation("taylorshift", "auto"))
    assert forms == ["auto", "direct", "efficient"]


@pytest.fixture
def forms_that_ran(monkeypatch):
    """The names of the forms that have run so far: of the sums over classes, of TaylorShift and of
    kernelized attention.
    """
    ran = set()

    def spy(module, name, note):
        right = getattr(module, name)

        def call(*given, **options):
            result = right(*given, **options)
            ran.add(note(result))
            ran.discard(None)
            return result

        monkeypatch.setattr(module, name, call)

    spy(joint, "direct_is_faster", lambda direct: "pairs" if direct else "tiles")
    spy(taylor_sums, "linear_form", lambda form: form)
    spy(kernel_sums, "form_taken", lambda form: form)
    for attention in (kernelized_room, taylorshift_room):
        spy(attention, "takes_pairs", lambda together: "matrix" if together else None)
    return ran


CHOOSING = [
    (
        operation("kernelized+joint", "efficient"),
        {"pairs", "efficient"},
    ),  # seven classes of rows: tiles from 710 keys on
    (replace(operation("kernelized+joint", "efficient"), size=720), {"tiles", "efficient"}),
    (replace(operation("taylorshift+joint", "direct"), size=720), {"matrix"}),
    (replace(operation("taylorshift+joint", "direct"), size=2116), {"tiles", "direct"}),
    (
        replace(operation("taylorshift+joint", "efficient", horizon=13), size=1200),
        {"pairs", "efficient"},
    ),
    (replace(operation("taylorshift"), size=33), {"matrix"}),
    (replace(operation("taylorshift"), size=3000), {"efficient"}),
    (Case("model", "taylorshift_vit_t", 64), {"matrix"}),
    (Case("model", "scaleformer_vit_t", 512), {"tiles", "efficient"}),
    (Case("model", "taylorshift_vit_t", 512, form="efficient"), {"tiles", "efficient"}),
]


@pytest.mark.parametrize("case, wanted", CHOOSING, ids=lambda value: getattr(value, "label", None))
def test_the_forms_that_are_timed_are_those_that_were_checked(forms_that_ran, case, wanted):
    build(case)()
    assert forms_that_ran == wanted
    forms_that_ran.clear()
    assert check_case(case) is None
    sums = {"pairs", "tiles"}
    assert forms_that_ran >= wanted
    assert "matrix" in wanted or forms_that_ran & sums == wanted & sums
    assert case.form == "auto" or forms_that_ran == wanted


def test_the_relative_term_is_checked_with_a_total_that_half_precision_cannot_hold():
    assert check_case(operation("relative", "efficient", dtype="float16", backward=True)) is None


def test_operations_are_checked_beyond_a_chunk_and_models_beyond_what_is_direct():
    assert max(chunk_tokens(d) for d in (8, 16, 32, 64)) < CHECK_TOKENS
    assert grid_of(CHECK_TOKENS) == Grid(33, 41)
    tokens = CHECK_GRID[0] * CHECK_GRID[1]
    assert CHECK_GRID[0] != CHECK_GRID[1]
    assert choose_form("kernelized", tokens, tokens, 64, 64, heads=3) == "efficient"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("can't allocate memory: 9 bytes"),
        MemoryError(),
    ],
    ids=["gpu", "cpu", "python"],
)
@pytest.mark.parametrize("check", [True, False])
def test_out_of_memory_is_a_row_that_says_so_and_leaves_the_others(monkeypatch, error, check):
    def fail(*tensors, **options):
        raise error

    monkeypatch.setitem(ops.OPERATIONS, "kernelized", fail)
    plan = Plan(rounds=2, max_rounds=2, seconds=0, memory=False, flops=False, check=check)
    full, good = measure_together(
        [operation("kernelized", "efficient"), operation("sdpa")], plan, "sdpa"
    )
    assert full.status == "out of memory" and full.seconds is None
    assert good.status == "ok" and good.ratio == Quartiles(1, 1, 1)


def test_what_is_not_built_is_a_row_that_says_so_and_other_errors_come_through(monkeypatch):
    def fail(*tensors, **options):
        raise NotImplementedError("there are no kernels")

    monkeypatch.setitem(ops.OPERATIONS, "kernelized", fail)
    (row,) = measure_together([operation("kernelized", "efficient")], PLAN)
    assert row.status == "not built: there are no kernels"
    monkeypatch.setitem(
        ops.OPERATIONS, "kernelized", lambda *tensors, **options: torch.ones(2) @ torch.ones(3)
    )
    with pytest.raises(RuntimeError, match="size"):
        measure_together([operation("kernelized", "efficient")], PLAN)


def test_a_row_holds_counts_and_bytes_worked_out_by_hand():
    forward, both = (
        operation("eager", backward=backward, dtype="float32") for backward in (False, True)
    )
    (row,), (trained,) = measure_together([forward], PLAN), measure_together([both], PLAN)
    assert row.flops == 2 * 3 * 77 * 77 * (8 + 8) and trained.flops == 3 * row.flops
    scaled_q_k_v_and_weights = 4 * 3 * (3 * 77 * 8 + 77 * 77)
    assert row.kept_bytes is None and trained.kept_bytes == scaled_q_k_v_and_weights


@pytest.mark.parametrize("name", ["taylorshift", "kernelized", "kernelized+causal"])
def test_operations_of_the_form_that_is_chosen_are_those_of_the_form_that_runs(monkeypatch, name):
    def counted(form, faster=None):
        for room in ("taylorshift", "kernelized"):
            for module in ("attention", "eager"):
                target = f"visionattn.ops.{room}.{module}.form_of_shapes"
                monkeypatch.setattr(target, lambda *asked, **options: faster)
        return measure_together([operation(name, form, batch=2)], plan)[0].flops

    plan = replace(PLAN, check=False, time=False)
    direct, efficient = counted("direct"), counted("efficient")
    assert direct != efficient
    assert (counted("auto", "direct"), counted("auto", "efficient")) == (direct, efficient)


def test_ratios_are_taken_round_by_round():
    # A machine that is three times slower in the second round: the ratio does not see it.
    assert ratio_of([2.0, 6.0, 2.0], [4.0, 12.0, 4.0]) == Quartiles(0.5, 0.5, 0.5)
    assert ratio_of([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5) == Quartiles(2.0, 3.0, 4.0)
    assert Quartiles.of([7.0]) == Quartiles(7.0, 7.0, 7.0)


def test_rows_are_related_to_the_baseline_of_the_same_run(monkeypatch):
    monkeypatch.setattr(compare, "warm_up", lambda work, **options: 1.0)
    monkeypatch.setattr(
        compare, "interleaved_seconds", lambda works, *rest, **options: [[3.0, 8.0], [2.0, 4.0]]
    )
    cases = [operation("eager"), operation("sdpa")]
    rows = measure_together(cases, PLAN, "sdpa")
    assert [(row.ratio.median, row.baseline) for row in rows] == [(1.75, "sdpa"), (1.0, "sdpa")]
    assert [row.ratio for row in measure_together(cases, PLAN)] == [None, None]


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
    assert all(type(block.attn) is IdentityAttention for block in twin.blocks)
    assert type(model.blocks[0].attn) is Attention
    with torch.no_grad():
        assert not torch.allclose(model(image), twin(image))
        for block in model.blocks:
            block.attn.operation = lambda q, k, v, **options: v
        torch.testing.assert_close(twin(image), model(image))
    with pytest.raises(ValueError, match="nothing to mask"):
        twin.blocks[0](torch.randn(2, 5, 192), attn_mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="got a VisionTransformer"):
        identity_twin(create_model("vit_tiny_patch16_224", depth=1))


def test_eager_models_are_timm_models_without_the_fused_operator():
    eager, fused = (
        build(Case("model", f"vit_tiny_patch16_224{more}", 32)) for more in ("+eager", "")
    )
    used = [work.function.__closure__ for work in (eager, fused)]
    models = [
        next(
            cell.cell_contents for cell in cells if isinstance(cell.cell_contents, torch.nn.Module)
        )
        for cells in used
    ]
    assert [model.blocks[3].attn.fused_attn for model in models] == [False, True]


@pytest.mark.parametrize(
    "tokens, grid", [(16384, (128, 128)), (8192, (64, 128)), (45, (5, 9)), (13, (1, 13))]
)
def test_tokens_lie_on_the_grid_nearest_to_a_square(tokens, grid):
    assert tuple(grid_of(tokens)) == grid


@linux
def test_peak_memory_is_that_of_a_fresh_process(started_quickly):
    case = Case("operation", "eager", 2053, 8, heads=2)
    scores = 4 * 2 * 2053 * 2053
    assert 1.9 * scores < case_peak_bytes(case) < 2.6 * scores  # the scores and their softmax


@pytest.mark.parametrize("code", [fresh_process.OUT_OF_MEMORY, -9])
def test_a_process_that_ran_out_of_memory_is_an_error_of_memory(monkeypatch, code):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, **options: subprocess.CompletedProcess(command, code, "", ""),
    )
    kills = iter([5, 6])
    monkeypatch.setattr(fresh_process, "memory_kills", lambda: next(kills))
    with pytest.raises(torch.OutOfMemoryError, match="sdpa at 77 does not fit"):
        case_peak_bytes(operation("sdpa"))


def test_a_process_that_was_killed_otherwise_is_no_error_of_memory(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, **options: subprocess.CompletedProcess(command, -9, "", ""),
    )
    monkeypatch.setattr(fresh_process, "memory_kills", lambda: 5)
    with pytest.raises(Failed, match="memory of sdpa failed: killed by signal 9"):
        case_peak_bytes(operation("sdpa"))


def test_a_measurement_that_failed_is_a_row_that_says_so(monkeypatch):
    def fail(case, device, warm):
        raise Failed("measuring the memory of sdpa failed: killed by signal 9")

    monkeypatch.setattr("visionattn.lab.compare.case_peak_bytes", fail)
    [row] = measure_together([operation("sdpa")], Plan(rounds=1, seconds=0.0), "sdpa")
    assert row.status == "failed: measuring the memory of sdpa failed: killed by signal 9"


def test_a_process_that_fails_otherwise_says_how(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    done = subprocess.CompletedProcess([], 1, "", "Traceback\nValueError: no such thing")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: done)
    with pytest.raises(Failed, match="failed: ValueError: no such thing"):
        case_peak_bytes(operation("sdpa"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(depth=2), "sdpa: depth is of models, and this is an operation"),
        (dict(amp="bf16"), "sdpa: amp is of models"),
        (dict(update=True), "sdpa: a step of training has a backward pass; ask for both"),
    ],
)
def test_an_operation_has_nothing_that_is_of_models(given, message):
    with pytest.raises(ValueError, match=message):
        Case("operation", "sdpa", 77, 8, **given)


def test_a_network_is_cut_and_checkpointed_and_no_step_of_training():
    case = Case("model", "taylorshift_vit_t", 32, form="direct", depth=2, checkpointing=True)
    model = build_model(case, "meta")
    assert [block.attn.form for block in model.blocks] == ["direct"] * 2
    assert model.grad_checkpointing
    with pytest.raises(ValueError, match="depth 13: taylorshift_vit_t has 12 blocks"):
        build_model(replace(case, depth=13), "meta")
    for more in (dict(amp="bf16"), dict(backward=True, update=True)):
        with pytest.raises(ValueError, match="is run by a profile alone"):
            build(replace(case, **more), "meta")
